"""Which requests are understood, and what they mean to the engine.

A field either works or is refused by name; none is read and then forgotten. Accepted without an
effect are only the labels that OpenAI's clients attach for the sake of its own bookkeeping (`user`,
`metadata`, `store: false`, `safety_identifier`, `prompt_cache_key`). Defaults are OpenAI's, so
temperature is 1 here and not 0 as in the library.

Types are strict ("5" is not 5), and a list stops at its first bad item, so that a malformed body
costs no more than a good one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic import ValidatorFunctionWrapHandler as Handler
from pydantic_core import ValidationError

from dspark.server.messages import (
    Fields,
    Message,
    NamedTool,
    ToolChoice,
    Tools,
    checked_tools,
    plain,
    problem,
    shallow,
)
from dspark.types import Grammar, SamplingParams

MAX_CHOICES = 32
"""Texts that one request may ask for: prompts times n."""
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when it is not given (OpenAI); chat may use all the context."""
NOT_YET = frozenset({
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
    "chat_template_kwargs", "reasoning_effort", "verbosity", "modalities", "audio", "prediction",
    "thinking", "web_search_options", "service_tier", "echo", "suffix", "best_of",
    "logprob_token_ids", "prompt_logprobs", "guided_json", "structured_outputs", "min_logprob",
    "length_penalty", "use_beam_search", "add_generation_prompt", "return_token_strs",
})  # fmt: skip
"""Fields of other servers that a request here refuses unless it has them; null is their default and
passes."""

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[Count], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(fail_fast=True)]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Prompt = str | Texts | Ids | ManyIds


class StreamOptions(Fields):
    """continuous_usage_stats: with include_usage, counts so far in every message, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Extension(Fields):
    """What no other server knows, under one name of its own."""

    rounds: bool | None = None


class Generation(Fields):
    """What both kinds of completion have in common."""

    refused = NOT_YET

    model: Annotated[str, Field(max_length=1024)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | Texts | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=256)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    dspark: Extension | None = None
    # Labels without an effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop", mode="wrap")
    @classmethod
    def _stop(cls, value: Any, handler: Handler) -> Any:
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if len(texts) <= MAX_STOPS and all(isinstance(t, str) and 0 < len(t) <= 512 for t in texts):
            return handler(value)
        expected = f"expected at most {MAX_STOPS} strings of 1 to 512 characters"
        raise problem("stop", expected)

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not re.fullmatch(r"[0-9]{1,9}", key) or not -100 <= bias <= 100:
                raise problem("logit_bias", "expected token ids with numbers from -100 to 100")
        return value

    @field_validator("response_format")
    @classmethod
    def _format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        given = value or {"type": "text"}
        shallow("response_format", value)
        kind, more = given.get("type"), given.get("json_schema")
        if kind == "json_schema" and len(given) == 2 and isinstance(more, dict):
            kinds = {"name": str, "schema": dict, "strict": bool, "description": str}
            optional = ("strict", "description")
            if set(kinds) >= set(more) and all(
                isinstance(more.get(k), t) or (k in optional and more.get(k) is None)
                for k, t in kinds.items()
            ):
                return value
            raise problem(
                "response_format",
                "json_schema needs a name and a schema (an object), and may have strict and"
                " description",
            )
        if kind in ("text", "json_object") and len(given) == 1:
            return value
        expected = "expected an object of type text, json_object or json_schema (with json_schema)"
        raise problem("response_format", expected)

    @model_validator(mode="after")
    def _stream_only(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise problem("stream_options", "stream_options needs stream: true")
        if self.wants_rounds and not self.stream:
            raise problem("dspark", "dspark.rounds needs stream: true")
        return self

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_counts(self) -> bool:
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def wants_rounds(self) -> bool:
        return self.dspark is not None and bool(self.dspark.rounds)

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must fit; None: any text."""
        wanted = self.response_format or {"type": "text"}
        if wanted["type"] == "json_schema":
            schema: dict[str, Any] = wanted["json_schema"]["schema"]
            return schema
        return {"type": "object"} if wanted["type"] == "json_object" else None

    def params(
        self, max_tokens: int, logprobs: int | None, choice: int, grammar: Grammar | None
    ) -> SamplingParams:
        """For the engine. Choice i of a seeded request has seed + i, so that they differ and each
        can be had alone."""
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(k): v for k, v in (self.logit_bias or {}).items()},
            "min_tokens": self.min_tokens,
            "seed": None if self.seed is None else (self.seed + choice) % 2**64,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop and tuple(self.stop),
            "stop_token_ids": self.stop_token_ids and tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "grammar": grammar,
        }
        known: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **known)


class ChatRequest(Generation):
    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _sense(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise problem("top_logprobs", "top_logprobs needs logprobs: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise problem("max_tokens", "max_tokens and max_completion_tokens differ: give one")
        plain(self.messages)
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        shallow("chat_template_kwargs", value)
        return value

    @field_validator("tool_choice", mode="wrap")
    @classmethod
    def _choice(cls, value: Any, handler: Handler) -> Any:
        try:
            return handler(value)
        except ValidationError as e:
            expected = "expected none, auto, required or an object that names a function of tools"
            raise problem("tool_choice", expected) from e

    @model_validator(mode="after")
    def _tools(self) -> Self:
        checked_tools(self.tools or ())
        for name in () if self.tools else ("tool_choice", "parallel_tool_calls"):
            if getattr(self, name) not in (None, "none"):
                raise problem(name, f"{name} needs tools")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in (t.function.name for t in self.tools or ()):
                raise problem("tool_choice", f"tool_choice names {name[:80]!r}, not one of tools")
        return self

    def sampling(self, room: int, grammar: Grammar | None) -> list[SamplingParams]:
        """One for each choice; without a limit a text may take the `room` the context leaves."""
        limit = self.max_completion_tokens or self.max_tokens or room
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return [self.params(limit, logprobs, i, grammar) for i in range(self.choices)]


class CompletionRequest(Generation):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _prompt(cls, value: Any, handler: Handler) -> Any:
        try:
            found = handler(value)
        except ValidationError as e:
            expected = "expected a text, a list of texts, token ids or a list of lists of token ids"
            raise problem("prompt", expected) from e
        if not found:
            raise problem("prompt", "prompt is empty")
        return found

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[i for i in self.prompt if isinstance(i, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]

    def sampling(self, room: int, grammar: Grammar | None) -> list[SamplingParams]:
        limit = self.max_tokens or COMPLETION_TOKENS
        return [self.params(limit, self.logprobs, i, grammar) for i in range(self.choices)]


class TokenizeRequest(Fields):
    """A text, or a conversation."""

    refused = NOT_YET

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise problem("prompt", "give either prompt or messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise problem("add_special_tokens", "add_special_tokens needs prompt")
        plain(self.messages or ())
        return self


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Ids
