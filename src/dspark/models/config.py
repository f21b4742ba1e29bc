"""What a decoder of the Llama family looks like, as one frozen dataclass.

`from_hf` reads a Hugging Face `config.json` (both the older `rope_theta`/`rope_scaling` spelling
and the newer `rope_parameters`), `from_gguf` the metadata of a GGUF file. The rest of the code
knows only this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
