"""`dspark eval`: how good a drafter is, apart from how fast it is.

Prints the accepted lengths, the acceptance by position, what the columns mean and, as the last line
of standard output, everything as one JSON object; `--picture` draws the acceptance by position. A
drafter whose trainer left an estimate is compared with it. That verdict does not change the exit
code, as the prompts may well be unlike the text it was estimated on. The counting itself is in
`dspark.bench.evaluate`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.bench import evaluate, picture
from dspark.bench.prompts import BUILTIN, PREFIX, load_prompts
from dspark.cli import options as opt
from dspark.cli import ui
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

EPILOG = """Examples:

  dspark eval ngram --prompts builtin:chat,builtin:summarise --picture acceptance.png

  dspark eval runs/dspark runs/mtp --prompts mine.jsonl --temperatures 1 --num-draft-tokens 7
"""

DEFAULT = evaluate.EvalConfig()
DEFAULT_PROMPTS = PREFIX + BUILTIN[0]
DEFAULT_TEMPERATURES = ",".join(f"{t:g}" for t in DEFAULT.temperatures)


def eval_(
    drafters: Annotated[
        list[str],
        typer.Argument(
            metavar="DRAFTER...",
            help="Names or checkpoint directories; all share the loaded target.",
            show_default=False,
        ),
    ],
    model: opt.ModelOption = "default",
    num_draft_tokens: opt.NumDraftTokensOption = DEFAULT.num_draft_tokens,
    verify: opt.VerifyOption = DEFAULT.verify,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help=f"JSONL file or {', '.join(PREFIX + kind for kind in BUILTIN)}, each a set of its "
            "own; may be given again or separated by commas.",
            show_default=DEFAULT_PROMPTS,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="First prompts of each set.", show_default="all")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate for each prompt at most.")
    ] = DEFAULT.max_tokens,
    temperatures: Annotated[
        str, typer.Option(help="Separated by commas; 0 is greedy.")
    ] = DEFAULT_TEMPERATURES,
    seed: Annotated[int, typer.Option(help="Of the first text of each set.")] = DEFAULT.seed,
    repeat: Annotated[
        int, typer.Option(min=1, help="Texts of each prompt when sampling; a greedy one is one.")
    ] = DEFAULT.repeat,
    estimate: Annotated[
        float | None,
        typer.Option(
            help="Accepted length at temperature 1 that the drafter's trainer expects.",
            show_default="DRAFTER/config.json's",
        ),
    ] = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: opt.MaxContextOption = None,
    picture_file: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Draw acceptance against position to this .png or .svg file.",
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
    """Measure how many tokens a drafter's guesses bring, and how acceptance falls along a block."""
    config = evaluate.EvalConfig(
        drafters=tuple(drafters),
        num_draft_tokens=num_draft_tokens,
        verify=verify,
        temperatures=_numbers(temperatures),
        max_tokens=max_tokens,
        seed=seed,
        repeat=repeat,
    )
    estimates = _estimates(config, estimate)
    sources = dict.fromkeys(ui.split(prompts or [DEFAULT_PROMPTS])) or {DEFAULT_PROMPTS: None}
    sets = [load_prompts([source], limit) for source in sources]
    # Minutes of measuring shall not end in these errors.
    if picture_file is not None:
        picture.check_picture(picture_file)
    if json_file is not None:
        picture.check_file(json_file)
    llm = opt.load_llm(
        model,
        drafter="none",
        num_draft_tokens=None,
        dtype=dtype,
        device=device,
        threads=threads,
        max_context=max_context,
    )
    muted = ui.Paint(ui.wants_color(color, sys.stderr)).muted
    ui.note(muted(f"model {llm.model_name} · dtype {llm.dtype} · device {llm.device}"))
    total = sum(config.texts(t, len(s)) for t in config.temperatures for s in sets)
    with _progress(color, total * len(config.drafters)) as on_step:
        report = evaluate.run(llm, sets, config, estimates, on_step)
    _print(report, color)
    line = json.dumps(ui.finite(report.as_json()), ensure_ascii=False, allow_nan=False)
    print(line, flush=True)
    if json_file is not None:
        with picture.replacing(json_file) as temporary:
            temporary.write_text(line + "\n", encoding="utf-8")
    if picture_file is not None:
        picture.draw(report, picture_file)
    for drafter, found in estimates.items():
        if found.temperature not in config.temperatures:
            ui.note(
                f"warning: the trainer of {drafter} estimated at temperature {found.temperature:g},"
                " which was not measured: add it to --temperatures to compare"
            )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in ui.split([text]))
    except ValueError as error:
        raise ConfigError(
            f"--temperatures {text}: expected numbers separated by commas, such as 0,1"
        ) from error


def _estimates(config: evaluate.EvalConfig, given: float | None) -> dict[str, evaluate.Estimate]:
    """The trainers' estimates by drafter: the one that was given, or those in the checkpoints."""
    if given is None:
        found = {d: evaluate.read_estimate(d) for d in config.drafters}
        return {drafter: estimate for drafter, estimate in found.items() if estimate is not None}
    estimate = evaluate.Estimate(given, source="--estimate")
    if len(config.drafters) > 1:
        raise ConfigError("--estimate is that of one drafter: give a single DRAFTER with it")
    if estimate.temperature not in config.temperatures:
        raise ConfigError("--estimate is compared at temperature 1: add it to --temperatures")
    return {config.drafters[0]: estimate}


@contextmanager
def _progress(color: ui.Color, total: int) -> Iterator[Callable[[evaluate.Step], None]]:
    """A bar on standard error with what is measured and how fast; nothing when piped."""
    tokens, seconds = 0, 0.0
    with ui.progress(color, total, note="first texts") as advance:

        def on_step(step: evaluate.Step) -> None:
            nonlocal tokens, seconds
            tokens += sum(len(o.token_ids) for o in step.outputs)
            seconds += step.seconds
            rate = f"{tokens / seconds:.0f} tok/s · " if seconds else ""
            where = f"{step.drafter} at {step.temperature:g} on {step.prompts}"
            advance(len(step.outputs), rate + where)

        yield on_step


def _print(report: evaluate.Report, color: ui.Color) -> None:
    console = ui.stdout_console(color)
    drafters = picture.labels(list(dict.fromkeys(r.drafter for r in report.results)))
    sets = picture.labels([p.name for p in report.prompts])
    rows: list[tuple[tuple[str, ...], evaluate.Result]] = []
    for drafter in drafters:
        for temperature in report.config.temperatures:
            for r in (*report.results, *report.means):
                if (r.drafter, r.temperature) == (drafter, temperature):
                    name = sets.get(r.prompts, r.prompts)
                    rows.append(((drafters[drafter], f"{temperature:g}", name), r))
    console.print(_lengths(rows))
    longest = max(len(r.cumulative) for _, r in rows)
    if longest:
        titles = {
            "conditional": "conditional acceptance at position k, %: accepted / tried (all before "
            "it accepted)",
            "cumulative": "cumulative acceptance at position k, %: accepted / all rounds",
        }
        for name, title in titles.items():
            console.print(title, markup=False)
            console.print(_positions(rows, name, longest))
    for prompts in report.prompts:
        print(f"prompts: {prompts.name}, {len(prompts)} of them")
    for agreement in report.agreements:
        print(_verdict(agreement, drafters[agreement.drafter]))
    paint = ui.Paint(ui.wants_color(color, sys.stdout))
    print(paint.muted("\n".join(f"  {k}: {v}" for k, v in evaluate.DEFINITIONS.items())))


def _table(*names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("drafter", "temp", "prompts", *names):
        left = name in ("drafter", "prompts")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    return table


def _lengths(rows: Sequence[tuple[tuple[str, ...], evaluate.Result]]) -> Table:
    table = _table("texts", "rounds", "drafted\n/ round", "accepted\nlength", "std.\nerror",
                   "full-block\nlength", "accept-\nance")  # fmt: skip
    for key, r in rows:
        share = None if r.acceptance_rate is None else r.acceptance_rate * 100
        table.add_row(
            *key,
            str(r.texts),
            str(r.rounds),
            ui.number(r.drafted_per_round, 2),
            ui.number(r.accepted_length, 2),
            ui.number(r.standard_error, 2),
            ui.number(r.full_block_length, 2),
            ui.number(share, 0, " %"),
            end_section=r.prompts == evaluate.MEAN,
        )
    return table


def _positions(
    rows: Sequence[tuple[tuple[str, ...], evaluate.Result]], name: str, longest: int
) -> Table:
    table = _table(*(str(k + 1) for k in range(longest)))
    for key, r in rows:
        shares = [f"{share * 100:.0f}" for share in getattr(r, name)]
        table.add_row(
            *key,
            *shares,
            *["-"] * (longest - len(shares)),
            end_section=r.prompts == evaluate.MEAN,
        )
    return table


def _verdict(a: evaluate.Agreement, drafter: str) -> str:
    error = "" if a.standard_error is None else f" ± {a.standard_error:.2f}"
    verdict = "agrees within" if a.within else "differs by more than"
    unsure = "; too few texts to be sure: two standard errors cross that limit"
    doubt = "" if a.certain else unsure
    return (
        f"estimate of {drafter}: served {a.served:.2f}{error} on these prompts at temperature "
        f"{a.temperature:g} (full blocks {ui.number(a.served_full_blocks, 2)}), estimated in "
        f"training {a.estimated:.2f} ({a.source}): {a.difference * 100:+.1f} %, {verdict} "
        f"{evaluate.CLOSE * 100:.0f} %{doubt}"
    )
