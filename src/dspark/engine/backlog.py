"""Committed rows that a drafter has not been told of yet.

A drafter turns the features of committed rows into context. One row alone costs it nearly what a
dozen cost, and while the engine decodes plainly (drafting does not pay, `schedule.gate`) nobody
reads that context. So rows wait here and are told in one lump when a draft is wanted, or when
enough of them wait. Rounds that draft tell every row at once, as without a backlog.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.drafters.base import Committed

ENOUGH = 64
"""Rows that are told without being asked for: more would be no cheaper each, and take memory."""


class Backlog:
    """Rows in order of arrival; those of a slot follow one another without a hole."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Committed]] = {}
        self._features: dict[int, list[Tensor]] = {}

    def __len__(self) -> int:
        return sum(len(c.tokens) for rows in self._rows.values() for c in rows)

    @property
    def slots(self) -> set[int]:
        return set(self._rows)

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
            rows = features[c.first_row : c.first_row + len(c.tokens)]
            # A copy: a view would hold the whole pass, prompt chunks of others included.
            self._features.setdefault(c.slot, []).append(rows.clone())

    def drop(self, slot: int) -> None:
        """What waits in this slot is of no use any more."""
        self._rows.pop(slot, None)
        self._features.pop(slot, None)

    def take(self) -> tuple[list[Committed], Tensor]:
        """All of it, one entry a slot with its features [N, F * D], and nothing waits any more.

        What a verification accepted of whom is not kept; it is no matter of context.
        """
        entries, first = [], 0
        for slot, rows in self._rows.items():
            tokens = tuple(t for c in rows for t in c.tokens)
            entries.append(Committed(slot, rows[0].start, tokens, first))
            first += len(tokens)
        features = torch.cat([f for part in self._features.values() for f in part])
        self._rows, self._features = {}, {}
        return entries, features
