"""The grammar of JSON as a mask over tokens: what may follow, drafts, texts that share one."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest
from torch import Tensor

from dspark.errors import InvalidRequestError, ResourceError
from dspark.grammar import Grammars, TextGrammar
from dspark.tokenizer import Tokenizer
from tests.server.served import EOS, byte_backend

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "yz"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer(byte_backend(), eos_ids=(EOS,)), 260)


@pytest.fixture
def grammar(grammars: Grammars) -> TextGrammar:
    return grammars.json_schema(SCHEMA)


def named(row: Tensor) -> set[str]:
    return {"end" if i == EOS else chr(i) for i in row.nonzero()[:, 0].tolist()}


def test_what_may_follow(grammar: TextGrammar) -> None:
    def after(text: str) -> set[str]:
        return named(grammar.allowed(list(text.encode()), ())[0])

    assert after("") == {"{"}
    assert after('{"') == {"a"}
    assert after('{"a":9') == {*"0123456789", ",", " ", "\n"}
    assert after('{"a":1,"b":"') == {"x", "y"}
    assert after('{"a":1,"b":"x"}') == {"end"}
    assert after("{" + 8 * " ") == {'"'}  # no endless space


def test_every_row_of_a_block_has_its_own(grammar: TextGrammar) -> None:
    """B15: legal drafts, one that is not, and some behind the end; the state is that of before."""
    text, draft = list(b'{"a":1'), [*b',"b":"x"}', EOS, 65, 66]
    rows = grammar.allowed(text, draft)
    assert rows.shape == (len(draft) + 1, 260)
    for i in range(len(b',"b":"x"}') + 1):
        assert rows[i].equal(grammar.allowed([*text, *draft[:i]], ())[0])
    assert named(grammar.allowed(text, b"zz")[0]) == named(rows[0])


def test_a_function_of_the_text_alone(grammars: Grammars, grammar: TextGrammar) -> None:
    """Texts in turns, again and backwards, in one grammar; as in a grammar for each."""
    rng = random.Random(0)
    texts = [b'{"a":1,"b":"x"}', b'{"a":12, "b":"yz"}', b'{ "a":7,"b":"x"}']
    for _ in range(60):
        text = rng.choice(texts)
        cut = rng.randrange(len(text) + 1)
        draft = text[cut : cut + rng.randrange(4)]
        fresh = grammars.json_schema(SCHEMA)
        assert grammar.allowed(list(text[:cut]), draft).equal(fresh.allowed(text[:cut], draft))
    assert len(grammar._readers) <= 60


def test_matchers_do_not_pile_up(grammar: TextGrammar) -> None:
    for n in range(99, 0, -1):
        grammar.allowed(list(f'{{"a":{n}'.encode()), ())
    assert len(grammar._readers) == 64


def test_ids_behind_the_vocabulary_and_special_ones_are_never_allowed(grammars: Grammars) -> None:
    any_object = grammars.json_schema({"type": "object"})
    inside = any_object.allowed(list(b'{"key":"'), ())[0]
    assert not inside[256:].any() and inside[ord("<")]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nothing"}, "nothing"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "cannot be used"),
    ],
)
def test_schemas_that_cannot_be_used(
    grammars: Grammars, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        grammars.json_schema(schema)


def test_a_schema_without_end(grammars: Grammars) -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        grammars.json_schema(schema)


def test_without_the_package_or_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="end-of-text"):
        Grammars(Tokenizer(byte_backend(), eos_ids=()), 260)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ResourceError, match=r"dspark\[serve\]"):
        Grammars(Tokenizer(byte_backend(), eos_ids=(EOS,)), 260)


def test_tokens_of_many_bytes(grammars: Grammars) -> None:
    """A text cut into other tokens is the same text to the grammar."""
    text = json.dumps({"a": 5, "b": "yz"})
    grammar = grammars.json_schema(SCHEMA)
    rows = grammar.allowed([], text.encode())
    assert all(row[token] for row, token in zip(rows, text.encode(), strict=False))
    assert named(rows[-1]) == {"end"}
