"""Calls of tools: the syntax of most open models, and answers held to what a request demands.

`HERMES` is the syntax that Qwen's and many other chat templates teach:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

`answer_grammar` writes, in the Lark notation of `llguidance`, which answers are allowed: reasoning
first where the model reasons, then calls whose arguments fit their schemas, or content. It becomes
a mask over tokens (`grammar.py`) that is applied at every position of a block, so a call may begin
in the middle of an accepted draft and is held to its schema from its first token on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dspark.answers import Call, CallReader, CallSyntax, Step, Tool, read_object

SPACES = r"[ \n]{0,8}"
"""Between the parts of JSON: limited, because small models like to go on with it."""


CLOSE = "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{\s*["}])')
_TAIL = re.compile(rf"\s*\}}\s*{CLOSE}")


class Hermes:
    """Fulfils `answers.CallSyntax`."""

    openings = ("<tool_call>", "\n<tool_call>")
    tokens = frozenset({"<tool_call>", CLOSE})

    def reader(self, names: Collection[str]) -> CallReader:
        """See `answers.CallSyntax.reader`."""
        return _HermesCall(names)

    def rules(self, tools: Sequence[Tool], parallel: bool) -> str:
        """See `answers.CallSyntax.rules`."""
        each = []
        for tool in tools:
            head = literal('\n{"name": ' + json.dumps(tool.name) + ', "arguments": ')
            arguments = json_rule({"type": "object", **tool.parameters})
            each.append(" ".join([head, arguments, literal("}\n" + CLOSE)]))
        more = f" ({literal(self.openings[1])} call)*" if parallel else ""
        return f"calls: call{more}\ncall: " + "\n  | ".join(each) + "\n"


HERMES = Hermes()


class _HermesCall:
    """Fulfils `answers.CallReader`.

    Arguments behind the name are told as they are written, letter by letter: where their object
    ends is known by its braces alone. Whether it is JSON is known only at its end, when it has long
    been told. Where arguments come before the name, nobody can say whose they are until the call is
    complete: those come in one piece.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._begun = self._string = self._escaped = False
        self._depth = 0

    def step(self, text: str) -> Step | None:
        """See `answers.CallReader.step`."""
        if not self._begun:
            return self._begin(text)
        if self._depth:
            length = self._object(text)
            return Step(length, Call("", text[:length]))
        if tail := _TAIL.match(text):
            return Step(tail.end(), closed=True)
        return Step() if f"}}{CLOSE}".startswith("".join(text.split())) else None

    def _begin(self, text: str) -> Step | None:
        head = _HEAD.match(text)
        if head is None:
            return self._whole(text)
        if head[1] not in self._names:
            return None
        self._begun = True
        length = self._object(text[head.end() :])
        return Step(head.end() + length, Call(head[1], text[head.end() :][:length]))

    def _object(self, text: str) -> int:
        """Length of what belongs to the arguments, up to the brace that closes them."""
        for i, c in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._string:
                self._escaped, self._string = c == "\\", c != '"'
            elif c == '"':
                self._string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1
        return len(text)

    def _whole(self, text: str) -> Step | None:
        """A complete call in any order."""
        for end in re.finditer(CLOSE, text):
            body = text[: end.start()]
            value = read_object(body)
            if value is None:
                if _in_string(body):
                    continue
                return None
            arguments = value.get("arguments")
            good = set(value) == {"name", "arguments"} and isinstance(arguments, dict)
            if not good or value["name"] not in self._names:
                return None
            call = Call(value["name"], json.dumps(arguments, ensure_ascii=False))
            return Step(end.end(), call, closed=True)
        return Step() if text.lstrip()[:1] in ("", "{") else None


def _in_string(text: str) -> bool:
    """Whether JSON that is cut here ends inside a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as e:
        return e.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def answer_grammar(
    *,
    end_think: str = "",
    schema: Mapping[str, Any] | None = None,
    syntax: CallSyntax | None = None,
    tools: Sequence[Tool] = (),
    required: bool = False,
    parallel: bool = True,
) -> str:
    """Which answers are allowed, in Lark's notation.

    end_think  the answer begins with reasoning, any text that this mark ends
    schema     content must be JSON that fits it; None: any text without the mark of a call
    tools      may be called, in the words of `syntax`; none: content only
    required   an answer is a call, without content; otherwise content, or content and then calls
    parallel   more than one call

    Raises InvalidRequestError for parameters that `syntax` cannot express.
    """
    content = "TEXT" if schema is None else json_rule(schema)
    lines = ["%llguidance {}", "ANY: /(.|\\n)*/"]
    if syntax is not None and tools:
        mark = min(syntax.openings, key=len)
        at_once = f"{literal(syntax.openings[0])} calls"
        if required:
            body = at_once
        elif schema is not None:
            body = f"{at_once} | {content}"
        else:
            body = f"found calls | {content}"
            lines += [f"found[lazy]: ANY {literal(mark)}", f"TEXT: {_without(mark)}"]
        lines.append(syntax.rules(tools, parallel))
    else:
        body = content
        lines.append("TEXT: ANY")
    if end_think:
        lines.append(f"think[lazy]: ANY {literal(end_think)}")
    lines.append(f"start: {'think ' if end_think else ''}body\nbody: {body}\n")
    return "\n".join(lines)


def literal(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """JSON that fits `schema`, in Lark's notation."""
    given = schema if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    return "%json " + json.dumps({**given, "x-guidance": {"whitespace_pattern": SPACES}})


def _without(mark: str) -> str:
    """Any text that does not hold `mark`."""
    escaped = re.escape(mark).replace("/", r"\/")
    return rf"/(.|\n)*/ & ~/(.|\n)*{escaped}(.|\n)*/"
