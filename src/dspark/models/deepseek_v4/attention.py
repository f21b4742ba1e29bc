"""Attention of V4: one key for all heads, exact nearby, compressed far away.

One vector of a token is both key and value of every head. A query attends, in a single softmax, to
the last `window` tokens, to compressed entries of everything before (all of them in HCA layers, the
indexer's choice in CSA layers), and to a learned sink: a key of zeros with a logit of its own for
each head, which takes weight and gives nothing. Keys are rotated, and so are the values, being the
same vectors; the output is therefore rotated back at the query's position, which leaves rotations
by relative distance. The output projection is of low rank within groups of heads.

The indexer scores entry t for a query as sum_h w_h relu(q_h . k_t) with few, narrow heads, and the
best `index_topk` are kept; of equal scores (relu makes many exact zeros) the lower entry index
wins, so that the choice does not depend on how many entries a row was shown. The published model
was trained with fp8 keys and fp4 index vectors and its reference code simulates their rounding;
here they are as precise as the tables' dtype.

Shape suffixes: N tokens, H heads, E head dimension, D hidden size, S sequences of a group, L tokens
of the longest, K keys, T entries, I index heads, J index dimension.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dspark.models.deepseek_v4 import kernels
from dspark.models.deepseek_v4.arithmetic import Arithmetic, rotate_
from dspark.models.deepseek_v4.compressor import Compressor, Part
from dspark.models.deepseek_v4.config import V4Config, span
from dspark.models.deepseek_v4.passes import Group, Keys, Layout, Pass


class Attention:
    """Attention of one layer with its tables."""

    def __init__(
        self, config: V4Config, maths: Arithmetic, layout: Layout, prefix: str, ratio: int
    ) -> None:
        c = config
        self.config, self._maths, self.ratio, self.dtype = c, maths, ratio, maths.dtype
        self.compressor = Compressor(c, maths, layout, prefix, ratio) if ratio else None
        self.indexer: Indexer | None = None
        inputs: list[Part] = [prefix + "wq_a.weight", prefix + "wkv.weight"]
        self._sizes = [c.q_rank, c.head_dim]
        if self.compressor is not None:
            inputs += self.compressor.parts
            self._sizes.append(self.compressor.input_size)
            if self.compressor.indexed:
                self.indexer = Indexer(c, maths, prefix + "indexer.", self.compressor)
                inputs.append(prefix + "indexer.weights_proj.weight")
                self._sizes.append(c.index_heads)
        heads, ranks = c.num_heads * c.head_dim, c.o_groups * c.o_rank
        self.w_in = maths.linear(*inputs, shape=(sum(self._sizes), c.hidden_size))
        self.wq_b = maths.linear(prefix + "wq_b.weight", shape=(heads, c.q_rank))
        self.wo_a = maths.grouped(
            prefix + "wo_a.weight", c.o_groups, shape=(ranks, heads // c.o_groups)
        )
        self.wo_b = maths.linear(prefix + "wo_b.weight", shape=(c.hidden_size, ranks))
        self.q_norm = maths.vector(prefix + "q_norm.weight", c.q_rank)
        self.kv_norm = maths.vector(prefix + "kv_norm.weight", c.head_dim)
        self.sink_H = maths.vector(prefix + "attn_sink", c.num_heads)
        # Queries are normed without a weight; the softmax scale goes there.
        self.scale_E = torch.full((c.head_dim,), c.head_dim**-0.5, device=maths.device)
        self.keys = maths.zeros(layout.num_slots * layout.stride(ratio) + 1, c.head_dim)
        self._struct = self._lay_out(layout) if maths.dtype == torch.float32 else None

    def _lay_out(self, layout: Layout) -> kernels.Attention | None:
        """All of this for the kernels, which compute the sublayer in one call."""
        native, c, o = self._maths.kernels, self.config, self.compressor
        if native is None:
            return None
        maps = self.wo_a.maps
        self._groups = (ctypes.c_void_p * len(maps))(*(ctypes.addressof(m.struct) for m in maps))
        index_q = None if self.indexer is None else ctypes.addressof(self.indexer.wq_b.struct)
        return kernels.Attention(
            ctypes.addressof(self.w_in.struct), ctypes.addressof(self.wq_b.struct), index_q,
            ctypes.addressof(self.wo_b.struct), ctypes.addressof(self._groups),
            native.products[self.w_in.struct.bits], self.q_norm.data_ptr(),
            self.scale_E.data_ptr(), self.kv_norm.data_ptr(), self.sink_H.data_ptr(),
            *((None,) * 3 if o is None else (o.bias.data_ptr(), o.norms[0].data_ptr(),
                                             o.norms[-1].data_ptr())),
            self.keys.data_ptr(),
            *((None,) * 2 if o is None else (o.inputs.data_ptr(), o.index_keys.data_ptr())),
            c.hidden_size, c.q_rank, c.num_heads, c.head_dim, c.o_groups, c.o_rank,
            c.rope_dim // 2, self.ratio, span(self.ratio), 0 if o is None else o.bias.shape[1],
            c.index_heads, c.index_dim, c.index_topk, layout.ring, layout.stride(self.ratio),
            layout.entries(self.ratio), c.norm_eps,
        )  # fmt: skip

    def __call__(self, x_ND: Tensor, p: Pass) -> Tensor:
        """x [N, D] fp32 -> [N, D]; writes the rows' state."""
        native = self._maths.products(len(x_ND))
        if native is not None and self._struct is not None:
            return native.attention(self._struct, p.rows(self.ratio), x_ND)
        c, turns = self.config, p.turns(self.ratio)
        rank, kv_NE, *rest = torch.split(self.w_in(x_ND), self._sizes, -1)
        norm = self._maths.norm_rotate
        rank = norm(rank, self.q_norm, None)
        q_NHE = norm(self.wq_b(rank), self.scale_E, turns, c.num_heads)
        kv_NE = norm(kv_NE, self.kv_norm, turns)
        self.keys.index_copy_(0, p.key_rows(self.ratio), kv_NE.to(self.dtype))
        if self.compressor is not None:
            self.compressor(rest[0], self.keys, p)
        q_NHE = q_NHE.to(self.dtype).view(-1, c.num_heads, c.head_dim)
        out: list[Tensor] = []
        for g in p.groups:
            keys = g.keys(self.ratio)
            mask = keys.mask
            if self.indexer is not None and keys.hidden is not None:
                mask = self.indexer.mask(rank, rest[1], turns, g, keys)
            out.append(self._attend(q_NHE, g, keys, mask))
        out_NHE = out[0] if p.order is None else torch.cat(out).index_select(0, p.order)
        rotate_(out_NHE, turns.conj()[:, None])
        return self.wo_b(self.wo_a(out_NHE.flatten(1)))

    def _attend(self, q_NHE: Tensor, g: Group, keys: Keys, mask: Tensor | None) -> Tensor:
        """The rows of one group: [S * L, H, E] fp32."""
        heads, dim = q_NHE.shape[1:]
        s, k = g.num_sequences, keys.width
        q = q_NHE if g.rows is None else q_NHE.index_select(0, g.rows)
        key_SKE = self.keys.index_select(0, keys.rows).view(s, k, dim)
        scores = torch.bmm(q.reshape(s, -1, dim), key_SKE.transpose(1, 2)).float()
        scores_SLHK = scores.view(s, g.length, heads, k)
        if mask is not None:
            scores_SLHK.add_(mask)
        scores_SLHK[..., -1] = self.sink_H
        return torch.bmm(scores.softmax(-1).to(self.dtype), key_SKE).float().view(-1, heads, dim)


class Indexer:
    """Chooses the compressed entries that a query of a CSA layer reads."""

    def __init__(
        self, config: V4Config, maths: Arithmetic, prefix: str, compressor: Compressor
    ) -> None:
        self.heads, self.dim, self.topk = config.index_heads, config.index_dim, config.index_topk
        self.wq_b = maths.linear(
            prefix + "wq_b.weight", shape=(self.heads * self.dim, config.q_rank)
        )
        self.compressor, self._maths = compressor, maths

    def mask(self, rank: Tensor, w_NI: Tensor, turns: Tensor, g: Group, keys: Keys) -> Tensor:
        """The group's mask with the entries that were not chosen hidden, too: [S, L, 1, K]."""
        if g.rows is not None:
            rank, w_NI, turns = (x.index_select(0, g.rows) for x in (rank, w_NI, turns))
        s, t = g.num_sequences, keys.entries
        q = self._maths.norm_rotate(self.wq_b(rank), None, turns, self.heads, norm=False)
        assert keys.index_rows is not None and keys.hidden is not None
        index = self.compressor.index_keys.index_select(0, keys.index_rows).view(s, t, -1).float()
        each = torch.bmm(q.view(s, -1, self.dim), index.transpose(1, 2)).relu_()
        w = w_NI.float()[:, None] * (self.dim * self.heads) ** -0.5
        scores_SLT = torch.bmm(w, each.view(-1, self.heads, t)).view(s, g.length, t)
        chosen = best(scores_SLT.masked_fill_(keys.hidden, -torch.inf), self.topk)
        shape = (s, g.length, 1, keys.width)
        base = keys.mask if keys.mask is not None else scores_SLT.new_zeros(1)
        mask = base.expand(shape).clone()
        entries = mask[:, :, 0, keys.first_entry : keys.first_entry + t]
        entries.masked_fill_(chosen.logical_not_(), -torch.inf)
        return mask


def best(scores: Tensor, k: int) -> Tensor:
    """Which of the last axis are among its k largest; of equal ones the first are taken.

    `torch.topk` promises no order among equals, and its choice changes with the row's length.
    """
    least = scores.topk(k, -1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))
