"""Drafting behind tokens that the target is still running: the guess knows them, and nothing stays
behind of it once the true rows have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.models.target import Segment, Target, pack
from dspark.sampling import streams
from dspark.types import Draft, SamplingParams
from tests.drafters import tiny_drafters, tiny_v4
from tests.models.deepseek_v4.tiny import VOCAB
from tests.tiny import target

TEXT = [int(t) for t in torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(4))]
Pair = tuple[Target, Callable[[], Drafter]]


def dense(form: str, dtype: str) -> Pair:
    model = target(dtype=dtype, num_slots=3)
    return model, lambda: tiny_drafters.drafter(
        model, form, num_draft_tokens=3 if form == "mtp" else None
    )


def v4(kind: str) -> Pair:
    carried = tiny_v4.MTP if kind == "mtp1" else tiny_v4.dspark(tiny_v4.config())
    model = tiny_v4.target(carried)
    return model, lambda: tiny_v4.drafter(model, carried, 3 if kind == "mtp1" else None)


KINDS: dict[str, Callable[[], Pair]] = {
    "mtp": lambda: dense("mtp", "fp32"),
    "mtp int8": lambda: dense("mtp", "int8"),
    "dflash": lambda: dense("dflash", "fp32"),
    "masks": lambda: dense("dflash-masks", "fp32"),
    "dspark": lambda: dense("vanilla", "int8"),
    "everything": lambda: dense("everything", "fp32"),
    "v4 mtp": lambda: v4("mtp1"),
    "v4 dspark": lambda: v4("dspark"),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return KINDS[request.param]()


def feed(model: Target, drafter: Drafter, slot: int, start: int, end: int) -> None:
    out = model.forward(
        pack([Segment(slot, start, tuple(TEXT[start:end]), 1)]), drafter.feature_layers
    )
    drafter.observe([Committed(slot, start, tuple(TEXT[start:end]), 0)], out.features)


def context(tokens: Sequence[int], slot: int = 0, unseen: int = 0, room: int = 9) -> DraftContext:
    return DraftContext(slot, tokens, SamplingParams(), room, streams(0)[0], unseen)


def test_nothing_stays_behind(pair: Pair) -> None:
    """Guesses behind a wrong continuation, twice, then the true rows: the draft of one who never
    looked ahead."""
    model, make = pair
    looked, plain = make(), make()
    assert looked.ahead
    for end in range(20, 40, 4):
        start = 0 if end == 20 else end - 4
        for drafter in (looked, plain):
            feed(model, drafter, 0, start, end)
        for unseen in (4, 1):
            wrong = [*TEXT[:end], *range(unseen + 1)]
            (guess,) = looked.propose([context(wrong, unseen=unseen)])
            assert len(guess) == looked.cap
        (found,), (wanted,) = (d.propose([context(TEXT[: end + 1])]) for d in (looked, plain))
        assert found.tokens == wanted.tokens


def test_the_unseen_tokens_matter_and_company_does_not(pair: Pair) -> None:
    model, make = pair
    drafter = make()
    for slot in (0, 1):
        feed(model, drafter, slot, 0, 20 + slot)
    first = context(TEXT[:24], unseen=3)
    other = context([*TEXT[:20], 1, 2, 3, TEXT[23]], unseen=3)
    drafts: list[Draft] = []
    for c in (first, other):
        drafts += drafter.propose([c])
    assert drafts[0].tokens != drafts[1].tokens
    company = [context(TEXT[:22], slot=1), context(TEXT[:23], slot=1, unseen=1, room=2)]
    for c in company:
        alone = drafter.propose([c])[0].tokens
        together = drafter.propose([first, c])
        assert [d.tokens for d in together] == [drafts[0].tokens, alone]


def test_a_chain_goes_on_where_it_was(pair: Pair) -> None:
    """MTP alone: behind its own guesses it drafts what it would have drafted at once."""
    model, make = pair
    drafter = make()
    if type(drafter).__name__ not in ("MtpDrafter", "V4MtpDrafter"):
        pytest.skip("blocks are drafted at once")
    feed(model, drafter, 0, 0, 20)
    (whole,) = drafter.propose([context(TEXT[:21])])
    (rest,) = drafter.propose([context([*TEXT[:21], *whole.tokens[:2]], unseen=2)])
    assert rest.tokens[0] == whole.tokens[2]


def test_drafters_that_learn_from_the_text_do_not_draft_ahead() -> None:
    assert not NgramDrafter.ahead
