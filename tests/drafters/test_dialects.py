"""Layouts of others: one drafter, spelled as each of them spells it, reads as one configuration.

The configurations are written by hand after the public ones, with small sizes; the tensors are
those of our own modules under the names that the layout gives them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.drafters.checkpoint import load, read_config
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dialects import parse, to_flat, to_speculators
from dspark.errors import CheckpointError
from dspark.models.config import RopeConfig
from tests.drafters import tiny_drafters
from tests.drafters.test_checkpoint import TARGET

BACKBONE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 257,
}
"""As `transformers` writes a Qwen3 configuration."""
HEADS: dict[str, Any] = {
    "markov_rank": 8,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
WHERE: dict[str, Any] = {"mask_token_id": 3, "target_layer_ids": [0, 1]}
DEEPSPEC = {
    **BACKBONE,
    **HEADS,
    **WHERE,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 5,
    "num_anchors": 512,
    "num_target_layers": 3,
}
SPECFORGE = {
    **BACKBONE,
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 5,
    "num_target_layers": 3,
    "dflash_config": {
        **HEADS,
        **WHERE,
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "projector_type": "dspark",
    },
}
DFLASH = {
    **BACKBONE,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 6,
    "num_target_layers": 3,
    "dflash_config": WHERE,
}
SPECULATORS = {
    **HEADS,
    "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [1, 2],
    "block_size": 5,
    "draft_vocab_size": 257,
    "mask_token_id": 3,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "dspark",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **{k: v for k, v in BACKBONE.items() if k not in ("rope_theta", "rope_scaling")},
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
GATED = tiny_drafters.config(TARGET, "gated")


def changed(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (raw | changes).items() if v is not None}


def inside(raw: dict[str, Any], key: str, **changes: Any) -> dict[str, Any]:
    return raw | {key: changed(raw[key], **changes)}


def state(config: DrafterConfig) -> dict[str, Tensor]:
    return {n: t.detach().bfloat16() for n, t in tiny_drafters.model(config).state_dict().items()}


def put(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def same_weights(folder: Path, expected: dict[str, Tensor]) -> None:
    found = load(folder).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], t.float()) for n, t in expected.items())


@pytest.mark.parametrize(
    "raw, expected",
    [
        (DEEPSPEC, GATED),
        (SPECFORGE, GATED),
        (SPECULATORS, replace(GATED, num_target_layers=0, target="some/target")),
        (SPECULATORS | {"num_target_layers": 3}, replace(GATED, target="some/target")),
    ],
    ids=["deepspec", "specforge", "speculators", "speculators of ours"],
)
def test_one_drafter_in_every_spelling(
    raw: dict[str, Any], expected: DrafterConfig, tmp_path: Path
) -> None:
    weights = state(GATED)
    put(tmp_path, raw, weights)
    assert read_config(tmp_path) == expected
    same_weights(tmp_path, weights)


def test_a_dflash_of_deepspec_is_flat_and_predicts_from_the_anchor(tmp_path: Path) -> None:
    """The form that the same project releases: no heads, and no keys of heads either."""
    raw = changed(
        DEEPSPEC,
        markov_rank=0,
        markov_head_type=None,
        enable_confidence_head=False,
        confidence_head_with_markov=None,
    )
    config = tiny_drafters.config(TARGET, "dflash")
    own = torch.randn(257, 64)
    put(tmp_path, raw, state(config) | {"embed_tokens.weight": own, "lm_head.weight": own})
    found = load(tmp_path)
    assert found.config == config and found.config.num_slots == found.config.block_size == 5
    same_weights(tmp_path, state(config))


def test_plain_dflash_counts_the_anchor_which_does_not_predict(tmp_path: Path) -> None:
    config = tiny_drafters.config(TARGET, "dflash-masks")
    assert config.num_slots == 6 and config.block_size == 5
    put(tmp_path, DFLASH, state(config))
    assert read_config(tmp_path) == config
    same_weights(tmp_path, state(config))
    moved = inside(changed(DFLASH, block_size=None), "dflash_config", block_size=6)
    assert parse(moved) == config, "newer ones hold the size inside"


def test_speculators_dflash_counts_the_anchor_too() -> None:
    raw = SPECULATORS | {"speculators_model_type": "dflash", "block_size": 6}
    for key in (*HEADS, "sample_from_anchor"):
        raw.pop(key)
    config = tiny_drafters.config(TARGET, "dflash-masks", num_target_layers=0)
    assert parse(raw) == replace(config, target="some/target")
    dspark = parse(SPECULATORS | {"sample_from_anchor": False})
    assert dspark.block_size == 4 and dspark.num_slots == 5 and dspark.markov_rank == 8


def test_speculators_leave_out_what_is_their_default() -> None:
    """Which for one of theirs is a rank of 256 and a confidence head, unlike anywhere else."""
    raw = {k: v for k, v in SPECULATORS.items() if k not in HEADS and k != "sample_from_anchor"}
    raw["transformer_layer_config"] = {"hidden_size": 2560, "num_hidden_layers": 5}
    raw["draft_vocab_size"] = 32000
    c = parse(raw)
    assert (c.markov_rank, c.markov_head_type, c.confidence_head) == (256, "vanilla", True)
    assert c.sample_from_anchor and c.vocab_size == 151936 and c.draft_vocab_size == 32000
    assert (c.head_dim, c.num_heads, c.max_context) == (128, 32, 32768)


def test_a_draft_vocabulary_is_stored_as_differences(tmp_path: Path) -> None:
    config = tiny_drafters.config(TARGET, "gated", draft_vocab_size=100)
    ids = tiny_drafters.draft_ids(config)
    assert ids is not None
    weights = state(config)
    mask = torch.zeros(257, dtype=torch.bool)
    mask[ids] = True
    name = "markov_head.markov_w2.weight"
    files = {
        **weights,
        name: weights[name][ids],
        "d2t": ids - torch.arange(100),
        "t2d": mask,
        "lm_head.weight": torch.randn(100, 64),
    }
    put(tmp_path, SPECULATORS | {"draft_vocab_size": 100}, files)
    found = load(tmp_path)
    assert found.draft_ids is not None and found.draft_ids.tolist() == ids.tolist()
    assert torch.equal(found.model.state_dict()[name][ids], weights[name][ids].float())
    put(tmp_path, SPECULATORS | {"draft_vocab_size": 100}, files | {"d2t": ids})
    with pytest.raises(CheckpointError, match="must rise and stay within"):
        load(tmp_path)
    files.pop("d2t")
    put(tmp_path, SPECULATORS | {"draft_vocab_size": 100}, files)
    with pytest.raises(CheckpointError, match="lacks tensors"):
        load(tmp_path)


def test_early_specforge_files_wrap_the_heads(tmp_path: Path) -> None:
    weights = state(GATED)
    heads = ("markov_head.", "confidence_head.")
    wrapped = {("logit_head." if n.startswith(heads) else "") + n: t for n, t in weights.items()}
    assert wrapped.keys() != weights.keys()
    put(tmp_path, SPECFORGE, wrapped)
    same_weights(tmp_path, weights)


def test_specforge_defaults_are_its_own() -> None:
    """The head exists if its loss had a weight, and reads no Markov embedding unless told so."""
    less = inside(
        SPECFORGE,
        "dflash_config",
        enable_confidence_head=None,
        confidence_head_with_markov=None,
        projector_type=None,
    )
    c = parse(less)
    assert c.confidence_head and not c.confidence_head_with_markov and c.sample_from_anchor
    assert not parse(inside(less, "dflash_config", confidence_head_alpha=0.0)).confidence_head


BAD: list[tuple[dict[str, Any], str]] = [
    (inside(SPECFORGE, "dflash_config", projector_type="domino"), "projector_type is 'domino'"),
    (inside(SPECFORGE, "dflash_config", block_size=7), "which is it"),
    (inside(SPECFORGE, "dflash_config", mask_token_id=None), "mask_token_id is missing"),
    (inside(SPECFORGE, "dflash_config", mask_token_id=257), "outside the embedding"),
    (inside(DFLASH, "dflash_config", target_layer_ids=None), "target_layer_ids is None"),
    (inside(DFLASH, "dflash_config", target_layer_ids=[0, 3]), "3 is out of range"),
    (inside(DFLASH, "dflash_config", markov_rank=8), "has heads"),
    (inside(DFLASH, "dflash_config", shift_label=True), "shift_label"),
    (DFLASH | {"block_size": 1}, "the anchor and at least one mask"),
    (DFLASH | {"dflash_config": [1]}, "expected an object"),
    (changed(DFLASH, dflash_config=None), "without dflash_config"),
    (DFLASH | {"layer_types": ["sliding_attention"] * 2}, "sliding-window"),
    (SPECULATORS | {"speculators_model_type": "eagle3"}, "'eagle3'"),
    (SPECULATORS | {"aux_hidden_state_layer_ids": [-1, 2]}, "-2 is out of range"),
    (SPECULATORS | {"aux_hidden_state_layer_ids": None}, "expected a list"),
    (SPECULATORS | {"target_hidden_size": 128}, "another width"),
    (SPECULATORS | {"sample_from_anchor": "yes"}, "sample_from_anchor is 'yes'"),
    (SPECULATORS | {"draft_vocab_size": 300}, "draft_vocab_size=300 is out of range"),
    (SPECULATORS | {"speculators_config": 3}, "wrong kind"),
    (inside(SPECULATORS, "transformer_layer_config", model_type="bert"), "unknown backbone"),
]


@pytest.mark.parametrize("raw, message", BAD, ids=[m for _, m in BAD])
def test_what_makes_no_sense_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as info:
        parse(raw)
    assert message in str(info.value)


@pytest.mark.parametrize("form", tiny_drafters.FORMS)
def test_what_is_written_is_read(form: str) -> None:
    config = replace(
        tiny_drafters.config(TARGET, form), target="some/target", qk_norm=False, max_context=99
    )
    config = replace(config, rope=RopeConfig(theta=7e4, original_max_position=99))
    raw = json.loads(json.dumps(to_flat(config)))
    assert parse(raw) == config
    if form in ("dflash", "dflash-masks", "vanilla", "gated", "rnn", "plain-confidence"):
        plain = replace(config, qk_norm=True)
        assert parse(json.loads(json.dumps(to_speculators(plain)))) == plain
