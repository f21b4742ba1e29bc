"""Appendix A of the paper: who decides on a token must not know it.

Two tokens, A and B. The target says p = (0.7, 0.3), the drafter draws from q = (0.5, 0.5), and the
confidence of the second draft depends on the first one: 0.9 behind A, 0 behind B. All paths are
enumerated with the accept rule written out here, so laws are exact and nothing is drawn.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from scipy.stats import chisquare

from dspark.schedule.admission import Drafts, best_capacity, lengths_of, ranked
from dspark.schedule.policy import Load, Policy, parse
from tests.schedule.test_policy import Given

P = (0.7, 0.3)
Q = (0.5, 0.5)
MS = [0.0, 1.0, 2.0, 1 / 0.45]
"""SPS(1, 2, 3) = 1.0, 0.5, 0.45."""
Law = Mapping[tuple[int, ...], float]
Decide = Callable[[list[list[float]]], tuple[int, ...]]


def confidence(tokens: tuple[int, ...], first: float = 0.8) -> list[float]:
    """Of two drafts; a function of the tokens before each."""
    return [first, 0.9 if tokens[0] == 0 else 0.0]


def global_search(confidences: list[list[float]], ms: list[float] = MS) -> tuple[int, ...]:
    """Wrong on purpose: the best count for the confidences of this very round."""
    drafts = Drafts.of(range(len(confidences)), confidences)
    owners, values = ranked(drafts.survival)
    n = len(confidences)
    costs = Given(ms).curve(n, n + len(values), requests=n, context=0, block=2)
    count = best_capacity(values, np.array(costs), float(n))
    return tuple(lengths_of(owners, count, n).tolist())


def scheduled(policy: Policy) -> Decide:
    return lambda confidences: (
        policy.plan(Drafts.of(range(len(confidences)), confidences), Load(2)).lengths
    )


def emitted(drafts: tuple[int, ...], verified: int) -> Law:
    """The law of the first two tokens, given what was drafted and how much of it was verified.

    Accept with min(1, p/q), else draw from the residual; behind the last verified token draw from
    p. A round that emitted one token is followed by plain decoding.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)

    def extend(front: tuple[int, ...], weight: float) -> None:
        if len(front) == 2:
            law[front] += weight
        else:
            for y in (0, 1):
                extend((*front, y), weight * P[y])

    def test(i: int, front: tuple[int, ...], weight: float) -> None:
        if i == verified or i == 2:
            extend(front, weight)
            return
        x = drafts[i]
        keep = min(1.0, P[x] / Q[x])
        test(i + 1, (*front, x), weight * keep)
        residual = [max(p - q, 0.0) for p, q in zip(P, Q, strict=True)]
        for y in (0, 1):
            if keep < 1 and residual[y]:
                extend((*front, y), weight * (1 - keep) * residual[y] / sum(residual))

    test(0, (), 1.0)
    return law


def joint(decide: Decide, requests: int, firsts: tuple[float, ...]) -> Law:
    """The law of the first two tokens of every request, over all drafts they could have drawn."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    blocks = list(itertools.product((0, 1), repeat=2))
    for drawn in itertools.product(blocks, repeat=requests):
        weight = np.prod([Q[x] for block in drawn for x in block])
        found = decide([confidence(b, a) for b, a in zip(drawn, firsts, strict=True)])
        outcomes = [emitted(b, n).items() for b, n in zip(drawn, found, strict=True)]
        for combined in itertools.product(*outcomes):
            text = tuple(t for tokens, _ in combined for t in tokens)
            law[text] += float(weight * np.prod([w for _, w in combined]))
    assert sum(law.values()) == pytest.approx(1.0)
    return law


def first_token(law: Law) -> tuple[float, float]:
    a = sum(w for text, w in law.items() if text[0] == 0)
    return a, 1 - a


def test_the_early_stop_keeps_the_law_of_appendix_a() -> None:
    law = joint(scheduled(parse("causal", Given(MS))), 1, (0.8,))
    assert first_token(law) == pytest.approx((0.7, 0.3))


def test_a_global_search_breaks_it_and_is_caught() -> None:
    law = joint(global_search, 1, (0.8,))
    assert global_search([[0.8, 0.9]]) == (2,) and global_search([[0.8, 0.0]]) == (0,)
    assert first_token(law) == pytest.approx((0.85, 0.15))
    rng = np.random.default_rng(0)
    for share, honest in ((0.85, False), (0.7, True)):
        drawn = rng.binomial(2000, share)
        p_value = chisquare([drawn, 2000 - drawn], [1400, 600]).pvalue
        assert (p_value > 1e-3) == honest


def product_law(requests: int) -> Law:
    texts = itertools.product((0, 1), repeat=2 * requests)
    return {text: float(np.prod([P[t] for t in text])) for text in texts}


def warmed(name: str, ms: list[float], requests: int) -> Decide:
    """A scheduler of its own for every decision, each behind the same past."""

    def decide(confidences: list[list[float]]) -> tuple[int, ...]:
        policy = parse(name, Given(ms))
        for past in ([[0.9, 0.8]] * requests, [[0.3, 0.9]] * requests):
            scheduled(policy)(past)
        return scheduled(policy)(confidences)

    return decide


CLIFF = [0.0, 1.0, 1.3, 2.4, 2.45, 2.5, 3.9, 3.95]


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("ms", [MS, CLIFF], ids=["steep", "cliff"])
@pytest.mark.parametrize("name", ["all", "static:1", "threshold:0.5", "causal", "lagged", "auto"])
def test_every_scheduler_keeps_the_joint_law(name: str, ms: list[float], requests: int) -> None:
    """Not only each request's own law: they also stay independent of each other, although the
    length of one depends on what the other drew."""
    law = joint(warmed(name, ms, requests), requests, (0.8, 0.75)[:requests])
    for text, weight in product_law(requests).items():
        assert law[text] == pytest.approx(weight, abs=1e-12)


def test_lengths_in_a_batch_do_depend_on_the_company() -> None:
    """Or the joint laws above would be no test of it."""
    decide = warmed("lagged", CLIFF, 2)
    drawn = {decide([[0.8, second], [0.75, 0.9]]) for second in (0.9, 0.0)}
    assert len({found[1] for found in drawn}) == 2


def test_a_global_search_over_a_batch_is_caught_too() -> None:
    law = joint(lambda c: global_search(c, CLIFF), 2, (0.8, 0.75))
    wrong = max(abs(law[text] - w) for text, w in product_law(2).items())
    assert wrong > 0.01
