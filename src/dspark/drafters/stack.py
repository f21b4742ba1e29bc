"""A drafter's layers as they serve, over context that is addressed by slot and position.

The context follows the target's rule: a sequence has a length, rows are written at absolute
positions, nothing is rolled back, and what lies behind the length is overwritten before it is read.
Only committed rows are context; a block's own rows may stand behind them while it runs.

Two ways to compute the same: `ModuleStack` runs the trained modules themselves (any device, any
option), `KernelDraftStack` the kernels of an int8 target, one call for all layers, where a block
costs its products and little else. `stack_for` chooses.

Shape suffixes as in `layers.py`; S slots, T positions of a slot, n draft layers, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.drafters.layers import DraftLayer, RMSNorm, Rotary, Span
from dspark.models.int8 import Int8Decoder, unsupported
from dspark.models.kernel_stack import KernelStack
from dspark.models.native import library
from dspark.models.tables import lazy_zeros
from dspark.models.target import Shared

Rows = Sequence[tuple[Tensor, Tensor]]
"""Rotated keys and values [N, G, E] of every layer."""


class DraftStack(Protocol):
    """Layers with a context."""

    lengths: list[int]
    """[S] committed context rows of each slot."""

    def write(self, slots: Tensor, positions: Tensor, rows: Rows) -> None:
        """Put context rows at [N] slots and positions."""
        ...

    def copy(self, source: int, slot: int, length: int) -> bool:
        """Make the context of `slot` the first `length` rows of that of `source`; False, and
        nothing done, if there are fewer."""
        ...

    def run(self, x_BKD: Tensor, slots: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Blocks at positions start, start + 1, ... of their slots, each over all context in front
        of its start and over itself: [B, K, D] through all layers."""
        ...


def stack_for(
    config: DrafterConfig, target: Shared, layers: nn.ModuleList, rotary: Rotary
) -> DraftStack:
    """The fastest stack that computes these layers beside this target."""
    if isinstance(target, Int8Decoder) and not config.conv and unsupported(config) is None:
        return KernelDraftStack(config, target, layers, rotary)
    return ModuleStack(config, target, layers, rotary)


class ModuleStack:
    """The modules themselves, over keys and values [n, S, T, G, E]."""

    def __init__(
        self, config: DrafterConfig, target: Shared, layers: nn.ModuleList, rotary: Rotary
    ) -> None:
        shape = (config.num_layers, target.num_slots, target.max_context, config.num_kv_heads,
                 config.head_dim)  # fmt: skip
        self.keys, self.values = (
            torch.from_numpy(lazy_zeros(shape, np.float32)).to(target.device) for _ in range(2)
        )
        self.lengths = [0] * target.num_slots
        self._layers, self._rotary = layers, rotary

    def write(self, slots: Tensor, positions: Tensor, rows: Rows) -> None:
        for i, (keys, values) in enumerate(rows):
            self.keys[i, slots, positions] = keys.float()
            self.values[i, slots, positions] = values.float()

    def copy(self, source: int, slot: int, length: int) -> bool:
        if self.lengths[source] < length:
            return False
        if source != slot:
            for table in (self.keys, self.values):
                table[:, slot, :length] = table[:, source, :length]
        self.lengths[slot] = length
        return True

    def run(self, x_BKD: Tensor, slots: Sequence[int], starts: Sequence[int]) -> Tensor:
        steps = torch.arange(x_BKD.shape[1], device=x_BKD.device)
        first = torch.tensor(starts, device=x_BKD.device)
        cos, sin = self._rotary(first[:, None] + steps)
        for layer, keys, values in zip(self._layers, self.keys, self.values, strict=True):
            spans = [
                Span(b, b + 1, keys[s, :n].to(x_BKD.dtype), values[s, :n].to(x_BKD.dtype))
                for b, (s, n) in enumerate(zip(slots, starts, strict=True))
            ]
            x_BKD = layer(x_BKD, cos, sin, spans)
        return x_BKD


class KernelDraftStack:
    """The same layers packed for the kernels; their weights are rounded to the target's bits."""

    def __init__(
        self, config: DrafterConfig, target: Int8Decoder, layers: nn.ModuleList, rotary: Rotary
    ) -> None:
        self._kept: list[object] = []  # what the C structures point to
        self._rotary, self._target = rotary, target
        self.lengths = [0] * target.num_slots
        packed = [self._pack(cast(DraftLayer, layer)) for layer in layers]
        # A block begins inside the context and may end behind it.
        rows = target.max_context + config.num_slots
        self._stack = KernelStack(config, packed, target.num_slots, rows)

    def _pack(self, layer: DraftLayer) -> library.Layer:
        def matrix(*linears: nn.Module) -> library.Linear:
            weight = torch.cat([cast(nn.Linear, part).weight.detach() for part in linears])
            packed = self._target.pack(weight)
            self._kept.append(packed)
            return packed.struct

        def vector(norm: nn.Module) -> int:
            if not isinstance(norm, RMSNorm):
                return 0
            weight = norm.weight.detach().float().contiguous()
            self._kept.append(weight)
            return weight.data_ptr()

        a, m = layer.self_attn, layer.mlp
        return library.Layer(
            matrix(a.q_proj, a.k_proj, a.v_proj),
            matrix(a.o_proj),
            matrix(m.gate_proj, m.up_proj),
            matrix(m.down_proj),
            vector(layer.input_layernorm),
            vector(layer.post_attention_layernorm),
            vector(a.q_norm),
            vector(a.k_norm),
            0,
            1,
        )

    def write(self, slots: Tensor, positions: Tensor, rows: Rows) -> None:
        for i, (keys, values) in enumerate(rows):
            self._stack.store(i, slots, positions, keys, values)

    def copy(self, source: int, slot: int, length: int) -> bool:
        if self.lengths[source] < length:
            return False
        if source != slot:
            self._stack.copy(source, slot, length)
        self.lengths[slot] = length
        return True

    def run(self, x_BKD: Tensor, slots: Sequence[int], starts: Sequence[int]) -> Tensor:
        B, K, _ = x_BKD.shape
        first = torch.tensor(starts).repeat_interleave(K)
        positions = first + torch.arange(K).repeat(B)
        cos, sin = self._rotary(positions)
        x_ND = x_BKD.float().flatten(0, 1).clone()
        self._stack.begin(positions, torch.tensor(slots).repeat_interleave(K), first + K,
                          cos[:, 0], sin[:, 0], x_ND)  # fmt: skip
        self._stack.run()
        return x_ND.view_as(x_BKD)
