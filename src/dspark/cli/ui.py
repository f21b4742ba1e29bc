"""How the command line looks: where a line goes, and whether it is coloured.

Standard output carries the answer and nothing else, so that it can be piped. Everything about the
answer (what was resolved, the legend, statistics, traces, progress) goes to standard error. Text is
painted with plain escape codes rather than through rich, which would expand tabs and wrap lines of
a model's text.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.llm import LLM
    from dspark.types import Stats


class Color(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"


def wants_color(mode: Color, stream: TextIO) -> bool:
    """`auto` means a terminal that is not dumb, and no NO_COLOR (https://no-color.org)."""
    if mode is not Color.auto:
        return mode is Color.always
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


@dataclass(frozen=True)
class Paint:
    """Styles of one stream; without colour every one of them returns its text as it is."""

    on: bool

    def _sgr(self, codes: str, text: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self.on and text else text

    def accepted(self, text: str) -> str:
        """Green: drafted, and the target agreed."""
        return self._sgr("32", text)

    def rejected(self, text: str) -> str:
        """Dim red, struck through: drafted in vain."""
        return self._sgr("2;9;31", text)

    def muted(self, text: str) -> str:
        return self._sgr("2", text)

    def error(self, text: str) -> str:
        return self._sgr("1;31", text)


def note(text: str) -> None:
    """One line on standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def announcements() -> Iterator[None]:
    """On a terminal, show what the library says before it takes seconds (measuring costs)."""
    log = logging.getLogger("dspark.engine.profile")
    if not sys.stderr.isatty():
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    level, log.propagate = log.level, False  # once: `serve` has a log of everything
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = True


def stdout_console(mode: Color = Color.auto) -> Console:
    """For tables. A pipe has no width: take one that holds every column."""
    from rich.console import Console

    on = wants_color(mode, sys.stdout)
    width = None if sys.stdout.isatty() else 120
    return Console(
        file=sys.stdout, no_color=not on, force_terminal=on, width=width, highlight=False
    )


@contextmanager
def progress(
    color: Color, total: int, label: str = "measuring", note: str = ""
) -> Iterator[Callable[[int, str], None]]:
    """A bar on standard error; nothing when piped. Call what it gives with how much was done since,
    and with what to say beside the bar (a rate)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    bar = Progress(
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(stderr=True, no_color=not wants_color(color, sys.stderr), highlight=False),
        disable=not sys.stderr.isatty(),
        transient=True,
        speed_estimate_period=600,  # seconds; one step may take more than the usual 30
    )
    with bar:
        task = bar.add_task("", total=total, note=note)
        yield lambda done, text: bar.update(task, advance=done, note=text)


def resolved_line(llm: LLM) -> str:
    """What `auto` and `default` came to, and why."""
    return " · ".join(
        (
            f"model {llm.model_name}",
            f"dtype {llm.dtype}" + _because(llm.dtype_reason),
            f"drafter {llm.drafter_name}" + _because(llm.drafter_reason),
            f"verify {llm.verify}" + _because(llm.verify_reason),
            f"pipeline {llm.pipeline}" + _because(llm.pipeline_reason),
            f"device {llm.device}" + _because(_drafting_on(llm)),
            f"threads {llm.threads}",
        )
    )


def _drafting_on(llm: LLM) -> str:
    return f"drafter on {llm.draft_device}" if llm.draft_device else ""


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def stats_line(stats: Stats, drafter: str) -> str:
    """`128 tok · 96.4 tok/s · accepted length 2.3 · acceptance 61 % · TTFT 41 ms · drafter x`."""
    parts = [f"{stats.completion_tokens} tok"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tok/s")
    if stats.accepted_length is not None:
        parts.append(f"accepted length {stats.accepted_length:.1f}")
    if stats.acceptance_rate is not None:
        parts.append(f"acceptance {stats.acceptance_rate * 100:.0f} %")
    return " · ".join([*parts, f"TTFT {stats.ttft_ms:.0f} ms", f"drafter {drafter}"])


def stats_json(stats: Stats) -> dict[str, Any]:
    """The counters and what is derived from them."""
    derived = ("accepted_length", "acceptance_rate", "acceptance_by_position",
               "tokens_per_second", "itl_ms")  # fmt: skip
    return asdict(stats) | {name: getattr(stats, name) for name in derived}


def split(values: Sequence[str]) -> list[str]:
    """Names of an option that may be repeated and may hold commas."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A table's cell; `-` where a figure does not apply."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def finite(value: Any) -> Any:
    """`value` with null for every number that JSON cannot write (nan, infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
