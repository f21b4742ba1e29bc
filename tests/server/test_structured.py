"""`response_format` through the official client: every answer that ends is what was asked for."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from dspark import SamplingParams
from dspark.llm import LLM
from tests.server.served import Running

HI: Any = [{"role": "user", "content": "json, please"}]
HOW: dict[str, Any] = {"model": "tiny", "max_tokens": 120}


class City(BaseModel):
    """Finite, so that a random model reaches the end."""

    name: Literal["Rome", "Paris"]
    capital: bool


SCHEMA = {**City.model_json_schema(), "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}


@pytest.mark.parametrize("seed", range(3))
def test_parse_with_a_pydantic_model(server: Running, seed: int) -> None:
    got = server.client.chat.completions.parse(messages=HI, response_format=City, seed=seed, **HOW)
    choice = got.choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, City)


def test_equal_to_the_library(server: Running, library: LLM) -> None:
    """Greedy and seeded, whole and streamed, and as a text completion."""
    grammar = library.json_grammar(SCHEMA)
    create = server.client.chat.completions.create
    for law in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}):
        params = SamplingParams(max_tokens=120, grammar=grammar, **law)  # type: ignore[arg-type]
        expected = library.chat(HI, params).text
        assert City.model_validate_json(expected)
        got = create(messages=HI, response_format=FORMAT, **HOW, **law)
        assert got.choices[0].message.content == expected
        stream = create(messages=HI, response_format=FORMAT, stream=True, **HOW, **law)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == expected
    text = server.client.completions.create(
        prompt="json", extra_body={"response_format": FORMAT}, temperature=0, **HOW
    )
    assert City.model_validate_json(text.choices[0].text)


def test_many_at_once_with_free_texts(server: Running) -> None:
    async def ask() -> list[Any]:
        async with server.async_client() as client:
            create = client.chat.completions.create
            some = [
                create(messages=HI, response_format=FORMAT, n=2, seed=i, **HOW) for i in range(4)
            ]
            free = [create(messages=HI, seed=i, **HOW) for i in range(2)]
            return list(await asyncio.gather(*some, *free))

    for answer in asyncio.run(ask())[:4]:
        assert len(answer.choices) == 2
        for choice in answer.choices:
            assert City.model_validate_json(choice.message.content)


def test_any_object_and_plain_text(server: Running, library: LLM) -> None:
    """An object that is not finished at the limit is cut off, as OpenAI does."""
    create = server.client.chat.completions.create
    bias = {str(ord("}")): 100, str(ord('"')): 50}
    got = create(
        messages=HI, response_format={"type": "json_object"}, logit_bias=bias, seed=1, **HOW
    )
    assert json.loads(got.choices[0].message.content or "") == {}
    for law in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4}):
        some: Any = {"response_format": {"type": "json_object"}, **law}
        params = SamplingParams(max_tokens=120, grammar=library.json_grammar(), **law)  # type: ignore[arg-type]
        expected = library.chat(HI, params)
        got = create(messages=HI, **some, **HOW)
        assert got.choices[0].message.content == expected.text
        text = server.client.completions.create(
            prompt="json",
            temperature=0,
            extra_body={"response_format": some["response_format"]},
            **HOW,
        )
        greedy = SamplingParams(max_tokens=120, grammar=library.json_grammar())
        assert text.choices[0].text == library.generate("json", greedy)[0].text
    got = create(messages=HI, response_format={"type": "json_object"}, model="tiny", max_tokens=1)
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == ("{", "length")
    law = {"temperature": 0, "model": "tiny", "max_tokens": 9}
    free = create(messages=HI, response_format={"type": "text"}, **law)
    assert free.choices[0].message.content == create(messages=HI, **law).choices[0].message.content


def test_with_ignore_eos(server: Running) -> None:
    answer = server.post(
        "/v1/chat/completions", messages=HI, response_format=FORMAT, ignore_eos=True
    )
    assert answer.status_code == 400 and "ignore_eos" in answer.json()["error"]["message"]
