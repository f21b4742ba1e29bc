"""Watching a running engine: are the costs still those of the table, the confidences still honest?

`LiveCost` compares each round's times with the table's, part by part. The median of the last rounds
says how much slower or faster a part is now; medians shrug at a garbage collection or a neighbour's
burst. If it leaves [2/3, 4/3] the costs in use are scaled (a drafter that became twice as slow
relative to the pass changes the schedule at once), and if it stays outside for 50 rounds the table
is called stale. A factor is all that can be told from live rounds; a changed *shape* needs a new
table, so the owner of the engine has it measured again when nothing is in flight (`LLM`).

`Acceptance` keeps what was accepted at each position, for drafters without a confidence head: the
past is their confidence. Evidence fades towards a prior, so that a position that was given up is
tried again some day.

`Drift` compares predicted with realised survival by position in blocks of rounds, and speaks up
when the difference is larger than what calibration left over and chance explains.

All of them know the past only, so a scheduler may use them freely (see `admission`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from dspark.schedule.admission import Array
from dspark.schedule.cost import CostTable

OFF = 1 / 3
"""Live times may differ from the table's by this share."""
STALE_ROUNDS = 50
WINDOW = 21
"""Rounds of the running median: a lasting change is seen after 11, ten outliers are not."""
SHARE = 0.05
"""Parts below this share of a round are too small to judge."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one round, measured or foreseen."""

    draft: float
    verify: float
    other: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.other


class LiveCost:
    """A cost table that follows the machine; takes its place in front of a scheduler."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.current = table
        """The table in the machine's present units."""
        self.stale = False
        """Some part has been off by more than a third for 50 rounds."""
        self.scales = {"draft": 1.0, "verify": 1.0, "other": 1.0}
        """Live over table, as far as it is applied in `current`."""
        self._ratios = {name: deque[float](maxlen=WINDOW) for name in self.scales}
        self._off = 0
        self._settling = -1

    def curve(
        self, first: int, last: int, *, requests: int = 1, context: float = 0.0, block: int = 0
    ) -> list[float]:
        return self.current.curve(first, last, requests=requests, context=context, block=block)

    def foreseen(
        self,
        rows: int,
        requests: int,
        context: float,
        block: int,
        drafting: int | None = None,
    ) -> Times:
        """What the table, unscaled, says of a round; `drafting` of the requests draft, None: all"""
        t = self.table
        drafts = requests if drafting is None else drafting
        return Times(t.draft_ms(drafts, block), t.verify_ms(rows, context), t.other_ms(requests))

    def present(self, rows: int, requests: int, context: float, block: int) -> Times:
        """The same at the machine's present speed: times the running medians, however small the
        difference."""
        t = self.foreseen(rows, requests, context, block)
        d, v, o = (self._ratio(name) for name in ("draft", "verify", "other"))
        return Times(t.draft * d, t.verify * v, t.other * o)

    def _ratio(self, name: str) -> float:
        """Live over table of the last rounds; 1 until there are some."""
        ratios = self._ratios[name]
        return median(ratios) if len(ratios) > WINDOW // 2 else 1.0

    def observe(
        self,
        live: Times,
        rows: int,
        requests: int,
        context: float,
        block: int,
        drafting: int | None = None,
    ) -> None:
        """A round took `live`; `block` 0 if nothing was drafted."""
        foreseen = self.foreseen(rows, requests, context, block, drafting)
        for name, recent in self._ratios.items():
            expected = getattr(foreseen, name)
            if expected >= SHARE * foreseen.total:
                recent.append(getattr(live, name) / expected)
        ratios = {n: median(r) for n, r in self._ratios.items() if len(r) == WINDOW}
        # Applied when it moved by as much as counts, and once more when the window holds nothing
        # from before the change: otherwise a steady schedule.
        self._settling = max(self._settling - 1, -1)
        moved = {n: r for n, r in ratios.items() if abs(r / self.scales[n] - 1) > OFF and r > 0}
        if moved:
            self._settling = WINDOW
        elif self._settling == 0:
            moved = {n: r for n, r in ratios.items() if self.scales[n] != 1 and r > 0}
        if moved:
            self.scales |= moved
            self.current = self.table.scaled(**self.scales)
        is_off = any(abs(r - 1) > OFF for r in ratios.values())
        self._off = self._off + 1 if is_off else 0
        self.stale = self._off >= STALE_ROUNDS

    @property
    def message(self) -> str | None:
        """One line for whoever runs the engine, while the table is stale."""
        if not self.stale:
            return None
        live = ", ".join(
            f"{name} {median(r):.2f}" for name, r in self._ratios.items() if len(r) == WINDOW
        )
        return (
            f"the cost table is stale: rounds of the last {self._off} took other times than it says"
            f" (live over table: {live}); schedules scale it by these, and it is measured again"
            " when the drafter is next chosen"
        )


class Acceptance:
    """Conditional acceptance by position, from verdicts that fade.

    prior    what a position is believed to be before anything is known
    weight   tries that the prior is worth
    memory   weight of the past in each new round
    """

    def __init__(self, prior: float = 0.7, weight: float = 4.0, memory: float = 0.99) -> None:
        self._prior, self._weight, self._memory = prior, weight, memory
        self._tried: Array = np.zeros(0)
        self._accepted: Array = np.zeros(0)

    def observe(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """The verdicts of one round, one for each request."""
        v, a = np.array(verified, np.intp), np.array(accepted, np.intp)
        grown = max(int(v.max(initial=0)), len(self._tried))
        position = np.arange(grown)[:, None]
        self._tried = self._faded(self._tried, grown) + (position < np.minimum(a + 1, v)).sum(1)
        self._accepted = self._faded(self._accepted, grown) + (position < a).sum(1)

    def _faded(self, counts: Array, length: int) -> Array:
        return np.concatenate((self._memory * counts, np.zeros(length - len(counts))))

    def confidence(self, length: int) -> list[float]:
        """[length] what a draft of this drafter may expect, conditional on its front."""
        weight = self._weight
        known = (self._accepted + self._prior * weight) / (self._tried + weight)
        found: list[float] = known[:length].tolist()
        return found + [self._prior] * (length - len(found))


@dataclass(frozen=True)
class Position:
    """Sums over verified drafts of one position since the start."""

    verified: int = 0
    predicted: float = 0.0
    accepted: int = 0

    @property
    def gap(self) -> float:
        """Mean predicted survival less realised survival."""
        return (self.predicted - self.accepted) / self.verified if self.verified else 0.0


class Drift:
    """Whether survival still comes out as predicted.

    Only verified drafts are compared. That they were chosen by confidence does no harm: prediction
    and outcome are compared on the same drafts. Blocks of `block` drafts a position; a block is out
    of band if its mean difference exceeds `band` plus four standard errors of the outcomes
    (Bernoulli of the predictions), one false alarm in about 16,000 blocks.
    """

    SIGMAS = 4.0

    def __init__(self, bands: Sequence[float] = (), block: int = 256, band: float = 0.02) -> None:
        """bands: what calibration left over (`Calibration.ece_after`); `band` is the least."""
        self._bands = bands
        self._block, self._band = block, band
        self._total: Array = np.zeros((3, 0))  # verified, predicted, accepted by position
        self._sums: Array = np.zeros((3, 0))  # verified, predicted less accepted, variance
        self._gaps: dict[int, float] = {}

    def observe(self, survival: Array, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """The verdicts of one round: predicted survivals [k, R], verified and accepted drafts [R].

        Survivals behind `verified` are not looked at.
        """
        position = np.arange(len(survival))[:, None]
        tried = position < np.array(verified, np.intp)
        hit = position < np.array(accepted, np.intp)
        a = np.where(tried, survival, 0.0)
        grown = max(len(survival) - self._total.shape[1], 0)
        if grown:
            self._total = np.pad(self._total, ((0, 0), (0, grown)))
            self._sums = np.pad(self._sums, ((0, 0), (0, grown)))
        count, predicted, hits = tried.sum(1), a.sum(1), hit.sum(1)
        self._total[:, : len(survival)] += (count, predicted, hits)
        variance = (a * (1 - a)).sum(1)
        self._sums[:, : len(survival)] += (count, predicted - hits, variance)
        for j in np.flatnonzero(self._sums[0] >= self._block).tolist():
            n, difference, variance = self._sums[:, j].tolist()
            band = max(self._bands[j] if j < len(self._bands) else 0.0, self._band)
            self._gaps.pop(j, None)
            if abs(difference) / n > band + self.SIGMAS * math.sqrt(variance) / n:
                self._gaps[j] = difference / n
            self._sums[:, j] = 0

    @property
    def totals(self) -> list[Position]:
        """Every position since the start."""
        return [Position(int(n), p, int(a)) for n, p, a in self._total.T.tolist()]

    @property
    def drifted(self) -> dict[int, float]:
        """Position (from 0) -> predicted less realised survival, where the last block was out."""
        return dict(sorted(self._gaps.items()))

    @property
    def message(self) -> str | None:
        """One line for whoever runs the engine, while any position is out of band."""
        if not self.drifted:
            return None
        where = ", ".join(f"draft {j + 1} by {gap:+.2f}" for j, gap in self.drifted.items())
        return f"confidences drifted from what is accepted (too high: +; {where}): calibrate again"
