"""What a DeepSeek-V4 looks like, as one frozen dataclass, and its two spellings on disk.

`config.json` uses the names of `transformers` (`hidden_size`, `num_hidden_layers`, ...), the
`inference/config.json` beside it those of the reference implementation (`dim`, `n_layers`, ...).
`v4_from_hf` reads either; the rest of the code knows only `V4Config`.

Three things in these files mislead. `compress_ratios` is longer than the tower: its tail belongs to
the stages under `mtp.*`. `num_nextn_predict_layers` is 1 even where three DSpark stages are stored,
so nothing here reads it. And the rotation of `rope_scaling` is that of the compressed layers only:
sliding layers turn with the plain `rope_theta`.

Whatever would change the numbers and is not understood is refused. That includes V4.1, whose
residual streams, caches and routing differ under similar names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from dspark.errors import CheckpointError
from dspark.models.config import RopeConfig

LayerKind = Literal["swa", "csa", "hca"]
"""Sliding window alone; with compressed sparse attention (an indexer chooses entries); with heavily
compressed attention (all entries are seen)."""
_KINDS: dict[int, LayerKind] = {0: "swa", 4: "csa", 128: "hca"}
_TYPES: dict[str, LayerKind] = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
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

    target_layer_ids  tower layers whose outputs are the context (i: output of layer i)
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True)
class V4Config:
    """Sizes and switches of a DeepSeek-V4 tower.

    kinds        one a layer
    csa_ratio, hca_ratio  tokens of one compressed entry in the layers of that kind
    window       positions that a layer sees uncompressed, its own included
    rope_dim     the last so many dimensions of a head (and of an index head) rotate
    rope         of sliding layers and of every stage under `mtp.*`
    compress_rope  of csa and hca layers: queries, window, entries, indexer
    num_hash_layers  the first so many layers choose experts by token id
    hc_mult      residual streams; `hc_iters` Sinkhorn normalisations mix them
    tail_stages  entries of `compress_ratios` beyond the tower: stages under `mtp.*`, a hint only
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    kinds: tuple[LayerKind, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    expert_size: int
    route_scale: float
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope: RopeConfig
    compress_rope: RopeConfig
    max_context: int
    csa_ratio: int = 4
    hca_ratio: int = 128
    dspark: V4DSpark | None = None
    tail_stages: int = 0

    def ratio(self, layer: int) -> int:
        """Tokens of one compressed entry of a layer; 0 without a compressor."""
        return {"swa": 0, "csa": self.csa_ratio, "hca": self.hca_ratio}[self.kinds[layer]]


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


def _as_config_json(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    if not is_v4(raw):
        kind = raw.get("model_type")
        hint = " (V4.1 is another architecture)" if _ARE_V41 & raw.keys() else ""
        raise CheckpointError(f"model_type is {kind!r}, expected 'deepseek_v4'{hint}")
    if "dim" not in raw:
        return raw
    out = {_REFERENCE_NAMES.get(k, k): v for k, v in raw.items()}
    # Here a ratio is a number of tokens: 4 has an indexer, any other is heavily compressed.
    heavy = {r for r in out["compress_ratios"][: out["num_hidden_layers"]] if r not in (0, 4)}
    if len(heavy) == 1:
        out["compress_rate_hca"] = next(iter(heavy))
        out["compress_ratios"] = [128 if r in heavy else r for r in out["compress_ratios"]]
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
    rates = {**dict.fromkeys(_TYPES), **(raw.get("compress_rates") or {})}
    csa = rates["compressed_sparse_attention"] or raw.get("compress_rate_csa") or 4
    hca = rates["heavily_compressed_attention"] or raw.get("compress_rate_hca") or 128
    kinds, tail = _layer_kinds(raw, layers)
    rope_dim = raw.get("qk_rope_head_dim")
    if rope_dim is None:
        rope_dim = int(head_dim * number("partial_rotary_factor", 64 / 512))
    rope, compress_rope = _ropes(raw)
    config = V4Config(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        num_layers=layers,
        num_heads=size("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=size("q_lora_rank"),
        o_groups=size("o_groups"),
        o_lora_rank=size("o_lora_rank"),
        window=size("sliding_window", 128),
        kinds=kinds,
        index_heads=size("index_n_heads"),
        index_dim=size("index_head_dim"),
        index_topk=size("index_topk"),
        num_experts=size("n_routed_experts"),
        experts_per_token=size("num_experts_per_tok"),
        num_shared_experts=size("n_shared_experts", 1),
        expert_size=size("moe_intermediate_size"),
        route_scale=number("routed_scaling_factor", 1.5),
        num_hash_layers=_hash_layers(raw, layers),
        swiglu_limit=number("swiglu_limit", 10.0),
        hc_mult=size("hc_mult", 4),
        hc_iters=size("hc_sinkhorn_iters", 20),
        hc_eps=number("hc_eps", 1e-6),
        rms_norm_eps=number("rms_norm_eps", 1e-6),
        rope=rope,
        compress_rope=compress_rope,
        max_context=size("max_position_embeddings", 1_048_576),
        csa_ratio=int(csa),
        hca_ratio=int(hca),
        dspark=_dspark(raw, layers),
        tail_stages=tail,
    )
    return _consistent(config)


def _refuse(raw: Mapping[str, Any]) -> None:
    for key, only in (
        ("scoring_func", "sqrtsoftplus"),
        ("hidden_act", "silu"),
        ("norm_topk_prob", True),
        ("num_key_value_heads", 1),
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


def _layer_kinds(raw: Mapping[str, Any], layers: int) -> tuple[tuple[LayerKind, ...], int]:
    """The kinds of the tower's layers, and how many more entries the list has."""
    types, ratios = raw.get("layer_types"), raw.get("compress_ratios")
    given, known = (types, _TYPES) if types is not None else (ratios, _KINDS)
    if given is None:
        raise CheckpointError("neither compress_ratios nor layer_types says what the layers are")
    tail = len(ratios) - layers if ratios is not None else 0
    if len(given) < layers:
        raise CheckpointError(f"{len(given)} layers have a kind, the model has {layers}")
    for value in given[:layers]:
        if value not in known:
            names = ", ".join(map(str, known))
            raise CheckpointError(f"a layer of kind {value!r} is not known, only {names} are")
    kinds = cast("Mapping[Any, LayerKind]", known)
    return tuple(kinds[v] for v in given[:layers]), max(tail, 0)


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


def _dspark(raw: Mapping[str, Any], layers: int) -> V4DSpark | None:
    block = raw.get("dspark_block_size")
    if block is None:
        return None
    noise, rank = raw.get("dspark_noise_token_id"), raw.get("dspark_markov_rank", 0)
    ids = raw.get("dspark_target_layer_ids")
    for key, value in (("block_size", block), ("noise_token_id", noise), ("markov_rank", rank)):
        if not isinstance(value, int) or value < (key == "block_size"):
            raise CheckpointError(f"dspark_{key} is {value!r}, expected a whole number")
    if not ids or any(not isinstance(i, int) or not 0 <= i < layers for i in ids):
        raise CheckpointError(
            f"dspark_target_layer_ids is {ids!r}, expected layers of 0 to {layers - 1}"
        )
    return V4DSpark(block, cast(int, noise), tuple(ids), rank)


def _consistent(c: V4Config) -> V4Config:
    if c.num_heads % c.o_groups:
        raise CheckpointError(f"{c.num_heads} heads do not divide into o_groups={c.o_groups}")
    if c.rope_dim % 2 or not 0 < c.rope_dim <= min(c.head_dim, c.index_dim):
        raise CheckpointError(
            f"{c.rope_dim} of {c.head_dim} dimensions ({c.index_dim} of an index head) cannot"
            " rotate: expected an even number of them"
        )
    if c.experts_per_token > c.num_experts:
        raise CheckpointError(f"a token uses {c.experts_per_token} of {c.num_experts} experts")
    if c.num_shared_experts != 1:
        raise CheckpointError(f"n_shared_experts is {c.num_shared_experts}, only 1 is supported")
    if min(c.csa_ratio, c.hca_ratio) < 1:
        raise CheckpointError(f"compress rates {c.csa_ratio} and {c.hca_ratio} must be positive")
    if c.dspark is not None and c.dspark.noise_token_id >= c.vocab_size:
        raise CheckpointError(f"dspark_noise_token_id is no id of {c.vocab_size} tokens")
    return c
