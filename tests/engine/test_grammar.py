"""A grammar through the whole engine: the law is masked at every row of a block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.errors import InvalidRequestError
from dspark.grammar import Grammars
from dspark.tokenizer import Tokenizer
from dspark.types import Output, SamplingParams
from tests.drafters import tiny_drafters
from tests.engine.oracle import PATTERNS, OracleDrafter, ScriptedTarget, play, request
from tests.engine.test_laws import DRAFTERS, V, p_value, table
from tests.server.served import EOS, byte_backend
from tests.test_grammar import SCHEMA
from tests.tiny import target

PROMPT = tuple(b"json: ")
TOKENIZER = Tokenizer(byte_backend(), eos_ids=(EOS,))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, 257)


@pytest.fixture(scope="module")
def model() -> Any:
    return target(dtype="int8", num_slots=4)


def answer(model: Any, drafter: Drafter, grammars: Grammars, **params: Any) -> Output:
    grammar = grammars.json_schema(SCHEMA)
    r = request(PROMPT, max_tokens=90, grammar=grammar, **params)
    return play(Engine(model, drafter, TOKENIZER), [r]).outputs["r"]


def fits(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"a", "b"} and 0 <= found["a"] <= 99 and found["b"] in ("x", "yz")


@pytest.mark.parametrize("form", [*tiny_drafters.FORMS, "ngram", *PATTERNS])
def test_greedy_text_is_the_plain_one(model: Any, grammars: Grammars, form: str) -> None:
    """B15, B16: with drafts that are right, half right and against the grammar."""
    plain = answer(model, NoDrafter(model), grammars)
    assert fits(plain.text) and plain.finish_reason == "stop"
    drafter: Drafter
    if form in PATTERNS:
        drafter = OracleDrafter({PROMPT: plain.token_ids}, 5, PATTERNS[form])
    elif form == "ngram":
        drafter = NgramDrafter(model)
    else:
        drafter = tiny_drafters.drafter(model, form)
    got = answer(model, drafter, grammars)
    assert (got.token_ids, got.text) == (plain.token_ids, plain.text)
    if form == "all":
        assert got.stats.rounds < plain.stats.rounds / 3


def test_company_and_seeds(model: Any, grammars: Grammars) -> None:
    """Several texts in one grammar object, sampled, with others that have none: all parse, and
    each is what it is alone."""
    shared = grammars.json_schema(SCHEMA)
    how: dict[str, Any] = {"temperature": 1.0, "max_tokens": 90}
    requests = [request(PROMPT, str(i), seed=i, grammar=shared, **how) for i in range(6)]
    requests += [request(PROMPT, "free", max_tokens=20)]
    played = play(Engine(model, tiny_drafters.drafter(model), TOKENIZER), requests, 1)
    for i in range(6):
        assert fits(played.outputs[str(i)].text)
        alone = answer(model, tiny_drafters.drafter(model), grammars, temperature=1.0, seed=i)
        assert played.ids(str(i)) == alone.token_ids
    free = play(
        Engine(model, NoDrafter(model), TOKENIZER), [request(PROMPT, "free", max_tokens=20)]
    )
    assert played.ids("free") == free.ids("free")


@pytest.mark.parametrize("block", range(1, 9))
def test_drafts_that_run_past_the_end(grammars: Grammars, block: int) -> None:
    """B15: the end of the text at every place of a block, guesses behind it, no exception."""
    text = [*b'{"a":1,"b":"x"}', EOS, *b"more and more"]
    model = ScriptedTarget(text, len(PROMPT))
    drafter = OracleDrafter({PROMPT: text}, block)
    r = request(PROMPT, grammar=grammars.json_schema(SCHEMA))
    out = play(Engine(model, drafter, TOKENIZER), [r]).outputs["r"]
    assert (out.text, out.finish_reason) == ('{"a":1,"b":"x"}', "stop")
    assert out.token_ids == tuple(text[:16])
    assert out.stats.rounds == -(-15 // (block + 1))


def test_bans_that_leave_nothing(grammars: Grammars) -> None:
    """The grammar wins: `{` is banned, and the end comes before `min_tokens`."""
    model = ScriptedTarget(b"nothing like json", len(PROMPT))
    r = request(
        PROMPT,
        max_tokens=60,
        grammar=grammars.json_schema({"const": {}}),
        logit_bias={ord("{"): -100.0},
        min_tokens=30,
    )
    out = play(Engine(model, NoDrafter(model), TOKENIZER), [r]).outputs["r"]
    assert json.loads(out.text) == {} and out.finish_reason == "stop"
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        SamplingParams(grammar=grammars.json_schema({}), ignore_eos=True)


class Thirds:
    """No token whose sum with the one before it is a multiple of three."""

    def row(self, before: int) -> Tensor:
        return (torch.arange(V) + before) % 3 != 0

    def allowed(self, text: Sequence[int], draft: Sequence[int]) -> Tensor:
        last = text[-1] if text else 0
        return torch.stack([self.row(t) for t in (last, *draft)])


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_texts_follow_the_masked_law(name: str) -> None:
    """Chi-square against the law that is masked by hand, with drafts that know of no mask."""
    logits_V_V, thirds = table(0, 0.8), Thirds()
    wrong = ~torch.stack([thirds.row(t) for t in range(V)])
    masked = logits_V_V.masked_fill(wrong, -torch.inf)
    assert p_value(DRAFTERS[name], logits_V_V, law=masked, grammar=thirds) > 1e-3
