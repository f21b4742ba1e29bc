"""Answers cut at every place: reasoning, content, calls, and what only looks like one."""

from __future__ import annotations

import json
import random

import pytest

from dspark.answers import Answer, AnswerFormat, Call, Reader, Tool
from dspark.deepseek_v4_chat import FORMAT as V4
from dspark.deepseek_v4_tools import CLOSE, OPEN, written
from dspark.errors import InvalidRequestError
from dspark.tool_calls import HERMES

NAMES = ("weather", "f")
QWEN = AnswerFormat(calls=HERMES)


def element(name: str, value: str, string: str = "true") -> str:
    return f'<｜DSML｜parameter name="{name}" string="{string}">{value}</｜DSML｜parameter>\n'


def dsml(*parameters: str, name: str = "f") -> str:
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def block(*calls: str) -> str:
    return f"\n\n{OPEN}\n{''.join(calls)}{CLOSE}"


def call(name: str = "f", **arguments: object) -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False))


RAW = 'a <b>\n\n"c" &amp; </｜DSML｜invoke> <｜DSML｜tool_calls>\\n ü😀'
CUT = block(dsml(element("a", "Rome"), element("b", "[1, 2]", "false")))
REASONING = [
    ("Because.</think>Blue.", Answer("Because.", "Blue.")),
    ("Cut off", Answer("Cut off")),
    ("Cut off</thi", Answer("Cut off</thi")),
    ("</think>", Answer()),
    ("a </think> b </think> c", Answer("a ", " b </think> c")),
    ("1 < 2 <<</think>\n\n<｜x｜>\n\n", Answer("1 < 2 <<", "\n\n<｜x｜>\n\n")),
    ("", Answer()),
    # What is only thought of is not done; the end of reasoning and a call in one piece (B16, B37).
    (f"So{block(dsml())} hm</think>x", Answer(f"So{block(dsml())} hm", "x")),
    (f"So</think>{block(dsml(element('a', '1', 'false')))}", Answer("So", "", (call(a=1),))),
]
DSML = [
    ("Blue.", Answer("", "Blue.")),
    ("a </think> b", Answer("", "a </think> b")),
    ("a\n\n<b>\n\n<｜DSML", Answer("", "a\n\n<b>\n\n<｜DSML")),
    (block(dsml()), Answer("", "", (call(),))),
    (f"Look:{block(dsml(element('s', RAW)))}", Answer("", "Look:", (call(s=RAW),))),
    (f"x{OPEN}{dsml(name='weather')}{CLOSE} y", Answer("", "x y", (call("weather"),))),
    (
        block(dsml(element("a", '{"b": [1, null]}', "false")), dsml(element("a", "", "true"))),
        Answer("", "", (call(a={"b": [1, None]}), call(a=""))),
    ),
    # Looks like calls, and stays content to the letter.
    (f"Say {OPEN} to call", Answer("", f"Say {OPEN} to call")),
    (block(), Answer("", block())),
    (OPEN[:-1], Answer("", OPEN[:-1])),
    (block(dsml(name="nobody")), Answer("", block(dsml(name="nobody")))),
    *(
        (block(dsml(bad)), Answer("", block(dsml(bad))))
        for bad in (
            element("a", "{", "false"),
            element("a", "NaN", "false"),
            element("a", "[" * 5000, "false"),
            element("a", "x", "perhaps"),
            "a = 1",
        )
    ),
    (block(dsml())[:-50], Answer("", block(dsml())[:-50])),
    (f"\n\n{OPEN}", Answer("", f"\n\n{OPEN}")),
    # Cut off behind its beginning: a mark or a value in the making is dropped.
    (block(dsml())[:-1], Answer("", "", (call(),))),
    (CUT[: CUT.index("ome")], Answer("", "", (Call("f", '{"a": "R'),))),
    (CUT[: CUT.index("SML｜parameter>")], Answer("", "", (Call("f", '{"a": "Rome'),))),
    (CUT[: CUT.index(", 2]")], Answer("", "", (Call("f", '{"a": "Rome"'),))),
    (CUT[: CUT.rindex("voke>")], Answer("", "", (Call("f", '{"a": "Rome", "b": [1, 2]'),))),
    # Damaged behind its beginning: what follows is content.
    *(
        (
            block(dsml(element("a", "x") + bad)),
            Answer("", f"\n{bad}</｜DSML｜invoke>\n{CLOSE}", (Call("f", '{"a": "x"'),)),
        )
        for bad in (element("a", "2"), element("b", "{", "false"), "b = 1\n")
    ),
    # A good call in front of a bad one is made, one behind it is found.
    (
        block(dsml(), dsml(name="x")) + block(dsml()),
        Answer("", "\n" + dsml(name="x") + CLOSE, (call(), call())),
    ),
]
JSON = [
    (hermes('{"a": 1}'), Answer("", "", (call(a=1),))),
    (
        f"Well.\n{hermes('{}')}\n{hermes('{}', 'weather')}",
        Answer("", "Well.", (call(), call("weather"))),
    ),
    (hermes('{"a": "</tool_call>"}'), Answer("", "", (call(a="</tool_call>"),))),
    (f"{hermes('{}')} and", Answer("", " and", (call(),))),
    (
        hermes('{"a":\n[{"b": "]}\\\\\\""}] }'),
        Answer("", "", (Call("f", '{"a":\n[{"b": "]}\\\\\\""}] }'),)),
    ),
    # Arguments in front of the name are known to be some at the end only.
    (
        '<tool_call>{"arguments": {"a":  "}</tool_call>"}, "name": "f"}</tool_call>',
        Answer("", "", (call(a="}</tool_call>"),)),
    ),
    # Behind its beginning a call is told as it was written: cut off, damaged, or no JSON.
    (hermes('{"a": [1')[:-14], Answer("", "", (Call("f", '{"a": [1'),))),
    (hermes("{}")[:-3], Answer("", "", (call(),))),
    (hermes("{}")[:-13], Answer("", "", (call(),))),
    (hermes('{"a": NaN}'), Answer("", "", (Call("f", '{"a": NaN}'),))),
    (hermes('{"a": "x}'), Answer("", "", (Call("f", '{"a": "x}}\n</tool_call>'),))),
    (hermes("{}, "), Answer("", ", }\n</tool_call>", (call(),))),
    ("<tool_calls>", Answer("", "<tool_calls>")),
    *(
        (bad, Answer("", bad))
        for bad in (
            hermes("[]"),
            hermes("{}", "nobody"),
            hermes("{'a': 1}"),
            hermes("{")[:-14],
            '<tool_call>{"name": "f", "arguments"',
            "<tool_call>",
            "<tool_call>f(1)</tool_call>",
            '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": {}}</tool_call>',
        )
    ),
]
CASES = [
    *((V4, True, text, answer) for text, answer in REASONING),
    *((V4, False, text, answer) for text, answer in DSML),
    *((QWEN, False, text, answer) for text, answer in JSON),
]


def read(reader: Reader, pieces: list[str]) -> Answer:
    out = Answer()
    for piece in pieces:
        out += reader.feed(piece)
    return out + reader.finish()


@pytest.mark.parametrize(("form", "thinking", "text", "answer"), CASES)
def test_cut_anywhere(form: AnswerFormat, thinking: bool, text: str, answer: Answer) -> None:
    """B37: one reading for every size of the pieces."""

    def streamed(pieces: list[str]) -> Answer:
        return read(form.reader(thinking=thinking, tools=NAMES), pieces)

    assert streamed([text]) == answer
    text = text[:800]
    answer = streamed([text])
    assert streamed(list(text)) == answer
    for i in range(len(text) + 1):
        assert streamed([text[:i], text[i:]]) == answer
    dice = random.Random(0)
    for _ in range(30):
        cuts = sorted(dice.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert streamed(pieces) == answer


def test_only_what_is_undecided_is_held_back() -> None:
    reader = V4.reader(thinking=True, tools=NAMES)
    assert reader.feed("So <b") == Answer("So <b")
    assert reader.feed(" x</th") == Answer(" x")
    assert reader.feed("e") == Answer("</the")
    assert reader.feed("</think>A") == Answer("", "A")
    assert reader.feed("\n") == Answer()
    assert reader.feed("B") == Answer("", "\nB")
    head, tail = block(dsml())[:-60], block(dsml())[-60:]
    assert reader.feed(head) == Answer()
    assert reader.feed(tail) == Answer("", "", (call(),))
    assert reader.finish() == Answer()
    # What cannot become a call is let go at once.
    for text in (
        f"{OPEN} is how",
        block(dsml(name="nobody"))[:-36],
        block(dsml("a = 1"))[:-36],
        block(dsml(element("a", "x", "perhaps")))[:-36],
    ):
        assert reader.feed(text) == Answer("", text)


def more(arguments: str) -> Answer:
    return Answer("", "", (Call("", arguments),))


def test_arguments_come_as_they_are_written() -> None:
    reader = V4.reader(tools=NAMES)
    assert reader.feed(f'{OPEN}\n<｜DSML｜invoke name="f">\n') == Answer()
    begin = '<｜DSML｜parameter name="a" string="true">Ro'
    assert reader.feed(begin) == Answer("", "", (Call("f", '{"a": "Ro'),))
    assert reader.feed('me\n"') == more('me\\n\\"')
    assert reader.feed("<") == Answer()
    assert reader.feed("b") == more("<b")
    assert reader.feed("</｜DSML｜parameter>") == more('"')
    assert reader.feed('\n<｜DSML｜parameter name="n" string="false">[1,') == Answer()
    assert reader.feed("2]</｜DSML｜parameter>\n") == more(', "n": [1, 2]')
    assert reader.feed("</｜DSML｜invoke>") == more("}")
    reader = QWEN.reader(tools=NAMES)
    assert reader.feed('<tool_call>\n{"name": "f", "arguments": {') == Answer()
    assert reader.feed('"') == Answer("", "", (Call("f", '{"'),))
    for piece in ("a", '": {"', "}}\\", '"}', '"}, "b": [{', "}]", "}"):
        assert reader.feed(piece) == more(piece)
    assert reader.feed("}\n</tool_call>") == Answer()
    assert reader.feed("x") == Answer("", "x")


@pytest.mark.parametrize("form", [V4, QWEN, AnswerFormat()])
def test_without_tools_nothing_is_a_call(form: AnswerFormat) -> None:
    for text in (block(dsml()), hermes("{}")):
        reader = form.reader()
        assert reader.feed(text) + reader.finish() == Answer("", text)


def test_what_is_written_is_read() -> None:
    arguments = {"s": "x\ny", "n": 3, "o": {"a": [True]}, "e": ""}
    text = written([{"function": {"name": "f", "arguments": arguments}}])
    assert read(V4.reader(tools=NAMES), [text]) == Answer("", "", (call(**arguments),))


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, {"properties": []}, {"required": "a"}, {"required": [1]}],
)
def test_parameters_are_a_schema_of_an_object(parameters: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="parameters of f are no JSON schema of an obj"):
        Tool("f", parameters)
