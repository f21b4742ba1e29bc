"""`dspark bench`: drafters side by side on the same prompts, with a verdict on their texts.

Prints a table, the definitions of its columns and, as the last line of standard output, everything
as one JSON object. Exit code 1 says that a drafter changed the text, which must never happen at
temperature 0. The measuring itself is in `dspark.bench.compare`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.bench import compare, lanes
from dspark.bench.definitions import DEFINITIONS
from dspark.bench.picture import check_file, replacing
from dspark.bench.prompts import BUILTIN, PREFIX, load_prompts
from dspark.cli import options as opt
from dspark.cli import ui
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

EPILOG = """Examples:

  dspark bench --prompts builtin:summarise --max-tokens 64

  dspark bench --drafters ngram --prompts mine.jsonl --repeat 3 --json result.json
"""

DEFAULT = compare.BenchConfig()
DEFAULT_PROMPTS = PREFIX + BUILTIN[0]


def bench(
    context: typer.Context,
    model: opt.ModelOption = "default",
    drafters: Annotated[
        str, typer.Option(help="Names, separated by commas; 'none' always takes part.")
    ] = ",".join(DEFAULT.drafters),
    num_draft_tokens: opt.NumDraftTokensOption = DEFAULT.num_draft_tokens,
    verify: opt.VerifyOption = DEFAULT.verify,
    pipeline: Annotated[
        str,
        typer.Option(
            metavar="MODES",
            help="Draft while the target verifies: off, on, auto, or several with commas, and each"
            " drafter takes part in each.",
            rich_help_panel=opt.MODEL_PANEL,
        ),
    ] = ",".join(DEFAULT.pipeline),
    draft_device: opt.DraftDeviceOption = None,
    emulate_device: opt.EmulateOption = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help=f"JSONL file or {', '.join(PREFIX + kind for kind in BUILTIN)}; "
            "may be given again or separated by commas.",
            show_default=DEFAULT_PROMPTS,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="First prompts of each source.", show_default="all")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate for each prompt at most.")
    ] = DEFAULT.max_tokens,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="0 is greedy, and checks the texts.")
    ] = DEFAULT.temperature,
    seed: Annotated[int, typer.Option(help="Of the first prompt.")] = DEFAULT.seed,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds over all prompts.")] = DEFAULT.repeat,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: opt.MaxContextOption = None,
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
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what both lanes do during one text as a Chrome trace (.json), and a picture"
            " of it beside it (.png).",
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
    """Measure drafters against plain decoding, and check that their texts are the same."""
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context)
        return
    config = compare.BenchConfig(
        drafters=tuple(ui.split([drafters])),
        num_draft_tokens=num_draft_tokens,
        pipeline=tuple(ui.split([pipeline])),
        verify=verify,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        repeat=repeat,
    )
    chosen = load_prompts(ui.split(prompts or [DEFAULT_PROMPTS]), limit)
    if json_file is not None:
        check_file(json_file)
    if timeline is not None:
        lanes.check(timeline)
    llm = opt.load_llm(
        model,
        drafter=compare.BASELINE,
        num_draft_tokens=None,
        dtype=dtype,
        device=device,
        threads=threads,
        max_context=max_context,
        draft_device=draft_device,
        emulate=emulate_device,
        prefix_reuse=False,  # or the second of two equal prompts would be short
    )
    muted = ui.Paint(ui.wants_color(color, sys.stderr)).muted
    ui.note(muted(ui.resolved_line(llm)))
    with _progress(color, len(chosen) * len(config.variants) * config.repeat) as on_text:
        report = compare.run(llm, chosen, config, on_text)
    _print_table(report, color)
    if timeline is not None:
        _write_timeline(lanes.record(llm, chosen, config), timeline)
    line = json.dumps(ui.finite(report.as_json()), ensure_ascii=False, allow_nan=False)
    if json_file is not None:
        with replacing(json_file) as temporary:
            temporary.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    for doubt in report.doubts:
        ui.note(f"warning: {doubt}")
    for difference in report.differences:
        ui.note(f"error: {difference}: speculation must not change a greedy text")
    if report.differences:
        raise typer.Exit(1)


def _write_timeline(found: lanes.Lanes, file: Path) -> None:
    lanes.write(found, file)
    times = f"emulated ({found.emulated})" if found.emulated else "measured"
    print(f"timeline of {found.drafter}, times {times}: {file} and {file.with_suffix('.png')}")
    for when, idle in found.idle.items():
        print(f"  {when}: " + ", ".join(f"{lane} idle {share:.0%}" for lane, share in idle.items()))


def _refuse_misplaced(context: typer.Context) -> None:
    """What stands before the name of another benchmark is an option of this one, and would be
    ignored there."""
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if source is not None and source.name == "COMMANDLINE":
            kind = context.invoked_subcommand
            raise ConfigError(
                f"{param.opts[0]} stands before {kind!r}: expected 'dspark bench {kind}' and then"
                " its options"
            )


@contextmanager
def _progress(color: ui.Color, total: int) -> Iterator[Callable[[compare.Text], None]]:
    """A bar on standard error with the speed of every drafter so far; nothing when piped."""
    tokens: dict[str, int] = defaultdict(int)
    ms: dict[str, float] = defaultdict(float)
    with ui.progress(color, total, note="warming up") as advance:

        def on_text(text: compare.Text) -> None:
            tokens[text.drafter] += text.output.stats.round_tokens
            ms[text.drafter] += text.output.stats.decode_ms
            rates = (f"{name} {tokens[name] / ms[name] * 1e3:.1f}" for name in ms if ms[name])
            advance(1, " · ".join(rates) + " tok/s")

        yield on_text


def _print_table(report: compare.Report, color: ui.Color) -> None:
    from rich import box
    from rich.table import Table

    console = ui.stdout_console(color)
    names = ("drafter", "tok/s", "speed-up", "sched-\nuled", "pre-\ndicted", "accep-\nted",
             "accepted\nlength", "accept-\nance", "draft\nms", "verify\nms", "other\nms",
             "TTFT\nms", "tokens", "seconds", "same\ntext")  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    for r in report.results:
        share = None if r.acceptance_rate is None else r.acceptance_rate * 100
        same = {True: "yes", False: "NO", None: "-"}[r.identical_to_none]
        table.add_row(
            r.drafter,
            ui.number(r.tokens_per_second, 1),
            ui.number(r.speedup_vs_none, 2, "x"),
            str(r.scheduled),
            f"{r.predicted:.1f}",
            str(r.accepted),
            ui.number(r.accepted_length, 2),
            ui.number(share, 0, " %"),
            ui.number(r.draft_ms, 2),
            ui.number(r.verify_ms, 2),
            ui.number(r.other_ms, 2),
            ui.number(r.ttft_ms, 0),
            str(r.tokens),
            ui.number(r.seconds, 1),
            same,
        )
    console.print(table)
    for r in report.results:
        if r.acceptance_by_position:
            rates = " ".join(f"{rate:.2f}" for rate in r.acceptance_by_position)
            print(f"acceptance by position, {r.drafter}: {rates}")
    for r in report.results:
        if r.hit_rate is not None:
            print(
                f"two lanes, {r.drafter}: hits {r.hit_rate:.0%},"
                f" gain {ui.number(r.gain_vs_off, 2, 'x')},"
                f" by the formula {ui.number(r.gain_predicted, 2, 'x')};"
                f" accepted length {ui.number(r.accepted_length_ahead, 2)} ahead,"
                f" {ui.number(r.accepted_length_fresh, 2)} fresh,"
                f" delta {ui.number(r.delta, 2)}"
            )
    if report.emulated is not None:
        print(f"emulated: every time is that of another device, {report.emulated}")
    print(f"prompts: {report.prompts.name}, {len(report.prompts)} of them, one at a time")
    paint = ui.Paint(ui.wants_color(color, sys.stdout))
    print(paint.muted("\n".join(f"  {k}: {v}" for k, v in DEFINITIONS.items())))
