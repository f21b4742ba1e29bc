"""The arithmetic of admission for a batch: survivals, their order, and two ways to stop.

Candidates are the drafts (r, j) of all requests in order of falling survival a_{r,j}. Survival does
not rise with j, so the first n candidates are a prefix of every draft: an order and a count are a
schedule. Ties are broken by position, then by the request's place in the batch, never by anything
that was drawn. Candidates of survival 0 yield nothing and are left out.

*What an admission may know.* Draft x_{r,j} must be verified or not for reasons that do not depend
on x_{r,j} itself: then, given the reasons, x_{r,j} still has the law q it was drawn from, and
accepting leaves the target's law (`verify`). c_{r,j} depends on the tokens before x_{r,j}, and
c_{r,j+1} on x_{r,j}: the first is allowed for the decision on x_{r,j}, the second is not. In a
batch it needs one more thought, because request s may be admitted by what r drew, and r by what s
drew.

Read the order as a process. A heap holds the next candidate of each request. The largest is taken,
admitted or not; if admitted, its token is *revealed* and the request's next candidate enters with
the survival that the revealed token gave it. Sorting all candidates yields the same order, since no
request's next candidate exceeds the one before it and ties keep its positions in order. Whatever
stops the process by looking at what was taken so far (`early_stop`: the first candidate that does
not raise the rate) or at the past (`best_capacity` of older confidences: a count fixed beforehand)
decides on each token before revealing it. Tokens are tested by fresh random numbers that the
process never sees. So, one revealed token after another, every request emits the target's law, and
requests stay independent of each other, although the *lengths* of r depend on the drafts of s: it
is the argument of optional stopping, for any number of requests.

What breaks it: choosing the best count by looking at all candidates of *this* round
(`best_capacity` on current confidences; appendix A has the counter-example), going back to an
earlier count after having looked further, breaking ties by token values, or deciding that a request
takes part at all by its last confidence. `tests/schedule` shows the first one failing.

R requests, k positions; survivals are [k, R], behind the end of a draft 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Drafts:
    """The drafts of one round, as far as a scheduler may know them: no tokens.

    keys      [R] who they belong to; the same key from round to round
    counts    [R] how many tokens were drafted
    survival  [k, R] a_{r,j}
    pinned    [R] the length must not depend on the company (see `policy`)
    """

    keys: tuple[Hashable, ...]
    counts: Integers
    survival: Array
    pinned: NDArray[np.bool_]

    @staticmethod
    def none(keys: Sequence[Hashable]) -> Drafts:
        """A round without drafts: of nobody is there anything to verify."""
        n = len(keys)
        return Drafts(tuple(keys), np.zeros(n, np.intp), np.zeros((0, n)), np.zeros(n, np.bool_))

    @staticmethod
    def of(
        keys: Sequence[Hashable],
        confidences: Sequence[Sequence[float]],
        *,
        pinned: Sequence[bool] = (),
        temperatures: Sequence[float] | None = None,
    ) -> Drafts:
        """From the conditional confidences of each request, [k_r] each, k_r possibly 0.

        `temperatures` calibrates them (`calibration`); positions behind its end keep the last one.
        What is no number counts as 0.
        """
        counts = np.fromiter(map(len, confidences), np.intp, len(keys))
        k = int(counts.max(initial=0))
        filled = np.arange(k) < counts[:, None]
        conditional = np.zeros((len(keys), k))
        conditional[filled] = np.fromiter(chain.from_iterable(confidences), np.float64)
        conditional = np.where(conditional > 0, np.minimum(conditional, 1.0), 0.0)  # NaN is not > 0
        if temperatures is not None and k:
            conditional = tempered(conditional, temperatures)
        survival: Array = np.cumprod(conditional.T.copy(), axis=0, dtype=np.float64)
        flags = np.zeros(len(keys), np.bool_)
        if pinned:
            flags[:] = pinned
        return Drafts(tuple(keys), counts, survival, flags)

    def __len__(self) -> int:
        return len(self.keys)

    def predicted(self, lengths: Integers) -> Array:
        """[R] expected accepted tokens if the first `lengths` of each draft are verified."""
        if not self.survival.size:
            return np.zeros(len(self))
        kept = np.arange(len(self.survival))[:, None] < lengths
        total: Array = (self.survival * kept).sum(axis=0)
        return total


def tempered(probabilities: Array, temperatures: Sequence[float]) -> Array:
    """[n, k] sigmoid(logit / T) with one temperature a position; 0 and 1 stay."""
    k = probabilities.shape[1]
    inverse = np.array([1 / temperatures[min(j, len(temperatures) - 1)] for j in range(k)])
    with np.errstate(divide="ignore"):
        odds = np.log(probabilities) - np.log1p(-probabilities)
    out: Array = 1 / (1 + np.exp(-np.clip(odds * inverse, -700, 700)))
    return np.where(probabilities >= 1, 1.0, np.where(probabilities <= 0, 0.0, out))


def ranked(survival: Array) -> tuple[Integers, Array]:
    """Candidates in order of admission: which request each belongs to, and its survival."""
    if not survival.size:
        return np.zeros(0, np.intp), np.zeros(0)
    flat = survival.ravel()
    order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
    return order % survival.shape[1], flat[order]


def early_stop(values: Array, costs: Array, tokens: float) -> int:
    """Algorithm 1: how many candidates to admit while the rate rises.

    values   [n] survivals, falling
    costs    [n + 1] or more, of a round that admits 0, 1, ... candidates
    tokens   expected without any candidate
    """
    n = len(values)
    tau = np.cumsum(np.concatenate(([tokens], values)))
    stays = tau[1:] * costs[:n] <= tau[:-1] * costs[1 : n + 1]
    return int(np.argmax(stays)) if stays.any() else n


def best_capacity(values: Array, costs: Array, tokens: float) -> int:
    """The count with the highest rate of all, the smallest such: a global search.

    Not for the confidences of the round that it decides on; see above.
    """
    tau = np.cumsum(np.concatenate(([tokens], values)))
    return int(np.argmax(tau / costs[: len(tau)]))


def lengths_of(owners: Integers, count: int, requests: int) -> Integers:
    """[R] how many of the first `count` candidates each request owns."""
    return np.bincount(owners[:count], minlength=requests)
