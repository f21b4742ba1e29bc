"""Rotary frequencies, plain and stretched to long contexts.

A rotation by position x inverse frequency turns pairs (i, i + E/2) of a head. To read contexts
longer than it was trained on, a model divides the low frequencies: all alike (linear), with a
smooth border by wavelength (llama3), or interpolated by number of turns with a correction of the
attention scale (yarn).

Shape suffix: R = head dimension / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dspark.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """[R] fp32 inverse frequencies (radians a position), and the factor on cosine and sine."""
    exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freq_R = 1.0 / rope.theta**exponents_R
    if rope.freq_factors is not None:
        freq_R = freq_R / torch.tensor(rope.freq_factors)
    if rope.kind == "linear":
        return freq_R / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, freq_R), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, freq_R, head_dim)
    return freq_R, 1.0


def _llama3(rope: RopeConfig, freq_R: Tensor) -> Tensor:
    """Full turns within the old context: `turns`. Few turns: divide; many: keep; between: blend."""
    turns_R = rope.original_max_position * freq_R / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return freq_R * (keep_R + (1 - keep_R) / rope.factor)


def _yarn(rope: RopeConfig, freq_R: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Peng et al. 2023: interpolate what turns less than beta_slow times, keep above beta_fast."""

    def pair_turning(turns: float) -> float:
        span = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp_R = torch.arange(head_dim // 2, dtype=torch.float32)
    interpolated_R = ((ramp_R - low) / (high - low)).clamp(0, 1)
    freq_R = freq_R * (1 - interpolated_R) + freq_R / rope.factor * interpolated_R
    if rope.attention_factor is not None:
        return freq_R, rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return freq_R, mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return freq_R, mscale(1.0)
