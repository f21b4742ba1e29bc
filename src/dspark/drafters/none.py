"""The drafter that never guesses: plain decoding on the path of speculative decoding.

Every baseline of this project runs through it. The same engine, the same target, the same
verification with an empty draft, so a speed-up measured against it is one of drafting alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.drafters.base import DraftContext, Drafter
from dspark.types import Draft


class NoDrafter(Drafter):
    """Empty drafts always. Any `num_draft_tokens` is honoured: it is a cap, and 0 is below."""

    cap = 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """An empty draft for each context."""
        return [Draft()] * len(contexts)

    def reuse(self, source: int, slot: int, length: int) -> int:
        """It has no context, so none is missing."""
        return length
