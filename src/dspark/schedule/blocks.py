"""How long a block to draft, where shorter ones are cheaper.

A schedule decides behind the draft how much of it is verified, and has paid for all of it. Under
load the last positions of a block are drafted for many requests and verified for few. So the length
that is asked for is the one that would have been best for blocks of the past: of every length k the
best rate over all counts of candidates, as `policy.best_capacity` finds it, drafts of k paid for.

    every EVERY rounds whole blocks, whose survivals are remembered; between them the best length

Only rounds that are over are looked at, so no text changes its law. Requests that promise to be
reproducible always get whole blocks. Nothing is gained without a table that knows the price of a
shorter block (`CostTable.draft`); then the whole one is asked for.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from dspark.schedule.admission import Array, Drafts
from dspark.schedule.policy import Cost

EVERY = 32
POOL = 32
"""Remembered drafts."""
LEAST = 8
"""Remembered drafts without which a whole block is asked for."""
WORTH = 1.01
"""A shorter block has to be better by this much."""


class Blocks:
    """The lengths of one drafter's blocks. Ask `length` before a round, tell `observe` behind."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._past: deque[Array] = deque(maxlen=POOL)
        self._best: dict[int, int] = {}
        """By the number of requests, for EVERY rounds."""
        self._rounds = 0

    def length(self, requests: int, cap: int) -> int:
        """Drafts to ask for, of each of the `requests`; asking changes nothing that counts."""
        known = [s for s in self._past if len(s) == cap]
        if len(known) < LEAST or self._rounds >= EVERY or cap < 2:
            return cap
        if requests not in self._best:
            self._best[requests] = self._find(np.stack(known, axis=1), requests)
        return self._best[requests]

    def observe(self, drafts: Drafts, block: int, cap: int) -> None:
        """A round that asked for blocks of `block` is over; `drafts` as the schedule saw them."""
        self._rounds += 1
        if block < cap:
            return
        whole = np.flatnonzero((drafts.counts == cap) & ~drafts.pinned)
        if not len(whole):
            return
        self._past.extend(drafts.survival[:cap, r] for r in whole)
        if self._rounds >= EVERY:
            self._rounds = 0
            self._best.clear()

    def _find(self, survival: Array, requests: int) -> int:
        """The best length for blocks that survive like these [cap, n]."""
        cap, n = survival.shape
        last = requests * (1 + cap)
        rates = []
        for k in range(1, cap + 1):
            values = np.sort(survival[:k], axis=None)[::-1]
            tokens = requests * (1 + np.cumsum(values) / n)
            costs = self._cost.curve(requests, last, requests=requests, context=0, block=k)
            rows = np.arange(1, len(values) + 1) * requests / n
            rates.append(float((tokens / np.interp(rows, np.arange(len(costs)), costs)).max()))
        best = int(np.argmax(rates))
        return best + 1 if rates[best] > WORTH * rates[-1] else cap
