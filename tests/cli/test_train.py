"""`dspark train`: the plan, the lines of a run, how it ends, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.cli import progress
from dspark.cli.main import main
from dspark.drafters import checkpoint
from dspark.train import plan as plans
from dspark.train import setup, state
from dspark.train.trainer import Trainer
from tests.train.tiny_runs import directory, toml

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def config(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of six steps over a cache, beside its outputs."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": f"say {i}", "answer": "".join(map(chr, rng.integers(33, 126, 20))),
         "temperature": 1.0, "finish_reason": "length"}
        for i in range(10)
    ]  # fmt: skip
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    return toml(tmp_path / "c.toml", {
        "target": {"model": str(model), "dtype": "fp32", "device": "cpu"},
        "text": {"files": [str(text)], "held_out": 2},
        "drafter": {"num_layers": 1, "block_size": 3, "markov_rank": 4, "draft_vocab_size": 50},
        "features": {"pass_tokens": 64},
        "train": {"out": str(tmp_path / "run"), "steps": 6, "anchors_per_step": 32, "log_every": 2,
                  "eval_every": 3, "save_every": 3},
    })  # fmt: skip


def refused(capsys: Capture, *argv: str) -> str:
    assert main(["train", *argv]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_the_plan_trains_nothing(config: Path, tmp_path: Path, capsys: Capture) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["train", str(config), "--plan"]) == 0
    out, err = capsys.readouterr()
    for name in ("samples", "held out", "anchors per epoch", "steps", "trainable parameters",
                 "memory: Adam", "memory: logits of a chunk", "disk for features"):  # fmt: skip
        assert any(line.startswith(f"{name}  ") for line in out.splitlines()), name
    assert not err and sorted(tmp_path.iterdir()) == before


def test_a_run_and_once_more(config: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", str(config)]) == 0
    out, err = capsys.readouterr()
    assert not out and "\x1b" not in err
    assert "tok/s" in err, "features are computed first"
    assert "step 3: held out: loss" in err and "finished at step 6 of 6, accepted length" in err
    assert "training 6/6 · " in err and "anchors/s · loss" in err
    drafter = checkpoint.load(tmp_path / "run" / "drafter")
    assert drafter.training["steps"] == 6 and drafter.training["held_out"] is True
    assert drafter.draft_ids is not None and len(drafter.draft_ids) == 50
    assert main(["train", str(config)]) == 0
    err = capsys.readouterr().err
    assert "going on at step 6 of 6" in err and "tok/s" not in err


def test_overrides_and_another_run_in_the_same_place(config: Path, capsys: Capture) -> None:
    assert main(["train", str(config), "train.steps=2"]) == 0
    line = refused(capsys, str(config))
    assert "train.steps=2, this one has 6" in line and "take another train.out" in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["none.toml"], "cannot read none.toml"),
        (["CONFIG", "train.lrr=1"], "did you mean train.lr?"),
        (["CONFIG", "train.lr"], "expected section.key=value"),
        (["CONFIG", "text.files=gone.jsonl"], "cannot read training text gone.jsonl"),
        (["CONFIG", "target.model=gone"], "no model 'gone'"),
        (["CONFIG", "drafter.target_layer_ids=[2]"], "final layer 2"),
    ],
)
def test_refusals(config: Path, capsys: Capture, argv: list[str], words: str) -> None:
    assert words in refused(capsys, *[str(config) if a == "CONFIG" else a for a in argv])


@pytest.mark.parametrize("option", [[], ["--plan"]])
def test_what_does_not_fit_is_refused(
    config: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch,
    option: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(plans, "_free_memory", lambda run: 10)
    assert "not enough memory" in refused(capsys, str(config), *option)
    assert not (tmp_path / "run").exists()


def test_ctrl_c_is_130_and_goes_on(
    config: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.train_step

    def step(self: Trainer, items: Any) -> None:
        real(self, items)
        if self.counters.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        assert main(["train", str(config)]) == 130
    assert "interrupted at step 2 of 6" in capsys.readouterr().err
    found = state.load(tmp_path / "run")
    assert found is not None and found.counters.step == 2
    assert main(["train", str(config)]) == 0
    assert "going on at step 2 of 6" in capsys.readouterr().err


def test_ctrl_c_while_features_are_computed(
    config: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = setup.feats.compute
    calls: list[int] = []

    def compute(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(setup.feats, "compute", compute)
        assert main(["train", str(config)]) == 130
    meta = setup.feats.read_meta(tmp_path / "run" / "features")
    assert 0 < meta.complete < 10
    assert main(["train", str(config), "train.steps=1"]) == 0


def test_not_finite_is_one_line_and_keeps_the_state(
    config: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.train_step

    def step(self: Trainer, items: Any) -> None:
        if self.counters.step == 4:
            with torch.no_grad():
                self.model.norm.weight.fill_(float("nan"))
        real(self, items)

    monkeypatch.setattr(Trainer, "train_step", step)
    assert "the loss is not finite at step 5, batch of sequences" in refused(capsys, str(config))
    found = state.load(tmp_path / "run")
    assert found is not None and found.counters.step == 3


def test_without_tensorboard_it_says_so(
    config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", str(config), "train.steps=1"]) == 0
    assert "TensorBoard is not installed (dspark[train]): metrics.jsonl only" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("color", ["auto", "always"])
def test_a_terminal_gets_a_bar(
    config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, color: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if color == "auto":
        monkeypatch.setenv("NO_COLOR", "1")
    assert main(["train", str(config), "train.steps=2", "--color", color]) == 0
    err = capsys.readouterr().err
    assert "2/2" in err and "anchors/s" in err
    assert ("\x1b[38" in err or "\x1b[32" in err or "\x1b[35" in err) == (color == "always")
