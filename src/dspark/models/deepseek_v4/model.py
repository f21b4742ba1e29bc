"""The DeepSeek-V4 tower; fulfils `target.Target`.

`_pass` is the whole model: the embedding is copied into four residual streams, every layer mixes
them into an input for attention and for the experts and writes the outputs back (`hyper.py`), and
at the end the streams are gated into one vector, normed and multiplied with the output matrix. The
architecture is described in DeepSeek's V4 report and in the reference code beside the checkpoints;
this is an independent implementation of it for many sequences at once, with state that never needs
to be rolled back (`passes.py`). Differences from that reference: keys and index vectors are not
rounded to fp8 and fp4, and residual streams are fp32 in every dtype.

Weights are named as in the official checkpoints: `embed.weight`, `head.weight`, `norm.weight`,
`hc_head_{fn,base,scale}`, and for each layer `layers.N.`
`hc_{attn,ffn}_{fn,base,scale}`, `{attn,ffn}_norm.weight`,
`attn.{wq_a,wq_b,wkv,wo_a,wo_b,q_norm,kv_norm}.weight`, `attn.attn_sink`,
`attn.compressor.{wkv.weight,wgate.weight,ape,norm.weight}`,
`attn.indexer.{wq_b.weight,weights_proj.weight}`, `attn.indexer.compressor.*`,
`ffn.gate.{weight,bias,tid2eid}`, `ffn.shared_experts.w{1,2,3}.weight`,
`ffn.experts.E.w{1,2,3}.weight`.

Shape suffixes: N tokens of the pass, M rows with logits, D hidden size, S streams, V vocabulary.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import ResourceError
from dspark.models.deepseek_v4.arithmetic import Arithmetic
from dspark.models.deepseek_v4.attention import Attention
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.hyper import HyperConnection, HyperHead, expand
from dspark.models.deepseek_v4.moe import MoE
from dspark.models.deepseek_v4.passes import Layout, Pass, Rotations, split
from dspark.models.target import Batch, Linear, TargetOutput
from dspark.models.weights import WeightSource

MAX_BLOCK = 512
"""Tokens of a sequence in one run through the layers, and how many of them can be taken back."""


class Layer:
    """One block: attention, then experts, each between mixings of the streams."""

    def __init__(
        self,
        config: V4Config,
        maths: Arithmetic,
        layout: Layout,
        prefix: str,
        *,
        ratio: int,
        hashed: bool,
    ) -> None:
        self.attn_mix = HyperConnection(
            config, maths, prefix + "hc_attn", prefix + "attn_norm.weight"
        )
        self.ffn_mix = HyperConnection(config, maths, prefix + "hc_ffn", prefix + "ffn_norm.weight")
        self.attention = Attention(config, maths, layout, prefix + "attn.", ratio)
        self.experts = MoE(config, maths, prefix + "ffn.", hashed=hashed)

    def __call__(self, x_NSD: Tensor, p: Pass) -> Tensor:
        x_ND, post, comb = self.attn_mix.enter(x_NSD)
        x_NSD = self.attn_mix.leave(x_NSD, self.attention(x_ND, p), post, comb)
        x_ND, post, comb = self.ffn_mix.enter(x_NSD)
        return self.ffn_mix.leave(x_NSD, self.experts(x_ND, p.tokens), post, comb)


class DeepseekV4:
    """The tower in fp32, bf16 (`torch.bfloat16`) or on integer kernels (`torch.int8`)."""

    def __init__(
        self,
        config: V4Config,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        num_slots: int,
        max_context: int,
        device: torch.device,
        max_block: int = MAX_BLOCK,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.streams_layer = config.num_layers
        """The feature layer that yields all residual streams; see `forward`."""
        self.num_slots, self.max_context = num_slots, max_context
        self.device = device
        self.maths = Arithmetic(weights, dtype, device, config.norm_eps)
        self.layout = Layout(config.window, num_slots, max_context, max_block)
        self.rotations = Rotations(config, max_context, device)
        table = config.vocab_size, config.hidden_size
        self.embed_VD = self.maths.matrix("embed.weight", *table)
        self.layers = [
            Layer(
                config,
                self.maths,
                self.layout,
                f"layers.{i}.",
                ratio=ratio,
                hashed=i < config.num_hash_layers,
            )
            for i, ratio in enumerate(config.ratios)
        ]
        self.collapse = HyperHead(config, self.maths)
        self.head = self.maths.linear("head.weight", shape=table)
        self._written = [0] * num_slots
        """One more than the highest position that each slot's sequence has written."""

    @torch.inference_mode()
    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        """One pass; see `target.Target.forward`.

        Feature layer i is the output of block i as the plain mean over the streams [N, D], -1 the
        embedding. `streams_layer` (= num_layers) is what the MTP head reads: the streams behind the
        last block as they are, [N, S * D], stream by stream.

        A sequence may have any number of tokens in a pass. It may then be continued from any
        position of the pass, but not from one that lies more than `max_block` tokens back: that
        raises ResourceError, because the ring no longer holds what came before.
        """
        if batch.num_tokens == 0:
            features = torch.zeros(0, len(feature_layers) * self.hidden_size, device=self.device)
            logits = torch.zeros(0, self.vocab_size, device=self.device)
            return TargetOutput(logits, features if feature_layers else None)
        lengths = [b - a for a, b in zip(batch.cu_lens, batch.cu_lens[1:], strict=False)]
        self._claim(batch, lengths)
        if max(lengths) <= self.layout.max_block:
            x_NSD, found = self._pass(batch, feature_layers)
            return TargetOutput(self._logits(x_NSD[batch.logit_rows]), found)
        # Which rows come first in a longer run is a matter of order alone.
        done, rows = [], []
        for part, where in split(batch, self.layout.max_block):
            done.append(self._pass(part, feature_layers))
            rows.append(torch.from_numpy(where))
        order = torch.cat(rows).argsort().to(self.device)
        x_NSD = torch.cat([x for x, _ in done])[order[batch.logit_rows]]
        kept = [f for _, f in done if f is not None]
        return TargetOutput(self._logits(x_NSD), torch.cat(kept)[order] if kept else None)

    def _pass(self, batch: Batch, feature_layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """All layers: the streams [N, S, D] behind them, and the features."""
        p = Pass(self.config, self.layout, self.rotations, batch)
        x_ND = self.embed(batch.tokens)
        kept = {-1: x_ND.float()}
        x_NSD = expand(x_ND, self.config.streams)
        for i, layer in enumerate(self.layers):
            x_NSD = layer(x_NSD, p)
            if i in feature_layers:
                kept[i] = x_NSD.mean(1)
        kept[self.streams_layer] = x_NSD.flatten(1)
        chosen = [kept[i] for i in feature_layers]
        return x_NSD, torch.cat(chosen, -1) if chosen else None

    def _logits(self, x_MSD: Tensor) -> Tensor:
        if not len(x_MSD):  # the chunk of a prompt that does not end it
            return torch.zeros(0, self.vocab_size, device=self.device)
        return self.head(self.collapse.norm(self.collapse.collapse(x_MSD))).float()

    def _claim(self, batch: Batch, lengths: list[int]) -> None:
        """Note what the pass writes; refuse a start whose past has been overwritten."""
        first = [a for a, n in zip(batch.cu_lens, lengths, strict=False) if n]
        slots = batch.slots[first].tolist()
        starts = batch.positions[first].tolist()
        for slot, start, n in zip(slots, starts, [n for n in lengths if n], strict=True):
            written = self._written[slot] if start else 0
            if written - start > self.layout.max_block:
                raise ResourceError(
                    f"slot {slot} cannot go back from {written} tokens to {start}: at most"
                    f" {self.layout.max_block} can be taken back (max_block)"
                )
            self._written[slot] = max(written, start + n)

    def reuse(self, source: int, slot: int, length: int) -> bool:
        """See `target.Target.reuse`. A slot's own rows only, and only as far back as the rings
        reach: what stands in them is never copied."""
        return source == slot and self._written[slot] - length <= self.layout.max_block

    # What a trained drafter shares with its target.

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed_VD)

    def output_head(self, ids: Tensor | None = None) -> Linear:
        if ids is None:
            return self.head
        return self.maths.map(self.maths.weights.tensor("head.weight")[ids.cpu()])

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self.maths.map(weight, bias)

    def lend(self, device: torch.device) -> DeepseekV4:
        """What drafters share with this tower on another device: the tower without its layers."""
        other = copy.copy(self)
        other.device, other.layers = device, []
        other.maths = self.maths.elsewhere(device)
        other.rotations = Rotations(self.config, self.max_context, device)
        table = self.vocab_size, self.hidden_size
        other.embed_VD = other.maths.matrix("embed.weight", *table)
        other.head = other.maths.linear("head.weight", shape=table)
        return other
