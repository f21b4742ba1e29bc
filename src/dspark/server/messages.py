"""What a chat is made of: its messages, and the tools that it offers.

`plain` turns a message into what chat templates and encoders read. What no model here can be given
(pictures, sound) is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic import ValidatorFunctionWrapHandler as Handler
from pydantic_core import PydanticCustomError, ValidationError

from dspark.answers import Tool, read_object
from dspark.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_CALLS = 128
"""In one message."""
MAX_DEPTH = 64
"""Of JSON inside a request: schemas, arguments, options."""


def problem(field: str, message: str) -> PydanticCustomError:
    """What is wrong with a field, for a validator to raise."""
    # The message is a template to pydantic; its braces would be looked up.
    safe = message.replace("{", "(").replace("}", ")")
    return PydanticCustomError("bad_field", safe, {"field": field})


def shallow(field: str, value: Any) -> None:
    """Raises what a validator may raise for JSON that is nested deeper than anyone needs."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for v in level for inner in _inside(v)]
        if not level:
            return
    raise problem(field, f"{field} is nested deeper than {MAX_DEPTH} levels")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class Fields(BaseModel):
    """A body: strict types, and no name that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    refused: ClassVar[frozenset[str]] = frozenset()
    """Names that other servers know: said to be unsupported; null is their default and passes."""

    @model_validator(mode="before")
    @classmethod
    def _names(cls, data: Any) -> Any:
        """Stops at the first unknown name, and says it."""
        if not isinstance(data, dict):
            raise PydanticCustomError("not_an_object", "expected an object")
        for name, value in data.items():
            if name in cls.model_fields or (name in cls.refused and value is None):
                continue
            shown = name[:80]
            if name in cls.refused:
                raise problem(shown, f"{shown} is not supported by this server")
            raise problem(shown, f"{shown} is not a field of this request")
        return {k: v for k, v in data.items() if k in cls.model_fields}


class Part(Fields):
    type: Literal["text"]
    text: str


class CalledFunction(Fields):
    name: str
    arguments: str


class ToolCall(Fields):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Who collects a stream's deltas may send it back."""


class Message(Fields):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=256)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Clients send an earlier answer back as they got it, with these at null.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="wrap")
    @classmethod
    def _content(cls, value: Any, handler: Handler) -> Any:
        try:
            return handler(value)
        except ValidationError as e:
            raise problem("messages", "content must be a text or a list of text parts") from e

    @property
    def uses_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    def plain(self) -> dict[str, Any]:
        """As a chat template wants it: arguments of calls are objects there."""
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise problem("messages", f"{name} in a message of role {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise problem("messages", "a message of role tool needs tool_call_id")
        if self.content is None and self.role != "assistant":
            raise problem("messages", f"a message of role {self.role} needs content")
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(p.text for p in parts) if parts is not None else self.content or ""
        reasoning = self.reasoning_content or self.reasoning
        more = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning if self.role == "assistant" else None,
            "tool_calls": [_plain_call(c) for c in self.tool_calls or ()] or None,
        }
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": str(text),
            **{k: v for k, v in more.items() if v is not None},
        }


def _plain_call(call: ToolCall) -> dict[str, Any]:
    arguments = read_object(call.function.arguments or "{}")
    if arguments is None:
        raise problem("messages", "the arguments of a call in tool_calls are no JSON object")
    shallow("messages", arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def plain(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """A conversation. Raises what a validator may raise for one that makes no sense."""
    out = []
    calls: set[str] = set()
    for message in messages:
        out.append(message.plain())
        calls |= {c.id for c in message.tool_calls or ()}
        if message.tool_call_id is not None and message.tool_call_id not in calls:
            raise problem("messages", "tool_call_id is the id of no call in the messages before")
    return out


class Function(Fields):
    """What the model is told of a tool, and what its arguments must be."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(Fields):
    type: Literal["function"]
    function: Function

    @property
    def given(self) -> dict[str, Any]:
        """As the client wrote it."""
        return self.model_dump(exclude_unset=True)

    @property
    def tool(self) -> Tool:
        """Without parameters: one that takes no arguments. Raises InvalidRequestError."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        given = self.function.parameters
        return Tool(self.function.name, nothing if given is None else given)


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[OfferedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def checked_tools(tools: Sequence[OfferedTool]) -> None:
    """Raises what a validator may raise."""
    names = [t.function.name for t in tools]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise problem("tools", f"tools holds {twice} twice")
    try:
        for t in tools:
            shallow("tools", t.function.parameters)
            _ = t.tool
    except InvalidRequestError as e:
        raise problem("tools", str(e)) from e
