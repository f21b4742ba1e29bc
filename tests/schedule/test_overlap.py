"""The formula, what it is worth before a lane exists, and the choice between two ways."""

from __future__ import annotations

import pytest

from dspark.errors import ConfigError
from dspark.schedule.overlap import (
    MODES,
    PROBE,
    TURNS,
    LaneTimes,
    Overlap,
    check_mode,
    foreseen_gain,
    predicted_gain,
)


def test_the_formula() -> None:
    assert predicted_gain(0.5, 1.0) == pytest.approx(1.5)  # the ceiling
    assert predicted_gain(0.5, 0.0) == pytest.approx(1.0)
    assert predicted_gain(0.5, 0.8, 0.1, eta=0.9, kappa=1.5, s=0.02) == pytest.approx(
        1.5 * 0.92 / (1 + 0.1 * 1.5 * 0.5 + 0.2 * 0.5 + 0.02)
    )
    r, h, delta, s = 0.25, 0.6, 0.08, 0.09  # break-even: h (r - delta (1 + r)) = s
    assert predicted_gain(r, h, delta, s=s) == pytest.approx(1.0)


def test_what_two_lanes_can_hope_for() -> None:
    """A target that gains nothing by a second core wins; one that gains all of it loses."""
    apart = foreseen_gain(LaneTimes(20, 6, 20, 6))
    assert apart == pytest.approx(26 / (0.7 * 20 + 0.3 * 26))
    assert foreseen_gain(LaneTimes(20, 6, 38, 11)) < 0.7
    assert foreseen_gain(LaneTimes(20, 20, 20, 20), hit_rate=1.0) == pytest.approx(2.0)


def simulate(overlap: Overlap, serial: float, overlapped: float, rounds: int) -> list[bool]:
    """Rounds of two tokens that take these milliseconds; which way each of them went."""
    way = []
    for _ in range(rounds):
        way.append(overlap.choose())
        overlap.observe(overlapped=way[-1], tokens=2, ms=overlapped if way[-1] else serial)
    return way


@pytest.mark.parametrize("overlapped, wins", [(8.0, True), (12.0, False), (9.95, False)])
def test_the_faster_way_is_chosen(overlapped: float, wins: bool) -> None:
    """After a few turns of each; and the loss by looking stays small."""
    overlap = Overlap()
    way = simulate(overlap, 10.0, overlapped, 3000)
    assert way[: PROBE * TURNS].count(True) == PROBE * TURNS // 2
    rest = way[PROBE * TURNS :]
    share = rest.count(True) / len(rest)
    assert share > 0.97 if wins else share < 0.03
    assert overlap.gain == pytest.approx(10 / overlapped, rel=0.01)


def test_a_change_is_found_out() -> None:
    overlap = Overlap()
    simulate(overlap, 10.0, 8.0, 2000)
    assert simulate(overlap, 10.0, 13.0, 6000)[-500:].count(True) < 50
    assert simulate(overlap, 10.0, 7.0, 10000)[-500:].count(True) > 450


def test_always_is_always() -> None:
    overlap = Overlap(always=True)
    assert all(simulate(overlap, 1.0, 100.0, 200)) and overlap.gain is None


def test_modes() -> None:
    for mode in MODES:
        check_mode(mode)
    with pytest.raises(ConfigError, match="expected one of off, on, auto"):
        check_mode("maybe")
