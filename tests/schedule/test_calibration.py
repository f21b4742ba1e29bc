"""Temperatures on synthetic records whose bias is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import CheckpointError, ConfigError
from dspark.schedule.calibration import (
    GRID,
    MIN_SAMPLES,
    Array,
    Calibration,
    auc,
    ece,
    ece_noise,
    evaluate,
    fit,
    reliability,
    sigmoid,
)

BIAS = (2.0, 3.0, 0.5, 4.0)
"""Scores are this many times too sure (0.5: not sure enough)."""


def records(n: int, seed: int, bias: tuple[float, ...] = BIAS) -> tuple[Array, Array]:
    """Scores of a head that is `bias` times too sure, and outcomes that follow the true ones."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.0, 1.2, (n, len(bias)))
    hits = rng.random(true.shape) < sigmoid(true)
    return true * np.array(bias), np.cumprod(hits, axis=1).astype(float)


def test_fitting_lowers_the_error_at_every_position_and_on_new_records() -> None:
    found = fit(*records(8000, 0), dataset="made up")
    c = found.calibration
    assert c.temperatures == pytest.approx(BIAS, rel=0.3)
    assert c.dataset == "made up" and c.num_samples == 8000
    fresh = records(8000, 1)
    raw = evaluate(Calibration.identity(4), *fresh)
    better = evaluate(c, *fresh)
    for q, r, before, after in zip(found.before, found.after, raw, better, strict=True):
        assert r.ece < 0.02 < q.ece and after.ece < 0.02 < before.ece
        assert after.brier < before.brier
        assert after.predicted == pytest.approx(after.realised, abs=0.02)
    assert c.ece_before == tuple(q.ece for q in found.before)
    assert c.ece_after == tuple(q.ece for q in found.after)
    assert [q.position for q in better] == [1, 2, 3, 4]


def test_what_is_fitted_is_the_product_behind_fixed_positions() -> None:
    """Position 1 always says 0.5, which no temperature changes and which is too little: that of
    position 2 is the best of all for the product, surer than what suits position 2 by itself."""
    logits, survived = records(4000, 2, (1.0, 2.0))
    logits[:, 0] = 0.0
    found = fit(logits, survived)
    first, second = found.calibration.temperatures
    others = [evaluate(Calibration((first, t)), logits, survived)[1].ece for t in GRID]
    assert found.after[1].ece <= min(others) < found.before[1].ece
    alive = survived[:, 0] == 1
    by_itself = [ece(sigmoid(logits[alive, 1] / t), survived[alive, 1]) for t in GRID]
    assert first == 1 and second < 0.8 * GRID[np.argmin(by_itself)]


def test_too_little_data_changes_nothing() -> None:
    logits, survived = records(MIN_SAMPLES, 3)
    assert not fit(logits, survived).calibration.is_identity
    few = fit(logits[:-1], survived[:-1])
    assert few.calibration.is_identity and few.calibration.ece_before == few.calibration.ece_after
    never = fit(logits, np.zeros_like(survived))
    assert never.calibration.is_identity and never.after[0].auc is None


def test_honest_scores_stay_about_what_they_are() -> None:
    found = fit(*records(8000, 4, (1.0, 1.0, 1.0)))
    assert found.calibration.temperatures == pytest.approx((1, 1, 1), abs=0.2)
    assert max(q.ece for q in found.before) < 2 * ece_noise(8000)


@settings(max_examples=40)
@given(
    st.lists(st.floats(-40, 40), min_size=2, max_size=20),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=3),
)
def test_order_is_kept(scores: list[float], temperatures: list[float]) -> None:
    c = Calibration(tuple(temperatures))
    column = np.repeat(np.sort(scores)[:, None], len(temperatures), axis=1)
    for out in (c.apply(column), c.apply_probabilities(sigmoid(column))):
        assert (np.diff(out, axis=0) >= 0).all() and (out >= 0).all() and (out <= 1).all()
    column = np.clip(column, -3, 3)
    assert c.apply(column) == pytest.approx(c.apply_probabilities(sigmoid(column)), abs=1e-9)
    apart = np.diff(column, axis=0) > 0.01
    assert (np.diff(c.apply(column), axis=0)[apart] > 0).all()


def test_ranks_at_the_first_position_do_not_change() -> None:
    """AUC is about order: temperature leaves that of position 1 exactly alone."""
    found = fit(*records(3000, 5))
    assert found.after[0].auc == found.before[0].auc
    assert found.before[0].auc is not None and 0.7 < found.before[0].auc < 0.9


def test_measures_by_hand() -> None:
    y = np.array([0.0, 1.0, 1.0, 0.0])
    assert auc(np.array([0.1, 0.2, 0.2, 0.2]), y) == (1 + 1 + 0.5 + 0.5) / 4
    assert auc(np.array([0.1, 0.9]), np.array([1.0, 1.0])) is None
    assert ece(np.array([1.0, 1.0, 0.0, 0.0]), y) == pytest.approx(0.5)
    assert ece(np.array([0.5, 0.5, 0.5, 0.5]), y) == 0
    assert ece(np.zeros(0), np.zeros(0)) == 0


def test_the_noise_of_honest_scores_is_about_what_is_said() -> None:
    rng = np.random.default_rng(6)
    found = []
    for _ in range(30):
        p = rng.random(2000)
        found.append(ece(p, (rng.random(2000) < p).astype(float)))
    assert 0.5 < np.mean(found) / ece_noise(2000) < 1.5


def test_the_reliability_diagram_is_the_error_in_pieces() -> None:
    logits, survived = records(3000, 7)
    c = Calibration((1.0, 2.0, 1.0, 1.0))
    bins = reliability(c, logits, survived, 2)
    assert len(bins) == 15 and sum(b.count for b in bins) == 3000
    assert all(b.low <= b.predicted <= b.high for b in bins if b.count)
    error = sum(b.count * abs(b.predicted - b.realised) for b in bins) / 3000
    assert error == pytest.approx(evaluate(c, logits, survived)[1].ece)


def test_cut_drafts_are_masked() -> None:
    logits, survived = records(4000, 8)
    known = np.ones(logits.shape, bool)
    known[::2, 2:] = False
    poisoned, outcomes = logits.copy(), survived.copy()
    poisoned[~known] = np.nan
    outcomes[~known] = 1
    a, b = fit(poisoned, outcomes, known), fit(logits, survived, known)
    assert a == b and [q.samples for q in a.after] == [4000, 4000, 2000, 2000]


@pytest.mark.parametrize(
    ("logits", "survived", "known"),
    [
        ([[1.0, 2.0]], [[0.0, 1.0]], None),
        ([[1.0, 2.0]], [[1.0, 0.5]], None),
        ([[1.0, np.inf]], [[1.0, 1.0]], None),
        ([[1.0, 2.0]], [[1.0]], None),
        ([1.0], [1.0], None),
        ([[1.0, 2.0]], [[1.0, 1.0]], [[False, True]]),
    ],
)
def test_what_is_no_record(logits: Any, survived: Any, known: Any) -> None:
    with pytest.raises(ConfigError):
        fit(np.array(logits), np.array(survived), None if known is None else np.array(known))


# -- the file ------------------------------------------------------------------------------------


def test_the_file_is_what_other_engines_read(tmp_path: Path) -> None:
    c = Calibration((1.5, 0.8), "chat", 1234, (0.05, 0.06), (0.01, 0.02))
    c.save(tmp_path / "c.json")
    raw = json.loads((tmp_path / "c.json").read_text())
    assert raw == {
        "temperatures": [1.5, 0.8],
        "dataset": "chat",
        "num_samples": 1234,
        "ece_before": [0.05, 0.06],
        "ece_after": [0.01, 0.02],
    }
    assert Calibration.load(tmp_path / "c.json", 2) == c
    with pytest.raises(ConfigError, match="has 2 temperatures and the drafter's block 7"):
        Calibration.load(tmp_path / "c.json", 7)
    (tmp_path / "c.json").write_text('{"temperatures": [1]}')
    assert Calibration.load(tmp_path / "c.json") == Calibration((1.0,))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"temperatures": []},
        {"temperatures": [1.0, 0.0]},
        {"temperatures": [1.0, -2.0]},
        {"temperatures": [float("nan")]},
        {"temperatures": "1.0"},
        {"temperatures": ["1.0"]},
        {"temperatures": [True]},
        {"temperatures": [1.0, 1.0], "ece_after": [0.1]},
        {"temperatures": [1.0], "ece_before": [7]},
        {"temperatures": [1.0], "num_samples": "many"},
    ],
)
def test_damaged_calibrations_are_refused(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="calibrate again") as e:
        Calibration.load(tmp_path / "c.json")
    assert "\n" not in str(e.value)


def test_drafts_longer_than_the_calibration_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 positions and the drafts 3"):
        Calibration((1.0, 1.0)).apply(np.zeros((1, 3)))
    assert Calibration((2.0, 1.0)).apply(np.array([[2.0]])) == pytest.approx(
        sigmoid(np.ones((1, 1)))
    )
