"""The picture of `dspark calibrate`: the reliability diagram of every draft position.

Drafts of the prompts not used for fitting, in bins of equal width by predicted survival. A point
stands at the mean prediction of its bin and the share that was accepted; its area grows with the
number of drafts. Honest confidences lie on the diagonal, below it they promise too much. The bars
at the foot say how many drafts each bin holds after calibration: points over low bars scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.bench.picture import COLOURS, COLUMNS, check_picture, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dspark.bench.calibrate import Position, Report
    from dspark.schedule.calibration import Bin

BEFORE, AFTER = COLOURS[1], COLOURS[0]
FOOT = 0.18
"""Height of the highest bar."""


def draw(report: Report, file: Path) -> None:
    """Write the picture of `report` to `file` (PNG or SVG, by its ending).

    Raises ConfigError if that fails, ResourceError without matplotlib.
    """
    check_picture(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    per_row = min(len(report.positions), COLUMNS)
    rows = math.ceil(len(report.positions) / per_row)
    size = (max(6.4, 3.1 * per_row + 0.6), 3.2 * rows + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    held_out = len(report.prompts) - report.fitted_prompts
    title = f"Reliability of {Path(report.drafter).name} by draft position"
    what = (
        f"target {report.model}, {report.dtype} · temperature {report.config.temperature:g} ·"
        f" {report.held_out_records} drafts of {held_out} prompts not used for fitting"
    )
    figure.suptitle(f"{title}\n{what}", fontsize=12)
    axes: Axes | None = None
    for i, position in enumerate(report.positions):
        axes = figure.add_subplot(rows, per_row, i + 1)
        _panel(axes, position)
        if i % per_row == 0:
            axes.set_ylabel("share accepted")
        if i >= len(report.positions) - per_row:
            axes.set_xlabel("predicted survival")
    assert axes is not None  # a drafter that is calibrated has a position at least
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    save(figure, file, f"{title}, {what}")


def _panel(axes: Axes, p: Position) -> None:
    most = max((b.count for b in p.bins_after), default=0) or 1
    width = 1 / len(p.bins_after)
    axes.bar(
        [b.low for b in p.bins_after],
        [FOOT * b.count / most for b in p.bins_after],
        width * 0.92,
        align="edge",
        color="#e4e4e4",
    )
    axes.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle="--", label="honest")
    _line(axes, p.bins_before, BEFORE, "o", "as the head says")
    _line(axes, p.bins_after, AFTER, "s", "calibrated")
    axes.set_title(
        f"draft {p.after.position} · ECE {p.before.ece * 100:.1f} → {p.after.ece * 100:.1f} %"
        f" · T {p.temperature:.2f}",
        fontsize=10,
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.grid(color="#eeeeee", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _line(axes: Axes, bins: Sequence[Bin], colour: str, marker: str, label: str) -> None:
    held = [b for b in bins if b.count]
    at = [b.predicted for b in held], [b.realised for b in held]
    most = max((b.count for b in held), default=1)
    axes.plot(*at, color=colour, linewidth=1.3, marker=marker, markersize=2.5, label=label)
    axes.scatter(*at, s=[60 * b.count / most for b in held], color=colour, marker=marker, alpha=0.6)
