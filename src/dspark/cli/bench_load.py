"""`dspark bench load`: N users at once, from plain decoding to scheduled verification.

Prints two tables for all loads, what every schedule is worth against every fixed length, the
definitions and, as the last line of standard output, everything as one JSON object; `--out` keeps
that beside the two pictures. Exit code 1 says that some text was not the plain one. Ctrl-C ends
it with what is finished and exit code 130. The measuring is in `dspark.bench.load`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.bench import load, load_picture, picture
from dspark.bench.load_report import DEFINITIONS, LoadReport, Percentiles
from dspark.bench.prompts import BUILTIN, PREFIX, PromptSet, load_prompts
from dspark.cli import options as opt
from dspark.cli import ui
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from dspark.bench.load_report import Result
    from dspark.llm import LLM

EPILOG = """Examples:

  dspark bench load --out load/

  dspark bench load --users 1,4,16 --drafters ngram --verify auto,threshold:0.5 --fixed 2,4
"""

DEFAULT = load.LoadConfig()
DEFAULT_PROMPTS = ",".join(PREFIX + kind for kind in BUILTIN)
JSON = "load.json"


def bench_load(
    model: Annotated[
        str, typer.Argument(help="Target: a name, a directory or a GGUF file.")
    ] = "default",
    users: Annotated[str, typer.Option(help="Numbers of users, separated by commas.")] = ",".join(
        map(str, DEFAULT.users)
    ),
    drafters: Annotated[
        str,
        typer.Option(
            help="Names or checkpoint directories, separated by commas; plain decoding always "
            "takes part, and mtp1 where the model has one."
        ),
    ] = ",".join(DEFAULT.drafters),
    verify: Annotated[
        str,
        typer.Option(
            metavar="MODES",
            help="Schedules, separated by commas: auto, causal, lagged, threshold:P, all or "
            "static:K.",
        ),
    ] = ",".join(DEFAULT.verify),
    fixed: Annotated[
        str | None,
        typer.Option(
            help="Fixed lengths K to compare with, separated by commas.",
            show_default="all up to the drafter's block",
        ),
    ] = None,
    num_draft_tokens: opt.NumDraftTokensOption = DEFAULT.num_draft_tokens,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help=f"JSONL file or {', '.join(PREFIX + kind for kind in BUILTIN)}, mixed; "
            "may be given again or separated by commas.",
            show_default="all four",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="First prompts of each source.", show_default="all")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="To measure in each run, of all users together.")
    ] = DEFAULT.tokens,
    max_tokens: Annotated[
        int, typer.Option(help="Longest answer; lengths lie between a quarter of it and all.")
    ] = DEFAULT.max_tokens,
    warm_up: Annotated[
        int, typer.Option(help="Rounds before each window, once all users are answered.")
    ] = DEFAULT.warm_up,
    repeats: Annotated[
        int, typer.Option(help="Runs of each configuration under each load.")
    ] = DEFAULT.repeats,
    seed: Annotated[int, typer.Option(help="Of questions and lengths.")] = DEFAULT.seed,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: opt.MaxContextOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help=f"Write {JSON}, {load_picture.SPEED} and {load_picture.BUDGET} into this folder; "
            "it is made if need be.",
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
    """Measure throughput, speed per user and latencies for N users at once, fixed lengths against
    schedules, and check that all texts are the plain ones."""
    config = load.LoadConfig(
        users=_numbers("--users", users),
        drafters=tuple(ui.split([drafters])),
        verify=tuple(ui.split([verify])),
        fixed=() if fixed is None else _numbers("--fixed", fixed),
        num_draft_tokens=num_draft_tokens,
        tokens=tokens,
        max_tokens=max_tokens,
        warm_up=warm_up,
        repeats=repeats,
        seed=seed,
    )
    chosen = load_prompts(ui.split(prompts or [DEFAULT_PROMPTS]), limit)
    if json_file is not None:
        picture.check_file(json_file)
    if out is not None:
        _check_folder(out)
    llm = opt.load_llm(
        model,
        drafter="none",
        num_draft_tokens=None,
        dtype=dtype,
        device=device,
        threads=threads,
        max_context=max_context,
        max_users=config.users[-1],
        prefix_reuse=False,  # or the second of two equal prompts would be short
    )
    muted = ui.Paint(ui.wants_color(color, sys.stderr)).muted
    ui.note(muted(f"model {llm.model_name} · dtype {llm.dtype} · device {llm.device}"))
    report, stopped = _measure(llm, chosen, config, color)
    _print(report, color)
    line = json.dumps(ui.finite(report.as_json()), ensure_ascii=False, allow_nan=False)
    print(line, flush=True)
    if json_file is not None:
        _write(json_file, line)
    if out is not None:
        out.mkdir(exist_ok=True)
        _write(out / JSON, line)
        load_picture.draw(report, out)
    for message in report.messages:
        ui.note(f"warning: {message}")
    for difference in report.differences:
        ui.note(f"error: {difference}: speculation must not change a greedy text")
    if stopped:
        ui.note("stopped: the figures are those of the runs that were finished")
        raise typer.Exit(130)
    if report.differences:
        raise typer.Exit(1)


def _measure(
    llm: LLM, prompts: PromptSet, config: load.LoadConfig, color: ui.Color
) -> tuple[LoadReport, bool]:
    """The report, and whether Ctrl-C cut it short; a stop before the first run stops all."""
    muted = ui.Paint(ui.wants_color(color, sys.stderr)).muted
    setups = load.prepare(llm, config)
    for s in setups:
        if s.reason:
            ui.note(muted(f"{s.name}: {s.reason}"))
    if load.MTP not in (s.drafter for s in setups):
        ui.note(muted(f"{load.MTP}: none is known for this model"))
    with ui.progress(color, len(prompts), "plain texts") as advance:
        texts = load.write_plain(llm, prompts, config, lambda output: advance(1, ""))
    runs: list[load.Run] = []
    stopped = False
    try:
        with ui.progress(color, len(setups) * len(config.users) * config.repeats) as advance:
            for run in load.measure(llm, setups, texts, config):
                runs.append(run)
                speed = ui.number(run.tokens_per_second, 1, " tok/s")
                advance(1, f"{run.setup}, {run.users} user{'s' * (run.users != 1)}: {speed}")
    except KeyboardInterrupt:
        if not runs:
            raise
        stopped = True
    report = LoadReport(
        model=llm.model_name,
        dtype=llm.dtype,
        device=llm.device,
        threads=llm.threads,
        config=config,
        prompts=prompts,
        setups=setups,
        runs=tuple(runs),
    )
    return report, stopped


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in ui.split([text]))
    except ValueError as error:
        raise ConfigError(
            f"{option} {text}: expected whole numbers separated by commas, such as 1,2,4"
        ) from error


def _check_folder(folder: Path) -> None:
    """Hours of measuring shall not end in this error."""
    if folder.is_dir():
        load_picture.check(folder)
        picture.check_file(folder / JSON)
    elif folder.exists() or not os.access(folder.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"cannot write into {folder}: expected a folder, or the name of one in a folder that"
            " can be written to"
        )
    else:
        load_picture.check(folder.absolute().parent)


def _write(file: Path, line: str) -> None:
    with picture.replacing(file) as temporary:
        temporary.write_text(line + "\n", encoding="utf-8")


# -- what is printed -------------------------------------------------------------------------------


def _print(report: LoadReport, color: ui.Color) -> None:
    console = ui.stdout_console(color)
    results = report.results()
    console.print(_speeds(results))
    console.print(_drafts(results))
    for c in report.comparisons():
        print(
            f"{c.scheduled} against {c.fixed}: {c.mean:.3f}x in the geometric mean over "
            f"{', '.join(map(str, c.users))} users, at worst {c.worst:.3f}x with {c.worst_users}"
        )
    print(
        f"prompts: {report.prompts.name}, {len(report.prompts)} of them; answers of "
        f"{-(-report.config.max_tokens // 4)} to {report.config.max_tokens} tokens"
    )
    paint = ui.Paint(ui.wants_color(color, sys.stdout))
    print(paint.muted("\n".join(f"  {k}: {v}" for k, v in DEFINITIONS.items())))


def _speeds(results: Sequence[Result]) -> Table:
    table = _table("tok/s", "vs\nplain", "vs best\nfixed", "user\ntok/s", "slowest\ntenth",
                   "with\nprompts", "rows /\nround", "budget", "accepted\nlength",
                   "same\ntext")  # fmt: skip
    for r, ends in _sections(results):
        table.add_row(
            str(r.users),
            r.configuration,
            ui.number(r.tokens_per_second, 1),
            ui.number(r.vs_plain, 2, "x"),
            ui.number(r.vs_best_fixed, 2, "x"),
            ui.number(r.user_tokens_per_second, 1),
            ui.number(r.user_tokens_per_second_p10, 1),
            ui.number(r.with_prompts_tokens_per_second, 1),
            ui.number(r.rows_per_round, 1),
            ui.number(r.budget, 2),
            ui.number(r.accepted_length, 2),
            "yes" if r.identical_to_plain else "NO",
            end_section=ends,
        )
    return table


def _drafts(results: Sequence[Result]) -> Table:
    table = _table("drafted", "sched-\nuled", "pre-\ndicted", "accep-\nted",
                   "TTFT ms\np50 / p95 / p99", "between tokens, ms\np50 / p95 / p99",
                   "texts")  # fmt: skip
    for r, ends in _sections(results):
        table.add_row(
            str(r.users),
            r.configuration,
            str(r.drafted),
            str(r.scheduled),
            f"{r.predicted:.1f}",
            str(r.accepted),
            _three(r.ttft_ms, 0),
            _three(r.itl_ms, 1),
            str(r.texts),
            end_section=ends,
        )
    return table


def _table(*names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("users", "configuration", *names):
        left = name == "configuration"
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    return table


def _sections(results: Sequence[Result]) -> list[tuple[Result, bool]]:
    """Each result, and whether it is the last one of its load."""
    after = [*results[1:], None]
    return [(r, n is None or n.users != r.users) for r, n in zip(results, after, strict=True)]


def _three(p: Percentiles | None, digits: int) -> str:
    if p is None:
        return "-"
    return " / ".join(ui.number(v, digits) for v in (p.p50, p.p95, p.p99))
