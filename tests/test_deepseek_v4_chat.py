"""DeepSeek-V4's conversations: texts written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.deepseek_v4_chat import BOS, EFFORTS, EOS, FORMAT, encode, encoder, release_of
from dspark.deepseek_v4_tools import offer
from dspark.errors import InvalidRequestError

U, A = "<｜User｜>", "<｜Assistant｜>"
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "And?"},
]


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "größe", "description": "How big?"}},
]


def called(name: str, arguments: Any, call_id: str = "1") -> dict[str, Any]:
    call = {"id": call_id, "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_the_special_tokens_are_written_with_wide_bars() -> None:
    """Look-alikes would be cut into ordinary tokens."""
    assert [hex(ord(c)) for c in BOS if ord(c) > 127] == ["0xff5c", "0x2581", "0x2581", "0xff5c"]
    assert BOS.replace("begin", "end") == EOS and U.count("\uff5c") == A.count("\uff5c") == 2


def test_one_question() -> None:
    question = [{"role": "user", "content": "Hi"}]
    assert encode(question, thinking=True) == f"{BOS}{U}Hi{A}<think>"
    assert encode(question, thinking=False) == f"{BOS}{U}Hi{A}</think>"


def test_old_reasoning_is_dropped() -> None:
    assert encode(HISTORY, thinking=True) == (
        f"{BOS}Be brief.{U}Hi{A}</think>Hello.{EOS}{U}And?{A}<think>"
    )
    assert encode(HISTORY, thinking=True, drop_thinking=False) == (
        f"{BOS}Be brief.{U}Hi{A}<think>A greeting.</think>Hello.{EOS}{U}And?{A}<think>"
    )


@pytest.mark.parametrize("drop", [True, False])
def test_without_thinking_no_reasoning_is_written(drop: bool) -> None:
    assert encode(HISTORY, thinking=False, drop_thinking=drop) == (
        f"{BOS}Be brief.{U}Hi{A}</think>Hello.{EOS}{U}And?{A}</think>"
    )


def test_reasoning_behind_the_last_question_stays() -> None:
    text = encode(HISTORY[:3], thinking=True)
    assert text == f"{BOS}Be brief.{U}Hi{A}<think>A greeting.</think>Hello.{EOS}"
    assert encode([*HISTORY[:2], {"role": "assistant", "content": "x"}], thinking=True).endswith(
        f"{A}<think></think>x{EOS}"
    )


def test_an_answer_to_go_on_with() -> None:
    start = {"role": "assistant", "content": "Hel", "reasoning": "Mm.", "wo_eos": True}
    assert encode([*HISTORY[:2], start], thinking=True).endswith(f"{A}<think>Mm.</think>Hel")


def test_developers_and_reminders() -> None:
    messages = [
        {"role": "developer", "content": "Rules"},
        {"role": "latest_reminder", "content": "Monday"},
        {"role": "user", "content": "Hi"},
    ]
    reminder = "<｜latest_reminder｜>Monday"
    # Dropped in front of the last question, and only when reasoning is.
    assert encode(messages, thinking=True) == f"{BOS}{reminder}{U}Hi{A}<think>"
    assert encode(messages, thinking=True, drop_thinking=False).startswith(
        f"{BOS}{U}Rules{A}<think>{reminder}{U}Hi"
    )
    assert encode(messages[:1], thinking=True) == f"{BOS}{U}Rules{A}<think>"


def test_messages_of_a_user_in_a_row_are_one() -> None:
    two = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    assert encode(two, thinking=False) == f"{BOS}{U}One\n\nTwo{A}</think>"


def test_efforts() -> None:
    for release, words in (
        ("preview", {"low": None, "high": None, "max": "Absolute"}),
        ("0731", {"low": None, "high": "Absolute", "max": "Beyond"}),
    ):
        for effort, word in words.items():
            options: dict[str, Any] = {"reasoning_effort": effort, "release": release}
            text = encode(HISTORY, thinking=True, **options)
            prefix, _, rest = text.removeprefix(BOS).partition("Be brief.")
            assert rest == encode(HISTORY, thinking=True).partition("Be brief.")[2]
            assert prefix == EFFORTS[release][effort]  # type: ignore[index]
            assert bool(prefix) is (word is not None)
            if word:
                assert prefix.startswith(f"Reasoning Effort: {word} maximum")
                assert prefix.endswith(".\n\n") and prefix.count("\n") == 4
            assert encode(HISTORY, thinking=False, **options) == encode(HISTORY, thinking=False)


def test_which_release_a_checkpoint_is(tmp_path: Path) -> None:
    assert release_of(tmp_path) == "preview"
    (tmp_path / "encoding").mkdir()
    program = tmp_path / "encoding" / "encoding_dsv4.py"
    program.write_text('X = "Reasoning Effort: Absolute maximum with no shortcuts"')
    assert release_of(tmp_path) == "preview"
    program.write_text('raise SystemExit  # "Reasoning Effort: Beyond maximum — exhaustive"')
    assert release_of(tmp_path) == "0731"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "at least one message"),
        (["Hi"], {}, "got str"),
        ([{"content": "Hi"}], {}, r"got \['content'\]"),
        ([{"role": "wizard", "content": "Hi"}], {}, "unknown role 'wizard': expected system, user"),
        ([{"role": "user", "content": ["Hi"]}], {}, "content is list, expected a string"),
        ([{"role": "assistant", "reasoning_content": 3}], {}, "reasoning_content is int"),
        ([{"role": "developer", "content": ""}], {}, "developer message needs content"),
        (HISTORY, {"reasoning_effort": "extreme"}, "'extreme': expected low, high, max"),
        (
            [{"role": "user", "content": "", "tools": [{}]}],
            {},
            "tools is in a message of role user",
        ),
        ([{"role": "user", "tool_calls": [{}]}], {}, "tool_calls is in a message of role user"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, "a function with name and arguments"),
        ([{"role": "assistant", "tool_calls": [3]}], {}, "a function with name and arguments"),
        ([called("f", "[1]")], {}, "the arguments of f in tool_calls are no JSON object"),
        ([called("f", "{")], {}, "the arguments of f in tool_calls are no JSON object"),
        ([{"role": "user", "content": "Hi", "task": "title"}], {}, "task is not supported"),
    ],
)
def test_what_cannot_be_written_is_refused(
    messages: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        encode(messages, thinking=True, **options)


# -- tools ------------------------------------------------------------------------------------


def test_tools_are_offered_behind_the_system_message() -> None:
    text = encode(HISTORY[:2], thinking=False, tools=TOOLS)
    assert text == f"{BOS}Be brief.\n\n{offer(TOOLS)}{U}Hi{A}</think>"
    assert encode(HISTORY[1:2], thinking=False, tools=TOOLS).startswith(f"{BOS}\n\n## Tools\n\nYou")
    inside = [{**HISTORY[0], "tools": TOOLS}, HISTORY[1]]
    assert encode(inside, thinking=False) == text
    lines = text.splitlines()
    at = lines.index("### Available Tool Schemas") + 2
    assert lines[at] == '{"name": "weather", "parameters": {"type": "object"}}'
    assert lines[at + 1] == '{"name": "größe", "description": "How big?"}'
    assert encode(HISTORY, thinking=False, tools=[]) == encode(HISTORY, thinking=False)


def test_calls_and_their_results() -> None:
    """Results in the order of the calls, in one message of the user."""
    first, second = called("weather", '{"city": "Rome", "days": 3}', "a"), called("größe", {}, "b")
    both = {**first, "tool_calls": first["tool_calls"] + second["tool_calls"], "content": "Well."}
    messages = [
        {"role": "user", "content": "Hi"},
        both,
        {"role": "tool", "tool_call_id": "b", "content": "big"},
        {"role": "tool", "tool_call_id": "a", "content": "hot"},
        {"role": "user", "content": "So?"},
    ]
    calls = (
        "Well.\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="größe">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜tool_calls>{EOS}"
    )
    results = "<tool_result>hot</tool_result>\n\n<tool_result>big</tool_result>\n\nSo?"
    assert (
        encode(messages, thinking=False) == f"{BOS}{U}Hi{A}</think>{calls}{U}{results}{A}</think>"
    )


def test_with_tools_no_reasoning_is_dropped() -> None:
    turns = [
        *HISTORY[:2],
        {**called("weather", {}), "reasoning_content": "Look."},
        {"role": "tool", "tool_call_id": "1", "content": "hot"},
    ]
    text = encode([*turns, HISTORY[3]], thinking=True, tools=TOOLS)
    assert f"{A}<think>Look.</think>\n\n<｜DSML｜tool_calls>" in text
    assert text.endswith(f"{U}<tool_result>hot</tool_result>\n\nAnd?{A}<think>")
    assert "Look." not in encode([*turns, HISTORY[3]], thinking=True)


def test_for_a_tokenizer() -> None:
    for release in ("preview", "0731"):
        write = encoder(release)  # type: ignore[arg-type]
        assert write(HISTORY) == encode(HISTORY, thinking=False)
        asked: dict[str, Any] = {"thinking": True, "reasoning_effort": "max", "tools": TOOLS}
        assert write(HISTORY, **asked) == encode(HISTORY, release=release, **asked)


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_taken_apart_and_written_back_is_the_same_text(thinking: bool) -> None:
    """What the model saw and wrote is a prefix of the next prompt, if nothing is dropped: the
    cache of one turn serves the next."""
    call = called("weather", {"city": "Rome", "days": [1, 2]})
    blank = encode([HISTORY[1], call], thinking=thinking, tools=TOOLS)
    answer = ("Why?</think>So." if thinking else "So.") + blank[blank.rindex("\n\n<") :]
    reader = FORMAT.reader(thinking=thinking, tools=["weather"])
    found = reader.feed(answer.removesuffix(EOS)) + reader.finish()
    assert (found.reasoning, found.content) == ("Why?" if thinking else "", "So.")
    turn = {
        "role": "assistant",
        "content": found.content,
        "reasoning_content": found.reasoning,
        "tool_calls": [
            {"function": {"name": c.name, "arguments": c.arguments}} for c in found.calls
        ],
    }
    result = {"role": "tool", "content": "hot"}
    later = encode([HISTORY[1], turn, result], thinking=thinking, tools=TOOLS)
    assert later.startswith(encode(HISTORY[1:2], thinking=thinking, tools=TOOLS) + answer + U)
