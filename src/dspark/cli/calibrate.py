"""`dspark calibrate`: how sure may a drafter be? Fits its calibration and says how good it is.

Writes `calibration.json` beside the drafter's weights, where `LLM` and so every verb finds it, or
where `--out` says. Prints, for the prompts not used for fitting, each draft position before and
after, and as the last line of standard output everything as one JSON object; `--picture` draws the
reliability diagram. The collecting is in `dspark.bench.calibrate`, the fit and the measures in
`dspark.schedule.calibration`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.bench import picture
from dspark.bench.calibrate_config import CalibrateConfig
from dspark.bench.prompts import BUILTIN, PREFIX, load_prompts
from dspark.cli import options as opt
from dspark.cli import ui
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from dspark.bench.calibrate import Report, Step
    from dspark.llm import LLM

EPILOG = """Examples:

  dspark calibrate runs/dspark/drafter --prompts mine.jsonl --picture reliability.png

  dspark calibrate dspark --temperature 0 --max-tokens 512 --out greedy.json
"""

DEFAULT = CalibrateConfig()
GOOD = 0.02
"""ECE of the survival that a schedule can trust."""


def calibrate(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="Name or checkpoint directory of a drafter with a confidence head.",
            show_default=False,
        ),
    ],
    model: opt.ModelOption = "default",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help=f"JSONL file or {', '.join(PREFIX + kind for kind in BUILTIN)}; may be given "
            "again or separated by commas.",
            show_default="all built-in ones",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="First prompts of each file.", show_default="all")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate for each prompt at most.")
    ] = DEFAULT.max_tokens,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; calibrate at the one that is served.")
    ] = DEFAULT.temperature,
    repeat: Annotated[
        int, typer.Option(min=1, help="Texts of each prompt when sampling; a greedy one is one.")
    ] = DEFAULT.repeat,
    held_out: Annotated[
        float, typer.Option(help="Share of the prompts to judge by instead of fitting on them.")
    ] = DEFAULT.held_out,
    seed: Annotated[
        int, typer.Option(help="Of the first text, and of the division of the prompts.")
    ] = DEFAULT.seed,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: opt.MaxContextOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the calibration here.",
            show_default="DRAFTER/calibration.json",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = None,
    picture_file: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Draw the reliability diagram to this .png or .svg file.",
            show_default=False,
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the JSON object to this file, too.",
            show_default=False,
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = None,
    color: Annotated[
        ui.Color,
        typer.Option(
            help="'auto': on a terminal, and without NO_COLOR.", rich_help_panel=opt.OUTPUT_PANEL
        ),
    ] = ui.Color.auto,
) -> None:
    """Make a drafter's confidences honest: fit its calibration on texts, judge it on others."""
    config = CalibrateConfig(
        drafter=drafter,
        temperature=temperature,
        max_tokens=max_tokens,
        repeat=repeat,
        held_out=held_out,
        seed=seed,
    )
    sources = ui.split(prompts or []) or [PREFIX + kind for kind in BUILTIN]
    asked = load_prompts(list(dict.fromkeys(sources)), limit)
    config.fitted(len(asked))
    # Here, not on top: numpy takes a while, and `--help` must not wait for it.
    from dspark.bench import calibrate as calibrating
    from dspark.bench import reliability

    # Minutes of writing shall not end in these errors.
    if picture_file is not None:
        picture.check_picture(picture_file)
    for file in (json_file, out):
        if file is not None:
            picture.check_file(file)
    llm = opt.load_llm(
        model,
        drafter="none",
        num_draft_tokens=None,
        dtype=dtype,
        device=device,
        threads=threads,
        max_context=max_context,
    )
    calibrating.load(llm, drafter)
    file = _place(llm) if out is None else out
    muted = ui.Paint(ui.wants_color(color, sys.stderr)).muted
    ui.note(muted(ui.resolved_line(llm)))
    with ui.progress(color, config.texts(len(asked)), "writing", "first texts") as advance:
        written = 0

        def on_step(step: Step) -> None:
            nonlocal written
            written += len(step.output.token_ids)
            advance(1, f"{written / step.seconds:.0f} tok/s" if step.seconds else "")

        report = calibrating.run(llm, asked, config, on_step)
    report.calibration.save(file)
    _print(report, color)
    ui.note(muted(f"calibration written to {file}"))
    line = json.dumps(ui.finite(report.as_json()), ensure_ascii=False, allow_nan=False)
    print(line, flush=True)
    if json_file is not None:
        with picture.replacing(json_file) as temporary:
            temporary.write_text(line + "\n", encoding="utf-8")
    if picture_file is not None:
        reliability.draw(report, picture_file)


def _place(llm: LLM) -> Path:
    """Where every verb looks for the calibration. Raises ConfigError if that cannot be written."""
    from dspark.schedule.calibration import FILE

    folder = llm.drafter_folder
    if folder is None:
        raise ConfigError(
            f"the drafter {llm.drafter_name} has no folder of its own to keep a calibration in: say"
            " where with --out"
        )
    try:
        picture.check_file(folder / FILE)
    except ConfigError as error:
        raise ConfigError(f"{error}; say where with --out") from error
    return folder / FILE


def _print(report: Report, color: ui.Color) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("draft", "T", "drafts", "pre-\ndicted", "cali-\nbrated", "real-\nised",
                 "ECE\nbefore", "\nafter", "by\nchance", "AUC\nbefore", "\nafter",
                 "Brier\nbefore", "\nafter"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)

    def percent(value: float | None) -> str:
        return ui.number(None if value is None else value * 100, 1, " %")

    for p in report.positions:
        b, a = p.before, p.after
        table.add_row(
            str(a.position),
            f"{p.temperature:.2f}",
            str(a.samples),
            percent(b.predicted),
            percent(a.predicted),
            percent(a.realised),
            percent(b.ece),
            percent(a.ece),
            percent(p.chance),
            ui.number(b.auc, 3),
            ui.number(a.auc, 3),
            ui.number(b.brier, 3),
            ui.number(a.brier, 3),
        )
    ui.stdout_console(color).print(table)
    print(
        f"survival on {report.held_out_records} drafts of prompts not used for fitting; fitted on"
        f" {report.records} drafts of {report.fitted_prompts} of {len(report.prompts)} prompts"
        f" ({report.prompts.name}) at temperature {report.config.temperature:g}"
    )
    off = [p.after.position for p in report.positions if p.after.ece > max(GOOD, p.chance or 0)]
    if off:
        where = ", ".join(map(str, off))
        print(f"more than {GOOD * 100:g} % off, and more than chance explains, at draft {where}")
