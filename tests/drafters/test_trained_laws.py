"""What a trained drafter's proposals leave behind is the target's own law, for every head.

The drafters are random, so q is far from p: heads, draft vocabularies and candidates put q to zero
where p is not, confidences cut blocks, and a seeded request must not care about any of it.
"""

from __future__ import annotations

import pytest

from tests.drafters import tiny_drafters
from tests.drafters.tiny_drafters import FORMS
from tests.engine.table import TableDecoder, V, table
from tests.engine.test_laws import p_value


@pytest.mark.parametrize("form", FORMS)
def test_the_joint_law_of_three_tokens(form: str) -> None:
    model = TableDecoder(table(0, 0.8))
    small = {"draft_vocab_size": 5, "candidates": 3} if form == "everything" else {}
    if form == "bilinear":
        small = {"candidates": 4}
    length = 2 if form == "mtp" else 3
    drafter = tiny_drafters.drafter(model, form, num_draft_tokens=length, **small)  # type: ignore[arg-type]
    assert p_value(drafter, table(0, 0.8), model, 2000) > 0.001


def test_the_confidence_cuts_some_blocks_and_not_others() -> None:
    """Or the test above would not have seen a schedule at all."""
    from dspark.engine.engine import Engine
    from dspark.schedule.scheduler import Scheduler
    from tests.engine.oracle import ByteTokenizer, play, request

    model = TableDecoder(table(0, 0.8))
    drafter = tiny_drafters.drafter(model, "vanilla")  # type: ignore[arg-type]
    engine = Engine(model, drafter, ByteTokenizer(), scheduler=Scheduler())
    played = play(engine, [request([i], str(i), temperature=1.0, seed=i) for i in range(V)])
    lengths = {s[1] for i in range(V) for s in played.shares(str(i))}
    assert len(lengths) > 2
