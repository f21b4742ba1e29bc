"""Prompt lookup: what it proposes, how its length adapts, what it forgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.drafters.base import Committed, DraftContext, build
from dspark.drafters.ngram import DEFAULT_DRAFT_TOKENS, ROW_COST, NgramDrafter, best_length
from dspark.errors import ConfigError
from dspark.models.target import Target
from dspark.sampling import streams
from dspark.types import SamplingParams

NO_TARGET = cast(Target, None)
RNG = streams(0)[0]


def context(tokens: Sequence[int], slot: int = 0, max_tokens: int = 100) -> DraftContext:
    return DraftContext(slot, tokens, SamplingParams(), max_tokens, RNG)


def propose(drafter: NgramDrafter, tokens: Sequence[int], **kwargs: int) -> tuple[int, ...]:
    (draft,) = drafter.propose([context(tokens, **kwargs)])
    assert draft.probs is None
    if draft.tokens:  # one rate for the whole draft, and it is worth a row
        assert draft.confidence is not None and len(draft.confidence) == len(draft)
        assert len(set(draft.confidence.tolist())) == 1 and draft.confidence[0] > ROW_COST
    return draft.tokens


def fresh(tokens: Sequence[int], cap: int | None = None) -> tuple[int, ...]:
    return propose(NgramDrafter(NO_TARGET, cap), tokens)


def verified(slot: int, tokens: Sequence[int], k: int, accepted: int) -> Committed:
    """What the engine reports: the anchor and the accepted drafts were committed."""
    return Committed(slot, len(tokens) - 1, tuple(tokens[-1:]) * (accepted + 1), 0, k, accepted)


def play(drafter: NgramDrafter, text: Sequence[int], prompt: int) -> tuple[int, int, int]:
    """Greedy decoding of a known text: (rounds, rows drafted, tokens emitted)."""
    rounds = rows = 0
    known = list(text[:prompt])
    while len(known) < len(text):
        draft = propose(drafter, known, max_tokens=len(text) - len(known))
        accepted = 0
        while accepted < len(draft) and draft[accepted] == text[len(known) + accepted]:
            accepted += 1
        drafter.observe([verified(0, known, len(draft), accepted)], None)
        known += text[len(known) : len(known) + accepted + 1]
        rounds, rows = rounds + 1, rows + len(draft)
    return rounds, rows, len(known) - prompt


# --- what is proposed -------------------------------------------------------------------------


def test_nothing_before_nothing_proposed() -> None:
    assert fresh([5]) == ()
    assert fresh([1, 2, 3, 4]) == ()


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    assert fresh([1, 2, 3, 4, 50, 60, 9, 4, 70, 8, 1, 2, 3, 4])[:2] == (50, 60)


def test_the_most_recent_of_equal_matches_wins() -> None:
    assert fresh([1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3])[:2] == (8, 9)


def test_a_match_at_the_end_goes_round() -> None:
    """The text is a loop of two: the copy feeds itself."""
    assert fresh([9, 1, 2, 1, 2, 1, 2])[:4] == (1, 2, 1, 2)
    assert set(fresh([3, 3, 3, 3, 3, 3])) == {3}


def test_short_matches_propose_little() -> None:
    by_length = [
        len(fresh(t))
        for t in ([4, 5, 6, 7, 4], [3, 4, 5, 6, 3, 4], [2, 3, 4, 5, 2, 3, 4], [1, 2, 3, 4] * 2)
    ]
    assert by_length[0] == 1
    assert by_length == sorted(by_length) and by_length[-1] >= 4


@pytest.mark.parametrize("cap", [0, 1, 3, None])
def test_caps_hold(cap: int | None) -> None:
    """B46: 0 is plain decoding; the room that the engine names is a cap as well."""
    drafter = NgramDrafter(NO_TARGET, cap)
    loop = [1, 2, 3, 4, 5] * 8
    for _ in range(20):
        draft = propose(drafter, loop)
        drafter.observe([verified(0, loop, len(draft), len(draft))], None)
        loop += [*draft, [1, 2, 3, 4, 5][(len(loop) + len(draft)) % 5]]
    assert len(propose(drafter, loop)) == (DEFAULT_DRAFT_TOKENS if cap is None else cap)
    assert len(propose(drafter, loop, max_tokens=2)) == min(2, 10 if cap is None else cap)


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens=-1"):
        build("ngram", NO_TARGET, -1)
    assert isinstance(build("ngram", NO_TARGET), NgramDrafter)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 39))
def test_the_growing_index_finds_what_a_rescan_finds(tokens: list[int], cut: int) -> None:
    """However the text grew: by ones, by blocks, or at once."""
    whole = fresh(tokens)
    grown = NgramDrafter(NO_TARGET)
    for end in sorted({min(cut, len(tokens)), (cut + len(tokens)) // 2, len(tokens)}):
        if 0 < end <= len(tokens):
            grown.propose([context(tokens[:end])])
    again = propose(grown, tokens)
    shared = min(len(whole), len(again))
    assert whole[:shared] == again[:shared]
    if whole:
        n = max(n for n in range(1, 5) if occurs(tokens, n))
        start = max(e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:])
        assert whole[0] == tokens[start]


def occurs(tokens: list[int], n: int) -> bool:
    return any(tokens[e - n : e] == tokens[-n:] for e in range(n, len(tokens)))


# --- how much is proposed ---------------------------------------------------------------------


def test_best_length_follows_the_rate() -> None:
    """Equation 1: silent below the price of a row, the cap when all is accepted."""
    assert best_length(0.0, 10) == best_length(ROW_COST, 10) == 0
    assert best_length(ROW_COST + 0.01, 10) == 1
    assert best_length(1.0, 10) == 10 and best_length(1.0, 0) == 0
    lengths = [best_length(a / 100, 10) for a in range(101)]
    assert lengths == sorted(lengths)
    for a in (0.2, 0.5, 0.8, 0.95):
        speed = [sum(a**i for i in range(k + 1)) / (1 + ROW_COST * k) for k in range(11)]
        assert best_length(a, 10) == speed.index(max(speed))


def test_length_grows_when_accepted_and_falls_when_not() -> None:
    drafter = NgramDrafter(NO_TARGET)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] * 2
    first = len(propose(drafter, text))
    drafter.observe([verified(0, text, first, first)], None)
    assert len(propose(drafter, text)) > first
    for _ in range(60):
        k = len(propose(drafter, text))
        drafter.observe([verified(0, text, k, 0)], None)
    assert len(propose(drafter, text)) <= 1


def test_only_what_was_tried_counts() -> None:
    """Tokens behind a miss, or cut off before the pass, say nothing."""
    lengths = []
    for k in (2, 9):
        drafter = NgramDrafter(NO_TARGET)
        text = [1, 2, 3, 4, 5, 6] * 2
        propose(drafter, text)
        drafter.observe([verified(0, text, k, 1)], None)
        lengths.append(len(propose(drafter, text)))
    assert lengths[0] == lengths[1]
    untested = NgramDrafter(NO_TARGET)
    before = len(propose(untested, text))
    untested.observe([verified(0, text, 0, 0)], None)
    assert len(propose(untested, text)) == before


@pytest.mark.parametrize("vocabulary", [8, 50, 1000])
def test_text_without_repetition_costs_next_to_nothing(vocabulary: int) -> None:
    """B49: on random text, cost per token stays within 4 % of plain decoding."""
    text = np.random.default_rng(vocabulary).integers(0, vocabulary, 1500).tolist()
    rounds, rows, tokens = play(NgramDrafter(NO_TARGET), text, 100)
    assert (rounds + ROW_COST * rows) / tokens < 1.04


def test_repetitive_text_gains_much() -> None:
    rng = np.random.default_rng(0)
    part = rng.integers(0, 1000, 200).tolist()
    rounds, rows, tokens = play(NgramDrafter(NO_TARGET), part * 3, 200)
    assert tokens / (rounds + ROW_COST * rows) > 3.5


def test_a_silent_slot_probes_again() -> None:
    """Old failures fade: a text that starts to repeat itself later is noticed."""
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 6, 300).tolist()
    part = rng.integers(0, 6, 60).tolist()
    drafter = NgramDrafter(NO_TARGET)
    play(drafter, noise, 10)
    rounds, rows, tokens = play(drafter, noise + part * 6, 360)
    assert tokens / (rounds + ROW_COST * rows) > 2


# --- slots ------------------------------------------------------------------------------------


def test_slots_know_nothing_of_each_other() -> None:
    """B31: one batch or alone, the same drafts."""
    drafter = NgramDrafter(NO_TARGET)
    texts = [[1, 2, 3, 4, 9, 1, 2, 3, 4], [1, 2, 3, 4], [4, 3, 4, 3, 4]]
    drafts = drafter.propose([context(t, slot) for slot, t in enumerate(texts)])
    assert [d.tokens for d in drafts] == [fresh(t) for t in texts]
    assert drafts[1].tokens == ()


def test_a_released_slot_is_forgotten() -> None:
    drafter = NgramDrafter(NO_TARGET)
    propose(drafter, [1, 2, 3, 4, 5, 6])
    drafter.release(0)
    drafter.release(5)  # never seen
    assert propose(drafter, [9, 8, 1, 2, 3, 4]) == ()


@pytest.mark.parametrize("other", [[2], [7, 8, 1, 2, 3], [9] * 5 + [1, 2, 3]])
def test_a_slot_that_was_reused_without_release(other: list[int]) -> None:
    """Shorter text, or another one: only its own tokens are proposed."""
    drafter = NgramDrafter(NO_TARGET)
    propose(drafter, [1, 2, 3, 4, 5, 6])
    assert propose(drafter, other) == fresh(other)


def test_a_prefill_from_the_start_begins_anew() -> None:
    drafter = NgramDrafter(NO_TARGET)
    text = [1, 2, 3, 4, 5, 6]
    propose(drafter, text)
    drafter.observe([Committed(0, 0, (1, 2, 3), 0), Committed(3, 0, (1,), 3)], None)
    drafter.observe([verified(7, text, 2, 1)], None)  # a slot never proposed for
    longer = [1, 2, 3, 4, 5, 6, 0, 1]
    assert propose(drafter, longer) == fresh(longer)


def test_a_list_that_the_engine_goes_on_appending_to() -> None:
    tokens = [1, 2, 3]
    drafter = NgramDrafter(NO_TARGET)
    for t in (1, 2, 3, 1, 2):
        tokens.append(t)
        assert propose(drafter, tokens)[:1] == fresh(tokens)[:1]
    assert propose(drafter, tokens)[0] == 3
