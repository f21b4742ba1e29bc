"""Configurations: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import ConfigError
from dspark.train.config import TrainConfig, TrainSection, from_raw, load
from dspark.train.losses import LossWeights

FILES = 'files = ["a.jsonl"]\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_dataclasses(tmp_path: Path) -> None:
    c = load(write(tmp_path, "[text]\n" + FILES))
    assert c.text.files == ("a.jsonl",)
    assert c.train == TrainSection() and c.loss == LossWeights()


def test_a_whole_file(tmp_path: Path) -> None:
    text = """
    [text]
    files = ["a.jsonl", "b.jsonl.gz"]
    held_out = 40
    [drafter]
    kind = "dflash"
    target_layer_ids = [1, 9]
    [loss]
    ce = 1
    [train]
    betas = [0.8, 0.9]
    lr = 1
    """
    c = load(write(tmp_path, text))
    assert c.text.held_out == 40 and c.drafter.target_layer_ids == (1, 9)
    assert c.loss.ce == 1.0 and isinstance(c.loss.ce, float) and c.train.betas == (0.8, 0.9)


def test_the_tutorial_s_file(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    c = load(write(tmp_path, example))
    assert c.drafter.target_layer_ids == (9, 18, 27) and c.train.epochs == 4.0
    assert len(page.splitlines()) < 150


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "[text]\n" + FILES + "[train]\nlr = 1e-3\nseed = 1\n")
    c = load(path, [
        "train.lr=2e-4", "train.out=runs/some where", "text.files=[\"x.jsonl\"]",
        "drafter.kind=mtp", "train.shard=true", "drafter.init_layers=[3, 4]", "text.held_out=0.5",
        "target.model=default",
    ])  # fmt: skip
    assert (c.train.lr, c.train.seed, c.train.out) == (2e-4, 1, "runs/some where")
    assert c.text.files == ("x.jsonl",) and c.drafter.kind == "mtp" and c.train.shard
    assert c.drafter.init_layers == (3, 4) and c.text.held_out == 0.5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lrr=1", r"unknown key train\.lrr; did you mean train\.lr\?"),
        ("train.ce=1", r"unknown key train\.ce; did you mean loss\.ce\?"),
        ("drafter.blocksize=7", r"drafter\.blocksize; did you mean drafter\.block_size\?"),
        ("trian.lr=1", r"unknown section \[trian\]; did you mean train\?"),
        ("train.lr=fast", r"train\.lr='fast' is not possible: expected a number"),
        ("train.steps=1.5", r"train\.steps=1\.5 .* expected a whole number"),
        ("train.steps=true", r"train\.steps=True .* expected a whole number"),
        ("train.shard=1", r"train\.shard=1 .* expected true or false"),
        ("drafter.kind=eagle", r"expected dspark, dflash, mtp, block"),
        ("train.autocast=fp16", r"expected none, bf16"),
        ("train.betas=[0.9]", r"expected 2 of a number"),
        ("text.files=[1]", r"expected a list of a text"),
        ("train.lr=-1", r"train\.lr=-1\.0 is out of range: expected 0 up"),
        ("train.warmup=2", r"train\.warmup=2\.0 is out of range: expected 0 to 1"),
        ("train.drop_last=1.5", r"train\.drop_last=1\.5 is out of range: expected 0 to 1"),
        ("train.chunk=0", r"train\.chunk=0 is out of range"),
        ("loss.decay=0", r"loss\.decay=0\.0 is out of range"),
        ("text.files=[]", r"text\.files is empty"),
        ("train.lr", r"override 'train\.lr': expected section\.key=value"),
        ("lr=1", r"override 'lr=1': expected section\.key=value"),
    ],
)
def test_refusals(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as e:
        load(write(tmp_path, "[text]\n" + FILES), [override])
    assert "\n" not in str(e.value)


def test_an_mtp_drafter_cannot_lack_features(tmp_path: Path) -> None:
    path = write(tmp_path, "[text]\n" + FILES)
    assert load(path, ["train.drop_last=0.5"]).train.drop_last == 0.5
    with pytest.raises(ConfigError, match="drop_last is for drafters of blocks"):
        load(path, ["train.drop_last=0.5", "drafter.kind=mtp"])


def test_one_length_of_a_run(tmp_path: Path) -> None:
    path = write(tmp_path, "[text]\n" + FILES)
    with pytest.raises(ConfigError, match=r"train\.steps and train\.epochs are both given"):
        load(path, ["train.steps=3", "train.epochs=1"])


@pytest.mark.parametrize(
    ("text", "words"),
    [("lr = 1\n", "lr stands outside"), ("[train\n", r"cannot read .*c\.toml")],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.toml")


def test_flat_is_json_and_complete() -> None:
    raw: dict[str, dict[str, Any]] = {"text": {"files": ["a"]}, "drafter": {"init_layers": [1]}}
    flat = from_raw(raw).flat()
    assert json.loads(json.dumps(flat)) == flat
    assert flat["text.files"] == ["a"] and flat["loss.decay"] == 4.0
    sections = {name.split(".")[0] for name in flat}
    assert sections == set(TrainConfig.__dataclass_fields__)
