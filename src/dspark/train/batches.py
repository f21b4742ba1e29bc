"""The order of the data: which sequences form a step, and which anchors each gives.

Everything is a function of the seed and of counters. The permutation of an epoch comes from (seed,
epoch), the anchors of a sequence from (seed, epoch, sequence), so a run that goes on from a state
needs no more than (epoch, offset), and so any process of a data-parallel run can work out the whole
batch and take its share. Epochs follow each other without a gap: a step may take the last sequences
of one and the first of the next, so that no step is smaller than asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.train.config import TrainSection
from dspark.train.samples import Sample


@dataclass(frozen=True)
class Place:
    """Where in the data a run stands: sequences `offset..` of `epoch` are still to come."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Item:
    """A sequence of a batch: its index among all samples, and the epoch that draws anchors."""

    sequence: int
    epoch: int


class Order:
    """All batches of a run, by place."""

    def __init__(
        self, samples: Sequence[Sample], indices: Sequence[int], config: TrainSection
    ) -> None:
        """`indices`: the samples to train on, those without an anchor are left out."""
        self._config = config
        limit = config.anchors_per_sequence or None
        counts = {i: num_anchors(samples[i], limit) for i in indices}
        self.indices = np.array([i for i in indices if counts[i]], np.int64)
        self._counts = counts
        self.anchors_per_epoch = sum(counts.values())
        self._cached: tuple[int, list[int]] = (-1, [])

    def _permutation(self, epoch: int) -> list[int]:
        if self._cached[0] != epoch:
            rng = np.random.default_rng((self._config.seed, 1, epoch))
            self._cached = (epoch, rng.permutation(self.indices).tolist())
        return self._cached[1]

    def batch(self, place: Place) -> tuple[list[Item], Place]:
        """The batch that begins at `place`, and where the next one begins."""
        c, epoch, offset = self._config, place.epoch, place.offset
        items: list[Item] = []
        anchors = 0
        while True:
            order = self._permutation(epoch)
            if offset == len(order):
                epoch, offset = epoch + 1, 0
                continue
            items.append(Item(order[offset], epoch))
            anchors += self._counts[order[offset]]
            offset += 1
            enough = (
                len(items) >= c.sequences_per_step
                if c.sequences_per_step
                else anchors >= c.anchors_per_step
            )
            if enough:
                return items, Place(epoch, offset)

    def total_steps(self) -> int:
        """Steps of the whole run."""
        c = self._config
        if c.steps:
            return c.steps
        wanted = c.anchors or max(1, round((c.epochs or 1) * self.anchors_per_epoch))
        steps, anchors, place = 0, 0, Place()
        while anchors < wanted:
            items, place = self.batch(place)
            anchors += self.anchors_of(items)
            steps += 1
        return steps

    def anchors_of(self, items: Sequence[Item]) -> int:
        return sum(self._counts[i.sequence] for i in items)


def num_anchors(sample: Sample, limit: int | None) -> int:
    """Answer tokens with at least one behind them, at most `limit`."""
    available = max(0, len(sample.tokens) - 1 - sample.start)
    return available if limit is None else min(limit, available)


def anchor_rng(seed: int, item: Item) -> np.random.Generator:
    """What draws the anchors of one sequence in one epoch (of the validation: epoch -1)."""
    return np.random.default_rng((seed, 2, item.epoch + 1, item.sequence))


def unseen_rng(seed: int, items: Sequence[Item]) -> np.random.Generator:
    """What draws how many features a batch lacks in front of its anchors."""
    return np.random.default_rng((seed, 4, items[0].epoch + 1, items[0].sequence))
