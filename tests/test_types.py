"""The nouns: what they refuse, what they derive."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dspark.errors import DSparkError, InvalidRequestError
from dspark.types import Draft, Round, SamplingParams, Stats, Verdict


def one_round(drafted: int, verified: int, accepted: int, emitted: int | None = None) -> Round:
    emitted = accepted + 1 if emitted is None else emitted
    return Round(
        "r", 0, tuple(range(drafted)), verified, accepted, tuple(range(emitted)), 1.0, 10.0, 0.5
    )


def stats(*rounds: Round, first: int = 1) -> Stats:
    out = Stats(requests=1, completion_tokens=first + sum(len(r.emitted) for r in rounds))
    for r in rounds:
        out.add_round(r)
    return out


# --- SamplingParams ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("min_tokens", -1),
        ("seed", -1),
        ("stop", ("a", "")),
        ("logprobs", -1),
        ("logprobs", 101),
        ("logit_bias", {3: math.nan}),
    ],
)
def test_values_out_of_range_name_themselves(name: str, value: Any) -> None:
    """B21 (max_tokens 0) and its like: one line with what was given and what was expected."""
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name}=") and "expected" in message and "\n" not in message
    assert isinstance(error.value, DSparkError)


def test_borders_are_in_range() -> None:
    SamplingParams(
        max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=1, presence_penalty=-2,
        frequency_penalty=2, min_tokens=0, seed=0, logprobs=0, logit_bias={0: -math.inf},
    )  # fmt: skip


def test_derived_properties_of_the_law() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy
    assert not SamplingParams(min_tokens=3, logit_bias={1: 2.0}).needs_history
    for name, value in (
        ("presence_penalty", 1.0),
        ("frequency_penalty", -1.0),
        ("repetition_penalty", 1.1),
    ):
        params: dict[str, Any] = {name: value}
        assert SamplingParams(**params).needs_history


# --- Draft and Verdict ------------------------------------------------------------------------


def test_a_draft_is_cut_with_all_that_belongs_to_it() -> None:
    draft = Draft((1, 2, 3), torch.rand(3, 8), torch.rand(3))
    cut = draft.truncated(2)
    assert len(cut) == 2 and cut.tokens == (1, 2)
    assert cut.probs is not None and cut.probs.shape == (2, 8)
    assert cut.confidence is not None and cut.confidence.shape == (2,)
    assert draft.truncated(3) is draft and draft.truncated(9) is draft
    assert len(Draft((1,)).truncated(0)) == len(Draft()) == 0


def test_the_bonus_ends_a_verdict() -> None:
    assert Verdict(2, (5, 6, 7)).bonus == 7


# --- Stats ------------------------------------------------------------------------------------


def test_ratios_of_nothing_are_none() -> None:
    """B23: no 'nan %', no division by zero, when no round ran or nothing was drafted."""
    nothing = Stats()
    assert nothing.accepted_length is None
    assert nothing.acceptance_rate is None
    assert nothing.tokens_per_second is None
    assert nothing.itl_ms is None
    assert nothing.acceptance_by_position == []
    plain = stats(*[one_round(0, 0, 0)] * 3)
    assert plain.acceptance_rate is None
    assert plain.accepted_length == 1.0
    assert plain.acceptance_by_position == []


def test_counters_of_known_rounds() -> None:
    """B23: the bonus counts in the length and not in the rate; rates are over verified tokens."""
    s = stats(one_round(5, 3, 3), one_round(5, 2, 0), one_round(5, 3, 2), one_round(4, 0, 0))
    assert (s.rounds, s.drafted, s.verified, s.accepted) == (4, 19, 8, 5)
    assert s.round_tokens == 4 + 1 + 3 + 1
    assert s.accepted_length == 9 / 4
    assert s.acceptance_rate == 5 / 8
    assert s.verified_at == [3, 3, 2] and s.accepted_at == [2, 2, 1]
    assert (s.draft_ms, s.verify_ms, s.other_ms) == (4.0, 40.0, 2.0)


def test_position_zero_is_counted_and_rates_are_conditional() -> None:
    """B23: at k, of the rounds that got as far as k."""
    s = stats(*[one_round(3, 3, a) for a in (0, 1, 1, 2, 3, 3, 3, 3)])
    assert s.acceptance_by_position == pytest.approx([7 / 8, 5 / 7, 4 / 5])
    assert all(0 <= r <= 1 for r in s.acceptance_by_position)


def test_rounds_whose_draft_was_ready_are_told_from_the_others() -> None:
    kinds = [(3, True), (1, False), (2, True), (2, False)]
    rounds = [
        Round("r", i, (1, 2), 2, n - 1, (1,) * n, 1.0, 2.0, 1.0, ahead=ahead)
        for i, (n, ahead) in enumerate(kinds)
    ]
    found = Stats.total([stats(*rounds), stats(rounds[0])])
    assert (found.ahead, found.tokens_ahead, found.hit_rate) == (3, 8, 0.6)
    assert found.accepted_length_ahead == 8 / 3 and found.accepted_length_fresh == 1.5


def test_a_block_cut_by_the_end_of_the_text() -> None:
    """B23: tokens behind the end are in no figure; sums equal the completion."""
    s = stats(one_round(4, 4, 4), one_round(4, 4, 2, emitted=2))
    assert s.round_tokens + 1 == s.completion_tokens
    assert s.accepted_length == 7 / 2
    assert s.acceptance_rate is not None and 0 <= s.acceptance_rate <= 1


def test_speed_is_that_of_the_tokens_behind_the_first() -> None:
    s = stats(one_round(3, 3, 3), one_round(3, 3, 0))
    s.decode_ms = 100.0
    assert s.tokens_per_second == pytest.approx(50.0)
    assert s.itl_ms == pytest.approx(20.0)


def test_totals_add_and_average_the_time_to_first_token() -> None:
    a, b = stats(one_round(2, 2, 1)), stats(one_round(4, 4, 4), one_round(4, 3, 0))
    a.ttft_ms, b.ttft_ms = 10.0, 30.0
    total = Stats.total([a, b])
    assert total.requests == 2 and total.rounds == 3
    assert total.ttft_ms == 20.0
    assert total.verified_at == [3, 3, 2, 1] and total.accepted_at == [2, 1, 1, 1]
    assert total.round_tokens == a.round_tokens + b.round_tokens
    assert total.completion_tokens == a.completion_tokens + b.completion_tokens
    assert Stats.total([]) == Stats()
    assert a.verified_at == [1, 1]
