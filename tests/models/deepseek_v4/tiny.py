"""Tiny random DeepSeek-V4 models: `transformers`' as the oracle, and ours with its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_config import v4_from_hf
from dspark.models.target import Segment, pack
from tests.tiny import DictSource

CSA, HCA, SWA = (
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "sliding_attention",
)
VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 6,
    "sliding_window": 8,
    "index_n_heads": 16,  # with few heads many scores are exactly zero, and ties decide
    "index_head_dim": 32,
    "index_topk": 4,
    "hc_mult": 4,
    "max_position_embeddings": 1024,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALL_KINDS = (SWA, CSA, HCA, CSA, SWA)


def oracle(
    kinds: tuple[str, ...] = ALL_KINDS, seed: int = 0, hca: int = 8, **overrides: Any
) -> Any:
    """A tiny random model in which nothing is left at a neutral value."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    sizes = {**SIZES, "num_hash_layers": 1, **overrides}
    config = DeepseekV4Config(
        layer_types=list(kinds),
        num_hidden_layers=len(kinds),
        compress_rates={CSA: 4, HCA: hca},
        **sizes,
    )
    config.tie_last_hidden_states = False
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                p.copy_(torch.randint(sizes["n_routed_experts"], p.shape))
            elif name.endswith(("norm.weight", "layernorm.weight", "scale")):
                p.add_(torch.randn_like(p) * 0.1)
            elif name.endswith(("sinks", "position_bias", "base")):
                p.add_(torch.randn_like(p) * 0.5)
            elif name.endswith("correction_bias"):
                p.add_(torch.randn_like(p) * 0.2)
    return model


_RENAMED = (
    ("model.", ""), ("embed_tokens", "embed"), ("lm_head", "head"), ("self_attn.", "attn."),
    ("mlp.", "ffn."), ("hc_head.hc_", "hc_head_"), ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"), ("input_layernorm", "attn_norm"), ("compressor.kv_norm",
    "compressor.norm"), ("post_attention_layernorm", "ffn_norm"), ("sinks", "attn_sink"),
    ("compressor.indexer.scorer.", "indexer."), ("compressor.indexer.q_b_proj", "indexer.wq_b"),
    ("compressor.indexer.", "indexer.compressor."), ("compressor.kv_norm", "compressor.norm"),
    ("q_a_norm", "q_norm"), ("position_bias", "ape"), ("gate.e_score_correction_bias", "gate.bias"),
    ("shared_experts.gate_proj", "shared_experts.w1"), ("shared_experts.up_proj",
    "shared_experts.w3"), ("shared_experts.down_proj", "shared_experts.w2"), ("q_a_proj", "wq_a"),
    ("q_b_proj", "wq_b"), ("kv_proj", "wkv"), ("gate_proj", "wgate"), ("o_a_proj", "wo_a"),
    ("o_b_proj", "wo_b"),
)  # fmt: skip


def official(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of `transformers` under their official names, experts apart."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if "rotary" in name:
            continue
        for old, new in _RENAMED:
            name = name.replace(old, new)
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                p = name.replace("gate_up_proj", f"{e}.")
                out[p + "w1.weight"], out[p + "w3.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                out[name.replace("down_proj", f"{e}.w2.weight")] = down
        else:
            out[name] = tensor
    return out


def source(model: Any) -> tuple[V4Config, DictSource]:
    return v4_from_hf(model.config.to_dict()), DictSource(official(dict(model.state_dict())))


def target(
    model: Any,
    *,
    dtype: torch.dtype = torch.float32,
    num_slots: int = 4,
    max_context: int = 512,
    max_block: int = 64,
    path: str = "mixed",
) -> DeepseekV4:
    """Ours with the oracle's weights.

    path: "torch" on PyTorch's operations alone, "kernels" on our own wherever they exist, "mixed"
    as users have it: kernels for few rows.
    """
    config, weights = source(model)
    ours = DeepseekV4(
        config,
        weights,
        dtype=dtype,
        num_slots=num_slots,
        max_context=max_context,
        device=torch.device("cpu"),
        max_block=max_block,
    )
    if path == "torch":
        ours.maths.kernels = None
    elif path == "kernels":
        ours.maths.native = ours.maths.products = lambda rows: ours.maths.kernels  # type: ignore[method-assign]
    return ours


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB, (n,), generator=g).tolist())


def run(model: DeepseekV4, ids: tuple[int, ...], start: int = 0, slot: int = 0) -> Tensor:
    return model.forward(pack([Segment(slot, start, ids, len(ids))])).logits


def expected(model: Any, ids: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits
