"""One turn of a chat: how it is written for the model at hand, what its answer may be, and how that
is read.

What a model can do is its chat format's business: a field that the format does not read is refused
by name, with the word that this model does not know it. For a model that can be told to reason
(DeepSeek-V4) the switch has three spellings, which mean one thing: `reasoning_effort`, and
`chat_template_kwargs` with `thinking` or `enable_thinking`. Off is the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark.answers import AnswerFormat, Reader
from dspark.errors import InvalidRequestError
from dspark.server.errors import ApiError
from dspark.server.messages import NamedTool, OfferedTool, plain
from dspark.server.schema import ChatRequest
from dspark.tool_calls import answer_grammar

if TYPE_CHECKING:
    from dspark.tokenizer import Tokenizer

EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max",
           "max": "max"}  # fmt: skip
"""OpenAI's words to those of DeepSeek-V4, as DeepSeek's own service reads them."""
KWARGS, EFFORT = "chat_template_kwargs", "reasoning_effort"


@dataclass(frozen=True)
class Turn:
    """`messages` and `options` are for `encode_prompt`; `tools` may be called, by name."""

    messages: list[dict[str, Any]]
    options: Mapping[str, Any]
    answers: AnswerFormat
    thinking: bool = False
    tools: tuple[str, ...] = ()
    grammar: str | None = None
    """In Lark's notation, where more is demanded than a `response_format` of the whole answer."""

    def reader(self) -> Reader:
        return self.answers.reader(thinking=self.thinking, tools=self.tools)

    @property
    def end_think(self) -> str:
        """The mark that ends the reasoning of this turn; empty without any."""
        return self.answers.end_think if self.thinking else ""


def turn_of(body: ChatRequest, tokenizer: Tokenizer) -> Turn:
    """What `body` asks of a model with this tokenizer. Raises ApiError (400)."""
    answers = tokenizer.answers
    if (body.tools or any(m.uses_tools for m in body.messages)) and not tokenizer.knows_tools:
        raise ApiError(
            400,
            "this model's chat template knows no tools, or none of the ways to call them that this"
            " server reads",
            param="tools" if body.tools else "messages",
        )
    offered = () if body.tool_choice == "none" else tuple(body.tools or ())
    options = _options(body, tokenizer)
    thinking = tokenizer.knows_thinking and bool(options.get("thinking"))
    if offered:
        options["tools"] = [t.given for t in offered]
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        offered = tuple(t for t in offered if t.function.name == name)
    return Turn(
        plain(body.messages),
        options,
        answers,
        thinking,
        tuple(t.function.name for t in offered),
        _grammar(body, answers, thinking, offered),
    )


def _grammar(
    body: ChatRequest, answers: AnswerFormat, thinking: bool, offered: Sequence[OfferedTool]
) -> str | None:
    """What the answer is held to, if to more than the schema of a plain one."""
    schema = body.answer_schema
    required = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
    strict = any(t.function.strict for t in offered)
    if not (offered and (required or single or strict)) and schema is None:
        return None
    if not offered and not thinking:
        return None
    try:
        return answer_grammar(
            end_think=answers.end_think if thinking else "",
            schema=schema,
            syntax=answers.calls,
            tools=[t.tool for t in offered],
            required=required,
            parallel=not single,
        )
    except InvalidRequestError as e:
        raise ApiError(400, f"tools: {e}", param="tools") from e


def _options(body: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the chat format is told besides messages and tools. Raises ApiError."""
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    known = tokenizer.chat_options - {"tools"}
    effort = options.pop(EFFORT, None)
    if body.reasoning_effort is not None and effort not in (None, body.reasoning_effort):
        raise ApiError(400, f"{EFFORT} has another value in {KWARGS}: give one", param=EFFORT)
    field, effort = (EFFORT, body.reasoning_effort) if effort is None else (KWARGS, effort)
    if tokenizer.knows_thinking:
        options = _reasoning(options, effort, field)
    elif effort is not None:
        options[EFFORT] = effort
    if unknown := sorted(set(options) - known):
        names = ", ".join(unknown)[:200]
        param = field if unknown == [EFFORT] else KWARGS
        raise ApiError(400, f"{param}: this model's chat format does not read {names}", param=param)
    return options


def _reasoning(options: dict[str, Any], effort: Any, field: str) -> dict[str, Any]:
    """One switch from its three spellings. Raises ApiError."""
    switches = {n: options.pop(n) for n in ("thinking", "enable_thinking") if n in options}
    for name, value in [*switches.items(), ("drop_thinking", options.get("drop_thinking", True))]:
        if not isinstance(value, bool):
            raise ApiError(400, f"{KWARGS}: {name} must be true or false", param=KWARGS)
    if effort not in (None, "none", *EFFORTS):
        expected = ", ".join(["none", *EFFORTS])
        raise ApiError(400, f"{field}: {EFFORT} is unknown, expected {expected}", param=field)
    wanted = {*switches.values()} | ({effort != "none"} if effort is not None else set())
    if len(wanted) > 1:
        field = KWARGS if len({*switches.values()}) > 1 else field
        raise ApiError(400, f"{field}: one switch says to reason, one not to", param=field)
    thinking = wanted == {True}
    told = {EFFORT: EFFORTS[effort]} if thinking and effort is not None else {}
    return {**options, "thinking": thinking, **told}
