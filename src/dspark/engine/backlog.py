"""Committed rows that a drafter has not been told of yet.

A drafter turns the features of committed rows into context. One row alone costs it nearly what a
dozen cost, and while the engine decodes plainly (drafting does not pay, `schedule.gate`) nobody
reads that context. So rows wait here and are told in one lump when a draft is wanted, or when
enough of one sequence wait; a text that ends before is never turned into context. Rounds that
draft tell every row at once, as without a backlog.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.drafters.base import Committed

ENOUGH = 256
"""Rows of a slot that are told without being asked for: a prompt chunk, a few megabytes."""


class Backlog:
    """Rows in order of arrival; those of a slot follow one another without a hole."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Committed]] = {}
        self._features: dict[int, list[Tensor]] = {}
        self.waiting: dict[int, int] = {}
        """Slot -> how many rows of it wait."""

    @property
    def full(self) -> list[int]:
        """Slots of which enough waits."""
        return [slot for slot, rows in self.waiting.items() if rows >= ENOUGH]

    def continues(self, c: Committed) -> bool:
        """Whether these rows follow what waits in their slot."""
        if c.slot not in self._rows:
            return True
        last = self._rows[c.slot][-1]
        return c.start == last.start + len(last.tokens)

    def add(self, committed: Sequence[Committed], features: Tensor) -> None:
        """Keep rows of a pass, features [N, F * D] being those of all its rows."""
        for c in committed:
            self._rows.setdefault(c.slot, []).append(c)
            self.waiting[c.slot] = self.waiting.get(c.slot, 0) + len(c.tokens)
            rows = features[c.first_row : c.first_row + len(c.tokens)]
            # A copy: a view would hold the whole pass, prompt chunks of others included.
            self._features.setdefault(c.slot, []).append(rows.clone())

    def drop(self, slot: int) -> None:
        """What waits in this slot is of no use any more."""
        for kept in (self._rows, self._features, self.waiting):
            kept.pop(slot, None)

    def take(self, slots: Sequence[int]) -> tuple[list[Committed], Tensor]:
        """What waits in these slots, one entry each with features [N, F * D]; it waits no more.

        What a verification accepted of whom is not kept; it is no matter of context.
        """
        entries: list[Committed] = []
        features: list[Tensor] = []
        first = 0
        for slot in slots:
            rows = self._rows[slot]
            tokens = tuple(t for c in rows for t in c.tokens)
            entries.append(Committed(slot, rows[0].start, tokens, first))
            features += self._features[slot]
            first += len(tokens)
            self.drop(slot)
        return entries, torch.cat(features)
