"""The drafter's process: builds the drafter it is told to, and answers until its pipe closes.

    python -m dspark.engine.lane_child PIPE FEATURES LAWS       (file descriptors)

It is started as a fresh interpreter and not forked, because threads do not survive a fork, and not
through `multiprocessing`, which would run the user's own script once more. It is in a session of
its own, so Ctrl-C is the engine's affair alone; that the engine is gone, however it went, is seen
by the end of the pipe.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from dspark.drafters.base import DraftContext
from dspark.engine import lane_wire as wire
from dspark.engine.lane import InlineLane
from dspark.types import Draft


class Child:
    """The loop, and the texts of all slots, of which messages hold only the ends."""

    def __init__(
        self, pipe: Connection[Any, Any], features: wire.Shared, laws: wire.Shared
    ) -> None:
        start: wire.Start = pipe.recv()
        self._pipe, self._features, self._laws = pipe, features, laws
        torch.set_num_threads(start.threads)
        self.lane = InlineLane(start.build(), start.pad_ms)
        self._texts: dict[int, list[int]] = {}
        self._pieces = self._law_end = 0
        self._send(wire.Ready(self.lane.cap, self.lane.feature_layers, self.lane.ahead))

    def run(self) -> None:
        """Until the pipe ends."""
        while True:
            message = self._pipe.recv()
            if isinstance(message, wire.Ask):
                self._ask(message)
            elif isinstance(message, wire.Observe):
                self._observe(message)
            elif isinstance(message, wire.Release):
                self._texts.pop(message.slot, None)
                self.lane.release(message.slot)
            elif isinstance(message, wire.Threads):
                torch.set_num_threads(message.count)
            elif isinstance(message, wire.Text):
                self._texts[message.slot] = message.tokens
            else:
                assert isinstance(message, wire.Reuse)
                text = self._texts.get(message.source, [])
                start = self.lane.reuse(message.source, message.slot, message.length)
                self._texts[message.slot] = text[:start]
                self._send(wire.Reused(start))

    def _observe(self, message: wire.Observe) -> None:
        for c in message.committed:
            text = self._texts.setdefault(c.slot, [])
            text[c.start :] = c.tokens
        if message.shape is None:
            self.lane.observe(message.committed, None)
            return
        rows, width = message.shape
        half = self._pieces % wire.HALVES * wire.FEATURE_FLOATS
        features = self._features.read(half, rows, width).clone()
        self._pieces += 1
        self._send(wire.Read(self._pieces))
        self.lane.observe(message.committed, features)

    def _ask(self, message: wire.Ask) -> None:
        for i, (ticket, wishes) in enumerate(message.batches):
            if i and self._pipe.poll():
                now = time.perf_counter()
                self._send(wire.Drafted(ticket, None, now, now, self.lane.failures))
                continue
            contexts = [self._context(w) for w in wishes]
            (own,) = self.lane.ask([contexts])
            answer = self.lane.take(own)
            assert answer is not None
            guesses = [
                self._guess(d, c, w)
                for d, c, w in zip(answer.drafts, contexts, wishes, strict=True)
            ]
            self._send(
                wire.Drafted(ticket, guesses, answer.started, answer.ended, self.lane.failures)
            )

    def _context(self, w: wire.Wish) -> DraftContext:
        tokens = [*self._texts.get(w.slot, [])[: w.start], *w.tail]
        rng = np.random.Generator(np.random.Philox(0))
        if w.rng is not None:
            rng.bit_generator.state = w.rng
        return DraftContext(w.slot, tokens, w.params, w.max_tokens, rng, w.unseen, w.others)

    def _guess(self, draft: Draft, context: DraftContext, wish: wire.Wish) -> wire.Guess:
        law, vocab = None, 0
        if draft.probs is not None:
            size, vocab = draft.probs.numel(), draft.probs.shape[1]
            if self._law_end + size > self._laws.floats:
                self._law_end = 0
            law, self._law_end = self._law_end, self._law_end + size
            self._laws.write(law, draft.probs.detach().float().cpu().contiguous())
        sure = None if draft.confidence is None else draft.confidence.tolist()
        moved: Any = None if wish.rng is None else context.rng.bit_generator.state
        return wire.Guess(draft.tokens, law, vocab, sure, draft.others, moved)

    def _send(self, message: object) -> None:
        self._pipe.send(message)


def main(arguments: Sequence[str]) -> None:
    pipe, features, laws = (int(a) for a in arguments)
    connection = Connection(pipe)
    try:
        path, sizes = connection.recv()
        sys.path[:] = path  # in front of whatever names a module of the caller's
        child = Child(connection, wire.Shared(sizes[0], features), wire.Shared(sizes[1], laws))
        child.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the engine has closed the lane, or is gone


if __name__ == "__main__":
    main(sys.argv[1:])
