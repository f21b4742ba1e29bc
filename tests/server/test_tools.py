"""Tools through the official client: offered, called, answered; whole, streamed, free and held."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from dspark import SamplingParams
from dspark.answers import Answer
from dspark.llm import LLM
from dspark.server.messages import OfferedTool
from dspark.tool_calls import answer_grammar
from tests.server.chats import HI, collected, made, v4
from tests.server.served import (
    Running,
    serving,
)


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip
    function = {"name": name, "description": "It does.", "parameters": parameters}
    return {
        "type": "function",
        "function": function | ({} if strict is None else {"strict": strict}),
    }


PAINT = tool("paint", colour={"enum": ["red", "blue"]}, coats={"type": "integer", "enum": [1, 2]})
STOP = tool("stop")
TOOLS: Any = [PAINT, STOP]
CALLS = (
    "Well.\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="paint">\n<｜DSML｜parameter name="colour" string="true">'
    'a "b"\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="coats" string="false">[1, {}]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="stop">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
BROKEN = CALLS.removeprefix("Well.").replace("[1, {}]", "[1, {]")
COLOUR = '{"colour": "a \\"b\\"\\n"'
MADE = [("paint", {"colour": 'a "b"\n', "coats": [1, {}]}), ("stop", {})]


@pytest.mark.parametrize("block", range(1, 9))
def test_calls_of_v4(block: int) -> None:
    """B37: the same for every number of tokens a round brings."""
    asked: dict[str, Any] = {"model": "scripted", "messages": HI, "tools": TOOLS, "temperature": 0}
    with serving(v4(CALLS, tools=TOOLS, block=block)) as s:
        whole = s.client.chat.completions.create(**asked).choices[0]
        parts = collected(s.client.chat.completions.create(stream=True, **asked))
        same = collected(
            s.client.chat.completions.create(
                stream=True, **asked, extra_body={"dspark": {"rounds": True}}
            )
        )
    assert (whole.message.content, whole.finish_reason) == ("Well.", "tool_calls")
    assert made(whole.message) == MADE
    assert (parts.content, parts.reason, parts.made) == ("Well.", "tool_calls", MADE)
    assert (same.content, same.reason, same.made) == ("Well.", "tool_calls", MADE)
    ids = [c.id for c in whole.message.tool_calls or []] + [c["id"] for c in parts.calls or []]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALLS[7:], None, MADE),
        (CALLS.replace("paint", "sing"), CALLS.replace("paint", "sing"), []),
        ("Use <｜DSML｜tool_calls>.", "Use <｜DSML｜tool_calls>.", []),
        (CALLS[:90], CALLS[:90], []),
        # Behind its beginning it is one, damaged or cut off.
        (BROKEN, BROKEN[BROKEN.index('\n<｜DSML｜parameter name="coats') :], [("paint", COLOUR)]),
        (CALLS[:120], None, [("paint", COLOUR[:-1])]),
    ],
)
def test_what_only_looks_like_a_call_stays_content(text: str, content: Any, calls: Any) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": HI, "tools": TOOLS, "temperature": 0}
    with serving(v4(text.removeprefix("Well."), tools=TOOLS)) as s:
        whole = s.client.chat.completions.create(**asked).choices[0]
        parts = collected(s.client.chat.completions.create(stream=True, **asked))
    expected = None if content is None else content.removeprefix("Well.")
    assert (whole.message.content, made(whole.message)) == (expected, calls)
    assert (parts.content, parts.made) == (expected or "", calls)
    assert whole.finish_reason == parts.reason == ("tool_calls" if calls else "stop")


def test_a_call_that_is_cut_off_is_the_same_streamed() -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": HI, "tools": TOOLS, "temperature": 0}
    with serving(v4(CALLS, tools=TOOLS)) as s:
        for limit in range(1, len(CALLS.encode()), 29):
            whole = s.client.chat.completions.create(max_tokens=limit, **asked).choices[0]
            parts = collected(
                s.client.chat.completions.create(max_tokens=limit, stream=True, **asked)
            )
            text = CALLS.encode()[:limit].decode(errors="replace")
            assert whole.finish_reason == parts.reason == "length"
            assert (parts.content, parts.made) == (whole.message.content or "", made(whole.message))
            if not parts.made:
                assert parts.content == text


def test_arguments_are_streamed_as_they_are_written() -> None:
    """A delta for each round that brought some; whole characters, joined the whole form."""
    long = CALLS.replace('a "b"\n', 'a "ß" 😀\n' * 9)
    asked: dict[str, Any] = {"model": "scripted", "messages": HI, "tools": TOOLS, "temperature": 0}
    with serving(v4(long, tools=TOOLS, block=3, right="some")) as s:
        (whole, _) = s.client.chat.completions.create(**asked).choices[0].message.tool_calls or []
        deltas = [
            part
            for chunk in s.client.chat.completions.create(stream=True, **asked)
            for part in chunk.choices[0].delta.tool_calls or []
        ]
    first = [d for d in deltas if d.index == 0]
    assert len(first) > 20 and [d.index for d in deltas[len(first) :]] == [1]
    assert first[0].id and not any(
        d.id or d.type or d.function.name for d in first[1:] if d.function
    )
    pieces = [d.function.arguments or "" for d in first if d.function]
    assert all(pieces) and not any("\ufffd" in p for p in pieces)
    assert "".join(pieces) == whole.function.arguments  # type: ignore[union-attr]


def test_a_long_call_does_not_look_dead() -> None:
    with serving(v4(CALLS, tools=TOOLS, right="none"), keep_alive=0.05) as s:
        s.worker.ready().engine.target.seconds = 0.01  # type: ignore[attr-defined]
        raw = s.post("/v1/chat/completions", messages=HI, tools=TOOLS, temperature=0, stream=True)
    begun, made_at = raw.text.index('"content":"W"'), raw.text.index("tool_calls")
    assert raw.text[begun:made_at].count(": keep-alive\n\n") >= 2


def test_tool_choice_none_offers_nothing() -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": HI, "tools": TOOLS, "temperature": 0}
    with serving(v4(CALLS)) as s:
        got = s.client.chat.completions.create(tool_choice="none", **asked)
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == (CALLS, "stop")
    assert got.choices[0].message.tool_calls is None


def test_a_model_without_tools_says_so(server: Running) -> None:
    create = server.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="template knows no tools") as found:
        create(model="tiny", messages=HI, tools=TOOLS)
    assert found.value.param == "tools"
    call = {"id": "1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    for more in (
        [{"role": "assistant", "tool_calls": [call]}],
        [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
    ):
        with pytest.raises(openai.BadRequestError, match="template knows no tools") as found:
            create(model="tiny", messages=[*HI, *more])
        assert found.value.param == "messages"


# -- held to schemas, equal to the library -----------------------------------------------------


CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "required": ({"tool_choice": "required"}, {"required": True}),
    "one": (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"required": True, "parallel": False},
    ),
    "named": (
        {"tool_choice": {"type": "function", "function": {"name": "paint"}}},
        {"required": True, "parallel": False, "only": 0},
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}])
def test_held_calls_equal_the_library(
    tooled: tuple[Running, LLM], choice: str, law: dict[str, Any]
) -> None:
    server, library = tooled
    fields, how = CHOICES[choice][0], dict(CHOICES[choice][1])
    offered = [OfferedTool(**t).tool for t in TOOLS]
    tools = [offered[how.pop("only")]] if "only" in how else offered
    answers = library.tokenizer.answers
    lark = answer_grammar(syntax=answers.calls, tools=tools, **how)
    params = SamplingParams(max_tokens=400, grammar=library.grammars.lark(lark), **law)
    (expected,) = library.generate([library.encode_prompt(HI, tools=TOOLS)], params)
    reader = answers.reader(tools=[t.name for t in tools])
    answer: Answer = reader.feed(expected.text) + reader.finish()
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": TOOLS, **fields, **law}
    got = server.client.chat.completions.create(max_tokens=400, **asked)
    parts = collected(server.client.chat.completions.create(max_tokens=400, stream=True, **asked))
    found = [(c.name, json.loads(c.arguments)) for c in answer.calls]
    assert made(got.choices[0].message) == parts.made == found
    assert got.usage is not None and got.usage.completion_tokens == len(expected.token_ids)
    assert got.usage.prompt_tokens == len(expected.prompt_ids)
    if expected.finish_reason == "stop":
        assert found and got.choices[0].finish_reason == parts.reason == "tool_calls"
        assert got.choices[0].message.content is None and parts.content == ""
    for name, arguments in found:
        assert name in {t.name for t in tools}
        if name == "paint":
            assert arguments["colour"] in ("red", "blue") and arguments["coats"] in (1, 2)
    if choice != "required":
        assert len(found) == 1
        # The syntax stands in the prompt, so prompt lookup guesses it: speculation is on.
        speculation = (got.model_extra or {})["metrics"]["speculative_decoding"]
        assert speculation["num_accepted_draft_tokens"] > 0


def test_a_strict_tool_is_held_when_the_model_calls_it() -> None:
    """The script wants what the schema forbids: the grammar bends it, in the middle of blocks."""
    wanted = CALLS.replace("paint", "strict").replace('a "b"\n', "red").replace("[1, {}]", "7")
    tools: Any = [
        tool("strict", True, colour={"enum": ["red", "blue"]}, coats={"enum": [2, 3]}),
        STOP,
    ]
    asked: dict[str, Any] = {
        "model": "scripted",
        "messages": HI,
        "temperature": 0,
        "max_tokens": 900,
    }
    loose: Any = [{"type": "function", "function": {**tools[0]["function"], "strict": False}}, STOP]
    with serving(v4(wanted, tools=loose)) as s:
        free = s.client.chat.completions.create(tools=loose, **asked).choices[0].message
        assert made(free)[0] == ("strict", {"colour": "red", "coats": 7})
    with serving(v4(wanted, tools=tools)) as s:
        held = s.client.chat.completions.create(tools=tools, **asked).choices[0].message
    assert held.content == "Well."
    for name, arguments in made(held):
        assert name != "strict" or arguments["coats"] in (2, 3)


def test_json_or_a_call(tooled: tuple[Running, LLM]) -> None:
    """With `response_format`, content is JSON, unless the model calls."""
    server, _ = tooled
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HI, "tools": TOOLS, "response_format": form, "max_tokens": 400,
        "parallel_tool_calls": False,
    }  # fmt: skip
    create = server.client.chat.completions.create
    bias = {str(ord("{")): 100}
    got = create(logit_bias=bias, temperature=0, **asked).choices[0]
    assert json.loads(got.message.content or "") == {"a": 1} and got.finish_reason == "stop"
    bias = {str(ord("{")): -100}
    got = create(logit_bias=bias, temperature=0, **asked).choices[0]
    assert len(made(got.message)) <= 1


def test_a_conversation_with_results(tooled: tuple[Running, LLM]) -> None:
    """What the client got goes back as it came, and the prompt is the library's."""
    server, library = tooled
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "seed": 1, "max_tokens": 300}
    create: Callable[..., Any] = server.client.chat.completions.create
    first = create(messages=HI, parallel_tool_calls=False, tool_choice="required", **asked)
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": [{"type": "text", "text": "done"}],
    }
    later: Any = [*HI, message, result]
    got = create(messages=later, **{**asked, "max_tokens": 20})
    arguments = json.loads(call.function.arguments)
    plain = [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.id, "type": "function",
                            "function": {"name": call.function.name, "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]  # fmt: skip
    ids = library.encode_prompt(plain, tools=TOOLS)
    (expected,) = library.generate([ids], SamplingParams(max_tokens=20, temperature=1.0, seed=1))
    assert got.usage.prompt_tokens == len(ids)
    assert got.choices[0].message.content == expected.text


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"items": value}
    return value


@pytest.mark.parametrize("levels", [70, 300, 900])
def test_nesting_is_bounded(tooled: tuple[Running, LLM], levels: int) -> None:
    deep = nested(levels)
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps(deep)}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    for fields in (
        {"tools": [tool("f", True, a=deep)]},
        {"chat_template_kwargs": {"mood": deep}},
        {"response_format": schema},
        {"messages": [{"role": "assistant", "tool_calls": [call]}]},
    ):
        answer = tooled[0].post("/v1/chat/completions", **{"messages": HI, **fields})
        assert answer.status_code == 400
        assert "nested deeper" in answer.json()["error"]["message"]


def test_many_choices(tooled: tuple[Running, LLM]) -> None:
    server, _ = tooled
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": TOOLS, "n": 3, "seed": 2}
    fields: Any = CHOICES["named"][0]
    got = server.client.chat.completions.create(max_tokens=400, **asked, **fields)
    assert [c.finish_reason for c in got.choices] == ["tool_calls"] * 3
    assert len({c.message.tool_calls[0].id for c in got.choices if c.message.tool_calls}) == 3


def test_template_options(tooled: tuple[Running, LLM]) -> None:
    """`chat_template_kwargs` reaches a template that reads it, and nothing else."""
    server, library = tooled
    is_v4 = bool(library.tokenizer.answers.end_think)
    known: Any = {"drop_thinking": False} if is_v4 else {"mood": "merry"}
    got = server.client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=9, temperature=0,
        extra_body={"chat_template_kwargs": known},
    )  # fmt: skip
    ids = library.encode_prompt(HI, **known)
    (expected,) = library.generate([ids], SamplingParams(max_tokens=9))
    assert got.choices[0].message.content == expected.text
    assert got.usage is not None and got.usage.prompt_tokens == len(ids)
    for bad in ("tools", "messages", "raise_exception", "range", "release", "x"):
        answer = server.post("/v1/chat/completions", messages=HI, chat_template_kwargs={bad: []})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "what": 1}}]}, "what"),
        ({"tools": [PAINT, PAINT]}, "tools"),
        ({"tools": [{**STOP, "function": {"name": "f", "parameters": {"type": "a"}}}]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        (
            {"tools": [tool("f", True, a={"type": "odd"})]},
            "tools",
        ),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(tooled: tuple[Running, LLM], fields: Any, param: str) -> None:
    answer = tooled[0].post("/v1/chat/completions", **{"messages": HI, "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert str(error["param"]).split(".")[0] == param and param in error["message"]
