"""Times of a device that is not here, around computations that are.

`verify=20ms,draft=5ms`: every pass of the target and every batch of drafts takes at least that;
what is left is slept. Nothing that is computed changes, so the pipeline can be studied for machines
that one does not have. It is no model of such a device: a pass takes the same whatever its rows,
and lanes never slow each other down. A computation that takes longer than its device keeps its own
time, so figures are worth something only where the emulated times are the longer ones, and every
one of them must be called emulated.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.target import Batch, Linear, Target, TargetOutput

FORM = re.compile(r"(verify|draft)=(\d+(?:\.\d+)?)ms")


@dataclass(frozen=True)
class Emulation:
    """Milliseconds of a pass and of a batch of drafts; 0 leaves the time that it takes here."""

    verify_ms: float = 0.0
    draft_ms: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Emulation:
        """`verify=20ms,draft=5ms`; either part may be left out. Raises ConfigError."""
        parts = [FORM.fullmatch(p.strip()) for p in text.split(",")]
        found = {m[1]: float(m[2]) for m in parts if m}
        if None in parts or len(found) != len(parts):
            raise ConfigError(
                f"cannot emulate {text!r}: expected verify=MSms, draft=MSms or both with a comma,"
                " as in verify=20ms,draft=5ms"
            )
        return cls(found.get("verify", 0.0), found.get("draft", 0.0))

    def __str__(self) -> str:
        return f"verify {self.verify_ms:g} ms, draft {self.draft_ms:g} ms"


class EmulatedTarget:
    """A target whose passes take at least `ms`."""

    def __init__(self, inner: Target, ms: float) -> None:
        self.inner, self._seconds = inner, ms / 1e3
        self.vocab_size, self.max_context = inner.vocab_size, inner.max_context
        self.num_slots, self.num_layers = inner.num_slots, inner.num_layers
        self.hidden_size = inner.hidden_size
        self.device: torch.device = inner.device

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        start = time.perf_counter()
        output = self.inner.forward(batch, feature_layers)
        time.sleep(max(start + self._seconds - time.perf_counter(), 0.0))
        return output

    def reuse(self, source: int, slot: int, length: int) -> bool:
        return self.inner.reuse(source, slot, length)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.inner.embed(tokens)

    def output_head(self, ids: Tensor | None = None) -> Linear:
        return self.inner.output_head(ids)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self.inner.linear(weight, bias)
