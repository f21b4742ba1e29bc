"""What a checkpoint is, from its headers alone: sizes, dtypes, parts, memory, drafters inside.

Nothing is loaded. Of a safetensors file the first bytes are read (`safetensors_header.py`), of a
GGUF file the table in front, so a checkpoint of 167 GB answers in about a second, and safetensors
do so without torch.

How things are counted is told in `inspect_report.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dspark.errors import CheckpointError
from dspark.models.config import DecoderConfig, from_hf
from dspark.models.deepseek_v4.config import CSA_RATIO, V4Config, span
from dspark.models.deepseek_v4_config import is_v4, read_config, read_v4_config
from dspark.models.deepseek_v4_names import (
    FUSED,
    CarriedDrafter,
    canonical,
    carried_drafters,
    stage_shapes,
    tower_shapes,
)
from dspark.models.inspect_report import (
    DTYPES,
    Cache,
    Drafter,
    Kind,
    Report,
    Tensor,
    build,
    part_of,
    v4_part_of,
    width,
)  # fmt: skip
from dspark.models.safetensors_header import Shards

_DRAFTERS = ("speculators_model_type", "transformer_layer_config", "dflash_config", "dspark",
             "target_layer_ids")  # fmt: skip


def is_drafter(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a standalone drafter, in any dialect."""
    names = raw.get("architectures") or ()
    named = any("DSpark" in str(n) or "DFlash" in str(n) for n in names)
    return named or any(key in raw for key in _DRAFTERS)


def inspect(path: Path) -> Report:
    """Look at a target: a GGUF file, a directory of the Llama family or of DeepSeek-V4.

    Raises CheckpointError for what cannot be read or is of no supported kind.
    """
    if not path.is_dir():
        return _gguf(path)
    raw = read_config(path)
    if is_v4(raw) or str(raw.get("model_type")).startswith("deepseek_v4"):
        return _deepseek_v4(path)
    try:
        config = from_hf(raw)
    except CheckpointError as e:
        raise CheckpointError(f"{path / 'config.json'}: {e}") from e
    except (TypeError, ValueError, AttributeError) as e:
        raise CheckpointError(f"{path / 'config.json'} holds a value of a wrong kind: {e}") from e
    shards = Shards(path)
    return _decoder(path, "hf", config, _stored(shards, part_of), len(shards.paths()))


def inspect_drafter(
    path: Path, architecture: str, *, cache_numbers: int, context: int, sizes: dict[str, Any],
    details: dict[str, Any],
) -> Report:  # fmt: skip
    """Look at a directory with a standalone drafter; the caller has read its configuration.

    cache_numbers  numbers that every token adds to its cache
    context        tokens it can hold
    """
    shards = Shards(path)
    tensors = _stored(shards, part_of)
    return build(
        path, "drafter", architecture, sizes, tensors, len(shards.paths()),
        active=sum(t.parameters for t in tensors if t.part not in ("embedding", "head")),
        cache={d: Cache(cache_numbers * width(d)) for d in DTYPES}, max_context=context,
        details=details,
    )  # fmt: skip


def _gguf(path: Path) -> Report:
    from dspark.models.gguf_source import GgufFile

    file = GgufFile(path)
    tensors = [
        Tensor(
            part_of(name), e.kind, e.shape, e.num_bytes,
            0 if name == "rope_freqs.weight" else math.prod(e.shape), name,
        )
        for name, e in file.entries.items()
    ]  # fmt: skip
    return _decoder(path, "gguf", file.config(), tensors, 1)


def _decoder(
    path: Path, kind: Kind, c: DecoderConfig, tensors: list[Tensor], num_files: int
) -> Report:
    total = sum(t.parameters for t in tensors)
    looked_up = sum(t.parameters for t in tensors if t.part == "embedding")
    numbers = 2 * c.num_layers * c.num_kv_heads * c.head_dim
    return build(
        path, kind, c.model_type, _sizes(c), tensors, num_files,
        active=total if c.tie_embeddings else total - looked_up,
        cache={d: Cache(numbers * width(d)) for d in DTYPES}, max_context=c.max_context,
    )  # fmt: skip


def _deepseek_v4(path: Path) -> Report:
    config, settings = read_v4_config(path)
    shards = Shards(path)
    names = {stored: canonical(stored) for stored in shards.files}
    drafters = carried_drafters(names.values(), settings)
    labels = {f"mtp.{i}": f"{d.kind} stage {i}" for d in drafters for i in range(d.stages)}

    def part(name: str) -> str:
        stage = labels.get(name[: name.index(".", 4)]) if name.startswith("mtp.") else None
        return stage or v4_part_of(name)

    tensors = _stored(shards, part, names)
    tower = [t for t in tensors if not t.name.startswith("mtp.")]
    stages = [t for t in tensors if t.name.startswith("mtp.")]
    share = config.experts_per_token / config.num_experts
    return build(
        path, "deepseek_v4", "deepseek_v4", _sizes(config), tensors, len(shards.paths()),
        tower=tower, active=_active(tower, share), max_context=config.max_context,
        cache={d: _v4_cache(config, width(d)) for d in DTYPES},
        drafters=tuple(_carried(d, stages, config) for d in drafters),
        problems=_problems(tensors, config, drafters),
    )  # fmt: skip


def _active(tensors: Iterable[Tensor], share: float) -> int:
    experts = sum(t.parameters for t in tensors if ".ffn.experts." in t.name)
    others = sum(
        t.parameters for t in tensors if ".ffn.experts." not in t.name and t.part != "embedding"
    )
    return round(experts * share) + others


def _carried(drafter: CarriedDrafter, stages: list[Tensor], c: V4Config) -> Drafter:
    settings: dict[str, Any] = {}
    if drafter.settings is not None and drafter.kind == "dspark":
        settings = {
            "block_size": drafter.settings.block_size,
            "target_layer_ids": list(drafter.settings.target_layer_ids),
            "noise_token_id": drafter.settings.noise_token_id,
            "markov_rank": drafter.settings.markov_rank if drafter.markov else 0,
            "confidence_head": drafter.confidence,
        }
    return Drafter(
        drafter.kind, drafter.stages, sum(t.parameters for t in stages), 
        _active(stages, c.experts_per_token / c.num_experts), sum(t.num_bytes for t in stages),
        {d: drafter.stages * c.window * c.head_dim * width(d) for d in DTYPES}, settings,
    )  # fmt: skip


def _v4_cache(c: V4Config, width: int) -> Cache:
    """Exact at multiples of all ratios; between them an entry is not closed yet."""
    per_token, per_sequence = 0.0, 0
    for ratio in c.ratios:
        per_sequence += c.window * c.head_dim * width
        if ratio:
            series = 2 if ratio == CSA_RATIO else 1
            dims = c.head_dim + (c.index_dim if ratio == CSA_RATIO else 0)
            per_token += dims * width / ratio
            per_sequence += span(ratio) * series * dims * 2 * 4  # projection and gate, fp32
    return Cache(math.ceil(per_token), per_sequence)


def _problems(
    tensors: list[Tensor], config: V4Config, drafters: tuple[CarriedDrafter, ...]
) -> tuple[str, ...]:
    expected = tower_shapes(config)
    for drafter in drafters:
        try:
            expected |= stage_shapes(config, drafter)
        except CheckpointError as e:
            return (str(e),)
    found = {t.name: t.shape for t in tensors}
    fused = any(n.endswith(FUSED) for n in found)
    missing = [n for n in expected if n not in found and not (fused and ".experts." in n)]
    wrong = [n for n, shape in expected.items() if found.get(n, shape) != shape]
    lines = [
        f"{n} has shape {list(found[n])}, the configuration wants {list(expected[n])}"
        for n in wrong[:3]
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        lines.append(f"lacks {', '.join(missing[:3])}{more}")
    return tuple(lines)


def _sizes(c: DecoderConfig | V4Config) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "max_context": c.max_context,
    }
    if isinstance(c, V4Config):
        sizes |= {"experts": c.num_experts, "experts_per_token": c.experts_per_token}
        sizes |= {
            "sliding_layers": c.ratios.count(0),
            "sparse_layers": c.ratios.count(CSA_RATIO),
            "compressed_layers": sum(r not in (0, CSA_RATIO) for r in c.ratios),
        }
    return sizes


def _stored(
    shards: Shards, part: Callable[[str], str], names: Mapping[str, str] | None = None
) -> list[Tensor]:
    """Every tensor of a directory, by our name (`names`: stored -> ours). Reads all headers."""
    out = []
    for stored in shards.files:
        entry, name = shards.entry(stored), names[stored] if names else stored
        shape, parameters = entry.shape, entry.numel
        if entry.dtype == "I8" and name.endswith(".weight") and shape:
            shape, parameters = (*shape[:-1], 2 * shape[-1]), 2 * parameters
        elif name.endswith(".scale") or (entry.dtype[0] in "IUB" and entry.dtype != "BF16"):
            parameters = 0
        out.append(Tensor(part(name), entry.dtype, shape, entry.num_bytes, parameters, name))
    return out
