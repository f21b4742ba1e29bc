"""Which drafter `auto` takes, and why; what lies beside the weights of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dspark.drafters.base import DRAFTERS
from dspark.drafters.trained import shipped, trained_acceptance
from dspark.engine.profile import Costs
from dspark.models.deepseek_v4_names import CarriedDrafter
from dspark.schedule.calibration import FILE, Calibration
from dspark.schedule.worth import expected_gain


def choose_drafter(
    model: str,
    carried: Sequence[CarriedDrafter],
    measured: Callable[[tuple[str, int | None]], Costs],
) -> tuple[str, str]:
    """Name and reason: the drafter in the model's own checkpoint, else the best one that ships for
    `model` and can pay by what rounds with it cost (`measured`, by name and block length), else
    prompt lookup."""
    if carried:
        return carried[0].kind, "stored in the model's own checkpoint"
    for best, folder in shipped(model).items():
        table, acceptance = measured((best, None)).table, trained_acceptance(folder)
        if table is None or not acceptance:
            return best, f"trained for {model}, ships with dspark"
        gain = expected_gain(table, acceptance, len(acceptance))
        if gain >= 1:
            return best, f"trained for {model}: {gain:.2f} times plain expected here"
        why = f"prompt lookup; {best} would reach {gain:.2f} times plain speed on this machine"
        return "ngram", why
    return "ngram", "prompt lookup needs no weights; no trained drafter is known for this model"


def folder_of(drafter: str, model: str, carried: Sequence[CarriedDrafter]) -> Path | None:
    """Where its weights are; None without any, and for those in the model's own checkpoint."""
    if drafter in DRAFTERS or drafter in {d.kind for d in carried}:
        return None
    return shipped(model).get(drafter) or Path(drafter).expanduser()


def calibration_in(folder: Path | None) -> Calibration | None:
    """What makes a drafter's confidences honest: `calibration.json` beside its weights."""
    file = None if folder is None else folder / FILE
    return Calibration.load(file) if file is not None and file.is_file() else None
