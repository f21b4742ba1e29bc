"""Compressed keys: a window of tokens pooled into one entry, channel by channel.

Every token yields a value and a gate for each channel; a learned bias by place in the window is
added to the gate, and the entry is the softmax-weighted sum of the values over the window, normed
and rotated to the window's first position. In CSA layers a token yields two series: the second
flows into the entry of its own window, the first into that of the next, so entries overlap. CSA
layers carry a second, narrower compressor over the same windows, whose entries are the keys of the
indexer; both are pooled together here. All of it is fp32 (the products in front are in the run's
dtype).

An entry depends on tokens of its window (and the one before) alone: once all are accepted, it never
changes and is not computed again.

Shape suffixes: N tokens, C entries closed in this pass, E head dimension, J index dimension,
W = E + J channels, T entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.models.deepseek_v4.arithmetic import Arithmetic
from dspark.models.deepseek_v4.config import CSA_RATIO, V4Config, span
from dspark.models.deepseek_v4.passes import Closing, Layout, Pass

Part = str | tuple[str, int, int]


class Compressor:
    """The compressors of one layer and what they pool from."""

    def __init__(
        self, config: V4Config, maths: Arithmetic, layout: Layout, prefix: str, ratio: int
    ) -> None:
        self._maths, self.ratio = maths, ratio
        self.head_dim = config.head_dim
        self.series = span(ratio) // ratio
        # An indexer that can never be asked to choose needs no keys.
        self.indexed = ratio == CSA_RATIO and layout.entries(ratio) > config.index_topk
        names = [prefix + "compressor."]
        if self.indexed:
            names.append(prefix + "indexer.compressor.")
        self.parts: list[Part] = [
            (f"{name}{kind}.weight", series, self.series)
            for series in range(self.series)
            for kind in ("wkv", "wgate")
            for name in names
        ]
        """The matrices of the inputs: for each series, values of all compressors, then gates."""
        channels = config.head_dim + (config.index_dim if self.indexed else 0)
        self.input_size = 2 * channels * self.series
        # [span, W]: the bias of the first series for the window before, of the last for this one.
        sizes = dict(zip(names, (config.head_dim, config.index_dim), strict=False))
        biases = [maths.vector(n + "ape", ratio, self.series * size) for n, size in sizes.items()]
        self.bias = torch.cat([torch.cat(b.chunk(self.series, -1)) for b in biases], -1)
        self.norms = [maths.vector(n + "norm.weight", size) for n, size in sizes.items()]
        rows = layout.num_slots * layout.input_ring(ratio)
        self.inputs = maths.zeros(rows + 1, self.input_size, dtype=torch.float32)
        # Before the beginning of a text: no value, and a gate that lets nothing through.
        self.inputs[rows, channels : 2 * channels] = -torch.inf
        self.index_keys = maths.zeros(
            layout.num_slots * layout.entries(ratio) if self.indexed else 0, config.index_dim
        )

    def __call__(self, inputs: Tensor, keys: Tensor, p: Pass) -> None:
        """Keep the rows' inputs; write the entries that close into `keys` and `index_keys`."""
        self.inputs.index_copy_(0, p.input_rows(self.ratio), inputs.float())
        c = p.closing(self.ratio)
        if c is None:
            return
        table = self.inputs.view(-1, self.input_size // self.series)
        pool = table.index_select(0, c.inputs).view(-1, span(self.ratio), table.shape[1])
        value_CSW, gate_CSW = pool.chunk(2, -1)
        entry_CW = ((gate_CSW + self.bias).softmax(1) * value_CSW).sum(1)
        self._write(keys, c, entry_CW)

    def _write(self, keys: Tensor, c: Closing, entry_CW: Tensor) -> None:
        entry = self._maths.norm_rotate(entry_CW[:, : self.head_dim], self.norms[0], c.turns)
        keys.index_copy_(0, c.key_rows, entry.to(keys.dtype))
        if self.indexed:
            entry = self._maths.norm_rotate(entry_CW[:, self.head_dim :], self.norms[1], c.turns)
            self.index_keys.index_copy_(0, c.index_rows, entry.to(keys.dtype))
