"""What all verbs share: help, version, errors and exit codes, quick start."""

import inspect
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from dspark import __version__
from dspark.cli.main import app, main
from dspark.llm import LLM
from tests.fake_llm import FakeLLM

ROOT = Path(__file__).parents[2]


VERBS = ["generate", "bench", "eval", "text", "train", "export"]


@pytest.mark.parametrize("argv", [["--help"], ["bench", "-h"], *([v, "--help"] for v in VERBS)])
def test_help_has_two_examples(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "dspark" in out.partition("Examples:")[2]
    assert out.partition("Examples:")[2].count("dspark ") >= 2


def test_bare_call_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dspark {__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["sing"],
        ["generate", "hi", "--bogus"],
        ["generate", "hi", "--max-tokens", "many"],
        ["generate", "hi", "--threads", "0"],
        ["generate", "hi", "--color", "pink"],
        ["bench", "--repeat", "0"],
    ],
)
def test_usage_errors_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "Usage: dspark" in captured.err
    assert captured.out == ""


def test_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--temperature", "-1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: temperature=-1.0 is out of range: expected 0")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["--debug", "generate", "hi", "--temperature", "-1"],
        ["generate", "hi", "--temperature", "-1", "--debug"],
    ],
)
def test_debug_shows_the_traceback(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: temperature")


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_debug_from_the_environment(
    value: str, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSPARK_DEBUG", value)
    assert main(["generate", "hi", "--top-p", "2"]) == 2
    assert ("Traceback" in capsys.readouterr().err) is shown


def test_debug_behind_two_dashes_is_a_prompt(fake: type[FakeLLM]) -> None:
    assert main(["generate", "--", "--debug"]) == 0
    prompt, _ = fake.created[0].seen[0]
    assert prompt[-1]["content"] == "--debug"


def test_help_loads_no_torch() -> None:
    """Torch takes seconds; nobody shall wait for it to read the help."""
    code = (
        "import sys; import dspark.cli.main;"
        "print({'torch', 'numpy', 'tokenizers', 'rich.table'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("verb", ["generate", "bench"])
def test_defaults_of_the_model_are_those_of_the_library(verb: str) -> None:
    """They are written twice, because reading them from `LLM` would load torch for the help."""
    library = inspect.signature(LLM).parameters
    command: Any = typer.main.get_command(app)
    options = {p.name: p.default for p in command.commands[verb].params if p.name in library}
    assert len(options) >= 5
    assert options == {name: library[name].default for name in options}


@pytest.mark.parametrize("method", ["stream", "chat", "set_drafter"])
def test_fake_has_the_face_of_the_real_one(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(c, method)).parameters for c in (FakeLLM, LLM))
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}


def test_reference_is_fresh() -> None:
    script = ROOT / "scripts" / "gen_cli_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_seconds_is_announced_on_a_terminal(
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("dspark.engine.profile")

    class Measuring(FakeLLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            log.info("measuring what a round costs")
            super().__init__(*args, **options)

    monkeypatch.setattr(sys.modules["dspark.llm"], "LLM", Measuring)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    for _ in range(2):  # each run on its own: nothing piles up
        assert main(["generate", "hi", "--color", "never"]) == 0
        assert capsys.readouterr().err.count("measuring what a round costs\n") == terminal
    assert log.handlers == [] and log.propagate
