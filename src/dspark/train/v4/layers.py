"""One block of V4 with gradients: what `models/deepseek_v4/` computes row by row, over documents.

A batch is B documents of L tokens each, padded on the right, flattened to N = B * L rows wherever
rows are independent. Nothing looks ahead, so padding changes no real row. Attention goes in chunks
of queries: a chunk sees the `window` tokens in front of each of its own, and every compressed entry
that is closed, in one product.

The indexer learns as in DeepSeek's sparse models: its scores are pulled towards the weights that
the main attention gives to the entries, by a term of its own (`Documents.index_losses`) that
reaches nothing but the indexer; the choice itself is hard, here as in serving.

Parameters have the official names, but for the routed experts (`experts.py`).

Shape suffixes: B documents, L tokens of each, N = B * L, S streams, D hidden size, H heads, E head
dimension, T entries, W = series * E, I index heads, J index dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models.deepseek_v4.attention import best
from dspark.models.deepseek_v4.config import CSA_RATIO, V4Config, span
from dspark.models.rope import inverse_frequencies
from dspark.train.v4.experts import MoE
from dspark.train.v4.operations import attend, leave, sinkhorn

CHUNK = 32
"""Queries that share a product; documents are padded to a multiple."""


def turns(config: V4Config, ratio: int, dim: int, positions: Tensor) -> Tensor:
    """[.., dim / 2] complex rotations of whole heads, whose first dimensions rest."""
    rope = config.compress_rope if ratio else config.rope
    freq, factor = inverse_frequencies(rope, config.rope_dim)
    angles = positions[..., None].float() * freq
    rotating = torch.polar(torch.full_like(angles, factor), angles)
    rest = rotating.new_ones(*positions.shape, dim // 2 - len(freq))
    return torch.cat([rest, rotating], -1)


def rotate(x: Tensor, by: Tensor) -> Tensor:
    """Neighbouring pairs of the last dimension turned by complex numbers: a new tensor."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * by).flatten(-2)


class Documents:
    """B documents of L tokens and all that layers share over them."""

    def __init__(self, config: V4Config, tokens_BL: Tensor, lengths_B: Tensor) -> None:
        """L must be a multiple of `CHUNK`; `lengths` without the padding."""
        self.config = config
        self.num, self.length = tokens_BL.shape
        self.tokens_N = tokens_BL.reshape(-1)
        self.positions_L = torch.arange(self.length)
        self.real_N = (self.positions_L < lengths_B[:, None]).reshape(-1)
        self.index_losses: list[Tensor] = []
        self._turns: dict[tuple[bool, int], Tensor] = {}
        self._masks: dict[int, Tensor] = {}

    def turns(self, ratio: int, dim: int) -> Tensor:
        """[L, dim / 2] of the tokens in layers of a ratio."""
        key = (ratio > 0, dim)
        if key not in self._turns:
            self._turns[key] = turns(self.config, ratio, dim, self.positions_L)
        return self._turns[key]

    def mask(self, ratio: int) -> Tensor:
        """[L / C, C, window + C + T]: which keys a query of a chunk sees; 0 or minus infinity."""
        if ratio not in self._masks:
            window, query = self.config.window, self.positions_L.view(-1, CHUNK, 1)
            key = query[:, :1] - window + torch.arange(window + CHUNK)
            seen = (key >= 0) & (key <= query) & (key > query - window)
            if ratio:
                entries = torch.arange(self.length // ratio)
                seen = torch.cat([seen, entries < (query + 1) // ratio], -1)
            self._masks[ratio] = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return self._masks[ratio]


class Norm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class Compressor(nn.Module):
    """Windows of tokens pooled into entries; CSA windows overlap (two series)."""

    def __init__(self, config: V4Config, ratio: int, dim: int) -> None:
        super().__init__()
        self.ratio, self.dim, self.series = ratio, dim, span(ratio) // ratio
        size = self.series * dim
        self.wkv, self.wgate = linear(size, config.hidden_size), linear(size, config.hidden_size)
        self.ape = nn.Parameter(torch.zeros(ratio, size))
        self.norm = Norm(dim, config.norm_eps)

    def forward(self, value_NW: Tensor, gate_NW: Tensor, docs: Documents) -> Tensor:
        """What `wkv` and `wgate` say of all tokens -> entries [B, T, dim], normed and rotated."""
        entries = docs.length // self.ratio
        shape = (docs.num, docs.length, self.series, self.dim)
        windows = (docs.num, entries, self.ratio, self.series, self.dim)
        closed = entries * self.ratio
        value = value_NW.view(shape)[:, :closed].reshape(windows)
        gate = gate_NW.view(shape)[:, :closed].reshape(windows)
        gate = gate + self.ape.view(self.ratio, self.series, self.dim)
        own_value, own_gate = value[:, :, :, -1], gate[:, :, :, -1]
        if self.series == 2:
            # The first series of a window flows into the entry behind it; before the first window
            # there is none, and a gate that lets nothing through.
            last = (0, 0, 0, 0, 1, 0)
            before = F.pad(value[:, :-1, :, 0], last), F.pad(gate[:, :-1, :, 0], last, value=-1e9)
            own_value = torch.cat([before[0], own_value], 2)
            own_gate = torch.cat([before[1], own_gate], 2)
        entry_BTE = self.norm((own_gate.softmax(2) * own_value).sum(2))
        first = torch.arange(entries) * self.ratio
        return rotate(entry_BTE, turns(docs.config, self.ratio, self.dim, first))


class Indexer(nn.Module):
    """Chooses the entries that a query of a CSA layer reads."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        c = config
        self.heads, self.dim, self.top_k = c.index_heads, c.index_dim, c.index_topk
        self.wq_b = linear(c.index_heads * c.index_dim, c.q_rank)
        self.weights_proj = linear(c.index_heads, c.hidden_size)
        self.compressor = Compressor(c, CSA_RATIO, c.index_dim)

    def forward(self, x_ND: Tensor, rank_NR: Tensor, docs: Documents) -> Tensor:
        """Scores [B, L, T] of all entries, closed or not. Nothing learns through them but this."""
        o = self.compressor
        sizes = [o.wkv.out_features, o.wgate.out_features, self.heads]
        weight = torch.cat([o.wkv.weight, o.wgate.weight, self.weights_proj.weight])
        value, gate, w_NI = torch.split(F.linear(x_ND.detach(), weight), sizes, -1)
        keys_BTJ = o(value, gate, docs)
        q = self.wq_b(rank_NR.detach()).view(docs.num, docs.length, self.heads, self.dim)
        q = rotate(q, docs.turns(CSA_RATIO, self.dim)[:, None])
        each = torch.bmm(q.view(docs.num, -1, self.dim), keys_BTJ.transpose(1, 2)).relu()
        w = w_NI.view(-1, 1, self.heads) * (self.dim * self.heads) ** -0.5
        scores = torch.bmm(w, each.view(len(w), self.heads, -1))
        return scores.view(docs.num, docs.length, -1)


class Attention(nn.Module):
    """Attention of one block; drafters use its parts over keys of their own."""

    def __init__(self, config: V4Config, ratio: int) -> None:
        super().__init__()
        c = config
        self.config, self.ratio = c, ratio
        heads, ranks = c.num_heads * c.head_dim, c.o_groups * c.o_rank
        self.wq_a, self.wq_b = linear(c.q_rank, c.hidden_size), linear(heads, c.q_rank)
        self.wkv = linear(c.head_dim, c.hidden_size)
        self.wo_a = linear(ranks, heads // c.o_groups)
        self.wo_b = linear(c.hidden_size, ranks)
        self.q_norm, self.kv_norm = Norm(c.q_rank, c.norm_eps), Norm(c.head_dim, c.norm_eps)
        self.attn_sink = nn.Parameter(torch.zeros(c.num_heads))
        self.compressor = Compressor(c, ratio, c.head_dim) if ratio else None
        self.indexer = Indexer(c) if ratio == CSA_RATIO else None

    def queries(self, rank_NR: Tensor, by: Tensor) -> Tensor:
        """[.., H, E], normed and scaled, turned by [.., E / 2]; leading axes are those of `by`."""
        c = self.config
        q = self.wq_b(rank_NR).view(*by.shape[:-1], c.num_heads, c.head_dim)
        q = F.rms_norm(q, (c.head_dim,), None, c.norm_eps) * c.head_dim**-0.5
        return rotate(q, by[..., None, :])

    def keys(self, kv: Tensor, by: Tensor) -> Tensor:
        """What `wkv` says -> keys of the same shape, normed and turned."""
        return rotate(self.kv_norm(kv), by)

    def output(self, out: Tensor, by: Tensor) -> Tensor:
        """What the heads read [.., H, E] -> [N, D], turned back first."""
        c = self.config
        flat = rotate(out, by.conj()[..., None, :]).reshape(-1, c.o_groups, self.wo_a.in_features)
        blocks = self.wo_a.weight.view(c.o_groups, c.o_rank, -1).transpose(1, 2)
        ranks = torch.bmm(flat.transpose(0, 1), blocks).transpose(0, 1).flatten(1)
        return cast(Tensor, self.wo_b(ranks))

    def forward(self, x_ND: Tensor, docs: Documents) -> Tensor:
        """All documents, every token a query: [N, D] -> [N, D]."""
        c, o = self.config, self.compressor
        matrices = [self.wq_a, self.wkv] + ([] if o is None else [o.wkv, o.wgate])
        weight = torch.cat([m.weight for m in matrices])
        sizes = [m.out_features for m in matrices]
        rank, kv, *rest = torch.split(F.linear(x_ND, weight), sizes, -1)
        rank = self.q_norm(rank)
        by = docs.turns(self.ratio, c.head_dim).expand(docs.num, -1, -1)
        keys_BLE = self.keys(kv.view(docs.num, docs.length, -1), by)
        chunks = docs.length // CHUNK
        # Window keys of every chunk, and behind them all entries.
        padded = F.pad(keys_BLE, (0, 0, c.window, 0))
        keys = padded.unfold(1, c.window + CHUNK, CHUNK).transpose(2, 3)
        mask = docs.mask(self.ratio).expand(docs.num, -1, -1, -1)
        scores: Tensor | None = None
        if o is not None:
            entries = o(rest[0], rest[1], docs)
            keys = torch.cat([keys, entries[:, None].expand(-1, chunks, -1, -1)], 2)
            if self.indexer is not None:
                scores, mask = self._choose(self.indexer, x_ND, rank, docs, mask)
        q = self.queries(rank, by).view(docs.num * chunks, -1, c.head_dim)
        out, p = attend(q, keys.flatten(0, 1), mask.flatten(0, 1), self.attn_sink)
        if scores is not None and torch.is_grad_enabled():
            self._teach(scores, p, docs)
        return self.output(out.view(*by.shape[:-1], c.num_heads, c.head_dim), by)

    def _choose(
        self, indexer: Indexer, x_ND: Tensor, rank: Tensor, docs: Documents, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores [B, L, T], minus infinity where an entry is not read, and the mask that hides
        those."""
        first = self.config.window + CHUNK
        closed = mask[..., first:].flatten(1, 2)
        scores = indexer(x_ND, rank, docs) + closed
        if scores.shape[-1] > indexer.top_k:
            out = ~best(scores.detach(), indexer.top_k)
            scores = scores.masked_fill(out, -torch.inf)
            mask = mask.clone()
            mask[..., first:].masked_fill_(out.view_as(mask[..., first:]), -torch.inf)
        return scores, mask

    def _teach(self, scores: Tensor, p: Tensor, docs: Documents) -> None:
        """The indexer's loss: cross-entropy from the attention's weights on the entries it read,
        all heads together, over real tokens that had a choice."""
        heads, first = self.config.num_heads, self.config.window + CHUNK
        p_NT = p.view(docs.num * docs.length, heads, -1)[:, :, first:].sum(1)
        scores_NT = scores.flatten(0, 1)
        rows = (docs.real_N & ((scores_NT > -torch.inf).sum(-1) > 1)).nonzero()[:, 0]
        if len(rows):
            p_MT, scores_MT = p_NT[rows], scores_NT[rows]
            p_MT = p_MT / p_MT.sum(-1, keepdim=True).clamp(min=1e-20)
            log_q = scores_MT.log_softmax(-1).masked_fill(scores_MT == -torch.inf, 0.0)
            docs.index_losses.append(-(p_MT * log_q).sum(-1).mean())


class Block(nn.Module):
    """Attention, then experts, each between mixings of the streams."""

    def __init__(self, config: V4Config, *, ratio: int, hashed: bool) -> None:
        super().__init__()
        c = self.config = config
        s, d = c.streams, c.hidden_size
        for part in ("attn", "ffn"):
            fn, base = torch.empty((s + 2) * s, s * d), torch.zeros((s + 2) * s)
            self.register_parameter(f"hc_{part}_fn", nn.Parameter(fn))
            self.register_parameter(f"hc_{part}_base", nn.Parameter(base))
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.ones(3)))
        self.attn_norm, self.ffn_norm = Norm(d, c.norm_eps), Norm(d, c.norm_eps)
        self.attn, self.ffn = Attention(c, ratio), MoE(c, hashed=hashed)

    def forward(
        self,
        x_NSD: Tensor,
        tokens_N: Tensor,
        attention: Callable[[Tensor], Tensor],
        real_N: Tensor | None = None,
    ) -> Tensor:
        """Streams in, streams out; `attention` maps the normed input [N, D] to [N, D]."""
        x_ND, post, comb = self._enter(x_NSD, "attn")
        x_NSD = leave(x_NSD, attention(self.attn_norm(x_ND)), post, comb)
        x_ND, post, comb = self._enter(x_NSD, "ffn")
        return leave(x_NSD, self.ffn(self.ffn_norm(x_ND), tokens_N, real_N), post, comb)

    def enter_attention(self, x_NSD: Tensor) -> Tensor:
        """What attention reads of the streams: [N, D], normed."""
        return cast(Tensor, self.attn_norm(self._enter(x_NSD, "attn")[0]))

    def _enter(self, x_NSD: Tensor, part: str) -> tuple[Tensor, Tensor, Tensor]:
        c, s = self.config, self.config.streams
        fn, base, scale = (getattr(self, f"hc_{part}_{n}") for n in ("fn", "base", "scale"))
        mix = mixing(x_NSD, fn, c.norm_eps)
        sizes = torch.tensor([s, s, s * s])
        mix = torch.addcmul(base, mix, scale.repeat_interleave(sizes, output_size=len(base)))
        gates = mix[:, : 2 * s].sigmoid()
        comb = sinkhorn(mix[:, 2 * s :].T.reshape(s, s, -1), c.sinkhorn_iterations, c.hc_eps)
        x_ND = torch.bmm(gates[:, None, :s] + c.hc_eps, x_NSD)[:, 0]
        return x_ND, 2 * gates[:, s:], comb.permute(2, 0, 1).contiguous()


def mixing(x_NSD: Tensor, fn: Tensor, eps: float) -> Tensor:
    """All streams of a token, normed as one vector, times fn [M, S * D]: [N, M]."""
    flat = x_NSD.flatten(1)
    size = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
    return F.linear(flat, fn) * torch.rsqrt(size.square() / flat.shape[1] + eps)
