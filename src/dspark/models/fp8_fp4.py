"""The two small formats of DeepSeek-V4's weights, made floating point again.

    e4m3   fp8: sign, 4 bits of exponent, 3 of mantissa; up to 448, no infinity. One scale for each
           square of 128 x 128 weights.
    e2m1   fp4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; two in a byte, the even column in
           the low half. One scale for each 32 columns of a row.
    e8m0   what the scales are: a byte b that stands for 2^(b - 127); 255 is no number.

A scale is a power of two and shifts the exponent, so a product of weight and scale has at most four
significant bits: it is exact in fp32 and in bf16 alike (as long as its exponent is), and loading
rounds nothing. The formats are those of the Open Compute Project's specification of microscaling
(MX), v1.0; the layout is that of the official checkpoints.

The last block of a matrix whose size is no multiple of 128 (or 32) is smaller and has a scale of
its own. O rows, I columns.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.models.weights import BLOCK, QuantBlocks

FP8_BLOCK = 128
FP4_BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each code; bit 3 is the sign."""


def fp8_scale_shape(out: int, in_: int) -> tuple[int, int]:
    return -(-out // FP8_BLOCK), -(-in_ // FP8_BLOCK)


def fp4_scale_shape(out: int, in_: int) -> tuple[int, int]:
    return out, -(-in_ // FP4_BLOCK)


def from_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """weight [O, I] e4m3, scale [ceil(O / 128), ceil(I / 128)] e8m0 or fp32 -> [O, I] of `dtype`.

    A code or scale that is no number becomes NaN.
    """
    out, in_ = weight.shape
    factors = scale.float().repeat_interleave(FP8_BLOCK, dim=1)[:, :in_]
    result = torch.empty((out, in_), dtype=dtype)
    for i in range(scale.shape[0]):  # a band at a time, so that little more than the result exists
        rows = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK)
        result[rows] = weight[rows].float() * factors[i]
    return result


def from_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed [O, I / 2] int8, scale [O, ceil(I / 32)] e8m0 or fp32 -> [O, I] of `dtype`."""
    out, half = packed.shape
    pairs = _pairs().index_select(0, packed.contiguous().view(torch.uint8).flatten().int())
    factors = scale.float().repeat_interleave(FP4_BLOCK, dim=1)[:, : 2 * half]
    return pairs.view(out, 2 * half).mul_(factors).to(dtype)


def fp4_blocks(packed: Tensor, scale: Tensor) -> QuantBlocks | None:
    """The same matrix for the integer kernels, without rounding: twice an e2m1 value is a whole
    number up to 12, and its blocks are as long as theirs.

    None if the last block is not whole, or a scale is not one that the kernels' fp16 can hold.
    """
    out, half = packed.shape
    if 2 * half % BLOCK:
        return None
    halves: npt.NDArray[np.float32] = (scale.float() / 2).numpy()
    with np.errstate(over="ignore"):
        kept = halves.astype(np.float16).astype(np.float32)
    if not np.array_equal(kept, halves):
        return None
    pairs = (_pairs() * 2).to(torch.int8)
    values = pairs.index_select(0, packed.contiguous().view(torch.uint8).flatten().int())
    return QuantBlocks(8, values.view(out, 2 * half).numpy(), halves, None)


@functools.cache
def _pairs() -> Tensor:
    """[256, 2]: the two values of every byte."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])
    codes = torch.arange(256)
    return torch.stack([values[codes & 15], values[codes >> 4]], dim=1)
