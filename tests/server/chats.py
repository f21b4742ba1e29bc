"""Chats for the tests: a V4 that says what a test wants, and messages put together from deltas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.engine.oracle import PATTERNS
from tests.server.served import EOS, Scripted, v4_tokenizer

HI: Any = [{"role": "user", "content": "Paint it."}]


@dataclass
class Collected:
    """A message put together from its deltas, as clients do."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] | None = None
    reason: str | None = None

    @property
    def made(self) -> list[tuple[str, Any]]:
        return [(c["name"], parsed(c["arguments"])) for c in self.calls or []]


def collected(stream: Any) -> Collected:
    out = Collected()
    for chunk in stream:
        for choice in chunk.choices:
            out.content += choice.delta.content or ""
            out.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                out.calls = out.calls or []
                if part.index == len(out.calls):
                    assert part.id and part.type == "function" and part.function.name
                    out.calls.append({"id": part.id, "name": "", "arguments": ""})
                else:
                    assert part.index == len(out.calls) - 1 and part.id is None
                found = out.calls[part.index]
                found["name"] += part.function.name or ""
                found["arguments"] += part.function.arguments or ""
            out.reason = choice.finish_reason or out.reason
    return out


def made(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, parsed(c.function.arguments)) for c in message.tool_calls or []]


def parsed(arguments: str) -> Any:
    """As they are, if they were cut off."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def v4(text: str, messages: Any = HI, *, block: int = 5, right: Any = "all", **options: Any) -> Any:
    """A V4 that answers `messages` with `text`."""
    tokenizer = v4_tokenizer()
    prompt = tokenizer.apply_chat_template(messages, **options).encode()
    return Scripted(
        [*text.encode(), EOS],
        prompt,
        right=PATTERNS[right],
        block=block,
        context=4096,
        tokenizer=tokenizer,
    )
