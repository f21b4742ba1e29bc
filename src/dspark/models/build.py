"""From a checkpoint to a target that runs: which dtype, on which device, with how much memory.

`auto` decides and says why in one line, because a user who sees a slow or an unexpected result
should not have to guess what ran.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch

from dspark.errors import ConfigError, ResourceError
from dspark.models import deepseek_v4_build
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder, TorchDecoder
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.int8 import Int8Decoder, unsupported
from dspark.models.native import library

if TYPE_CHECKING:
    from dspark.models.loading import Checkpoint

Dtype = Literal["fp32", "bf16", "int8"]
DEFAULT_CONTEXT = 8192
"""Tokens of a slot unless asked for more; models that hold less decide themselves."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why, in words for the user."""

    dtype: Dtype
    device: torch.device
    reason: str


def choose(config: DecoderConfig | V4Config, dtype: str = "auto", device: str = "auto") -> Choice:
    """Resolve `auto`. Raises ConfigError for a name or a pair that does not exist."""
    names = get_args(Dtype)
    if dtype not in ("auto", *names):
        raise ConfigError(f"unknown dtype {dtype!r}: expected auto, {', '.join(names)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as e:
        raise ConfigError(f"unknown device {device!r}: expected auto, cpu or cuda[:N]") from e
    if where.type not in ("cpu", "cuda"):
        raise ConfigError(f"unsupported device {device!r}: expected auto, cpu or cuda[:N]")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ResourceError("device cuda was asked for, but PyTorch sees none: take --device cpu")
    if dtype == "int8" and where.type != "cpu":
        raise ConfigError("dtype int8 runs on a CPU only: take --dtype bf16 or --device cpu")
    if dtype != "auto":
        return Choice(cast(Dtype, dtype), where, "as asked")
    if where.type == "cuda":
        return Choice("bf16", where, "a GPU is here")
    if isinstance(config, V4Config):
        problem = deepseek_v4_build.unsupported(config)
    else:
        problem = unsupported(config)
    if problem is None:
        try:
            library.load()
        except ResourceError as e:
            problem = str(e).split(":")[0]
    if problem is None:
        return Choice("int8", where, "no GPU; integer kernels are the fastest on a CPU")
    return Choice("fp32", where, f"no GPU, and int8 is not possible here: {problem}")


def build_target(
    checkpoint: Checkpoint, choice: Choice, *, num_slots: int, max_context: int | None = None
) -> Decoder | DeepseekV4:
    """Load the weights and lay out `num_slots` cache slots.

    Raises ConfigError for a context the model was not made for, ResourceError if memory is short.
    """
    config = checkpoint.config
    usual = min(config.max_context, DEFAULT_CONTEXT)
    context = usual if max_context is None else max_context
    if not 2 <= context <= config.max_context:
        raise ConfigError(
            f"max_context={context} is out of range: {checkpoint.name} holds 2 to"
            f" {config.max_context} tokens"
        )
    if num_slots < 1:
        raise ConfigError(f"max_users={num_slots} is out of range: expected 1 or more")
    _check_memory(config, choice, num_slots, context)
    if isinstance(config, V4Config):
        return deepseek_v4_build.build(
            config,
            checkpoint.weights,
            choice.dtype,
            num_slots=num_slots,
            max_context=context,
            device=choice.device,
        )
    if choice.dtype == "int8":
        return Int8Decoder(config, checkpoint.weights, num_slots=num_slots, max_context=context)
    return TorchDecoder(
        config,
        checkpoint.weights,
        dtype=torch.float32 if choice.dtype == "fp32" else torch.bfloat16,
        num_slots=num_slots,
        max_context=context,
        device=choice.device,
    )


def parameters(config: DecoderConfig) -> int:
    """Weights of the matrices (norms and biases are too few to count)."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = 3 * c.hidden_size * c.intermediate_size
    tables = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    return c.num_layers * (attention + mlp) + tables


def _check_memory(
    c: DecoderConfig | V4Config, choice: Choice, num_slots: int, max_context: int
) -> None:
    if isinstance(c, V4Config):
        weight_bytes = deepseek_v4_build.weight_bytes(c, choice.dtype)
        cache_bytes = deepseek_v4_build.cache_bytes(c, choice.dtype, num_slots, max_context)
    else:
        weight_bytes = {"fp32": 4.0, "bf16": 2.0, "int8": 1.07}[choice.dtype] * parameters(c)
        cache_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * num_slots * max_context
        cache_bytes *= 2 if choice.dtype == "bf16" else 4
    if choice.device.type == "cuda":
        available = torch.cuda.mem_get_info(choice.device)[0]
    else:
        available = _available_memory()
    if weight_bytes + cache_bytes > available:
        raise ResourceError(
            f"not enough memory: weights need {weight_bytes / 2**30:.1f} GiB in {choice.dtype} and"
            f" the caches up to {cache_bytes / 2**30:.1f} GiB,"
            f" {available / 2**30:.1f} GiB are free:"
            " take a smaller --dtype, --max-context or --max-users"
        )


def _available_memory() -> int:
    """Bytes that can be had without swapping."""
    try:
        with open("/proc/meminfo") as f:  # noqa: PTH123 (not a file of ours)
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
