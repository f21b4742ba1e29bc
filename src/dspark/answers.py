"""Answers taken apart: reasoning, content, and calls of tools, while they arrive in pieces.

A model writes one text; clients want its parts. Which marks divide it is the model's habit
(`AnswerFormat`): where reasoning ends, and how a call of a tool is written (`CallSyntax`). `Reader`
follows the text, cut anywhere, and says of every piece what became certain with it. A whole answer
is one piece, so streamed and whole answers agree because they are read by the same code.

* Text is held back only while it may be the beginning of a mark, or a call that is not finished.
* A call is one when it is complete, well written, and of a tool that was offered. All else that
  looks like one, cut off or damaged, stays content to the letter: nothing is lost.
* Reasoning holds no calls: what the model only thinks of, it does not do.

Not promised: that arguments fit the tool's schema. A grammar does that (`tool_calls.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dspark.errors import InvalidRequestError


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """An answer, or what one piece of it added."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()

    def __add__(self, other: Answer) -> Answer:
        return Answer(
            self.reasoning + other.reasoning,
            self.content + other.content,
            self.calls + other.calls,
        )


@dataclass(frozen=True)
class Step:
    """What a text inside calls begins with: `length` characters that are a call, or the mark that
    closes them (`call` is None). Length 0: too short to tell."""

    length: int = 0
    call: Call | None = None
    closed: bool = False
    """No further call follows without an opening."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments.

    Raises InvalidRequestError if that is no schema of an object.
    """

    name: str
    parameters: Mapping[str, Any]

    def __post_init__(self) -> None:
        required = self.parameters.get("required", [])
        if (
            self.parameters.get("type", "object") != "object"
            or not isinstance(self.parameters.get("properties", {}), Mapping)
            or not isinstance(required, list)
            or not all(isinstance(r, str) for r in required)
        ):
            raise InvalidRequestError(
                f"the parameters of {self.name} are no JSON schema of an object with properties"
            )


class CallSyntax(Protocol):
    """How a model writes calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks in front of calls, the usual one first; all end alike."""
        ...

    @property
    def tokens(self) -> frozenset[str]:
        """Tokens that are part of the syntax, should a tokenizer call them special."""
        ...

    def scan(self, text: str, names: Collection[str]) -> Step | None:
        """What `text`, which stands behind an opening, begins with; None: not a call of one of
        `names`, and never will be."""
        ...

    def rules(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Rules in Lark's notation; `calls` is what may stand behind an opening. Without
        `parallel` it is one call. Raises InvalidRequestError for schemas it cannot express."""
        ...


@dataclass(frozen=True)
class AnswerFormat:
    """A model's habits."""

    end_think: str = ""
    """Ends the reasoning of a model that is told whether to reason; empty: it is not told."""
    calls: CallSyntax | None = None

    @property
    def tokens(self) -> frozenset[str]:
        """Tokens that belong to the text of an answer, even if the tokenizer calls them special."""
        calls = frozenset() if self.calls is None else self.calls.tokens
        return calls | ({self.end_think} - {""})

    def reader(self, *, thinking: bool = False, tools: Collection[str] = ()) -> Reader:
        """For an answer that begins with reasoning or not, and may call `tools`, by name."""
        return Reader(
            end_think=self.end_think if thinking else "",
            calls=self.calls if tools else None,
            names=tools,
        )


class Reader:
    """Takes one answer apart."""

    def __init__(
        self,
        *,
        end_think: str = "",
        calls: CallSyntax | None = None,
        names: Collection[str] = (),
    ) -> None:
        """`end_think`: the answer begins with reasoning, which this mark ends; `names`: the tools
        that may be called."""
        self._end_think, self._calls, self._names = end_think, calls, names
        self._reasons = bool(end_think)
        self._held = ""
        self._opening: str | None = None
        """Inside calls: what has to be given back if no call follows."""

    def feed(self, piece: str) -> Answer:
        """What became certain with this piece."""
        return self._take(piece, last=False)

    def finish(self) -> Answer:
        """What was still held back: no more will come."""
        return self._take("", last=True)

    def _take(self, piece: str, *, last: bool) -> Answer:
        text, self._held = self._held + piece, ""
        out = Answer()
        while text:
            inside = self._opening is not None
            found, text = self._call(text, last) if inside else self._plain(text, last)
            out += found
            if self._held:
                break
        if last and self._opening:
            out += Answer(content=self._opening)
            self._opening = None
        return out

    def _plain(self, text: str, last: bool) -> tuple[Answer, str]:
        """Up to the next mark: what it is, and the text behind the mark."""
        marks: tuple[str, ...] = () if self._calls is None else self._calls.openings
        if self._reasons:
            marks = (self._end_think,)
        at, mark = min(((text.find(m), m) for m in marks if m in text), default=(-1, ""))
        if at < 0:
            keep = 0 if last else _overlap(text, marks)
            at, self._held = len(text) - keep, text[len(text) - keep :]
        part = text[:at]
        answer = Answer(reasoning=part) if self._reasons else Answer(content=part)
        if mark and not self._reasons:
            self._opening = mark
        self._reasons = self._reasons and not mark
        return answer, text[at + len(mark) :]

    def _call(self, text: str, last: bool) -> tuple[Answer, str]:
        """One step inside calls: what it brought, and the text behind it."""
        assert self._calls is not None
        step = self._calls.scan(text, self._names)
        if step is not None and not step.length and not last:
            self._held = text
            return Answer(), ""
        opening = self._opening or ""
        if step is None or not step.length:
            self._opening = None
            return Answer(content=opening), text
        rest = text[step.length :]
        self._opening = None if step.closed else ""
        if step.call is not None:
            return Answer(calls=(step.call,)), rest
        # Calls that are closed before there was one are no calls.
        return Answer(content=opening + text[: step.length] if opening else ""), rest


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is; None if it is none."""
    value = read_json(text)
    return value if isinstance(value, dict) else None


def read_json(text: str) -> Any:
    """The JSON value that `text` is, strictly (no NaN); `...` if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ...


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of the marks."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    return next(
        (n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0
    )
