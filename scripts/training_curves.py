"""Curves of training runs: what a drafter accepts, against the anchors it has learned from.

    python scripts/training_curves.py runs/dspark runs/dflash runs/mtp1 --out training.png

Left, the accepted length; right, acceptance at the first draft position; both as the trainer
estimates them (temperature 1). Lines are trained text, smoothed over five log entries; large
markers are held-out text. Prints the held-out points as a Markdown table with the hours they took,
and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark.bench.picture import COLOURS, MARKERS, check_picture, replacing

SMOOTHED = 5


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; held-out lines get the anchors and hours of the one before."""
    lines, anchors, seconds = [], 0, 0.0
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["split"] == "train":
            seconds += (line["anchors"] - anchors) / line["anchors_per_second"]
            anchors = line["anchors"]
        lines.append({**line, "anchors": anchors, "hours": seconds / 3600})
    return lines


def smooth(values: list[float]) -> list[float]:
    return [
        sum(part := values[max(0, i + 1 - SMOOTHED) : i + 1]) / len(part)
        for i in range(len(values))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders that `dspark train` wrote")
    parser.add_argument("--out", type=Path, required=True, help=".png or .svg")
    args = parser.parse_args()
    check_picture(args.out)
    figure = Figure(figsize=(10, 4), layout="constrained")
    length, first = figure.subplots(1, 2)
    found: dict[str, list[dict[str, Any]]] = {}
    for run, colour, marker in zip(args.runs, COLOURS, MARKERS, strict=False):
        lines = read(run)
        train = [line for line in lines if line["split"] == "train"]
        held_out = [line for line in lines if line["split"] == "held_out"]
        for axes, value in (
            (length, lambda line: line["accepted_length"]),
            (first, lambda line: line["accept"][0]),
        ):
            x = [line["anchors"] / 1000 for line in train]
            axes.plot(x, smooth([value(line) for line in train]), color=colour, linewidth=1.2)
            axes.plot(
                [line["anchors"] / 1000 for line in held_out],
                [value(line) for line in held_out],
                marker, color=colour, markersize=8, label=run.name,
            )  # fmt: skip
        found[run.name] = [
            {k: line[k] for k in ("anchors", "hours", "accepted_length", "accept", "agree")}
            for line in held_out
        ]
    length.set_title("accepted length")
    first.set_title("acceptance of the first draft")
    for axes in (length, first):
        axes.set_xlabel("anchors, thousands")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    length.legend(frameon=False, title="marker: held-out text")
    with replacing(args.out) as file:
        figure.savefig(file, dpi=130)
    print("| run | anchors | hours | accepted length | acceptance by position |")
    print("|---|---|---|---|---|")
    for name, points in found.items():
        for p in points:
            accept = " ".join(f"{a:.3f}" for a in p["accept"])
            print(
                f"| {name} | {p['anchors']} | {p['hours']:.2f} | {p['accepted_length']:.3f}"
                f" | {accept} |"
            )
    print(json.dumps({"runs": found, "picture": str(args.out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
