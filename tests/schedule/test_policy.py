"""Schedulers against brute force, and what their lengths may depend on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import ConfigError
from dspark.schedule.admission import Drafts, best_capacity, ranked
from dspark.schedule.policy import CHOICES, Auto, Load, RowCost, parse
from dspark.schedule.prefix import ROW_COST, foresighted_length, prefix_length

Confidences = list[list[float]]


class Given:
    """A cost curve written down: the milliseconds of 0, 1, 2 ... rows; the last step goes on."""

    def __init__(self, ms: list[float]) -> None:
        self.ms = ms

    def curve(
        self, first: int, last: int, *, requests: int, context: float, block: int
    ) -> list[float]:
        step = self.ms[-1] - self.ms[-2]
        beyond = [self.ms[-1] + step * i for i in range(1, last + 2 - len(self.ms))]
        return [*self.ms, *beyond][first : last + 1]


def of(confidences: Confidences, **options: list[bool]) -> Drafts:
    return Drafts.of(range(len(confidences)), confidences, **options)


def lengths(name: str, confidences: Confidences, ms: list[float]) -> tuple[int, ...]:
    load = Load(max(map(len, confidences), default=0))
    return parse(name, Given(ms)).plan(of(confidences), load).lengths


def rate(confidences: Confidences, chosen: tuple[int, ...], ms: list[float]) -> float:
    tokens, rows = 0.0, 0
    for c, n in zip(confidences, chosen, strict=True):
        tokens += 1 + sum(np.cumprod(c[:n]))
        rows += 1 + n
    return tokens / Given(ms).curve(rows, rows, requests=1, context=0, block=0)[0]


batches = st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3)
steps = st.lists(st.floats(0.01, 3), min_size=13, max_size=13)


def convex(increments: list[float], base: float = 2.0) -> list[float]:
    return list(itertools.accumulate([base, *sorted(increments)]))


@given(batches, steps)
def test_causal_is_the_best_of_all_where_costs_are_convex(
    confidences: Confidences, increments: list[float]
) -> None:
    """Rates then rise and fall once, so the first stop is the best schedule there is."""
    ms = convex(increments)
    every = itertools.product(*(range(len(c) + 1) for c in confidences))
    best = max(rate(confidences, chosen, ms) for chosen in every)
    assert rate(confidences, lengths("causal", confidences, ms), ms) >= best * (1 - 1e-9)


@given(batches, steps)
def test_the_global_search_is_the_best_of_all_on_any_curve(
    confidences: Confidences, increments: list[float]
) -> None:
    """Once it knows the round (which only a past one may be): the count, filled by survival."""
    ms = list(itertools.accumulate([2.0, *increments]))
    lagged = parse("lagged", Given(ms))
    load = Load(3)
    plans = [lagged.plan(of(confidences), load) for _ in range(4)]
    every = itertools.product(*(range(len(c) + 1) for c in confidences))
    best = max(rate(confidences, chosen, ms) for chosen in every)
    assert plans[2] == plans[3]
    assert rate(confidences, plans[2].lengths, ms) >= best * (1 - 1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 2))
def test_causal_for_one_request_is_the_early_stop(confidence: list[float], price: float) -> None:
    plan = parse("causal", RowCost(price)).plan(of([confidence]), Load(8))
    ms = [1 + price * (rows - 1) for rows in range(12)]
    expected = rate([confidence], (prefix_length(confidence, price),), ms)
    assert rate([confidence], plan.lengths, ms) == pytest.approx(expected, rel=1e-9)


@given(batches, st.floats(0, 1), st.integers(0, 4))
def test_the_plain_schedulers(confidences: Confidences, p: float, k: int) -> None:
    ms = [1.0, 2.0]
    assert lengths("all", confidences, ms) == tuple(map(len, confidences))
    assert lengths(f"static:{k}", confidences, ms) == tuple(min(k, len(c)) for c in confidences)
    found = lengths(f"threshold:{p}", confidences, ms)
    for c, n in zip(confidences, found, strict=True):
        survival = np.cumprod(c)
        assert (survival[:n] >= p).all() and not (survival[n:] >= p).any()


def test_threshold_is_about_the_whole_prefix() -> None:
    assert lengths("threshold:0.5", [[0.8, 0.8, 0.8, 0.9]], [1.0, 2.0]) == (3,)
    assert lengths("threshold:0.5", [[0.6, 0.8, 0.99]], [1.0, 2.0]) == (1,)


@pytest.mark.parametrize(
    "text", ["", "none", "static", "static:", "static:-1", "static:x", "threshold:1.5",
             "threshold:nan", "threshold", "all:3", "auto:1", "Causal"],
)  # fmt: skip
def test_a_bad_name_gets_the_choices(text: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse(text)
    assert CHOICES in str(e.value) and repr(text) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["all", "static:3", "threshold:0.5", "causal", "lagged", "auto"])
def test_names_come_back_and_empty_rounds_pass(text: str) -> None:
    policy = parse(text)
    assert policy.name == text
    assert policy.own_draft_only == (text not in ("causal", "lagged", "auto"))
    for confidences in ([], [[]], [[], []], [[0.9], []], [[]], [[0.5, 0.9]] * 3):
        plan = policy.plan(of(confidences), Load(2))
        assert len(plan.lengths) == len(confidences)
        assert all(0 <= n <= len(c) for n, c in zip(plan.lengths, confidences, strict=True))


# -- what an admission depends on -----------------------------------------------------------------


few = st.sampled_from([0.0, 0.5, 0.9, 1.0])
"""Confidences that often tie and often stop a search."""


@settings(max_examples=300)
@given(
    st.lists(st.lists(few, min_size=4, max_size=4), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(1, 3),
    few,
    st.lists(st.sampled_from([0.05, 0.5, 2.0]), min_size=12, max_size=12),
    st.sampled_from(["causal", "lagged", "auto", "threshold:0.4"]),
)
def test_no_token_is_admitted_by_what_it_decides(
    confidences: Confidences, r: int, j: int, other: float, increments: list[float], name: str
) -> None:
    """c_{r,j+1} is a function of x_{r,j}: changing it must not change whether x_{r,j} is verified,
    for any request of a batch, any curve and any past."""
    r %= len(confidences)
    ms = list(itertools.accumulate([2.0, *increments]))
    changed = [list(c) for c in confidences]
    changed[r][j:] = [other] * (4 - j)
    decided = []
    for now in (confidences, changed):
        policy = parse(name, Given(ms))
        for past in ([[0.9, 0.7, 0.6, 0.2]] * len(confidences), confidences, [[0.5] * 4]):
            policy.plan(Drafts.of(range(len(past)), past), Load(4))
        decided.append(policy.plan(of(now), Load(4)).lengths)
    a, b = decided
    # The first j tokens of r are judged alike; where the change shows it shows behind them.
    assert min(a[r], j) == min(b[r], j)


def test_ties_are_broken_by_position_then_place() -> None:
    """Equal survivals: all first drafts come before the second ones, whatever the tokens are."""
    owners, values = ranked(of([[1.0, 1.0], [1.0, 0.5], [1.0]]).survival)
    assert owners.tolist() == [0, 1, 2, 0, 1] and values.tolist() == [1, 1, 1, 1, 0.5]


@given(
    st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6),
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
    st.lists(st.floats(0.01, 3), min_size=6, max_size=6),
)
def test_foresight_uses_the_past_only(
    front: list[float], back: list[float], expected: list[float], increments: list[float]
) -> None:
    costs = list(itertools.accumulate([1.0, *increments]))
    alone = foresighted_length(front, costs, expected)
    together = foresighted_length(front + back, costs, expected)
    assert min(together, len(front)) == alone


@given(st.lists(st.floats(0, 1), max_size=6), st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_foresight_changes_nothing_on_a_straight_line(
    confidence: list[float], expected: list[float]
) -> None:
    costs = [1 + ROW_COST * n for n in range(7)]
    a, b = foresighted_length(confidence, costs, expected), prefix_length(confidence, ROW_COST)
    survival = np.concatenate(([1.0], np.cumprod(confidence)))
    assert a == b or survival[: a + 1].sum() / costs[a] == pytest.approx(
        survival[: b + 1].sum() / costs[b], rel=1e-9
    )


def test_foresight_crosses_a_step_that_the_early_stop_fears() -> None:
    """Row 2 costs as much as the first; rows 3 to 6 come with it."""
    ms = [0.0, 10.0, 20.0, 20.2, 20.4, 20.6, 20.8]
    confidence = [0.9] * 5
    assert lengths("causal", [confidence], ms) == (0,)
    auto = Auto(Given(ms))
    found = [auto.plan(of([confidence]), Load(5)).lengths[0] for _ in range(3)]
    assert found == [0, 5, 5]  # the first round has no past to hope by
    # This draft is bad from the start: no hope behind the step helps.
    assert auto.plan(of([[0.1, 0.99, 0.99, 0.99, 0.99]]), Load(5)).lengths == (0,)


def test_lagged_lands_beyond_a_cliff() -> None:
    """A pass over up to 8 rows costs 10, up to 16 costs 15: worth it at survival near 1, and the
    early stop does not get there."""
    ms = [0.0] + [10.0 + 0.01 * r for r in range(1, 9)] + [15.0 + 0.01 * r for r in range(9, 20)]
    confidences = [[0.98] * 3] * 4
    assert sum(lengths("causal", confidences, ms)) == 4
    lagged = parse("lagged", Given(ms))
    plans = [lagged.plan(of(confidences), Load(3)) for _ in range(3)]
    assert [sum(p.lengths) for p in plans] == [4, 4, 12]
    survival = of(confidences).survival
    costs = np.array(Given(ms).curve(4, 16, requests=4, context=0, block=3))
    assert best_capacity(ranked(survival)[1], costs, 4.0) == 12


def test_lagged_takes_its_capacity_from_two_rounds_ago_and_its_ranks_from_now() -> None:
    ms = convex([1.0] * 12, 1.0)
    lagged = parse("lagged", Given(ms))
    good, bad = [0.99, 0.98, 0.97], [0.01, 0.01, 0.01]
    history = [[good, good], [bad, bad], [good, bad], [bad, good]]
    plans = [lagged.plan(of(c), Load(3)).lengths for c in history]
    assert plans[2] == (3, 3)  # as rich as round 0, though half of it is bad now
    assert plans[3] == (0, 0)  # as poor as round 1


def test_newcomers_get_the_mean_of_the_others() -> None:
    ms = convex([1.0] * 12, 1.0)
    lagged = parse("lagged", Given(ms))
    for keys in (["a", "b"], ["a", "b"]):
        lagged.plan(Drafts.of(keys, [[0.99, 0.9], [0.99, 0.9]]), Load(2))
    plan = lagged.plan(Drafts.of(["c", "a"], [[0.9, 0.9], [0.9, 0.9]]), Load(2))
    assert plan.lengths == (2, 2)
    plan = lagged.plan(Drafts.of(["d", "a"], [[], [0.9, 0.9]]), Load(2))
    assert plan.lengths == (0, 2)


# -- pins, loads, predictions --------------------------------------------------------------------


@given(batches, steps, st.sampled_from(["causal", "lagged", "auto"]))
def test_a_pinned_length_is_its_own(
    company: Confidences, increments: list[float], name: str
) -> None:
    mine = [0.9, 0.5, 0.9]
    ms = list(itertools.accumulate([1.0, *increments]))
    policy = parse(name, Given(ms))
    for _ in range(4):
        pins = [True] + [False] * len(company)
        plan = policy.plan(of([mine, *company], pinned=pins), Load(3))
        assert plan.lengths[0] == prefix_length(mine)


def test_rows_of_others_and_drafting_are_in_the_price() -> None:
    """The dearer the round is anyway, the more of it should be used."""
    table = [1.0 * r for r in range(40)]
    confidences = [[0.5, 0.5, 0.5]]
    quiet = parse("causal", Given(table)).plan(of(confidences), Load(3))
    beside_a_prompt = parse("causal", Given(table)).plan(of(confidences), Load(3, extra_rows=20))
    assert quiet.lengths == (0,) and beside_a_prompt.lengths == (3,)


def test_predictions_add_up_survival() -> None:
    plan = parse("static:2").plan(of([[0.5, 0.5, 1.0], [0.9], []]), Load(3))
    assert plan.lengths == (2, 1, 0) and plan.predicted == pytest.approx((0.75, 0.9, 0.0))


def test_confidences_are_cleaned_and_calibrated() -> None:
    nan = float("nan")
    drafts = Drafts.of(["a", "b"], [[1.5, nan, 0.9], [-1.0, 0.9]])
    assert drafts.survival.T.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert parse("all").plan(drafts, Load(3)).lengths == (3, 2)
    warm = Drafts.of(["a"], [[0.8, 0.8, 0.0]], temperatures=(2.0, 0.5))
    assert warm.survival[0, 0] == pytest.approx(2 / 3)  # odds 4 become 2
    assert warm.survival[1, 0] == pytest.approx(2 / 3 * 16 / 17)  # and 16
    assert warm.survival[2, 0] == 0
