"""Which drafter `auto` takes, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dspark.drafters.trained import shipped, trained_acceptance
from dspark.models.deepseek_v4_names import CarriedDrafter
from dspark.schedule.cost import CostTable
from dspark.schedule.worth import expected_gain


def choose_drafter(
    model: str,
    carried: Sequence[CarriedDrafter],
    measured: Callable[[str], CostTable | None],
) -> tuple[str, str]:
    """Name and reason: the drafter in the model's own checkpoint, else the best one that ships for
    `model` and can pay by what rounds with it cost (`measured`, by name), else prompt lookup."""
    if carried:
        return carried[0].kind, "stored in the model's own checkpoint"
    for best, folder in shipped(model).items():
        table, acceptance = measured(best), trained_acceptance(folder)
        if table is None or not acceptance:
            return best, f"trained for {model}, ships with dspark"
        gain = expected_gain(table, acceptance, len(acceptance))
        if gain >= 1:
            return best, f"trained for {model}: {gain:.2f} times plain expected here"
        why = f"prompt lookup; {best} would reach {gain:.2f} times plain speed on this machine"
        return "ngram", why
    return "ngram", "prompt lookup needs no weights; no trained drafter is known for this model"
