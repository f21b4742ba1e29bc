"""Metrics: one line a step whatever happened before, TensorBoard if it is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.train.metrics import Metrics


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def write(out: Path, begin: int, steps: range) -> None:
    metrics = Metrics(out, begin)
    for step in steps:
        metrics.write("train", step, {"loss": step / 2, "accept": [0.5, step / 100]})
    metrics.close()


def test_lines(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    assert [x["step"] for x in lines(tmp_path)] == [1, 2, 3]
    assert lines(tmp_path)[1] == {"split": "train", "step": 2, "loss": 1.0, "accept": [0.5, 0.02]}


def test_a_run_that_goes_on_cuts_what_lies_behind_its_state(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 8))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "st')  # killed while writing
    write(tmp_path, 5, range(6, 9))
    assert [x["step"] for x in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not (tmp_path / "metrics.part").exists()


def test_what_json_cannot_write_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.write("train", 1, {"loss": float("nan"), "accept": [float("inf"), 1.0]})
    metrics.close()
    assert lines(tmp_path) == [{"split": "train", "step": 1, "loss": None, "accept": [None, 1.0]}]


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 0, range(1, 4))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"train/loss", "train/accept/1", "train/accept/2"} <= set(board.Tags()["scalars"])
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(1, 0.5), (2, 1), (3, 1.5)]


def test_without_tensorboard_there_are_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    metrics = Metrics(tmp_path, 0)
    assert not metrics.has_board
    metrics.write("train", 1, {"loss": 1.0})
    metrics.close()
    assert len(lines(tmp_path)) == 1 and not (tmp_path / "tensorboard").exists()
