"""A drafter in a process of its own: a lane that drafts while the engine's process verifies.

Threads would not do: both lanes run as much Python as arithmetic, and the interpreter's lock lets
one of them run at a time. So the drafter gets an interpreter, threads and the weights it needs of
its own (`lane_child`); `build` makes it there, so it must be picklable: a function of a module, or
a `functools.partial` of one.

*It may die at any time.* Whatever was asked of it is answered by "nothing", which the engine takes
as a round without drafts, and a new process is begun while texts go on; `restarts` counts, the log
says so. The new drafter is told the committed tokens of every slot. Features of past rows are gone,
so a drafter that lives on them starts cold in texts that were in flight: it guesses worse there,
and nothing else. Prefix reuse does not carry such a context on. After MAX_RESTARTS the lane stays
closed and the engine decodes plainly. One that lives and is silent while it is waited for, for
SILENT_SECONDS and for SILENT_DRAFTS times its longest draft, is taken for dead and killed.

*It leaves nothing behind.* The process ends when its pipe does: on `close`, when the lane is
forgotten, and when the engine's process ends in whatever way.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine import lane_wire as wire
from dspark.engine.lane import Answer, Lane, Ticket
from dspark.errors import ResourceError
from dspark.types import Draft

log = logging.getLogger(__name__)
MAX_RESTARTS = 8
START_SECONDS = 120.0
"""A process that has built no drafter by then will not."""
SILENT_SECONDS, SILENT_DRAFTS = 10.0, 20
GONE = (EOFError, BrokenPipeError, ConnectionResetError)


@dataclass(frozen=True)
class _Asked:
    contexts: list[DraftContext]
    known: list[DraftContext]
    """Of these, those whose rows the process has been told of; the others get no draft."""


class ProcessLane(Lane):
    """See the module docstring."""

    def __init__(
        self,
        build: Callable[[], Drafter],
        *,
        num_slots: int,
        vocab_size: int,
        max_draft: int,
        threads: int = 1,
        pad_ms: float = 0.0,
    ) -> None:
        """Begin the process, without waiting for its drafter: until it is `alive` nothing is asked
        of it but to `wait`.

        max_draft   tokens of a draft at most;  threads  CPU threads of the process
        pad_ms      a batch takes at least this (`InlineLane`)
        """
        self._start = wire.Start(build, threads, pad_ms)
        answers = num_slots + wire.SPARE_ANSWERS
        self._sizes = wire.HALVES * wire.FEATURE_FLOATS, answers * max(max_draft, 1) * vocab_size
        self._asked: dict[Ticket, _Asked] = {}
        """Batches whose answers were not read yet."""
        self._answers: dict[Ticket, tuple[Answer, list[tuple[DraftContext, Any]]] | None] = {}
        """With the state of each drafting stream behind it."""
        self._dropped: set[Ticket] = set()
        self._texts: dict[int, list[int]] = {}
        self._told: dict[int, int] = {}
        """Slot -> rows that the present process was told of, or has taken over."""
        self._cold: set[int] = set()
        """Slots whose first rows the present process has never seen."""
        self._count = 0
        self.failures = self._failed_before = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._reused: int | None = None
        self._ever_ready = False
        self._longest = 0.0
        """Seconds of a draft."""
        self._begin()

    def wait(self) -> None:
        """Until its drafter is there. Raises ResourceError if the process does not get so far; it
        has said why on standard error."""
        deadline = time.perf_counter() + START_SECONDS
        while not self._ever_ready:
            if self.process is None or time.perf_counter() > deadline:
                self.close()
                raise ResourceError(
                    "the drafter's process did not start; what it says stands above. Take"
                    " --pipeline off to draft in the engine's own process"
                )
            self._read(0.1)

    # -- the process -----------------------------------------------------------------------------

    def _begin(self) -> None:
        self._is_ready = False
        ours, theirs = Pipe()
        self._pipe: Connection[Any, Any] = ours
        self._features, self._laws = (wire.Shared(n) for n in self._sizes)
        fds = theirs.fileno(), self._features.fd, self._laws.fd
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dspark.engine.lane_child", *(str(fd) for fd in fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # it is the caller's
                env={**os.environ, "OMP_NUM_THREADS": str(self._start.threads)},
                start_new_session=True,
            )
        except OSError as e:
            log.warning("no process for the drafter can be started: %s", e.strerror)
            for part in (ours, theirs, self._features, self._laws):
                part.close()
            return
        theirs.close()
        self._finalizer = weakref.finalize(self, _end, self.process, ours)
        self._pieces_sent = self._pieces_read = 0
        self._send((list(sys.path), self._sizes))
        self._send(self._start)

    def _send(self, message: object) -> None:
        """Messages to a process that is gone are lost; that it is gone is seen here."""
        if self.process is None:
            return
        try:
            self._pipe.send(message)
        except GONE:
            self._died()

    def _read(self, timeout: float) -> bool:
        """Take in one message if one comes within `timeout` seconds."""
        if self.process is None:
            return False
        try:
            if not self._pipe.poll(timeout):
                return False
            message = self._pipe.recv()
        except GONE:
            self._died()
            return False
        if isinstance(message, wire.Ready):
            self.cap, self.feature_layers = message.cap, message.feature_layers
            self.ahead, self._is_ready, self._ever_ready = message.ahead, True, True
            for slot, text in self._texts.items():
                self._send(wire.Text(slot, text))
        elif isinstance(message, wire.Read):
            self._pieces_read = message.pieces
        elif isinstance(message, wire.Drafted):
            self._drafted(message)
        else:
            assert isinstance(message, wire.Reused)
            self._reused = message.start
        return True

    def _await(self, done: Callable[[], bool]) -> bool:
        """Read until `done`; False if the process is gone before. One that is silent is killed."""
        heard = time.perf_counter()
        while self.process is not None and self._is_ready:
            if done():
                return True
            patience = max(SILENT_SECONDS, SILENT_DRAFTS * self._longest)
            if self._read(min(1.0, patience)):
                heard = time.perf_counter()
            elif time.perf_counter() - heard > patience:
                self._died(f"was silent for {patience:.3g} s")
        return False

    def _died(self, how: str = "ended") -> None:
        if self.process is None:
            return
        code = self._stop()
        self._answers |= dict.fromkeys(self._asked, None)
        self._asked.clear()
        self._cold |= set(self._texts)
        self._told.clear()
        self._failed_before = self.failures
        self._dropped.clear()
        if not self._ever_ready or self.restarts >= MAX_RESTARTS:
            log.warning(
                "the drafter's process %s (exit code %s) and is not started again: plain decoding"
                " from here on",
                how,
                code,
            )
            return
        self.restarts += 1
        log.warning(
            "the drafter's process %s (exit code %s) and is started again, restart %d: texts go on,"
            " without drafts until it is back",
            how,
            code,
            self.restarts,
        )
        self._begin()

    def _stop(self) -> int | None:
        process, self.process = self.process, None
        assert process is not None
        self._finalizer.detach()
        code = _end(process, self._pipe)
        self._features.close()
        self._laws.close()
        return code

    def set_threads(self, threads: int) -> None:
        if threads != self._start.threads:
            self._start = replace(self._start, threads=threads)  # also of one begun anew
            if self.alive:
                self._send(wire.Threads(threads))

    def close(self) -> None:
        if self.process is not None:
            self._stop()
        self._answers |= dict.fromkeys(self._asked, None)
        self._asked.clear()

    @property
    def dead(self) -> bool:  # type: ignore[override]
        return self.process is None

    @property
    def alive(self) -> bool:
        """As far as is known."""
        while self._read(0):
            pass
        return self.process is not None and self._is_ready

    # -- drafting --------------------------------------------------------------------------------

    def ask(self, batches: Sequence[Sequence[DraftContext]]) -> list[Ticket]:
        alive = self.alive
        first = self._count + 1
        wanted: list[tuple[Ticket, list[wire.Wish]]] = []
        for contexts in batches:
            self._count += 1
            known = [c for c in contexts if self._told.get(c.slot) == len(c.tokens) - 1 - c.unseen]
            if alive:
                self._asked[self._count] = _Asked(list(contexts), known)
            else:
                self._answers[self._count] = None
            wanted.append((self._count, [wire.wish(c) for c in known]))
        if alive:
            self._send(wire.Ask(wanted))
        return list(range(first, self._count + 1))

    def take(self, ticket: Ticket) -> Answer | None:
        self._await(lambda: ticket not in self._asked)
        found = self._answers.pop(ticket)
        if found is None:
            return None
        answer, moved = found
        for c, state in moved:
            c.rng.bit_generator.state = state
        return answer

    def drop(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._answers.pop(ticket, None)
            if ticket in self._asked:
                self._dropped.add(ticket)

    def _drafted(self, message: wire.Drafted) -> None:
        asked = self._asked.pop(message.ticket)
        self.failures = self._failed_before + message.failures
        self._longest = max(self._longest, message.ended - message.started)
        if self.on_work is not None and message.guesses:
            self.on_work(message.ticket, message.started, message.ended)
        if message.ticket in self._dropped:
            self._dropped.discard(message.ticket)
            return
        self._answers[message.ticket] = None
        if message.guesses is None:
            return
        drafts = {c.slot: self._draft(g) for c, g in zip(asked.known, message.guesses, strict=True)}
        moved = [
            (c, g.rng)
            for c, g in zip(asked.known, message.guesses, strict=True)
            if g.rng is not None
        ]
        whole = [drafts.get(c.slot, Draft()) for c in asked.contexts]
        self._answers[message.ticket] = Answer(whole, message.started, message.ended), moved

    def _draft(self, guess: wire.Guess) -> Draft:
        law = None
        if guess.law is not None:
            law = self._laws.read(guess.law, len(guess.tokens), guess.vocab).clone()
        sure = None if guess.confidence is None else torch.tensor(guess.confidence)
        return Draft(guess.tokens, law, sure, guess.others)

    # -- what it is told -------------------------------------------------------------------------

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        for c in committed:
            text = self._texts.setdefault(c.slot, [])
            text[c.start :] = c.tokens
            if c.start == 0:
                self._cold.discard(c.slot)
        if not self.alive:
            self._cold |= {c.slot for c in committed}
            return
        for c in committed:
            if c.start and c.slot not in self._told:  # a hole in front of it: known from here on
                self._cold.add(c.slot)
            self._told[c.slot] = c.start + len(c.tokens)
        if features is None:
            self._send(wire.Observe(list(committed), None))
            return
        for part, rows in wire.pieces(committed, wire.FEATURE_FLOATS // features.shape[1]):
            if not self._await(lambda: self._pieces_sent - self._pieces_read < wire.HALVES):
                return
            half = self._pieces_sent % wire.HALVES * wire.FEATURE_FLOATS
            held = features[torch.tensor(rows, device=features.device)].float().cpu()
            self._features.write(half, held)
            self._pieces_sent += 1
            self._send(wire.Observe(part, (held.shape[0], held.shape[1])))

    def reuse(self, source: int, slot: int, length: int) -> int:
        if not self.alive or source in self._cold:
            return 0
        self._reused = None
        self._send(wire.Reuse(source, slot, length))
        if not self._await(lambda: self._reused is not None) or self._reused is None:
            return 0
        if self._reused:
            self._texts[slot] = self._texts.get(source, [])[: self._reused]
            self._told[slot] = self._reused
            self._cold.discard(slot)
        return self._reused

    def release(self, slot: int) -> None:
        self._texts.pop(slot, None)
        self._told.pop(slot, None)
        self._cold.discard(slot)
        if self.alive:
            self._send(wire.Release(slot))


def _end(process: subprocess.Popen[bytes], pipe: Connection[Any, Any]) -> int | None:
    """Close the pipe, which ends the process; one that computes on is killed."""
    pipe.close()
    try:
        return process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
