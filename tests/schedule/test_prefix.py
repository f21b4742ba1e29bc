"""The length of one request's draft: the paper's early stop, and that it sees no later token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.schedule.prefix import prefix_length

confidences = st.lists(st.floats(0, 1), max_size=10)
costs = st.floats(0.01, 2)


def speeds(confidence: list[float], row_cost: float) -> list[float]:
    """Tokens per cost at every length from 0."""
    survival, tokens, out = 1.0, 1.0, [1.0]
    for i, c in enumerate(confidence, 1):
        survival *= c
        tokens += survival
        out.append(tokens / (1 + row_cost * i))
    return out


@pytest.mark.parametrize(
    ("confidence", "row_cost", "length"),
    [
        ([], 0.3, 0),
        ([0.29], 0.3, 0),
        ([0.31], 0.3, 1),
        ([1.0] * 5, 0.3, 5),
        ([0.9, 0.9, 0.9, 0.9, 0.9], 0.3, 5),
        ([0.9, 0.5, 0.9], 0.3, 2),  # 1.9/1.3 = 1.462, 2.35/1.6 = 1.469, 2.755/1.9 = 1.450
        ([0.0, 1.0, 1.0], 0.3, 0),
    ],
)
def test_known_lengths(confidence: list[float], row_cost: float, length: int) -> None:
    assert prefix_length(confidence, row_cost) == length


@given(confidences, costs)
def test_the_chosen_length_is_the_best(confidence: list[float], row_cost: float) -> None:
    """Survival does not increase, so gains per cost fall and the first stop is the global best."""
    found = speeds(confidence, row_cost)
    assert found[prefix_length(confidence, row_cost)] >= max(found) * (1 - 1e-12)


@given(confidences, confidences, costs)
def test_whether_a_token_is_verified_depends_on_nothing_behind_it(
    front: list[float], back: list[float], row_cost: float
) -> None:
    alone = prefix_length(front, row_cost)
    together = prefix_length(front + back, row_cost)
    assert together == alone if alone < len(front) else together >= alone
    assert min(together, len(front)) == alone


@given(confidences, costs, costs)
def test_a_dearer_row_never_lengthens(confidence: list[float], a: float, b: float) -> None:
    cheap, dear = sorted((a, b))
    assert prefix_length(confidence, dear) <= prefix_length(confidence, cheap)
