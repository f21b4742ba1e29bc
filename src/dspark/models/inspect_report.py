"""A checkpoint counted: what its tensors come to, by part, by dtype, in memory.

How things are counted:

* *Parameters* are numbers of the model, not of the file: a byte with two fp4 weights counts twice,
  scales and tables of integers not at all. *Active* ones take part in a token: of a mixture's
  routed experts the share k / E that it is sent to, and of an embedding nothing (a row is looked
  up), unless it is the output head as well.
* *Cache* is what the architecture keeps, in the run's dtype: bytes that every token adds, and bytes
  that a sequence has from the start (sliding windows; the inputs from which DeepSeek-V4 pools
  its next compressed entries, always fp32).
* *Memory* is weights, those of drafters inside, and the cache of one long sequence. Activations and
  the program itself come on top.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dspark.models.deepseek_v4_names import FUSED

Kind = Literal["hf", "gguf", "deepseek_v4", "drafter"]
DTYPES = ("fp32", "bf16", "int8")
CONTEXT = 8192
"""Tokens of the sequence whose cache is counted, unless the model holds less."""
_BLOCK = 32
_INT8_BYTES = 1 + 2 / _BLOCK
_INT4_BYTES = 0.5 + 4 / _BLOCK
"""Of a weight on the integer kernels: with an fp16 scale for each 32 columns, for 4 bits also a
minimum."""


class Tensor(NamedTuple):
    """One stored tensor. `shape` is that of the weight, unpacked; `parameters` is 0 for scales and
    tables."""

    part: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    parameters: int
    name: str


@dataclass(frozen=True)
class Part:
    name: str
    parameters: int
    num_bytes: int


@dataclass(frozen=True)
class Cache:
    """Bytes a token adds, and bytes a sequence has from the start."""

    per_token: int
    per_sequence: int = 0


@dataclass(frozen=True)
class Drafter:
    """A drafter inside a target's checkpoint."""

    kind: str
    stages: int
    parameters: int
    active_parameters: int
    num_bytes: int
    cache: dict[str, int]
    """Bytes a sequence has from the start, by dtype of a run."""
    settings: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """What there is to say about a checkpoint.

    dtypes   name -> (tensors, bytes), as stored
    cache, weights, drafter_weights  by dtype of a run; weights None where it cannot run so
    context  tokens of the sequence that memory is counted for
    problems what is missing or misshapen: it would not load
    """

    path: Path
    kind: Kind
    architecture: str
    sizes: dict[str, Any]
    num_files: int
    num_tensors: int
    num_bytes: int
    parameters: int
    active_parameters: int
    dtypes: dict[str, tuple[int, int]]
    parts: tuple[Part, ...]
    cache: dict[str, Cache]
    weights: dict[str, int | None]
    drafter_weights: dict[str, int | None]
    context: int
    drafters: tuple[Drafter, ...] = ()
    problems: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def memory(self, dtype: str) -> int | None:
        """Bytes for weights and one sequence of `context` tokens; None where it cannot run so."""
        weights, drafters = self.weights[dtype], self.drafter_weights[dtype]
        if weights is None:
            return None
        cache = self.cache[dtype]
        rings = sum(d.cache[dtype] for d in self.drafters)
        tokens = cache.per_token * self.context
        return weights + (drafters or 0) + cache.per_sequence + rings + tokens


def build(
    path: Path, kind: Kind, architecture: str, sizes: dict[str, Any], tensors: list[Tensor],
    num_files: int, *, active: int, cache: dict[str, Cache], max_context: int,
    tower: list[Tensor] | None = None, drafters: tuple[Drafter, ...] = (),
    problems: tuple[str, ...] = (), details: dict[str, Any] | None = None,
) -> Report:  # fmt: skip
    dtypes: dict[str, tuple[int, int]] = {}
    parts: dict[str, tuple[int, int]] = {}
    for t in tensors:
        count, size = dtypes.get(t.dtype, (0, 0))
        dtypes[t.dtype] = count + 1, size + t.num_bytes
        parameters, size = parts.get(t.part, (0, 0))
        parts[t.part] = parameters + t.parameters, size + t.num_bytes
    tower = tensors if tower is None else tower
    chosen = {id(t) for t in tower}
    rest = [t for t in tensors if id(t) not in chosen]
    order = sorted(parts, key=lambda name: (" stage " in name, _ORDER.get(name, 99), name))
    return Report(
        path=path, kind=kind, architecture=architecture, sizes=sizes, num_files=num_files,
        num_tensors=len(tensors), num_bytes=sum(t.num_bytes for t in tensors),
        parameters=sum(t.parameters for t in tower), active_parameters=active,
        dtypes=dict(sorted(dtypes.items(), key=lambda item: -item[1][1])),
        parts=tuple(Part(name, *parts[name]) for name in order), cache=cache,
        weights={d: _memory(tower, d) for d in DTYPES},
        drafter_weights={d: _memory(rest, d) for d in DTYPES},
        context=min(max_context, CONTEXT), drafters=drafters, problems=problems,
        details=details or {},
    )  # fmt: skip


def _memory(tensors: Iterable[Tensor], dtype: str) -> int | None:
    """Bytes of the weights in a run; None where the kernels' blocks of 32 do not fit a matrix."""
    total = 0.0
    for t in tensors:
        if dtype != "int8" or not _is_matrix(t):
            total += t.parameters * (2 if dtype == "bf16" else 4)
        elif t.shape[-1] % _BLOCK:
            return None
        else:
            total += t.parameters * (_INT4_BYTES if t.dtype in ("Q4_0", "Q4_1") else _INT8_BYTES)
    return math.ceil(total)


def _is_matrix(t: Tensor) -> bool:
    """Whether the integer kernels multiply with it; what is small or looked up stays fp32."""
    if t.name == "embed.weight" or len(t.shape) < 2 or not t.parameters:
        return False
    return t.name.endswith(("weight", *FUSED))


def width(dtype: str) -> int:
    """Bytes of a number in the cache: fp32 in all runs but bf16's."""
    return 2 if dtype == "bf16" else 4


_PATTERNS = (
    ("markov head", r"markov_head\."),
    ("confidence head", r"confidence_head\."),
    ("embedding", r"embed_tokens|token_embd|^embed\."),
    ("norms", r"norm"),
    ("head", r"lm_head|^output\.|^head\."),
    ("attention", r"self_attn|\.attn_(q|k|v|output)\."),
    ("mlp", r"\.mlp\.|\.ffn_(gate|up|down)\."),
    ("context", r"(^|\.)(fc|eh_proj|inject)\."),
)
_V4_PATTERNS = (
    ("shared experts", r"\.shared_experts\."),
    ("router", r"\.ffn\.gate\."),
    ("streams", r"(^|\.)hc_"),
    ("norms", r"norm\.weight$"),
    ("attention", r"\.attn\."),
    ("embedding", r"^embed\."),
    ("head", r"^head\."),
)
_ORDER = {
    name: i
    for i, name in enumerate(
        ("embedding", "attention", "mlp", "experts", "shared experts", "router", "streams", "norms",
         "head", "context", "markov head", "confidence head", "other")
    )
}  # fmt: skip


def part_of(name: str) -> str:
    """The part of a decoder of the Llama family, or of a drafter, that a tensor belongs to."""
    return next((part for part, pattern in _COMPILED if pattern.search(name)), "other")


def v4_part_of(name: str) -> str:
    """The same for a tensor of DeepSeek-V4's tower."""
    if ".ffn.experts." in name:  # nearly all of them
        return "experts"
    return next((part for part, pattern in _V4_COMPILED if pattern.search(name)), "other")


_COMPILED = [(part, re.compile(pattern)) for part, pattern in _PATTERNS]
_V4_COMPILED = [(part, re.compile(pattern)) for part, pattern in _V4_PATTERNS]
