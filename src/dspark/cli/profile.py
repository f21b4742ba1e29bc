"""`dspark profile`: what a round costs on this machine, which is what schedulers weigh drafts by.

Measures anew, whatever the cache holds, and keeps the table there, where later runs of the same
model, drafter and settings find it; with `--out` in a file of its own instead. Standard output is
the table; the measuring is in `dspark.engine.profile`, the meaning in `dspark.schedule.cost`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options as opt
from dspark.cli import ui

if TYPE_CHECKING:
    from dspark.schedule.cost import CostTable

EPILOG = """Examples:

  dspark profile

  dspark profile Qwen/Qwen3-0.6B --drafter ngram --out cost.json
"""


def profile(
    model: Annotated[
        str, typer.Argument(help="Target: a name, a directory or a GGUF file.")
    ] = "default",
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="'auto', or a name; a wrong one lists them.")
    ] = "auto",
    num_draft_tokens: opt.NumDraftTokensOption = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, help="Requests in flight at most.", show_default="as generate has"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="To measure for, about.")] = 3.0,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: opt.MaxContextOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the table here.", show_default="the cache"
        ),
    ] = None,
) -> None:
    """Measure what a round costs: passes by rows and context, drafting by requests, the rest."""
    from dspark.schedule.cost import table_path

    llm = opt.load_llm(
        model,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        verify="all",  # needs no table, so loading measures nothing
        dtype=dtype,
        device=device,
        threads=threads,
        max_context=max_context,
        max_users=users,
    )
    muted = ui.Paint(ui.wants_color(ui.Color.auto, sys.stderr)).muted
    ui.note(muted(ui.resolved_line(llm)))
    start = time.perf_counter()
    table = llm.measure_costs(seconds)
    path = table_path(table.fingerprint) if out is None else out
    table.save(path)
    _print(table)
    ui.note(muted(f"measured in {time.perf_counter() - start:.1f} s · {path}"))


def _print(table: CostTable) -> None:
    print(f"pass, {table.context:g} tokens of context   rows: ms (ms more per 1000 of context)")
    for rows, ms in zip(table.verify.at, table.verify.ms, strict=True):
        print(f"  {rows:4d}: {ms:9.3f}  ({table.slope(rows) * 1000:.3f})")
    for block, curve in table.draft:
        print(f"drafting {block} tokens   requests: ms")
        for requests, ms in zip(curve.at, curve.ms, strict=True):
            print(f"  {requests:4d}: {ms:9.3f}")
    print("the rest of a round   requests: ms")
    for requests, ms in zip(table.other.at, table.other.ms, strict=True):
        print(f"  {requests:4d}: {ms:9.3f}")
