"""Whatever is sent, the answer is a text or an error that the client made: never a 500."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.llm import LLM
from dspark.server.schema import NOT_YET, ChatRequest, CompletionRequest
from tests.server.served import Running

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXT = st.text(st.characters(codec=None), max_size=12)
IDS = st.lists(st.integers(-2, 300), max_size=6)
NAME = st.sampled_from(["f", "g"])
CALL = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["a", "b"]),
        "function": st.fixed_dictionaries(
            {"name": NAME, "arguments": st.sampled_from(["", "{}", '{"a": [1]}', "[", "NaN"])}
        ),
    }
)
KINDS = st.sampled_from(
    [
        {"type": "string"}, {"enum": ["x", 'y"']}, {"type": "integer"}, {"type": "odd"}, {},
        {"$ref": "#"}, {"pattern": "("}, {"anyOf": [{"type": "null"}]}, {"const": "\ud800"},
    ]
)  # fmt: skip
SCHEMA = st.fixed_dictionaries(
    {"type": st.sampled_from(["object", "object", "array"])},
    optional={
        "properties": st.dictionaries(TEXT, KINDS | ANY, max_size=3),
        "required": st.lists(TEXT, max_size=2) | ANY,
        "additionalProperties": st.booleans(),
        "anyOf": ANY,
    },
)
NEAR: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "x"]),
    "max_tokens": st.integers(-1, 6),
    "max_completion_tokens": st.integers(0, 6),
    "temperature": st.sampled_from([0, 1e-308, 1e-30, 1e-6, 0.5, 1, 2, 1e308]),
    "top_p": st.sampled_from([1e-308, 1e-9, 0.5, 1.0, 0]),
    "top_k": st.sampled_from([-1, 0, 1, 300, 2**31 - 1, 2**63]),
    "min_p": st.sampled_from([0, 1e-308, 0.5, 1.0]),
    "presence_penalty": st.sampled_from([-2, 2, 0.5]),
    "frequency_penalty": st.sampled_from([-2.0, 2.0]),
    "repetition_penalty": st.sampled_from([0.01, 100, 1e-300, 1.1]),
    "n": st.integers(0, 3),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": IDS,
    "seed": st.sampled_from([-1, 0, 2**63 - 1, -(2**63), 2**64]),
    "logit_bias": st.dictionaries(
        st.sampled_from(["0", "65", "256", "257", "-1", "٣", "1_0"]),
        st.sampled_from([-100, 100, 0, 1e-3, 1e300]),
        max_size=3,
    ),
    "min_tokens": st.integers(-1, 9),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "ignore_eos": st.booleans(),
    "prompt": TEXT | st.lists(TEXT, max_size=3) | IDS | st.lists(IDS, max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "developer", "tool"]),
                "content": TEXT | st.none() | ANY,
            },
            optional={
                "tool_calls": st.lists(CALL | ANY, max_size=2),
                "tool_call_id": st.sampled_from(["a", "b"]),
                "reasoning_content": TEXT,
            },
        ),
        max_size=3,
    ),
    "tools": st.lists(
        unique_by=lambda tool: tool["function"]["name"],
        elements=st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": st.fixed_dictionaries(
                    {"name": NAME},
                    optional={
                        "parameters": SCHEMA | SCHEMA | ANY,
                        "strict": st.booleans(),
                        "description": TEXT,
                    },
                ),
            }
        ),
        max_size=2,
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required"])
    | st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": NAME})}
    ),
    "parallel_tool_calls": st.booleans(),
    "response_format": st.just({"type": "json_object"}),
    "reasoning_effort": st.sampled_from(["none", "low", "max", "huge"]),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["thinking", "enable_thinking", "drop_thinking", "mood", "range"]),
        st.booleans() | ANY,
        max_size=2,
    ),
}
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NOT_YET, "bogus"})


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Mostly a request with some fields nearly right, now and then anything at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(ANY)
    body: dict[str, Any] = {"max_tokens": 4}
    body |= draw(
        st.sampled_from([{"prompt": "hi"}, {"messages": [{"role": "user", "content": "a"}]}])
    )
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=5)):
        strange = draw(st.integers(0, 5)) == 0
        body[name] = draw(ANY if strange or name not in NEAR else NEAR[name])
    return body


@st.composite
def chats(draw: st.DrawFn) -> Any:
    """A chat with tools, nearly right."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 12}
    body["tools"] = draw(NEAR["tools"])
    names = ("tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "n",
             "chat_template_kwargs", "stream", "stop", "messages", "logit_bias")  # fmt: skip
    for name in draw(st.lists(st.sampled_from(names), max_size=4)):
        body[name] = draw(NEAR[name])
    return body


LIGHT = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def check(server: Running, path: str, body: Any) -> None:
    # ASCII with escapes, so that halves of surrogate pairs travel, and NaN as Python writes it.
    answer = server.http.post(
        path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in answer.text and answer.text.endswith("data: [DONE]\n\n")


@given(
    path=st.sampled_from(["/v1/chat/completions", "/completions", "/tokenize", "/v1/detokenize"]),
    body=bodies(),
)
@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=LIGHT)
def test_no_request_makes_a_500(shared: Running, path: str, body: Any) -> None:
    check(shared, path, body)


@given(body=chats())
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=LIGHT)
def test_no_chat_with_tools_does(tooled: tuple[Running, LLM], body: Any) -> None:
    check(tooled[0], "/v1/chat/completions", body)


def test_nothing_was_left_behind(shared: Running, tooled: tuple[Running, LLM]) -> None:
    shared.idle()
    tooled[0].idle()
