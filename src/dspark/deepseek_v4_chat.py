"""Conversations for DeepSeek-V4 and back: the text of a prompt, and the two parts of an answer.

DeepSeek-V4 ships no chat template; a program beside the weights (`encoding/encoding_dsv4.py`) says
how a conversation is written. This is that format, from its description:

    <BOS>[effort]system<｜User｜>question<｜Assistant｜><think>reasoning</think>answer<EOS>

* A system message is bare text behind BOS. `developer` counts as a user. Users' messages that
  follow one another are one, with an empty line between.
* The tag behind <｜Assistant｜> belongs to the transition, not to the answer: `<think>` where
  reasoning follows, `</think>` where none does (non-thinking mode, and old turns whose reasoning
  was dropped). Behind the last user message it is the generation prompt.
* Reasoning of the turns before the last user message is dropped by default, and with it developer
  messages there: the model was trained so, and it saves context.
* Reasoning effort is a paragraph before the first message, in thinking mode. Which words it takes
  changed between releases (`Release`).

So an answer begins in the middle: in thinking mode its text is `reasoning</think>content`,
otherwise `content`. `Parser` takes it apart as it arrives in pieces; `parse` does so at once, and
the two agree because one is the other.

Not here yet: tools (they come with the server), response formats and task tokens. Messages and
answers with them are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dspark.errors import InvalidRequestError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
TOOL_CALLS = "<｜DSML｜tool_calls"

Release = Literal["preview", "0731"]
"""`preview`: the first V4 and V4-DSpark checkpoints; `0731`: those of July 2026 and later."""
Effort = Literal["low", "high", "max"]

_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to"
    " resolve the root cause, rigorously stress-testing your logic against all potential paths,"
    " edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step,"
    " considered alternative, and rejected hypothesis to ensure absolutely no assumption is left"
    " unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance:"
    " exhaustively decompose the problem into its most fundamental components, trace every causal"
    " chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles"
    " and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
EFFORTS: Mapping[Release, Mapping[Effort, str]] = {
    "preview": {"low": "", "high": "", "max": _ABSOLUTE},
    "0731": {"low": "", "high": _ABSOLUTE, "max": _BEYOND},
}
"""What each effort puts in front of a conversation. The models were trained on these very words."""

_ROLES = ("system", "user", "developer", "assistant", "latest_reminder")
_LATER = ("tools", "tool_calls", "content_blocks", "response_format", "task")


def encode(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    reasoning_effort: Effort | None = None,
    drop_thinking: bool = True,
    release: Release = "preview",
) -> str:
    """The text of a conversation, special tokens and BOS included, ready for the answer if the last
    message is a user's.

    A message has `role` and `content`; an assistant's may have `reasoning_content` (or
    `reasoning`), and `wo_eos` where the model shall go on with it. `reasoning_effort` counts in
    thinking mode only.

    Raises InvalidRequestError for an empty conversation, a message that is none, an unknown role
    or effort, and for what is not supported yet.
    """
    if not messages:
        raise InvalidRequestError("a conversation needs at least one message")
    if reasoning_effort is not None and reasoning_effort not in EFFORTS[release]:
        raise InvalidRequestError(
            f"unknown reasoning effort {reasoning_effort!r}: expected {', '.join(EFFORTS[release])}"
        )
    turns = _joined([_checked(m) for m in messages])
    dropping = thinking and drop_thinking
    if dropping:
        last = _last_user(turns)
        turns = [t for i, t in enumerate(turns) if i >= last or t.role != "developer"]
    last = _last_user(turns)
    out = [BOS]
    if thinking and reasoning_effort is not None:
        out.append(EFFORTS[release][reasoning_effort])
    for i, turn in enumerate(turns):
        thinks = thinking and (i >= last or not dropping)
        if turn.role == "system":
            out.append(turn.content)
        elif turn.role == "latest_reminder":
            out += REMINDER, turn.content
        elif turn.role == "assistant":
            out += (turn.reasoning + END_THINK if thinks else "", turn.content)
            out.append("" if turn.open_ended else EOS)
        else:
            out += USER, turn.content
            follows = turns[i + 1].role if i + 1 < len(turns) else "assistant"
            if follows in ("assistant", "latest_reminder"):
                out += ASSISTANT, THINK if thinks else END_THINK
    return "".join(out)


def release_of(directory: Path) -> Release:
    """Which efforts a checkpoint was trained on, told by the program it ships for encoding: that is
    searched for the newer words, not run. Without one, the older release."""
    try:
        text = (directory / "encoding" / "encoding_dsv4.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "preview"
    return "0731" if _BEYOND[:32] in text else "preview"


@dataclass(frozen=True)
class _Turn:
    role: str
    content: str
    reasoning: str = ""
    open_ended: bool = False


def _checked(message: Mapping[str, Any]) -> _Turn:
    if not isinstance(message, Mapping) or "role" not in message:
        given = sorted(message) if isinstance(message, Mapping) else type(message).__name__
        raise InvalidRequestError(f"a message needs role and content, got {given}")
    role, content = message["role"], message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if role == "tool" or any(message.get(key) for key in _LATER):
        what = next((key for key in _LATER if message.get(key)), "the role tool")
        raise InvalidRequestError(f"{what} is not supported for DeepSeek-V4 yet")
    if role not in _ROLES:
        raise InvalidRequestError(f"unknown role {role!r}: expected {', '.join(_ROLES)}")
    for key, value in (("content", content or ""), ("reasoning_content", reasoning)):
        if not isinstance(value, str):
            raise InvalidRequestError(f"{key} is {type(value).__name__}, expected a string")
    if role == "developer" and not content:
        raise InvalidRequestError("a developer message needs content")
    return _Turn(role, content or "", reasoning, bool(message.get("wo_eos")))


def _joined(turns: Sequence[_Turn]) -> list[_Turn]:
    """User messages that follow one another become one."""
    out: list[_Turn] = []
    for turn in turns:
        if out and turn.role == out[-1].role == "user":
            out[-1] = replace(turn, content=f"{out[-1].content}\n\n{turn.content}")
        else:
            out.append(turn)
    return out


def _last_user(turns: Sequence[_Turn]) -> int:
    """Index of the last user or developer turn; -1 without one."""
    return max((i for i, t in enumerate(turns) if t.role in ("user", "developer")), default=-1)


# -- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """An answer, or what one piece of it added: both parts as the model wrote them."""

    reasoning: str
    content: str


class Parser:
    """Takes an answer apart while it arrives, cut anywhere.

    A text is held back only as long as it may be the beginning of a mark (`</think>`, the end of
    the sentence, a tool call), so the parts stream with at most that delay, and no part of a mark
    ever shows. Behind the end of the sentence everything is ignored. A thinking answer that was cut
    off before `</think>` is all reasoning.
    """

    def __init__(self, *, thinking: bool) -> None:
        self._reasons = thinking
        self._held = ""
        self._ended = False

    def feed(self, piece: str) -> Answer:
        """What became certain with this piece. Raises InvalidRequestError at a tool call."""
        return self._take(piece, last=False)

    def finish(self) -> Answer:
        """What was still held back: no more will come."""
        return self._take("", last=True)

    def _take(self, piece: str, *, last: bool) -> Answer:
        parts = {True: "", False: ""}
        text = self._held + piece
        while not self._ended:
            marks = (END_THINK, EOS, _CALLS) if self._reasons else (EOS, _CALLS)
            at, mark = min(((text.find(m), m) for m in marks if m in text), default=(-1, ""))
            if at < 0:
                keep = 0 if last else _overlap(text, marks)
                parts[self._reasons] += text[: len(text) - keep]
                self._held = text[len(text) - keep :]
                break
            parts[self._reasons] += text[:at]
            text = text[at + len(mark) :]
            if mark == _CALLS:
                raise InvalidRequestError(
                    "the answer calls a tool, which is not supported for DeepSeek-V4 yet"
                )
            self._ended = mark == EOS
            self._reasons = False
        if self._ended:
            self._held = ""
        return Answer(parts[True], parts[False])


def parse(text: str, thinking: bool) -> Answer:
    """A whole answer, without or with its end of sentence, taken apart.

    Raises InvalidRequestError if it calls a tool.
    """
    parser = Parser(thinking=thinking)
    first, rest = parser.feed(text), parser.finish()
    return Answer(first.reasoning + rest.reasoning, first.content + rest.content)


_CALLS = "\n\n" + TOOL_CALLS


def _overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of the marks."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next(
        (n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0
    )
