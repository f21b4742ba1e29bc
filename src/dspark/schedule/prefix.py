"""How much of a draft is worth verifying (paper, 3.2.2), for one request.

A verified token costs `row_cost` of a one-row pass. With survival a_j = prod_{i<=j} c_i, verifying
l drafts yields tau = 1 + a_1 + ... + a_l tokens for 1 + row_cost * l, and the best l maximises
their ratio. Candidates are admitted from the front while the ratio rises, and the first that does
not raise it ends the search. The stop is not only quick: confidence k + 1 depends on the drawn
token x_k, and looking past x_k to decide whether x_k is verified would leak x_k into its own
admission and bias the output (appendix A).

The length depends on nothing but this request's own draft, so a seeded text does not depend on its
company. Costs that depend on the load are not here.
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
