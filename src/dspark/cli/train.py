"""`dspark train`: one trainer for all drafters, from a TOML file.

A DeepSeek-V4 for a target takes sections of its own (`dspark.train.v4.drafter`). The same command
goes on where it stopped, whatever stopped it. Progress and notes go to standard
error; `--plan` prints to standard output and trains nothing. What happens is in `dspark.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import ui
from dspark.cli.pretrain import follow
from dspark.cli.progress import bar

if TYPE_CHECKING:
    from dspark.train.trainer import Report

EPILOG = """Examples:

  dspark train drafter.toml --plan

  dspark train drafter.toml train.out=runs/try train.steps=2000 drafter.num_layers=2
"""


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
    from dspark.train.v4.drafter import wants_v4

    raw = configs.read(config, overrides or ())
    if wants_v4(raw):
        _train_v4(raw, plan, color)
        return
    settings = configs.from_raw(raw)
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
            with bar(color, "features", "tok/s") as show:
                features = make_features(run, show)
        group.barrier()
        if not group.first:
            features = make_features(run)
        if needs_start(model, run):
            if group.first:  # the others then find it beside the features
                with bar(color, "bigrams", "tok/s") as show:
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


def _train_v4(raw: dict[str, dict[str, Any]], plan: bool, color: ui.Color) -> None:
    """The stages of a DeepSeek-V4, which has sections and a loop of its own."""
    import torch

    from dspark.train import config as configs
    from dspark.train.distributed import Group
    from dspark.train.v4.drafter import V4TrainConfig, make_loop

    settings = configs.build(V4TrainConfig, raw)
    if settings.train.threads:
        torch.set_num_threads(settings.train.threads)
    group = Group.join(torch.device("cpu"))
    try:
        follow(make_loop(settings, group), plan, color, Path(settings.train.out) / "drafter")
    finally:
        group.leave()


@contextmanager
def _reports(color: ui.Color, first: bool) -> Iterator[Callable[[Report], None]]:
    """What the trainer reports, as a bar and as lines of validation."""
    if not first:
        yield lambda _: None
        return
    last: dict[str, Any] = {}
    with bar(color, "training", "steps/s") as show:

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
