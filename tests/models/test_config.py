"""Configurations of Hugging Face and GGUF metadata: spellings, defaults, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from dspark.errors import CheckpointError
from dspark.models.config import SUPPORTED, RopeConfig, from_gguf, from_hf
from dspark.models.rope import inverse_frequencies
from tests.tiny import SIZES

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
META: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 257,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 4,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def hf(**changes: Any) -> Any:
    return from_hf({**RAW, **changes})


def metadata(**changes: Any) -> Any:
    """Metadata with changes; dots are spelled `__`."""
    extra = {f"llama.{k.replace('__', '.')}": v for k, v in changes.items()}
    return from_gguf({k: v for k, v in {**META, **extra}.items() if v is not None}, tied=True)


# -- Hugging Face --------------------------------------------------------------------------------


def test_a_minimal_config_takes_the_defaults() -> None:
    c = hf()
    assert (c.num_kv_heads, c.head_dim, c.rms_norm_eps) == (4, 16, 1e-6)
    assert not (c.tie_embeddings or c.qkv_bias or c.o_bias or c.mlp_bias or c.qk_norm)
    assert c.windows == (None,) * 4 and c.rope_layers == (True,) * 4
    assert c.rope.kind == "default" and c.rope.theta == 10_000.0


@pytest.mark.parametrize("kind", SUPPORTED)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    """A key that config.json leaves out means what `transformers` takes for it."""
    config_class = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "smollm3": transformers.SmolLM3Config,
    }[kind]
    sizes = {k: v for k, v in RAW.items() if k != "model_type"} | {"num_key_value_heads": 2}
    short = from_hf({**sizes, "model_type": kind})
    assert short == from_hf(config_class(**sizes).to_dict())


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    ],
)
def test_both_spellings_of_rope(scaling: dict[str, Any]) -> None:
    """`rope_theta` + `rope_scaling` of older files, `rope_parameters` of newer ones."""
    old = hf(rope_theta=5e5, rope_scaling=scaling)
    new = hf(rope_parameters={"rope_theta": 5e5, **scaling})
    assert old == new and old.rope.theta == 5e5 and old.rope.factor == scaling["factor"]
    assert old.rope.kind == scaling.get("rope_type", scaling.get("type"))


def test_old_spelling_without_scaling() -> None:
    c = hf(rope_theta=1e6, rope_scaling=None)
    assert c.rope == hf(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).rope
    assert c.rope.theta == 1e6


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    c = hf(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 128})
    assert c.rope.factor == 4.0 and c.rope.original_max_position == 128


@pytest.mark.parametrize("window", [8, None])
def test_mistral_slides_everywhere(window: int | None) -> None:
    assert hf(model_type="mistral", sliding_window=window).windows == (window,) * 4


def test_llama_never_slides() -> None:
    assert hf(sliding_window=8, use_sliding_window=True).windows == (None,) * 4


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_slides_from_a_layer_on(kind: str) -> None:
    window = {"model_type": kind, "sliding_window": 8, "max_window_layers": 1}
    assert hf(**window).windows == (None,) * 4
    assert hf(**window, use_sliding_window=True).windows == (None, 8, 8, 8)
    types = ["sliding_attention", "full_attention"] * 2
    slid = hf(**window, use_sliding_window=True, layer_types=types)
    assert slid.windows == (8, None, 8, None)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_windows_of_transformers(kind: str) -> None:
    """The same layers slide in the configuration that `transformers` makes of the same keys."""
    config_class = {
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[kind]
    extra: dict[str, Any] = {"sliding_window": 8}
    if kind != "mistral":
        extra |= {"use_sliding_window": True, "max_window_layers": 2}
    made = config_class(**{**SIZES, "num_hidden_layers": 4, **extra})
    types = getattr(made, "layer_types", None) or ["sliding_attention"] * 4
    wanted = tuple(8 if t == "sliding_attention" else None for t in types)
    assert from_hf(made.to_dict()).windows == wanted
    assert hf(model_type=kind, **extra).windows == wanted


def test_qwen_biases_and_norms() -> None:
    qwen2, qwen3 = hf(model_type="qwen2"), hf(model_type="qwen3")
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128


def test_smollm3_leaves_layers_unrotated() -> None:
    assert hf(model_type="smollm3").rope_layers == (True, True, True, False)
    given = hf(model_type="smollm3", no_rope_layers=[0, 1, 1, 0])
    assert given.rope_layers == (False, True, True, False)
    interval = hf(model_type="smollm3", no_rope_layer_interval=2)
    assert interval.rope_layers == (True, False, True, False)
    assert hf(no_rope_layers=[0, 0, 0, 0]).rope_layers == (True,) * 4
    assert hf(model_type="smollm3").tie_embeddings


@pytest.mark.parametrize("kind", [None, "gemma3_text", "gpt2", "deepseek_v3"])
def test_unknown_architectures(kind: str | None) -> None:
    with pytest.raises(CheckpointError, match=f"model_type is {kind!r}, supported are llama, "):
        hf(model_type=kind)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "max_position_embeddings"],
)  # fmt: skip
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "64", True])
def test_sizes_must_be_sizes(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json of a llama model: {key} is "):
        hf(**{key: value})


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "mrope"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_unsupported_rope_scaling(spelling: str, kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"rope scaling '{kind}' is not supported"):
        hf(**{spelling: {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 15}, "head dimension of 15"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' has no 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "1 entries for 4 layers"),
    ],
)
def test_refusals(changes: dict[str, Any], match: str) -> None:
    """What would change the numbers and is not understood is not ignored."""
    with pytest.raises(CheckpointError, match=match):
        hf(**changes)


# -- GGUF ----------------------------------------------------------------------------------------


def test_gguf_metadata() -> None:
    c = metadata(rope__freq_base=5e5)
    assert (c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim) == (64, 4, 2, 16)
    assert (c.vocab_size, c.max_context, c.num_layers) == (257, 512, 4)
    assert c.rope == RopeConfig(theta=5e5) and c.tie_embeddings and c.rms_norm_eps == 1e-5
    assert not from_gguf(META, tied=False).tie_embeddings


def test_gguf_defaults() -> None:
    """Key and value heads as many as heads; the vocabulary's size from its tokens."""
    c = metadata(attention__head_count_kv=None)
    assert c.num_kv_heads == 4
    meta = {**META, "tokenizer.ggml.tokens": ["a"] * 9}
    del meta["llama.vocab_size"]
    assert from_gguf(meta, tied=True).vocab_size == 9
    assert metadata(attention__key_length=32, attention__value_length=32).head_dim == 32


def test_gguf_biases_come_from_the_tensors() -> None:
    def made(*parts: str) -> Any:
        return from_gguf(META, tied=True, biases=frozenset(parts))

    assert not made().qkv_bias
    assert made("attn_q", "attn_k", "attn_v").qkv_bias and made("attn_output").o_bias
    assert made("ffn_gate", "ffn_up", "ffn_down").mlp_bias
    with pytest.raises(CheckpointError, match="biases for attn_q alone"):
        made("attn_q")


def test_gguf_rope_scaling() -> None:
    assert metadata(rope__scaling__type="none").rope == RopeConfig()
    linear = metadata(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert (linear.rope.kind, linear.rope.factor) == ("linear", 4.0)
    assert metadata(rope__scale_linear=4.0).rope == linear.rope
    yarn = metadata(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=128,
    ).rope
    assert (yarn.kind, yarn.factor, yarn.original_max_position) == ("yarn", 4.0, 128)
    same = hf(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    assert inverse_frequencies(yarn, 16)[1] == inverse_frequencies(same.rope, 16)[1]


def test_gguf_yarn_multiplies_its_attention_factor_into_the_usual_one() -> None:
    rope = metadata(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__attn_factor=0.5
    ).rope
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_count": None}, r"llama\.block_count is None"),
        ({"attention__head_count": [4, 4, 2, 2]}, r"llama\.attention\.head_count is \[4"),
        ({"attention__layer_norm_rms_epsilon": None}, "has no .*rms_epsilon"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__dimension_count": 8}, "rotating 8 of 16"),
        ({"attention__value_length": 8}, "another head dimension"),
        ({"rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"rope__scaling__attn_factor": 0.5}, "needs yarn"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        metadata(**changes)


def test_another_gguf_architecture() -> None:
    with pytest.raises(CheckpointError, match="holds 'qwen2', supported is llama"):
        from_gguf({**META, "general.architecture": "qwen2"}, tied=True)
