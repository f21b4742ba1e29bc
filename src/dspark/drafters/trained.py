"""Finding trained drafters, and building them for a target.

A name is a directory with a checkpoint, or one of those that ship with the project for a model it
knows: `checkpoints/<model>/<name>` beside the sources, or in the installed package's data. A
DeepSeek-V4 checkpoint carries its drafter itself; there `mtp1` or `dspark` is that one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dspark.drafters.base import DRAFTERS, Drafter
from dspark.drafters.block import BlockModel
from dspark.drafters.block_drafter import BlockDrafter
from dspark.drafters.deepseek_v4_dspark import V4DSparkDrafter
from dspark.drafters.deepseek_v4_mtp import V4MtpDrafter
from dspark.drafters.mtp_drafter import MtpDrafter
from dspark.errors import ConfigError
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_names import CarriedDrafter
from dspark.models.target import Target


def shipped(model: str) -> dict[str, Path]:
    """Name -> directory of the drafters that ship for `model`, best first."""
    for root in (Path(__file__).parents[3], Path(sys.prefix) / "share" / "dspark"):
        folder = root / "checkpoints" / model
        if model and folder.is_dir():
            names = [n for n in ("dspark", "dflash", "mtp1") if (folder / n).is_dir()]
            return {n: folder / n for n in names}
    return {}


def build(
    name: str,
    target: Target,
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
        make = V4DSparkDrafter if name == "dspark" else V4MtpDrafter
        return make(target, own[name], num_draft_tokens)
    known = shipped(model)
    directory = known.get(name) or Path(name).expanduser()
    if not directory.is_dir():
        names = ", ".join(sorted({*DRAFTERS, *known, *own}))
        raise ConfigError(
            f"unknown drafter {name!r}: expected one of {names}, or a directory with a drafter's"
            " checkpoint"
        )
    from dspark.drafters.checkpoint import load

    found = load(directory)
    found.config.check_target(
        target.vocab_size, target.hidden_size, target.num_layers, str(directory)
    )
    if isinstance(found.model, BlockModel):
        return BlockDrafter(target, found.config, found.model, found.draft_ids, num_draft_tokens)
    return MtpDrafter(target, found.config, found.model, found.draft_ids, num_draft_tokens)
