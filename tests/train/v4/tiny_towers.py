"""A tiny tower to train in seconds, and its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark.train.config import build
from dspark.train.v4.pretrain import PretrainConfig

WORDS = ("the", "old", "house", "by", "sea", "was", "quiet", "until", "a", "small", "boat", "came")


def text(path: Path, rows: int = 40) -> Path:
    """Rows whose answers count words that the prompt names: easy to learn by heart."""
    lines = []
    for i in range(rows):
        words = [WORDS[(i * j) % len(WORDS)] for j in range(1, 6 + i % 9)]
        answer = " ".join(f"{w} and {w}," for w in words)
        row = {"prompt": f"Say {words[0]} {i}.", "answer": answer, "temperature": 0.7,
               "finish_reason": "stop" if i % 3 else "length"}  # fmt: skip
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def raw(folder: Path, **train: Any) -> dict[str, dict[str, Any]]:
    """Every kind of layer; the text is written beside the run."""
    return {
        "model": {"vocab_size": 300, "hidden_size": 32, "compress_ratios": [0, 4, 8],
                  "num_attention_heads": 2, "head_dim": 16, "qk_rope_head_dim": 8,
                  "q_lora_rank": 16, "o_lora_rank": 16, "sliding_window": 8, "index_n_heads": 2,
                  "index_head_dim": 16, "index_topk": 4, "n_routed_experts": 4,
                  "moe_intermediate_size": 16, "num_hash_layers": 1, "hc_sinkhorn_iters": 5},
        "text": {"files": [str(text(folder / "text.jsonl"))], "max_tokens": 96, "held_out": 4},
        "train": {"out": str(folder / "run"), "epochs": 2, "tokens_per_step": 512, "lr": 5e-3,
                  "save_every": 4, "eval_every": 4, "log_every": 3, "weight_decay": 0.1} | train,
    }  # fmt: skip


def config(folder: Path, **train: Any) -> PretrainConfig:
    return build(PretrainConfig, raw(folder, **train))
