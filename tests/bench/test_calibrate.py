"""Collecting and fitting, on a drafter whose true confidences are known; through `LLM` as well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.bench.calibrate import Report, Step, _records, run
from dspark.bench.calibrate_config import CalibrateConfig
from dspark.drafters.base import Drafter
from dspark.errors import ConfigError, InvalidRequestError
from dspark.llm import LLM
from dspark.schedule import calibration as sts
from dspark.schedule.calibration import Calibration
from dspark.types import Round
from tests.bench.confident import SURE, ConfidentLLM, prompt_set
from tests.engine.oracle import PATTERNS, OracleDrafter, reference
from tests.engine.test_schedules import Doubter
from tests.server.served import tiny_directory


@pytest.fixture(scope="module")
def report() -> Report:
    return run(ConfidentLLM(), prompt_set(36), CalibrateConfig("boaster", max_tokens=150))


def test_boasting_is_found_and_mended_on_prompts_not_fitted_on(report: Report) -> None:
    assert report.records >= sts.MIN_SAMPLES and report.held_out_records > 800
    assert report.fitted_prompts == 18
    for found, factor in zip(report.calibration.temperatures, SURE, strict=True):
        assert factor / 1.7 < found < factor * 1.7
    for p in report.positions:
        assert p.chance is not None and p.after.samples <= report.held_out_records
        assert p.before.ece > 2.5 * p.chance and p.after.ece < 1.5 * p.chance
        assert p.after.brier < p.before.brier
        assert p.after.auc is not None and p.after.auc > 0.6
        assert sum(b.count for b in p.bins_after) == p.after.samples
    assert "18 of 36 prompts" in report.calibration.dataset
    assert report.calibration.num_samples == report.records


def test_the_division_is_by_prompt_and_by_seed() -> None:
    config = CalibrateConfig(held_out=0.25)
    chosen = config.fitted(40)
    assert sum(chosen) == 30 and chosen == config.fitted(40)
    assert chosen != CalibrateConfig(held_out=0.25, seed=1).fitted(40)
    assert sum(CalibrateConfig(held_out=0.01).fitted(2)) == 1
    with pytest.raises(ConfigError, match="two or more"):
        config.fitted(1)


def test_progress_hears_of_every_text() -> None:
    steps: list[Step] = []
    config = CalibrateConfig("boaster", max_tokens=20, repeat=2)
    with pytest.raises(ConfigError, match=r"\d+ drafts to fit on .* at least 1000 are needed"):
        run(ConfidentLLM(), prompt_set(6), config, steps.append)
    asked = Counter(s.output.prompt_ids for s in steps)
    assert len(asked) == 6 and set(asked.values()) == {2}
    assert steps[-1].seconds > 0


def test_records_by_hand() -> None:
    """A whole draft; one cut by the room that was left; one in which the text ended."""
    said = (0.5, 0.75, 1.0)

    def round_(n: int, accepted: int, emitted: int) -> Round:
        tokens = tuple(range(emitted))
        return Round("r", 0, (1, 2, 3)[:n], n, accepted, tokens, 0, 0, 0, 0.0, said[:n])

    found = _records([(4, round_(3, 1, 2)), (5, round_(2, 2, 3)), (6, round_(3, 2, 2))], 3)
    assert found.prompt.tolist() == [4, 5, 6]
    assert found.known.tolist() == [[True] * 3, [True, True, False], [True, True, False]]
    assert found.survived.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    assert found.logits[0, :2] == pytest.approx([0, np.log(3)])
    assert np.isfinite(found.logits).all() and found.logits[0, 2] > 15
    assert found.of(np.arange(7) == 5).prompt.tolist() == [5]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mute", "sizing", "none"])
def test_drafters_without_a_confidence_head(name: str) -> None:
    llm = ConfidentLLM()
    with pytest.raises(ConfigError, match=f"{name} has no confidence head"):
        run(llm, prompt_set(4), CalibrateConfig(name))
    assert not llm.engine.has_work and llm.engine.on_round is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("repeat", 0), ("held_out", 0.0), ("held_out", 1.0), ("held_out", float("nan"))],
)
def test_bad_settings(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        CalibrateConfig(**{field: value})
    with pytest.raises(InvalidRequestError, match="temperature"):
        CalibrateConfig(temperature=-1.0)


def test_a_prompt_without_room() -> None:
    with pytest.raises(InvalidRequestError, match="shorten"):
        run(ConfidentLLM(), prompt_set(26 * 160), CalibrateConfig("boaster"))


# -- through LLM -----------------------------------------------------------------------------------


def test_a_second_fit_replaces_the_first_and_does_not_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Confidences are recorded as the head says them, also where a calibration is applied."""
    monkeypatch.setattr(sts, "MIN_SAMPLES", 20)
    monkeypatch.setattr(sts, "MIN_OUTCOMES", 5)
    prompts = prompt_set(8)

    def build(name: str, target: Any, *_: Any, **__: Any) -> Drafter:
        texts = {ids: reference(target, ids, 40) for ids in map(llm_ids, prompts.prompts)}
        return Doubter(OracleDrafter(texts, 4, PATTERNS["some"]))

    directory = str(tiny_directory(tmp_path / "model"))
    llm = LLM(directory, dtype="int8", drafter="none", max_context=128)
    llm_ids = llm.encode_prompt
    monkeypatch.setattr("dspark.engine.placement.build", build)
    weights = tmp_path / "drafter"
    weights.mkdir()
    config = CalibrateConfig(str(weights), temperature=0.0, max_tokens=40)
    first = run(llm, prompts, config).calibration
    assert not first.is_identity
    assert llm.drafter_folder == weights
    file = weights / sts.FILE
    first.save(file)
    llm.set_drafter(str(weights))
    assert llm.engine.scheduler.calibration == first == Calibration.load(file)
    assert run(llm, prompts, config).calibration == first
    assert llm.engine.scheduler.calibration is None
    file.write_text("{")  # what cannot be read can be made anew
    assert run(LLM(directory, dtype="int8", drafter="none"), prompts, config).calibration == first
    llm.set_drafter("none")
    assert llm.drafter_folder is None
