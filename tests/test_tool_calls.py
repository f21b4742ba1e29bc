"""What answers with tools may be: schemas held at every token, whatever the syntax."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

from dspark.answers import Answer, AnswerFormat, Tool
from dspark.deepseek_v4_chat import FORMAT as V4
from dspark.errors import InvalidRequestError
from dspark.grammar import Grammars
from dspark.tokenizer import Tokenizer
from dspark.tool_calls import HERMES, answer_grammar
from dspark.types import Grammar
from tests.server.served import EOS, byte_backend

QWEN = AnswerFormat(calls=HERMES)
FORMATS = pytest.mark.parametrize("form", [V4, QWEN])
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
COLOUR = {"enum": ["red", 'a "b"\n<c>']}


def schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


PAINT = Tool("paint", schema(["colour"], colour=COLOUR, times=NUMBER))
STOP = Tool("stop", schema([]))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer(byte_backend(), eos_ids=(EOS,)), 257)


def grammar(grammars: Grammars, form: AnswerFormat, *tools: Tool, **how: Any) -> Grammar:
    return grammars.lark(answer_grammar(syntax=form.calls, tools=tools, **how))


def after(grammar: Grammar, text: str) -> set[str]:
    """Up to 20 of the bytes that may follow, and `end`; asserts that `text` is allowed."""
    ids = list(text.encode())
    rows = grammar.allowed([], ids)
    for i, (row, token) in enumerate(zip(rows, ids, strict=False)):
        assert row[token], f"{text.encode()[: i + 1]!r} is not allowed"
    found = rows[-1].nonzero()[:, 0].tolist()
    return {"end" if i == EOS else chr(i) for i in [*found[:20], *found[-1:]]}


def wander(grammar: Grammar, dice: random.Random) -> str:
    """A random text, drawn in blocks as speculation does; mostly short."""
    text: list[int] = []
    while EOS not in text and len(text) < 3000:
        draft: list[int] = []
        for _ in range(dice.randint(1, 6)):
            allowed = grammar.allowed(text, draft)[-1].nonzero()[:, 0].tolist()
            ends = [i for i in allowed if i in (EOS, *b'<"/}')]
            draft.append(dice.choice(ends if ends and dice.random() < 0.6 else allowed))
            if draft[-1] == EOS:
                break
        text += draft[: dice.randint(1, len(draft))]
    return bytes(i for i in text if i != EOS).decode(errors="replace")


def read(form: AnswerFormat, text: str, *tools: Tool, thinking: bool = False) -> Answer:
    reader = form.reader(thinking=thinking, tools=[t.name for t in tools])
    return reader.feed(text) + reader.finish()


@FORMATS
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_fits_its_schema(
    grammars: Grammars, form: AnswerFormat, parallel: bool
) -> None:
    dice, rules = random.Random(1), grammar(grammars, form, PAINT, STOP, required=True,
                                            parallel=parallel)  # fmt: skip
    several = 0
    for _ in range(12):
        found = read(form, wander(rules, dice), PAINT, STOP)
        assert found.calls and not found.content and not found.reasoning
        several += len(found.calls) > 1
        for call in found.calls:
            arguments = json.loads(call.arguments)
            if call.name == "stop":
                assert arguments == {}
                continue
            assert arguments["colour"] in COLOUR["enum"]
            assert set(arguments) <= {"colour", "times"}
            assert arguments.get("times", 0) in range(10)
    assert bool(several) is parallel


@FORMATS
def test_a_choice_between_content_and_calls(grammars: Grammars, form: AnswerFormat) -> None:
    assert form.calls is not None
    rules = grammar(grammars, form, PAINT, STOP, parallel=False)
    mark = min(form.calls.openings, key=len)
    assert "end" in after(rules, "") and "end" in after(rules, f"Some text {mark[:-1]}")
    assert len(after(rules, "Some text")) == 21
    assert after(rules, f"Text {mark}") == {"\n"}
    call = wander(grammar(grammars, form, STOP, required=True, parallel=False), random.Random(0))
    assert after(rules, f"Text{call}") == {"end"}
    more = grammar(grammars, form, PAINT, STOP)
    assert after(more, f"Text{call}") >= {"end"}


@FORMATS
def test_reasoning_is_free_and_what_follows_is_not(grammars: Grammars, form: AnswerFormat) -> None:
    """B16: the grammar begins to hold at the mark, in the middle of a block."""
    assert form.calls is not None
    rules = grammar(grammars, form, STOP, end_think="</think>", required=True)
    begin = form.calls.openings[0]
    assert "end" not in after(rules, f"hm {begin} {{")
    assert after(rules, "hm </think>") == {begin[0]}
    content = grammars.lark(answer_grammar(end_think="</think>", schema=schema([])))
    assert after(content, "hm {</think>") == {"{"}
    assert after(content, "hm {</think>{}") == {"end"}


def test_content_that_is_json_or_a_call(grammars: Grammars) -> None:
    rules = grammar(grammars, QWEN, STOP, schema=schema(["n"], n=NUMBER))
    assert after(rules, "") == {"{", "<"}
    assert after(rules, '{"n":1}') == {"end"}
    assert after(rules, "<tool_call>") == {"\n"}


REFERRED = {**schema(["a"], a={"$ref": "#/$defs/x"}), "$defs": {"x": {"enum": [1, 2]}}}


@FORMATS
@pytest.mark.parametrize(
    ("parameters", "pattern"),
    [
        (REFERRED, r'\{"a": [12]\}'),
        (schema(["a"], a={"type": "string", "maxLength": 0}), r'\{"a": ""\}'),
        (schema(["a"], a={"enum": ["", "x", 3]}), r'\{"a": (""|"x"|3)\}'),
        (schema(["a"], a={"const": "only"}), r'\{"a": "only"\}'),
        (schema(["ü 'x'"], **{"ü 'x'": {"type": "boolean"}}), r'\{"ü \'x\'": (true|false)\}'),
        ({"type": "object"}, r"(?s)\{.*\}"),
        ({**schema([], a=False), "description": "none"}, r"\{\}"),
    ],
)
def test_kinds_of_schemas(
    grammars: Grammars, form: AnswerFormat, parameters: Mapping[str, Any], pattern: str
) -> None:
    tool = Tool("f", parameters)
    rules = grammar(grammars, form, tool, required=True, parallel=False)
    found = read(form, wander(rules, random.Random(3)), tool)
    (call,) = found.calls
    arguments = json.dumps(json.loads(call.arguments), ensure_ascii=False)  # spaces are its own
    assert re.fullmatch(pattern, arguments)


def test_a_string_of_v4_stands_as_it_is(grammars: Grammars) -> None:
    text = {"type": "string", "description": "free"}
    rules = grammar(grammars, V4, Tool("f", schema(["a", "b"], a=text, b=text)), required=True)
    head = (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="'
    )
    assert after(rules, head) == {"t"}
    value = f'{head}true">"x"\n</｜DSML｜invoke> ü </｜DSML｜parameter'
    assert len(after(rules, value)) == 21
    assert after(rules, value + ">") == {"\n"}
    assert after(rules, value + '>\n<｜DSML｜parameter name="') == {"b"}


@pytest.mark.parametrize(
    ("form", "parameters", "what"),
    [
        (V4, {"anyOf": [{}]}, "cannot be held to anyOf"),
        (V4, schema(["b"], a=NUMBER), "cannot be held to b"),
        (V4, schema([], **{'a"b': NUMBER}), 'cannot be held to a"b'),
        (V4, schema([], a={"$ref": "#"}), "cannot be held to #"),
        (V4, schema(["a"], a=False), "cannot be used"),
        (V4, schema([], a={"type": "odd"}), "cannot be used"),
        (QWEN, schema([], a={"type": "odd"}), "cannot be used"),
        (QWEN, schema([], a={"pattern": "("}), "cannot be used"),
        (QWEN, schema([], **{"\ud800": NUMBER}), "cannot be used"),
        (V4, schema([], **{"\ud800": NUMBER}), "cannot be used"),
    ],
)
def test_what_cannot_be_held_is_refused(
    grammars: Grammars, form: AnswerFormat, parameters: Mapping[str, Any], what: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(what)):
        grammar(grammars, form, Tool("f", parameters), required=True)
