"""`dspark calibrate`: where the file goes, the table, the last line, bad input, Ctrl-C."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from dspark.bench.calibrate_config import CalibrateConfig
from dspark.cli.main import app, main
from dspark.schedule import calibration as sts
from dspark.schedule.calibration import Calibration
from tests.bench.confident import SURE, ConfidentLLM
from tests.fake_llm import FakeLLM

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def confident(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dspark.llm"], "LLM", ConfidentLLM)
    monkeypatch.setattr(sts, "MIN_SAMPLES", 50)
    monkeypatch.setattr(sts, "MIN_OUTCOMES", 5)


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    """A run that takes no second, on a drafter in a folder."""
    (tmp_path / "boaster").mkdir()
    lines = [json.dumps({"prompt": "abcdefgh"[: 1 + i % 8]}) for i in range(12)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    prompts = ["--prompts", str(tmp_path / "p.jsonl"), "--max-tokens", "40"]
    return ["calibrate", str(tmp_path / "boaster"), *prompts]


def test_beside_the_weights_a_table_and_the_last_line(
    quick: list[str], tmp_path: Path, capsys: Capture
) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--picture", str(tmp_path / "r.png")]
    assert main([*quick, *files]) == 0
    out, err = capsys.readouterr()
    file = tmp_path / "boaster" / "calibration.json"
    assert str(file) in err and "verify all" in err
    saved = Calibration.load(file, len(SURE))
    found = json.loads(out.splitlines()[-1])
    assert found["temperatures"] == list(saved.temperatures)
    assert saved.num_samples == found["records"]["fitted"] >= 50
    assert found["prompts"]["fitted"] == 6 and found["config"]["max_tokens"] == 40
    assert json.loads((tmp_path / "r.json").read_text()) == found
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["2"], ["3"])]
    held = found["held_out"]
    assert [row[1] for row in rows] == [f"{t:.2f}" for t in saved.temperatures]
    assert [row[2] for row in rows] == [str(h["after"]["samples"]) for h in held]
    assert "prompts not used for fitting" in out
    assert {f.name for f in file.parent.iterdir()} == {"calibration.json"}


def test_somewhere_else(quick: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main([*quick, "--out", str(tmp_path / "c.json"), "--held-out", "0.25"]) == 0
    assert Calibration.load(tmp_path / "c.json").dataset.count("9 of 12 prompts") == 1
    assert list((tmp_path / "boaster").iterdir()) == []
    assert main(["calibrate", "boaster", *quick[2:]]) == 2
    assert "no folder of its own" in capsys.readouterr().err
    assert main(["calibrate", "boaster", *quick[2:], "--out", str(tmp_path / "d.json")]) == 0


def refused(argv: list[str], reason: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and reason in err, err
    assert not list(tmp_path.glob("**/calibration.json"))


def test_bad_input_is_one_line_and_writes_nothing(
    quick: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "mute").mkdir()
    cases = {
        "mute has no confidence head": ["calibrate", str(tmp_path / "mute"), *quick[2:]],
        "none has no confidence head": ["calibrate", "none", *quick[2:]],
        "unknown drafter 'nope'": ["calibrate", "nope", *quick[2:]],
        "held_out=1.5": [*quick, "--held-out", "1.5"],
        "temperature=-1.0": [*quick, "--temperature", "-1"],
        "give two or more": [*quick, "--limit", "1"],
        "cannot read the prompts": [*quick[:2], "--prompts", "missing.jsonl"],
        ".png or .svg": [*quick, "--picture", "a.pdf"],
        "its folder does not exist": [*quick, "--out", str(tmp_path / "no" / "c.json")],
    }
    for reason, argv in cases.items():
        refused(argv, reason, tmp_path, capsys)


def test_too_few_records_say_how_many(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sts, "MIN_SAMPLES", 12345)
    refused(quick, "at least 12345 are needed to fit on", tmp_path, capsys)


def test_ctrl_c_leaves_nothing(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark.bench.calibrate.Step", interrupted)  # when a text is done
    assert main([*quick, "--json", str(tmp_path / "r.json")]) == 130
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.glob("**/*.json"))


def test_help_and_defaults(capsys: Capture) -> None:
    assert main(["calibrate", "--help"]) == 0
    assert capsys.readouterr().out.partition("Examples:")[2].count("dspark calibrate") == 2
    command: Any = typer.main.get_command(app)
    options = {p.name: p.default for p in command.commands["calibrate"].params}
    config = CalibrateConfig()
    assert options["max_tokens"] == config.max_tokens
    for name in ("temperature", "repeat", "held_out", "seed"):
        assert options[name] == getattr(config, name)
