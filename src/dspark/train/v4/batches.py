"""The order of documents for a tower: those of like length together, a function of counters alone.

An epoch is a permutation by (seed, epoch), cut into pools; a pool is sorted by length and cut into
batches of about as many tokens as asked for, padding counted; the batches of all pools are
shuffled. So little is padded, and a run that goes on needs no more than (epoch, offset).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.train.batches import Item, Place
from dspark.train.v4.layers import CHUNK

POOL = 128
"""Documents that are sorted together."""


class Buckets:
    """All batches of a run, by place."""

    def __init__(
        self, lengths: Sequence[int], indices: Sequence[int], tokens_per_step: int, seed: int
    ) -> None:
        """`lengths` of all documents, `indices` of those to train on."""
        self._padded = [-(-n // CHUNK) * CHUNK for n in lengths]
        self._indices = np.array(indices, np.int64)
        self._limit, self._seed = tokens_per_step, seed
        self._cached: tuple[int, list[list[int]]] = (-1, [])

    def epoch(self, epoch: int) -> list[list[int]]:
        """Its batches, in order."""
        if self._cached[0] != epoch:
            rng = np.random.default_rng((self._seed, 3, epoch))
            order = rng.permutation(self._indices).tolist()
            batches = []
            for first in range(0, len(order), POOL):
                batches += self._cut(order[first : first + POOL])
            self._cached = (epoch, [batches[i] for i in rng.permutation(len(batches))])
        return self._cached[1]

    def _cut(self, pool: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for i in sorted(pool, key=lambda i: self._padded[i]):
            if batches[-1] and self._padded[i] * (len(batches[-1]) + 1) > self._limit:
                batches.append([])
            batches[-1].append(i)
        return batches

    def batch(self, place: Place) -> tuple[list[Item], Place]:
        """The batch at `place`, and where the next one is."""
        batches = self.epoch(place.epoch)
        items = [Item(i, place.epoch) for i in batches[place.offset]]
        last = place.offset + 1 == len(batches)
        return items, Place(place.epoch + 1) if last else Place(place.epoch, place.offset + 1)

    def total_steps(self, epochs: int) -> int:
        return sum(len(self.epoch(e)) for e in range(epochs))
