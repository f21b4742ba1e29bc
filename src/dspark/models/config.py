"""What a decoder of the Llama family looks like, as one frozen dataclass.

`from_hf` reads a Hugging Face `config.json` (both the older `rope_theta`/`rope_scaling` spelling
and the newer `rope_parameters`), `from_gguf` the metadata of a GGUF file. The rest of the code
knows only this.
"""

from __future__ import annotations

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

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise CheckpointError(f"config.json of a {kind} model has no {key!r}")
        return raw[key]

    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act is {activation!r}, only silu is supported")
    hidden, heads, layers = (
        need("hidden_size"),
        need("num_attention_heads"),
        need("num_hidden_layers"),
    )
    bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        model_type=kind,
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        max_context=need("max_position_embeddings"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_rope_from_hf(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", kind == "smollm3")),
        qkv_bias=True if kind == "qwen2" else bias,
        o_bias=False if kind == "qwen2" else bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        windows=_windows(kind, raw, layers),
        rope_layers=_rope_layers(kind, raw, layers),
    )


def _windows(kind: str, raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Llama never slides; Mistral does in every layer; Qwen and SmolLM3 where their config says."""
    window = raw.get("sliding_window")
    slides = kind == "mistral" or (kind != "llama" and bool(raw.get("use_sliding_window")))
    if not slides or window is None:
        return (None,) * layers
    types = raw.get("layer_types")
    if types is not None and kind != "mistral":
        return tuple(window if t == "sliding_attention" else None for t in types)
    first = raw.get("max_window_layers", 0) if kind.startswith("qwen") else 0
    return tuple(window if i >= first else None for i in range(layers))


def _rope_layers(kind: str, raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """SmolLM3's `no_rope_layers` holds 1 where a layer does rotate."""
    if kind != "smollm3":
        return (True,) * layers
    flags = raw.get("no_rope_layers")
    if flags:
        return tuple(bool(f) for f in flags)
    interval = raw.get("no_rope_layer_interval", 4)
    return tuple((i + 1) % interval != 0 for i in range(layers))


def _rope_from_hf(raw: Mapping[str, Any]) -> RopeConfig:
    params = raw.get("rope_parameters") or {}
    scaling = {**(raw.get("rope_scaling") or {}), **params}
    theta = float(scaling.get("rope_theta", raw.get("rope_theta") or 10_000.0))
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(
            f"rope scaling {kind!r} is not supported: expected default, linear, llama3 or yarn"
        )
    original = scaling.get("original_max_position_embeddings") or raw.get(
        "original_max_position_embeddings", raw.get("max_position_embeddings", 0)
    )
    defaults = RopeConfig()
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
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
    meta: Mapping[str, Any], *, tied: bool, freq_factors: tuple[float, ...] | None = None
) -> DecoderConfig:
    """Read the metadata of a GGUF file of the llama architecture; `tied`: it stores no head.

    Raises CheckpointError for another architecture or a missing key.
    """
    kind = meta.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(
            f"unknown architecture: the GGUF file holds {kind!r}, supported is llama"
        )

    def need(key: str) -> Any:
        if f"llama.{key}" not in meta:
            raise CheckpointError(f"the GGUF file has no llama.{key}")
        return meta[f"llama.{key}"]

    hidden, heads, layers = (
        need("embedding_length"), need("attention.head_count"), need("block_count")
    )  # fmt: skip
    head_dim = meta.get("llama.attention.key_length", hidden // heads)
    rotated = meta.get("llama.rope.dimension_count", head_dim)
    scaling = meta.get("llama.rope.scaling.type", "none")
    if rotated != head_dim:
        raise CheckpointError(f"rotating {rotated} of {head_dim} dimensions is not supported")
    if scaling not in ("none", "linear", "yarn"):
        raise CheckpointError(f"rope scaling {scaling!r} is not supported: expected linear or yarn")
    context = need("context_length")
    return DecoderConfig(
        model_type="llama",
        vocab_size=meta.get("llama.vocab_size") or len(meta["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=meta.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=context,
        rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(
            theta=meta.get("llama.rope.freq_base", 10_000.0),
            kind="default" if scaling == "none" else scaling,
            factor=meta.get("llama.rope.scaling.factor", 1.0),
            original_max_position=meta.get("llama.rope.scaling.original_context_length", context),
            attention_factor=meta.get("llama.rope.scaling.attn_factor"),
            freq_factors=freq_factors,
        ),
        tie_embeddings=tied,
        windows=(None,) * layers,
        rope_layers=(True,) * layers,
    )
