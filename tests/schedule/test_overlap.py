"""The formula, what plain rounds say of two lanes, and the budget of a running decision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dspark.errors import ConfigError
from dspark.schedule.monitor import Times
from dspark.schedule.overlap import (
    ALLOWED,
    EVIDENCE,
    MARGIN,
    MODES,
    LaneTimes,
    Overlap,
    PlainRounds,
    check_mode,
    foreseen_gain,
    predicted_gain,
)
from dspark.schedule.policy import Load
from dspark.schedule.scheduler import Scheduler

VERIFY, DRAFT, HITS, DELTA = 20.0, 10.0, 0.8, 0.1
"""An emulated pair that wins."""


def test_the_formula() -> None:
    assert predicted_gain(0.5, 1.0) == pytest.approx(1.5)  # the ceiling
    assert predicted_gain(0.5, 0.0) == pytest.approx(1.0)
    assert predicted_gain(0.5, 0.8, 0.1, eta=0.9, kappa=1.5, s=0.02) == pytest.approx(
        1.5 * 0.92 / (1 + 0.1 * 1.5 * 0.5 + 0.2 * 0.5 + 0.02)
    )
    r, h, delta, s = 0.25, 0.6, 0.08, 0.09  # break-even: h (r - delta (1 + r)) = s
    assert predicted_gain(r, h, delta, s=s) == pytest.approx(1.0)


def test_what_is_foreseen_is_the_formula_where_lanes_take_nothing_from_one_another() -> None:
    for h, delta, s in ((0.0, 0.1, 0.5), (0.8, 0.0, 0.5), (0.8, 0.15, 2.0), (1.0, 0.3, 0.0)):
        wanted = predicted_gain(0.5, h / (1 + delta * h), delta, s=s / 20)
        found = foreseen_gain(LaneTimes(20, 10, 20, 10), h, delta, s)
        assert found == pytest.approx(wanted)


def test_lanes_that_take_threads_from_one_another() -> None:
    """A target that uses both cores well loses; so do short rounds, by what the lane costs."""
    assert foreseen_gain(LaneTimes(20, 6, 38, 11), 1.0) < 0.7
    assert foreseen_gain(LaneTimes(20, 10, 20, 10), 0.8) > 1.1
    assert foreseen_gain(LaneTimes(2, 0.4, 2, 0.4), 0.8) < 1
    rest = foreseen_gain(LaneTimes(20, 10, 20, 10, other=10), 0.8)
    assert 1 < rest < foreseen_gain(LaneTimes(20, 10, 20, 10), 0.8)


def test_slower_by_themselves() -> None:
    assert LaneTimes(10, 4, 15, 6).slower == (1.5, 1.5)
    assert LaneTimes(10, 0, 15, 0).slower == (1.5, 1.0)
    plain = PlainRounds()
    plain.add_round(5, 20, 1, 3, 1.0)
    assert plain.lane_times(None) == LaneTimes(20, 5, 20, 5, 1)
    assert plain.lane_times(LaneTimes(10, 4, 15, 6)) == LaneTimes(20, 5, 30, 7.5, 1)


def test_serial_rounds_of_a_lane_say_nothing_of_hits() -> None:
    plain = PlainRounds()
    plain.add_round(5, 20, 1, 3, 0.8)
    overlap = Overlap(plain=plain)
    for _ in range(50):
        overlap.observe(overlapped=False, tokens=5, ms=30.0)
    assert plain.hit_rate == 0.8 and plain.lane_times(None) == LaneTimes(20, 5, 20, 5, 1)
    assert plain.count == 51 and plain.ms == pytest.approx(30, rel=0.01)


# -- what plain rounds say -------------------------------------------------------------------------


def rounds(plain: PlainRounds, verified: int, accepted: list[int], drafted: int = 4) -> Scheduler:
    scheduler = Scheduler(f"static:{verified}", plain=plain)
    for n in accepted:
        plan = scheduler.plan(["a"], [drafted], [None], Load(drafted))
        assert plan.lengths == (min(verified, drafted),)
        scheduler.observe([n], Times(5, 20, 1))
    return scheduler


def test_a_round_would_hit_if_all_were_accepted_and_the_one_behind_them() -> None:
    plain = PlainRounds()
    scheduler = rounds(plain, 2, [2, 0, 1, 2] * 20)
    behind = scheduler.acceptance.confidence(3)[2]
    assert plain.count == 80 and plain.ms == pytest.approx(26)
    assert plain.hit_rate == pytest.approx(0.5 * behind, rel=0.02)
    assert plain.yields == pytest.approx(1 + 1.25, rel=0.02)


def test_a_draft_that_was_verified_whole_keeps_its_last_token_for_the_coupling() -> None:
    plain = PlainRounds()
    rounds(plain, 4, [4, 3, 4, 4] * 20)
    assert plain.hit_rate == pytest.approx(0.75, rel=0.02)


def test_rounds_without_drafts_or_of_several_requests() -> None:
    plain = PlainRounds()
    rounds(plain, 4, [0] * 5, drafted=0)
    assert plain.count == 5 and plain.hit_rate == 0 and plain.yields == 1
    scheduler = Scheduler("all", plain=plain)
    scheduler.plan(["a", "b"], [2, 2], [None, None], Load(2))
    scheduler.observe([2, 2], Times(5, 20, 1))
    scheduler.plan(["a"], [2], [None], Load(2, extra_rows=8))
    scheduler.observe([2], Times(5, 20, 1))
    assert plain.count == 5


# -- on a simulated clock --------------------------------------------------------------------------

Way = tuple[float, int]
"""Milliseconds and mean tokens of a round."""


class Machine:
    """Rounds of both ways by `times(round)`; tokens are drawn, from 1 to twice their mean less 1.

    What a way is worth is reckoned by its mean, not by the luck of a text.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._ms: list[tuple[float, float]] = []
        """By round: how long it took, and its tokens in one lane."""

    def run(self, overlap: Overlap, count: int, times: Callable[[int], tuple[Way, Way]]) -> None:
        for i in range(count):
            ways = times(i)
            overlapped = overlap.choose()
            ms, mean = ways[overlapped]
            tokens = int(self._rng.integers(1, 2 * mean))
            overlap.observe(overlapped=overlapped, tokens=tokens, ms=ms)
            self._ms.append((ms, ways[0][0] / ways[0][1] * mean))

    def over_off(self, first: int = 0, last: int | None = None) -> float:
        """Speed over that of one lane."""
        ours, one = zip(*self._ms[first:last], strict=True)
        return float(sum(one) / sum(ours))


def watched(ms: float, tokens: int) -> PlainRounds:
    plain = PlainRounds()
    for _ in range(EVIDENCE):
        plain.add_round(ms / 3, ms * 2 / 3, 0.0, tokens, HITS)
    return plain


def over_off(one: Way, two: Way, count: int, known: bool) -> np.ndarray:
    """[40] of as many texts with other luck."""
    found = []
    for seed in range(40):
        machine = Machine(seed)
        plain = watched(*one) if known else None
        machine.run(Overlap(plain=plain), count, lambda i: (one, two))
        found.append(machine.over_off())
    return np.array(found)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("count", [200, 1000])
@pytest.mark.parametrize("two", [(10.0, 3), (10.5, 4), (11.0, 4), (13.0, 4), (20.0, 4)])
def test_a_losing_pair_costs_less_than_three_percent(two: Way, count: int, known: bool) -> None:
    """It loses tokens, or time, a little or all of it, whatever was foreseen."""
    found = over_off((10.0, 4), two, count, known)
    assert found.mean() > 0.97 and np.quantile(found, 0.1) > 0.91


def test_a_winning_pair_is_nearly_always_overlapped() -> None:
    """At 0.97 of `on` and more, from the first round on if plain rounds were watched before."""
    gain = foreseen_gain(LaneTimes(VERIFY, DRAFT, VERIFY, DRAFT), HITS, DELTA)
    assert gain > 1.15
    one, two = (VERIFY + DRAFT, 4), ((VERIFY + DRAFT) / gain, 4)
    assert over_off(one, two, 200, True).mean() > 0.97 * gain
    assert over_off(one, two, 1000, True).mean() > 0.97 * gain
    assert over_off(one, two, 1000, False).mean() > 0.97 * gain


def test_a_machine_that_drifts() -> None:
    """Two lanes win, then lose, then win; then everything takes twice as long."""
    stages = [((10.0, 4), (8.0, 4)), ((10.0, 4), (13.0, 4)), ((10.0, 4), (7.0, 4)),
              ((20.0, 4), (14.0, 4))]  # fmt: skip
    machine, overlap = Machine(), Overlap(plain=watched(10.0, 4))
    machine.run(overlap, 4 * 2000, lambda i: stages[i // 2000])
    wins = [machine.over_off(2000 * k, 2000 * (k + 1)) for k in range(4)]
    assert wins[0] > 0.97 * 10 / 8
    assert wins[1] > 0.97
    assert wins[2] > 0.95 * 10 / 7
    assert wins[3] > 0.9 * 10 / 7


def test_rounds_in_one_lane_elsewhere_earn_another_look() -> None:
    """A pair that rests goes on in the plain engine, which adds to the same rounds."""
    plain = watched(10.0, 4)
    overlap = Overlap(plain=plain)
    for _ in range(20):
        overlap.observe(overlapped=True, tokens=4, ms=13.0)
    assert overlap.rests and not overlap.choose()
    for _ in range(600):
        plain.add_round(3, 7, 0, 4, 1.0)
    assert not overlap.rests and overlap.choose()
    for _ in range(10):
        overlap.observe(overlapped=True, tokens=4, ms=13.0)
    assert overlap.rests


def test_one_round_that_stood_still_does_not_banish_two_lanes() -> None:
    """It is taken for ALLOWED rounds at most: a few hundred rounds of rest, not thousands."""
    overlap = Overlap(plain=watched(10.0, 4))
    overlap.observe(overlapped=True, tokens=4, ms=1e5)
    assert overlap.rests
    for _ in range(int(100 * ALLOWED)):
        overlap.observe(overlapped=False, tokens=4, ms=10.0)
    assert overlap.choose()


def test_without_plain_rounds_some_come_first() -> None:
    overlap = Overlap()
    machine = Machine()
    machine.run(overlap, EVIDENCE, lambda i: ((10.0, 4), (8.0, 4)))
    assert machine.over_off() == 1 and overlap.choose() and overlap.gain is None


def test_always_is_always() -> None:
    overlap = Overlap(always=True)
    for _ in range(200):
        assert overlap.choose()
        overlap.observe(overlapped=True, tokens=2, ms=100.0)
    assert overlap.gain is None and MARGIN > 1


def test_modes() -> None:
    for mode in MODES:
        check_mode(mode)
    with pytest.raises(ConfigError, match="expected one of off, on, auto"):
        check_mode("maybe")
