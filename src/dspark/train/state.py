"""What a run needs to go on as if it had never stopped, and how it is kept safe.

A state is one file OUT/state/step-00001200.pt: weights, Adam's moments, where the data stands, the
random generator, the counters, and what the run depends on. The learning rate is a function of the
step. A file is written under another name, flushed to the disk and renamed, so that an interrupted
write leaves the last good one as it was; the last two are kept, and a file that cannot be read (a
disk full at the wrong moment) is passed over for the one before.

A run goes on only with the configuration that it was begun with. What changes nothing that is
learned may change (`FREE`); anything else, the number of steps included, since the cosine is laid
over all of them, is refused by name.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError

KEEP = 2
FREE = frozenset(
    ("target.device", "features.mode", "features.directory", "features.layers",
     "features.pass_tokens", "train.out", "train.save_every", "train.eval_every",
     "train.log_every", "train.eval_anchors_per_sequence", "train.max_minutes", "train.threads",
     "train.shard", "train.chunk")
)  # fmt: skip
"""Keys that a run may change when it goes on."""


@dataclass
class Counters:
    """Numbers of a run up to `step` steps."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    anchors: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Of training, all runs together."""


@dataclass(frozen=True)
class State:
    """Everything that a file holds; tensors are whole and on the CPU.

    depends   what must not change, by name
    since     sums of `Terms` and of gradient norms since the last logged step
    estimate  the last validation's numbers
    """

    model: Mapping[str, Tensor]
    adam: Mapping[str, Mapping[str, Tensor]]
    counters: Counters
    depends: Mapping[str, Any]
    rng: Tensor
    since: Mapping[str, Any] = field(default_factory=dict)
    estimate: Mapping[str, Any] = field(default_factory=dict)


def path_of(out: Path, step: int) -> Path:
    return out / "state" / f"step-{step:08d}.pt"


def save(state: State, out: Path) -> Path:
    """Write a state and delete older ones. Raises CheckpointError if the disk does not take it."""
    path = path_of(out, state.counters.step)
    temporary = path.with_suffix(".part")
    content = {f.name: getattr(state, f.name) for f in fields(state)}
    content["counters"] = asdict(state.counters)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as e:  # torch reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {e}") from e
    for old in _files(out)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def load(out: Path) -> State | None:
    """The last state that can be read; None if there is none."""
    for path in reversed(_files(out)):
        try:
            raw = torch.load(path, map_location="cpu", weights_only=True)
            return State(**{**raw, "counters": Counters(**raw["counters"])})
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError,
                pickle.UnpicklingError):  # fmt: skip
            continue
    files = _files(out)
    if files:
        raise CheckpointError(
            f"no state in {files[0].parent} can be read: delete it to begin again, or take another"
            " train.out"
        )
    return None


def _files(out: Path) -> list[Path]:
    return sorted((out / "state").glob("step-*.pt"))


def depends_on(flat: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What a run depends on: its configuration without `FREE`, and `more`."""
    return {**{k: v for k, v in flat.items() if k not in FREE}, **more}


def check_same(now: Mapping[str, Any], then: Mapping[str, Any], out: Path) -> None:
    """Raises ConfigError if a run cannot go on with what it now depends on.

    A key that the state does not have is younger than the state, and counts as unchanged."""
    for key, value in then.items():
        if now.get(key) != value:
            raise ConfigError(
                f"{out} holds a run with {key}={value}, this one has {now.get(key)}: it cannot go"
                " on with another; take another train.out or delete that directory"
            )
