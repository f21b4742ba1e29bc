"""Server-sent events: one answer as a stream of messages.

While nothing is sent (a long prompt, a full queue, a long call of a tool) a comment goes out now
and then, so that proxies and clients do not take silence for death. An error behind the headers is
a message of its own. When the client hangs up, or the stream ends for any other reason, the answer
is closed, which frees its slots within one round.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dspark.server.answer import Answer, unless_gone
from dspark.server.errors import ApiError, dumps
from dspark.server.replies import Reply

KEEP_ALIVE = b": keep-alive\n\n"
END = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends an answer as it comes."""

    def __init__(self, answer: Answer, reply: Reply, choices: int, keep_alive: float) -> None:
        super().__init__(
            self._messages(answer, reply, choices, keep_alive),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        finally:
            self._answer.close()

    async def _messages(
        self, answer: Answer, reply: Reply, choices: int, keep_alive: float
    ) -> AsyncIterator[bytes]:
        sent = time.monotonic()
        try:
            async for item in answer.events(keep_alive):
                chunks = [] if item is None else reply.chunks(*item)
                for chunk in chunks:
                    yield _data(chunk)
                # Tokens may come without a message: those of a call, until it is complete.
                if not chunks and item is not None and time.monotonic() - sent < keep_alive:
                    continue
                if not chunks:
                    yield KEEP_ALIVE
                sent = time.monotonic()
            for chunk in reply.end(choices):
                yield _data(chunk)
        except ApiError as error:
            yield _data(error.body)
        yield END


def _data(value: object) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"
