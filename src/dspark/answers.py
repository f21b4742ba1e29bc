"""Answers taken apart: reasoning, content, and calls of tools, while they arrive in pieces.

A model writes one text; clients want its parts. Which marks divide it is the model's habit
(`AnswerFormat`): where reasoning ends, and how a call of a tool is written (`CallSyntax`). `Reader`
follows the text, cut anywhere, and says of every piece what became certain with it. A whole answer
is one piece, so streamed and whole answers agree because they are read by the same code.

* Text is held back only while it may be the beginning of a mark or of a call.
* A call begins when the name of a tool that was offered and the beginning of its arguments stand
  there as the model writes them; all else that looks like one stays content to the letter. From
  there on its arguments are told as they come, which cannot be taken back: those of a call that
  was cut off or damaged end there, and are no JSON then. They are not mended, because half an
  argument must not look like a whole one. What follows damage is content; of a text that ends
  within calls, the mark or element that was just being written is dropped.
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
    """A call of a tool, or more of one: without a name, `arguments` go on with those of the call
    before. All pieces of them together are the text of a JSON object, if the model wrote one."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """An answer, or what one piece of it added."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()

    def __add__(self, other: Answer) -> Answer:
        calls = list(self.calls)
        for c in other.calls:
            if calls and not c.name:
                c = Call(calls[-1].name, calls.pop().arguments + c.arguments)
            calls.append(c)
        return Answer(self.reasoning + other.reasoning, self.content + other.content, tuple(calls))


@dataclass(frozen=True)
class Step:
    """What a text inside calls begins with: `length` characters that bring `call`, a whole one or a
    piece, or the mark that closes them (`call` is None). Length 0: too short to tell."""

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


class CallReader(Protocol):
    """Reads what stands behind one opening, step by step."""

    def step(self, text: str) -> Step | None:
        """What `text`, which stands behind the steps before, begins with; None: it does not go on
        with calls, and never will."""
        ...


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

    def reader(self, names: Collection[str]) -> CallReader:
        """For what stands behind an opening; only tools of these names are called."""
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
        self._inside: CallReader | None = None
        self._opening = ""
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
            if self._inside is None:
                found, text = self._plain(text, last)
            else:
                found, text = self._call(self._inside, text, last)
            out += found
            if self._held:
                break
        if last and self._inside is not None:
            out += Answer(content=self._opening)
            self._inside = None
        return out

    def _plain(self, text: str, last: bool) -> tuple[Answer, str]:
        """Up to the next mark: what it is, and the text behind the mark."""
        marks: tuple[str, ...] = () if self._calls is None else self._calls.openings
        if self._reasons:
            marks = (self._end_think,)
        at, mark = min(((text.find(m), m) for m in marks if m in text), default=(-1, ""))
        if at < 0:
            keep = 0 if last else overlap(text, marks)
            at, self._held = len(text) - keep, text[len(text) - keep :]
        part = text[:at]
        answer = Answer(reasoning=part) if self._reasons else Answer(content=part)
        if mark and not self._reasons:
            assert self._calls is not None
            self._opening, self._inside = mark, self._calls.reader(self._names)
        self._reasons = self._reasons and not mark
        return answer, text[at + len(mark) :]

    def _call(self, inside: CallReader, text: str, last: bool) -> tuple[Answer, str]:
        """One step inside calls: what it brought, and the text behind it."""
        step = inside.step(text)
        opening = self._opening
        if step is not None and not step.length and not (last and opening):
            self._held = "" if last else text
            return Answer(), ""
        if step is None or not step.length:
            self._inside, self._opening = None, ""
            return Answer(content=opening), text
        rest = text[step.length :]
        if step.closed:
            self._inside = None
        if step.call is not None:
            self._opening = ""
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


def overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of the marks."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    return next(
        (n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0
    )
