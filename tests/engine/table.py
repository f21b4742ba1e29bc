"""A law that can be computed by hand, with hidden states to draft from, and without large imports:
processes of their own build it in tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.config import DecoderConfig, RopeConfig
from dspark.models.target import Batch, Linear, TargetOutput
from tests.engine.oracle import TableTarget

V = 8


def table(seed: int, scale: float) -> Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * scale


D, LAYERS = 32, 3


class TableDecoder(TableTarget):
    """A target whose next token depends on the last one alone, with hidden states to draft from."""

    def __init__(self, logits_V_V: Tensor, num_slots: int = 64, max_context: int = 16) -> None:
        super().__init__(logits_V_V, num_slots, max_context)
        self.hidden_size, self.num_layers = D, LAYERS
        self.config = DecoderConfig(
            "llama", V, D, 64, LAYERS, 4, 2, 8, 16, 1e-6, RopeConfig(), False
        )
        g = torch.Generator().manual_seed(5)
        self._embedding = torch.randn(V, D, generator=g)
        self._hidden = torch.randn(LAYERS, V, D, generator=g)
        self._out = torch.randn(V, D, generator=g)

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        out = super().forward(batch)
        rows = [self._hidden[i, batch.tokens] for i in feature_layers]
        return TargetOutput(out.logits, torch.cat(rows, -1) if rows else None)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens]

    def output_head(self, ids: Tensor | None = None) -> Linear:
        return self.linear(self._out if ids is None else self._out[ids])

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return lambda x: F.linear(x, weight, bias)
