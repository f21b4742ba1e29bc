"""Schedulers: how many drafts of each request the next pass verifies.

    all            every draft to its end
    static:K       at most K drafts
    threshold:P    as long as survival is at least P
    causal         Algorithm 1: best rate, early stop, over all requests
    lagged         a capacity found in the confidences of two rounds ago, filled by the current ones
    auto           causal for one request, lagged for more

None of them changes what the text is distributed as; `admission` has the argument, and each class
says why it holds for itself. Greedy text is the same token for token under all of them.

*Seeds.* A sampled text under a seed is the same whatever else is in the batch only if its lengths
are: the tokens have the same law either way, but the random numbers are spent differently. `all`,
`static` and `threshold` look at the request's own draft alone. `causal` and `lagged` divide a pass
among requests: lengths depend on the company, on measured costs, hence on the machine. So a request
that promises reproducibility is *pinned*: its length comes from `prefix_length`, from its own draft
and a constant, and the others share what is left. (Needed only if it has a seed, samples, and its
draft carries a distribution; greedy texts and one-hot drafts are the same at any length.)

*Costs.* `causal` and `lagged` ask a `Cost` for the milliseconds of whole rounds, drafting included.
Without a measured table `RowCost` stands in: a straight line, a guess that adapts to nothing.

A scheduler belongs to one engine: some remember rounds. Time: sorting, so O(n log n).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark.errors import ConfigError
from dspark.schedule.admission import (
    Array,
    Drafts,
    Integers,
    best_capacity,
    early_stop,
    lengths_of,
    ranked,
)
from dspark.schedule.prefix import ROW_COST, foresighted_length, prefix_length

CHOICES = "all, static:K, threshold:P, causal, lagged, auto"
DEFAULT = "auto"
LAG = 2
CONTEXT_STEP = 64
"""Contexts are rounded to this: the same curve then serves many rounds."""


@dataclass(frozen=True)
class Load:
    """What else the round pays for; all of it known before anything is drafted.

    block       drafts that were asked for of each request: drafting is paid by these
    context     mean context of the rows of the pass
    extra_rows  rows of the pass that are no drafts and no anchors (prompt chunks)
    """

    block: int
    context: float = 0.0
    extra_rows: int = 0


@dataclass(frozen=True)
class Plan:
    """What the pass verifies: the first `lengths[r]` drafts of each request.

    `predicted[r]` of them are expected to be accepted, by the confidences.
    """

    lengths: tuple[int, ...]
    predicted: tuple[float, ...]


class Cost(Protocol):
    """Milliseconds of rounds with first, first + 1, ... last rows; `cost.CostTable` is one."""

    def curve(
        self, first: int, last: int, *, requests: int, context: float, block: int
    ) -> list[float]: ...


@dataclass(frozen=True)
class RowCost:
    """The stand-in without a table: each row beyond the first costs a share of it."""

    row_cost: float = ROW_COST

    def curve(
        self, first: int, last: int, *, requests: int, context: float, block: int
    ) -> list[float]:
        return [1 + self.row_cost * (rows - 1) for rows in range(first, last + 1)]


class Policy(Protocol):
    """A scheduler. `own_draft_only`: the length of a request depends on nothing but its draft."""

    name: str
    own_draft_only: bool

    def plan(self, drafts: Drafts, load: Load) -> Plan:
        """Decide on a round; call it once for each that has drafts, in order."""
        ...


def parse(text: str, cost: Cost | None = None) -> Policy:
    """A new scheduler by name, as in `threshold:0.5`. Raises ConfigError naming the choices."""
    name, colon, value = text.partition(":")
    costs = RowCost() if cost is None else cost
    try:
        if name == "static" and int(value) >= 0:
            return Static(int(value))
        if name == "threshold" and 0 <= float(value) <= 1:
            return Threshold(float(value))
    except ValueError:
        pass
    if not colon:
        if name == "all":
            return All()
        if name == "causal":
            return Causal(costs)
        if name == "lagged":
            return Lagged(costs)
        if name == "auto":
            return Auto(costs)
    raise ConfigError(
        f"unknown way to verify {text!r}: expected one of {CHOICES} (K: 0 or more drafts, P: a"
        " survival from 0 to 1)"
    )


class All:
    """Whole drafts. Lossless: the lengths know nothing at all."""

    name = "all"
    own_draft_only = True

    def plan(self, drafts: Drafts, load: Load) -> Plan:
        return _plan(drafts, drafts.counts)


class Static:
    """The first K drafts. Lossless for the same reason; the baseline of every comparison."""

    own_draft_only = True

    def __init__(self, length: int) -> None:
        self.name = f"static:{length}"
        self._length = length

    def plan(self, drafts: Drafts, load: Load) -> Plan:
        return _plan(drafts, np.minimum(drafts.counts, self._length))


class Threshold:
    """Drafts whose survival is at least P: one number instead of a cost table.

    Lossless: survival does not rise along a draft, so whether x_k is in depends on c_1 ... c_k.
    """

    own_draft_only = True

    def __init__(self, survival: float) -> None:
        self.name = f"threshold:{survival:g}"
        self._survival = survival

    def plan(self, drafts: Drafts, load: Load) -> Plan:
        kept = (drafts.survival >= self._survival).sum(axis=0, dtype=np.intp)
        return _plan(drafts, np.minimum(kept, drafts.counts))


class Causal:
    """Algorithm 1: admit by falling survival while tokens per millisecond rise.

    Lossless, jointly for all requests: each candidate is judged by candidates of higher survival,
    that is, by earlier tokens of its own draft and by tokens of other drafts, before it is
    revealed. Gets stuck in front of a step of the cost curve; exact where costs are convex.
    """

    name = "causal"
    own_draft_only = False

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def plan(self, drafts: Drafts, load: Load) -> Plan:
        fixed, survival = _pin(drafts)
        owners, values = ranked(survival)
        costs, tokens = _base(self._cost, drafts, fixed, load, len(values))
        count = early_stop(values, costs, tokens)
        return _plan(drafts, fixed + lengths_of(owners, count, len(drafts)))


class Lagged:
    """The deployed form (paper, 5.2): how many rows by the past, which ones by the present.

    The capacity K is the best of all counts on the measured curve, cliffs included, for the
    survivals that the same requests had `lag` rounds ago (a request without such a round is given
    the mean of the others). The K candidates of highest *current* survival are verified.

    Lossless: K is a function of rounds that are over, so the order of `admission` is cut at a count
    fixed beforehand. Two rounds and not one so that a pipelined engine knows the size of its next
    pass before the current one has ended. Current values enter K in one way only: a request that
    has no draft at all does not count, which is known before its first token is drawn. Until there
    is a past the rounds are scheduled causally.
    """

    name = "lagged"
    own_draft_only = False

    def __init__(self, cost: Cost, lag: int = LAG) -> None:
        self._cost = cost
        self._causal = Causal(cost)
        self._past: deque[tuple[Drafts, Array]] = deque(maxlen=lag)

    def plan(self, drafts: Drafts, load: Load) -> Plan:
        fixed, survival = _pin(drafts)
        owners, values = ranked(survival)
        if len(self._past) < (self._past.maxlen or 0):
            plan = self._causal.plan(drafts, load)
        else:
            older = self._remembered(drafts)
            costs, tokens = _base(self._cost, drafts, fixed, load, len(older))
            capacity = best_capacity(older, costs, tokens)
            plan = _plan(drafts, fixed + lengths_of(owners, capacity, len(drafts)))
        self._remember(drafts, values)
        return plan

    def remember(self, drafts: Drafts) -> None:
        """Add a round to the past without deciding on it."""
        self._remember(drafts, ranked(drafts.survival)[1])

    def _remember(self, drafts: Drafts, values: Array) -> None:
        if drafts.survival.size:
            self._past.append((drafts, values))

    def _remembered(self, drafts: Drafts) -> Array:
        """The survivals that the requests of now had then, falling."""
        old, values = self._past[0]
        drafted, drafts_now = old.counts > 0, (drafts.counts > 0) & ~drafts.pinned
        if old.keys == drafts.keys and (drafted & ~old.pinned == drafts_now).all():
            return values
        pooled = old.survival[:, drafted].mean(axis=1, keepdims=True)
        place = {key: i for i, key in enumerate(old.keys) if drafted[i]}
        index = [place.get(key, len(old)) for key in drafts.keys]
        then = np.concatenate((old.survival, pooled), axis=1)[:, index]
        return ranked(then * drafts_now)[1]


class Auto:
    """Causal for one request, lagged for more.

    For one request a capacity from the past would be its whole length and the current confidence
    would have no say. There the early stop is used, with foresight over steps: what the drafts
    behind a step are worth is taken from the mean confidences of earlier rounds
    (`prefix.foresighted_length`), so x_k is still judged by c_1 ... c_k and the past.
    """

    name = "auto"
    own_draft_only = False
    MEMORY = 0.95
    """Weight of the past in the mean of each new round."""

    def __init__(self, cost: Cost, lag: int = LAG) -> None:
        self._cost = cost
        self._lagged = Lagged(cost, lag)
        self._mean: Array = np.zeros(0)

    def plan(self, drafts: Drafts, load: Load) -> Plan:
        if len(drafts) == 1 and not drafts.pinned[0]:
            survival = drafts.survival[:, 0]
            plan = _plan(drafts, np.array([self._alone(drafts, load)], np.intp))
            self._lagged.remember(drafts)
        else:
            plan = self._lagged.plan(drafts, load)
            drafted = drafts.counts > 0
            survival = drafts.survival[:, drafted].mean(axis=1) if drafted.any() else np.zeros(0)
        self._learn(survival)
        return plan

    def _alone(self, drafts: Drafts, load: Load) -> int:
        first = 1 + load.extra_rows
        costs = _curve(self._cost, first, first + load.block, 1, load)
        survival = drafts.survival[: int(drafts.counts[0]), 0]
        return foresighted_length(_conditional(survival), costs, _conditional(self._mean))

    def _learn(self, survival: Array) -> None:
        k = len(survival)
        if k > len(self._mean):
            self._mean = np.concatenate((self._mean, survival[len(self._mean) :]))
        self._mean[:k] += (1 - self.MEMORY) * (survival - self._mean[:k])


def _conditional(survival: Array) -> list[float]:
    """c_j of a_j; 0 behind a survival of 0."""
    out, before = [], 1.0
    for a in survival.tolist():
        out.append(min(a / before, 1.0) if before > 0 else 0.0)
        before = a
    return out


def _pin(drafts: Drafts) -> tuple[Integers, Array]:
    """[R] lengths of pinned requests, 0 elsewhere; and the survivals that are left to share."""
    fixed = np.zeros(len(drafts), np.intp)
    if not drafts.pinned.any():
        return fixed, drafts.survival
    for r in np.flatnonzero(drafts.pinned):
        own = drafts.survival[: int(drafts.counts[r]), r]
        fixed[r] = prefix_length(_conditional(own))
    return fixed, drafts.survival * ~drafts.pinned


def _base(
    cost: Cost, drafts: Drafts, fixed: Integers, load: Load, candidates: int
) -> tuple[Array, float]:
    """[candidates + 1] costs or more, and the tokens expected, of a round without any candidate."""
    first = len(drafts) + load.extra_rows + int(fixed.sum())
    last = first + max(candidates, len(drafts) * load.block)
    tokens = len(drafts) + (float(drafts.predicted(fixed).sum()) if fixed.any() else 0.0)
    return np.array(_curve(cost, first, last, len(drafts), load)), tokens


def _curve(cost: Cost, first: int, last: int, requests: int, load: Load) -> list[float]:
    context = CONTEXT_STEP * round(load.context / CONTEXT_STEP)
    return cost.curve(first, last, requests=requests, context=context, block=load.block)


def _plan(drafts: Drafts, lengths: Integers) -> Plan:
    return Plan(tuple(lengths.tolist()), tuple(drafts.predicted(lengths).tolist()))
