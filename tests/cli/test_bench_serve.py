"""`dspark bench serve`: options, table, JSON line, errors; the measuring has tests of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from dspark.bench.serve import ServeConfig
from dspark.bench.serve_figures import DEFINITIONS, Limits
from dspark.cli.main import app, main
from dspark.client import Endpoint
from tests.engine.oracle import PATTERNS
from tests.server.served import Scripted, serving

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_a_table_and_a_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "found.json"
    argv = ["--concurrency", "1,2", "--rate", "100", "--requests", "3", "--max-tokens", "9"]
    with serving(Scripted(b"x" * 99, right=PATTERNS["all"]), api_key="k") as s:
        more = ["--api-key", "k", "--max-ttft", "60000", "--json", str(file), "--ignore-eos"]
        # A prompt of the length that the scripted model expects behind its template.
        prompts = tmp_path / "p.jsonl"
        prompts.write_text('{"prompt": "hi"}\n')
        s.worker.ready().encode_prompt = lambda *a, **k: tuple(b"hello")  # type: ignore[method-assign]
        assert main(["bench", "serve", s.url, *argv, *more, "--prompts", str(prompts)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out.splitlines()[-1])
    assert file.read_text() == out.splitlines()[-1] + "\n"
    assert [r["load"] for r in found["results"]] == ["1 clients", "2 clients", "100 /s"]
    assert [r["output_tokens"] for r in found["results"]] == [27] * 3
    assert all(r["good_share"] == 1 and r["goodput"] > 0 for r in found["results"])
    assert found["definitions"] == DEFINITIONS and found["config"]["limits"]["ttft_ms"] == 60000
    assert found["config"]["loads"][2] == {"concurrency": None, "rate": 100.0}
    assert "goodput" in out and all(f"  {name}: " in out for name in DEFINITIONS)


def test_defaults_are_those_of_the_library() -> None:
    command: Any = typer.main.get_command(app)
    verb = command.commands["bench"].commands["serve"]
    options = {p.name: p.default for p in verb.params}
    config = ServeConfig()
    for name in ("requests", "max_tokens", "temperature", "seed", "ignore_eos"):
        assert options[name] == getattr(config, name)
    limits = (options["max_ttft"], options["max_per_token"], options["max_e2e"])
    assert Limits(*limits) == config.limits
    assert options["timeout"] == Endpoint("http://a").timeout


def test_help_has_two_examples(capsys: Capture) -> None:
    assert main(["bench", "serve", "--help"]) == 0
    assert capsys.readouterr().out.partition("Examples:")[2].count("dspark bench serve") == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "'nowhere' is no address"),
        (["http://127.0.0.1:9"], "is the server running?"),
        (["http://127.0.0.1:9", "--concurrency", "x"], "expected numbers separated by commas"),
        (["http://127.0.0.1:9", "--concurrency", "0"], "concurrency=0"),
        (["http://127.0.0.1:9", "--rate", "-1"], "rate=-1.0"),
        (["http://127.0.0.1:9", "--max-ttft", "0"], "ttft_ms=0.0"),
        (["http://127.0.0.1:9", "--temperature", "-1"], "temperature=-1.0"),
        (["http://127.0.0.1:9", "--prompts", "builtin:poems"], "unknown prompts"),
        (["http://127.0.0.1:9", "--json", "no/such/folder/x.json"], "folder"),
    ],
)
def test_errors_are_one_line(argv: list[str], words: str, capsys: Capture) -> None:
    assert main(["bench", "serve", *argv]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.startswith("error: ") and err.count("\n") == 1
    assert out == ""


def test_a_load_without_an_answer_is_a_failure(capsys: Capture) -> None:
    with serving(Scripted(b"x" * 99)) as s:
        model = s.worker.ready()
        model.encode_prompt = lambda *a, **k: tuple(b"hello")  # type: ignore[method-assign]
        real = model.engine.submit
        seen = 0

        def submit(request: Any) -> None:
            nonlocal seen
            seen += 1
            if seen > 1:  # the first one is the warm-up
                raise RuntimeError("broken")
            real(request)

        model.engine.submit = submit  # type: ignore[method-assign]
        assert main(["bench", "serve", s.url, "--requests", "2"]) == 1
    out, err = capsys.readouterr()
    assert "2 of 2 requests failed: " in err and "answered 500" in err
    assert json.loads(out.splitlines()[-1])["results"][0]["failed"] == 2
