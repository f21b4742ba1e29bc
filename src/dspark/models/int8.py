"""The decoder on integer kernels (W8A8), equal to the bit whatever shares the pass.

Weights stay in the blocks they were quantised in: a GGUF file's 4- or 8-bit blocks exactly as
stored, floating-point weights rounded to 8 bits with one scale per 32 columns. Activations are
rounded to 8 bits, one scale per 32 columns of a row. Between the products everything is fp32.
`native/kernels.c` says why no row depends on its neighbours; `tests/models/test_int8.py` compares
the bits.

Runs on a CPU only. Sizes must be multiples of 32 (hidden, inner, heads x head dimension).

Shape suffixes as in `decoder.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.kernel_stack import KernelStack, LayerSizes
from dspark.models.native import library
from dspark.models.target import Batch, Linear
from dspark.models.weights import BLOCK, QuantBlocks, WeightSource


def quantise(w: Tensor) -> QuantBlocks:
    """Round a matrix [O, I] to 8 bits with one fp16-representable scale per 32 columns."""
    blocks = w.float().numpy().reshape(w.shape[0], -1, BLOCK)
    scale = (np.abs(blocks).max(-1) / 127).astype(np.float16).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    values = np.clip(np.rint(blocks * inverse[..., None]), -127, 127).astype(np.int8)
    return QuantBlocks(8, values.reshape(w.shape), scale, None)


SHRINK = (1.0, 0.95, 0.9, 0.85)
"""Ranges tried for a 4-bit block, as shares of its own: cutting an outlier may cost less."""


def quantise4(w: Tensor) -> QuantBlocks:
    """Round a matrix [O, I] to 4 bits with a scale and a minimum per 32 columns: of a few ranges
    the one with the least squared error. For weights that need not be exact: a drafter's."""
    blocks = w.float().numpy().reshape(w.shape[0], -1, BLOCK)
    middle = (blocks.max(-1) + blocks.min(-1)) / 2
    half = (blocks.max(-1) - blocks.min(-1)) / 2
    least = np.full(middle.shape, np.inf, np.float32)
    values = np.zeros(blocks.shape, np.uint8)
    scale, minimum = (np.zeros(middle.shape, np.float32) for _ in range(2))
    for share in SHRINK:
        low = (middle - share * half).astype(np.float16).astype(np.float32)
        step = (2 * share * half / 15).astype(np.float16).astype(np.float32)
        inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
        tried = np.clip(np.rint((blocks - low[..., None]) * inverse[..., None]), 0, 15)
        error = ((tried * step[..., None] + low[..., None] - blocks) ** 2).sum(-1)
        better = error < least
        least = np.where(better, error, least)
        values = np.where(better[..., None], tried.astype(np.uint8), values)
        scale, minimum = np.where(better, step, scale), np.where(better, low, minimum)
    return QuantBlocks(4, values.reshape(w.shape), scale, minimum)


def gather(weights: WeightSource, names: list[str]) -> QuantBlocks:
    """The matrices one above the other, as stored if all are in the same kind of blocks."""
    parts = [weights.blocks(n) for n in names]
    if len({p and p.bits for p in parts}) != 1 or parts[0] is None:
        return quantise(torch.cat([weights.tensor(n).float() for n in names]))
    kept = [p for p in parts if p is not None]
    if len(kept) == 1:
        return kept[0]
    minima = [p.minimum for p in kept if p.minimum is not None]
    return QuantBlocks(
        kept[0].bits,
        np.concatenate([p.values for p in kept]),
        np.concatenate([p.scale for p in kept]),
        np.concatenate(minima) if minima else None,
    )


class PackedLinear:
    """A matrix [O, I] in the layout of the kernels, with an optional bias [O]."""

    def __init__(self, blocks: QuantBlocks, bias: Tensor | None = None) -> None:
        lib = library.load()
        out, in_ = blocks.values.shape
        tile_bytes = (256 + 16 if blocks.bits == 8 else 128 + 32) * (in_ // BLOCK)
        self.data = torch.empty(-(-out // 8) * tile_bytes, dtype=torch.uint8)
        self.bias = None if bias is None else bias.float().contiguous()
        self.out_features, self.in_features = out, in_
        self.bits: Literal[4, 8] = blocks.bits
        values = np.ascontiguousarray(blocks.values).view(np.uint8)
        scale = np.ascontiguousarray(blocks.scale, np.float16)
        minimum = None
        if blocks.minimum is not None:
            minimum = np.ascontiguousarray(blocks.minimum, np.float16)
        u16 = ctypes.POINTER(ctypes.c_uint16)
        lib.dspark_pack(
            values.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)),
            scale.ctypes.data_as(u16),
            None if minimum is None else minimum.ctypes.data_as(u16),
            out,
            in_,
            blocks.bits,
            self.data.data_ptr(),
        )
        self.struct = library.Linear(
            self.data.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            out,
            in_,
            blocks.bits,
            0,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, I] fp32 -> [N, O] fp32, row-exact."""
        n, blocks = x.shape[0], self.in_features // BLOCK
        x = x.contiguous()
        y = torch.empty((n, self.out_features))
        # Room for x in 8 bits, for its scales and for its sums, in one piece.
        room = torch.empty(n * (8 * blocks + self.in_features), dtype=torch.uint8)
        at = room.data_ptr()
        library.load().dspark_linear(
            self.struct, x.data_ptr(), n, y.data_ptr(), at + 8 * n * blocks, at,
            at + 4 * n * blocks, torch.get_num_threads(),
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [N] as fp32 [N, I]: the embedding of a model whose head is tied to it."""
        out = torch.empty((ids.shape[0], self.in_features))
        ids = ids.contiguous()
        library.load().dspark_rows(self.struct, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out


def unsupported(config: LayerSizes) -> str | None:
    """Why the kernels cannot run this model, or None if they can."""
    c = config
    for name, size, unit in (
        ("hidden_size", c.hidden_size, BLOCK),
        ("intermediate_size", c.intermediate_size, BLOCK),
        ("num_heads * head_dim", c.num_heads * c.head_dim, BLOCK),
        ("head_dim", c.head_dim, 8),
    ):
        if size % unit:
            return f"{name} is {size}, the kernels need a multiple of {unit}"
    return None


class Int8Decoder(Decoder):
    """The decoder on the kernels of `native/kernels.c`."""

    def __init__(
        self, config: DecoderConfig, weights: WeightSource, *, num_slots: int, max_context: int
    ) -> None:
        c = config
        problem = unsupported(c)
        if problem is not None:
            raise ConfigError(f"dtype int8: {problem}: take --dtype fp32 or bf16")
        super().__init__(
            config, num_slots=num_slots, max_context=max_context, device=torch.device("cpu")
        )
        self._lib = library.load()
        self._kept: list[object] = []  # what the C structures point to

        def pack(names: list[str], bias: bool) -> PackedLinear:
            b = torch.cat([weights.tensor(n + ".bias").float() for n in names]) if bias else None
            packed = PackedLinear(gather(weights, [n + ".weight" for n in names]), b)
            self._kept.append(packed)
            return packed

        def vector(name: str) -> int:
            t = weights.tensor(name).float().contiguous()
            self._kept.append(t)
            return t.data_ptr()

        self._head = pack(["model.embed_tokens" if c.tie_embeddings else "lm_head"], bias=False)
        self._embed = self._head if c.tie_embeddings else pack(["model.embed_tokens"], bias=False)
        self._norm = weights.tensor("model.norm.weight").float().contiguous()
        layers = []
        for i in range(c.num_layers):
            p = f"model.layers.{i}."
            layers.append(
                library.Layer(
                    pack([f"{p}self_attn.{x}_proj" for x in "qkv"], c.qkv_bias).struct,
                    pack([f"{p}self_attn.o_proj"], c.o_bias).struct,
                    pack([f"{p}mlp.gate_proj", f"{p}mlp.up_proj"], c.mlp_bias).struct,
                    pack([f"{p}mlp.down_proj"], c.mlp_bias).struct,
                    vector(p + "input_layernorm.weight"),
                    vector(p + "post_attention_layernorm.weight"),
                    vector(p + "self_attn.q_norm.weight") if c.qk_norm else 0,
                    vector(p + "self_attn.k_norm.weight") if c.qk_norm else 0,
                    c.windows[i] or 0,
                    int(c.rope_layers[i]),
                )
            )
        self.bits = layers[0].qkv.bits
        """Of the layers' weights: 4 in 4-bit GGUF files, else 8."""
        self._stack = KernelStack(c, layers, num_slots, max_context)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embed.rows(tokens)

    def output_head(self, ids: Tensor | None = None) -> Linear:
        return self._head if ids is None else self.pack(self._head.rows(ids))

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Rounded as `pack` does where the kernels can read the matrix, fp32 where they cannot."""
        if weight.shape[1] % BLOCK:
            return lambda x: torch.nn.functional.linear(x, weight, bias)
        return self.pack(weight, bias)

    def tables(self) -> tuple[Tensor, Tensor]:
        ids = torch.arange(self.vocab_size)
        embed_VD = self._embed.rows(ids)
        return embed_VD, embed_VD if self._head is self._embed else self._head.rows(ids)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """A drafter's matrix, rounded to as many bits as this target's layers have."""
        return PackedLinear((quantise4 if self.bits == 4 else quantise)(weight), bias)

    def begin_pass(self, batch: Batch, x_ND: Tensor) -> None:
        at = batch.positions
        self._stack.begin(at, batch.slots, at + 1, self.cos_TR[at], self.sin_TR[at], x_ND)

    def layers(self, x_ND: Tensor, keep: Sequence[int]) -> tuple[Tensor, Sequence[Tensor]]:
        return x_ND, self._stack.run(keep).unbind()

    def copy_rows(self, source: int, slot: int, length: int) -> None:
        self._stack.copy(source, slot, length)

    def head(self, x_MD: Tensor) -> Tensor:
        normed = torch.empty_like(x_MD)
        x_MD = x_MD.contiguous()
        self._lib.dspark_rms_norm(
            x_MD.data_ptr(), self._norm.data_ptr(), x_MD.shape[0], x_MD.shape[1],
            self.config.rms_norm_eps, normed.data_ptr(),
        )  # fmt: skip
        return self._head(normed)
