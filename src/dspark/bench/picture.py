"""The picture of `dspark eval`: conditional acceptance against draft position.

As in figure 2 of the DSpark paper: a panel for each prompt set and temperature, a line for each
drafter. A line that stays high says that the guesses late in a block are as good as the first; one
that falls says that a longer block buys little. The band around a line is the 95 % Wilson interval
as if rounds were independent. They are not quite, so it is a lower bound of the doubt: read no more
into a wide band than that few rounds came so far.

Matplotlib is imported when a picture is asked for and not before, since most runs want none; its
`Figure` is used directly, so nothing of a program's own pyplot state is touched.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.bench.prompts import PREFIX
from dspark.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dspark.bench.evaluate import Report, Result

FORMATS = (".png", ".svg")
COLUMNS = 4
"""Panels side by side at most."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
"""Okabe and Ito's palette: told apart by colour-blind readers, too; markers repeat it."""
MARKERS = "osD^vPX"
Z = 1.96
"""Standard deviations that hold 95 % of a normal law."""


def labels(names: Sequence[str]) -> dict[str, str]:
    """Short names for tables and panels: `builtin:` and folders go, as long as all stay unique."""
    short = {n: Path(n.removeprefix(PREFIX)).name.removesuffix(".jsonl") or n for n in names}
    return short if len(set(short.values())) == len(short) else {n: n for n in names}


def check_file(file: Path) -> None:
    """Raise ConfigError if `file` cannot be written: minutes of work shall not end so."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {file}: its folder does not exist")
    if file.is_dir():
        raise ConfigError(f"cannot write {file}: it is a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {file}: its folder may not be written to")


def check_picture(file: Path) -> None:
    """Raise ConfigError or ResourceError if `draw` could not write `file`."""
    if file.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw {file}: expected a name ending in {' or '.join(FORMATS)}")
    check_file(file)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ResourceError(
            "a picture needs matplotlib, which is not installed: pip install 'dspark[bench]'"
        ) from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary name that becomes `file` when the block ends well: never half a file.

    Raises ConfigError if the file cannot be written.
    """
    temporary = file.with_name(f".{file.stem}.{os.getpid()}.tmp{file.suffix}")
    try:
        yield temporary
        temporary.replace(file)  # os.replace: at once, or not at all
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def draw(report: Report, file: Path) -> None:
    """Write the picture of `report` to `file` (PNG or SVG, by its ending).

    Raises ConfigError if that fails, ResourceError without matplotlib.
    """
    check_picture(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = labels(list(dict.fromkeys(r.drafter for r in report.results)))
    sets = labels([p.name for p in report.prompts])
    longest = max((len(r.conditional) for r in report.results), default=0)
    per_row = min(len(report.prompts), COLUMNS)
    rows_each = math.ceil(len(report.prompts) / per_row)
    rows = rows_each * len(report.config.temperatures)
    width = max(6.4, 3.9 * per_row + 0.6)
    figure = Figure(figsize=(width, 3.4 * rows + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    title = "Conditional acceptance by draft position"
    model = f"target {report.model}, {report.dtype} · texts of at most {report.config.max_tokens}"
    figure.suptitle(f"{title}\n{model} tokens", fontsize=12.5)
    axes: Axes | None = None
    for i, temperature in enumerate(report.config.temperatures):
        for j, prompts in enumerate(report.prompts):
            cell = (i * rows_each + j // per_row) * per_row + j % per_row
            axes = figure.add_subplot(rows, per_row, cell + 1)
            _panel(
                axes,
                [
                    r
                    for r in report.results
                    if (r.temperature, r.prompts) == (temperature, prompts.name)
                ],
                longest,
            )
            many = f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}"
            axes.set_title(
                f"{_clipped(sets[prompts.name])} · temperature {temperature:g} · {many}",
                fontsize=10.5,
                pad=20,
            )
            axes.set_xlabel("draft position")
            if j % per_row == 0:
                axes.set_ylabel("accepted / tried")
    assert axes is not None  # EvalConfig and `run` see to one temperature and one set
    # All panels draw the same drafters in the same order, so any of them has the handles.
    figure.legend(
        axes.get_lines(),
        [_clipped(name) for name in names.values()],
        loc="outside lower center",
        ncols=min(len(names), 2 * per_row),
        frameon=False,
        title="tried: all before it accepted · band: 95 % if rounds were independent",
        title_fontsize=8.5,
    )
    save(figure, file, f"{title}, {model} tokens")


def save(figure: Figure, file: Path, title: str) -> None:
    """Write a figure, at once: without a date and with a fixed salt for ids, equal numbers give an
    equal SVG file. Raises ConfigError."""
    import matplotlib

    with replacing(file) as temporary, matplotlib.rc_context({"svg.hashsalt": "dspark"}):
        metadata: dict[str, Any] = {"Title": title}
        if file.suffix.lower() == ".svg":
            metadata["Date"] = None
        figure.savefig(temporary, dpi=150, metadata=metadata)


def _panel(axes: Axes, results: list[Result], longest: int) -> None:
    """A line for each drafter, and above the lines their accepted lengths in the same colours."""
    axes.text(0, 1.02, "accepted length", transform=axes.transAxes, fontsize=8.5, color="#555555")
    for n, r in enumerate(results):
        colour, marker = COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]
        at = list(range(1, len(r.conditional) + 1))
        axes.plot(at, r.conditional, color=colour, marker=marker, markersize=5, linewidth=1.8)
        axes.text(
            0.36 + 0.64 * n / max(len(results), 5),
            1.02,
            "-" if r.accepted_length is None else f"{r.accepted_length:.2f}",
            transform=axes.transAxes,
            fontsize=9.5,
            fontweight="bold",
            color=colour,
        )
        # `conditional` leaves out what was never tried, and so does this.
        bounds = [wilson(a, t) for a, t in zip(r.accepted_at, r.tried_at, strict=True) if t]
        if bounds:
            low, high = zip(*bounds, strict=True)
            axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        if len(bounds) == 1:  # a band of no width shows nothing
            axes.vlines(at, low, high, color=colour, alpha=0.4)
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0.6, max(longest, 1) + 0.4)
    axes.set_xticks(range(1, max(longest, 1) + 1, 1 if longest <= 16 else 2))
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not any(r.conditional for r in results):
        axes.text(
            0.5, 0.5, "nothing was drafted", ha="center", transform=axes.transAxes, color="#777777"
        )


def _clipped(name: str, most: int = 36) -> str:
    """The end of a long name tells more than its beginning."""
    return name if len(name) <= most else "…" + name[1 - most :]


def wilson(successes: int, tries: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share; unlike the textbook one it stays inside [0, 1]."""
    share, z2 = successes / tries, Z * Z / tries
    centre = (share + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(share * (1 - share) / tries + z2 / (4 * tries))
    return max(0.0, centre - half), min(1.0, centre + half)
