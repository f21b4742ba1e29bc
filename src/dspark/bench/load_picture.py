"""The two pictures of `dspark bench load`, after figures 7 and 8 of the DSpark paper.

*Throughput against speed per user.* A curve for each configuration, a point for each load, with
the number of users beside it. More users move a point up (the machine does more) and to the left
(each of them waits longer). The curve furthest up and to the right is the best; where two curves
meet, what one wins at this load is no longer worth what it costs.

*Throughput and verification budget against users.* On the right, the drafted tokens of a request
that are verified in a round. A fixed length keeps it up whatever the load; a schedule that works
lets it fall as the machine fills.

Loads are doublings, so axes of users and of speed per user are logarithmic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.bench.picture import COLOURS, MARKERS, check_picture, labels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dspark.bench.load import Setup
    from dspark.bench.load_report import LoadReport, Result

SPEED = "speed.png"
BUDGET = "budget.png"
FIXED = (("#b5d4ea", "#08519c"), ("#c3e6c0", "#00682c"), ("#dcd0ea", "#54278f"))
"""Shades from K = 1 to the longest, for each drafter."""


@dataclass(frozen=True)
class Look:
    """How the curve of a configuration looks."""

    colour: str
    marker: str
    width: float
    style: str = "-"


def check(folder: Path) -> None:
    """Raise ConfigError or ResourceError if `draw` could not write into `folder`."""
    for name in (SPEED, BUDGET):
        check_picture(folder / name)


def draw(report: LoadReport, folder: Path) -> tuple[Path, Path]:
    """Write both pictures into `folder` and return their names.

    Raises ConfigError if that fails, ResourceError without matplotlib.
    """
    check(folder)
    results = report.results()
    looks = _looks(report.setups)
    (model,) = labels([report.model]).values()
    threads = f"{report.threads} thread{'s' * (report.threads != 1)}"
    machine = f"{model}, {report.dtype}, {report.device}, {threads}"
    return (
        _speed(results, looks, machine, folder / SPEED),
        _budget(results, looks, machine, folder / BUDGET),
    )


def _speed(results: Sequence[Result], looks: dict[str, Look], machine: str, file: Path) -> Path:
    from matplotlib.ticker import LogLocator

    title = "Throughput against speed per user"
    figure = _figure(7.6, f"{title}\n{machine}")
    axes = figure.add_subplot()
    _curves(axes, results, looks, lambda r: r.user_tokens_per_second, lambda r: r.tokens_per_second)
    axes.set_xscale("log")
    _plain_numbers(axes)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens/s of a user (median)")
    axes.set_ylabel("tokens/s of all users")
    for users in {r.users: None for r in results}:
        points = [
            (r.user_tokens_per_second, r.tokens_per_second)
            for r in results
            if r.users == users
            and r.user_tokens_per_second is not None
            and r.tokens_per_second is not None
        ]
        if points:  # one number for the load, at its fastest point
            axes.annotate(
                f"{users} user{'s' * (users != 1)}",
                max(points, key=lambda p: p[1]),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color="#555555",
            )
    _legend(figure, axes, len(looks))
    save(figure, file, f"{title}, {machine}")
    return file


def _budget(results: Sequence[Result], looks: dict[str, Look], machine: str, file: Path) -> Path:
    title = "Throughput and verification budget against users"
    figure = _figure(11, f"{title}\n{machine}")
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    _curves(left, results, looks, lambda r: r.users, lambda r: r.tokens_per_second)
    left.set_ylabel("tokens/s of all users")
    _curves(right, results, looks, lambda r: r.users, lambda r: r.budget)
    right.set_ylabel("drafted tokens verified per request and round")
    right.set_ylim(top=max(right.get_ylim()[1], 1))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({r.users for r in results}))
        _plain_numbers(axes)
        axes.set_xlabel("users")
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # a budget of 0 is to be seen
    _legend(figure, left, len(looks))
    save(figure, file, f"{title}, {machine}")
    return file


def _figure(width: float, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5)
    return figure


def _curves(
    axes: Axes,
    results: Sequence[Result],
    looks: dict[str, Look],
    x: Callable[[Result], float | None],
    y: Callable[[Result], float | None],
) -> None:
    """A curve for each configuration, schedules on top; loads without a figure are left out."""
    for name, look in looks.items():
        pairs = [(x(r), y(r)) for r in results if r.configuration == name]
        points = [(a, b) for a, b in pairs if a is not None and b is not None]
        axes.plot(
            [a for a, _ in points],
            [b for _, b in points],
            label=name,
            color=look.colour,
            marker=look.marker,
            linewidth=look.width,
            linestyle=look.style,
            markersize=5 + look.width / 2,
            zorder=2 + look.width,
        )
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _plain_numbers(axes: Axes) -> None:
    """10 and 20 on a logarithmic axis, not 10^1 and 2 x 10^1."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Axes, count: int) -> None:
    figure.legend(
        axes.get_lines(),
        [str(line.get_label()) for line in axes.get_lines()],
        loc="outside lower center",
        ncols=min(count, 5 if figure.get_figwidth() < 10 else 7),
        frameon=False,
        title="K: drafts and verifies K tokens",
        title_fontsize=8.5,
    )


def _looks(setups: Sequence[Setup]) -> dict[str, Look]:
    """Plain is dashed, fixed lengths are thin and of one hue, schedules are thick."""
    found: dict[str, Look] = {}
    drafters = list(dict.fromkeys(s.drafter for s in setups if s.kind == "fixed"))
    schedules = [c for c in COLOURS if c not in ("#0072B2", "#E69F00", "#333333")]
    for s in setups:
        if s.kind == "plain":
            found[s.name] = Look("#333333", "s", 1.6, "--")
        elif s.kind == "mtp1":
            found[s.name] = Look("#E69F00", "D", 1.8)
        elif s.kind == "fixed":
            lengths = [f.name for f in setups if (f.kind, f.drafter) == ("fixed", s.drafter)]
            at = lengths.index(s.name)
            light, dark = FIXED[drafters.index(s.drafter) % len(FIXED)]
            colour = _between(light, dark, at / max(len(lengths) - 1, 1))
            found[s.name] = Look(colour, MARKERS[1 + at % (len(MARKERS) - 1)], 1.1)
        else:
            n = sum(look.width > 2 for look in found.values())
            found[s.name] = Look(schedules[n % len(schedules)], MARKERS[0], 2.6)
    return found


def _between(light: str, dark: str, share: float) -> str:
    """A colour on the way from one to the other, each as #rrggbb."""
    parts = [(int(light[i : i + 2], 16), int(dark[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)
