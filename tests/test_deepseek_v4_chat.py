"""DeepSeek-V4's conversations: texts written out by hand, and answers cut at every place."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dspark.deepseek_v4_chat import (
    BOS,
    EFFORTS,
    EOS,
    Answer,
    Parser,
    encode,
    parse,
    release_of,
)
from dspark.errors import InvalidRequestError

U, A = "<｜User｜>", "<｜Assistant｜>"
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "And?"},
]


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
        ([{"role": "tool", "content": "3"}], {}, "the role tool is not supported"),
        ([{"role": "system", "content": "", "tools": [{}]}], {}, "tools is not supported"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, "tool_calls is not supported"),
        ([{"role": "user", "content": "Hi", "task": "title"}], {}, "task is not supported"),
    ],
)
def test_what_cannot_be_written_is_refused(
    messages: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        encode(messages, thinking=True, **options)


# -- answers ----------------------------------------------------------------------------------

ANSWERS = [
    ("Because.</think>Blue.", True, Answer("Because.", "Blue.")),
    (f"Because.</think>Blue.{EOS}", True, Answer("Because.", "Blue.")),
    (f"Blue.{EOS}", False, Answer("", "Blue.")),
    ("Cut off", True, Answer("Cut off", "")),
    ("Cut off</thi", True, Answer("Cut off</thi", "")),
    (f"Gave up{EOS}", True, Answer("Gave up", "")),
    ("</think>", True, Answer("", "")),
    ("a </think> b </think> c", True, Answer("a ", " b </think> c")),
    ("a </think> b", False, Answer("", "a </think> b")),
    (f"one{EOS}two</think>{EOS}", False, Answer("", "one")),
    ("a\n\n<b>\n\n<｜DSML", False, Answer("", "a\n\n<b>\n\n<｜DSML")),
    ("1 < 2 <<</think>\n\n<｜x｜>\n\n", True, Answer("1 < 2 <<", "\n\n<｜x｜>\n\n")),
    ("", True, Answer("", "")),
]


@pytest.mark.parametrize(("text", "thinking", "answer"), ANSWERS)
def test_answers_whole(text: str, thinking: bool, answer: Answer) -> None:
    assert parse(text, thinking) == answer


def streamed(pieces: list[str], thinking: bool) -> Answer:
    parser = Parser(thinking=thinking)
    parts = [*(parser.feed(p) for p in pieces), parser.finish()]
    return Answer("".join(p.reasoning for p in parts), "".join(p.content for p in parts))


@pytest.mark.parametrize(("text", "thinking", "answer"), ANSWERS)
def test_answers_in_pieces_cut_anywhere(text: str, thinking: bool, answer: Answer) -> None:
    assert streamed(list(text), thinking) == answer
    for i in range(len(text) + 1):
        assert streamed([text[:i], text[i:]], thinking) == answer
    dice = random.Random(0)
    for _ in range(30):
        cuts = sorted(dice.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert streamed(pieces, thinking) == answer


def test_only_a_possible_mark_is_held_back() -> None:
    parser = Parser(thinking=True)
    assert parser.feed("So <b") == Answer("So <b", "")
    assert parser.feed(" x</th") == Answer(" x", "")
    assert parser.feed("e") == Answer("</the", "")
    assert parser.feed("</think>A") == Answer("", "A")
    assert parser.feed("\n") == Answer("", "")
    assert parser.feed("B") == Answer("", "\nB")
    assert parser.feed(EOS[:5]) == Answer("", "")
    assert parser.feed(EOS[5:] + "junk") == Answer("", "") == parser.feed("more")
    assert parser.finish() == Answer("", "")


@pytest.mark.parametrize(
    "text", ["x\n\n<｜DSML｜tool_calls>", "</think>x\n\n<｜DSML｜tool_calls>\n"]
)
def test_tool_calls_are_refused(text: str) -> None:
    for pieces in ([text], list(text)):
        with pytest.raises(InvalidRequestError, match="calls a tool, which is not supported"):
            streamed(pieces, True)


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_taken_apart_and_written_back_is_the_same_text(thinking: bool) -> None:
    """What the model saw and wrote is a prefix of the next prompt, if nothing is dropped: the
    cache of one turn serves the next."""
    question = HISTORY[:2]
    text = "Why?</think>So." if thinking else "So."
    answer = parse(text + EOS, thinking)
    turn = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
    later = encode([*question, turn, HISTORY[3]], thinking=thinking, drop_thinking=False)
    assert later.startswith(encode(question, thinking=thinking) + text + EOS + U)
