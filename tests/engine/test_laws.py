"""Penalties, biases, seeds and distributions through the whole engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.models.decoder import Decoder
from dspark.models.target import Target
from tests.engine.oracle import (
    PATTERNS,
    ByteTokenizer,
    Ids,
    OracleDrafter,
    SampledDrafter,
    TableTarget,
    play,
    request,
)
from tests.engine.table import V, table
from tests.tiny import target

PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)
"""Repeats itself, so that prompt lookup has something to propose."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    return target(dtype="int8", num_slots=6)


def ids(model: Decoder, drafter: Drafter, prompt: Ids = PROMPT, **params: Any) -> Ids:
    engine = Engine(model, drafter, ByteTokenizer())
    return play(engine, [request(prompt, **{"max_tokens": 40, **params})]).ids("r")


# -- greedy laws -----------------------------------------------------------------------------------


def plain_params(model: Decoder) -> dict[str, dict[str, Any]]:
    """Parameters that change a greedy text; biases are about tokens that it really holds."""
    text = ids(model, NoDrafter(model))
    return {
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 2.0},
        "negative frequency": {"frequency_penalty": -2.0},
        "repetition": {"repetition_penalty": 1.8},
        "all penalties": {
            "presence_penalty": 0.7,
            "frequency_penalty": 0.4,
            "repetition_penalty": 1.2,
        },
        "ban": {"logit_bias": {text[0]: -100.0, text[3]: -100.0}},
        "nudge": {"logit_bias": {text[5]: -3.0, 17: 2.5}},
        "force": {"logit_bias": {42: 100.0}},
        "ban and penalties": {"logit_bias": {text[2]: -100.0}, "repetition_penalty": 1.5},
    }


NAMES = ["presence", "frequency", "negative frequency", "repetition", "all penalties", "ban"]
NAMES += ["nudge", "force", "ban and penalties"]


@pytest.mark.parametrize("name", NAMES)
def test_penalties_and_biases_reach_every_row_of_a_block(model: Decoder, name: str) -> None:
    """B12: equal to plain decoding, with a drafter that knows the law and one that does not."""
    params = plain_params(model)[name]
    untouched = ids(model, NoDrafter(model))
    plain = ids(model, NoDrafter(model), **params)
    assert plain != untouched
    for believed in (plain, untouched):
        for pattern in PATTERNS.values():
            drafter = OracleDrafter({PROMPT: believed}, 5, pattern)
            assert ids(model, drafter, **params) == plain
    assert ids(model, NgramDrafter(model), **params) == plain


def test_a_banned_token_never_comes_and_a_forced_one_always(model: Decoder) -> None:
    """B12: at each step the token that would come is banned; then one is forced."""
    text = ids(model, NoDrafter(model), max_tokens=12)
    banned: dict[int, float] = {}
    for _ in range(12):
        got = ids(model, OracleDrafter({PROMPT: text}, 4), max_tokens=12, logit_bias=banned)
        assert not set(got) & set(banned)
        assert got == ids(model, NoDrafter(model), max_tokens=12, logit_bias=banned)
        banned[got[len(banned)]] = -100.0
    forced = ids(model, OracleDrafter({PROMPT: text}, 4), max_tokens=12, logit_bias={42: 100.0})
    assert forced == (42,) * 12


# -- seeds -----------------------------------------------------------------------------------------


def drafters(model: Decoder) -> dict[str, Drafter]:
    generator = torch.Generator().manual_seed(3)
    table = torch.softmax(torch.randn(257, 257, generator=generator), 1)
    return {
        "none": NoDrafter(model),
        "ngram": NgramDrafter(model),
        "sampled": SampledDrafter(table, 3),
    }


@pytest.mark.parametrize("name", ["none", "ngram", "sampled"])
def test_a_seed_fixes_the_text(model: Decoder, name: str) -> None:
    """B08, B09: alone, again, in a batch with others, behind other traffic."""
    params = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
    alone = ids(model, drafters(model)[name], **params)
    assert ids(model, drafters(model)[name], **params) == alone

    engine = Engine(model, drafters(model)[name], ByteTokenizer(), prefill_chunk=6)
    others = [
        request(PROMPT[n:], f"other {n}", temperature=1.0, max_tokens=9 + n) for n in range(5)
    ]
    play(engine, others)
    crowd = [*others[:3], request(PROMPT, "it", **params), *others[3:]]
    assert play(engine, crowd, every=1).ids("it") == alone


def test_a_seeded_text_is_that_of_plain_decoding_under_prompt_lookup(model: Decoder) -> None:
    """B09: a one-hot draft takes one number a token from the accepting stream, and no other."""
    sharp = {"temperature": 1.0, "top_k": 2, "max_tokens": 40}
    for seed in range(6):
        plain = ids(model, NoDrafter(model), seed=seed, **sharp)
        assert ids(model, NgramDrafter(model), seed=seed, **sharp) == plain
        drafter = OracleDrafter({PROMPT: plain}, 4, PATTERNS["some"])
        assert ids(model, drafter, seed=seed, **sharp) == plain


@pytest.mark.parametrize("name", ["none", "ngram", "sampled"])
def test_seeds_differ_and_so_do_requests_without_one(model: Decoder, name: str) -> None:
    """B08, B09."""
    engine = Engine(model, drafters(model)[name], ByteTokenizer())
    params = {"temperature": 1.0, "max_tokens": 8}
    seeded = play(engine, [request(PROMPT, str(n), seed=n, **params) for n in range(8)])
    assert len({o.token_ids for o in seeded.outputs.values()}) >= 6
    fresh = play(engine, [request(PROMPT, str(n), **params) for n in range(20)])
    assert len({o.token_ids for o in fresh.outputs.values()}) >= 15


# -- distributions ---------------------------------------------------------------------------------


def joint_law(logits_V_V: Tensor, first: int) -> np.ndarray:
    """[V, V, V]: the law of three tokens behind `first`."""
    p = torch.softmax(logits_V_V.double(), 1)
    return torch.einsum("a,ab,bc->abc", p[first], p, p).numpy()


def p_value(
    drafter: Drafter,
    logits_V_V: Tensor,
    target: Target | None = None,
    n: int = 5000,
    **params: Any,
) -> float:
    """Chi-square of the first three tokens of n seeded requests against their joint law."""
    engine = Engine(target or TableTarget(logits_V_V), drafter, ByteTokenizer())
    law = joint_law(params.pop("law", logits_V_V), 0).ravel()
    for seed in range(n):
        engine.submit(request((0,), str(seed), temperature=1.0, seed=seed, max_tokens=5, **params))
    while engine.has_work:
        engine.step()
    counts: Counter[int] = Counter()
    for seed in range(n):
        output = engine.take_output(str(seed))
        assert output is not None
        a, b, c = output.token_ids[:3]
        counts[(a * V + b) * V + c] += 1
    observed = np.array([counts[i] for i in range(V**3)], dtype=float)
    assert not observed[law == 0].any()
    observed, law = observed[law > 0], law[law > 0]
    rare = law * n < 5  # added up, as the test wants no small cells
    cells, wanted = observed[~rare], law[~rare] * n
    if rare.any():
        cells, wanted = (
            np.append(cells, observed[rare].sum()),
            np.append(wanted, law[rare].sum() * n),
        )
    return float(stats.chisquare(cells, wanted).pvalue)


DRAFTERS: dict[str, Drafter] = {
    "q close to p": SampledDrafter(torch.softmax(table(0, 0.8) + table(1, 0.3), 1), 3),
    "q far from p": SampledDrafter(torch.softmax(table(2, 1.5), 1), 3),
    "q uniform": SampledDrafter(torch.full((V, V), 1 / V), 2),
    "q is p": SampledDrafter(torch.softmax(table(0, 0.8), 1), 3),
    "one-hot": OracleDrafter({(0,): (3, 1, 4, 1, 5)}, 3, vocab_size=V),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_joint_law_of_three_tokens(name: str) -> None:
    """B04, T5: what is emitted is distributed as the target's own, whatever was proposed."""
    assert p_value(DRAFTERS[name], table(0, 0.8)) > 0.001


def test_the_joint_law_under_a_bias() -> None:
    """B12: a bias and a ban hold in every row at temperature 1."""
    biased = table(0, 0.8)
    biased[:, 2] += 1.0
    biased[:, 5] = -torch.inf
    bias = {"logit_bias": {2: 1.0, 5: -100.0}}
    assert p_value(DRAFTERS["q far from p"], table(0, 0.8), law=biased, **bias) > 0.001


def test_the_harness_finds_a_drafter_that_lies() -> None:
    """B05: drawn from one q, said to be another: the law is lost, and the test above would see."""
    drawn, said = torch.softmax(table(2, 1.0), 1), torch.softmax(table(3, 1.0), 1)
    assert p_value(SampledDrafter(drawn, 3, said), table(0, 0.8)) < 1e-6
