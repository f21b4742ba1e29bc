"""The tensors of a DeepSeek-V4 checkpoint: their names, their shapes, and the drafters among them.

The official checkpoints have short names without a prefix (`layers.3.attn.wq_a.weight`); these are
ours, too. `transformers` has two more spellings, that of its modules
(`model.layers.3.self_attn.q_a_proj.weight`, all experts of a layer in one tensor) and that of what
it saves (official parts behind `model.`); `canonical` maps every name of them to the official one.

Behind the tower, under `mtp.*`, may stand a drafter: one block that predicts a token ahead (MTP-1,
the first releases), or several that fill a block at once (DSpark, later ones). The configuration
does not tell them apart, the names do. Here is what is needed of a checkpoint's header and no more,
without torch.

Shapes as in `V4Config`; D is the hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dspark.errors import CheckpointError
from dspark.models.deepseek_v4.config import CSA_RATIO, V4Config
from dspark.models.deepseek_v4_config import V4DSpark

Shapes = dict[str, tuple[int, ...]]

_WHOLE = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
_PARTS = (
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.position_bias$", ".ape"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"(experts(?:\.\d+)?)\.gate_proj\.", r"\1.w1."),
    (r"(experts(?:\.\d+)?)\.down_proj\.", r"\1.w2."),
    (r"(experts(?:\.\d+)?)\.up_proj\.", r"\1.w3."),
    (r"\.weight_scale_inv$", ".scale"),
)
_PARTS_COMPILED = tuple((re.compile(pattern), new) for pattern, new in _PARTS)
_FOREIGN = (".self_attn.", ".mlp.", ".attn.norm.", "layernorm.", "_hc.", "_proj.", "_scale_inv")
FUSED = (".ffn.experts.gate_up_proj", ".ffn.experts.down_proj")
"""All experts of a layer in one tensor, as `transformers` holds them: [E, 2I, D] and [E, D, I]."""
MARKOV = (
    ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    ("markov_head.embed.weight", "markov_head.head.weight"),
)
"""The two tables of the Markov head, as V4 names them and as V4.1 does."""


def canonical(name: str) -> str:
    """The official name of a tensor in any of the spellings; official ones stay as they are."""
    name = name.removeprefix("model.")
    if name in _WHOLE:
        return _WHOLE[name]
    # Of 70 000 names of a large checkpoint none has such a part: spare them the patterns.
    if any(part in name for part in _FOREIGN):
        for pattern, new in _PARTS_COMPILED:
            name = pattern.sub(new, name)
    return name


@dataclass(frozen=True)
class CarriedDrafter:
    """A drafter that a checkpoint has under `mtp.*`.

    kind        "mtp1": one block, a token ahead, its own output fed back for more; "dspark"
    stages      blocks mtp.0 ... mtp.{stages - 1}
    markov      the two tables of the Markov head, both [V, r], by their full names, or None
    confidence  whether a confidence head is stored
    settings    what the configuration says of DSpark stages
    """

    kind: Literal["mtp1", "dspark"]
    stages: int
    markov: tuple[str, str] | None = None
    confidence: bool = False
    settings: V4DSpark | None = None

    @property
    def last(self) -> str:
        """Prefix of the stage that ends in logits."""
        return f"mtp.{self.stages - 1}."


def carried_drafters(names: Iterable[str], dspark: V4DSpark | None) -> tuple[CarriedDrafter, ...]:
    """The drafters among the (canonical) names of a checkpoint; none of them runs plain.

    `mtp.0.e_proj` is the mark of MTP-1, `mtp.0.main_proj` that of DSpark; where neither is stored,
    as in a checkpoint whose names were changed, a `dspark_block_size` decides. Stages are counted
    from the names. Raises CheckpointError if stages are missing in between.
    """
    stored = [n for n in names if n.startswith("mtp.")]
    numbers = {int(n.split(".")[1]) for n in stored if n.split(".")[1].isdecimal()}
    if not numbers:
        return ()
    stages = max(numbers) + 1
    if len(numbers) != stages:
        gap = min(set(range(stages)) - numbers)
        raise CheckpointError(f"there are tensors of mtp.{stages - 1} and none of mtp.{gap}")
    first = {n.split(".")[2] for n in stored if n.startswith("mtp.0.") and n.count(".") > 1}
    if "e_proj" in first:
        return (CarriedDrafter("mtp1", stages),)
    if "main_proj" not in first and dspark is None:
        raise CheckpointError(
            "the tensors under mtp.* are of no drafter that is known: there is neither mtp.0.e_proj"
            " (MTP-1) nor mtp.0.main_proj (DSpark)"
        )
    last = f"mtp.{stages - 1}."
    known = frozenset(stored)
    pairs = [(last + a, last + b) for a, b in MARKOV]
    return (
        CarriedDrafter(
            "dspark",
            stages,
            markov=next((p for p in pairs if known.issuperset(p)), None),
            confidence=last + "confidence_head.proj.weight" in known,
            settings=dspark,
        ),
    )


def tower_shapes(c: V4Config) -> Shapes:
    """Name and shape of every tensor of the tower; a matrix [O, I] has its unpacked shape."""
    shapes: Shapes = {
        "embed.weight": (c.vocab_size, c.hidden_size),
        "head.weight": (c.vocab_size, c.hidden_size),
        "norm.weight": (c.hidden_size,),
        **_hc_head("", c),
    }
    for i in range(c.num_layers):
        shapes.update(_block(f"layers.{i}.", c, c.ratios[i], i < c.num_hash_layers))
    return shapes


def stage_shapes(c: V4Config, drafter: CarriedDrafter) -> Shapes:
    """The same for the tensors of a drafter under `mtp.*`. Raises CheckpointError for DSpark
    stages whose settings the configuration lacks."""
    shapes: Shapes = {}
    for i in range(drafter.stages):
        shapes.update(_block(f"mtp.{i}.", c, 0, False))
    d = c.hidden_size
    shapes.update({f"{drafter.last}norm.weight": (d,), **_hc_head(drafter.last, c)})
    if drafter.kind == "mtp1":
        for i in range(drafter.stages):
            for name in ("e_proj", "h_proj"):
                shapes[f"mtp.{i}.{name}.weight"] = (d, d)
            for name in ("enorm", "hnorm", "norm"):
                shapes[f"mtp.{i}.{name}.weight"] = (d,)
            shapes.update(_hc_head(f"mtp.{i}.", c))
        return shapes
    if drafter.settings is None:
        raise CheckpointError("there are DSpark stages, but no dspark_block_size in the config")
    shapes["mtp.0.main_proj.weight"] = (d, len(drafter.settings.target_layer_ids) * d)
    shapes["mtp.0.main_norm.weight"] = (d,)
    rank = drafter.settings.markov_rank
    if rank:
        for name in drafter.markov or [drafter.last + part for part in MARKOV[0]]:
            shapes[name] = (c.vocab_size, rank)
    if drafter.confidence:
        shapes[f"{drafter.last}confidence_head.proj.weight"] = (1, d + rank)
    return shapes


def _hc_head(prefix: str, c: V4Config) -> Shapes:
    m = c.streams
    return {
        f"{prefix}hc_head_fn": (m, m * c.hidden_size),
        f"{prefix}hc_head_base": (m,),
        f"{prefix}hc_head_scale": (1,),
    }


def _block(p: str, c: V4Config, ratio: int, hashed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """One block: attention with its compressor, experts, both sets of stream weights."""
    d, m, heads = c.hidden_size, c.streams, c.num_heads * c.head_dim
    for part in ("attn", "ffn"):
        yield f"{p}{part}_norm.weight", (d,)
        yield f"{p}hc_{part}_fn", ((2 + m) * m, m * d)
        yield f"{p}hc_{part}_base", ((2 + m) * m,)
        yield f"{p}hc_{part}_scale", (3,)
    yield f"{p}attn.wq_a.weight", (c.q_rank, d)
    yield f"{p}attn.q_norm.weight", (c.q_rank,)
    yield f"{p}attn.wq_b.weight", (heads, c.q_rank)
    yield f"{p}attn.wkv.weight", (c.head_dim, d)
    yield f"{p}attn.kv_norm.weight", (c.head_dim,)
    yield f"{p}attn.wo_a.weight", (c.o_groups * c.o_rank, heads // c.o_groups)
    yield f"{p}attn.wo_b.weight", (d, c.o_groups * c.o_rank)
    yield f"{p}attn.attn_sink", (c.num_heads,)
    if ratio == CSA_RATIO:
        yield from _compressor(f"{p}attn.compressor.", c, c.head_dim, ratio, 2)
        yield from _indexer(f"{p}attn.indexer.", c)
    elif ratio:
        yield from _compressor(f"{p}attn.compressor.", c, c.head_dim, ratio, 1)
    yield f"{p}ffn.gate.weight", (c.num_experts, d)
    if hashed:
        yield f"{p}ffn.gate.tid2eid", (c.vocab_size, c.experts_per_token)
    else:
        yield f"{p}ffn.gate.bias", (c.num_experts,)
    experts = ["shared_experts", *(f"experts.{e}" for e in range(c.num_experts))]
    for expert in experts:
        yield f"{p}ffn.{expert}.w1.weight", (c.expert_size, d)
        yield f"{p}ffn.{expert}.w2.weight", (d, c.expert_size)
        yield f"{p}ffn.{expert}.w3.weight", (c.expert_size, d)


def _compressor(
    p: str, c: V4Config, dim: int, ratio: int, series: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`series` 2: an entry overlaps the one before it, each half with its own projection."""
    yield f"{p}wkv.weight", (series * dim, c.hidden_size)
    yield f"{p}wgate.weight", (series * dim, c.hidden_size)
    yield f"{p}ape", (ratio, series * dim)
    yield f"{p}norm.weight", (dim,)


def _indexer(p: str, c: V4Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{p}wq_b.weight", (c.index_heads * c.index_dim, c.q_rank)
    yield f"{p}weights_proj.weight", (c.index_heads, c.hidden_size)
    yield from _compressor(f"{p}compressor.", c, c.index_dim, CSA_RATIO, 2)
