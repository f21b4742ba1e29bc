"""Committed rows that a drafter has not been told of yet.

A drafter turns the features of committed rows into context. One row alone costs it nearly what a
dozen cost, and while the engine decodes plainly (drafting does not pay, `schedule.gate`) nobody
reads that context. So rows wait here and are told in one lump when a draft is wanted of their
sequence, or when enough of it wait; a text that ends before is never turned into context. What
drafts in every round is told every row at once, as without a backlog.

Waiting costs a plain round next to nothing: a pass of few rows is kept whole, by reference, until
the last of its rows is told or dropped, and nothing is copied. Not promised: that catching up is
quick. ENOUGH rows of each sequence may be due at once where drafting begins to pay again; a probe
asks about one sequence and waits for that one only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dspark.drafters.base import Committed

ENOUGH = 1024
"""Rows of a slot that are told without being asked for: some megabytes, a tenth of a second."""
SMALL = 64
"""Rows of a pass that is kept whole. Of a larger one, with prompt chunks, each slot copies its own:
the chunk would live as long as the longest text beside it."""

Waiting = list[tuple[Committed, Tensor]]
"""Rows of a slot in order of position, and the features that `first_row` counts in."""


class Backlog:
    """Rows in order of arrival; those of a slot follow one another without a hole."""

    def __init__(self) -> None:
        self._rows: defaultdict[int, Waiting] = defaultdict(list)
        self.waiting: dict[int, int] = {}
        """Slot -> how many rows of it wait."""

    def continues(self, c: Committed) -> bool:
        """Whether these rows follow what waits in their slot."""
        if c.slot not in self.waiting:
            return True
        last = self._rows[c.slot][-1][0]
        return c.start == last.start + len(last.tokens)

    def add(self, committed: Sequence[Committed], features: Tensor) -> list[int]:
        """Keep rows of a pass, features [N, F * D] being those of all its rows. Returns the slots
        of which enough waits."""
        full = []
        small = len(features) <= SMALL
        for c in committed:
            n = len(c.tokens)
            kept = (c, features) if small else _apart(c, features)
            self._rows[c.slot].append(kept)
            count = self.waiting[c.slot] = self.waiting.get(c.slot, 0) + n
            if count >= ENOUGH:
                full.append(c.slot)
        return full

    def drop(self, slot: int) -> None:
        """What waits in this slot is of no use any more."""
        self._rows.pop(slot, None)
        self.waiting.pop(slot, None)

    def take(self, slots: Sequence[int]) -> tuple[list[Committed], Tensor]:
        """What waits in these slots, one entry each with features [N, F * D]; it waits no more.

        What a verification accepted of whom is not kept; it is no matter of context.
        """
        entries: list[Committed] = []
        features: list[Tensor] = []
        first = 0
        for slot in slots:
            rows = self._rows[slot]
            tokens = tuple(t for c, _ in rows for t in c.tokens)
            entries.append(Committed(slot, rows[0][0].start, tokens, first))
            features += [f[c.first_row : c.first_row + len(c.tokens)] for c, f in rows]
            first += len(tokens)
            self.drop(slot)
        return entries, torch.cat(features)

    def set_aside(self, slot: int, end: int) -> Waiting:
        """Leave only the rows in front of position `end` waiting; returns those behind, for
        `put_back`."""
        rows = self._rows.pop(slot, [])
        self.waiting.pop(slot, None)
        front: Waiting = []
        behind: Waiting = []
        for c, f in rows:
            n = min(max(end - c.start, 0), len(c.tokens))
            if n:
                front.append((replace(c, tokens=c.tokens[:n]), f))
            if n < len(c.tokens):
                rest = replace(c, start=c.start + n, tokens=c.tokens[n:], first_row=c.first_row + n)
                behind.append((rest, f))
        self.put_back(slot, front)
        return behind

    def put_back(self, slot: int, rows: Waiting) -> None:
        """These wait (again), behind nothing."""
        if rows:
            self._rows[slot] = rows
            self.waiting[slot] = sum(len(c.tokens) for c, _ in rows)


def _apart(c: Committed, features: Tensor) -> tuple[Committed, Tensor]:
    """The rows of one slot without those beside them in the pass."""
    rows = features[c.first_row : c.first_row + len(c.tokens)].clone()
    return replace(c, first_row=0), rows
