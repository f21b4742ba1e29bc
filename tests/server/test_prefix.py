"""`cached_tokens`: a conversation that goes on starts from what it already was."""

from __future__ import annotations

from typing import Any

from tests.server.served import Running


def test_the_next_turn_is_cached(server: Running) -> None:
    """B33: whole and streamed, in OpenAI's own place; and the answer is the cold one."""
    turns: list[Any] = [{"role": "user", "content": "a question that was never asked before"}]
    how: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 20}
    create = server.client.chat.completions.create
    first = create(messages=turns, **how)
    assert first.usage is not None and first.usage.prompt_tokens_details is not None
    before = first.usage.prompt_tokens_details.cached_tokens or 0
    turns += [first.choices[0].message, {"role": "user", "content": "another"}]
    again = create(messages=turns, **how)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    # The answer's bytes need not come back as the same ids, its question's do.
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1 > before
    *_, last = create(messages=turns, stream=True, stream_options={"include_usage": True}, **how)
    assert last.usage is not None and last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
