"""Tiny random DeepSeek-V4 models with drafters under `mtp.*`, and a drafter right on demand.

Random drafters are nearly always wrong. `Guided` runs one as it is, so that its context lives
through every round, and proposes what a test believes instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.drafters.deepseek_v4_dspark import V4DSparkDrafter
from dspark.drafters.deepseek_v4_mtp import V4MtpDrafter
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_config import V4DSpark, v4_from_hf
from dspark.models.deepseek_v4_names import (
    MARKOV,
    CarriedDrafter,
    Shapes,
    stage_shapes,
    tower_shapes,
)
from dspark.types import Draft
from tests.engine.oracle import OracleDrafter
from tests.models.deepseek_v4.tiny import SIZES
from tests.tiny import DictSource

V4Drafter = V4MtpDrafter | V4DSparkDrafter
MTP = CarriedDrafter("mtp1", 1)
STAGES, BLOCK = 3, 5


def config(**overrides: Any) -> V4Config:
    """Every kind of layer, a window of 8."""
    raw = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 5,
        "compress_ratios": [0, 4, 8, 4, 0],
        "num_hash_layers": 1,
        **SIZES,
        **overrides,
    }
    return v4_from_hf(raw)


def dspark(c: V4Config, *, markov: int | None = 0, confidence: bool = True) -> CarriedDrafter:
    """Three stages; `markov`: which pair of names the Markov head has, None: there is no head."""
    last = f"mtp.{STAGES - 1}."
    n = c.num_layers
    settings = V4DSpark(BLOCK, c.vocab_size - 1, (max(n - 3, 0), n - 1), 8)
    if markov is None:
        settings = V4DSpark(BLOCK, c.vocab_size - 1, (max(n - 3, 0), n - 1), 0)
        return CarriedDrafter("dspark", STAGES, None, confidence, settings)
    first, second = MARKOV[markov]
    return CarriedDrafter("dspark", STAGES, (last + first, last + second), confidence, settings)


def tensors(c: V4Config, shapes: Shapes, seed: int = 0) -> dict[str, Tensor]:
    """Random values in which nothing is neutral."""
    out: dict[str, Tensor] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        g = torch.Generator().manual_seed(1000 * seed + i)
        if name.endswith("tid2eid"):
            out[name] = torch.randint(c.num_experts, shape, generator=g)
            continue
        noise = torch.randn(shape, generator=g)
        if name.endswith(("norm.weight", "_scale")):
            out[name] = 1 + 0.1 * noise
        elif name.endswith(("sink", "ape", "_base", "markov_w1.weight", "head.embed.weight")):
            out[name] = 0.5 * noise
        elif name.endswith("confidence_head.proj.weight"):
            out[name] = 0.3 * noise
        else:
            out[name] = 0.2 * noise
    return out


def source(c: V4Config, drafters: Sequence[CarriedDrafter] = (), seed: int = 0) -> DictSource:
    held = tensors(c, tower_shapes(c), seed)
    for d in drafters:
        held |= tensors(c, stage_shapes(c, d), seed + 1)
    return DictSource(held)


def target(
    drafter: CarriedDrafter,
    c: V4Config | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    num_slots: int = 4,
    max_context: int = 256,
    seed: int = 0,
    cls: type[DeepseekV4] = DeepseekV4,
    kernels: bool = True,
) -> DeepseekV4:
    """Without `kernels` tower and drafters run on PyTorch's operations."""
    c = c or config()
    made = cls(
        c,
        source(c, [drafter], seed),
        dtype=dtype,
        num_slots=num_slots,
        max_context=max_context,
        device=torch.device("cpu"),
        max_block=16,
    )
    if not kernels:
        made.maths.kernels = None
    return made


def drafter(model: DeepseekV4, carried: CarriedDrafter, k: int | None = None) -> V4Drafter:
    return (V4MtpDrafter if carried.kind == "mtp1" else V4DSparkDrafter)(model, carried, k)


class Guided(Drafter):
    """Runs `inner` in full and proposes what `oracle` believes, as long as the inner draft is."""

    def __init__(self, inner: V4Drafter, oracle: OracleDrafter) -> None:
        self.inner, self._oracle, self.feature_layers = inner, oracle, inner.feature_layers
        self.cap = inner.cap

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = self.inner.propose(contexts)
        guesses = self._oracle.propose(contexts)
        return [Draft(g.tokens[: len(d)]) for d, g in zip(drafts, guesses, strict=True)]

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        self.inner.observe(committed, features)

    def release(self, slot: int) -> None:
        self._oracle.release(slot)
        self.inner.release(slot)
