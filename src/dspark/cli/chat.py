"""`dspark chat`: a conversation in the terminal, with the engine here or with a server.

Answers stream to standard output, the draft tokens that the target accepted in green (of a server
that is not told); everything else goes to standard error, the model's reasoning in a paler colour.
Reasoning is no part of the conversation. Lines that begin with a slash are
commands; `//` sends a line that begins with one.

On a terminal Ctrl-C stops an answer, which stays in the conversation as far as it came; at the
prompt, or twice in one answer, it ends. An error costs its turn, not the conversation. In a pipe
every line is a turn, and the first error or Ctrl-C ends it all.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import FrameType
from typing import Annotated, Any

import typer

from dspark.cli import options as opt
from dspark.cli import ui
from dspark.cli.partners import Local, Messages, Partner, Remote
from dspark.errors import ConfigError, DSparkError, InvalidRequestError
from dspark.types import SamplingParams

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


class Effort(StrEnum):
    none = "none"
    low = "low"
    high = "high"
    max = "max"


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
    pipeline: opt.PipelineOption = "auto",
    draft_device: opt.DraftDeviceOption = None,
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
    reasoning_effort: Annotated[
        Effort | None,
        typer.Option(
            help="Let the model reason before it answers, if it can be told to (DeepSeek-V4). "
            "Reasoning goes to standard error.",
            show_default="the model's",
            rich_help_panel=opt.SAMPLING_PANEL,
        ),
    ] = None,
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
        "pipeline": pipeline,
        "draft_device": draft_device,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "max_context": max_context,
    }
    err = ui.Paint(ui.wants_color(color, sys.stderr))
    effort = None if reasoning_effort is None else reasoning_effort.value
    partner: Partner
    if url is None:
        llm = opt.load_llm(model, **local)
        partner = Local(llm, effort)
        ui.note(err.muted(ui.resolved_line(llm)))
    else:
        given = [n for n, v in local.items() if v not in (None, "auto", "off")]
        if given:
            flags = ", ".join("--" + n.replace("_", "-") for n in given)
            raise ConfigError(f"{flags} is the server's business when --url is given: drop it")
        from dspark.client import Endpoint

        name = None if model == DEFAULT_MODEL else model
        remote = Remote(Endpoint(url, api_key or None), name, effort)
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
        thinking = False
        try:
            with (
                _stoppable(self.interactive and not self.partner.at_once) as stopped,
                closing(self.partner.answer(asked, self.params)) as pieces,
            ):
                for piece in pieces:
                    if thinking and not piece.reasoning:
                        ui.note("")
                    thinking = piece.reasoning
                    if thinking:
                        sys.stderr.write(self.err.muted(piece.text))
                        sys.stderr.flush()
                    else:
                        answer.append(piece.text)
                        drafted = piece.drafted
                        sys.stdout.write(self.out.accepted(piece.text) if drafted else piece.text)
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
