"""Drafters of a V4, from a file to a drafter that serves beside its target and inside of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.bench.compare import BenchConfig
from dspark.bench.compare import run as compare
from dspark.bench.prompts import load_prompts
from dspark.errors import CheckpointError, ConfigError
from dspark.llm import LLM
from dspark.models.loading import load_checkpoint
from dspark.train.config import build
from dspark.train.trainer import Outcome
from dspark.train.v4.checkpoint import assemble
from dspark.train.v4.drafter import DrafterJob, V4TrainConfig, make_loop, wants_v4
from dspark.train.v4.loop import Loop
from dspark.train.v4.pretrain import make_loop as make_tower
from dspark.train.v4.pretrain import model_directory
from tests.train.v4.test_pretrain import logged, moments, same
from tests.train.v4.tiny_towers import config as tower_config

KINDS = ("mtp1", "dspark")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tower that has learned a little; its text lies two folders above."""
    settings = tower_config(tmp_path_factory.mktemp("tower"), epochs=4, lr=1e-2)
    make_tower(settings).run()
    return model_directory(settings)


def raw(model: Path, out: Path, kind: str, **train: Any) -> dict[str, dict[str, Any]]:
    drafter: dict[str, Any] = {"kind": kind}
    if kind == "dspark":
        drafter |= {"stages": 2, "block_size": 4, "markov_rank": 8}
    return {
        "target": {"model": str(model)},
        "text": {"files": [str(model.parents[1] / "text.jsonl")], "max_tokens": 96, "held_out": 4},
        "drafter": drafter,
        "train": {"out": str(out), "epochs": 2, "anchors_per_step": 64, "anchors_per_sequence": 16,
                  "lr": 1e-2, "save_every": 4, "eval_every": 4, "log_every": 3} | train,
    }  # fmt: skip


def loop(model: Path, out: Path, kind: str, **train: Any) -> Loop:
    made = make_loop(build(V4TrainConfig, raw(model, out, kind, **train)))
    made.job.begin(lambda done, total: None)
    return made


def go(made: Loop, steps: int = 10**6) -> Outcome:
    last = made.counters.step + steps
    return made.run(interrupted=lambda: made.counters.step >= last)


@pytest.mark.parametrize("kind", KINDS)
def test_stopping_and_going_on_changes_no_bit(tower: Path, tmp_path: Path, kind: str) -> None:
    drop_last = 0.0 if kind == "mtp1" else 0.5
    whole = loop(tower, tmp_path / "a", kind, drop_last=drop_last)
    assert go(whole) is Outcome.finished and whole.counters.step > 6
    first = loop(tower, tmp_path / "b", kind, drop_last=drop_last)
    assert go(first, 5) is Outcome.interrupted
    torch.manual_seed(5)
    part = loop(tower, tmp_path / "b", kind, drop_last=drop_last)
    assert go(part) is Outcome.finished
    assert same(part.job.module.state_dict(), whole.job.module.state_dict())
    assert same(moments(part), moments(whole))
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_both_learn_and_serve_beside_their_target_and_inside_of_it(
    tower: Path, tmp_path: Path
) -> None:
    for kind in KINDS:
        made = loop(tower, tmp_path / kind, kind, epochs=4)
        before = made.job.held_out()["accepted_length"]
        go(made)
        after = logged(tmp_path / kind)[-1]
        assert after["split"] == "held_out" and after["accepted_length"] > before + 0.1
    whole = tmp_path / "whole"
    assemble(tower, tmp_path / "dspark" / "drafter", whole)
    (tmp_path / "mtp1" / "drafter").rename(whole / "mtp1")
    found = load_checkpoint(str(whole))
    assert [d.kind for d in found.carried] == ["dspark"] and found.carried[0].confidence
    llm = LLM(str(whole), dtype="fp32", drafter="none", max_users=1)
    prompts = load_prompts([str(_prompts(tmp_path))], None)
    settings = BenchConfig(drafters=("none", "mtp1", "dspark"), max_tokens=24, verify="all")
    report = compare(llm, prompts, settings)
    assert report.differences == ()
    for result in report.results[1:]:
        assert result.accepted_length is not None and result.accepted_length > 1
    beside = LLM(str(tower), dtype="fp32", drafter=str(tmp_path / "dspark" / "drafter"))
    assert beside.drafter_name.endswith("drafter")
    auto = LLM(str(whole), dtype="fp32")
    assert auto.drafter_name == "dspark"


def _prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say the {i}."}) + "\n" for i in range(2)))
    return path


def test_a_drafter_of_another_target_or_none_at_all_is_refused(tower: Path, tmp_path: Path) -> None:
    made = loop(tower, tmp_path / "run", "mtp1")
    go(made, 1)
    directory = tmp_path / "run" / "drafter"
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"sliding_window": 4}))
    with pytest.raises(CheckpointError, match="another target: window 4 and 8"):
        LLM(str(tower), dtype="fp32", drafter=str(directory))
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    save_file({"a": tensors["mtp.0.norm.weight"]}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds no drafter: it has no tensors mtp\.\*"):
        LLM(str(tower), dtype="fp32", drafter=str(directory))
    with pytest.raises(CheckpointError, match="exists: name another directory"):
        assemble(tower, directory, tower)
    with pytest.raises(CheckpointError, match="cannot assemble"):
        assemble(tower, tmp_path / "nowhere", tmp_path / "new")
    assert not list(tmp_path.glob("*new*"))


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("drafter", "stages", 2, "drafter.stages is not possible with kind mtp1"),
        ("train", "drop_last", 0.5, "train.drop_last is for drafters of blocks"),
        ("train", "shard", True, "train.shard is not possible for a DeepSeek-V4"),
        ("train", "autocast", "bf16", "train.autocast is not possible for a DeepSeek-V4"),
        ("drafter", "inject", True, "unknown key drafter.inject"),
        ("text", "files", [], "text.files is empty"),
    ],
)
def test_bad_input_is_refused(
    tower: Path, tmp_path: Path, section: str, key: str, value: Any, message: str
) -> None:
    sections = raw(tower, tmp_path, "mtp1")
    sections[section][key] = value
    with pytest.raises(ConfigError, match=message):
        build(V4TrainConfig, sections)


def test_stages_must_fit_the_target(tower: Path, tmp_path: Path) -> None:
    for key, value, message in (
        ("target_layer_ids", [7], r"drafter.target_layer_ids=\[7\]: the target has 3 layers"),
        ("noise_token_id", 300, "drafter.noise_token_id=300 is no token"),
    ):
        sections = raw(tower, tmp_path, "dspark")
        sections["drafter"][key] = value
        with pytest.raises(ConfigError, match=message):
            make_loop(build(V4TrainConfig, sections))


def test_the_kind_of_the_target_chooses_the_trainer(tower: Path, tmp_path: Path) -> None:
    assert wants_v4(raw(tower, tmp_path, "mtp1"))
    assert not wants_v4({"target": {"model": "default"}}) and not wants_v4({})
    made = make_loop(build(V4TrainConfig, raw(tower, tmp_path, "dspark")))
    assert isinstance(made.job, DrafterJob) and made.job.settings is not None
    assert made.job.settings.noise_token_id == 8 and made.job.settings.target_layer_ids == (0, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_stage_begins_with_another_runs_weights(
    tower: Path, tmp_path: Path, kind: str
) -> None:
    first = loop(tower, tmp_path / "one", kind)
    go(first, 4)
    sections = raw(tower, tmp_path / "two", kind)
    sections["drafter"]["start_from"] = str(tmp_path / "one" / "drafter")
    made = make_loop(build(V4TrainConfig, sections))
    for name, tensor in made.job.module.state_dict().items():
        before = first.job.module.state_dict()[name]
        torch.testing.assert_close(tensor, before, atol=0, rtol=0.01, msg=name)  # stored in bf16
    other = {"mtp1": "dspark", "dspark": "mtp1"}[kind]
    sections["drafter"] = raw(tower, tmp_path / "two", other)["drafter"] | {
        "start_from": str(tmp_path / "one" / "drafter")
    }
    with pytest.raises(CheckpointError, match=r"mtp\.0\."):
        make_loop(build(V4TrainConfig, sections))
