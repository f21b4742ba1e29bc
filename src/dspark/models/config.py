"""What a decoder of the Llama family looks like, as one frozen dataclass.

`from_hf` reads a Hugging Face `config.json` (both the older `rope_theta`/`rope_scaling` spelling
and the newer `rope_parameters`), `from_gguf` the metadata of a GGUF file. The rest of the code
knows only this.

Whatever would change the numbers and is not understood is refused rather than ignored: a model
that runs with the wrong rotation still writes fluent text. What is absent takes the default that
`transformers` gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dspark.errors import CheckpointError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `kind` names how long contexts are reached.

    default   plain frequencies theta^(-2i/d)
    linear    positions divided by `factor`
    llama3    low frequencies divided by `factor`, smooth in between (Llama 3.1)
    yarn      by-wavelength interpolation with an attention factor (Peng et al. 2023)
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None
    """One divisor a frequency, as llama.cpp stores the llama3 stretching."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a Llama-family decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer: position p sees p - window + 1 .. p; None sees all."""
    rope_layers: tuple[bool, ...] = ()
    """Whether a layer rotates (SmolLM3 leaves every fourth layer unrotated)."""


SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a Hugging Face `config.json`. Raises CheckpointError for what is not supported."""
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise CheckpointError(
            f"unknown architecture: model_type is {kind!r}, supported are {', '.join(SUPPORTED)}"
        )
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise CheckpointError(
            f"the weights are quantised by {method!r}, which is not read: take the unquantised"
            " checkpoint or a GGUF file"
        )

    def size(key: str) -> int:
        return _size(raw.get(key), f"config.json of a {kind} model: {key}")

    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act is {activation!r}, only silu is supported")
    heads, layers = size("num_attention_heads"), size("num_hidden_layers")
    head_dim = raw.get("head_dim") or (128 if kind == "qwen3" else size("hidden_size") // heads)
    bias = bool(raw.get("attention_bias", False))
    config = DecoderConfig(
        model_type=kind,
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_context=size("max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope_from_hf(kind, raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", kind == "smollm3")),
        qkv_bias=True if kind == "qwen2" else bias,
        o_bias=False if kind == "qwen2" else bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        windows=_windows(kind, raw, layers),
        rope_layers=_rope_layers(kind, raw, layers),
    )
    return _consistent(config)


def _size(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{what} is {value!r}, expected a positive number")
    return value


def _consistent(c: DecoderConfig) -> DecoderConfig:
    _size(c.num_kv_heads, "the number of key and value heads")
    _size(c.head_dim, "the head dimension")
    if c.num_heads % c.num_kv_heads:
        raise CheckpointError(
            f"{c.num_heads} query heads cannot share {c.num_kv_heads} key and value heads"
        )
    if c.head_dim % 2:
        raise CheckpointError(f"a head dimension of {c.head_dim} cannot rotate: it is odd")
    for what, flags in (("no_rope_layers", c.rope_layers), ("layer_types", c.windows)):
        if len(flags) != c.num_layers:
            raise CheckpointError(f"{what} has {len(flags)} entries for {c.num_layers} layers")
    factors = c.rope.freq_factors
    if factors is not None and len(factors) != c.head_dim // 2:
        raise CheckpointError(
            f"rope_freqs.weight has {len(factors)} entries, expected {c.head_dim // 2}: one for"
            " each pair of a head"
        )
    return c


def _windows(kind: str, raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Llama never slides; Mistral does in every layer; Qwen and SmolLM3 where their config says."""
    window = raw.get("sliding_window", None if kind in ("llama", "smollm3") else 4096)
    slides = kind == "mistral" or (kind != "llama" and bool(raw.get("use_sliding_window")))
    if not slides or window is None:
        return (None,) * layers
    if kind == "mistral":
        return (window,) * layers
    types = raw.get("layer_types")
    if types is not None:
        return tuple(window if t == "sliding_attention" else None for t in types)
    if kind == "smollm3":  # the layers that do not rotate slide
        rotates = _rope_layers(kind, raw, layers)
        return tuple(None if r else window for r in rotates)
    first = raw.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(layers))


def _rope_layers(kind: str, raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """SmolLM3's `no_rope_layers` holds 1 where a layer does rotate."""
    if kind != "smollm3":
        return (True,) * layers
    flags = raw.get("no_rope_layers")
    if flags:
        return tuple(bool(f) for f in flags[:layers])  # the list may be longer than the model
    interval = raw.get("no_rope_layer_interval", 4)
    return tuple((i + 1) % interval != 0 for i in range(layers))


def _rope_from_hf(kind_of_model: str, raw: Mapping[str, Any]) -> RopeConfig:
    params = raw.get("rope_parameters") or {}
    scaling = {**(raw.get("rope_scaling") or {}), **params}
    if any(isinstance(v, Mapping) for v in scaling.values()):
        raise CheckpointError("rope_parameters that differ between layers are not supported")
    usual = 2_000_000.0 if kind_of_model == "smollm3" else 10_000.0
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or usual)
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(
            f"rope scaling {kind!r} is not supported: expected default, linear, llama3 or yarn"
        )
    # The value beside the scaling, where there is one, is the pretrained length (as in Phi-3).
    longest = raw.get("max_position_embeddings", 0)
    original = (
        raw.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or longest
    )
    factor = scaling.get("factor")
    if factor is None and kind != "default":
        if kind != "yarn":
            raise CheckpointError(f"rope scaling {kind!r} has no 'factor'")
        factor = longest / original
    defaults = RopeConfig()
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=1.0 if kind == "default" or factor is None else float(factor),
        original_max_position=int(original),
        low_freq_factor=float(scaling.get("low_freq_factor", defaults.low_freq_factor)),
        high_freq_factor=float(scaling.get("high_freq_factor", defaults.high_freq_factor)),
        beta_fast=float(scaling.get("beta_fast") or defaults.beta_fast),
        beta_slow=float(scaling.get("beta_slow") or defaults.beta_slow),
        attention_factor=scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
    )


def from_gguf(
    meta: Mapping[str, Any],
    *,
    tied: bool,
    freq_factors: tuple[float, ...] | None = None,
    biases: frozenset[str] = frozenset(),
) -> DecoderConfig:
    """Read the metadata of a GGUF file of the llama architecture.

    What llama.cpp learns from the tensors, not from the metadata, is handed in: `tied` says that no
    output head is stored, `freq_factors` is `rope_freqs.weight`, `biases` are the parts with a bias
    (`attn_q`, `attn_output`, `ffn_up`, ...). Raises CheckpointError for another architecture, a
    missing key or a mixture of experts.
    """
    kind = meta.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(
            f"unknown architecture: the GGUF file holds {kind!r}, supported is llama"
        )
    if meta.get("llama.expert_count"):
        raise CheckpointError("the GGUF file holds a mixture of experts, which is not supported")

    def size(key: str, default: Any = None) -> int:
        return _size(meta.get(f"llama.{key}", default), f"the GGUF file: llama.{key}")

    hidden, heads, layers = (
        size("embedding_length"), size("attention.head_count"), size("block_count")
    )  # fmt: skip
    head_dim = size("attention.key_length", hidden // heads)
    rotated = size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(f"rotating {rotated} of {head_dim} dimensions is not supported")
    if size("attention.value_length", head_dim) != head_dim:
        raise CheckpointError("values of another head dimension than keys are not supported")
    eps = meta.get("llama.attention.layer_norm_rms_epsilon")
    if eps is None:
        raise CheckpointError("the GGUF file has no llama.attention.layer_norm_rms_epsilon")
    context = size("context_length")
    config = DecoderConfig(
        model_type="llama",
        vocab_size=size("vocab_size", len(meta.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden,
        intermediate_size=size("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=context,
        rms_norm_eps=eps,
        rope=_rope_from_gguf(meta, context, freq_factors),
        tie_embeddings=tied,
        qkv_bias=_all_or_none(biases, "attn_q", "attn_k", "attn_v"),
        o_bias="attn_output" in biases,
        mlp_bias=_all_or_none(biases, "ffn_gate", "ffn_up", "ffn_down"),
        windows=(None,) * layers,
        rope_layers=(True,) * layers,
    )
    return _consistent(config)


def _all_or_none(biases: frozenset[str], *parts: str) -> bool:
    found = biases & set(parts)
    if found and len(found) < len(parts):
        raise CheckpointError(
            f"biases for {', '.join(sorted(found))} alone are not supported: expected"
            f" {', '.join(parts)} or none of them"
        )
    return bool(found)


def _rope_from_gguf(
    meta: Mapping[str, Any], context: int, freq_factors: tuple[float, ...] | None
) -> RopeConfig:
    """The keys `llama.rope.*`, read as llama.cpp reads them."""

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"llama.rope.{key}", default)

    # Without a type llama.cpp takes linear; a factor of 0 means none.
    factor = float(get("scaling.factor", get("scale_linear", 0.0)) or 1.0)
    kind = get("scaling.type", "linear" if factor != 1.0 else "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"rope scaling {kind!r} is not supported: expected linear or yarn")
    theta = float(get("freq_base", 10_000.0))
    weight = float(get("scaling.attn_factor", get("scaling.yarn_attn_factor", 1.0)))
    if kind != "yarn":
        if weight != 1.0:
            raise CheckpointError(f"llama.rope.scaling.attn_factor {weight} needs yarn")
        if kind == "none":
            return RopeConfig(theta=theta, freq_factors=freq_factors)
        return RopeConfig(theta=theta, kind="linear", factor=factor, freq_factors=freq_factors)
    if freq_factors is not None:
        raise CheckpointError("rope_freqs.weight together with yarn scaling is not supported")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=int(get("scaling.original_context_length", context)),
        beta_fast=float(get("scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(get("scaling.yarn_beta_slow", 1.0)),
        # llama.cpp multiplies its factor into the usual one; here as in HF it is the whole of it.
        attention_factor=None if weight == 1.0 else weight * (0.1 * math.log(factor) + 1.0),
    )
