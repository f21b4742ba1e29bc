"""Reasoning apart from the answer: a DeepSeek-V4 that is told to think, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from dspark.server.sse import END
from tests.server.chats import HI, collected, made, v4
from tests.server.served import Running, serving, v4_tokenizer

THOUGHT, SAID = "Rot? <b> \U0001f914 No: </think", "Blue, 1 < 2.\n\n"
TEXT = f"{THOUGHT}</think>{SAID}"
ON: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
ASKED: dict[str, Any] = {"model": "scripted", "messages": HI, "temperature": 0}


def reasoning(message: Any) -> str | None:
    """Both names, which say the same."""
    found: str | None = getattr(message, "reasoning_content", None)
    assert found == getattr(message, "reasoning", None)
    return found


@pytest.mark.parametrize("block", range(1, 9))
@pytest.mark.parametrize("rounds", [False, True])
def test_whole_and_streamed(block: int, rounds: bool) -> None:
    """B37: the end of reasoning at every place of a block."""
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    extra = {**ON, "dspark": {"rounds": True}} if rounds else ON
    with serving(v4(TEXT, thinking=True, block=block)) as s:
        create = s.client.chat.completions.create
        whole = create(**ASKED, extra_body=ON)
        chunks = list(create(**ASKED, stream=True, extra_body=extra, **usage))
    (choice,) = whole.choices
    assert (reasoning(choice.message), choice.message.content) == (THOUGHT, SAID)
    assert choice.finish_reason == "stop"
    parts = collected(chunks)
    assert (parts.reasoning, parts.content, parts.reason) == (THOUGHT, SAID, "stop")
    for chunk in chunks:
        for c in chunk.choices:
            reasoning(c.delta)
    assert whole.usage is not None and chunks[-1].usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == len(f"{THOUGHT}</think>".encode())
    assert chunks[-1].usage.completion_tokens_details == details
    if rounds:
        tokens = [
            t for c in chunks for t in (c.model_extra or {}).get("dspark", {}).get("tokens", [])
        ]
        assert "".join(t.get("reasoning", "") for t in tokens) == THOUGHT
        assert SAID.startswith("".join(t["text"] for t in tokens))


SWITCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"reasoning_effort": "none"}, {}),
    ({"chat_template_kwargs": {"thinking": False}}, {}),
    ({"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}, {}),
    ({"reasoning_effort": "low"}, {"thinking": True, "reasoning_effort": "low"}),
    ({"reasoning_effort": "minimal"}, {"thinking": True, "reasoning_effort": "low"}),
    ({"reasoning_effort": "medium"}, {"thinking": True, "reasoning_effort": "high"}),
    ({"reasoning_effort": "xhigh"}, {"thinking": True, "reasoning_effort": "max"}),
    ({"chat_template_kwargs": {"enable_thinking": True}}, {"thinking": True}),
    (
        {"chat_template_kwargs": {"thinking": True, "reasoning_effort": "max"}},
        {"thinking": True, "reasoning_effort": "max"},
    ),
    (
        {"reasoning_effort": "max", "chat_template_kwargs": {"drop_thinking": False}},
        {"thinking": True, "reasoning_effort": "max", "drop_thinking": False},
    ),
]


@pytest.mark.parametrize(("fields", "options"), SWITCHES)
def test_how_it_is_turned_on(fields: dict[str, Any], options: dict[str, Any]) -> None:
    with serving(v4("ab</think>cd", **options)) as s:
        got = s.client.chat.completions.create(**ASKED, extra_body=fields)
    message = got.choices[0].message
    expected = ("ab", "cd") if options else (None, "ab</think>cd")
    assert (reasoning(message), message.content) == expected
    assert got.usage is not None
    ids = v4_tokenizer().encode_chat(HI, **options)
    assert got.usage.prompt_tokens == len(ids)
    assert (got.usage.completion_tokens_details is not None) is bool(options)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"reasoning_effort": "none", **ON}, "reasoning_effort"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}},
            "reasoning_effort",
        ),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"drop_thinking": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"reasoning_effort": []}}, "chat_template_kwargs"),
        (
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
            "chat_template_kwargs",
        ),
        ({"chat_template_kwargs": {"mood": "merry"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
    ],
)
def test_a_bad_switch_is_named(fields: dict[str, Any], param: str) -> None:
    with (
        serving(v4("x")) as s,
        pytest.raises(openai.BadRequestError, match=param) as found,
    ):
        s.client.chat.completions.create(**ASKED, extra_body=fields)
    assert found.value.param == param


def test_a_model_that_cannot_be_told_says_so(server: Running) -> None:
    for fields, param in ((ON, "chat_template_kwargs"),
                          ({"reasoning_effort": "low"}, "reasoning_effort")):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="chat format does not read") as found:
            server.client.chat.completions.create(model="tiny", messages=HI, extra_body=fields)
        assert found.value.param == param


def test_old_reasoning_is_dropped() -> None:
    """Sent back as it came, under either name."""
    for name in ("reasoning_content", "reasoning"):
        messages: Any = [*HI, {"role": "assistant", "content": "A.", name: "Hm."}, *HI]
        dropped = v4_tokenizer().apply_chat_template(messages, thinking=True)
        assert "Hm." not in dropped
        with serving(v4(TEXT, messages, thinking=True)) as s:
            got = s.client.chat.completions.create(**{**ASKED, "messages": messages}, extra_body=ON)
        assert reasoning(got.choices[0].message) == THOUGHT
        assert got.usage is not None and got.usage.prompt_tokens == len(dropped.encode())
    kept: Any = {"chat_template_kwargs": {"thinking": True, "drop_thinking": False}}
    with serving(v4(TEXT, messages, thinking=True, drop_thinking=False)) as s:
        got = s.client.chat.completions.create(**{**ASKED, "messages": messages}, extra_body=kept)
    assert got.choices[0].message.content == SAID
    assert got.usage is not None and got.usage.prompt_tokens > len(dropped.encode())


def test_an_end_inside_reasoning() -> None:
    """B22: reasoning never counts more tokens than there are; a cut off mark is not lost."""
    with serving(v4(TEXT, thinking=True)) as s:
        for limit in (1, 8, len(THOUGHT.encode()) + 4, len(THOUGHT.encode()) + 9):
            got = s.client.chat.completions.create(**ASKED, extra_body=ON, max_tokens=limit)
            text = f"{THOUGHT}</think>{SAID}".encode()[:limit].decode(errors="replace")
            thought, _, said = text.removeprefix(THOUGHT).partition("</think>")
            message = got.choices[0].message
            head = text[: len(THOUGHT)] if len(text) > len(THOUGHT) else text
            assert message.content == said
            assert reasoning(message) == (head + thought if len(text) > len(THOUGHT) else text)
            assert got.usage is not None and got.usage.completion_tokens_details is not None
            spent = got.usage.completion_tokens_details.reasoning_tokens
            assert spent == min(limit, len(f"{THOUGHT}</think>".encode()))
    with serving(v4("Only thought", thinking=True)) as s:
        got = s.client.chat.completions.create(**ASKED, extra_body=ON)
    assert (reasoning(got.choices[0].message), got.choices[0].message.content) == (
        "Only thought",
        "",
    )
    assert got.usage is not None and got.usage.completion_tokens_details is not None
    spent = got.usage.completion_tokens_details.reasoning_tokens
    assert spent == got.usage.completion_tokens == len("Only thought") + 1


def test_logprobs_and_choices() -> None:
    """Log-probabilities are those of all tokens; every choice is read for itself."""
    with serving(v4("ab</think>cd", thinking=True)) as s:
        create = s.client.chat.completions.create
        got = create(**ASKED, extra_body=ON, logprobs=True, n=2)
        stream = create(**ASKED, extra_body=ON, logprobs=True, n=2, stream=True)
        texts, names = ["", ""], ["", ""]
        for chunk in stream:
            (c,) = chunk.choices
            texts[c.index] += (c.delta.content or "") + (reasoning(c.delta) or "").upper()
            found = c.logprobs.content if c.logprobs else None
            names[c.index] += "".join(e.token for e in found or [])
    for choice in got.choices:
        assert (reasoning(choice.message), choice.message.content) == ("ab", "cd")
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(e.token for e in choice.logprobs.content).startswith("ab</think>cd")
    assert texts == ["ABcd"] * 2
    assert all(n.startswith("ab</think>cd") for n in names)


def test_a_call_behind_reasoning() -> None:
    """B16, B37: what looks like a call in reasoning is none, also where calls are held."""
    tools: Any = [{"type": "function", "function": {"name": "stop"}}]
    invoke = '<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>'
    call = f"\n\n<｜DSML｜tool_calls>\n{invoke}\n</｜DSML｜tool_calls>"
    asked = {**ASKED, "tools": tools, "extra_body": ON}
    for choice in ("auto", "required"):
        with serving(v4(f"So{call}.</think>{call}", tools=tools, thinking=True)) as s:
            got = s.client.chat.completions.create(**asked, tool_choice=choice).choices[0]
            parts = collected(
                s.client.chat.completions.create(**asked, tool_choice=choice, stream=True)
            )
        assert (reasoning(got.message), got.message.content) == (f"So{call}.", None)
        assert made(got.message) == parts.made == [("stop", {})]
        assert (parts.reasoning, parts.content) == (f"So{call}.", "")
        assert got.finish_reason == parts.reason == "tool_calls"


def test_json_behind_reasoning() -> None:
    """B16: the schema holds from the mark on, in the middle of a block, and speculation goes on."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for text in ('{"a": 2} or</think>{"a":1}', '{"a": 2} or</think>{"a":2}'):
        with serving(v4(text, thinking=True, block=7)) as s:
            got = s.client.chat.completions.create(**ASKED, extra_body=ON, response_format=form)
        message = got.choices[0].message
        assert reasoning(message) == '{"a": 2} or'
        assert json.loads(message.content or "") == {"a": 1}
        speculation = (got.model_extra or {})["metrics"]["speculative_decoding"]
        assert speculation["num_accepted_draft_tokens"] > 10


def test_raw_messages_keep_their_form() -> None:
    """Without a switch nothing about reasoning is on the wire."""
    with serving(v4("ab")) as s:
        raw = s.post("/v1/chat/completions", messages=HI, temperature=0, stream=True).content
        whole = s.post("/v1/chat/completions", messages=HI, temperature=0).json()
    assert raw.endswith(END) and b"reasoning" not in raw
    assert set(whole["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert "completion_tokens_details" not in whole["usage"]
