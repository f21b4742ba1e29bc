"""`dspark eval`: tables, the last line, the estimate, the picture, bad input."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from shlex import split
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from dspark.cli.main import app, main
from dspark.errors import ConfigError
from dspark.types import Output
from tests.fake_llm import FakeLLM

Capture = pytest.CaptureFixture[str]
QUICK = ["eval", "ngram", "--limit", "2"]


class EvalFake(FakeLLM):
    """`FakeLLM` with what batches need; a folder is a drafter that guesses as `ngram` does."""

    target = SimpleNamespace(max_context=64)
    interrupt = False

    def set_drafter(self, name: str, num_draft_tokens: int | None = None, **_: Any) -> None:
        super().set_drafter("ngram" if Path(name).is_dir() else name, num_draft_tokens)
        self.asked = name

    def encode_prompt(self, prompt: Any, raw: bool = False) -> tuple[int, ...]:
        return tuple(range(min(len(prompt), 63)))

    def generate(self, prompts: Any, params: Any = None) -> list[Output]:
        if self.interrupt:
            raise KeyboardInterrupt
        return [self.chat(p, q) for p, q in zip(prompts, params, strict=True)]


@pytest.fixture(autouse=True)
def evaluated(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dspark.llm"], "LLM", EvalFake)


def last_line(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def cells(out: str, *begin: str) -> list[list[str]]:
    """The rows of the tables that begin so."""
    rows = [line.split() for line in out.splitlines()]
    return [row for row in rows if row[: len(begin)] == list(begin)]


def checkpoint(folder: Path, **training: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"training": training}), encoding="utf-8")
    return str(folder)


def test_tables_and_the_last_line(capsys: Capture) -> None:
    assert main([*QUICK, "--prompts", "builtin:chat,builtin:code"]) == 0
    out = capsys.readouterr().out
    # Ten tokens: one of the prefill, then five rounds of two guesses, the first of them right.
    for temperature in "01":
        for name, texts, rounds in (("chat", 2, 10), ("code", 2, 10), ("mean", 4, 20)):
            lengths, conditional, cumulative = cells(out, "ngram", temperature, name)
            assert lengths[3:] == [
                str(texts), str(rounds), "2.00", "1.80", "0.00", "2.00", "50", "%",
            ]  # fmt: skip
            assert conditional[3:] == ["100", "0"] == cumulative[3:]
    assert "accepted / tried" in out and "accepted / all rounds" in out
    assert "tried_at" in out and "\x1b" not in out
    found = last_line(out)
    assert {"model", "dtype", "prompts", "config", "versions", "definitions"} <= found.keys()
    assert [(r["temperature"], r["prompts"]) for r in found["results"]] == [
        (t, f"builtin:{kind}") for t in (0, 1) for kind in ("chat", "code")
    ]
    assert all(r["accepted_length"] == 1.8 for r in found["results"])
    assert found["results"][0]["conditional"] == [1.0, 0.0]
    assert len(found["means"]) == 2 and found["estimates"] == []
    assert sum(line.startswith("{") for line in out.splitlines()) == 1


def test_drafters_share_the_model(capsys: Capture) -> None:
    assert main(["eval", "ngram", "none", "--limit", "1", "--temperatures", "0"]) == 0
    out = capsys.readouterr().out
    assert len(FakeLLM.created) == 1
    assert [r["drafter"] for r in last_line(out)["results"]] == ["ngram", "none"]
    assert cells(out, "none", "0", "chat")[1][3:] == ["-", "-"]


def test_options_reach_the_model() -> None:
    argv = split("-m x --dtype fp32 --threads 1 --max-context 99 --num-draft-tokens 4 --repeat 2")
    argv += split("--max-tokens 3 --seed 5 --temperatures 0,0.5 --prompts builtin:math")
    assert main([*QUICK, *argv]) == 0
    (llm,) = FakeLLM.created
    assert llm.options == {
        "model": "x",
        "drafter": "none",
        "num_draft_tokens": None,
        "verify": "auto",
        "dtype": "fp32",
        "device": "auto",
        "threads": 1,
        "max_context": 99,
        "prefix_reuse": True,
        "pipeline": "off",
        "draft_device": None,
        "emulate": None,
    }
    assert set(llm.calls[1:]) == {("ngram", 4)}
    found = [(p.temperature, p.seed, p.max_tokens) for _, p in llm.seen]
    assert found == [(0, 5, 3), (0, 6, 3), *((0.5, 5 + i, 3) for i in range(4))]


def test_files(tmp_path: Path, capsys: Capture) -> None:
    argv = ["--json", str(tmp_path / "a.json"), "--picture", str(tmp_path / "a.svg")]
    assert main([*QUICK, *argv]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == last + "\n"
    assert "fake-7M" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.svg"]


# -- the estimate ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        ("1.8", "estimated in training 1.80 (--estimate): +0.0 %, agrees within 5 %"),
        ("1.75", "+2.9 %, agrees within 5 %"),
        ("2", "served 1.80 ± 0.00 on these prompts at temperature 1 (full blocks 2.00)"),
        ("2", "-10.0 %, differs by more than 5 %"),
    ],
)
def test_estimate_given(estimate: str, said: str, capsys: Capture) -> None:
    assert main([*QUICK, "--estimate", estimate]) == 0
    out = capsys.readouterr().out
    (line,) = [x for x in out.splitlines() if x.startswith("estimate of ngram: ")]
    assert said in line and "too few" not in line
    (found,) = last_line(out)["estimates"]
    assert found["within"] is ("agrees" in line) and found["certain"] is True
    assert found["estimated"] == float(estimate) and found["temperature"] == 1


def test_one_text_is_too_few(capsys: Capture) -> None:
    assert main(["eval", "ngram", "--limit", "1", "--estimate", "1.8"]) == 0
    assert "agrees within 5 %; too few texts to be sure" in capsys.readouterr().out


def test_estimates_of_checkpoints(tmp_path: Path, capsys: Capture) -> None:
    good = checkpoint(tmp_path / "good", accepted_length=1.8)
    bad = checkpoint(tmp_path / "bad", accepted_length=3.6, temperature=0.0)
    other = checkpoint(tmp_path / "other", accepted_length=2.0, temperature=0.5)
    bare = checkpoint(tmp_path / "bare")
    assert main(["eval", good, bad, other, bare, "ngram", "--limit", "2"]) == 0
    out, err = capsys.readouterr()
    found = {e["drafter"]: e for e in last_line(out)["estimates"]}
    assert found.keys() == {good, bad}
    assert (found[good]["temperature"], found[good]["difference"]) == (1, 0)
    assert (found[bad]["temperature"], found[bad]["difference"]) == (0, -0.5)
    assert "estimate of good: " in out and "estimate of bad: " in out
    (warning,) = [x for x in err.splitlines() if x.startswith("warning: ")]
    assert other in warning and "at temperature 0.5, which was not measured" in warning


# -- what cannot be done ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "cannot read the prompts nowhere.jsonl"),
        (["psychic"], "unknown drafter 'psychic'"),
        (["--temperatures", "0,hot"], "--temperatures 0,hot: expected numbers"),
        (["--temperatures", "-1"], "temperature=-1.0"),
        (["--temperatures", ","], "no temperatures given"),
        (["--json", "no/such/folder/x.json"], "its folder does not exist"),
        (["--picture", "no/such/folder/x.png"], "its folder does not exist"),
        (["--picture", "x.gif"], "expected a name ending in .png or .svg"),
        (["--estimate", "0.5"], "0.5 is no accepted length"),
        (["--estimate", "nan"], "nan is no accepted length"),
        (["none", "--estimate", "2"], "give a single DRAFTER"),
        (["--estimate", "2", "--temperatures", "0"], "add it to --temperatures"),
    ],
)
def test_bad_requests(argv: list[str], message: str, capsys: Capture) -> None:
    assert main([*QUICK, *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")
    assert out == ""
    assert not any(llm.seen for llm in FakeLLM.created)


def test_damaged_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    drafter = checkpoint(tmp_path / "d", accepted_length="long")
    assert main(["eval", drafter]) == 2
    assert "error: cannot read the training estimate of" in capsys.readouterr().err
    assert FakeLLM.created == []


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*QUICK, "--picture", str(tmp_path / "a.png")]) == 2
    assert "pip install 'dspark[bench]'" in capsys.readouterr().err
    assert FakeLLM.created == []
    assert main(QUICK) == 0


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(EvalFake, "interrupt", True)
    argv = ["--picture", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    assert main([*QUICK, *argv]) == 130
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_a_failing_picture_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(report: Any, file: Path) -> None:
        raise ConfigError(f"cannot write {file}: No space left on device")

    monkeypatch.setattr("dspark.bench.picture.draw", fail)
    argv = ["--picture", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    assert main([*QUICK, *argv]) == 2
    out, err = capsys.readouterr()
    assert "No space left" in err.splitlines()[-1]
    assert last_line(out)["results"], "what was measured is not lost with the picture"
    assert (tmp_path / "a.json").is_file()


# -- its face --------------------------------------------------------------------------------------


def test_help(capsys: Capture) -> None:
    assert main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    assert "DRAFTER" in out and out.partition("Examples:")[2].count("dspark eval ") == 2
    assert main(["eval"]) == 2
    assert "Missing argument" in capsys.readouterr().err


def test_defaults_are_those_of_the_library() -> None:
    from dspark.bench.evaluate import EvalConfig
    from dspark.llm import LLM

    command: Any = typer.main.get_command(app)
    options = {p.name: p.default for p in command.commands["eval"].params}
    config = EvalConfig()
    for name in ("num_draft_tokens", "max_tokens", "seed", "repeat"):
        assert options[name] == getattr(config, name)
    assert tuple(map(float, options["temperatures"].split(","))) == config.temperatures
    assert "device" not in inspect.signature(LLM.__init__).parameters or options["device"] == "auto"
