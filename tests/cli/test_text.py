"""`dspark text`: what reaches the library, what is printed, how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import split
from typing import Any

import pytest

from dspark.cli.main import main
from dspark.train.samples import read_rows
from dspark.types import Output, SamplingParams, Stats
from tests.fake_llm import FakeLLM
from tests.train.test_endpoint import Server, good
from tests.train.test_endpoint import server as server  # a fixture
from tests.train.test_prompts import CHATML, tokenizer

Capture = pytest.CaptureFixture[str]


class WritingLLM(FakeLLM):
    """Goes on with a number of its own in each prompt, and answers in 10 tokens."""

    template: str | None = CHATML
    stop_at: int | None = None
    """Raise KeyboardInterrupt instead of finishing this request."""

    def __init__(self, model: str = "default", **options: Any) -> None:
        super().__init__(model, **options)
        self.tokenizer = tokenizer(self.template)  # type: ignore[assignment]
        self.target = type("Target", (), {"max_context": options["max_context"]})()

    def encode_prompt(self, messages: Any) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_chat(messages))  # type: ignore[attr-defined]

    def completions(
        self, requests: Iterable[tuple[Any, SamplingParams]]
    ) -> Iterator[tuple[int, Output]]:
        for n, (prompt, params) in enumerate(requests):
            self.seen.append((prompt, params))
            if n == self.stop_at:
                raise KeyboardInterrupt
            text = f" do number {params.seed}?" if isinstance(prompt[0], int) else "A" * 9
            ids = (*self.tokenizer.encode(text), 257)  # type: ignore[attr-defined]
            yield n, Output("r", (), ids, text, "stop", Stats())


@pytest.fixture
def writing(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> type[WritingLLM]:
    monkeypatch.setattr(sys.modules["dspark.llm"], "LLM", WritingLLM)
    monkeypatch.setattr(WritingLLM, "stop_at", None)
    monkeypatch.setattr(WritingLLM, "template", CHATML)
    return WritingLLM


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "What is {n}?"}}\n' for n in range(30)))
    return path


def rows(out: Path) -> list[dict[str, Any]]:
    return list(read_rows([out / "text.jsonl"]))


def test_text_is_written_and_summed_up(
    writing: type[WritingLLM], tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "deep" / "folder"
    assert main(["text", "--out", str(out), "--tokens", "95", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.out.count("\n") == 1
    assert (found["rows"], found["tokens"], found["complete"]) == (10, 100, True)
    assert found["out"] == str(out) and found["tokens_per_second"] > 0
    assert [r["tokens"] for r in rows(out)] == [10] * 10
    first, last = printed.err.splitlines()
    assert first.startswith("model fake-7M") and first.endswith(
        "drafter none (as asked) · verify auto · pipeline off · device cpu · threads 2 · batch 64"
    )
    assert last.startswith("10 rows · 100 tok · ") and last.endswith(str(out))


def test_standard_output_stays_empty_without_json(
    writing: type[WritingLLM], prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ["text", "--out", str(tmp_path / "o"), "--tokens", "15", "--prompts", str(prompts)]
    assert main(argv) == 0
    assert capsys.readouterr().out == ""
    assert [r["prompt"] for r in rows(tmp_path / "o")] == ["What is 0?", "What is 1?"]
    assert main(argv) == 0
    assert "2 rows · 20 tok · nothing new to write" in capsys.readouterr().err


def test_options_reach_the_model_and_the_texts(writing: type[WritingLLM], tmp_path: Path) -> None:
    argv = split("--tokens 200 --temperatures 0.5,0.25 --max-tokens 77 --prompt-tokens 33")
    argv += split("--prompt-temperature 0.3 --batch 5 --dtype fp32 --threads 1 -d ngram")
    assert main(["text", "x/y", "--out", str(tmp_path / "o"), *argv]) == 0
    (llm,) = writing.created
    assert llm.options == {
        "model": "x/y",
        "drafter": "ngram",
        "dtype": "fp32",
        "device": "auto",
        "threads": 1,
        "max_context": 77 + 512,
        "max_users": 5,
        "pipeline": "off",
    }
    own = [p for prompt, p in llm.seen if isinstance(prompt[0], int)]
    answers = [p for prompt, p in llm.seen if not isinstance(prompt[0], int)]
    assert {(p.max_tokens, p.temperature, p.stop_token_ids) for p in own} == {(33, 0.3, (256, 257))}
    assert {p.max_tokens for p in answers} == {77}
    assert {p.temperature for p in answers} == {0.25, 0.5}
    assert len({p.seed for p in [*own, *answers]}) == len(own) + len(answers)


def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(
    writing: type[WritingLLM], tmp_path: Path, capsys: Capture
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    argv = ["text", "--tokens", "200", "--out"]
    assert main([*argv, str(whole)]) == 0
    writing.stop_at = 25
    capsys.readouterr()
    assert main([*argv, str(out)]) == 130
    assert capsys.readouterr().err.endswith(
        f"finished rows are in {out}: the same command goes on\n"
    )
    assert 0 < len(rows(out)) < 20
    writing.stop_at = None
    assert main([*argv, str(out)]) == 0
    assert (out / "text.jsonl").read_bytes() == (whole / "text.jsonl").read_bytes()


def test_other_options_for_the_same_folder(
    writing: type[WritingLLM], tmp_path: Path, capsys: Capture
) -> None:
    argv = ["text", "--out", str(tmp_path / "o"), "--tokens", "50"]
    assert main(argv) == 0
    capsys.readouterr()
    assert main([*argv, "--seed", "3"]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ") and "was begun with seed=0 and is now asked for 3" in err


def test_prompts_that_run_out_are_a_warning(
    writing: type[WritingLLM], prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ["--out", str(tmp_path / "o"), "--prompts", str(prompts)]
    assert main(["text", *argv]) == 0
    assert "warning: the prompts were used up before 1000000" in capsys.readouterr().err
    assert len(rows(tmp_path / "o")) == 30


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "0"], "tokens=0 is out of range"),
        (["--temperatures", "0,hot"], "temperatures='0,hot' are no numbers"),
        (["--temperatures", ""], "temperatures=() is out of range"),
        (["--prompts", "nowhere.jsonl"], "cannot read the prompts nowhere.jsonl"),
        (["--endpoint", "http://localhost:1"], "--endpoint needs prompts from files"),
        (["--endpoint", "http://localhost:1", "--dtype", "int8"], "--dtype is for a model that"),
        (["--drafter", "psychic"], "unknown drafter 'psychic'"),
    ],
)
def test_bad_requests_write_nothing(
    writing: type[WritingLLM], argv: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["text", "--out", str(tmp_path / "o"), *argv]) == 2
    printed = capsys.readouterr()
    assert message in printed.err.splitlines()[-1] and printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_template_writes_nothing(
    writing: type[WritingLLM], prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    writing.template = None
    for argv in ([], ["--prompts", str(prompts)]):
        assert main(["text", "--out", str(tmp_path / "o"), *argv]) == 2
        assert "error: this model has no chat template" in capsys.readouterr().err
        assert not (tmp_path / "o").exists()


def test_out_is_needed(capsys: Capture) -> None:
    assert main(["text"]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_server_writes(
    server: Server,
    prompts: Path,
    fake: type[FakeLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.reply = lambda n, body: good(f"{body['messages'][0]['content']} Yes.", 7)
    argv = ["text", "big", "--endpoint", server.url, "--prompts", str(prompts), "--tokens", "60"]
    assert main([*argv, "--out", str(tmp_path / "o"), "--batch", "3", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tokens"] == 63
    assert f"model big · {server.url}/v1/chat/completions · 3 requests" in printed.err
    assert [(r["prompt"], r["answer"]) for r in rows(tmp_path / "o")] == [
        (f"What is {n}?", f"What is {n}? Yes.") for n in range(9)
    ]
    assert set(server.keys) == {"Bearer secret"} and {b["model"] for b in server.bodies} == {"big"}
    assert fake.created == []  # nothing was loaded here
    server.reply = lambda n, body: (404, b"no model 'big'")
    assert main([*argv, "--out", str(tmp_path / "o2")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("404 Not Found: no model 'big'")
