"""`dspark chat`: a conversation in the terminal, with the engine here or with a server.

Answers stream to standard output, the draft tokens that the target accepted in green (of a server
that is not told); everything else goes to standard error. Lines that begin with a slash are
commands; `//` sends a line that begins with one.

On a terminal Ctrl-C stops an answer, which stays in the conversation as far as it came; at the
prompt, or twice in one answer, it ends. An error costs its turn, not the conversation. In a pipe
every line is a turn, and the first error or Ctrl-C ends it all.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import typer

from dspark.cli import options as opt
from dspark.cli import ui
from dspark.errors import ConfigError, DSparkError, InvalidRequestError
from dspark.types import SamplingParams

if TYPE_CHECKING:
    from dspark.client import Endpoint
    from dspark.llm import LLM
    from dspark.types import Chunk

EPILOG = """Examples:

  dspark chat --system "Answer in one sentence." --temperature 0.7

  dspark chat --url http://127.0.0.1:8000

  printf 'Name a river.\\nWhere is it?\\n' | dspark chat
"""

DEFAULT = SamplingParams(max_tokens=1024)
DEFAULT_MODEL = "default"
COMMANDS = {
    "/reset": "forget the conversation, keep the system message",
    "/system TEXT": "set the system message; without a text, drop it",
    "/stats": "how the last answer came about",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does",
}

Messages = list[dict[str, str]]
Pieces = Generator[tuple[str, bool]]
"""Text as it comes, and whether the drafter had guessed it."""


def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="Target: a name, a directory or a GGUF file; 'default' is SmolLM2-135M-Instruct. "
            "With --url the name that the server knows; 'default' is the first it lists."
        ),
    ] = DEFAULT_MODEL,
    url: Annotated[
        str | None,
        typer.Option(
            help="Ask this OpenAI-compatible server instead of loading a model.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY",
            help="For --url: sent as a bearer token; also from OPENAI_API_KEY.",
            show_default="none",
        ),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            "-d",
            help="'auto', or a name; a wrong one lists them.",
            rich_help_panel=opt.MODEL_PANEL,
        ),
    ] = "auto",
    num_draft_tokens: opt.NumDraftTokensOption = None,
    verify: opt.VerifyOption = "auto",
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: opt.MaxContextOption = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of one answer at most.", rich_help_panel=opt.SAMPLING_PANEL)
    ] = DEFAULT.max_tokens,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "--temp", help="0 is greedy.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.temperature,
    top_p: Annotated[
        float,
        typer.Option(
            help="Keep the most probable tokens of this mass.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.top_p,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of every answer.", show_default="random", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.seed,
    color: Annotated[
        ui.Color,
        typer.Option(
            help="'auto': on a terminal, and without NO_COLOR.", rich_help_panel=opt.OUTPUT_PANEL
        ),
    ] = ui.Color.auto,
) -> None:
    """Talk with the model, turn by turn."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    local: dict[str, Any] = {
        "drafter": drafter,
        "num_draft_tokens": num_draft_tokens,
        "verify": verify,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "max_context": max_context,
    }
    err = ui.Paint(ui.wants_color(color, sys.stderr))
    partner: Partner
    if url is None:
        llm = opt.load_llm(model, **local)
        ui.note(err.muted(ui.resolved_line(llm)))
        partner = Local(llm)
    else:
        given = [n for n, v in local.items() if v not in (None, "auto")]
        if given:
            flags = ", ".join("--" + n.replace("_", "-") for n in given)
            raise ConfigError(f"{flags} is the server's business when --url is given: drop it")
        from dspark.client import Endpoint

        remote = Remote(Endpoint(url, api_key or None), None if model == DEFAULT_MODEL else model)
        ui.note(err.muted(f"model {remote.name} at {url}"))
        partner = remote
    with closing(partner):
        interactive = sys.stdin.isatty()
        if interactive:
            ui.note(err.muted("/help lists the commands · Ctrl-C stops an answer · Ctrl-D ends"))
        paint = ui.Paint(ui.wants_color(color, sys.stdout))
        session = Session(partner, params, paint, err, interactive, system)
        for line in _typed() if interactive else _piped():
            if not session.take(line):
                break


# -- who answers -----------------------------------------------------------------------------------


class Partner(Protocol):
    """Who answers: `stats` is one line about the last answer, None before there is one."""

    stats: str | None
    at_once: bool
    """Whether an answer may be broken off at any point, not only between two pieces."""

    def answer(self, messages: Messages, params: SamplingParams) -> Pieces: ...

    def close(self) -> None: ...


class Local:
    """The engine in this process, which must not be left in the middle of a round."""

    at_once = False

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.stats: str | None = None

    def answer(self, messages: Messages, params: SamplingParams) -> Pieces:
        chunks = cast("Generator[Chunk]", self._llm.stream(messages, params))
        try:
            with closing(chunks):
                for chunk in chunks:
                    yield chunk.text, chunk.drafted
        finally:
            output = self._llm.last_output
            if output is not None:
                line = ui.stats_line(output.stats, self._llm.drafter_name)
                self.stats = "\n".join([line, *(f"warning: {m}" for m in self._llm.messages)])

    def close(self) -> None:
        pass


class Remote:
    """A server."""

    at_once = True

    def __init__(self, endpoint: Endpoint, model: str | None) -> None:
        from dspark import client

        self._client, self._endpoint, self._http = client, endpoint, endpoint.open()
        self.name = client.only_model(endpoint, self._http) if model is None else model
        self.stats: str | None = None

    def answer(self, messages: Messages, params: SamplingParams) -> Pieces:
        body = {
            "model": self.name,
            "messages": messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream_options": {"include_usage": True},
        } | ({"seed": params.seed} if params.seed is not None else {})
        begun = time.perf_counter()
        first: float | None = None
        last: dict[str, Any] = {}
        with closing(self._client.stream(self._endpoint, self._http, body)) as found:
            for message in found:
                if message.get("usage"):
                    last = message
                for choice in message.get("choices") or ():
                    text = (choice.get("delta") or {}).get("content")
                    if text:
                        first = first or time.perf_counter()
                        yield text, False
        self.stats = _remote_line(last, begun, first or time.perf_counter(), time.perf_counter())

    def close(self) -> None:
        self._http.close()


def _remote_line(last: dict[str, Any], begun: float, first: float, end: float) -> str:
    """`128 tok · 96.4 tok/s · accepted length 2.3 · TTFT 41 ms`, as far as the server says."""
    parts = []
    tokens = (last.get("usage") or {}).get("completion_tokens")
    if tokens:
        parts.append(f"{tokens} tok")
        if tokens > 1:
            parts.append(f"{(tokens - 1) / (end - first):.1f} tok/s")
    speculation = (last.get("metrics") or {}).get("speculative_decoding") or {}
    if "mean_acceptance_length" in speculation:
        parts.append(f"accepted length {speculation['mean_acceptance_length']:.1f}")
    return " · ".join([*parts, f"TTFT {(first - begun) * 1e3:.0f} ms"])


# -- the conversation ------------------------------------------------------------------------------


@dataclass
class Session:
    """What was said so far, and what a line does to it."""

    partner: Partner
    params: SamplingParams
    out: ui.Paint
    err: ui.Paint
    interactive: bool
    system: str | None = None
    turns: Messages = field(default_factory=list)

    def take(self, line: str) -> bool:
        """Do what a line asks; False ends the conversation."""
        line = line.strip()
        if line.startswith("/") and not line.startswith("//"):
            return self._command(line)
        if line:
            self._turn(line[1:] if line.startswith("//") else line)
        return True

    def _command(self, line: str) -> bool:
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        if name == "/reset":
            self.turns.clear()
            self._say("the conversation begins anew")
        elif name == "/system":
            self.system = rest.strip() or None
            self._say("no system message" if self.system is None else f"system: {self.system}")
        elif name == "/stats":
            self._say(self.partner.stats or "nothing was answered yet")
        elif name == "/help":
            for command, meaning in COMMANDS.items():
                self._say(f"{command:<13} {meaning}")
        else:
            self._fail(InvalidRequestError(f"there is no {name}: /help lists what there is"))
        return True

    def _turn(self, text: str) -> None:
        head = [{"role": "system", "content": self.system}] if self.system is not None else []
        asked = [*head, *self.turns, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            with (
                _stoppable(self.interactive and not self.partner.at_once) as stopped,
                closing(self.partner.answer(asked, self.params)) as pieces,
            ):
                for piece, drafted in pieces:
                    answer.append(piece)
                    sys.stdout.write(self.out.accepted(piece) if drafted else piece)
                    sys.stdout.flush()
                    if stopped():
                        break
        except KeyboardInterrupt:
            if answer:
                sys.stdout.write("\n")
            if not (self.interactive and self.partner.at_once):
                raise
        except DSparkError as error:
            if answer:
                sys.stdout.write("\n")
            self._fail(error)
            return
        else:
            sys.stdout.write("\n")
        sys.stdout.flush()
        if answer:
            self.turns += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "".join(answer)},
            ]

    def _say(self, text: str) -> None:
        ui.note(self.err.muted(text))

    def _fail(self, error: DSparkError) -> None:
        """A person goes on after an error; a pipe ends with it."""
        if not self.interactive:
            raise error
        ui.note(f"{self.err.error('error:')} {' '.join(str(error).split())}")


@contextmanager
def _stoppable(gently: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. `gently` the first one is only remembered, and the second raises
    KeyboardInterrupt; otherwise the first one does."""
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note) if gently else None
    try:
        yield lambda: pressed
    finally:
        if gently:
            signal.signal(signal.SIGINT, before)


# -- lines -----------------------------------------------------------------------------------------


def _typed() -> Iterator[str]:
    """Lines of a person, with editing and history where the system has them."""
    with suppress(ImportError):
        import readline  # noqa: F401
    while True:
        prompt = "> "
        if not sys.stdout.isatty():  # answers go to a file: the prompt shall not
            sys.stderr.write(prompt)
            sys.stderr.flush()
            prompt = ""
        try:
            yield input(prompt)
        except EOFError:
            sys.stderr.write("\n")  # the shell's next line shall not begin behind the prompt
            return


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"line {number} is not UTF-8 text: {error}") from error
