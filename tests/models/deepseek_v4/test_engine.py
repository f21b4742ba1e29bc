"""The engine on a tiny DeepSeek-V4: guessing ahead changes no token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dspark.drafters.base import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.models.deepseek_v4.model import DeepseekV4
from tests.engine.oracle import (
    PATTERNS,
    ByteTokenizer,
    Ids,
    OracleDrafter,
    play,
    reference,
    request,
)
from tests.models.deepseek_v4.tiny import VOCAB, oracle, target, tokens

PROMPTS: tuple[Ids, ...] = tuple(tokens(n, seed=n) for n in (5, 1, 30, 12, 41))


@pytest.fixture(params=[torch.float32, torch.int8], ids=str, scope="module")
def model(request: pytest.FixtureRequest) -> DeepseekV4:
    return target(oracle(), dtype=request.param, num_slots=4, max_context=256, max_block=16)


@pytest.fixture(scope="module")
def texts(model: DeepseekV4) -> dict[Ids, Ids]:
    return {p: reference(model, p, 100) for p in PROMPTS}


def check(model: DeepseekV4, texts: dict[Ids, Ids], drafter: Drafter, **how: Any) -> None:
    """Five requests over four slots yield the plain text."""
    every = how.pop("every", 0)
    engine = Engine(model, drafter, ByteTokenizer(), **how)
    requests = [request(p, str(i), max_tokens=60 - 9 * i) for i, p in enumerate(PROMPTS)]
    played = play(engine, requests, every)
    for i, p in enumerate(PROMPTS):
        assert played.ids(str(i)) == texts[p][: 60 - 9 * i]


@pytest.mark.parametrize("block", [1, 2, 5, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_text_is_the_plain_one(
    model: DeepseekV4, texts: dict[Ids, Ids], block: int, pattern: str
) -> None:
    check(model, texts, OracleDrafter(texts, block, PATTERNS[pattern], VOCAB))


def test_plain_decoding_in_small_prompt_chunks(model: DeepseekV4, texts: dict[Ids, Ids]) -> None:
    check(model, texts, NoDrafter(model), prefill_chunk=7, every=2)


@pytest.mark.parametrize("seed", range(2))
def test_random_accepts_and_arrivals(model: DeepseekV4, texts: dict[Ids, Ids], seed: int) -> None:
    rng = random.Random(seed)
    table = [[rng.randrange(7) for _ in range(60)] for _ in PROMPTS]
    drafter = OracleDrafter(texts, 5, lambda n, row: table[row][n], VOCAB)
    check(model, texts, drafter, every=1 + seed, prefill_chunk=16)


@pytest.mark.parametrize(("back", "cached"), [(0, 59), (9, 50), (30, 0)])
def test_prefix_reuse_as_far_as_the_rings_reach(model: DeepseekV4, back: int, cached: int) -> None:
    """The next turn, one that goes back a little, and one that goes back further than max_block."""
    engine = Engine(model, NgramDrafter(model), ByteTokenizer(), prefix_reuse=True)
    former = play(engine, [request(PROMPTS[4], max_tokens=19)]).outputs["r"]
    text = (*former.prompt_ids, *former.token_ids)
    r = request((*text[: len(text) - 1 - back], *tokens(7, seed=99)), max_tokens=20)
    got = play(engine, [r])
    assert got.outputs["r"].stats.cached_tokens == cached
    assert got.ids("r") == reference(model, r.prompt_ids, 20)
