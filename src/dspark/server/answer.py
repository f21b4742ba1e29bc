"""The texts of one HTTP request, as the event loop sees them: it asks, waits, and may walk away.

A request with n choices, or with a list of prompts, is as many requests to the engine; their events
come back through one queue. `close` cancels what has not ended, so whoever opens an `Answer` closes
it, however the request ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

from starlette.types import Receive

from dspark.server.errors import of_engine
from dspark.server.figures import Figures
from dspark.server.worker import Accepted, Done, Event, Failed, Job, Tokens, Worker
from dspark.types import Request, SamplingParams


class Answer:
    """Events of several texts in the order in which they happen."""

    def __init__(
        self,
        worker: Worker,
        name: str,
        wanted: Sequence[tuple[tuple[int, ...], SamplingParams]],
        arrived: float | None = None,
        watches: bool = False,
    ) -> None:
        """Submit prompts with their parameters; `watches`: what both lanes do is told, too.
        Raises ApiError if the queue is full."""
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._early: deque[tuple[int, Event]] = deque()
        now = time.perf_counter() if arrived is None else arrived
        jobs = [
            Job(Request(f"{name}-{i}", ids, params), self._mailbox(i), Figures(now), watches)
            for i, (ids, params) in enumerate(wanted)
        ]
        worker.submit(jobs)
        self._open = {i: job.request.id for i, job in enumerate(jobs)}
        self._unseen = len(jobs)

    def _mailbox(self, index: int) -> Callable[[Event], None]:
        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

        return deliver

    async def accepted(self, timeout: float) -> None:
        """Wait until the engine has taken all texts, or for `timeout` seconds.

        Raises ApiError if it refuses one: so a bad request gets its status code and not a stream.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._unseen:
                    index, event = await self._queue.get()
                    if isinstance(event, Failed):
                        raise of_engine(event.error)
                    if isinstance(event, Accepted):
                        self._unseen -= 1
                    else:
                        self._early.append((index, event))

    async def events(self, idle: float) -> AsyncIterator[tuple[int, Tokens | Done] | None]:
        """All that happens until every text has ended; None after each `idle` seconds of silence.

        Raises ApiError when a text fails.
        """
        while self._open:
            if self._early:
                index, event = self._early.popleft()
            else:
                try:
                    async with asyncio.timeout(idle):
                        index, event = await self._queue.get()
                except TimeoutError:
                    yield None
                    continue
            if isinstance(event, Accepted):
                continue
            if isinstance(event, Failed):
                self._open.pop(index, None)
                raise of_engine(event.error)
            if isinstance(event, Done):
                self._open.pop(index, None)
            yield index, event

    async def outputs(self) -> list[Done]:
        """The finished texts, in the order in which they were asked for."""
        found: dict[int, Done] = {}
        async for item in self.events(idle=3600.0):
            if item is not None and isinstance(item[1], Done):
                found[item[0]] = item[1]
        return [found[i] for i in sorted(found)]

    def close(self) -> None:
        """Cancel what has not ended."""
        for name in self._open.values():
            self._worker.cancel(name)
        self._open.clear()


async def gone(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[None]) -> bool:
    """Do `work`, or give it up when the client hangs up; whether it was done."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for t in (task, watch):
            t.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
