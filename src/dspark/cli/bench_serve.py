"""`dspark bench serve`: load on a running server, and what its clients feel.

Prints a table, the definitions of its columns and, as the last line of standard output, everything
as one JSON object. Exit code 1 says that under some load no request at all was answered. The
measuring is in `dspark.bench.serve`; no model is loaded here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.bench import picture
from dspark.bench.prompts import BUILTIN, PREFIX, load_prompts
from dspark.cli import options as opt
from dspark.cli import ui
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from dspark.bench.serve import Load, Report
    from dspark.bench.serve_figures import Sample

EPILOG = """Examples:

  dspark bench serve http://127.0.0.1:8000 --concurrency 1,4,16

  dspark bench serve http://127.0.0.1:8000/v1 --rate 0.5,2 --max-ttft 500 --max-per-token 50
"""

DEFAULT_PROMPTS = PREFIX + BUILTIN[0]
LOAD_PANEL = "Load"
LIMIT_PANEL = "Limits of goodput"


def bench_serve(
    url: Annotated[
        str,
        typer.Argument(
            help="Of an OpenAI-compatible server, with or without /v1.", show_default=False
        ),
    ],
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Closed loop: so many clients, each asking again when answered; "
            "several separated by commas.",
            show_default="1, without --rate",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Open loop: so many requests a second arrive at random (Poisson), answered or "
            "not; several separated by commas.",
            show_default=False,
            rich_help_panel=LOAD_PANEL,
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Of each load.", rich_help_panel=LOAD_PANEL)
    ] = 32,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help=f"JSONL file or {', '.join(PREFIX + kind for kind in BUILTIN)}; "
            "may be given again or separated by commas.",
            show_default=DEFAULT_PROMPTS,
            rich_help_panel=LOAD_PANEL,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens to generate for each request at most.", rich_help_panel=LOAD_PANEL
        ),
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option("--temperature", "--temp", help="0 is greedy.", rich_help_panel=LOAD_PANEL),
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option(help="Of the arrivals and the first request.", rich_help_panel=LOAD_PANEL),
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Texts of full length; for servers that know the field.",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = False,
    max_ttft: Annotated[
        float | None,
        typer.Option(
            help="Milliseconds to the first text.", show_default="none", rich_help_panel=LIMIT_PANEL
        ),
    ] = None,
    max_per_token: Annotated[
        float | None,
        typer.Option(
            help="Mean milliseconds a token.", show_default="none", rich_help_panel=LIMIT_PANEL
        ),
    ] = None,
    max_e2e: Annotated[
        float | None,
        typer.Option(
            help="Milliseconds to the end.", show_default="none", rich_help_panel=LIMIT_PANEL
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Name to ask for.", show_default="the first the server lists"
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY",
            help="Sent as a bearer token; also from OPENAI_API_KEY.",
            show_default="none",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a byte after which a request has failed.")
    ] = 600.0,
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
    """Measure a server under load: latencies, throughput, goodput, what speculation brought."""
    # Here, not on top: httpx and asyncio are nothing that `--help` should wait for.
    from dspark.bench import serve
    from dspark.bench.serve_figures import Limits
    from dspark.client import Endpoint

    config = serve.ServeConfig(
        loads=_loads(concurrency, rate),
        requests=requests,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        limits=Limits(max_ttft, max_per_token, max_e2e),
    )
    endpoint = Endpoint(url, api_key or None, timeout)
    chosen = load_prompts(ui.split(prompts or [DEFAULT_PROMPTS]))
    if json_file is not None:
        picture.check_file(json_file)
    with ui.progress(color, requests * len(config.loads)) as advance:

        def on_sample(load: Load, sample: Sample) -> None:
            advance(1, str(load))

        report = serve.run(endpoint, chosen, config, model=model, on_sample=on_sample)
    _print_table(report, color)
    line = json.dumps(ui.finite(report.as_json()), ensure_ascii=False, allow_nan=False)
    if json_file is not None:
        with picture.replacing(json_file) as temporary:
            temporary.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    for r in report.results:
        for said, count in r.failures.items():
            ui.note(f"warning: {r.load}: {count} of {r.requests} requests failed: {said}")
    if any(r.failed == r.requests for r in report.results):
        raise typer.Exit(1)


def _loads(concurrency: str | None, rate: str | None) -> tuple[Load, ...]:
    """The closed loops, then the open ones. Raises ConfigError."""
    from dspark.bench.serve import Load

    if concurrency is None and rate is None:
        concurrency = "1"
    try:
        closed = [Load(concurrency=int(n)) for n in ui.split([concurrency or ""])]
        opened = [Load(rate=float(r)) for r in ui.split([rate or ""])]
    except ValueError as e:
        raise ConfigError(
            f"--concurrency {concurrency} --rate {rate}: expected numbers separated by commas"
        ) from e
    return (*closed, *opened)


def _print_table(report: Report, color: ui.Color) -> None:
    from rich import box
    from rich.table import Table

    from dspark.bench.serve_figures import DEFINITIONS

    console = ui.stdout_console(color)
    names = ("load", "tok/s", "req/s", "goodput\n/s", "TTFT\np50 ms", "TTFT\np95 ms",
             "token\np50 ms", "token\np95 ms", "e2e\np50 ms", "e2e\np95 ms", "accepted\nlength",
             "failed")  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    for r in report.results:
        pairs = [
            ui.number((figures or {}).get(p), digits)
            for figures, digits in ((r.ttft_ms, 0), (r.per_token_ms, 1), (r.e2e_ms, 0))
            for p in ("p50", "p95")
        ]
        table.add_row(
            r.load,
            ui.number(r.output_tokens_per_second, 1),
            ui.number(r.requests_per_second, 2),
            ui.number(r.goodput, 2),
            *pairs,
            ui.number((r.speculation or {}).get("acceptance_length"), 2),
            str(r.failed),
        )
    console.print(table)
    print(f"model: {report.model} at {report.url}")
    print(f"prompts: {report.prompts.name}, {len(report.prompts)} of them")
    paint = ui.Paint(ui.wants_color(color, sys.stdout))
    print(paint.muted("\n".join(f"  {k}: {v}" for k, v in DEFINITIONS.items())))
