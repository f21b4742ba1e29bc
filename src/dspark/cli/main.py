"""The `dspark` command: one file per verb, and here what all verbs share.

Exit codes: 0 done; 1 the verb ran and its verdict is bad (`bench` found a different text), or this
code has a bug, which shows its traceback; 2 what was asked for cannot be done, with one line that
says why; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from dspark import __version__
from dspark.cli import bench, bench_load, bench_serve, generate
from dspark.cli import calibrate as calibrating
from dspark.cli import chat as chatting
from dspark.cli import eval as evaluate
from dspark.cli import export as exporting
from dspark.cli import inspect as inspecting
from dspark.cli import pretrain as pretraining
from dspark.cli import profile as profiling
from dspark.cli import serve as serving
from dspark.cli import text as training_text
from dspark.cli import train as training
from dspark.cli.ui import Color, Paint, announcements, note, wants_color
from dspark.errors import DSparkError

EPILOG = """Examples:

  dspark generate "Why is the sky blue?"

  dspark bench --drafters none,ngram --prompts builtin:summarise

  dspark train drafter.toml --plan
"""

app = typer.Typer(
    name="dspark",
    epilog=EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate", epilog=generate.EPILOG)(generate.generate)
app.command("chat", epilog=chatting.EPILOG)(chatting.chat)
app.command("serve", epilog=serving.EPILOG)(serving.serve)
app.command("eval", epilog=evaluate.EPILOG)(evaluate.eval_)
app.command("calibrate", epilog=calibrating.EPILOG)(calibrating.calibrate)
app.command("text", epilog=training_text.EPILOG)(training_text.text)
app.command("train", epilog=training.EPILOG)(training.train)
app.command("pretrain", epilog=pretraining.EPILOG)(pretraining.pretrain)
app.command("export", epilog=exporting.EPILOG)(exporting.export)
app.command("profile", epilog=profiling.EPILOG)(profiling.profile)
app.command("inspect", epilog=inspecting.EPILOG)(inspecting.inspect)
# A group whose bare call measures, too: `dspark bench` stays what it was beside its kinds.
benches = typer.Typer(callback=bench.bench, invoke_without_command=True, epilog=bench.EPILOG)
benches.command("load", epilog=bench_load.EPILOG)(bench_load.bench_load)
benches.command("serve", epilog=bench_serve.EPILOG)(bench_serve.bench_serve)
app.add_typer(benches, name="bench")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


@app.callback()
def _dspark(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the traceback of an error; before or behind the verb, or DSPARK_DEBUG=1.",
        ),
    ] = False,
) -> None:
    """Speculative decoding: a drafter guesses ahead, the target checks, the text stays exactly the
    target's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return its exit code."""
    args, debug = _without_debug(sys.argv[1:] if argv is None else argv)
    try:
        # A bare call is a question, not a mistake: it gets the help.
        with announcements():
            typer.main.get_command(app)(args=args or ["--help"], prog_name="dspark")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except KeyboardInterrupt:
        return 130
    except DSparkError as error:
        if debug:
            traceback.print_exc()
        label = Paint(wants_color(Color.auto, sys.stderr)).error("error:")
        note(f"{label} {' '.join(str(error).split())}")
        return 2
    return 0


def _without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--debug` out wherever it stands before a `--`, so that every verb knows it."""
    args = list(argv)
    end = args.index("--") if "--" in args else len(args)
    options = [a for a in args[:end] if a != "--debug"]
    asked = os.environ.get("DSPARK_DEBUG", "0") not in ("", "0")
    return options + args[end:], asked or len(options) < end


if __name__ == "__main__":
    sys.exit(main())
