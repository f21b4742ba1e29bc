"""The integer path: same bits whatever shares the pass, and close to fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import ConfigError
from dspark.models.int8 import Int8Decoder, PackedLinear, quantise, quantise4
from dspark.models.native import library
from dspark.models.target import Segment, pack
from dspark.models.weights import QuantBlocks
from tests.models.test_decoder import MODELS, run, tokens
from tests.tiny import oracle, source, target


def four_bits(out: int, columns: int, seed: int = 0) -> QuantBlocks:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 16, (out, columns)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.1, (out, columns // 32)).astype(np.float16).astype(np.float32)
    minimum = (-8 * scale).astype(np.float16).astype(np.float32)
    return QuantBlocks(4, values, scale, minimum)


def dense(b: QuantBlocks) -> torch.Tensor:
    values = b.values.astype(np.float32).reshape(b.values.shape[0], -1, 32)
    minimum = 0 if b.minimum is None else b.minimum[..., None]
    return torch.from_numpy((values * b.scale[..., None] + minimum).reshape(b.values.shape))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out", "columns"), [(8, 32), (50, 96), (257, 576)])
def test_product_is_close_to_fp32(bits: int, out: int, columns: int) -> None:
    torch.manual_seed(0)
    blocks = four_bits(out, columns) if bits == 4 else quantise(torch.randn(out, columns))
    x = torch.randn(7, columns)
    bias = torch.randn(out)
    wanted = x @ dense(blocks).T
    got = PackedLinear(blocks)(x)
    assert (got - wanted).norm() / wanted.norm() < 0.01
    torch.testing.assert_close(PackedLinear(blocks, bias)(x), got + bias)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_the_dequantised_weights_exactly(bits: int) -> None:
    blocks = four_bits(37, 64) if bits == 4 else quantise(torch.randn(37, 64))
    ids = torch.tensor([0, 36, 5, 5])
    torch.testing.assert_close(
        PackedLinear(blocks).rows(ids), dense(blocks)[ids], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_largest_values_do_not_saturate(bits: int) -> None:
    """All activations and weights at the ends of their ranges: 16-bit sums must not clip."""
    values = np.full((8, 64), 15 if bits == 4 else -127)
    blocks = QuantBlocks(
        4 if bits == 4 else 8,
        values.astype(np.uint8 if bits == 4 else np.int8),
        np.ones((8, 2), np.float32),
        np.zeros((8, 2), np.float32) if bits == 4 else None,
    )
    got = PackedLinear(blocks)(torch.full((5, 64), -127.0))
    assert torch.equal(got, torch.full((5, 8), -127.0 * 64 * values[0, 0]))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 13), bits=st.sampled_from([4, 8]), seed=st.integers(0, 99))
def test_product_of_a_row_does_not_depend_on_the_others(rows: int, bits: int, seed: int) -> None:
    torch.manual_seed(seed)
    blocks = four_bits(40, 96, seed) if bits == 4 else quantise(torch.randn(40, 96))
    x = torch.randn(rows, 96) * 10 ** torch.randn(rows, 1)
    linear = PackedLinear(blocks)
    together = linear(x)
    for i in range(rows):
        assert torch.equal(together[i], linear(x[i : i + 1])[0])


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_a_row_do_not_depend_on_the_pass(name: str) -> None:
    """B01, B02: one by one, in blocks of 2-9, as a full pass, in company, on two threads."""
    kind, overrides = MODELS[name]
    model = target(oracle(kind, **overrides), dtype="int8")
    ids, others = tokens(50), tokens(33, seed=3)
    expected = torch.cat([run(model, ids[i : i + 1], i) for i in range(len(ids))])
    assert torch.equal(run(model, ids, slot=1), expected)
    for size in range(2, 10):
        got = torch.cat([run(model, ids[i : i + size], i, 2) for i in range(0, 50, size)])
        assert torch.equal(got, expected)
    mixed = pack([Segment(3, 0, others, 3), Segment(1, 44, ids[44:], 6), Segment(4, 0, ids, 50)])
    torch.set_num_threads(2)
    try:
        logits = model.forward(mixed).logits
    finally:
        torch.set_num_threads(1)
    assert torch.equal(logits[3:9], expected[44:])
    assert torch.equal(logits[9:], expected)


@pytest.mark.parametrize("name", MODELS)
def test_close_to_fp32(name: str) -> None:
    kind, overrides = MODELS[name]
    model = oracle(kind, **overrides)
    ids = tokens(50)
    a, b = run(target(model), ids), run(target(model, dtype="int8"), ids)
    assert torch.cosine_similarity(a, b, -1).mean() > 0.98


def test_plain_c_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without AVX2 runs other instructions; the numbers must be the same."""
    model = oracle("qwen3")
    ids = tokens(30)
    fast = run(target(model, dtype="int8"), ids)
    generic = library.load(("-DDSPARK_GENERIC",))
    monkeypatch.setattr(library, "load", lambda: generic)
    assert torch.equal(run(target(model, dtype="int8"), ids), fast)


def test_a_size_the_kernels_cannot_take_is_refused() -> None:
    config, weights = source(oracle("llama", hidden_size=48, num_attention_heads=4, head_dim=16))
    with pytest.raises(ConfigError, match="hidden_size is 48"):
        Int8Decoder(config, weights, num_slots=1, max_context=16)


@given(st.integers(0, 2**31 - 1), st.floats(1e-3, 100))
def test_four_bits_are_within_half_a_step_or_less_squared_error(seed: int, size: float) -> None:
    """Every block is at least as close as plain rounding over its whole range would be."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 64, generator=g) * size
    w[0, 3] *= 20  # an outlier
    q = quantise4(w)
    assert q.bits == 4 and q.minimum is not None and q.values.max() <= 15
    blocks = w.numpy().reshape(3, 2, 32)
    back = q.values.reshape(3, 2, 32) * q.scale[..., None] + q.minimum[..., None]
    step = (blocks.max(-1) - blocks.min(-1)) / 15
    plain = np.rint((blocks - blocks.min(-1, keepdims=True)) / step[..., None])
    plain = plain * step[..., None] + blocks.min(-1, keepdims=True)
    error, bound = ((back - blocks) ** 2).sum(-1), ((plain - blocks) ** 2).sum(-1)
    assert (error <= bound * 1.05 + 1e-6 * size**2).all()
    packed = PackedLinear(q)
    np.testing.assert_allclose(packed.rows(torch.arange(3)).numpy().reshape(back.shape), back,
                               rtol=1e-5, atol=1e-5 * size)  # fmt: skip


def test_a_constant_block_of_four_bits() -> None:
    w = torch.full((2, 32), 0.5)
    assert torch.equal(PackedLinear(quantise4(w)).rows(torch.arange(2)), w)
