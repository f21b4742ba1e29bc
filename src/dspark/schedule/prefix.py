"""How much of a draft is worth verifying (paper, 3.2.2), for one request.

A verified token costs `row_cost` of a one-row pass. With survival a_j = prod_{i<=j} c_i, verifying
l drafts yields tau = 1 + a_1 + ... + a_l tokens for 1 + row_cost * l, and the best l maximises
their ratio. Candidates are admitted from the front while the ratio rises, and the first that does
not raise it ends the search. The stop is not only quick: confidence k + 1 depends on the drawn
token x_k, and looking past x_k to decide whether x_k is verified would leak x_k into its own
admission and bias the output (appendix A).

The length depends on nothing but this request's own draft, so a seeded text does not depend on its
company. Costs that depend on the load are in `policy`.

`foresighted_length` is the same decision on a measured staircase, where the early stop halts in
front of a step although the landing behind it would pay. It may look past x_k, as long as it looks
at *averages of the past* instead of this draft's confidences.
"""

from __future__ import annotations

from collections.abc import Sequence

ROW_COST = 0.3
"""Of a one-row pass; docs/results.md has the measured curve."""


def prefix_length(confidence: Sequence[float], row_cost: float = ROW_COST) -> int:
    """The number of drafts to verify.

    confidence   [k] probability that draft j survives given that those before it did
    """
    survival, tokens, cost = 1.0, 1.0, 1.0
    for length, c in enumerate(confidence):
        survival *= c
        if (tokens + survival) * cost <= tokens * (cost + row_cost):
            return length
        tokens, cost = tokens + survival, cost + row_cost
    return len(confidence)


def foresighted_length(
    confidence: Sequence[float], costs: Sequence[float], expected: Sequence[float]
) -> int:
    """The number of drafts to verify when the next one may have to pay for a step.

    confidence   [k] of this draft
    costs        [n + 1] of a round that verifies 0, 1, ... n drafts
    expected     [n] mean conditional survival by position in earlier rounds

    Draft l is admitted if some end m >= l promises more tokens per cost than stopping before it.
    What lies between l and m is judged by `expected`, and how far m reaches by `costs`; neither
    knows this draft, so x_l is admitted by c_1 ... c_l and the past alone. (Its own length would
    not do for the horizon: a drafter may end a draft because of the token it drew.) On a convex
    curve without steps this is the early stop: if the next draft does not pay no later one does.
    """
    survival, tokens = 1.0, 1.0
    for length, c in enumerate(confidence[: len(costs) - 1]):
        survival *= c
        promised, ahead = tokens, survival
        pays = False
        for m in range(length + 1, len(costs)):
            promised += ahead
            if promised * costs[length] > tokens * costs[m]:
                pays = True
                break
            ahead *= expected[m] if m < len(expected) else 0.0
        if not pays:
            return length
        tokens += survival
    return min(len(confidence), len(costs) - 1)
