"""`dspark inspect`: what a checkpoint is, from its headers, without loading it.

Tables on standard output, or with `--json` one line for programs. What would keep the checkpoint
from loading is a warning on standard error: a file that is half there should still say what it is.
The counting is in `dspark.models.inspect`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import ui

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.models.inspect_report import Drafter, Report

EPILOG = """Examples:

  dspark inspect path/to/DeepSeek-V4-Flash

  dspark inspect model.gguf --json
"""


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            help="GGUF file, or directory of a model or of a drafter; also 'default' or a hub"
            " name.",
            show_default=False,
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="One line of JSON instead of tables.")
    ] = False,
    color: Annotated[
        ui.Color, typer.Option(help="'auto': on a terminal, and without NO_COLOR.")
    ] = ui.Color.auto,
) -> None:
    """Show what a checkpoint is: sizes, dtypes, parts, memory, the drafters it carries."""
    report = _look(path)
    if as_json:
        print(json.dumps(_as_json(report), ensure_ascii=False))
    else:
        _print(report, ui.stdout_console(color))
    for problem in report.problems:
        ui.note(f"warning: {problem}")


def _look(name: str) -> Report:
    from dspark.models import inspect as looking
    from dspark.models.deepseek_v4_config import read_config

    path = Path(name).expanduser()
    if not path.exists():  # a name; finding what it stands for costs the import of torch
        from dspark.models.loading import resolve

        path = resolve(name)
    if path.is_dir() and looking.is_drafter(raw := read_config(path)):
        return _look_at_drafter(path, raw)
    return looking.inspect(path)


def _look_at_drafter(path: Path, raw: dict[str, Any]) -> Report:
    from dspark.drafters import dialects
    from dspark.errors import CheckpointError
    from dspark.models.inspect import inspect_drafter

    try:
        c = dialects.parse(raw)
    except CheckpointError as e:
        raise CheckpointError(f"{path / 'config.json'}: {e}") from e
    names = raw.get("architectures") or [raw.get("speculators_model_type", "drafter")]
    sizes = {
        "layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "max_context": c.max_context,
    }
    details = {
        "kind": c.kind,
        "target": c.target,
        "block_size": c.block_size,
        "target_layer_ids": list(c.target_layer_ids),
        "markov_rank": c.markov_rank,
        "markov_head_type": c.markov_head_type if c.markov_rank else None,
        "confidence_head": c.confidence_head,
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
    }
    return inspect_drafter(
        path,
        str(names[0]),
        cache_numbers=2 * c.num_layers * c.num_kv_heads * c.head_dim,
        context=c.max_context,
        sizes=sizes,
        details=details,
    )


def _as_json(r: Report) -> dict[str, Any]:
    memory = {
        dtype: None
        if weights is None
        else {
            "weights": weights,
            "drafters": r.drafter_weights[dtype] if r.drafters else 0,
            "total": r.memory(dtype),
        }
        for dtype, weights in r.weights.items()
    }
    return {
        "path": str(r.path),
        "kind": r.kind,
        "architecture": r.architecture,
        "sizes": r.sizes,
        "files": r.num_files,
        "tensors": r.num_tensors,
        "bytes": r.num_bytes,
        "parameters": r.parameters,
        "active_parameters": r.active_parameters,
        "dtypes": {d: {"tensors": n, "bytes": size} for d, (n, size) in r.dtypes.items()},
        "parts": {p.name: {"parameters": p.parameters, "bytes": p.num_bytes} for p in r.parts},
        "cache": {
            d: {"bytes_per_token": c.per_token, "bytes_per_sequence": c.per_sequence}
            for d, c in r.cache.items()
        },
        "memory": memory,
        "memory_context": r.context,
        "drafters": [
            {
                "kind": d.kind,
                "stages": d.stages,
                "parameters": d.parameters,
                "active_parameters": d.active_parameters,
                "bytes": d.num_bytes,
                "cache_bytes_per_sequence": d.cache,
                **d.settings,
            }
            for d in r.drafters
        ],
        "drafter": r.details or None,
        "problems": list(r.problems),
    }


def _print(r: Report, console: Console) -> None:
    files = f"{r.num_files} file{'s' * (r.num_files != 1)}"
    lines = [
        ("checkpoint", str(r.path)),
        ("architecture", f"{r.architecture} ({r.kind})"),
        ("sizes", " · ".join(f"{k.replace('_', ' ')} {v}" for k, v in r.sizes.items())),
        ("stored", f"{_bytes(r.num_bytes)} in {r.num_tensors} tensors, {files}"),
        ("parameters", f"{_count(r.parameters)}, {_count(r.active_parameters)} active per token"),
    ]
    if r.details:
        shown = (f"{k.replace('_', ' ')} {v}" for k, v in r.details.items() if v not in (None, ""))
        lines.append(("drafter", " · ".join(shown)))
    else:
        lines += [("carries", _drafter_line(d)) for d in r.drafters] or [("carries", "no drafter")]
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        console.print(f"{label:<{width}}  {text}", markup=False, soft_wrap=True)
    rows = [(p.name, _count(p.parameters), _bytes(p.num_bytes)) for p in r.parts]
    _table(console, ("part", "parameters", "bytes"), rows)
    stored = [(d, str(n), _bytes(size)) for d, (n, size) in r.dtypes.items()]
    _table(console, ("stored as", "tensors", "bytes"), stored)
    needs = []
    for dtype, weights in r.weights.items():
        cache, total = r.cache[dtype], r.memory(dtype)
        if weights is None or total is None:
            needs.append((dtype, "not possible", "", "", "", ""))
            continue
        inside = r.drafter_weights[dtype] if r.drafters else None
        needs.append(
            (
                dtype,
                _bytes(weights),
                "-" if inside is None else _bytes(inside),
                f"{cache.per_token} B",
                _bytes(cache.per_sequence),
                _bytes(total),
            )
        )
    head = ("--dtype", "weights", "drafters", "cache\na token", "cache\na sequence")
    _table(console, (*head, f"with one sequence\nof {r.context} tokens"), needs)


def _drafter_line(d: Drafter) -> str:
    what = {"mtp1": "MTP-1", "dspark": "DSpark"}[d.kind]
    settings = "".join(f" · {k.replace('_', ' ')} {v}" for k, v in d.settings.items())
    return (
        f"{what}, {d.stages} stage{'s' * (d.stages != 1)}: {_count(d.parameters)} parameters,"
        f" {_bytes(d.num_bytes)}{settings}"
    )


def _table(console: Console, names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _count(n: int) -> str:
    return _scaled(n, ((1e9, " B"), (1e6, " M"), (1e3, " K"))) or str(n)


def _bytes(n: int) -> str:
    return _scaled(n, ((1e9, " GB"), (1e6, " MB"), (1e3, " kB"))) or f"{n} B"


def _scaled(n: int, units: tuple[tuple[float, str], ...]) -> str | None:
    return next((f"{n / size:.2f}{unit}" for size, unit in units if n >= size), None)
