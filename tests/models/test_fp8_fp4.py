"""fp8 and fp4 against values written out by hand and against a quantiser of the tests' own.

The quantiser works on bits and Python's own arithmetic: it shares no table with the code.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.models.fp8_fp4 import fp4_blocks, fp8_scale_shape, from_fp4, from_fp8


def e4m3(code: int) -> float:
    """The value of one fp8 byte, from its bits."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def e2m1(code: int) -> float:
    """The value of one fp4 code, from its bits."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def fp8(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def scales(bytes_: Tensor) -> Tensor:
    return bytes_.to(torch.uint8).view(torch.float8_e8m0fnu)


def pack(codes: Tensor) -> Tensor:
    """[O, I] codes 0..15 -> [O, I / 2] int8, the even column in the low half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)


def random_fp8(out: int, in_: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scale and the values they stand for, computed one by one."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (out, in_), generator=g)
    codes[(codes & 127) == 127] = 3
    bytes_ = torch.randint(100, 150, (-(-out // 128), -(-in_ // 128)), generator=g)
    table = torch.tensor([e4m3(c) for c in range(256)], dtype=torch.float64)
    factor = torch.tensor([e8m0(b) for b in range(256)], dtype=torch.float64)
    rows = torch.arange(out)[:, None] // 128
    columns = torch.arange(in_)[None] // 128
    return fp8(codes), scales(bytes_), table[codes] * factor[bytes_[rows, columns]]


def random_fp4(out: int, in_: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (out, in_), generator=g)
    bytes_ = torch.randint(110, 135, (out, -(-in_ // 32)), generator=g)
    table = torch.tensor([e2m1(c) for c in range(16)], dtype=torch.float64)
    factor = torch.tensor([e8m0(b) for b in range(256)], dtype=torch.float64)
    columns = torch.arange(in_) // 32
    return pack(codes), scales(bytes_), table[codes] * factor[bytes_[:, columns]]


def test_every_fp8_code() -> None:
    got = from_fp8(fp8(torch.arange(256)[None]), scales(torch.tensor([[127, 128]])))[0]
    expected = [e4m3(c) * (1 if c < 128 else 2) for c in range(256)]
    np.testing.assert_array_equal(got.numpy(), np.array(expected, np.float32))
    assert got[0b0_1111_110] == 448 and got[1] == 2.0**-9 and got[0b1_0111_000] == -2
    assert [i for i in range(256) if got[i].isnan()] == [127, 255]


def test_every_fp4_code_low_half_first() -> None:
    got = from_fp4(pack(torch.arange(16)[None]), scales(torch.tensor([[127]])))[0].tolist()
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert got == half + [-v for v in half]
    two = from_fp4(torch.tensor([[0x2F]], dtype=torch.int8), scales(torch.tensor([[128]])))
    assert two.tolist() == [[-12.0, 2.0]]


def test_every_scale() -> None:
    """Also the smallest, 2^-127, which is no normal fp32 number, and the one that is none."""
    ones = fp8(torch.full((256 * 128, 1), 0b0_0111_000))
    got = from_fp8(ones, scales(torch.arange(256)[:, None]))[::128, 0].tolist()
    assert got[:255] == [2.0 ** (b - 127) for b in range(255)] and math.isnan(got[255])
    assert struct.unpack("<f", struct.pack("<f", got[0]))[0] == 2.0**-127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (96, 300), (384, 64)])
def test_fp8_is_exact_at_every_size(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, scale, expected = random_fp8(*shape)
    assert tuple(scale.shape) == fp8_scale_shape(*shape)
    got = from_fp8(weight, scale, dtype)
    assert got.dtype == dtype and torch.equal(got.double(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 32), (5, 96), (4, 70)])
def test_fp4_is_exact_at_every_size(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed, scale, expected = random_fp4(*shape)
    got = from_fp4(packed, scale, dtype)
    assert got.dtype == dtype and torch.equal(got.double(), expected)


def test_scales_may_be_fp32() -> None:
    weight, scale, expected = random_fp8(130, 140)
    assert torch.equal(from_fp8(weight, scale.float()).double(), expected)


def test_fp4_as_integer_blocks_is_the_same_matrix() -> None:
    packed, scale, expected = random_fp4(6, 128)
    blocks = fp4_blocks(packed, scale)
    assert blocks is not None and blocks.bits == 8 and blocks.minimum is None
    assert blocks.values.dtype == np.int8 and blocks.scale.shape == (6, 4)
    whole = blocks.values.astype(np.float64) * blocks.scale.repeat(32, 1)
    np.testing.assert_array_equal(whole, expected.numpy())


@pytest.mark.parametrize(("byte", "fits"), [(104, True), (143, True), (103, False), (144, False)])
def test_blocks_only_where_fp16_holds_half_the_scale(byte: int, fits: bool) -> None:
    """2^-24 is fp16's smallest number, 2^15 its largest power of two."""
    packed = pack(torch.ones(1, 32, dtype=torch.int64))
    assert (fp4_blocks(packed, scales(torch.tensor([[byte]]))) is not None) is fits


def test_no_blocks_with_a_short_last_one() -> None:
    packed, scale, _ = random_fp4(2, 48)
    assert fp4_blocks(packed, scale) is None
