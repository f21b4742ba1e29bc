"""Whether drafting pays, from acceptance and a cost curve."""

from __future__ import annotations

import pytest

from dspark.schedule.worth import expected_gain


class Line:
    """A pass costs 10 ms and a row more `row`; drafting `draft`."""

    def __init__(self, row: float, draft: float) -> None:
        self.row, self.draft = row, draft

    def curve(
        self, first: int, last: int, *, requests: int, context: float, block: int
    ) -> list[float]:
        drafting = self.draft if block else 0.0
        return [10 + self.row * (rows - 1) + drafting for rows in range(first, last + 1)]


@pytest.mark.parametrize(
    ("row", "draft", "gain"),
    [
        (0.0, 0.0, 1 + 0.5 + 0.25 + 0.125),  # free: the whole block
        (0.0, 5.0, 1.875 / 1.5),
        (4.0, 0.0, 1.5 / 1.4),  # dear rows: one draft
        (9.0, 2.0, 1.5 / 2.1),  # below 1
    ],
)
def test_the_best_fixed_length(row: float, draft: float, gain: float) -> None:
    assert expected_gain(Line(row, draft), (0.5,) * 3, 3) == pytest.approx(gain)


def test_no_longer_than_the_block() -> None:
    assert expected_gain(Line(0, 0), (0.5,) * 3, 1) == pytest.approx(1.5)
