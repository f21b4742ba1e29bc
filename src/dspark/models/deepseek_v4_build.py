"""What `build.py` needs to know of a DeepSeek-V4: whether it runs in int8, and how much it holds.

Sizes are counted from the same shapes that the loader checks (`deepseek_v4_names.py`) and from the
same table layout that the tower allocates (`deepseek_v4/passes.py`), so they do not drift apart.
Drafters under `mtp.*` are not counted: whoever runs plain never loads them.
"""

from __future__ import annotations

import math

import torch

from dspark.models.deepseek_v4.config import CSA_RATIO, V4Config, span
from dspark.models.deepseek_v4.model import MAX_BLOCK, DeepseekV4
from dspark.models.deepseek_v4.passes import Layout
from dspark.models.deepseek_v4_names import tower_shapes
from dspark.models.weights import BLOCK, WeightSource

_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.07}


def unsupported(c: V4Config) -> str | None:
    """Why the integer kernels cannot run this model, or None if they can: every matrix needs whole
    blocks of columns."""
    for name, size in (
        ("hidden_size", c.hidden_size),
        ("q_lora_rank", c.q_rank),
        ("a group of heads", c.num_heads * c.head_dim // c.o_groups),
        ("o_groups * o_lora_rank", c.o_groups * c.o_rank),
        ("moe_intermediate_size", c.expert_size),
    ):
        if size % BLOCK:
            return f"{name} is {size}, the kernels need a multiple of {BLOCK}"
    return None


def weight_bytes(c: V4Config, dtype: str) -> float:
    """The tower's weights as they are held; the embedding of an int8 model stays in fp32."""
    embedding = c.vocab_size * c.hidden_size
    others = sum(math.prod(shape) for shape in tower_shapes(c).values()) - embedding
    return others * _WEIGHT_BYTES[dtype] + embedding * (2 if dtype == "bf16" else 4)


def cache_bytes(c: V4Config, dtype: str, num_slots: int, max_context: int) -> int:
    """All tables of all slots, full."""
    width, layout = 2 if dtype == "bf16" else 4, Layout(c.window, num_slots, max_context, MAX_BLOCK)
    total = 0
    for ratio in c.ratios:
        total += layout.stride(ratio) * c.head_dim * width
        if not ratio:
            continue
        index = c.index_dim if ratio == CSA_RATIO else 0
        total += layout.entries(ratio) * index * width
        series = span(ratio) // ratio
        total += layout.input_ring(ratio) * 2 * series * (c.head_dim + index) * 4
    return total * num_slots


def build(
    c: V4Config,
    weights: WeightSource,
    dtype: str,
    *,
    num_slots: int,
    max_context: int,
    device: torch.device,
) -> DeepseekV4:
    """The tower with its weights."""
    return DeepseekV4(
        c,
        weights,
        dtype=_TORCH[dtype],
        num_slots=num_slots,
        max_context=max_context,
        device=device,
    )
