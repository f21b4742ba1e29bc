"""`dspark inspect`: what it prints, for programs and for people, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.cli.main import main
from tests.drafters.test_checkpoint import written
from tests.models import official_v4 as official
from tests.models.official_v4 import TINY, TINY_DSPARK
from tests.tiny import oracle

Capture = pytest.CaptureFixture[str]


def as_json(path: Path, capsys: Capture) -> Any:
    assert main(["inspect", str(path), "--json"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    return json.loads(said.out)


def test_deepseek_v4_with_dspark(tmp_path: Path, capsys: Capture) -> None:
    stored, _ = official.tensors(TINY_DSPARK, official.carried(TINY_DSPARK))
    official.write(tmp_path, TINY_DSPARK, stored, 3)
    r = as_json(tmp_path, capsys)
    assert (r["kind"], r["files"], r["tensors"]) == ("deepseek_v4", 3, len(stored))
    assert r["bytes"] == sum(d["bytes"] for d in r["dtypes"].values())
    assert r["bytes"] == sum(p["bytes"] for p in r["parts"].values())
    (drafter,) = r["drafters"]
    assert (drafter["kind"], drafter["stages"], drafter["block_size"]) == ("dspark", 3, 5)
    assert r["memory"]["bf16"]["weights"] == 2 * r["parameters"]
    assert r["memory"]["bf16"]["drafters"] == 2 * drafter["parameters"]
    assert r["memory"]["int8"] is None and r["memory_context"] == 8192
    assert r["cache"]["bf16"]["bytes_per_token"] == 49 and r["drafter"] is None
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "DSpark, 3 stages" in said.out and "block size 5" in said.out
    for text in ("dspark stage 2", "F8_E8M0", "not possible", "shared experts", "49 B"):
        assert text in said.out
    assert not said.err


def test_a_checkpoint_with_neither_says_so(tmp_path: Path, capsys: Capture) -> None:
    official.write(tmp_path, TINY, official.tensors(TINY)[0])
    assert as_json(tmp_path, capsys)["drafters"] == []
    assert main(["inspect", str(tmp_path)]) == 0
    assert "no drafter" in capsys.readouterr().out


def test_the_llama_family(tmp_path: Path, capsys: Capture) -> None:
    model = oracle("llama")
    model.save_pretrained(tmp_path)
    r = as_json(tmp_path, capsys)
    assert r["parameters"] == sum(p.numel() for p in model.parameters())
    assert (r["kind"], r["architecture"], r["sizes"]["layers"]) == ("hf", "llama", 3)
    assert r["memory"]["int8"]["drafters"] == 0


def test_a_drafter_of_ours_and_of_another_dialect(tmp_path: Path, capsys: Capture) -> None:
    written(tmp_path / "a", "vanilla")
    assert main(["export", str(tmp_path / "a"), "--out", str(tmp_path / "b"), "--layout",
                 "speculators"]) == 0  # fmt: skip
    capsys.readouterr()
    ours, theirs = (as_json(tmp_path / n, capsys) for n in "ab")
    assert (ours["kind"], theirs["kind"]) == ("drafter", "drafter")
    assert theirs["architecture"] == "DSparkDraftModel" != ours["architecture"]
    assert ours["drafter"] == theirs["drafter"]
    assert ours["drafter"]["markov_rank"] > 0 and "markov head" in ours["parts"]
    assert ours["parameters"] == theirs["parameters"] > 0
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "markov head" in out and f"block size {ours['drafter']['block_size']}" in out


def test_what_would_not_load_is_a_warning(tmp_path: Path, capsys: Capture) -> None:
    stored, _ = official.tensors(TINY)
    del stored["norm.weight"]
    official.write(tmp_path, TINY, stored)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == "warning: lacks norm.weight\n"
    assert json.loads(said.out)["problems"] == ["lacks norm.weight"]


def test_help_has_two_examples(capsys: Capture) -> None:
    assert main(["inspect", "--help"]) == 0
    assert capsys.readouterr().out.partition("Examples:")[2].count("dspark inspect ") == 2


def test_bad_calls_say_why_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    official.write(tmp_path, TINY, official.tensors(TINY)[0], 2)
    second = "model-00002-of-00002.safetensors"
    (tmp_path / second).unlink()
    (tmp_path / "text").write_text("hello")
    written(tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    config.write_text(config.read_text().replace('"block_size"', '"blocksize"'))
    for argument, message in (
        (str(tmp_path), f"{second} is missing"),
        (str(tmp_path / "text"), "cannot read|is not a GGUF file"),
        (str(tmp_path / "a"), "block_size"),
        ("no such thing", "no model 'no such thing'"),
    ):
        assert main(["inspect", argument]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and said.err.count("\n") == 1 and not said.out
        assert any(part in said.err for part in message.split("|"))
