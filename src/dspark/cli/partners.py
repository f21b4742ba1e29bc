"""Who answers in `dspark chat`: the engine in this process, or a server."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from dspark.answers import Answer
from dspark.cli import ui
from dspark.errors import ConfigError
from dspark.types import SamplingParams

if TYPE_CHECKING:
    from dspark.client import Endpoint
    from dspark.llm import LLM
    from dspark.types import Chunk

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Piece:
    """Text as it comes."""

    text: str
    drafted: bool
    """The drafter had guessed it; of a server that is not told."""
    reasoning: bool = False


Pieces = Generator[Piece]


class Partner(Protocol):
    """Who answers: `stats` is one line about the last answer, None before there is one."""

    stats: str | None
    at_once: bool
    """Whether an answer may be broken off at any point, not only between two pieces."""

    def answer(self, messages: Messages, params: SamplingParams) -> Pieces: ...

    def close(self) -> None: ...


class Local:
    """The engine in this process, which must not be left in the middle of a round."""

    at_once = False

    def __init__(self, llm: LLM, effort: str | None) -> None:
        """Raises ConfigError if the model cannot be told to reason, and `effort` does so."""
        if effort is not None and not llm.tokenizer.knows_thinking:
            raise ConfigError(
                f"--reasoning-effort {effort}: {llm.model_name} cannot be told whether to reason"
            )
        self._llm, self._effort = llm, effort
        self.stats: str | None = None

    def answer(self, messages: Messages, params: SamplingParams) -> Pieces:
        thinks = self._effort not in (None, "none")
        prompt: Any = messages
        if thinks:
            options: dict[str, Any] = {"thinking": True, "reasoning_effort": self._effort}
            prompt = self._llm.encode_prompt(messages, **options)
        reader = self._llm.tokenizer.answers.reader(thinking=thinks)
        chunks = cast("Generator[Chunk]", self._llm.stream(prompt, params))
        try:
            with closing(chunks):
                for chunk in chunks:
                    yield from _pieces(reader.feed(chunk.text), chunk.drafted)
            yield from _pieces(reader.finish(), drafted=False)
        finally:
            output = self._llm.last_output
            if output is not None:
                line = ui.stats_line(output.stats, self._llm.drafter_name)
                self.stats = "\n".join([line, *(f"warning: {m}" for m in self._llm.messages)])

    def close(self) -> None:
        pass


class Remote:
    """A server."""

    at_once = True

    def __init__(self, endpoint: Endpoint, model: str | None, effort: str | None) -> None:
        from dspark import client

        self._effort = effort
        self._client, self._endpoint, self._http = client, endpoint, endpoint.open()
        self.name = client.only_model(endpoint, self._http) if model is None else model
        self.stats: str | None = None

    def answer(self, messages: Messages, params: SamplingParams) -> Pieces:
        body = {
            "model": self.name,
            "messages": messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream_options": {"include_usage": True},
        }
        optional = {"seed": params.seed, "reasoning_effort": self._effort}
        body |= {k: v for k, v in optional.items() if v is not None}
        begun = time.perf_counter()
        first: float | None = None
        last: dict[str, Any] = {}
        with closing(self._client.stream(self._endpoint, self._http, body)) as found:
            for message in found:
                if message.get("usage"):
                    last = message
                for choice in message.get("choices") or ():
                    delta = choice.get("delta") or {}
                    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    for piece in _pieces(Answer(thought, delta.get("content") or "")):
                        first = first or time.perf_counter()
                        yield piece
        self.stats = _remote_line(last, begun, first or time.perf_counter(), time.perf_counter())

    def close(self) -> None:
        self._http.close()


def _pieces(answer: Answer, drafted: bool = False) -> Iterator[Piece]:
    if answer.reasoning:
        yield Piece(answer.reasoning, drafted, reasoning=True)
    if answer.content:
        yield Piece(answer.content, drafted)


def _remote_line(last: dict[str, Any], begun: float, first: float, end: float) -> str:
    """`128 tok · 96.4 tok/s · accepted length 2.3 · TTFT 41 ms`, as far as the server says."""
    parts = []
    tokens = (last.get("usage") or {}).get("completion_tokens")
    if tokens:
        parts.append(f"{tokens} tok")
        if tokens > 1:
            parts.append(f"{(tokens - 1) / (end - first):.1f} tok/s")
    speculation = (last.get("metrics") or {}).get("speculative_decoding") or {}
    if "mean_acceptance_length" in speculation:
        parts.append(f"accepted length {speculation['mean_acceptance_length']:.1f}")
    return " · ".join([*parts, f"TTFT {(first - begun) * 1e3:.0f} ms"])
