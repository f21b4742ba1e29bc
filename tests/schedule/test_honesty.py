"""Confidences are corrected by verdicts of the past, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.schedule.admission import Drafts
from dspark.schedule.honesty import LIMIT, Honesty, conditional
from dspark.schedule.scheduler import Scheduler

UNIT = st.floats(0.01, 0.99)


def drafts(rows: list[list[float]], pinned: list[bool] | None = None) -> Drafts:
    return Drafts.of(list(range(len(rows))), rows, pinned=pinned or [False] * len(rows))


def simulate(requests: int, rounds: int, claimed: float, true: float) -> Honesty:
    """Blocks of five whose confidences all say `claimed`, accepted with probability `true`."""
    rng, honesty = np.random.default_rng(0), Honesty()
    for _ in range(rounds):
        d = honesty.applied(drafts([[claimed] * 5] * requests))
        came = rng.random((requests, 5)) < true
        accepted = np.where(came.all(1), 5, came.argmin(1)).tolist()
        honesty.observe(d, [5] * requests, accepted)
    return honesty


@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize(("claimed", "true"), [(0.6, 0.85), (0.9, 0.5), (0.7, 0.7)])
def test_the_shift_settles_where_confidences_are_right(
    requests: int, claimed: float, true: float
) -> None:
    wanted = np.log(true / (1 - true)) - np.log(claimed / (1 - claimed))
    found = [simulate(requests, n, claimed, true).shift for n in range(300, 320)]
    assert np.mean(found) == pytest.approx(wanted, abs=0.35)
    assert np.std(found) < 0.4  # many requests at once do not throw it about


@given(st.lists(st.lists(UNIT, min_size=1, max_size=6), min_size=1, max_size=4), st.floats(-3, 3))
def test_a_shift_moves_log_odds_and_keeps_orders(rows: list[list[float]], shift: float) -> None:
    honesty = Honesty()
    honesty.shift = shift
    before = drafts(rows)
    after = honesty.applied(before)
    assert (np.diff(after.survival, axis=0) <= 0).all() and (after.survival <= 1).all()
    for r, row in enumerate(rows):
        c = np.array(row)
        wanted = 1 / (1 + np.exp(-(np.log(c / (1 - c)) + shift)))
        assert conditional(after.survival)[: len(row), r] == pytest.approx(wanted, rel=1e-6)
        assert (after.survival[len(row) :, r] == 0).all()


def test_zero_and_one_stay() -> None:
    honesty = Honesty()
    honesty.shift = 2.0
    after = honesty.applied(drafts([[1.0, 0.5, 0.0]]))
    assert after.survival[0, 0] == 1 and after.survival[2, 0] == 0


def test_pinned_requests_are_neither_corrected_nor_listened_to() -> None:
    honesty = Honesty()
    both = drafts([[0.5, 0.5], [0.5, 0.5]], [True, False])
    honesty.observe(both, [2, 0], [2, 0])
    assert honesty.shift == 0
    honesty.observe(both, [2, 2], [0, 2])
    assert honesty.shift > 0
    after = honesty.applied(both)
    assert after.survival[:, 0].tolist() == both.survival[:, 0].tolist()
    assert (after.survival[:, 1] > both.survival[:, 1]).all()


def test_drafts_behind_a_rejection_or_a_cut_teach_nothing() -> None:
    honesty, one = Honesty(), drafts([[1.0, 0.5, 0.5, 0.5]])
    honesty.observe(one, [1], [1])  # a draft that was sure, and right
    assert honesty.shift == 0
    honesty.observe(one, [4], [1])
    only_the_second = honesty.shift
    other = Honesty()
    other.observe(drafts([[1.0, 0.5]]), [2], [1])
    assert only_the_second == other.shift < 0


def test_the_shift_has_a_bound() -> None:
    assert simulate(8, 400, 0.05, 1.0).shift == LIMIT


@pytest.mark.parametrize("verify", ["all", "static:3", "threshold:0.5"])
def test_policies_that_look_at_a_draft_alone_do_without(verify: str) -> None:
    assert Scheduler(verify).honesty is None
