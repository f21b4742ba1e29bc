"""The Llama family as a ragged decoder: Llama, SmolLM2/3, Mistral, Qwen2, Qwen3.

One pass takes N flattened tokens of any number of sequences (see `target.py`). `Decoder.forward` is
the whole model on one screen; two subclasses fill in how a layer is computed:

* `TorchDecoder` (here): PyTorch operations in fp32 or bf16, on a CPU or a GPU. Rows agree with
one-row
  passes to floating-point rounding, not to the bit, because matrix kernels depend on the row count.
  The CUDA device is the same code but has not been run on one by this project yet.
* `Int8Decoder` (`int8.py`): integer kernels on a CPU, equal to the bit.

Shape suffixes: N tokens of the pass, M rows with logits, D hidden size, V vocabulary, H query
heads, G key/value heads, E head dimension, I inner size of the MLP, T positions of a slot, R = E /
2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.config import DecoderConfig
from dspark.models.rope import inverse_frequencies
from dspark.models.tables import lazy_zeros
from dspark.models.target import Batch, Linear, TargetOutput
from dspark.models.weights import WeightSource


class Decoder(ABC):
    """A decoder with position-addressed key/value slots; fulfils `target.Target`."""

    def __init__(
        self, config: DecoderConfig, *, num_slots: int, max_context: int, device: torch.device
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.num_slots = num_slots
        self.max_context = max_context
        self.device = device
        inv_freq_R, factor = inverse_frequencies(config.rope, config.head_dim)
        angles_TR = torch.outer(torch.arange(max_context, dtype=torch.float32), inv_freq_R)
        self.cos_TR = (angles_TR.cos() * factor).to(device)
        self.sin_TR = (angles_TR.sin() * factor).to(device)

    @torch.inference_mode()
    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        """One pass; see `target.Target.forward`."""
        x_ND = self.embed(batch.tokens)
        self.begin_pass(batch, x_ND)
        # The int8 layers update x in place.
        kept = {-1: x_ND.float().clone()} if -1 in feature_layers else {}
        keep = sorted({*feature_layers} - {-1})
        x_ND, found = self.layers(x_ND, keep)
        kept |= zip(keep, found, strict=True)
        logits_MV = self.head(x_ND[batch.logit_rows])
        features = torch.cat([kept[i] for i in feature_layers], -1) if feature_layers else None
        return TargetOutput(logits_MV, features)

    def reuse(self, source: int, slot: int, length: int) -> bool:
        """See `target.Target.reuse`; every row of a slot stays until it is overwritten."""
        if source != slot:
            self.copy_rows(source, slot, length)
        return True

    @abstractmethod
    def copy_rows(self, source: int, slot: int, length: int) -> None:
        """Copy the first `length` keys and values of all layers from one slot to another."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, D]."""

    @abstractmethod
    def output_head(self, ids: Tensor | None = None) -> Linear:
        """See `target.Target.output_head`."""

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `target.Target.linear`."""

    @abstractmethod
    def tables(self) -> tuple[Tensor, Tensor]:
        """Embedding and output matrix [V, D] in floating point; one tensor if they are tied."""

    @abstractmethod
    def begin_pass(self, batch: Batch, x_ND: Tensor) -> None:
        """Prepare what all layers of this pass share: rotations, masks, scratch."""

    @abstractmethod
    def layers(self, x_ND: Tensor, keep: Sequence[int]) -> tuple[Tensor, Sequence[Tensor]]:
        """All decoder layers, which write the keys and values of the rows: what comes out [N, D],
        and what comes out of each layer of `keep`, [N, D] fp32."""

    @abstractmethod
    def head(self, x_MD: Tensor) -> Tensor:
        """Final norm and output head: [M, D] -> [M, V] fp32."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer; q, k, v and gate, up are fused along their outputs."""

    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class TorchDecoder(Decoder):
    """The decoder in PyTorch operations, fp32 or bf16."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        num_slots: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        super().__init__(config, num_slots=num_slots, max_context=max_context, device=device)

        def get(*names: str) -> Tensor:
            parts = [weights.tensor(n).to(device=device, dtype=dtype) for n in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self.dtype = dtype
        self.embed_VD = get("model.embed_tokens.weight")
        self.head_VD = self.embed_VD if config.tie_embeddings else get("lm_head.weight")
        self.norm_D = get("model.norm.weight")
        self.weights: list[LayerWeights] = []
        for i in range(config.num_layers):
            p = f"model.layers.{i}."
            qkv = [f"{p}self_attn.{x}_proj." for x in "qkv"]
            gate_up = [f"{p}mlp.{x}_proj." for x in ("gate", "up")]
            self.weights.append(
                LayerWeights(
                    qkv=get(*(n + "weight" for n in qkv)),
                    qkv_bias=get(*(n + "bias" for n in qkv)) if config.qkv_bias else None,
                    o=get(p + "self_attn.o_proj.weight"),
                    o_bias=get(p + "self_attn.o_proj.bias") if config.o_bias else None,
                    gate_up=get(*(n + "weight" for n in gate_up)),
                    gate_up_bias=get(*(n + "bias" for n in gate_up)) if config.mlp_bias else None,
                    down=get(p + "mlp.down_proj.weight"),
                    down_bias=get(p + "mlp.down_proj.bias") if config.mlp_bias else None,
                    attn_norm=get(p + "input_layernorm.weight"),
                    mlp_norm=get(p + "post_attention_layernorm.weight"),
                    q_norm=get(p + "self_attn.q_norm.weight") if config.qk_norm else None,
                    k_norm=get(p + "self_attn.k_norm.weight") if config.qk_norm else None,
                )
            )
        # Keys and values of all layers; zeros, because a masked NaN stays a NaN.
        shape = (config.num_layers, 2, num_slots, max_context, config.num_kv_heads, config.head_dim)
        words = lazy_zeros(shape, np.float32 if dtype == torch.float32 else np.int16)
        self.kv = torch.from_numpy(words).view(dtype).to(device)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed_VD)

    def output_head(self, ids: Tensor | None = None) -> Linear:
        return self.linear(self.head_VD if ids is None else self.head_VD[ids])

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        w = weight.to(device=self.device, dtype=self.dtype)
        b = None if bias is None else bias.to(device=self.device, dtype=self.dtype)
        return lambda x: F.linear(x.to(w.dtype), w, b)

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.embed_VD, self.head_VD

    def begin_pass(self, batch: Batch, x_ND: Tensor) -> None:
        self._batch = batch
        self._cos_N1R = self.cos_TR[batch.positions][:, None].to(self.dtype)
        self._sin_N1R = self.sin_TR[batch.positions][:, None].to(self.dtype)
        # Per sequence: rows lo:hi, its slot, the keys it may read, and the mask for each window.
        self._spans: list[tuple[int, int, int, int, dict[int | None, Tensor]]] = []
        for lo, hi in zip(batch.cu_lens, batch.cu_lens[1:], strict=False):
            if lo == hi:
                continue
            rows = batch.positions[lo:hi, None]
            end = int(batch.positions[hi - 1]) + 1
            keys = torch.arange(end, device=self.device)[None]
            masks: dict[int | None, Tensor] = {}
            for window in set(self.config.windows):
                mask = keys <= rows
                masks[window] = mask if window is None else mask & (keys > rows - window)
            self._spans.append((lo, hi, int(batch.slots[lo]), end, masks))

    def layers(self, x_ND: Tensor, keep: Sequence[int]) -> tuple[Tensor, Sequence[Tensor]]:
        kept = []
        for i in range(self.config.num_layers):
            x_ND = self._layer(i, x_ND)
            if i in keep:
                kept.append(x_ND.float())
        return x_ND, kept

    def _layer(self, i: int, x_ND: Tensor) -> Tensor:
        c, w = self.config, self.weights[i]
        qkv = F.linear(self._norm(x_ND, w.attn_norm), w.qkv, w.qkv_bias)
        q, k, v = torch.split(
            qkv, [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)], -1
        )
        q_NHE = q.reshape(-1, c.num_heads, c.head_dim)
        k_NGE = k.reshape(-1, c.num_kv_heads, c.head_dim)
        v_NGE = v.reshape(-1, c.num_kv_heads, c.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            q_NHE, k_NGE = self._norm(q_NHE, w.q_norm), self._norm(k_NGE, w.k_norm)
        if c.rope_layers[i]:
            q_NHE, k_NGE = self._rotate(q_NHE), self._rotate(k_NGE)
        attn = self._attention(i, q_NHE, k_NGE, v_NGE)
        x_ND = x_ND + F.linear(attn, w.o, w.o_bias)
        gate_NI, up_NI = F.linear(self._norm(x_ND, w.mlp_norm), w.gate_up, w.gate_up_bias).chunk(
            2, -1
        )
        return x_ND + F.linear(F.silu(gate_NI) * up_NI, w.down, w.down_bias)

    def copy_rows(self, source: int, slot: int, length: int) -> None:
        self.kv[:, :, slot, :length] = self.kv[:, :, source, :length]

    def head(self, x_MD: Tensor) -> Tensor:
        return F.linear(self._norm(x_MD, self.norm_D), self.head_VD).float()

    def _attention(self, i: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
        """Write the rows' keys and values, then attend sequence by sequence."""
        keys, values = self.kv[i]  # [S, T, G, E] each
        where = (self._batch.slots, self._batch.positions)
        keys[where], values[where] = k_NGE, v_NGE
        out = torch.empty_like(q_NHE)
        for lo, hi, slot, end, masks in self._spans:
            out[lo:hi] = F.scaled_dot_product_attention(
                q_NHE[lo:hi].transpose(0, 1)[None],
                keys[slot, :end].transpose(0, 1)[None],
                values[slot, :end].transpose(0, 1)[None],
                attn_mask=masks[self.config.windows[i]],
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return y.to(x.dtype) * weight

    def _rotate(self, x_NHE: Tensor) -> Tensor:
        a, b = x_NHE.chunk(2, -1)
        cos, sin = self._cos_N1R, self._sin_N1R
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
