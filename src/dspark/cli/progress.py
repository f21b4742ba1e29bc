"""The progress of a long run on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dspark.cli import ui

PLAIN_SECONDS = 30.0
"""Between two plain lines when standard error is no terminal."""


@contextmanager
def bar(color: ui.Color, name: str, unit: str) -> Iterator[Callable[..., None]]:
    """show(done, total, note); without a note it tells `unit`s in a second."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    terminal = sys.stderr.isatty()
    on = ui.wants_color(color, sys.stderr)
    shown_bar = Progress(
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
    with shown_bar:
        task: TaskID | None = None

        def show(done: int, total: int, note: str = "") -> None:
            nonlocal shown, first, task
            now = time.perf_counter()
            first = done if first is None else first
            rate = (done - first) / (now - begun) if done > first else 0.0
            text = note or f"{rate:.0f} {unit}"
            if task is None:  # not before there is something to show
                task = shown_bar.add_task("", total=total, note="")
            shown_bar.update(task, completed=done, total=total, note=text)
            if not terminal and (now - shown > PLAIN_SECONDS or done == total):
                left = f", {(total - done) / rate / 60:.0f} min left" if rate else ""
                ui.note(f"{name} {done}/{total} · {text}{left}")
                shown = now

        yield show
