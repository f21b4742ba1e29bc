"""Conversations for DeepSeek-V4: the text of a prompt, and where an answer is divided.

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
otherwise `content`, and calls of tools stand behind the content (`deepseek_v4_tools.py`). `FORMAT`
says so to who reads answers (`answers.py`).

* Tools are explained behind the first system message; with tools no reasoning is dropped. What they
  return belongs to the user's message, in the order in which they were called.

Not here: response formats and task tokens. Messages with them are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from dspark import deepseek_v4_tools as dsml
from dspark.answers import AnswerFormat
from dspark.errors import InvalidRequestError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
FORMAT = AnswerFormat(end_think=END_THINK, calls=dsml.DSML_SYNTAX)

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

_ROLES = ("system", "user", "developer", "assistant", "tool", "latest_reminder")
_LATER = ("content_blocks", "response_format", "task")


def encode(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    reasoning_effort: Effort | None = None,
    drop_thinking: bool = True,
    release: Release = "preview",
) -> str:
    """The text of a conversation, special tokens and BOS included, ready for the answer if the last
    message is a user's or a tool's.

    A message has `role` and `content`; an assistant's may have `reasoning_content` (or
    `reasoning`), `tool_calls` in OpenAI's form, and `wo_eos` where the model shall go on with it; a
    tool's may have `tool_call_id`, and a system's or developer's `tools`. `tools` as an argument
    are those of the first system message. `reasoning_effort` counts in thinking mode only.

    Raises InvalidRequestError for an empty conversation, a message that is none, an unknown role
    or effort, and for what is not supported.
    """
    if not messages:
        raise InvalidRequestError("a conversation needs at least one message")
    if reasoning_effort is not None and reasoning_effort not in EFFORTS[release]:
        raise InvalidRequestError(
            f"unknown reasoning effort {reasoning_effort!r}: expected {', '.join(EFFORTS[release])}"
        )
    if tools:
        messages = _offering(messages, tools)
    checked = [_checked(m) for m in messages]
    dropping = thinking and drop_thinking and not any(t.offers for t in checked)
    turns = _joined(_in_order(checked))
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
            out += (turn.reasoning + END_THINK if thinks else "", turn.content, turn.calls)
            out.append("" if turn.open_ended else EOS)
        else:
            out += USER, turn.content
            follows = turns[i + 1].role if i + 1 < len(turns) else "assistant"
            if follows in ("assistant", "latest_reminder"):
                out += ASSISTANT, THINK if thinks else END_THINK
    return "".join(out)


def encoder(release: Release) -> Callable[..., str]:
    """`encode` for a tokenizer: as that release was trained, without reasoning unless asked for."""

    def write(
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        reasoning_effort: Effort | None = None,
        drop_thinking: bool = True,
    ) -> str:
        return encode(
            messages,
            thinking=thinking,
            tools=tools,
            reasoning_effort=reasoning_effort,
            drop_thinking=drop_thinking,
            release=release,
        )

    return write


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
    calls: str = ""
    """Of an assistant, as the model writes them."""
    call_ids: tuple[object, ...] = ()
    """Of an assistant's calls; of a tool the one it answers."""
    offers: bool = False


def _offering(messages: Sequence[Any], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """With tools at the first system message, which is made if there is none."""
    roles = [m.get("role") if isinstance(m, Mapping) else None for m in messages]
    if "system" not in roles:
        return [{"role": "system", "content": "", "tools": tools}, *messages]
    at = roles.index("system")
    return [*messages[:at], {**messages[at], "tools": tools}, *messages[at + 1 :]]


def _checked(message: Mapping[str, Any]) -> _Turn:
    if not isinstance(message, Mapping) or "role" not in message:
        given = sorted(message) if isinstance(message, Mapping) else type(message).__name__
        raise InvalidRequestError(f"a message needs role and content, got {given}")
    role, content = message["role"], message.get("content") or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    for key in _LATER:
        if message.get(key):
            raise InvalidRequestError(f"{key} is not supported for DeepSeek-V4")
    if role not in _ROLES:
        raise InvalidRequestError(f"unknown role {role!r}: expected {', '.join(_ROLES)}")
    for key, value in (("content", content), ("reasoning_content", reasoning)):
        if not isinstance(value, str):
            raise InvalidRequestError(f"{key} is {type(value).__name__}, expected a string")
    calls, tools = message.get("tool_calls") or (), message.get("tools") or ()
    if calls and role != "assistant":
        raise InvalidRequestError(f"tool_calls is in a message of role {role}, not an assistant's")
    if tools and role not in ("system", "developer"):
        raise InvalidRequestError(f"tools is in a message of role {role}, not a system's")
    if role == "developer" and not content:
        raise InvalidRequestError("a developer message needs content")
    if role == "tool":
        ids: tuple[object, ...] = (message.get("tool_call_id"),)
        return _Turn(role, dsml.result(content), call_ids=ids)
    return _Turn(
        role,
        f"{content}\n\n{dsml.offer(tools)}" if tools else content,
        reasoning,
        bool(message.get("wo_eos")),
        dsml.written(calls) if calls else "",
        tuple(c.get("id") for c in calls),
        bool(tools),
    )


def _in_order(turns: Sequence[_Turn]) -> list[_Turn]:
    """What tools returned, in the order in which they were called, as a user's message."""
    out: list[_Turn] = []
    called: tuple[object, ...] = ()
    for role, run in groupby(turns, key=lambda t: t.role):
        found = list(run)
        if role == "tool":
            found.sort(key=lambda t: (*called, t.call_ids[0]).index(t.call_ids[0]))
            found = [replace(t, role="user") for t in found]
        called = found[-1].call_ids
        out += found
    return out


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
