"""Configurations: both spellings, defaults of `transformers`, and refusal of what is not read."""

from __future__ import annotations

from typing import Any

import pytest

from dspark.errors import CheckpointError
from dspark.models.config import SUPPORTED, RopeConfig, from_gguf, from_hf

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.block_count": 3,
    "llama.context_length": 512,
    "llama.feed_forward_length": 96,
    "llama.vocab_size": 100,
}
ALL = (None,) * 6
W = 16


def hf(kind: str = "llama", **overrides: Any) -> Any:
    return from_hf({"model_type": kind, **BASE, **overrides})


def gguf(**overrides: Any) -> dict[str, Any]:
    """GGUF metadata; `llama_rope__x` stands for the key llama.rope.x."""
    return {**GGUF, **{f"llama.{k.replace('__', '.')}": v for k, v in overrides.items()}}


# -- config.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False, "head_dim": 32},
        {"use_sliding_window": True, "sliding_window": W, "max_window_layers": 4},
        {"use_sliding_window": True, "sliding_window": W, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": W},
        {"use_sliding_window": True},
        {"use_sliding_window": False, "sliding_window": W, "max_window_layers": 2},
        {"sliding_window": None},
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ],
)
def test_absent_keys_mean_what_transformers_makes_of_them(kind: str, given: dict[str, Any]) -> None:
    import transformers

    theirs = transformers.AutoConfig.for_model(kind, **BASE, **given)
    ours = hf(kind, **given)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    usual = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == getattr(theirs, "head_dim", usual)
    if kind == "llama":
        windows = [None] * 6
    elif kind == "mistral":
        windows = [theirs.sliding_window] * 6
    else:
        slides = [t == "sliding_attention" for t in theirs.layer_types]
        windows = [theirs.sliding_window if s else None for s in slides]
    assert list(ours.windows) == windows
    assert list(ours.rope_layers) == [bool(f) for f in getattr(theirs, "no_rope_layers", [1] * 6)]
    assert from_hf(theirs.to_dict()) == from_hf({**theirs.to_dict(), "model_type": kind})
    again = from_hf(theirs.to_dict())  # as transformers saves it, with everything written out
    assert (again.windows, again.rope_layers) == (ours.windows, ours.rope_layers)
    assert (again.rope.theta, again.head_dim) == (ours.rope.theta, ours.head_dim)


def test_layer_types_win_over_the_number_of_layers_without_a_window() -> None:
    types = ["sliding_attention", "full_attention"] * 3
    windows = hf(
        "qwen3", use_sliding_window=True, sliding_window=W, layer_types=types, max_window_layers=6
    ).windows
    assert windows == (W, None) * 3


def test_unrotated_layers_of_smollm3() -> None:
    assert hf("smollm3").rope_layers == (True, True, True, False, True, True)
    assert hf("smollm3", no_rope_layer_interval=2).rope_layers == (True, False) * 3
    flags = [0, 1, 1, 0, 1, 1, 0, 0]  # longer than the model, which is allowed
    assert hf("smollm3", no_rope_layers=flags).rope_layers == tuple(map(bool, flags[:6]))
    assert hf("llama", no_rope_layers=flags).rope_layers == (True,) * 6


@pytest.mark.parametrize(
    ("kind", "given", "biases", "norm"),
    [
        ("llama", {}, (False, False, False), False),
        ("llama", {"attention_bias": True}, (True, True, False), False),
        ("llama", {"mlp_bias": True}, (False, False, True), False),
        ("qwen2", {}, (True, False, False), False),
        ("qwen3", {}, (False, False, False), True),
        ("qwen3", {"attention_bias": True}, (True, True, False), True),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}, (True, True, True), False),
    ],
)
def test_biases_and_norms(
    kind: str, given: dict[str, Any], biases: tuple[bool, bool, bool], norm: bool
) -> None:
    config = hf(kind, **given)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm is norm


def test_kv_heads_default_to_all_heads() -> None:
    assert hf(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
         "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    ],
)  # fmt: skip
def test_old_and_new_spelling_of_rope(scaling: dict[str, Any]) -> None:
    new = hf(rope_parameters={"rope_theta": 3e4, **scaling}).rope
    old = hf(rope_theta=3e4, rope_scaling=scaling).rope
    oldest = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    assert new == old == hf(rope_theta=3e4, rope_scaling=oldest).rope
    assert (new.theta, new.kind, new.factor) == (3e4, scaling["rope_type"], scaling["factor"])
    original = scaling.get("original_max_position_embeddings", 128)
    assert new.original_max_position == original
    for ours, theirs in (("attention_factor",) * 2, ("mscale",) * 2, ("mscale_all_dim",) * 2):
        assert getattr(new, ours) == scaling.get(theirs)


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    rope = hf(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 32}).rope
    assert (rope.factor, rope.original_max_position) == (4.0, 32)


def test_no_scaling_at_all() -> None:
    for given in ({}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}):
        assert hf(**given).rope == RopeConfig(original_max_position=128)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', supported are llama, mistral, qwen2"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 15}, "odd"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_refused_configurations(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as e:
        from_hf({"model_type": "llama", **BASE, **given})
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("qwen2", {"layer_types": ["sliding_attention"] * 5}, "layer_types has 5 entries for 6"),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers has 3 entries for 6"),
    ],
)
def test_lists_shorter_than_the_model(kind: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        hf(kind, use_sliding_window=True, sliding_window=W, **given)


# -- GGUF ------------------------------------------------------------------------------------------


def test_gguf_metadata() -> None:
    config = from_gguf(gguf(), tied=True)
    assert (config.hidden_size, config.head_dim, config.num_kv_heads) == (64, 16, 2)
    assert config.tie_embeddings and config.rope == RopeConfig()
    assert config.windows == (None,) * 3 and config.rope_layers == (True,) * 3
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    wide = from_gguf(gguf(attention__key_length=32, attention__value_length=32), tied=False)
    assert wide.head_dim == 32 and not wide.tie_embeddings


def test_gguf_vocabulary_from_the_tokens() -> None:
    meta = {**gguf(), "tokenizer.ggml.tokens": ["a"] * 77}
    del meta["llama.vocab_size"]
    assert from_gguf(meta, tied=True).vocab_size == 77


def test_gguf_biases_are_learnt_from_the_tensors() -> None:
    found = frozenset({"attn_q", "attn_k", "attn_v", "attn_output"})
    config = from_gguf(gguf(), tied=True, biases=found)
    assert config.qkv_bias and config.o_bias and not config.mlp_bias
    with pytest.raises(CheckpointError, match="biases for attn_q alone"):
        from_gguf(gguf(), tied=True, biases=frozenset({"attn_q"}))


def test_gguf_rope() -> None:
    def rope(**keys: Any) -> RopeConfig:
        return from_gguf(gguf(**{f"rope__{k}": v for k, v in keys.items()}), tied=True).rope

    assert rope(freq_base=5e5) == RopeConfig(theta=5e5)
    assert rope(scaling__type="none", scaling__factor=4.0) == RopeConfig()
    assert rope(scaling__type="linear", scaling__factor=4.0) == RopeConfig(
        kind="linear", factor=4.0
    )
    assert rope(scale_linear=2.0) == RopeConfig(kind="linear", factor=2.0)
    yarn = rope(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=128)
    assert yarn == RopeConfig(kind="yarn", factor=4.0, original_max_position=128)
    # llama.cpp multiplies its factor into 0.1 ln 4 + 1.
    weighted = rope(scaling__type="yarn", scaling__factor=4.0, scaling__attn_factor=0.5)
    assert weighted.attention_factor == pytest.approx(0.5 * 1.1386294361)


def test_gguf_frequency_factors() -> None:
    factors = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    config = from_gguf(gguf(), tied=True, freq_factors=factors)
    assert config.rope.freq_factors == factors
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has 7 entries, expected 8"):
        from_gguf(gguf(), tied=True, freq_factors=factors[:7])
    yarn = gguf(rope__scaling__type="yarn", rope__scaling__factor=4.0)
    with pytest.raises(CheckpointError, match="together with yarn"):
        from_gguf(yarn, tied=True, freq_factors=factors)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"general.architecture": "mamba"}, "holds 'mamba', supported is llama"),
        ({"llama.block_count": None}, "llama.block_count is None"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, r"head_count_kv is \[2, 2, 1\]"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "no llama.*epsilon"),
        ({"llama.rope.dimension_count": 8}, "rotating 8 of 16"),
        ({"llama.attention.value_length": 8}, "values of another head dimension"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "needs yarn"),
        ({"llama.expert_count": 8}, "mixture of experts"),
    ],
)
def test_refused_gguf_metadata(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as e:
        from_gguf({**GGUF, **given}, tied=True)
    assert "\n" not in str(e.value)
