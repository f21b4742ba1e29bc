"""What passes between an engine and its drafter's process: small messages by a pipe, numbers in
bulk through memory that both map.

    to the lane   Start, Threads, Text, Observe, Ask, Reuse, Release
    from it       Ready, Read, Drafted, Reused

Two files without a name are mapped by both sides, so nothing is left behind by whoever dies:

* *features*, written by the engine: two halves that take turns, each free again when the lane says
  how many pieces it has read;
* *laws*, written by the lane: q of sampled drafts, in a ring that is large enough for all answers
  that may be unread at a time. The engine copies what it reads.

Pages are taken when they are first written: greedy texts never touch the second one.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.types import SamplingParams

FEATURE_FLOATS = 4 * 2**20
"""Of one half: some hundred rows of several layers."""
HALVES = 2
SPARE_ANSWERS = 16
"""Answers to single requests that may be unread beside one to all slots."""


@dataclass(frozen=True)
class Start:
    """What to build, and how; in front of it come (sys.path, sizes of the shared files)."""

    build: Callable[[], Drafter]
    threads: int
    pad_ms: float


@dataclass(frozen=True)
class Ready:
    cap: int
    feature_layers: tuple[int, ...]
    ahead: bool


@dataclass(frozen=True)
class Wish:
    """A `DraftContext` without the text, of which the lane knows the first `start` tokens."""

    slot: int
    start: int
    tail: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    rng: dict[str, Any] | None
    """State of the drafting stream; None where nothing is drawn."""
    unseen: int
    others: bool


@dataclass(frozen=True)
class Ask:
    batches: list[tuple[int, list[Wish]]]
    """(ticket, wishes); behind the first one only while nothing else arrives."""


@dataclass(frozen=True)
class Observe:
    """features: rows [rows, width] in the next half, or None if there are none."""

    committed: list[Committed]
    shape: tuple[int, int] | None


@dataclass(frozen=True)
class Read:
    pieces: int
    """Of features, read since the start."""


@dataclass(frozen=True)
class Text:
    """The committed tokens of a slot, for a lane that was begun anew."""

    slot: int
    tokens: list[int]


@dataclass(frozen=True)
class Reuse:
    source: int
    slot: int
    length: int


@dataclass(frozen=True)
class Reused:
    start: int


@dataclass(frozen=True)
class Release:
    slot: int


@dataclass(frozen=True)
class Threads:
    count: int


@dataclass(frozen=True)
class Guess:
    """A `Draft`; its law is [len(tokens), V] in the ring from `law` on."""

    tokens: tuple[int, ...]
    law: int | None
    vocab: int
    confidence: list[float] | None
    others: tuple[int, ...]
    rng: dict[str, Any] | None


@dataclass(frozen=True)
class Drafted:
    ticket: int
    guesses: list[Guess] | None
    """None: there was no time."""
    started: float
    ended: float
    failures: int
    """Of the drafter, all in all."""


class Shared:
    """A file without a name, mapped as fp32."""

    def __init__(self, floats: int, fd: int | None = None) -> None:
        """`fd`: one that another process made; it is closed with the map."""
        self._file: Any = None
        if fd is None:
            if hasattr(os, "memfd_create"):
                fd = os.memfd_create("dspark")
            else:  # not Linux
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the map)
                fd = self._file.fileno()
            os.ftruncate(fd, 4 * floats)
        self.fd = fd
        self.floats = floats
        self._map = mmap.mmap(fd, 4 * floats)
        self.array = np.frombuffer(self._map, np.float32)

    def write(self, at: int, rows: Tensor) -> None:
        """Contiguous fp32 rows, from float `at` on."""
        self.array[at : at + rows.numel()] = rows.numpy().ravel()

    def read(self, at: int, rows: int, width: int) -> Tensor:
        """[rows, width], still the shared memory."""
        return torch.from_numpy(self.array[at : at + rows * width].reshape(rows, width))

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last tensor over it."""
        if self.fd < 0:
            return
        if self._file is None:
            os.close(self.fd)
        else:
            self._file.close()
        self.fd = -1


def pieces(
    committed: Sequence[Committed], most: int
) -> Iterator[tuple[list[Committed], list[int]]]:
    """Committed rows in pieces of at most `most`: entries that count their rows inside the piece,
    and which rows of the pass those are. What was accepted of a divided entry is left out."""
    part: list[Committed] = []
    rows: list[int] = []
    for c in committed:
        done = 0
        while done < len(c.tokens):
            if len(rows) == most:
                yield part, rows
                part, rows = [], []
            n = min(most - len(rows), len(c.tokens) - done)
            whole = n == len(c.tokens)
            verdict = (c.verified, c.accepted) if whole else (None, None)
            tokens = c.tokens[done : done + n]
            part.append(Committed(c.slot, c.start + done, tokens, len(rows), *verdict))
            rows += range(c.first_row + done, c.first_row + done + n)
            done += n
    if rows:
        yield part, rows


def wish(c: DraftContext) -> Wish:
    """What a drafter may look at: how to draw, and no more of the parameters (a grammar lives in
    one process)."""
    p = c.params
    drawn = SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
    start = len(c.tokens) - 1 - c.unseen
    return Wish(
        c.slot,
        start,
        tuple(c.tokens[start:]),
        drawn,
        c.max_tokens,
        None if p.is_greedy else dict(c.rng.bit_generator.state),
        c.unseen,
        c.others,
    )
