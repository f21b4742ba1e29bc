"""Where weights come from: the contract that every checkpoint reader fulfils.

Names are the canonical Hugging Face ones whatever the file calls them: `model.embed_tokens.weight`,
`model.layers.{i}.self_attn.{q,k,v,o}_proj.{weight,bias}`,
`model.layers.{i}.self_attn.{q,k}_norm.weight`,
`model.layers.{i}.mlp.{gate,up,down}_proj.{weight,bias}`,
`model.layers.{i}.{input,post_attention}_layernorm.weight`, `model.norm.weight`, `lm_head.weight`.
Rows of q and k are in the half-split rotary order of Hugging Face (GGUF stores them interleaved;
its reader reorders them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

BLOCK = 32
"""Columns that share one scale."""


@dataclass(frozen=True)
class QuantBlocks:
    """A matrix [O, I] in blocks of 32 columns: w = scale * value (+ minimum).

    bits      8: values int8 in -127..127 (minimum is None); 4: values uint8 in 0..15
    values    [O, I]
    scale     [O, I / 32] fp32
    minimum   [O, I / 32] fp32, or None for 8 bits
    """

    bits: Literal[4, 8]
    values: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    scale: npt.NDArray[np.float32]
    minimum: npt.NDArray[np.float32] | None


class WeightSource(Protocol):
    """Lazy access to the tensors of one checkpoint; nothing is read before it is asked for."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor in floating point, as stored or dequantised (fp32), or CheckpointError."""
        ...

    def blocks(self, name: str) -> QuantBlocks | None:
        """The matrix as the file quantised it (Q4_0, Q4_1, Q8_0), else None. Exact, no rounding."""
        ...
