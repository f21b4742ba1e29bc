"""MTP-1: the multi-token-prediction module of DeepSeek-V3, for a dense decoder.

Position i combines the target's hidden state with the token behind it and predicts the one after:

    x_i = W [RMSNorm(h_i) ; RMSNorm(embed(t_{i+1}))]  ->  one decoder layer  ->  norm  ->  head

which is a draft for t_{i+2}. Its layer attends to all earlier positions, each of which was computed
from the target's true hidden states. For more than one draft (k > 1) it feeds its own output back
as the next hidden state. This is the production baseline that DSpark is measured against: one
draft, then one verification, strictly in turn.

Shape suffixes as in `layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.drafters.layers import DraftLayer, RMSNorm, Rotary, Span


class MtpModel(nn.Module):
    """The trainable part; embedding and head belong to the target and are passed in."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = c = config
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(c)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary = Rotary(c)
        self.markov_head = None
        self.confidence_head = None

    def inputs(self, hidden_ND: Tensor, next_ND: Tensor) -> Tensor:
        """Target hidden states (before the final norm) and embeddings of the tokens behind them."""
        both = torch.cat([self.hnorm(hidden_ND), self.enorm(next_ND)], -1)
        return self.eh_proj(both)  # type: ignore[no-any-return]

    def keys_values(self, x_ND: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Rows of `inputs` and their positions [N] -> keys and values [N, G, E] of the layer."""
        cos, sin = self.rotary(positions)
        layer = cast(DraftLayer, self.layers[0])
        return [layer.self_attn.keys_values(layer.input_layernorm(x_ND), cos, sin)]

    def hidden(self, x_BD: Tensor, positions_B: Tensor, spans: Sequence[Span]) -> Tensor:
        """Rows of `inputs` at their positions over earlier rows -> hidden states [B, D], not yet
        normed: `norm` gives what the head reads, the unnormed row is fed back for k > 1."""
        cos, sin = self.rotary(positions_B[:, None])
        return self.layers[0](x_BD[:, None], cos, sin, spans)[:, 0]  # type: ignore[no-any-return]
