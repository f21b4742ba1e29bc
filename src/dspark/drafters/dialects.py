"""How a drafter's `config.json` is spelled: the layouts in use, read into one `DrafterConfig`.

All of them hold the sizes of a Qwen3-like backbone under their usual names (`hidden_size`,
`num_hidden_layers`, ...). They differ in where the rest stands, and in what two numbers count:

    layout        seen in               the drafter's own keys     a block of `block_size` b drafts
    flat          DeepSpec, and ours    top level                  b: the anchor's slot predicts
    DFlash        z-lab                 `dflash_config`            b - 1: only the masks predict
    SpecForge     SpecForge             `dflash_config`, with      b
                                        `projector_type` "dspark"
    speculators   vLLM's speculators    top level, the backbone    b if `sample_from_anchor`, else
                                        under                      b - 1
                                        `transformer_layer_config`

Layer ids count alike in the first three (i is the output of layer i, -1 the embedding); speculators
counts hidden states, of which the embedding is number 0, so its ids are one higher. It does not say
how many layers the target has, and may draft from part of the vocabulary.

This project writes the flat layout. What that cannot express stands in one object `dspark`, with
only what differs from the default, so that an ordinary DSpark drafter has none of it; and what its
training came to in `training`. A key inside `dspark` that is not known is refused: it would change
the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, cast

from dspark.drafters.config import DrafterConfig, HeadType, Kind
from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import SUPPORTED, DecoderConfig, RopeConfig, from_hf

DEFAULTS = {f.name: f.default for f in fields(DrafterConfig)}
OPTIONS = ("inject", "conv", "layer_fusion", "draft_vocab_size", "candidates", "qk_norm", "target",
           "sample_from_anchor")  # fmt: skip
"""Fields of `DrafterConfig` that the flat layout has no key for."""
_EXTRA = ("kind", "rope_freq_factors")
_QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
"""What `transformers` takes for keys that a nested backbone leaves out."""


def parse(raw: Mapping[str, Any]) -> DrafterConfig:
    """Read a drafter's `config.json`, whichever layout it has. Raises CheckpointError."""
    try:
        if is_speculators(raw):
            return _speculators(raw)
        if raw.get("dflash_config") is not None:
            return _nested(raw)
        if "DFlashDraftModel" in (raw.get("architectures") or ()):
            raise CheckpointError("a DFlashDraftModel without dflash_config is not supported")
        return _flat(raw)
    except ConfigError as e:
        raise CheckpointError(str(e)) from e
    except (TypeError, ValueError, AttributeError) as e:
        raise CheckpointError(f"holds a value of a wrong kind: {e}") from e


def is_speculators(raw: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in raw or "transformer_layer_config" in raw


def tensor_name(stored: str) -> str:
    """The name that a stored tensor has here: early SpecForge files wrapped the heads."""
    return stored.removeprefix("logit_head.")


def _nested(raw: Mapping[str, Any]) -> DrafterConfig:
    """`dflash_config`: z-lab's DFlash, and SpecForge's DSpark, whose class is a default for
    `projector_type`. Plain DFlash counts the anchor, which does not predict, as part of a block."""
    nested = raw["dflash_config"]
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"dflash_config is {nested!r}, expected an object")
    for key in sorted(nested.keys() & raw.keys()):
        if nested[key] != raw[key]:
            raise CheckpointError(
                f"{key} is {raw[key]!r}, and {nested[key]!r} in dflash_config: which is it?"
            )
    named = "DSparkDraftModel" in (raw.get("architectures") or ())
    kind = nested.get("projector_type") or ("dspark" if named else "dflash")
    if kind not in ("dflash", "dspark"):
        raise CheckpointError(f"projector_type is {kind!r}, expected 'dspark' or 'dflash'")
    if nested.get("shift_label"):
        raise CheckpointError("shift_label in dflash_config is not supported")
    usual: dict[str, Any] = {
        "enable_confidence_head": bool(nested.get("confidence_head_alpha")),
        "confidence_head_with_markov": False,
    }
    flat = {**usual, **raw, **nested}
    if kind == "dspark":
        return _flat(flat)
    if _integer(flat, "markov_rank", 0) or flat["enable_confidence_head"]:
        raise CheckpointError("dflash_config has heads, but projector_type is not 'dspark'")
    size = _integer(flat, "block_size")
    if size < 2:
        raise CheckpointError(f"block_size is {size}, expected the anchor and at least one mask")
    return replace(_flat({**flat, "block_size": size - 1}), sample_from_anchor=False)


def _flat(raw: Mapping[str, Any]) -> DrafterConfig:
    own = raw.get("dspark") or {}
    unknown = sorted(set(own) - {*OPTIONS, *_EXTRA})
    if unknown:
        raise CheckpointError(f"unknown option in 'dspark': {', '.join(unknown)}")
    options = {name: _like(own, name, DEFAULTS[name]) for name in OPTIONS}
    backbone = _backbone(raw)
    factors = own.get("rope_freq_factors")
    if factors is not None:
        rope = cast(RopeConfig, backbone["rope"])
        backbone["rope"] = replace(rope, freq_factors=tuple(map(float, factors)))
    return DrafterConfig(
        **cast(Any, backbone),
        **cast(Any, options),
        **_heads(raw, enabled=False),
        kind=_kind(own.get("kind", "block")),
        block_size=_integer(raw, "block_size", 1 if own.get("kind") == "mtp" else None),
        num_target_layers=_integer(raw, "num_target_layers"),
        target_layer_ids=_layer_ids(raw, "target_layer_ids"),
        mask_token_id=_mask(raw),
    )


def _speculators(raw: Mapping[str, Any]) -> DrafterConfig:
    kind = raw.get("speculators_model_type")
    if kind not in ("dspark", "dflash"):
        raise CheckpointError(
            f"speculators_model_type is {kind!r}, which is not read: expected 'dspark' or 'dflash'"
        )
    backbone = _backbone({**_QWEN3, **(raw.get("transformer_layer_config") or {})})
    hidden = raw.get("target_hidden_size")
    if hidden not in (None, backbone["hidden_size"]):
        raise CheckpointError(
            f"target_hidden_size is {hidden} and the drafter's hidden_size"
            f" {backbone['hidden_size']}: a drafter of another width is not supported"
        )
    anchor = _like(raw, "sample_from_anchor", kind == "dspark")
    drafted = _integer(raw, "draft_vocab_size", 0)
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    heads = _heads(raw, enabled=True, rank=256) if kind == "dspark" else {}
    return DrafterConfig(
        **cast(Any, backbone),
        **heads,
        kind="block",
        block_size=_integer(raw, "block_size", 8) - (not anchor),
        sample_from_anchor=cast(bool, anchor),
        num_target_layers=_integer(raw, "num_target_layers", 0),
        target_layer_ids=tuple(i - 1 for i in _layer_ids(raw, "aux_hidden_state_layer_ids")),
        mask_token_id=_mask(raw),
        draft_vocab_size=0 if drafted == backbone["vocab_size"] else drafted,
        target=str(verifier.get("name_or_path") or ""),
    )


def _heads(raw: Mapping[str, Any], *, enabled: bool, rank: int = 0) -> dict[str, Any]:
    """The sequential stage and the confidence head; how a head that is not there would be made is
    none of our business."""
    rank = _integer(raw, "markov_rank", rank)
    if rank < 0:
        raise CheckpointError(f"markov_rank is {rank}, expected 0 or more")
    kind = raw.get("markov_head_type") if rank else None
    on = _like(raw, "enable_confidence_head", enabled)
    return {
        "markov_rank": rank,
        "markov_head_type": cast(HeadType, "vanilla" if kind is None else kind),
        "confidence_head": on,
        "confidence_head_with_markov": not on or _like(raw, "confidence_head_with_markov", True),
    }


def _backbone(raw: Mapping[str, Any]) -> dict[str, object]:
    """Sizes and rotation, checked as a decoder's are."""
    kind = raw.get("model_type", "qwen3")
    if kind not in SUPPORTED:
        raise CheckpointError(
            f"unknown backbone: model_type is {kind!r}, supported are {', '.join(SUPPORTED)}"
        )
    types = raw.get("layer_types") or ()
    if raw.get("use_sliding_window") or any(t != "full_attention" for t in types):
        raise CheckpointError("a drafter with sliding-window layers is not supported")
    raw = dict(raw)
    if kind != "qwen3" and not raw.get("head_dim"):
        raw["head_dim"] = _integer(raw, "hidden_size") // _integer(raw, "num_attention_heads")
    # Whatever the target is, a drafter's layers are those of Qwen3.
    c: DecoderConfig = from_hf({**raw, "model_type": "qwen3"})
    if c.qkv_bias or c.o_bias or c.mlp_bias:
        raise CheckpointError("a drafter with biases in its layers is not supported")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
             "num_kv_heads", "head_dim", "max_context", "rms_norm_eps", "rope")  # fmt: skip
    return {name: getattr(c, name) for name in names}


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if value is None:
        raise CheckpointError(f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}, expected a whole number")
    return value


def _like(raw: Mapping[str, Any], key: str, default: object) -> object:
    """The value of `key`, of the default's type."""
    value = raw.get(key, default)
    if type(value) is not type(default):
        raise CheckpointError(f"{key} is {value!r}, expected something like {default!r}")
    return value


def _layer_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = raw.get(key)
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise CheckpointError(f"{key} is {value!r}, expected a list of layers of the target")
    return tuple(value)


def _mask(raw: Mapping[str, Any]) -> int | None:
    return None if raw.get("mask_token_id") is None else _integer(raw, "mask_token_id")


def _kind(value: object) -> Kind:
    if value not in ("block", "mtp"):
        raise CheckpointError(f"kind is {value!r}, expected 'block' or 'mtp'")
    return value


def to_flat(c: DrafterConfig) -> dict[str, Any]:
    """The flat layout, which `parse` reads back: an object for `config.json`."""
    raw: dict[str, Any] = {
        "architectures": ["DSparkMTPModel" if c.kind == "mtp" else "Qwen3DSparkModel"],
        **backbone_json(c),
        "num_target_layers": c.num_target_layers,
        "target_layer_ids": list(c.target_layer_ids),
    }
    if c.kind == "block":
        raw |= {"block_size": c.block_size, "mask_token_id": c.mask_token_id, **heads_json(c)}
    own = {name: getattr(c, name) for name in OPTIONS if getattr(c, name) != DEFAULTS[name]}
    if c.kind != "block":
        own["kind"] = c.kind
        if c.block_size != 1:
            raw["block_size"] = c.block_size
    if c.rope.freq_factors is not None:
        own["rope_freq_factors"] = list(c.rope.freq_factors)
    return {**raw, **({"dspark": own} if own else {})}


def to_speculators(c: DrafterConfig) -> dict[str, Any]:
    """The speculators layout, which `parse` reads back. `num_target_layers` is ours; the library
    keeps keys that it does not know."""
    kind = "dspark" if c.markov_rank or c.confidence_head or c.sample_from_anchor else "dflash"
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": c.block_size,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": c.target or None, "architectures": []},
        },
        "transformer_layer_config": backbone_json(c),
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
        "block_size": c.num_slots,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": c.sample_from_anchor,
        "num_target_layers": c.num_target_layers,
        "tie_word_embeddings": False,
        **(heads_json(c) if kind == "dspark" else {}),
    }


def backbone_json(c: DrafterConfig) -> dict[str, Any]:
    """The keys of a Qwen3 `config.json`."""
    return {
        "model_type": "qwen3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": c.max_context,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "rope_scaling": _rope_scaling(c.rope),
        "layer_types": ["full_attention"] * c.num_layers,
        "tie_word_embeddings": False,
    }


def heads_json(c: DrafterConfig) -> dict[str, Any]:
    """The sequential stage and the confidence head; flat and speculators name them alike."""
    return {
        "markov_rank": c.markov_rank,
        **({"markov_head_type": c.markov_head_type} if c.markov_rank else {}),
        "enable_confidence_head": c.confidence_head,
        **(
            {"confidence_head_with_markov": c.confidence_head_with_markov}
            if c.confidence_head
            else {}
        ),
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        names: tuple[str, ...] = ("low_freq_factor", "high_freq_factor")
    else:
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
                 "truncate") if rope.kind == "yarn" else ()  # fmt: skip
    values = {name: getattr(rope, name) for name in names}
    return scaling | {name: value for name, value in values.items() if value is not None}
