"""Numbers of a run: OUT/metrics.jsonl always, TensorBoard's files in OUT/tensorboard if installed.

A line is one object; `split` says of what:

    {"split": "train", "step": 120, "ce": ..., "accept": [...], "accepted_length": ..., "lr": ...}
    {"split": "held_out", "step": 200, "ce": ..., "accept": [...], "accepted_length": ...}

`accept` is the mean of 1 - TV(p, q) by position, `agree` how often both have the same best token,
`conf_error` the mean |c - (1 - TV)|, `accepted_length` the expected tokens of a round (`Terms`). A
run that goes on cuts off what was logged behind its state, so no step appears twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Metrics:
    """Writes both; close it, or use it as a context."""

    def __init__(self, out: Path, step: int) -> None:
        """`step`: what the run goes on from; later lines are cut off."""
        out.mkdir(parents=True, exist_ok=True)
        path = out / "metrics.jsonl"
        _cut(path, step)
        self._file = path.open("a")
        self._board = _board(out / "tensorboard", step)

    @property
    def has_board(self) -> bool:
        return self._board is not None

    def write(self, split: str, step: int, values: Mapping[str, Any]) -> None:
        """One line, and one curve of every number."""
        line = {"split": split, "step": step, **{k: _finite(v) for k, v in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, list):
                    for k, x in enumerate(value, 1):
                        self._board.add_scalar(f"{split}/{name}/{k}", x, step)
                elif isinstance(value, int | float):
                    self._board.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut(path: Path, step: int) -> None:
    """Keep whole lines of steps up to `step`."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a run that was killed while writing
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def _board(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=step + 1)  # type: ignore[no-untyped-call,unused-ignore]
