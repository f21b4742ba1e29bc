"""Tiny random models and stubs that the tests share (never longer than milliseconds to build).

T1 of the field-failure list: initialiser range 0.2, because small random models with the usual 0.02
repeat one token and hide bugs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.config import DecoderConfig, from_hf
from dspark.models.decoder import Decoder, TorchDecoder
from dspark.models.int8 import Int8Decoder
from dspark.models.weights import QuantBlocks

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class DictSource:
    """A `WeightSource` over a state dict in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self._tensors.values())

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"no tensor {name}")
        return self._tensors[name]

    def blocks(self, name: str) -> QuantBlocks | None:
        return None


def oracle(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random model of `transformers`: llama, mistral, qwen2, qwen3 or smollm3."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    }[kind]
    torch.manual_seed(seed)
    sizes = {**SIZES, "head_dim": 16, **overrides}
    model = model_class(config_class(**sizes)).eval()
    with torch.no_grad():  # biases start at zero and norms at one; neither would be tested then
        for name, p in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def source(model: Any) -> tuple[DecoderConfig, DictSource]:
    """Our view of an oracle: its configuration and weights."""
    return from_hf(model.config.to_dict()), DictSource(dict(model.state_dict()))


def target(
    model: Any = None, *, dtype: str = "fp32", num_slots: int = 8, max_context: int = 256
) -> Decoder:
    """Our decoder with an oracle's weights (a tiny Llama without one)."""
    config, weights = source(oracle("llama") if model is None else model)
    if dtype == "int8":
        return Int8Decoder(config, weights, num_slots=num_slots, max_context=max_context)
    return TorchDecoder(
        config,
        weights,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        num_slots=num_slots,
        max_context=max_context,
        device=torch.device("cpu"),
    )
