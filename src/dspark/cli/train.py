"""`dspark train`: one trainer for all drafters, from a TOML file.

The same command goes on where it stopped, whatever stopped it. Progress and notes go to standard
error; `--plan` prints to standard output and trains nothing. What happens is in `dspark.train`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import ui

if TYPE_CHECKING:
    from dspark.train.trainer import Report

EPILOG = """Examples:

  dspark train drafter.toml --plan

  dspark train drafter.toml train.out=runs/try train.steps=2000 drafter.num_layers=2
"""

PLAIN_SECONDS = 30.0
"""Between two plain lines when standard error is no terminal."""


def train(
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
        bool, typer.Option("--plan", help="Say what would run and what it needs; train nothing.")
    ] = False,
    color: Annotated[
        ui.Color, typer.Option(help="'auto': on a terminal, and without NO_COLOR.")
    ] = ui.Color.auto,
) -> None:
    """Train a drafter on text that the target wrote; run again to go on."""
    # Here, not on top: importing torch takes seconds, and `--help` must not wait for it.
    import torch

    from dspark.train import config as configs
    from dspark.train.distributed import Group
    from dspark.train.plan import make_plan
    from dspark.train.prior import needs_start, start_markov_head
    from dspark.train.setup import make_features, make_model, make_teacher, prepare
    from dspark.train.trainer import Outcome, Trainer, interrupts

    settings = configs.load(config, overrides or ())
    if settings.train.threads:
        torch.set_num_threads(settings.train.threads)
    run = prepare(settings)
    device = Group.local_device(run.choice.device)
    group = Group.join(device)
    try:
        model = make_model(run)
        parameters = sum(p.numel() for p in model.parameters())
        chosen = make_plan(run, parameters, group.world)
        if group.first:
            for line in chosen.lines():
                print(line) if plan else ui.note(line)
        chosen.check()
        if plan:
            return
        if group.first:  # the others wait, then find the cache complete
            with _bar(color, "features", "tok/s") as show:
                features = make_features(run, show)
        group.barrier()
        if not group.first:
            features = make_features(run)
        if needs_start(model, run):
            if group.first:  # the others then find it beside the features
                with _bar(color, "bigrams", "tok/s") as show:
                    start_markov_head(run, model, show)
            group.barrier()
            if not group.first:
                start_markov_head(run, model)
        trainer = Trainer(run, features, model, make_teacher(run, device), device, group)
        if group.first and trainer.counters.step:
            ui.note(f"going on at step {trainer.counters.step} of {trainer.total}")
        with interrupts() as interrupted, _reports(color, group.first) as on_report:
            outcome = trainer.train(on_report, interrupted)
        if group.first:
            estimate = trainer.estimate
            length = estimate.get("served_length", estimate.get("accepted_length"))
            reached = "" if length is None else f", accepted length {length:.2f}"
            ui.note(
                f"{outcome.value} at step {trainer.counters.step} of {trainer.total}{reached}:"
                f" {trainer.out / 'drafter'}"
            )
        if outcome is Outcome.interrupted:
            raise typer.Exit(130)
    finally:
        group.leave()


@contextmanager
def _bar(color: ui.Color, name: str, unit: str) -> Iterator[Callable[..., None]]:
    """show(done, total, note): a bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    terminal = sys.stderr.isatty()
    on = ui.wants_color(color, sys.stderr)
    bar = Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(stderr=True, no_color=not on, highlight=False),
        disable=not terminal,
    )
    begun = shown = time.perf_counter()
    first: int | None = None
    with bar:
        task: TaskID | None = None

        def show(done: int, total: int, note: str = "") -> None:
            nonlocal shown, first, task
            now = time.perf_counter()
            first = done if first is None else first
            rate = (done - first) / (now - begun) if done > first else 0.0
            text = note or f"{rate:.0f} {unit}"
            if task is None:  # not before there is something to show
                task = bar.add_task("", total=total, note="")
            bar.update(task, completed=done, total=total, note=text)
            if not terminal and (now - shown > PLAIN_SECONDS or done == total):
                left = f", {(total - done) / rate / 60:.0f} min left" if rate else ""
                ui.note(f"{name} {done}/{total} · {text}{left}")
                shown = now

        yield show


@contextmanager
def _reports(color: ui.Color, first: bool) -> Iterator[Callable[[Report], None]]:
    """What the trainer reports, as a bar and as lines of validation."""
    if not first:
        yield lambda _: None
        return
    last: dict[str, Any] = {}
    with _bar(color, "training", "steps/s") as show:

        def on_report(r: Report) -> None:
            if r.kind == "begun" and not r.values["tensorboard"]:
                ui.note("TensorBoard is not installed (dspark[train]): metrics.jsonl only")
            if r.kind == "held_out":
                v = r.values
                accept = " ".join(f"{a:.2f}" for a in v["accept"])
                ui.note(
                    f"step {r.step}: held out: loss {v['loss']:.3f}, accepted length"
                    f" {v['accepted_length']:.2f}, acceptance {accept}"
                )
                return
            if r.kind == "log":
                last.update(r.values)
            if r.kind in ("begun", "saved") or (r.kind == "step" and r.step == r.total):
                return  # the last step is shown with its numbers
            if last:
                show(
                    r.step,
                    r.total,
                    f"{last['anchors_per_second']:.0f} anchors/s · loss {last['loss']:.3f} ·"
                    f" accepted length {last['accepted_length']:.2f}",
                )
            else:
                show(r.step, r.total, f"{r.values.get('anchors_per_second', 0):.0f} anchors/s")

        yield on_report
