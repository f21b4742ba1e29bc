"""How the configuration of a DeepSeek-V4 is spelled on disk, read into one `V4Config`.

`config.json` uses the names of `transformers` (`hidden_size`, `num_hidden_layers`, ...), the
`inference/config.json` beside it those of the reference implementation (`dim`, `n_layers`, ...).
`v4_from_hf` reads either. What drafters under `mtp.*` need stands beside it (`V4DSpark`): it is no
part of the tower.

Three things in these files mislead. `compress_ratios` is longer than the tower: its tail belongs to
the stages under `mtp.*`. `num_nextn_predict_layers` is 1 even where three DSpark stages are stored,
so nothing here reads it. And the rotation of `rope_scaling` is that of the compressed layers only:
sliding layers turn with the plain `rope_theta`.

Whatever would change the numbers and is not understood is refused. That includes V4.1, whose
residual streams, caches and routing differ under similar names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dspark.errors import CheckpointError
from dspark.models.config import RopeConfig
from dspark.models.deepseek_v4.config import CSA_RATIO, V4Config

_RATES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": 128,
}
"""What `transformers` calls the kinds of a layer, and the tokens of one compressed entry."""
_REFERENCE_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "n_hash_layers": "num_hash_layers",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
}
"""`inference/config.json` -> `config.json`; every other name is the same in both."""
_ARE_V41 = {"engram_layer_ids", "kv_source_layers", "kv_source_layer_ids", "text_config"}


@dataclass(frozen=True)
class V4DSpark:
    """What a checkpoint with DSpark stages says about them.

    block_size        tokens that a round drafts, unless told otherwise
    target_layer_ids  tower layers whose outputs are the context (i: output of layer i)
    markov_rank       r of the Markov head's two tables [V, r]; 0 without one
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


def is_v4(raw: Mapping[str, Any]) -> bool:
    """Whether a config file is one of DeepSeek-V4, in either spelling."""
    if raw.get("model_type") is not None:
        return bool(raw["model_type"] == "deepseek_v4")
    reference = {"dim", "n_layers", "hc_mult", "compress_ratios"} <= raw.keys()
    return reference and not _ARE_V41 & raw.keys()


def v4_from_hf(raw: Mapping[str, Any]) -> V4Config:
    """Read `config.json` or `inference/config.json`.

    Raises CheckpointError for another model, a missing or impossible size, and whatever is not
    supported.
    """
    try:
        return _read(_as_config_json(raw))
    except (TypeError, ValueError, AttributeError) as e:
        raise CheckpointError(f"holds a value of a wrong kind: {e}") from e


def config_file(directory: Path) -> Path:
    """`config.json`, or where there is none the reference's, if there is one."""
    path = directory / "config.json"
    reference = directory / "inference" / "config.json"
    return reference if not path.exists() and reference.exists() else path


def read_config(directory: Path) -> dict[str, Any]:
    """The JSON object in a model directory's configuration file. Raises CheckpointError."""
    path = config_file(directory)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise CheckpointError(f"{directory} is not a model directory: it has no config.json") from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return raw


def read_v4_config(directory: Path) -> tuple[V4Config, V4DSpark | None]:
    """The configuration of a checkpoint's directory. Raises CheckpointError with the file's
    name."""
    raw = read_config(directory)
    try:
        return v4_from_hf(raw), dspark_from_hf(raw)
    except CheckpointError as e:
        raise CheckpointError(f"{config_file(directory)}: {e}") from e


def _as_config_json(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    if not is_v4(raw):
        kind = raw.get("model_type")
        hint = " (V4.1 is another architecture)" if _ARE_V41 & raw.keys() else ""
        raise CheckpointError(f"model_type is {kind!r}, expected 'deepseek_v4'{hint}")
    if "dim" not in raw:
        return raw
    out = {_REFERENCE_NAMES.get(k, k): v for k, v in raw.items()}
    if out.get("original_seq_len"):
        out["rope_scaling"] = {
            "type": "yarn",
            "factor": out.get("rope_factor", 16),
            "original_max_position_embeddings": out["original_seq_len"],
            "beta_fast": out.get("beta_fast", 32),
            "beta_slow": out.get("beta_slow", 1),
        }
        out.setdefault(
            "max_position_embeddings", int(out["original_seq_len"] * out["rope_scaling"]["factor"])
        )
    return out


def _read(raw: Mapping[str, Any]) -> V4Config:
    def size(key: str, default: Any = None, least: int = 1) -> int:
        value = raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"{key} is {value!r}, expected a whole number from {least}")
        return int(value)

    def number(key: str, default: float) -> float:
        value = raw.get(key)
        return float(default if value is None else value)

    _refuse(raw)
    layers, head_dim = size("num_hidden_layers"), size("head_dim")
    rope_dim = raw.get("qk_rope_head_dim")
    if rope_dim is None:
        rope_dim = int(head_dim * number("partial_rotary_factor", 64 / 512))
    rope, compress_rope = _ropes(raw)
    return V4Config(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        num_heads=size("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_rank=size("q_lora_rank"),
        o_groups=size("o_groups"),
        o_rank=size("o_lora_rank"),
        window=size("sliding_window", 128),
        ratios=_ratios(raw, layers),
        index_heads=size("index_n_heads"),
        index_dim=size("index_head_dim"),
        index_topk=size("index_topk"),
        num_experts=size("n_routed_experts"),
        experts_per_token=size("num_experts_per_tok"),
        expert_size=size("moe_intermediate_size"),
        num_hash_layers=_hash_layers(raw, layers),
        routed_scale=number("routed_scaling_factor", 1.5),
        swiglu_limit=number("swiglu_limit", 10.0),
        streams=size("hc_mult", 4),
        sinkhorn_iterations=size("hc_sinkhorn_iters", 20),
        hc_eps=number("hc_eps", 1e-6),
        norm_eps=number("rms_norm_eps", 1e-6),
        max_context=size("max_position_embeddings", 1_048_576),
        rope=rope,
        compress_rope=compress_rope,
    )


def _refuse(raw: Mapping[str, Any]) -> None:
    for key, only in (
        ("scoring_func", "sqrtsoftplus"),
        ("hidden_act", "silu"),
        ("norm_topk_prob", True),
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("tie_word_embeddings", False),
        ("attention_bias", False),
        ("mlp_bias", False),
    ):
        if raw.get(key, only) != only:
            raise CheckpointError(f"{key} is {raw[key]!r}, only {only!r} is supported")
    quantised = raw.get("quantization_config")
    if quantised and quantised.get("quant_method") != "fp8":
        raise CheckpointError(
            f"the weights are quantised by {quantised.get('quant_method')!r}, which is not read:"
            " expected the official fp8 and fp4, or none"
        )


def _ratios(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Tokens of one compressed entry in each layer of the tower; 0 in sliding layers.

    `transformers` names kinds and says elsewhere, for all layers of a kind, what the rate is; in
    its list of ratios 4 and 128 are such names, too.
    """
    rates = dict(_RATES)
    given = raw.get("compress_rates") or {}
    for kind, older in (
        ("compressed_sparse_attention", "compress_rate_csa"),
        ("heavily_compressed_attention", "compress_rate_hca"),
    ):
        rates[kind] = int(raw.get(older) or given.get(kind) or rates[kind])
    if rates["compressed_sparse_attention"] != CSA_RATIO:
        raise CheckpointError(
            f"sparse layers compress {rates['compressed_sparse_attention']} tokens, only"
            f" {CSA_RATIO} are supported"
        )
    if rates["heavily_compressed_attention"] == CSA_RATIO:
        raise CheckpointError(f"heavily compressed layers of {CSA_RATIO} tokens are not supported")
    types, ratios = raw.get("layer_types"), raw.get("compress_ratios")
    known: dict[Any, int] = dict(rates)
    if types is None:
        if ratios is None:
            raise CheckpointError("neither compress_ratios nor layer_types tells the layers' kinds")
        types = ratios
        known = {r: r for r in ratios} | {128: rates["heavily_compressed_attention"]}
    listed = types[:layers]
    if len(listed) < layers:
        raise CheckpointError(f"{len(listed)} layers have a kind, the model has {layers}")
    for value in listed:
        if not isinstance(known.get(value), int) or known[value] < 0:
            raise CheckpointError(f"a layer of kind {value!r} is not known")
    return tuple(known[v] for v in listed)


def _hash_layers(raw: Mapping[str, Any], layers: int) -> int:
    types = raw.get("mlp_layer_types")
    if types is None:
        count = raw.get("num_hash_layers")
        return min(3 if count is None else int(count), layers)
    count = list(types[:layers]).count("hash_moe")
    if list(types[:layers]) != ["hash_moe"] * count + ["moe"] * (layers - count):
        raise CheckpointError("mlp_layer_types: hash_moe layers come first, moe behind them")
    return count


def _ropes(raw: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Of sliding layers, and of compressed ones."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    nested = isinstance(given.get("main"), Mapping) and isinstance(given.get("compress"), Mapping)
    main = given["main"] if nested else {}
    compress = given["compress"] if nested else given
    if main.get("rope_type", "default") != "default":
        raise CheckpointError("a scaled rotation of the sliding layers is not supported")
    kind = compress.get("rope_type", compress.get("type", "default"))
    theta = float((main.get("rope_theta") if nested else raw.get("rope_theta")) or 10_000.0)
    far = (compress.get("rope_theta") if nested else raw.get("compress_rope_theta")) or 160_000.0
    if kind == "default":
        return RopeConfig(theta=theta), RopeConfig(theta=float(far))
    if kind != "yarn":
        raise CheckpointError(f"rope scaling {kind!r} is not supported: expected default or yarn")
    if "factor" not in compress or "original_max_position_embeddings" not in compress:
        raise CheckpointError("yarn needs factor and original_max_position_embeddings")
    factor = compress.get("attention_factor")
    return RopeConfig(theta=theta), RopeConfig(
        theta=float(far),
        kind="yarn",
        factor=float(compress["factor"]),
        original_max_position=int(compress["original_max_position_embeddings"]),
        beta_fast=float(compress.get("beta_fast") or 32),
        beta_slow=float(compress.get("beta_slow") or 1),
        # The reference scales nothing; RopeConfig's None would mean the usual 0.1 ln(factor) + 1.
        attention_factor=1.0 if factor is None else float(factor),
        truncate=bool(compress.get("truncate", True)),
    )


def dspark_from_hf(raw: Mapping[str, Any]) -> V4DSpark | None:
    """The settings of DSpark stages, which both spellings name alike; None without a
    `dspark_block_size`. Raises CheckpointError for impossible ones."""
    block, layers = raw.get("dspark_block_size"), raw.get("num_hidden_layers", raw.get("n_layers"))
    if block is None:
        return None
    noise, rank = raw.get("dspark_noise_token_id"), raw.get("dspark_markov_rank", 0)
    ids = raw.get("dspark_target_layer_ids")
    for key, value in (("block_size", block), ("noise_token_id", noise), ("markov_rank", rank)):
        if not isinstance(value, int) or value < (key == "block_size"):
            raise CheckpointError(f"dspark_{key} is {value!r}, expected a whole number")
    whole = isinstance(ids, list | tuple) and all(isinstance(i, int) for i in ids)
    if not whole or not ids or min(ids) < 0 or max(ids) >= (layers or 0):
        raise CheckpointError(
            f"dspark_target_layer_ids is {ids!r}, expected layers of the {layers} there are"
        )
    if cast(int, noise) >= raw.get("vocab_size", 0):
        raise CheckpointError(f"dspark_noise_token_id is {noise!r}, which is no token")
    return V4DSpark(block, cast(int, noise), tuple(ids), rank)
