"""`dspark chat`: turns, commands, Ctrl-C, pipes; with the engine's stand-in and with a server."""

from __future__ import annotations

import builtins
import inspect
import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import typer

from dspark.cli import ui
from dspark.cli.chat import Session
from dspark.cli.main import app, main
from dspark.cli.partners import Local
from dspark.errors import InvalidRequestError
from dspark.llm import LLM
from dspark.types import Chunk, SamplingParams
from tests.fake_llm import WORDS, FakeLLM
from tests.server.chats import v4
from tests.server.served import Scripted, serving, v4_tokenizer

Capture = pytest.CaptureFixture[str]
ANSWER = "".join(WORDS)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Standard input from a pipe."""

    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return put


Typing = Callable[[Sequence[str | BaseException]], None]


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Typing:
    """A person at a terminal: lines, or what comes in place of one; then Ctrl-D."""

    def put(lines: Sequence[str | BaseException]) -> None:
        left = iter(lines)

        def typed(prompt: str = "") -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        stdin = io.StringIO()
        stdin.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(builtins, "input", typed)

    return put


def test_a_pipe_is_one_turn_a_line(
    pipe: Callable[[bytes], None], fake: type[FakeLLM], capsys: Capture
) -> None:
    pipe("Hä?\n\n  \nAnd then?".encode())
    assert main(["chat", "some/model", "--system", "Be brief.", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == (ANSWER + "\n") * 2
    assert err.count("\n") == 1 and "model fake-7M" in err  # nothing else in a pipe
    (llm,) = fake.created
    first, second = (prompt for prompt, _ in llm.seen)
    assert first == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hä?"},
    ]
    assert second == [
        *first,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And then?"},
    ]
    assert {p.seed for _, p in llm.seen} == {3}
    assert llm.options["model"] == "some/model"


def test_commands(typing: Typing, fake: type[FakeLLM], capsys: Capture) -> None:
    lines = ["/stats", "one", "/stats", "/system Sing. ", "two", "/reset", "//three", "/system"]
    typing([*lines, "four", "/help", "/what now", "/quit", "never"])
    assert main(["chat"]) == 0
    err = capsys.readouterr().err
    assert "nothing was answered yet" in err and "10 tok · " in err and "drafter ngram" in err
    assert "system: Sing." in err and "no system message" in err
    assert all(f"/{c}" in err for c in ("reset", "system TEXT", "stats", "quit"))
    assert "error: there is no /what: /help lists what there is" in err
    shapes = [[m["content"][:5] for m in prompt] for prompt, _ in fake.created[0].seen]
    says = ANSWER[:5]
    assert shapes == [
        ["one"],
        ["Sing.", "one", says, "two"],
        ["Sing.", "/thre"],
        ["/thre", says, "four"],
    ]


def interrupting(times: int) -> Callable[..., Iterator[Any]]:
    """`FakeLLM.stream` with Ctrl-C pressed so often in front of the fourth token."""
    real = FakeLLM.stream

    def stream(self: FakeLLM, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for n, chunk in enumerate(real(self, *args, **kwargs)):
            if n == 3 and len(self.seen) == 1:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            yield chunk

    return stream


def test_ctrl_c_stops_the_answer_and_keeps_it(
    typing: Typing, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(FakeLLM, "stream", interrupting(1))
    handler = signal.getsignal(signal.SIGINT)
    typing(["one", "two"])
    assert main(["chat"]) == 0
    assert signal.getsignal(signal.SIGINT) is handler
    kept = "".join(WORDS[:4])
    assert capsys.readouterr().out == f"{kept}\n{ANSWER}\n"
    assert [m["content"] for m in fake.created[0].seen[1][0]] == ["one", kept, "two"]


def test_a_second_ctrl_c_ends(
    typing: Typing, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(FakeLLM, "stream", interrupting(2))
    typing(["one", "two"])
    assert main(["chat"]) == 130
    assert capsys.readouterr().out == "".join(WORDS[:3]) + "\n"


def test_ctrl_c_at_the_prompt_ends(typing: Typing, capsys: Capture) -> None:
    typing(["one", KeyboardInterrupt(), "two"])
    assert main(["chat"]) == 130
    assert capsys.readouterr().out == ANSWER + "\n"


def test_ctrl_c_in_a_pipe_ends_at_once(
    pipe: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "stream", interrupting(1))
    pipe(b"one\ntwo\n")
    assert main(["chat"]) == 130


def failing(self: FakeLLM, prompt: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    self.seen.append((prompt, None))  # type: ignore[arg-type]
    raise InvalidRequestError("too long: shorten it")
    yield


def test_an_error_costs_a_person_one_turn(
    typing: Typing, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(FakeLLM, "stream", failing)
    typing(["one", "two"])
    assert main(["chat"]) == 0
    assert capsys.readouterr().err.count("error: too long: shorten it") == 2
    assert [len(prompt) for prompt, _ in fake.created[0].seen] == [1, 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"one\ntwo\n", "too long"), (b"/sing\n", "there is no /sing"), (b"\xff\n", "line 1 is not")],
)
def test_an_error_ends_a_pipe(
    data: bytes,
    words: str,
    pipe: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(FakeLLM, "stream", failing)
    pipe(data)
    assert main(["chat"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err.splitlines()[-1]


def test_colours(
    pipe: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pipe(b"one\n")
    assert main(["chat", "--color", "always"]) == 0
    assert "\x1b[32m sky\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    pipe(b"one\n")
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"


@pytest.mark.parametrize("to_a_file", [False, True])
def test_the_prompt_stays_out_of_files(
    to_a_file: bool, typing: Typing, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shown: list[str] = []
    typing(["one"])
    typed: Any = builtins.input
    monkeypatch.setattr(builtins, "input", lambda prompt="": shown.append(prompt) or typed(prompt))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: not to_a_file, raising=False)
    assert main(["chat", "--color", "never"]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert (shown, err.count("> ")) == ((["", ""], 2) if to_a_file else (["> ", "> "], 0))


# -- a server --------------------------------------------------------------------------------------


def test_a_server_answers(
    typing: Typing, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    seen: list[Any] = []
    with serving(Scripted(b"Hello there, you", b"user: one\n"), api_key="k") as s:
        engine = s.worker.ready().engine
        submit = engine.submit
        engine.submit = lambda r: (seen.append(r), submit(r))  # type: ignore[method-assign,assignment]
        typing(["one", "/stats"])
        argv = ["--url", s.url, "--api-key", "k", "--max-tokens", "5", "--seed", "4"]
        assert main(["chat", *argv, "--top-p", "0.5"]) == 0
        s.idle()
    out, err = capsys.readouterr()
    assert out == "Hello\n" and fake.created == []
    assert "model scripted at http" in err and "5 tok · " in err and "TTFT" in err
    p = seen[0].params
    assert (p.max_tokens, p.seed, p.top_p, p.temperature) == (5, 4, 0.5, 0)


def test_ctrl_c_hangs_up_on_a_server(typing: Typing, capsys: Capture) -> None:
    model = Scripted(b"x" * 200, b"user: one\n", seconds=0.02)
    forward = model.target.forward

    def pressing(*args: Any) -> Any:
        if model.target.passes == 4:
            signal.raise_signal(signal.SIGINT)  # Python handles it in the main thread
        return forward(*args)

    model.target.forward = pressing  # type: ignore[method-assign]
    with serving(model) as s:
        typing(["one"])
        assert main(["chat", "--url", s.url, "--max-tokens", "200"]) == 0
        s.wait(lambda: s.worker.open_requests == 0)
        assert model.target.passes < 100
        s.idle()
    assert set(capsys.readouterr().out) == {"x", "\n"}


@pytest.mark.parametrize("effort", ["max", "none", None])
def test_a_server_reasons(typing: Typing, capsys: Capture, effort: str | None) -> None:
    """Reasoning in another colour, apart from the answer, and not in the next question."""
    options = {"thinking": True, "reasoning_effort": effort} if effort == "max" else {}
    one: list[dict[str, str]] = [{"role": "user", "content": "one"}]
    asked = [] if effort is None else ["--reasoning-effort", effort]
    with serving(v4("Hm.</think>Yes.", one, **options)) as s:
        typing(["one"])
        assert main(["chat", "--url", s.url, "--color", "always", *asked]) == 0
        s.idle()
    out, err = capsys.readouterr()
    thought = "".join(f"\x1b[2m{c}\x1b[0m" for c in ("H", "m."))
    assert out == ("Yes.\n" if options else "Hm.</think>Yes.\n")
    assert (f"{thought}\n" in err) is bool(options)


def test_the_engine_reasons(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Draft tokens are green in the answer, and the conversation keeps the answer alone."""
    llm = FakeLLM("v4")
    llm.tokenizer = v4_tokenizer()  # type: ignore[assignment]
    asked: list[Any] = []
    texts = ["Because", " I", "</think>", "Blue", "."]

    def encode_prompt(messages: Any, **options: Any) -> tuple[int, ...]:
        asked.append((messages, options))
        return (1,)

    def stream(prompt: Any, params: Any) -> Iterator[Chunk]:
        assert prompt == (1,)
        for n, text in enumerate(texts):
            yield Chunk("r", n, text, drafted=n == 3)

    monkeypatch.setattr(llm, "encode_prompt", encode_prompt, raising=False)
    monkeypatch.setattr(llm, "stream", stream)
    partner = Local(llm, "high")  # type: ignore[arg-type]
    session = Session(partner, SamplingParams(), ui.Paint(True), ui.Paint(True), False)
    assert session.take("one") and session.take("two")
    out, err = capsys.readouterr()
    assert out == "\x1b[32mBlue\x1b[0m.\n" * 2
    assert err == "\x1b[2mBecause\x1b[0m\x1b[2m I\x1b[0m\n" * 2
    assert [m["content"] for m in asked[1][0]] == ["one", "Blue.", "two"]
    assert asked[0][1] == {"thinking": True, "reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--reasoning-effort", "low"], "cannot be told whether to reason"),
        (["--url", "nowhere"], "is no address"),
        (["--url", "http://127.0.0.1:9"], "is the server running?"),
        (
            ["--url", "http://127.0.0.1:9", "--dtype", "int8", "--threads", "1"],
            "--dtype, --threads",
        ),
        (["--temperature", "-1"], "temperature=-1.0"),
    ],
)
def test_errors(
    argv: list[str], words: str, pipe: Callable[[bytes], None], capsys: Capture
) -> None:
    pipe(b"one\n")
    assert main(["chat", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


def test_help_and_defaults(capsys: Capture) -> None:
    assert main(["chat", "--help"]) == 0
    assert capsys.readouterr().out.partition("Examples:")[2].count("dspark chat") == 3
    library = inspect.signature(LLM).parameters
    command: Any = typer.main.get_command(app)
    options = {p.name: p.default for p in command.commands["chat"].params if p.name in library}
    assert len(options) == 10
    assert options == {name: library[name].default for name in options}
