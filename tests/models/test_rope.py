"""Inverse frequencies against `transformers`, and llama.cpp's list of divisors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.models.config import RopeConfig, from_hf
from dspark.models.rope import inverse_frequencies

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, **LLAMA3},
    "llama3 of 3.2": {"rope_type": "llama3", "factor": 32.0, "rope_theta": 5e5, **LLAMA3,
                      "original_max_position_embeddings": 8192},
    "llama3 wide": {"rope_type": "llama3", "factor": 32.0, **LLAMA3, "high_freq_factor": 9.0},
    "yarn": {**YARN, "factor": 4.0},
    "yarn theta": {**YARN, "factor": 40.0, "rope_theta": 1e6},
    "yarn factor below 1": {**YARN, "factor": 0.5},
    "yarn attention": {**YARN, "factor": 4.0, "attention_factor": 1.25},
    "yarn mscale": {**YARN, "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn one mscale": {**YARN, "factor": 4.0, "mscale": 0.707},
    "yarn betas": {**YARN, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn untruncated": {**YARN, "factor": 4.0, "truncate": False},
    "yarn one ramp step": {**YARN, "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0,
                           "truncate": False},
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, head_dim: int) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    params = {"rope_theta": 1e4, **CASES[case]}
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=4 * head_dim, num_attention_heads=4, num_hidden_layers=1,
        max_position_embeddings=4096, rope_parameters=dict(params),
    )  # fmt: skip
    kind = params["rope_type"]
    if kind == "default":  # the table of functions has no plain one in recent versions
        exponents = torch.arange(0, head_dim, 2).float() / head_dim
        expected, factor = 1.0 / 1e5**exponents, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    got, ours = inverse_frequencies(from_hf(config.to_dict()).rope, head_dim)
    assert got.shape == (head_dim // 2,) and got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert ours == pytest.approx(factor)


def test_the_stretched_ones_differ_from_the_plain_ones() -> None:
    """So that the comparison above is not one of plain frequencies with themselves."""
    plain, _ = inverse_frequencies(RopeConfig(), 64)
    for kind in ("linear", "llama3", "yarn"):
        rope = RopeConfig(kind=kind, factor=4.0, original_max_position=256)
        stretched, _ = inverse_frequencies(rope, 64)
        assert not torch.allclose(plain, stretched)
        assert (stretched <= plain).all() and (stretched >= plain / 4 * 0.999).all()


def test_divisors_of_llama_cpp_give_the_same_as_llama3() -> None:
    """A GGUF file of Llama 3.1 stores what `llama3` computes, as one divisor a frequency."""
    llama3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=256)
    expected, _ = inverse_frequencies(llama3, 64)
    plain = RopeConfig(theta=5e5)
    divisors = tuple((inverse_frequencies(plain, 64)[0] / expected).tolist())
    got, factor = inverse_frequencies(replace(plain, freq_factors=divisors), 64)
    torch.testing.assert_close(got, expected)
    assert factor == 1.0


def test_the_plain_kind_is_the_one_of_the_models() -> None:
    """The plain formula above is not in the table of `transformers`; here a model is asked."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(vocab_size=100, hidden_size=64, num_attention_heads=4)
    rotary = LlamaRotaryEmbedding(config)
    freq, factor = inverse_frequencies(from_hf(config.to_dict()).rope, 16)
    torch.testing.assert_close(freq, rotary.inv_freq, atol=0, rtol=1e-6)
    assert factor == rotary.attention_scaling == 1.0
