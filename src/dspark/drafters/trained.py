"""Finding trained drafters, and building them for a target.

A name is a directory with a checkpoint, or one of those that ship with the project for a model it
knows: `checkpoints/<model>/<name>` beside the sources, or in the installed package's data. A
DeepSeek-V4 checkpoint carries its drafter itself; there `mtp1` or `dspark` is that one. It can
carry one kind only, so another may lie in a folder of that name inside the model's directory, or in
any directory: `config.json` with the target's sizes, and `mtp.*`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from dspark.drafters.base import DRAFTERS, Drafter
from dspark.drafters.block import BlockModel
from dspark.drafters.block_drafter import BlockDrafter
from dspark.drafters.deepseek_v4_dspark import V4DSparkDrafter
from dspark.drafters.deepseek_v4_mtp import V4MtpDrafter
from dspark.drafters.mtp_drafter import MtpDrafter
from dspark.errors import CheckpointError, ConfigError
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_config import read_v4_config
from dspark.models.deepseek_v4_names import CarriedDrafter, carried_drafters
from dspark.models.deepseek_v4_source import DeepseekV4Source
from dspark.models.target import Shared
from dspark.models.weights import WeightSource


def shipped(model: str) -> dict[str, Path]:
    """Name -> directory of the drafters that ship for `model` or lie in its own directory, best
    first."""
    roots = Path(__file__).parents[3], Path(sys.prefix) / "share" / "dspark"
    for folder in (*(root / "checkpoints" / model for root in roots), Path(model).expanduser()):
        if model and folder.is_dir():
            names = [n for n in ("dspark", "dflash", "mtp1") if (folder / n).is_dir()]
            return {n: folder / n for n in names}
    return {}


def trained_acceptance(directory: Path) -> tuple[float, ...]:
    """By position, how often its trainer saw held-out drafts accepted; empty if it did not say."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return tuple(config.get("training", {}).get("accept", ()))


def build(
    name: str,
    target: Shared,
    num_draft_tokens: int | None,
    model: str,
    carried: Sequence[CarriedDrafter] = (),
) -> Drafter:
    """The trained drafter `name` for `target`, whose own name is `model` and whose checkpoint holds
    the drafters `carried`.

    Raises ConfigError for an unknown name or a length it cannot honour, CheckpointError for a
    checkpoint that is damaged or was made for another target.
    """
    own = {d.kind: d for d in carried}
    if isinstance(target, DeepseekV4) and name in own:
        return _carried(target, own[name], num_draft_tokens)
    known = shipped(model)
    directory = known.get(name) or Path(name).expanduser()
    if not directory.is_dir():
        names = ", ".join(sorted({*DRAFTERS, *known, *own}))
        raise ConfigError(
            f"unknown drafter {name!r}: expected one of {names}, or a directory with a drafter's"
            " checkpoint"
        )
    if isinstance(target, DeepseekV4):
        return _beside(target, directory, num_draft_tokens)
    from dspark.drafters.checkpoint import load

    found = load(directory)
    found.config.check_target(
        target.vocab_size, target.hidden_size, target.num_layers, str(directory)
    )
    if isinstance(found.model, BlockModel):
        return BlockDrafter(target, found.config, found.model, found.draft_ids, num_draft_tokens)
    return MtpDrafter(target, found.config, found.model, found.draft_ids, num_draft_tokens)


def _carried(
    target: DeepseekV4,
    drafter: CarriedDrafter,
    num_draft_tokens: int | None,
    weights: WeightSource | None = None,
) -> Drafter:
    make = V4DSparkDrafter if drafter.kind == "dspark" else V4MtpDrafter
    return make(target, drafter, num_draft_tokens, weights)


def _beside(target: DeepseekV4, directory: Path, num_draft_tokens: int | None) -> Drafter:
    """The drafter of a DeepSeek-V4 in a directory of its own. Raises CheckpointError."""
    config, settings = read_v4_config(directory)
    differ = [
        f"{f.name} {getattr(config, f.name)} and {getattr(target.config, f.name)}"
        for f in fields(V4Config)
        if getattr(config, f.name) != getattr(target.config, f.name)
    ]
    if differ:
        raise CheckpointError(f"{directory} was made for another target: {', '.join(differ)}")
    weights = DeepseekV4Source(directory, config)
    found = carried_drafters(weights.names(), settings)
    if not found:
        raise CheckpointError(f"{directory} holds no drafter: it has no tensors mtp.*")
    return _carried(target, found[0], num_draft_tokens, weights)
