"""`dspark bench load`: tables, the last line, the folder, stops and bad input, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shlex import split
from typing import Any

import pytest

import dspark.llm as real
from dspark.bench import load
from dspark.cli.main import main
from tests.server.served import tiny_directory

Capture = pytest.CaptureFixture[str]
QUICK = split(
    "--users 1,2 --drafters ngram --fixed 2 --tokens 12 --max-tokens 8 --warm-up 1 --repeats 1"
    " --prompts builtin:code --limit 2 --threads 1 --max-context 256"
)
NAMES = ["plain", "ngram K=2", "ngram auto"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("load") / "tiny"))


@pytest.fixture(autouse=True)
def with_the_real_llm(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dspark.llm", real)
    monkeypatch.setenv("DSPARK_NO_PROFILE", "1")


def last_line(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_end_to_end(model: str, tmp_path: Path, capsys: Capture) -> None:
    out, file = tmp_path / "out", tmp_path / "x.json"
    argv = ["bench", "load", model, *QUICK, "--out", str(out), "--json", str(file)]
    assert main(argv) == 0
    stdout, stderr = capsys.readouterr()
    found = last_line(stdout)
    assert found["complete"] and found["differences"] == []
    rows = [(r["users"], r["configuration"]) for r in found["results"]]
    assert rows == [(users, name) for users in (1, 2) for name in NAMES]
    assert all(r["identical_to_plain"] and r["tokens"] >= 12 for r in found["results"])
    assert [c["fixed"] for c in found["comparisons"]] == ["ngram K=2"]
    lines = [line.split() for line in stdout.splitlines()]
    for users in "12":
        speeds, drafts = (x for x in lines if x[:2] == [users, "plain"])
        assert (
            speeds[3] == "1.00x" and speeds[-1] == "yes" and drafts[2:6] == ["0", "0", "0.0", "0"]
        )
    assert "ngram auto against ngram K=2: " in stdout and "  budget: " in stdout
    assert "\x1b" not in stdout and "mtp1: none is known for this model" in stderr
    assert {p.name for p in out.iterdir()} == {"load.json", "speed.png", "budget.png"}
    assert (out / "load.json").read_text().strip() == stdout.splitlines()[-1]
    assert file.read_text() == (out / "load.json").read_text()


def test_a_wrong_text_is_exit_code_1(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load.write_plain

    def wrong(*args: Any) -> Any:
        return [load.Text(t.prompt, (t.plain[0] ^ 1, *t.plain[1:])) for t in plain(*args)]

    monkeypatch.setattr(load, "write_plain", wrong)
    assert main(["bench", "load", model, *QUICK]) == 1
    out, err = capsys.readouterr()
    assert not any(r["identical_to_plain"] for r in last_line(out)["results"])
    assert "NO" in out and "error: ngram auto, 2 users: prompt" in err
    assert "must not change a greedy text" in err


def stop_after(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = load.measure

    def stopped(*args: Any) -> Any:
        for n, run in enumerate(measure(*args)):
            if n == runs:
                raise KeyboardInterrupt
            yield run

    monkeypatch.setattr(load, "measure", stopped)


def test_a_stop_prints_what_is_finished(
    model: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(4, monkeypatch)
    assert main(["bench", "load", model, *QUICK, "--out", str(tmp_path)]) == 130
    out, err = capsys.readouterr()
    found = last_line(out)
    assert not found["complete"] and len(found["results"]) == 4
    assert "stopped: the figures are those of the runs that were finished" in err
    assert {p.name for p in tmp_path.iterdir()} == {"load.json", "speed.png", "budget.png"}


def test_a_stop_before_the_first_run_prints_nothing(
    model: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(0, monkeypatch)
    assert main(["bench", "load", model, *QUICK, "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--users 1,few", "--users 1,few: expected whole numbers separated by commas"),
        ("--users 0", "users=(0,) is out of range"),
        ("--fixed 1.5", "--fixed 1.5: expected whole numbers"),
        ("--verify wise", "unknown way to verify 'wise'"),
        ("--tokens 0", "tokens=0 measures nothing"),
        ("--prompts nowhere.jsonl", "cannot read the prompts nowhere.jsonl"),
        ("--json no/such/x.json", "its folder does not exist"),
        ("--out no/such/folder", "cannot write into no/such/folder"),
        ("--drafters psychic", "unknown drafter 'psychic'"),
    ],
)
def test_bad_requests(argv: str, message: str, model: str, capsys: Capture) -> None:
    assert main(["bench", "load", model, *QUICK, *split(argv)]) == 2
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")
    assert out == ""


def test_options_of_bench_do_not_stand_before_load(capsys: Capture) -> None:
    assert main(["bench", "--limit", "2", "load"]) == 2
    err = capsys.readouterr().err
    assert "--limit stands before 'load': expected 'dspark bench load' and then its options" in err
