"""`dspark serve`: its options reach the model and the server; its errors are one line."""

from __future__ import annotations

import builtins
import inspect
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer

from dspark.cli.main import app, main
from dspark.llm import LLM
from dspark.server import run
from dspark.server.app import Settings
from tests.fake_llm import FakeLLM


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `serve` was called with, in place of a server."""
    seen: dict[str, Any] = {}

    def fake(load: Any, settings: Settings, listener: socket.socket, *, on_ready: Any) -> None:
        seen["address"] = listener.getsockname()
        listener.close()
        seen["settings"], seen["llm"] = settings, load()
        on_ready(seen["llm"])

    monkeypatch.setattr(run, "serve", fake)
    monkeypatch.delenv("DSPARK_API_KEY", raising=False)
    return seen


def test_defaults(served: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0"]) == 0
    assert served["address"][0] == "127.0.0.1"
    assert served["settings"] == Settings(model_names=("default",))
    assert served["llm"].options["max_users"] == 8
    out, err = capsys.readouterr()
    assert out == "" and f"http://127.0.0.1:{served['address'][1]}/v1" in err
    assert "model fake-7M" in err and err.rstrip().endswith("ready")


def test_options_arrive(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fake: type[FakeLLM]
) -> None:
    monkeypatch.setenv("DSPARK_API_KEY", "from-environment")
    argv = ["serve", "some/model", "--port", "0", "--drafter", "none", "--max-users", "3"]
    more = [
        "--max-queue",
        "5",
        "--max-body",
        "2",
        "--metrics-prefix",
        "vllm",
        "--verify",
        "static:2",
        "--max-context",
        "99",
        "--no-prefix-reuse",
        "--pipeline",
        "on",
        "--draft-device",
        "cuda:1",
    ]
    assert main([*argv, *more, "--served-model-name", "mine"]) == 0
    settings, options = served["settings"], fake.created[0].options
    assert (settings.api_key, settings.max_queue, settings.max_body) == (
        "from-environment",
        5,
        2048,
    )
    assert (settings.metrics_prefix, settings.model_names) == ("vllm", ())
    assert (options["model"], options["drafter"]) == ("some/model", "none")
    assert (options["max_users"], options["max_context"]) == (3, 99)
    assert options["verify"] == "static:2"
    assert options["prefix_reuse"] is False and options["pipeline"] == "on"
    assert options["draft_device"] == "cuda:1"
    assert served["llm"].model_name == "mine"


def test_help_and_defaults_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert capsys.readouterr().out.partition("Examples:")[2].count("dspark serve") == 2
    library = inspect.signature(LLM).parameters
    command: Any = typer.main.get_command(app)
    options = {p.name: p.default for p in command.commands["serve"].params if p.name in library}
    assert len(options) == 11
    assert options == {name: library[name].default for name in options}


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with run.bind("127.0.0.1", 0) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err
    assert main(["serve", "--host", "no.such.host.invalid"]) == 2


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("dspark.server"):
            raise ImportError("no", name="fastapi")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["serve"]) == 2
    assert "pip install 'dspark[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--port", "70000"], ["--max-users", "0"], ["--max-queue", "-1"]])
def test_bad_options(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == 2
    assert "Usage: dspark serve" in capsys.readouterr().err


def test_a_bad_prefix_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--metrics-prefix", "a b"]) == 2
    assert "metrics prefix" in capsys.readouterr().err


def test_ctrl_c_ends_cleanly(tmp_path: Path) -> None:
    """The real program, stopped while the model is missing nothing but time."""
    from tests.server.served import tiny_directory

    with run.bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    argv = ["serve", str(tiny_directory(tmp_path / "m")), "--dtype", "fp32", "--port", str(port)]
    code = "import sys; from dspark.cli.main import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, *argv, "--threads", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DSPARK_API_KEY": ""},
    ) as process:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err


def _wait_for(url: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("it never answered")
