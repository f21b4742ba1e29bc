"""Decoder layers on the integer kernels, with keys and values addressed by slot and position.

The int8 target runs all its layers through one of these, a drafter beside it its few: a row has a
slot, a position at which its keys and values are stored, and an end in front of which it reads. A
causal row ends behind itself; the rows of a draft block all end behind the block, and so see one
another both ways. `store` puts keys and values there that were computed elsewhere: a drafter's
context.

Shape suffixes: N rows, D hidden size, S slots, T positions of a slot, G key/value heads, E head
dimension, R = E / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dspark.models.native import library
from dspark.models.tables import lazy_zeros
from dspark.models.weights import BLOCK

KEY_GROUP = 8
"""Positions whose keys lie side by side (kernels.c)."""


class LayerSizes(Protocol):
    """What the kernels need to know of a layer; targets' and drafters' configurations have it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class KernelStack:
    """Layers, and the cache of their keys and values."""

    def __init__(
        self, sizes: LayerSizes, layers: Sequence[library.Layer], num_slots: int, max_context: int
    ) -> None:
        """`layers` point to weights that the caller keeps alive."""
        self._sizes = c = sizes
        self._lib = library.load()
        self._layers = (library.Layer * len(layers))(*layers)
        self._rows = -(-max_context // 32) * 32  # the kernels read keys 32 at a time
        shape = (len(layers), num_slots, c.num_kv_heads, self._rows, c.head_dim)
        self.keys, self.values = (lazy_zeros(shape, np.float32) for _ in range(2))

    def begin(
        self, positions: Tensor, slots: Tensor, ends: Tensor, cos: Tensor, sin: Tensor, x_ND: Tensor
    ) -> None:
        """Prepare a pass over N rows: all [N] int64, cos and sin [N, R], x_ND updated in place."""
        c, n, threads = self._sizes, x_ND.shape[0], torch.get_num_threads()
        inner = c.num_heads * c.head_dim
        stride = max(
            c.hidden_size, inner + 2 * c.num_kv_heads * c.head_dim, 2 * c.intermediate_size
        )
        widest = max(c.hidden_size, inner, c.intermediate_size)
        scratch = [
            positions.contiguous(),
            slots.contiguous(),
            ends.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
            x_ND,
            torch.empty((n, stride)),
            torch.empty((n, inner)),
            torch.empty((threads, c.num_heads // c.num_kv_heads, self._rows)),
            torch.empty((n, widest), dtype=torch.int8),
            torch.empty((n, widest // BLOCK)),
            torch.empty((n, widest // BLOCK)),
        ]
        self._scratch = scratch
        self._pass = library.Pass(n, stride, *(t.data_ptr() for t in scratch))
        self._dims = library.Dims(
            c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim,
            self._rows, threads, c.rms_norm_eps, c.head_dim**-0.5,
        )  # fmt: skip

    def run(self, keep: Sequence[int] = ()) -> Tensor:
        """All layers, in place on the rows that `begin` was given. Returns what they were behind
        each layer of `keep`, [len(keep), N, D]."""
        kept = torch.empty((len(keep), self._pass.n, self._sizes.hidden_size))
        places = np.full(len(self._layers), -1, np.int32)
        places[list(keep)] = range(len(keep))
        self._pass.keep, self._pass.kept = places.ctypes.data, kept.data_ptr()
        self._lib.dspark_layers(
            self._dims, self._layers, len(self._layers),
            self.keys.ctypes.data, self.values.ctypes.data, self.keys[0].size, self._pass,
        )  # fmt: skip
        return kept

    def store(
        self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Put rotated keys and values [N, G, E] of one layer at [N] slots and positions."""
        s, p = slots.numpy(), positions.numpy()
        grouped = self.keys[layer].reshape(
            *self.keys.shape[1:3], -1, self._sizes.head_dim, KEY_GROUP
        )
        grouped[s, :, p // KEY_GROUP, :, p % KEY_GROUP] = keys.numpy()
        self.values[layer][s, :, p] = values.numpy()

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` positions of a slot into another; whole groups of keys, so some rows
        behind them may come along."""
        rows = -(-length // KEY_GROUP) * KEY_GROUP
        for table in (self.keys, self.values):
            table[:, slot, :, :rows] = table[:, source, :, :rows]
