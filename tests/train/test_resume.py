"""Stopping and going on: to the bit, from the last good state, and only with the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import CheckpointError, ConfigError
from dspark.train import state
from dspark.train.batches import Place
from dspark.train.trainer import Outcome, Trainer, learning_rate
from tests.train.tiny_runs import DRAFTERS, run, trainer

TIMES = ("anchors_per_second",)


def go(made: Trainer, steps: int | None = None) -> Outcome:
    """Train to the end, or interrupt after some steps."""
    last = made.counters.step + (steps or made.total)
    return made.train(interrupted=lambda: made.counters.step >= last)


def snapshot(made: Trainer) -> dict[str, Any]:
    items, place = made.order.batch(Place(made.counters.epoch, made.counters.offset))
    return {
        "weights": made.weights(),
        "adam": {n: made.adam.state[p] for p, n in made.names.items()},
        "place": (made.counters.step, made.counters.epoch, made.counters.offset),
        "seen": (made.counters.anchors, made.counters.tokens),
        "next": (items, place),
        "rate": learning_rate(made.counters.step, made.total, made.config),
        "rng": torch.get_rng_state(),
        "estimate": made.estimate,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def logged(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in TIMES} for r in rows]


@pytest.mark.parametrize("form", DRAFTERS)
def test_ten_steps_are_five_and_five_to_the_bit(tmp_path: Path, form: str) -> None:
    options = {"anchors_per_sequence": 9, "drop_last": 0.0 if form == "mtp" else 0.5}
    whole = trainer(run(tmp_path / "a", form, **options))
    assert go(whole) is Outcome.finished
    wanted = snapshot(whole)
    first = trainer(run(tmp_path / "b", form, **options))
    assert go(first, 5) is Outcome.interrupted
    torch.manual_seed(99)  # a new process has another state
    second = trainer(run(tmp_path / "b", form, **options))
    assert second.counters.step == 5 and second.counters is not first.counters
    assert go(second) is Outcome.finished
    found = snapshot(second)
    for key in wanted:
        assert same(found[key], wanted[key]), key
    assert found["place"][1] >= 1, "the run crossed an epoch"
    assert logged(tmp_path / "a") == logged(tmp_path / "b")
    steps = [r["step"] for r in logged(tmp_path / "b") if r["split"] == "train"]
    assert steps == sorted(set(steps)) == [2, 4, 6, 8, 10]


def test_stopping_between_two_log_lines_loses_no_number(tmp_path: Path) -> None:
    go(trainer(run(tmp_path / "a")))
    for _ in range(10):
        if go(trainer(run(tmp_path / "b")), 1) is Outcome.finished:
            break
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_a_killed_run_goes_on_from_its_last_state(tmp_path: Path) -> None:
    """Killed at step 8 with states at 5: what was logged of 6 to 8 is not logged twice."""
    go(trainer(run(tmp_path / "a")))
    killed = trainer(run(tmp_path / "b"))

    def kill(report: Any) -> None:
        if report.kind == "step" and report.step == 8:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        killed.train(kill)
    again = trainer(run(tmp_path / "b"))
    assert again.counters.step == 5
    go(again)
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    first = trainer(run(tmp_path))
    go(first)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = trainer(run(tmp_path))
    assert go(again) is Outcome.finished and same(again.weights(), first.weights())
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_last_two_states_are_kept(tmp_path: Path) -> None:
    go(trainer(run(tmp_path, save_every=2)))
    names = sorted(p.name for p in (tmp_path / "state").iterdir())
    assert names == ["step-00000008.pt", "step-00000010.pt"]


def test_an_interrupted_write_leaves_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(trainer(run(tmp_path)), 5)
    good = state.path_of(tmp_path, 5).read_bytes()

    def full_disk(content: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(CheckpointError, match="No space left"):
            go(trainer(run(tmp_path)))
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["step-00000005.pt"]
    assert state.path_of(tmp_path, 5).read_bytes() == good
    (tmp_path / "state" / "step-00000010.part").write_bytes(b"killed while writing")
    assert trainer(run(tmp_path)).counters.step == 5


def test_a_damaged_state_is_passed_over(tmp_path: Path) -> None:
    go(trainer(run(tmp_path)))
    path = state.path_of(tmp_path, 10)
    path.write_bytes(path.read_bytes()[:1000])
    assert trainer(run(tmp_path)).counters.step == 5
    state.path_of(tmp_path, 5).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no state in .* can be read"):
        trainer(run(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 1e-3}, r"train\.lr=0\.003, this one has 0\.001"),
        ({"steps": 20}, r"train\.steps=10, this one has 20"),
        ({"seed": 1}, r"train\.seed=0, this one has 1"),
        ({"anchors_per_step": 25}, r"train\.anchors_per_step=24"),
        ({"form": "dflash"}, r"drafter\.kind=dspark, this one has dflash"),
        ({"text": 1}, r"text=\w+, this one has"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    from tests.train.tiny_runs import samples

    go(trainer(run(tmp_path)), 2)
    if "text" in change:
        change = {"text": samples(seed=1)}
    with pytest.raises(ConfigError, match=words):
        trainer(run(tmp_path, **change))


def test_what_changes_nothing_learned_may_change(tmp_path: Path) -> None:
    go(trainer(run(tmp_path)), 2)
    free = {"max_minutes": 5.0, "save_every": 3, "eval_every": 4, "log_every": 1, "threads": 1}
    assert trainer(run(tmp_path, **free)).counters.step == 2
