"""A drafter in a thread of this process: the lane for a device of its own.

A GPU computes while Python goes on, so its lane needs no second interpreter: a thread that starts
the drafter's kernels is enough, in a CUDA stream beside the target's, or on another device. Between
CPU cores that is different: both lanes run as much Python as arithmetic, one at a time, and
`lane_process.ProcessLane` is the lane that gains time there.

*Order on a GPU.* Nothing here waits for a device in the engine's thread. Features are copied, where
they must be, behind the pass that makes them, and an event behind that copy is what the drafter's
stream waits for; another one behind a draft is what the target's stream waits for before it reads
the draft's law. Tensors that two streams use are told to the allocator, so that their memory is not
given away while the other one still reads it.

*Failures.* What a drafter raises costs drafts and no text (`failsafe`). An error that is not
survived there, a broken assertion say, is logged, and the lane is dead from then on: what is asked
of it is answered by nothing. A thread cannot be killed: one that hangs keeps the engine waiting.

The drafter is the caller's until it is handed over, and the thread's from then on. It shares the
weights of its target, which nobody changes; CPU threads are a setting of the whole process.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine.lane import Answer, InlineLane, Lane, Ticket

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _Made:
    """An answer of the thread, and what must have happened before its tensors are read."""

    answer: Answer
    ready: torch.cuda.Event | None


@dataclass(frozen=True)
class _Asked:
    contexts: list[DraftContext]
    copies: list[DraftContext]
    """With texts and streams of their own: the caller's go on."""
    made: Future[_Made | None]


class ThreadLane(Lane):
    """See the module docstring."""

    def __init__(
        self,
        drafter: Drafter,
        target_device: torch.device,
        draft_device: torch.device,
        pad_ms: float = 0.0,
    ) -> None:
        """`drafter` computes on `draft_device`; features come from `target_device`, laws go there.
        pad_ms: a batch takes at least this (`InlineLane`)."""
        self._inner = InlineLane(drafter, pad_ms)
        self.cap, self.feature_layers = drafter.cap, drafter.feature_layers
        self.ahead, self.grows = drafter.ahead, drafter.grows
        self.dead = False
        """Nothing is drafted any more."""
        self._crashes = 0
        self._theirs, self._ours = target_device, draft_device
        self._asked: dict[Ticket, _Asked] = {}
        self._worked: deque[tuple[Ticket, float, float]] = deque()
        self._count = self._said = 0
        self._stream: torch.cuda.Stream | None = None
        if draft_device.type == "cuda":
            self._stream = torch.cuda.Stream(draft_device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(draft_device))  # the weights
        # A thread's current stream is its own affair, so it is set once and for all.
        enter = None if self._stream is None else partial(torch.cuda.set_stream, self._stream)
        self._thread = ThreadPoolExecutor(1, "drafter", enter)

    @property
    def failures(self) -> int:  # type: ignore[override]
        return self._inner.failures + self._crashes

    # -- drafting --------------------------------------------------------------------------------

    def ask(self, batches: Sequence[Sequence[DraftContext]]) -> list[Ticket]:
        self._said += 1
        first = self._count + 1
        for i, contexts in enumerate(batches):
            self._count += 1
            copies = [
                replace(c, tokens=tuple(c.tokens), rng=copy.deepcopy(c.rng)) for c in contexts
            ]
            made = self._begin(self._draft, self._count, copies, self._said if i else None)
            self._asked[self._count] = _Asked(list(contexts), copies, made)
        return list(range(first, self._count + 1))

    def take(self, ticket: Ticket) -> Answer | None:
        asked = self._asked[ticket]
        made = None if asked.made.cancelled() else asked.made.result()
        del self._asked[ticket]
        self._report()
        if made is None:
            return None
        for c, moved in zip(asked.contexts, asked.copies, strict=True):
            c.rng.bit_generator.state = moved.rng.bit_generator.state
        if made.ready is not None:
            torch.cuda.current_stream(self._ours).wait_event(made.ready)
        drafts = [replace(d, probs=self._handed_over(d.probs)) for d in made.answer.drafts]
        return replace(made.answer, drafts=drafts)

    def drop(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            asked = self._asked.pop(ticket, None)
            if asked is not None:
                asked.made.cancel()

    def _handed_over(self, law: Tensor | None) -> Tensor | None:
        """A draft's law where the target judges by it."""
        if law is None:
            return None
        if self._stream is not None:
            law.record_stream(torch.cuda.current_stream(self._ours))
        return law.to(self._theirs, non_blocking=self._theirs.type == "cuda")

    def _report(self) -> None:
        """What the thread has worked on, told in the caller's thread."""
        while self._worked:
            done = self._worked.popleft()
            if self.on_work is not None:
                self.on_work(*done)

    # -- what it is told -------------------------------------------------------------------------

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        ready = None
        if features is not None:
            features = features.to(self._ours, non_blocking=True)
            # Between two GPUs the stream that receives waits for the copy, so its event will do.
            ready = _event(self._theirs if self._stream is None else self._ours)
        self._say(self._observe, list(committed), features, ready)

    def reuse(self, source: int, slot: int, length: int) -> int:
        return self._say(self._inner.reuse, source, slot, length).result() or 0

    def release(self, slot: int) -> None:
        self._say(self._inner.release, slot)

    def close(self) -> None:
        self.dead = True
        self._thread.shutdown(cancel_futures=True)

    # -- the thread ------------------------------------------------------------------------------

    def _say(self, work: Callable[..., T], *arguments: object) -> Future[T | None]:
        """Begin something that ends the time for bets."""
        self._said += 1
        return self._begin(work, *arguments)

    def _begin(self, work: Callable[..., T], *arguments: object) -> Future[T | None]:
        if self.dead:
            nothing: Future[T | None] = Future()
            nothing.set_result(None)
            return nothing
        return self._thread.submit(self._survive, work, *arguments)

    def _survive(self, work: Callable[..., T], *arguments: object) -> T | None:
        if self.dead:
            return None
        try:
            return work(*arguments)
        except BaseException as e:
            self.dead = True
            self._crashes += 1
            log.warning(
                "the drafter's thread failed (%s: %s) and drafts no more: plain decoding from here"
                " on",
                type(e).__name__,
                e,
                exc_info=e,
            )
            return None

    def _draft(self, ticket: Ticket, copies: list[DraftContext], said: int | None) -> _Made | None:
        """None if something was said since `said`: the pass that this was a bet on has ended."""
        if said is not None and said != self._said:
            return None
        (own,) = self._inner.ask([copies])
        answer = self._inner.take(own)
        assert answer is not None
        if copies:
            self._worked.append((ticket, answer.started, answer.ended))
        return _Made(answer, _event(self._ours))

    def _observe(
        self, committed: list[Committed], features: Tensor | None, ready: torch.cuda.Event | None
    ) -> None:
        if ready is not None and features is not None:
            if self._stream is None:
                ready.synchronize()  # the drafter computes on the CPU; nobody but it waits
            else:
                self._stream.wait_event(ready)
                features.record_stream(self._stream)
        self._inner.observe(committed, features)


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Behind what the caller's stream on a GPU was given so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
