"""Short equal training runs that differ in one choice each: what makes learning cheaper?

    python scripts/compare_training.py checkpoints/smollm2-135m-instruct/dspark.toml \
        --anchors 40000 --out runs/compare

Every variation trains the recipe's drafter from the same seed on the same anchors and is judged on
the same held-out samples. Runs that are complete are not repeated, so the command resumes. Prints a
Markdown table (see docs/training-log.md) and ends in one JSON line. Seconds mean something on a
quiet machine only; acceptance does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VARIATIONS: dict[str, list[str]] = {
    "recipe": [],
    "Markov head starts at zero": ["drafter.markov_init=none"],
    "no injection": ["drafter.inject=false"],
    "hard labels only (ce 1)": ["loss.ce=1.0", "loss.kl=0.0"],
    "paper's loss (0.1 ce, 0.9 tv)": ["loss.ce=0.1", "loss.kl=0.0", "loss.tv=0.9"],
    "layers start at target's last two": ["drafter.init_layers=[28,29]"],
    "one layer": ["drafter.num_layers=1"],
    "three layers": ["drafter.num_layers=3"],
    "own fusion per layer (DFlare)": ["drafter.layer_fusion=true"],
    "two-tap convolution (DFlash2)": ["drafter.conv=true"],
    "bilinear head (DFlash2 selector)": ["drafter.markov_head_type=bilinear"],
    "gated head": ["drafter.markov_head_type=gated"],
    "rnn head": ["drafter.markov_head_type=rnn", "drafter.markov_init=none"],
    "no head (DFlash)": ["drafter.markov_rank=0"],
    "rank 128": ["drafter.markov_rank=128"],
    "learning rate / 2": ["train.lr=0.75e-3"],
    "learning rate x 2": ["train.lr=3e-3"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--anchors", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument("--only", nargs="*", help="names of variations, or parts of them")
    parser.add_argument("overrides", nargs="*", default=[], help="section.key=value for all runs")
    args = parser.parse_args()
    results = []
    for name, changes in VARIATIONS.items():
        if args.only and not any(part in name for part in args.only):
            continue
        out = args.out / "-".join("".join(c if c.isalnum() else " " for c in name).split())
        command = [
            *(sys.executable, "-m", "dspark", "train", str(args.config)),
            *(f"train.anchors={args.anchors}", f"train.out={out}", "train.save_every=1000000"),
            *(*args.overrides, *changes),
        ]
        done = last_held_out(out)
        if done is None:
            if subprocess.run(command, check=False).returncode:
                return 1
            done = last_held_out(out)
            assert done is not None
        results.append({"variation": name, "changes": changes, **done})
        print_row(results[-1], header=len(results) == 1)
    print(json.dumps({"date": datetime.now(UTC).isoformat("T", "seconds"),
                      "config": str(args.config), "anchors": args.anchors,
                      "results": results}))  # fmt: skip
    return 0


def last_held_out(out: Path) -> dict[str, Any] | None:
    """The figures at the end of a complete run; None if it is not complete."""
    file = out / "drafter" / "config.json"
    if not file.exists():
        return None
    training = json.loads(file.read_text())["training"]
    if training["steps"] < training["total_steps"]:
        return None
    keys = ("accepted_length", "accept", "anchors", "seconds")
    return {k: training[k] for k in keys}


def print_row(r: dict[str, Any], header: bool) -> None:
    if header:
        print("| variation | accepted length | acceptance by position | anchors/s |")
        print("|---|---|---|---|")
    accept = " ".join(f"{a:.3f}" for a in r["accept"])
    speed = r["anchors"] / r["seconds"]
    print(f"| {r['variation']} | {r['accepted_length']:.3f} | {accept} | {speed:.0f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
