"""`dspark generate`: what goes to which stream, in which colour, and the JSON object."""

import io
import json
import sys
from pathlib import Path
from shlex import split

import pytest

from dspark.cli.main import main
from dspark.cli.trace import trace_line
from dspark.cli.ui import Paint
from dspark.types import Round, SamplingParams
from tests.fake_llm import WORDS, FakeLLM

TEXT = "".join(WORDS)
GREEN = "\x1b[32m"
Capture = pytest.CaptureFixture[str]


def give_stdin(monkeypatch: pytest.MonkeyPatch, raw: bytes, tty: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8")
    monkeypatch.setattr(stdin, "isatty", lambda: tty, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_answer_on_stdout_all_else_on_stderr(capsys: Capture) -> None:
    assert main(["generate", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == TEXT + "\n"
    resolved, statistics = err.splitlines()
    assert resolved == (
        "model fake-7M · dtype int8 (fastest that fits) · drafter ngram (needs no weights) "
        "· verify auto · pipeline off · device cpu · threads 2"
    )
    assert statistics == (
        "10 tok · 150.0 tok/s · accepted length 1.8 · acceptance 50 % · TTFT 40 ms · drafter ngram"
    )


def test_plain_decoding_has_no_acceptance(capsys: Capture) -> None:
    assert main(["generate", "hi", "--drafter", "none"]) == 0
    statistics = capsys.readouterr().err.splitlines()[-1]
    assert statistics == "10 tok · 100.0 tok/s · accepted length 1.0 · TTFT 40 ms · drafter none"


def test_options_reach_the_model(fake: type[FakeLLM]) -> None:
    argv = split(
        """generate hi -m some/model -d none --num-draft-tokens 3 --dtype fp32 --device cpu
        --verify static:2 --pipeline on --draft-device cpu --emulate-device draft=1ms
        --threads 2 --max-context 64 --temp 0.5 --top-p 0.9 --top-k 7 --min-p 0.1
        --seed 3
        --max-tokens 4 --stop a --stop b --min-tokens 1 --ignore-eos --presence-penalty 0.1
        --frequency-penalty 0.2 --repetition-penalty 1.1 --logprobs 1 --json --system Hush."""
    )
    assert main(argv) == 0
    llm = fake.created[0]
    assert llm.options == {
        "model": "some/model",
        "drafter": "none",
        "num_draft_tokens": 3,
        "verify": "static:2",
        "dtype": "fp32",
        "device": "cpu",
        "threads": 2,
        "max_context": 64,
        "prefix_reuse": True,
        "pipeline": "on",
        "draft_device": "cpu",
        "emulate": "draft=1ms",
    }
    prompt, params = llm.seen[0]
    assert prompt == [
        {"role": "system", "content": "Hush."},
        {"role": "user", "content": "hi"},
    ]
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        max_tokens=4,
        stop=("a", "b"),
        min_tokens=1,
        ignore_eos=True,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logprobs=1,
    )


def test_defaults_are_those_of_the_library(fake: type[FakeLLM]) -> None:
    assert main(["generate", "hi"]) == 0
    assert fake.created[0].seen[0][1] == SamplingParams()


def test_raw_gives_text_instead_of_messages(fake: type[FakeLLM]) -> None:
    assert main(["generate", "Once upon", "--raw"]) == 0
    assert fake.created[0].seen[0][0] == "Once upon"


def test_json_schema(fake: type[FakeLLM], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    assert main(["generate", "hi", "--json-schema", str(file)]) == 0
    assert fake.created[0].seen[0][1] == SamplingParams(
        grammar=fake.created[0].json_grammar({"type": "integer"})
    )
    made = len(fake.created)
    for text, message in (("{", "no JSON file"), ("[]", "holds no object"), (None, "no JSON file")):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        assert main(["generate", "hi", "--json-schema", str(file)]) == 2
        assert message in capsys.readouterr().err
    assert len(fake.created) == made  # refused before a model is loaded


@pytest.mark.parametrize("argv", [["generate", "-"], ["generate"]])
def test_prompt_from_stdin(
    argv: list[str], fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, "two\nlines é\n".encode())
    assert main([*argv, "--raw"]) == 0
    assert fake.created[0].seen[0][0] == "two\nlines é"


def test_no_prompt_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    give_stdin(monkeypatch, b"", tty=True)
    assert main(["generate"]) == 2
    assert "- to read standard input" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "stdin", "message"),
    [
        (["-"], b"\n", "the prompt is empty"),
        ([""], b"", "the prompt is empty"),
        (["-"], b"\xff", "not UTF-8"),
        (["hi", "--logprobs", "2"], b"", "--logprobs shows nothing without --json"),
        (["hi", "--raw", "--system", "x"], b"", "--system needs the chat template"),
        (["hi", "--stop", ""], b"", "stop="),
        (["hi", "--drafter", "psychic"], b"", "unknown drafter 'psychic'"),
    ],
)
def test_bad_requests(
    argv: list[str],
    stdin: bytes,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    give_stdin(monkeypatch, stdin)
    assert main(["generate", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err


def test_accepted_tokens_are_green_and_a_legend_says_so(capsys: Capture) -> None:
    assert main(["generate", "hi", "--color", "always", "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == f"The{GREEN} sky\x1b[0m is\n"
    assert err.count("drafted and accepted") == 1


def test_color_on_a_terminal_unless_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["generate", "hi"]) == 0
    assert GREEN in capsys.readouterr().out
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
        assert main(["generate", "hi"]) == 0
        assert GREEN not in capsys.readouterr().out
    assert main(["generate", "hi", "--color", "always"]) == 0
    assert GREEN in capsys.readouterr().out
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["generate", "hi", "--color", "never"]) == 0
    assert GREEN not in capsys.readouterr().out


def test_no_stream_prints_the_same(capsys: Capture) -> None:
    assert main(["generate", "hi", "--no-stream"]) == 0
    assert capsys.readouterr().out == TEXT + "\n"


def test_json_is_one_object_and_nothing_else(capsys: Capture) -> None:
    assert main(["generate", "hi", "--json", "--max-tokens", "3", "--color", "always"]) == 0
    found = json.loads(capsys.readouterr().out)
    stats = found.pop("stats")
    assert found == {
        "text": "The sky is",
        "token_ids": [0, 1, 2],
        "drafted": [False, True, False],
        "finish_reason": "length",
        "prompt_tokens": 5,
        "model": "fake-7M",
        "dtype": "int8",
        "device": "cpu",
        "threads": 2,
        "drafter": "ngram",
        "verify": "auto",
    }
    assert stats["rounds"] == 1 and stats["accepted_length"] == 2
    assert stats["acceptance_by_position"] == [1.0, 0.0]


def test_json_has_logprobs_and_no_infinities(capsys: Capture) -> None:
    assert main(["generate", "hi", "--json", "--max-tokens", "1", "--logprobs", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    top = [{"token": 0, "logprob": -0.5}, {"token": len(WORDS), "logprob": None}]
    assert found["logprobs"] == [{"token": 0, "logprob": -0.5, "top": top}]
    assert found["stats"]["accepted_length"] is None


def test_trace_tells_every_round(capsys: Capture) -> None:
    assert main(["generate", "hi", "--trace", "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(WORDS[:5]) + "\n"
    rounds = [line for line in err.splitlines() if line.startswith("round")]
    assert 'prefill  → "The"' in err
    assert rounds == [
        "round 1 · 1 of 2 accepted · draft 1.0 + verify 10.0 + other 1.0 ms  "
        '✓" sky" ✗" WRONG" → " is"',
        "round 2 · 1 of 2 accepted · draft 1.0 + verify 10.0 + other 1.0 ms  "
        '✓" blue" ✗" WRONG" → ","',
    ]


def test_trace_brackets_what_was_not_judged() -> None:
    text_of = WORDS.__getitem__
    unverified = Round("r", 0, (1, 2, 3), 1, 0, (4,), 0, 0, 0)
    assert trace_line(unverified, text_of, Paint(False)).endswith('✗" sky" (" is") (" blue") → ","')
    ended = Round("r", 0, (1, 2, 3), 3, 1, (1,), 0, 0, 0)
    assert trace_line(ended, text_of, Paint(False)).endswith('✓" sky" (" is") (" blue")')
    painted = trace_line(unverified, text_of, Paint(True))
    assert '\x1b[2;9;31m✗" sky"\x1b[0m' in painted


def test_ctrl_c_ends_cleanly(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    init = FakeLLM.__init__

    def interrupted(self: FakeLLM, model: str = "default", **options: object) -> None:
        init(self, model, **options)
        self.interrupt_after = 2

    monkeypatch.setattr(FakeLLM, "__init__", interrupted)
    assert main(["generate", "hi"]) == 130
    out, err = capsys.readouterr()
    assert out == "The sky\n"
    assert "Traceback" not in err
    assert main(["generate", "hi", "--json"]) == 130
    assert capsys.readouterr().out == ""
