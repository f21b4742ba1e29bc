"""The drafter that never guesses."""

from __future__ import annotations

from typing import cast

from dspark.drafters.base import Committed, DraftContext, build
from dspark.drafters.none import NoDrafter
from dspark.models.target import Target
from dspark.sampling import streams
from dspark.types import SamplingParams


def test_never_drafts() -> None:
    """B46: a cap of any size is honoured, 0 included."""
    target = cast(Target, None)
    context = DraftContext(0, [1, 2, 1, 2, 1], SamplingParams(), 9, streams(0)[0])
    for cap in (None, 0, 5):
        drafter = build("none", target, cap)
        assert isinstance(drafter, NoDrafter)
        drafter.observe([Committed(0, 0, (1, 2), 0)], None)
        assert [len(d) for d in drafter.propose([context, context])] == [0, 0]
        assert drafter.propose([]) == []
        drafter.release(0)
