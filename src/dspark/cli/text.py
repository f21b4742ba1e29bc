"""`dspark text`: text in the target's own words, to train a drafter on.

All that is written goes to the folder; standard output gets nothing but the JSON line of `--json`.
The writing itself is in `dspark.train.text`, how a server is asked in `dspark.train.endpoint`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options as opt
from dspark.cli import ui
from dspark.errors import ConfigError
from dspark.train.endpoint import EndpointConfig, EndpointWriter
from dspark.train.prompts import FilePrompts, OwnPrompts, most_common, read_prompts, user_turn
from dspark.train.text import PROMPT_ROOM, EngineWriter, TextConfig, Writer, write_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from dspark.train.text import Progress, Summary

EPILOG = """Examples:

  dspark text default --out runs/text --tokens 2000000

  dspark text Qwen/Qwen3-8B --out runs/text --prompts mine.jsonl --endpoint http://localhost:8000
"""

DEFAULT = TextConfig()
TEMPERATURES = ",".join(f"{t:g}" for t in DEFAULT.temperatures)
SERVER_PANEL = "Server"


def text(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write, or to go on with after a stop.",
            show_default=False,
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ],
    model: Annotated[
        str,
        typer.Argument(
            help="Target: a name, a directory or a GGUF file; the server's name for it."
        ),
    ] = "default",
    tokens: Annotated[
        int, typer.Option(help="Answer tokens in all; may be raised later.")
    ] = DEFAULT.tokens,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON Lines with 'prompt', 'turns' or 'messages'; may be given again.",
            show_default="the target writes them",
        ),
    ] = None,
    temperatures: Annotated[
        str,
        typer.Option(
            help="Separated by commas; each answer takes one by chance.",
            rich_help_panel=opt.SAMPLING_PANEL,
        ),
    ] = TEMPERATURES,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of one answer.", rich_help_panel=opt.SAMPLING_PANEL)
    ] = DEFAULT.max_tokens,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of one prompt that the target writes.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.prompt_tokens,
    prompt_temperature: Annotated[
        float,
        typer.Option(
            help="Of the prompts that the target writes.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.prompt_temperature,
    seed: Annotated[
        int, typer.Option(help="Same seed, same text.", rich_help_panel=opt.SAMPLING_PANEL)
    ] = DEFAULT.seed,
    batch: Annotated[int, typer.Option(min=1, help="Texts written at the same time.")] = 64,
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            "-d",
            help="A large batch is fastest with 'none'.",
            rich_help_panel=opt.MODEL_PANEL,
        ),
    ] = "none",
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of prompt and answer together; longer prompts are left out.",
            show_default=f"--max-tokens and {PROMPT_ROOM}",
            rich_help_panel=opt.MODEL_PANEL,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A server with OpenAI's protocol writes the answers, --batch at a time; "
            "its key is in OPENAI_API_KEY. Needs --prompts.",
            show_default=False,
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print what was done as JSON.", rich_help_panel=opt.OUTPUT_PANEL
        ),
    ] = False,
    color: Annotated[
        ui.Color,
        typer.Option(
            help="'auto': on a terminal, and without NO_COLOR.", rich_help_panel=opt.OUTPUT_PANEL
        ),
    ] = ui.Color.auto,
) -> None:
    """Write text in the target's own words, to train a drafter on; goes on after a stop."""
    config = TextConfig(
        tokens=tokens,
        max_tokens=max_tokens,
        temperatures=_numbers(temperatures),
        seed=seed,
        prompt_tokens=prompt_tokens,
        prompt_temperature=prompt_temperature,
    )
    source: FilePrompts | OwnPrompts | None = read_prompts(prompts) if prompts else None
    muted = ui.Paint(ui.wants_color(color, sys.stderr)).muted
    writer: Writer
    if endpoint is not None:
        given = {"--drafter": drafter != "none", "--dtype": dtype != "auto",
                 "--device": device != "auto", "--threads": threads is not None,
                 "--max-context": max_context is not None}  # fmt: skip
        for name in (n for n, is_given in given.items() if is_given):
            raise ConfigError(f"{name} is for a model that runs here, not for --endpoint: drop one")
        if source is None:
            raise ConfigError(
                "--endpoint needs prompts from files: a server's chat protocol cannot go on in the"
                " user's place. Give --prompts"
            )
        at = EndpointConfig(endpoint, model, batch, os.environ.get("OPENAI_API_KEY") or None)
        writer = EndpointWriter(at)
        identity: dict[str, Any] = {"writer": "endpoint", "model": model}
        ui.note(muted(f"model {model} · {at.address} · {batch} requests at a time"))
    else:
        # Here, not on top: importing torch takes seconds, and `--help` must not wait for it.
        from dspark.llm import LLM

        llm = LLM(
            model,
            drafter=drafter,
            dtype=dtype,
            device=device,
            threads=threads,
            max_context=max_context or max_tokens + PROMPT_ROOM,
            max_users=batch,
            pipeline="off",  # texts are resumed by their count: nothing may depend on times
        )
        user_turn(llm.tokenizer)  # no chat template: say so before anything is written
        if source is None:
            source = OwnPrompts(llm.tokenizer, seed)
        writer = EngineWriter(llm)
        identity = {
            "writer": "engine",
            "model": llm.model_name,
            "dtype": llm.dtype,
            "drafter": llm.drafter_name,
            "max_context": llm.target.max_context,
        }
        ui.note(muted(f"{ui.resolved_line(llm)} · batch {batch}"))
    try:
        with _progress(color, tokens) as on_progress:
            done = write_text(writer, source, config, out, identity, on_progress)
    except KeyboardInterrupt:
        ui.note(f"stopped; finished rows are in {out}: the same command goes on")
        raise
    ui.note(_summary_line(done, out))
    if not done.complete:
        ui.note(f"warning: the prompts were used up before {tokens} tokens: begin another --out")
    if as_json:
        found = {**asdict(done), "tokens_per_second": done.tokens_per_second, "out": str(out)}
        print(json.dumps(ui.finite(found), ensure_ascii=False, allow_nan=False), flush=True)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as e:
        raise ConfigError(
            f"temperatures={text!r} are no numbers: expected some, separated by commas"
        ) from e


def _summary_line(done: Summary, out: Path) -> str:
    """`1204 rows · 200113 tok · 143.0 tok/s · 1400 s · dropped: 80 cut off · runs/text`"""
    parts = [f"{done.rows} rows", f"{done.tokens} tok"]
    if done.new_tokens:
        parts += [f"{done.tokens_per_second:.1f} tok/s", f"{done.seconds:.0f} s"]
    else:
        parts.append("nothing new to write")
    if done.dropped:
        parts.append(f"prompts dropped: {most_common(done.dropped)}")
    return " · ".join([*parts, str(out)])


@contextmanager
def _progress(color: ui.Color, total: int) -> Iterator[Callable[[Progress], None]]:
    """A bar on standard error with the speed and the time left; nothing when piped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.progress import TimeRemainingColumn as Remaining

    on = ui.wants_color(color, sys.stderr)
    bar = Bar(
        TextColumn("writing"),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("{task.fields[rates]}", markup=False),
        console=Console(stderr=True, no_color=not on, highlight=False),
        disable=not sys.stderr.isatty(),
        transient=True,
        speed_estimate_period=600.0,  # rows come in bursts
    )
    with bar:
        task = bar.add_task("", total=total, rates="the first prompts")
        began = time.perf_counter()

        def on_progress(p: Progress) -> None:
            speed = p.new_tokens / (time.perf_counter() - began)
            rates = f"{speed:.1f} tok/s · {p.rows} rows · {p.prompts} prompts"
            bar.update(task, completed=min(p.tokens, total), rates=rates)

        yield on_progress
