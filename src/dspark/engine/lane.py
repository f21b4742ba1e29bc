"""The drafter's lane: a drafter that can be asked now and answer later.

    tickets = lane.ask([optimistic, other, ...])    # begin; the caller verifies meanwhile
    answer = lane.take(tickets[0])                  # wait for it

A lane is a `Drafter`, so the plain round runs on it unchanged. Everything that it is told is done
in the order in which it was said: rows that were observed before an `ask` are context of its
answer. The first batch of an `ask` is always drafted; those behind it only until something else is
said, because then the verification that they were a bet on has ended.

The request's drafting stream stays with the caller. A batch draws from a copy of it and the stream
moves on when the answer is taken: numbers of drafts that nobody takes are drawn again, which is no
harm, since nothing that was emitted depends on them.

`InlineLane` drafts in the caller's own thread, at once: for tests, and inside the two that gain
time: `lane_process.ProcessLane` on CPU cores, `lane_thread.ThreadLane` on a device of its own.
"""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine.failsafe import Failsafe
from dspark.types import Draft

Ticket = int
PINGS = 5


@dataclass(frozen=True)
class Answer:
    """Drafts of a batch, in its order, and when the lane worked on them (`time.perf_counter`)."""

    drafts: list[Draft]
    started: float
    ended: float


class Lane(Drafter):
    """See the module docstring."""

    restarts: int = 0
    """How often the lane died and was begun anew."""

    on_work: Callable[[Ticket, float, float], None] | None = None
    """Called with the beginning and end of the work on a batch, also of one that was dropped."""

    dead: bool = False
    """It ended and is not started again."""

    @property
    def alive(self) -> bool:
        """It can be asked now."""
        return not self.dead

    def wait(self) -> None:
        """Until it is alive. Raises ResourceError if it will not be."""

    def round_trip_ms(self) -> float:
        """To ask for nothing and be answered: what a draft costs beside the drafting."""
        times = []
        for _ in range(PINGS):
            start = time.perf_counter()
            self.take(*self.ask([[]]))
            times.append((time.perf_counter() - start) * 1e3)
        return median(times)

    @abstractmethod
    def ask(self, batches: Sequence[Sequence[DraftContext]]) -> list[Ticket]:
        """Begin to draft for each batch, in order."""

    @abstractmethod
    def take(self, ticket: Ticket) -> Answer | None:
        """The answer, waiting for it; None if there was no time for it, or the lane died. Once for
        each ticket, in any order."""

    @abstractmethod
    def drop(self, tickets: Sequence[Ticket]) -> None:
        """These are not wanted any more."""

    def set_threads(self, threads: int) -> None:
        """CPU threads to draft on from now on; one that shares the caller's has no choice."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; may be called again. A closed lane never drafts."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        (ticket,) = self.ask([contexts])
        answer = self.take(ticket)
        return [Draft()] * len(contexts) if answer is None else answer.drafts


class InlineLane(Lane):
    """Answers before it is asked for them; see the module docstring."""

    def __init__(self, drafter: Drafter, pad_ms: float = 0.0) -> None:
        """pad_ms: a batch takes at least this, to study another device's times."""
        self._inner = Failsafe(drafter)
        self._pad_s = pad_ms / 1e3
        self.cap, self.feature_layers = drafter.cap, drafter.feature_layers
        self.ahead = drafter.ahead
        self._answers: dict[Ticket, tuple[Answer, list[DraftContext], list[DraftContext]]] = {}
        self._count = 0

    @property
    def failures(self) -> int:  # type: ignore[override]
        return self._inner.failures

    def ask(self, batches: Sequence[Sequence[DraftContext]]) -> list[Ticket]:
        return [self._ask(list(contexts)) for contexts in batches]

    def _ask(self, contexts: list[DraftContext]) -> Ticket:
        started = time.perf_counter()
        copies = [replace(c, rng=copy.deepcopy(c.rng)) for c in contexts]
        drafts = self._inner.propose(copies) if copies else []
        left = started + self._pad_s - time.perf_counter()
        if copies and left > 0:
            time.sleep(left)
        self._count += 1
        answer = Answer(drafts, started, time.perf_counter())
        self._answers[self._count] = answer, contexts, copies
        if self.on_work is not None and copies:
            self.on_work(self._count, answer.started, answer.ended)
        return self._count

    def take(self, ticket: Ticket) -> Answer | None:
        answer, contexts, copies = self._answers.pop(ticket)
        for c, moved in zip(contexts, copies, strict=True):
            c.rng.bit_generator.state = moved.rng.bit_generator.state
        return answer

    def drop(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._answers.pop(ticket, None)

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        self._inner.observe(committed, features)

    def reuse(self, source: int, slot: int, length: int) -> int:
        return self._inner.reuse(source, slot, length)

    def release(self, slot: int) -> None:
        self._inner.release(slot)

    def close(self) -> None:
        self._answers.clear()
