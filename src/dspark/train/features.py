"""The target's hidden states over the training text: computed once, read many times.

A drafter learns from the hidden states of some target layers, and from the target's distribution at
every position. Neither changes while it trains, so both are stored: the layers' outputs in fp16,
the last of them being the final one, from which the target's logits are one norm and one matrix
away; and log Z, the logarithm of the softmax's denominator over the whole vocabulary, so that
the probability of any subset of tokens is exact without the others. Full-vocabulary logits would be
two hundred times larger and are never stored (method, section 6).

A cache is a directory of flat files; a sequence is a run of rows.

    meta.json      target, text, layers, sizes, how many sequences are complete
    tokens.i32     [T]            starts.i32  [S]  where the answer begins, inside its sequence
    ends.i64       [S] the row behind each sequence
    features.f16   [T, F * D]     log_z.f32   [T]  zero in front of the answer

Writing resumes: what lies behind the last complete sequence of `meta.json` is cut off and computed
again, and text that grew at its end keeps what is there. The rows come from the same
`Target.forward` that serves, so training and serving see the same layers (field failure B40).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError, ResourceError
from dspark.models.target import Segment, Target, pack
from dspark.train.samples import Sample

FILES = {"tokens.i32": 4, "starts.i32": 4, "ends.i64": 8, "features.f16": 2, "log_z.f32": 4}
"""Name -> bytes of one number."""


@dataclass(frozen=True)
class Features:
    """One sequence: L tokens, of which `tokens[start:]` were written by the target.

    tokens    [L] int64
    hidden    [L, F * D] fp16 or fp32, the outputs of `layers`, the final one last
    log_z     [L] fp32, log of the softmax denominator of the logits of each row >= start - 1
    """

    tokens: Tensor
    start: int
    hidden: Tensor
    log_z: Tensor


@dataclass(frozen=True)
class CacheMeta:
    """What a cache was made from; it is used for nothing else."""

    target: str
    text: str
    """Hash of the token ids of all samples."""
    layers: tuple[int, ...]
    hidden_size: int
    num_sequences: int
    num_tokens: int
    complete: int = 0
    """Sequences that are wholly on disk."""
    rows: int = 0
    """Their tokens."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, without meta.json."""
        row = 4 + 4 + 2 * len(self.layers) * self.hidden_size
        return self.num_tokens * row + self.num_sequences * 12

    def save(self, directory: Path) -> None:
        temporary = directory / "meta.json.part"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        temporary.replace(directory / "meta.json")


def hash_of(samples: Sequence[Sample]) -> str:
    """Sixteen hexadecimal digits that change with any token of the text."""
    digest = hashlib.sha256()
    for s in samples:
        digest.update(np.asarray([len(s.tokens), s.start, *s.tokens], np.int64).tobytes())
    return digest.hexdigest()[:16]


def plan(
    samples: Sequence[Sample], target_name: str, layers: Sequence[int], hidden_size: int
) -> CacheMeta:
    """What a cache over `samples` will hold and weigh."""
    return CacheMeta(
        target_name,
        hash_of(samples),
        tuple(layers),
        hidden_size,
        len(samples),
        sum(len(s.tokens) for s in samples),
    )


def compute(target: Target, samples: Sequence[Sample], layers: tuple[int, ...]) -> list[Features]:
    """One pass over some samples together, at most `target.num_slots` of them."""
    segments = [Segment(i, 0, s.tokens, len(s.tokens) - s.start + 1) for i, s in enumerate(samples)]
    out = target.forward(pack(segments, target.device), layers)
    assert out.features is not None
    log_z_M = torch.logsumexp(out.logits, -1)
    found, row, at = [], 0, 0
    for s in samples:
        n, m = len(s.tokens), len(s.tokens) - s.start + 1
        log_z = torch.zeros(n)
        log_z[n - m :] = log_z_M[at : at + m].cpu()
        hidden = out.features[row : row + n].cpu()
        found.append(Features(torch.tensor(s.tokens), s.start, hidden, log_z))
        row, at = row + n, at + m
    return found


def passes(samples: Sequence[Sample], target: Target, pass_tokens: int) -> list[Sequence[Sample]]:
    """Neighbouring samples grouped to about `pass_tokens` tokens."""
    groups: list[Sequence[Sample]] = []
    first, tokens = 0, 0
    for i, s in enumerate(samples):
        full = tokens + len(s.tokens) > pass_tokens or i - first == target.num_slots
        if i > first and full:
            groups.append(samples[first:i])
            first, tokens = i, 0
        tokens += len(s.tokens)
    groups.append(samples[first:])
    return groups


def build_cache(
    target: Target,
    target_name: str,
    samples: Sequence[Sample],
    directory: Path,
    layers: tuple[int, ...],
    hidden_size: int,
    *,
    pass_tokens: int = 512,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the features of all samples, going on behind what is already there.

    on_progress   gets (rows done, rows in all) after every pass

    Raises ConfigError if the directory holds a cache of something else, ResourceError if the disk
    is too small, CheckpointError if a hidden state does not fit into fp16.
    """
    meta = plan(samples, target_name, layers, hidden_size)
    have = read_meta(directory) if (directory / "meta.json").exists() else None
    if have is not None:
        meta = carry_on(meta, have, directory, samples)
    directory.mkdir(parents=True, exist_ok=True)
    _check_disk(meta, directory)
    meta.save(directory)
    sizes = {
        "tokens.i32": meta.rows, "log_z.f32": meta.rows, "starts.i32": meta.complete,
        "ends.i64": meta.complete, "features.f16": meta.rows * len(layers) * hidden_size,
    }  # fmt: skip
    files = {name: (directory / name).open("ab") for name in FILES}
    try:
        for name, file in files.items():
            if file.tell() < sizes[name] * FILES[name]:
                raise CheckpointError(
                    f"{directory / name} is damaged: shorter than meta.json says; delete"
                    f" {directory}"
                )
            file.truncate(sizes[name] * FILES[name])
        for group in passes(samples[meta.complete :], target, pass_tokens):
            if not group:
                break
            for f in compute(target, group, layers):
                half = f.hidden.half()
                if not torch.isfinite(half).all():
                    raise CheckpointError(
                        f"sequence {meta.complete}: a hidden state is not finite in fp16 (largest"
                        f" {float(f.hidden.abs().max()):.3g}, fp16 holds 65504): train without"
                        " a cache (features = 'live')"
                    )
                rows = meta.rows + len(f.tokens)
                files["tokens.i32"].write(f.tokens.numpy().astype(np.int32).tobytes())
                files["starts.i32"].write(np.int32(f.start).tobytes())
                files["ends.i64"].write(np.int64(rows).tobytes())
                files["features.f16"].write(half.numpy().tobytes())
                files["log_z.f32"].write(f.log_z.numpy().tobytes())
                meta = CacheMeta(**{**_fields(meta), "complete": meta.complete + 1, "rows": rows})
            for file in files.values():
                file.flush()
            meta.save(directory)
            if on_progress is not None:
                on_progress(meta.rows, meta.num_tokens)
    finally:
        for file in files.values():
            file.close()


def read_meta(directory: Path) -> CacheMeta:
    """The description of a cache. Raises CheckpointError."""
    try:
        raw: dict[str, Any] = json.loads((directory / "meta.json").read_text())
        return CacheMeta(**{**raw, "layers": tuple(raw["layers"])})
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise CheckpointError(f"{directory} is not a feature cache: {e}") from e


class FeatureCache:
    """A complete cache, memory-mapped; `cache[i]` is one sequence."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if it is missing, incomplete or damaged."""
        self.meta = meta = read_meta(directory)
        if meta.complete < meta.num_sequences:
            raise CheckpointError(
                f"{directory} is incomplete: {meta.complete} of {meta.num_sequences} sequences;"
                " run the same command again to go on"
            )
        width = len(meta.layers) * meta.hidden_size
        shapes: dict[str, tuple[type, tuple[int, ...]]] = {
            "tokens.i32": (np.int32, (meta.rows,)),
            "starts.i32": (np.int32, (meta.complete,)),
            "ends.i64": (np.int64, (meta.complete,)),
            "features.f16": (np.float16, (meta.rows, width)),
            "log_z.f32": (np.float32, (meta.rows,)),
        }
        maps = []
        for name, (dtype, shape) in shapes.items():
            try:
                maps.append(np.memmap(directory / name, dtype, "r", shape=shape))
            except (OSError, ValueError) as e:
                raise CheckpointError(f"{directory / name} is damaged: {e}") from e
        self._tokens, self._starts, self._ends, self._hidden, self._log_z = maps

    def __len__(self) -> int:
        return self.meta.complete

    def __getitem__(self, i: int) -> Features:
        first = int(self._ends[i - 1]) if i else 0
        rows = slice(first, int(self._ends[i]))
        return Features(
            torch.from_numpy(self._tokens[rows].astype(np.int64)),
            int(self._starts[i]),
            torch.from_numpy(np.array(self._hidden[rows])),
            torch.from_numpy(np.array(self._log_z[rows])),
        )


class LiveFeatures:
    """The same sequences without a disk: every access is a pass of the target."""

    def __init__(self, target: Target, samples: Sequence[Sample], layers: tuple[int, ...]) -> None:
        self._target, self._samples, self._layers = target, samples, layers

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> Features:
        return compute(self._target, [self._samples[i]], self._layers)[0]


def _fields(meta: CacheMeta) -> dict[str, Any]:
    return {**asdict(meta), "layers": meta.layers}


def carry_on(
    wanted: CacheMeta, have: CacheMeta, directory: Path, samples: Sequence[Sample]
) -> CacheMeta:
    """What a cache holds of what is wanted. Text that only grew at its end keeps its features.

    Raises ConfigError if the cache was made from something else.
    """
    if hash_of(samples[: have.num_sequences]) == have.text:
        have = replace(
            have,
            text=wanted.text,
            num_sequences=wanted.num_sequences,
            num_tokens=wanted.num_tokens,
        )
    for key in ("target", "text", "layers", "hidden_size"):
        if getattr(wanted, key) != getattr(have, key):
            raise ConfigError(
                f"{directory} is a feature cache of another {key}: {getattr(have, key)}, this run"
                f" has {getattr(wanted, key)}: name another directory or delete that one"
            )
    return have


def _check_disk(meta: CacheMeta, directory: Path) -> None:
    row = meta.num_bytes / max(meta.num_tokens, 1)
    missing = meta.num_bytes - round(meta.rows * row)
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if missing > free:
        raise ResourceError(
            f"the feature cache needs {missing / 2**30:.1f} GiB more at {directory}, where"
            f" {free / 2**30:.1f} GiB are free: name another directory, use less text or fewer"
            " layers, or train with features = 'live'"
        )
