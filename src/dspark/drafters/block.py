"""DFlash and DSpark: the parallel backbone over a block, with the target's features as context.

    anchor  mask  mask  mask          slots at positions p, p+1, ... (p: the anchor's)
      |      |     |     |            queries; keys and values also from the context,
    [ draft layers, both ways  ] <--- H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)])   (eq. 2)
      |      |     |     |
     h_1    h_2   h_3   h_4           base logits U_k = head(norm(h_k)), the target's head

then, with a Markov head, the sequential stage of `heads.py`. Without one this is DFlash. The module
is the same in training and in serving; `BlockModel.context` gives the rows that are cached by
position; `hidden` runs blocks over them, and serving does so in three parts.

Shape suffixes as in `layers.py`; m feature layers, n draft layers, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.drafters.heads import ConfidenceHead, markov_head
from dspark.drafters.layers import DraftLayer, RMSNorm, Rotary, Span


class BlockModel(nn.Module):
    """The trainable part; embedding and head belong to the target and are passed in."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = c = config
        fused = c.num_layers if c.layer_fusion else 1
        self.fc = nn.Linear(c.num_features * c.hidden_size, fused * c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary = Rotary(c)
        self.markov_head = markov_head(c)
        self.confidence_head = ConfidenceHead(c) if c.confidence_head else None
        self.inject = (
            nn.Linear(2 * c.hidden_size, c.num_slots * c.hidden_size, bias=False)
            if c.inject
            else None
        )
        if self.inject is not None:
            nn.init.zeros_(self.inject.weight)

    def context(self, features: Tensor) -> Tensor:
        """Target hidden states [N, m * D] -> context rows [N, D] (one for each draft layer with
        layer fusion: [N, n * D])."""
        fused = self.fc(features).view(len(features), -1, self.config.hidden_size)
        return self.hidden_norm(fused).flatten(1)  # type: ignore[no-any-return]

    def keys_values(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Context rows and their positions [N] -> keys and values [N, G, E] of every layer."""
        cos, sin = self.rotary(positions)
        rows = context.view(len(context), -1, self.config.hidden_size).unbind(1)
        attentions = (cast(DraftLayer, layer).self_attn for layer in self.layers)
        return [
            attention.keys_values(rows[i if len(rows) > 1 else 0], cos, sin)
            for i, attention in enumerate(attentions)
        ]

    def inputs(
        self, anchor_BD: Tensor, mask_D: Tensor, last_BD: Tensor, num_drafts: int | None = None
    ) -> Tensor:
        """What enters the first layer, [B, slots, D].

        anchor_BD    embeddings of the anchors; mask_D that of the mask token
        last_BD      the context row in front of each anchor, [B, D] or [B, n * D]; used by `inject`
        num_drafts   K, at most block_size; None is block_size
        """
        c = self.config
        slots = (num_drafts or c.block_size) + (not c.sample_from_anchor)
        B = anchor_BD.shape[0]
        x_BKD = torch.cat(
            [anchor_BD[:, None], mask_D.expand(B, slots - 1, -1).to(anchor_BD.dtype)], 1
        )
        if self.inject is not None:
            anchor = torch.nn.functional.rms_norm(anchor_BD, (c.hidden_size,), eps=c.rms_norm_eps)
            fed = self.inject(torch.cat([last_BD[:, -c.hidden_size :], anchor], -1))
            x_BKD = x_BKD + fed.view(B, c.num_slots, c.hidden_size)[:, :slots]
        return x_BKD

    def outputs(self, x_BKD: Tensor) -> Tensor:
        """What the last layer gave -> normed hidden states [B, K, D] of the slots that predict."""
        return self.norm(x_BKD if self.config.sample_from_anchor else x_BKD[:, 1:])  # type: ignore[no-any-return]

    def hidden(
        self,
        front_BUD: Tensor,
        mask_D: Tensor,
        positions_B: Tensor,
        last_BD: Tensor,
        spans: Sequence[Sequence[Span]],
    ) -> Tensor:
        """Whole blocks through all layers: `inputs`, the layers, `outputs`; [B, K, D].

        front_BUD    embeddings of the tokens behind the context, of which the last is the anchor
        positions_B  absolute positions of the first of them
        last_BD      the last context row
        spans        for each layer, the blocks' contexts
        """
        unseen = front_BUD.shape[1] - 1
        block_BKD = self.inputs(front_BUD[:, -1], mask_D, last_BD)
        x_BKD = torch.cat([front_BUD[:, :-1], block_BKD], 1) if unseen else block_BKD
        steps = torch.arange(x_BKD.shape[1], device=positions_B.device)
        cos, sin = self.rotary(positions_B[:, None] + steps)
        for layer, over in zip(self.layers, spans, strict=True):
            x_BKD = layer(x_BKD, cos, sin, over)
        return self.outputs(x_BKD[:, unseen:])
