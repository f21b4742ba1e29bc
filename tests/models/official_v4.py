"""Tiny DeepSeek-V4 checkpoints in the official layout, written with the tests' own quantiser.

What a tensor is stored as follows the published checkpoints: fp8 for the projections of attention,
the indexer's queries, the shared experts and what leads into a drafter; fp4 for routed experts;
fp32 for stream weights, sinks, positions and router biases; bf16 for the rest.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.models.deepseek_v4_config import dspark_from_hf, v4_from_hf
from dspark.models.deepseek_v4_names import CarriedDrafter, stage_shapes, tower_shapes
from tests.models.test_fp8_fp4 import random_fp4, random_fp8

FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
"""The published sizes of Flash with an MTP-1 head."""
FLASH_DSPARK = FLASH | {
    "compress_ratios": [*FLASH["compress_ratios"], 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
_SMALL = {
    "vocab_size": 96,
    "hidden_size": 160,  # more than one square of 128, and the last one not whole
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 24,
    "sliding_window": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_hash_layers": 1,
}
TINY: dict[str, Any] = FLASH | _SMALL | {"compress_ratios": [0, 4, 128, 4, 0]}
TINY_DSPARK: dict[str, Any] = FLASH_DSPARK | _SMALL | {
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "dspark_noise_token_id": 95,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 12,
}  # fmt: skip
_FP8 = re.compile(
    r".*(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123]|e_proj|h_proj|main_proj)\.weight"
)
_FP32 = re.compile(r".*(hc_\w+_(fn|base|scale)|attn_sink|ape|gate\.bias)")


def kind(name: str) -> str:
    """How the published checkpoints store a tensor."""
    if name.endswith("tid2eid"):
        return "I64"
    if ".experts." in name:
        return "FP4"
    if _FP8.fullmatch(name) and "compressor" not in name:
        return "FP8"
    return "F32" if _FP32.fullmatch(name) else "BF16"


def shapes(raw: dict[str, Any], drafter: CarriedDrafter | None) -> dict[str, tuple[int, ...]]:
    config = v4_from_hf(raw)
    return tower_shapes(config) | ({} if drafter is None else stage_shapes(config, drafter))


def carried(raw: dict[str, Any]) -> CarriedDrafter:
    settings = dspark_from_hf(raw)
    if settings is None:
        return CarriedDrafter("mtp1", 1)
    tables = ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w2.weight")
    return CarriedDrafter("dspark", 3, tables, True, settings)


def tensors(
    raw: dict[str, Any], drafter: CarriedDrafter | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the files hold (scales included), and the values that the tensors stand for (fp64, or
    int64 for the table of experts)."""
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for seed, (name, shape) in enumerate(shapes(raw, drafter).items()):
        g = torch.Generator().manual_seed(seed)
        how = kind(name)
        if how in ("FP8", "FP4"):
            make = random_fp8 if how == "FP8" else random_fp4
            stored[name], scale, values[name] = make(shape[0], shape[1], seed)
            stored[name.removesuffix("weight") + "scale"] = scale
        elif how == "I64":
            stored[name] = torch.randint(0, raw["n_routed_experts"], shape, generator=g)
            values[name] = stored[name]
        else:
            dtype = torch.float32 if how == "F32" else torch.bfloat16
            stored[name] = torch.randn(shape, generator=g).to(dtype)
            values[name] = stored[name].double()
    return stored, values


def write(
    directory: Path, raw: dict[str, Any], stored: dict[str, Tensor], num_shards: int = 1
) -> Path:
    """config.json and one file, or shards with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    if num_shards == 1:
        save_file(stored, directory / "model.safetensors")
        return directory
    names, where = list(stored), {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = names[i * len(names) // num_shards : (i + 1) * len(names) // num_shards]
        save_file({n: stored[n] for n in part}, directory / file)
        where.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
