"""A drafter for other engines: the same weights in a layout that they read.

    deepspec      the flat layout of DeepSpec's Qwen3 drafters, read by most engines. It ranks the
                  whole vocabulary and its anchor predicts.
    speculators   the layout of vLLM's library: backbone nested, layer ids one higher, a draft
                  vocabulary as `d2t` [V'] (target id minus draft id) and `t2d` [V] (which ids
                  are in it), with `markov_w2` and `lm_head` restricted to its rows.

Our own directories are almost the first already; an export drops what is only ours, fills in what
the reference code insists on, and can put the target's embedding and head back, which some loaders
want to find beside the drafter. Options that would be lost and change the numbers are refused, all
of them by name. V tokens, V' of them drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dspark.drafters import dialects
from dspark.drafters.checkpoint import W2, LoadedDrafter, load, write
from dspark.drafters.config import DrafterConfig
from dspark.errors import ConfigError

Layout = Literal["deepspec", "speculators"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
NUM_ANCHORS = 512
"""What DeepSpec trains with; its module wants the number even where it is not used."""


def export(
    drafter: Path,
    out: Path,
    *,
    layout: Layout = "deepspec",
    with_embeddings: str | None = None,
    force: bool = False,
) -> list[str]:
    """Write a copy of the checkpoint in `drafter` to the directory `out`, in bf16.

    with_embeddings  a model name: its embedding [V, D] and head are written, too
    force            write into a directory that is not empty, over files of the same names

    Returns what the copy lacks, one sentence each. Raises ConfigError for an unknown layout, an
    option that it cannot express or an `out` in use; CheckpointError for a drafter that cannot be
    read or was made for another model, and if `out` cannot be written. Nothing is left half done.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}: expected one of {', '.join(LAYOUTS)}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: name a directory")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ConfigError(f"{out} is not empty: name another directory, or add --force")
    found = load(drafter)
    lost = inexpressible(found.config, layout)
    if lost:
        raise ConfigError(
            f"{drafter} cannot be exported as {layout}, which has no word for {', '.join(lost)}"
        )
    config, notes = _stripped(found.config, layout)
    shared: dict[str, Tensor] = {}
    if with_embeddings is not None:
        config, shared = _target_tensors(config, found, with_embeddings, layout)
    if layout == "deepspec" and not config.num_target_layers:
        raise ConfigError(
            f"{drafter} does not say how many layers its target has, which {layout} wants: add"
            " --with-embeddings MODEL"
        )
    tensors = {name: t.to(torch.bfloat16) for name, t in found.model.state_dict().items()} | shared
    if layout == "speculators":
        raw = dialects.to_speculators(config)
        if found.draft_ids is not None:
            tensors |= _draft_vocabulary(config, found.draft_ids, tensors)
        if "/" not in config.target:
            notes.append(
                f"its target is named {config.target!r}, which is no hub name: engines that find"
                " the target by speculators_config.verifier.name_or_path need one there"
            )
    else:
        raw = dialects.to_flat(config)
        raw["num_anchors"] = found.training.get("num_anchors", NUM_ANCHORS)
    raw |= {"dtype": "bfloat16", "training": found.training}
    write(out, raw, {name: t.contiguous() for name, t in tensors.items()})
    return notes


def inexpressible(c: DrafterConfig, layout: Layout) -> list[str]:
    """The options of a drafter that would change its proposals and that `layout` cannot say."""
    lost = {
        "kind=mtp": c.kind == "mtp",
        "inject": c.inject,
        "conv": c.conv,
        "layer_fusion": c.layer_fusion,
        "markov_head_type=bilinear": bool(c.markov_rank) and c.markov_head_type == "bilinear",
        "qk_norm=false": not c.qk_norm,
        "rope_freq_factors": c.rope.freq_factors is not None,
        "sample_from_anchor=false": layout == "deepspec" and not c.sample_from_anchor,
    }
    return [name for name, is_lost in lost.items() if is_lost]


def _stripped(c: DrafterConfig, layout: Layout) -> tuple[DrafterConfig, list[str]]:
    """Without what other engines ignore at no harm to the text, and a note on each."""
    notes = []
    if c.candidates:
        notes.append(
            f"candidates={c.candidates} is dropped: the sequential stage will rank every token"
        )
        c = replace(c, candidates=0)
    if layout == "deepspec" and c.draft_vocab_size:
        notes.append(
            f"draft_vocab_size={c.draft_vocab_size} is dropped: the drafter will rank the whole"
            f" vocabulary of {c.vocab_size}, with no Markov bias outside its own"
        )
        c = replace(c, draft_vocab_size=0)
    return c, notes


def _target_tensors(
    c: DrafterConfig, found: LoadedDrafter, model: str, layout: Layout
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """The target's embedding [V, D] and head ([V', D] for speculators), and what it tells."""
    from dspark.models.loading import load_checkpoint

    target = load_checkpoint(model)
    t = target.decoder_config
    c.check_target(t.vocab_size, t.hidden_size, t.num_layers, str(found.path))
    embedding = target.weights.tensor("model.embed_tokens.weight")
    head = embedding if t.tie_embeddings else target.weights.tensor("lm_head.weight")
    if layout == "speculators" and found.draft_ids is not None:
        head = head[found.draft_ids]
    named = replace(c, num_target_layers=t.num_layers, target=c.target or target.name)
    # Two tensors of one storage cannot be stored: a tied head is copied.
    return named, {
        "embed_tokens.weight": embedding.to(torch.bfloat16),
        "lm_head.weight": head.to(torch.bfloat16, copy=True),
    }


def _draft_vocabulary(
    c: DrafterConfig, ids: Tensor, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    in_it = torch.zeros(c.vocab_size, dtype=torch.bool)
    in_it[ids] = True
    extra: dict[str, Any] = {"d2t": ids - torch.arange(len(ids)), "t2d": in_it}
    return extra | ({W2: tensors[W2][ids]} if W2 in tensors else {})
