"""Tiny random drafters for the tiny targets of `tests/tiny.py`: untrained, so their guesses are bad
and every path of verification is taken, but complete."""

from __future__ import annotations

from typing import Any

import torch

from dspark.drafters.base import Drafter
from dspark.drafters.block import BlockModel
from dspark.drafters.block_drafter import BlockDrafter
from dspark.drafters.config import DrafterConfig, like_target
from dspark.drafters.mtp import MtpModel
from dspark.drafters.mtp_drafter import MtpDrafter
from dspark.models.decoder import Decoder

FORMS: dict[str, dict[str, Any]] = {
    "mtp": {"kind": "mtp"},
    "dflash": {},
    "dflash-masks": {"sample_from_anchor": False},
    "vanilla": {"markov_rank": 8, "confidence_head": True},
    "gated": {"markov_rank": 8, "markov_head_type": "gated", "confidence_head": True},
    "rnn": {"markov_rank": 8, "markov_head_type": "rnn", "confidence_head": True},
    "bilinear": {"markov_rank": 8, "markov_head_type": "bilinear", "candidates": 16},
    "everything": {
        "markov_rank": 8,
        "confidence_head": True,
        "inject": True,
        "conv": True,
        "layer_fusion": True,
        "draft_vocab_size": 100,
        "candidates": 16,
    },
    "plain-confidence": {"confidence_head": True, "confidence_head_with_markov": False},
}
"""Every kind of drafter and head."""


def config(target: Decoder, form: str = "vanilla", **overrides: Any) -> DrafterConfig:
    fields = {**FORMS[form], **overrides}
    kind = fields.pop("kind", "block")
    last = target.num_layers - 1
    base = like_target(target.config, kind, (last,) if kind == "mtp" else (0, 1), 2)
    if kind == "mtp":
        base["num_layers"] = 1
    else:
        base |= {"block_size": 5, "mask_token_id": 3}
    return DrafterConfig(**{**base, **fields})


def model(c: DrafterConfig, seed: int = 0) -> BlockModel | MtpModel:
    """Random weights everywhere, zeros and ones included."""
    torch.manual_seed(seed)
    made = BlockModel(c) if c.kind == "block" else MtpModel(c)
    with torch.no_grad():
        for name, p in made.named_parameters():
            noise = torch.randn_like(p) * 0.2
            p.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return made.eval()


def draft_ids(c: DrafterConfig) -> torch.Tensor | None:
    if not c.draft_vocab_size:
        return None
    order = torch.randperm(c.vocab_size, generator=torch.Generator().manual_seed(1))
    return order[: c.draft_vocab_size].sort().values


def drafter(
    target: Decoder,
    form: str = "vanilla",
    *,
    num_draft_tokens: int | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Drafter:
    c = config(target, form, **overrides)
    made, ids = model(c, seed), draft_ids(c)
    if isinstance(made, BlockModel):
        return BlockDrafter(target, c, made, ids, num_draft_tokens)
    return MtpDrafter(target, c, made, ids, num_draft_tokens)
