"""Rotary frequencies against those of `transformers`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.models.config import RopeConfig, from_hf
from dspark.models.rope import inverse_frequencies
from tests.tiny import SIZES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default, large theta": {"rope_type": "default", "rope_theta": 5e6},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3, as in Llama 3.2": {
        **LLAMA3,
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    },
    "llama3, other borders": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 2.0},
    "yarn": YARN,
    "yarn, large theta": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn, attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, half an mscale": {**YARN, "mscale": 0.7},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, other borders": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, borders meet": {**YARN, "beta_fast": 1.001, "beta_slow": 1.0, "truncate": False},
    "yarn, nothing to stretch": {**YARN, "factor": 1.0},
}


def expected(config: Any, head_dim: int) -> tuple[Tensor, float]:
    """What `transformers` computes; its default kind lives in the models, not in the table."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theta = config.rope_parameters["rope_theta"]
        return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config)  # type: ignore[no-any-return]


def hf_config(parameters: dict[str, Any], head_dim: int) -> Any:
    rope = {"rope_theta": 10_000.0, **parameters}
    return transformers.LlamaConfig(**{**SIZES, "head_dim": head_dim, "rope_parameters": rope})


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_equal_transformers(name: str, head_dim: int) -> None:
    config = hf_config(PARAMETERS[name], head_dim)
    freq, factor = inverse_frequencies(from_hf(config.to_dict()).rope, head_dim)
    wanted, wanted_factor = expected(config, head_dim)
    assert freq.dtype == torch.float32 and freq.shape == (head_dim // 2,)
    torch.testing.assert_close(freq, wanted, atol=0, rtol=1e-6)
    assert factor == pytest.approx(wanted_factor, rel=1e-12)


def test_the_model_itself_uses_the_default_kind() -> None:
    """The formula above is not in the table of `transformers`; here it is asked of a model."""
    config = hf_config({"rope_type": "default"}, 16)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    freq, factor = inverse_frequencies(from_hf(config.to_dict()).rope, 16)
    torch.testing.assert_close(freq, rotary.inv_freq, atol=0, rtol=1e-6)
    assert factor == rotary.attention_scaling == 1.0


def test_kinds_differ() -> None:
    """So that no comparison above passes because a parameter does nothing."""
    seen = set()
    for parameters in PARAMETERS.values():
        rope = from_hf(hf_config(parameters, 64).to_dict()).rope
        freq, factor = inverse_frequencies(rope, 64)
        seen.add((tuple(freq.tolist()), factor))
    # An mscale without its partner is ignored, so that one equals plain yarn; a stretching by 1 is
    # the default.
    assert len(seen) >= len(PARAMETERS) - 2


def test_divisors_of_llama_cpp() -> None:
    """`rope_freqs.weight` divides each frequency; a linear factor divides it again."""
    divisors = (1.0, 2.0, 4.0, 8.0)
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    got, factor = inverse_frequencies(RopeConfig(freq_factors=divisors), 8)
    torch.testing.assert_close(got, plain / torch.tensor(divisors))
    assert factor == 1.0
    both = RopeConfig(kind="linear", factor=2.0, freq_factors=divisors)
    torch.testing.assert_close(inverse_frequencies(both, 8)[0], got / 2)


def test_yarn_scales_attention_by_the_logarithm_of_its_factor() -> None:
    rope = RopeConfig(kind="yarn", factor=math.e, original_max_position=128)
    assert inverse_frequencies(rope, 16)[1] == pytest.approx(1.1)
