"""The coupled bonus: the row behind the verified drafts judges one more token of the draft."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.sampling import draw
from dspark.types import Draft, SamplingParams, Verdict
from dspark.verify import accept

V = 6
P = torch.softmax(torch.randn(4, V, generator=torch.Generator().manual_seed(0)), 1)
Q = torch.softmax(torch.randn(4, V, generator=torch.Generator().manual_seed(1)), 1)


def judge(draft: Draft, rows: int, temperature: float = 1.0, seed: int = 0) -> Verdict:
    rng = np.random.Generator(np.random.Philox(seed))
    params = SamplingParams(temperature=temperature)
    return accept(draft, P[:rows].log(), params, (0,), 1, (), rng)


def test_greedy_is_what_it_is_without_coupling() -> None:
    best = P.argmax(1).tolist()
    for wrong in range(4):
        tokens = [t if i != wrong else (t + 1) % V for i, t in enumerate(best)]
        for k in range(1, 4):
            draft = Draft(tuple(tokens[:k]))
            coupled, plain = judge(draft, k, 0.0), judge(draft.truncated(k - 1), k, 0.0)
            assert coupled == plain
            assert coupled.accepted <= k - 1 and len(coupled.tokens) == coupled.accepted + 1


@pytest.mark.parametrize("one_hot", [False, True])
def test_the_law_of_the_bonus(one_hot: bool) -> None:
    """Both tokens have the target's law, the coupled one is the guess as often as acceptance
    allows, and not as rarely as a guess equals a draw."""
    n = 20_000
    rng = np.random.Generator(np.random.Philox(5))
    accepting = np.random.Generator(np.random.Philox(6))
    seen: Counter[tuple[int, int]] = Counter()
    reached = hits = 0
    params = SamplingParams(temperature=1.0)
    logits = P[:2].log()
    for _ in range(n):
        tokens = (1, 2) if one_hot else tuple(draw(q, rng.random()) for q in Q[:2])
        verdict = accept(
            Draft(tokens, None if one_hot else Q[:2]), logits, params, (0,), 1, (), accepting
        )
        if verdict.accepted == 1:
            reached += 1
            hits += verdict.bonus == tokens[1]
            seen[verdict.tokens] += 1  # type: ignore[index]
        else:
            assert len(verdict.tokens) == 1
    firsts: Counter[int] = Counter()
    bonus: Counter[int] = Counter()
    for (first, second), count in seen.items():
        firsts[first] += count
        bonus[second] += count
    wanted = P[1].numpy().astype(float)
    found = [bonus[i] for i in range(V)]
    assert stats.chisquare(found, wanted / wanted.sum() * reached).pvalue > 0.001
    rate = float(P[1, 2]) if one_hot else float(torch.minimum(P[1], Q[1]).sum())
    assert stats.binomtest(hits, reached, rate).pvalue > 0.001


def test_a_draft_of_other_lengths_is_a_bug() -> None:
    for tokens in ((), (1, 2, 3, 4)):
        with pytest.raises(AssertionError, match="one row for each"):
            judge(Draft(tokens), 2 + bool(not tokens), 0.0)
