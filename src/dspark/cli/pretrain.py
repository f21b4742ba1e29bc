"""`dspark pretrain`: a small DeepSeek-V4 from nothing, from a TOML file.

The same command goes on where it stopped, whatever stopped it. Progress and notes go to standard
error. What happens is in `dspark.train.v4`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import ui
from dspark.cli.progress import bar

if TYPE_CHECKING:
    from dspark.train.trainer import Report
    from dspark.train.v4.loop import Loop

EPILOG = """Examples:

  dspark pretrain tower.toml --plan

  dspark pretrain tower.toml train.out=runs/try train.epochs=2 model.hidden_size=96
"""


def pretrain(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="What to train.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...", help="Changes to the file.", show_default=False
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would run and what it costs; train nothing.")
    ] = False,
    color: Annotated[
        ui.Color, typer.Option(help="'auto': on a terminal, and without NO_COLOR.")
    ] = ui.Color.auto,
) -> None:
    """Train a small DeepSeek-V4 and its tokenizer on text; run again to go on."""
    # Here, not on top: importing torch takes seconds, and `--help` must not wait for it.
    import torch

    from dspark.train import config as configs
    from dspark.train.distributed import Group
    from dspark.train.v4.pretrain import PretrainConfig, make_loop, model_directory

    settings = configs.build(PretrainConfig, configs.read(config, overrides or ()))
    if settings.train.threads:
        torch.set_num_threads(settings.train.threads)
    group = Group.join(torch.device("cpu"))
    try:
        follow(make_loop(settings, group), plan, color, model_directory(settings))
    finally:
        group.leave()


def follow(loop: Loop, plan: bool, color: ui.Color, result: Path) -> None:
    """Say what a loop will do, do it if more is wanted than the plan, and show how it goes."""
    from dspark.train.trainer import Outcome, interrupts

    if not loop.group.first:
        if not plan:
            _silently(loop)
        return
    for line in loop.job.plan():
        print(line) if plan else ui.note(line)
    if plan:
        return
    with bar(color, "features", "tok/s") as show:
        loop.job.begin(show)
    if loop.counters.step:
        ui.note(f"going on at step {loop.counters.step} of {loop.job.total}")
    last: dict[str, Any] = {}
    with interrupts() as interrupted, bar(color, "training", "steps/s") as show:

        def on_report(r: Report) -> None:
            if r.kind == "begun" and not r.values["tensorboard"]:
                ui.note("TensorBoard is not installed (dspark[train]): metrics.jsonl only")
            if r.kind == "held_out":
                ui.note(f"step {r.step}: held out: {_numbers(r.values)}")
            if r.kind in ("step", "log"):
                last.update(r.values)
                speed = f"{last['tokens_per_second']:.0f} tok/s"
                show(r.step, r.total, f"{speed} · {_numbers(last)}" if "loss" in last else speed)

        outcome = loop.run(on_report, interrupted)
    ui.note(f"{outcome.value} at step {loop.counters.step} of {loop.job.total}: {result}")
    if outcome is Outcome.interrupted:
        raise typer.Exit(130)


def _silently(loop: Loop) -> None:
    """What every process but the first does."""
    from dspark.train.trainer import interrupts

    loop.job.begin(lambda done, total: None)
    with interrupts() as interrupted:
        loop.run(interrupted=interrupted)


def _numbers(values: dict[str, Any]) -> str:
    found = [f"loss {values['loss']:.3f}"]
    if "accepted_length" in values:
        found.append(f"accepted length {values['accepted_length']:.2f}")
    return ", ".join(found)
