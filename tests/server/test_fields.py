"""Every field through the official client: the text, token for token, of the library."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dspark import SamplingParams
from dspark.llm import LLM
from dspark.types import Output
from tests.server.served import Running

PROMPT = "the quick brown fox jumps over the lazy dog; the quick brown fox"
MESSAGES = [
    {"role": "system", "content": "You repeat."},
    {"role": "user", "content": PROMPT},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "again"},
]
SEEDED = {"seed": 7, "temperature": 0.8, "max_tokens": 40}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "default temperature": {"seed": 3, "max_tokens": 40},
    "seed": SEEDED,
    "top_p": {**SEEDED, "top_p": 0.6},
    "top_k": {**SEEDED, "top_k": 5},
    "min_p": {**SEEDED, "min_p": 0.2},
    "presence_penalty": {**SEEDED, "presence_penalty": 1.5},
    "frequency_penalty": {**SEEDED, "frequency_penalty": 1.5},
    "repetition_penalty": {**SEEDED, "repetition_penalty": 1.3},
    "logit_bias": {**SEEDED, "logit_bias": {"65": 9.0, "10": -100}},
    "stop": {**SEEDED, "stop": ["a", "e", "\n"]},
    "one stop": {**SEEDED, "stop": " "},
    "stop_token_ids": {**SEEDED, "stop_token_ids": list(range(100, 140))},
    "ignore_eos": {**SEEDED, "logit_bias": {"256": 20.0}, "ignore_eos": True},
    "eos": {**SEEDED, "logit_bias": {"256": 20.0}},
    "min_tokens": {**SEEDED, "logit_bias": {"256": 20.0}, "min_tokens": 9},
}
EXTRA = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens")
"""Fields that the client passes on without knowing them."""


def params(fields: dict[str, Any], **more: Any) -> SamplingParams:
    own = {"temperature": 1.0, **fields, **more}
    if "logit_bias" in own:
        own["logit_bias"] = {int(k): v for k, v in own["logit_bias"].items()}
    if isinstance(own.get("stop"), str):
        own["stop"] = (own["stop"],)
    return SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in own.items()})


def split(fields: dict[str, Any]) -> dict[str, Any]:
    known = {k: v for k, v in fields.items() if k not in EXTRA}
    return known | {"extra_body": {k: v for k, v in fields.items() if k in EXTRA}}


def check(choice: Any, usage: Any, expected: Output) -> None:
    text = choice.message.content if hasattr(choice, "message") else choice.text
    assert (text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert usage.prompt_tokens == len(expected.prompt_ids)
    assert usage.completion_tokens == len(expected.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("name", FIELDS)
def test_chat(server: Running, library: LLM, name: str) -> None:
    fields = FIELDS[name]
    expected = library.chat(MESSAGES, params(fields))
    got = server.client.chat.completions.create(model="tiny", messages=MESSAGES, **split(fields))
    assert got.object == "chat.completion" and got.model == "tiny"
    check(got.choices[0], got.usage, expected)
    assert got.choices[0].message.role == "assistant"
    stream = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True},
        **split(fields),
    )  # fmt: skip
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    assert last.usage is not None and last.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("name", FIELDS)
def test_streamed_completion(server: Running, library: LLM, name: str) -> None:
    """B20: the deltas joined are the text; one set of numbers, streamed or not."""
    fields = FIELDS[name]
    (expected,) = library.generate(PROMPT, params(fields))
    stream = server.client.completions.create(
        model="tiny", prompt=PROMPT, stream=True, stream_options={"include_usage": True},
        **split(fields),
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected.text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + [expected.finish_reason]
    assert [bool(c.choices) for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == len(expected.token_ids)
    whole = server.client.completions.create(model="tiny", prompt=PROMPT, **split(fields))
    check(whole.choices[0], whole.usage, expected)


def test_max_completion_tokens_and_the_default(server: Running, library: LLM) -> None:
    create = server.client.chat.completions.create
    got = create(model="tiny", messages=MESSAGES, max_completion_tokens=5, temperature=0)
    check(got.choices[0], got.usage, library.chat(MESSAGES, SamplingParams(max_tokens=5)))
    # Without a limit a chat may fill the context; a completion gets 16 tokens.
    free = create(model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True})
    assert free.usage.total_tokens == library.target.max_context
    short = server.client.completions.create(
        model="tiny", prompt="x", temperature=0, extra_body={"ignore_eos": True}
    )
    assert short.usage.completion_tokens == 16


def test_n_choices_have_seeds_in_a_row(server: Running, library: LLM) -> None:
    got = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, seed=5, temperature=1, max_tokens=20
    )
    ids = library.encode_prompt(MESSAGES)
    expected = library.generate(
        [ids] * 3, [params({"max_tokens": 20}, seed=5 + i) for i in (0, 1, 2)]
    )
    assert [c.index for c in got.choices] == [0, 1, 2]
    assert [c.message.content for c in got.choices] == [o.text for o in expected]
    assert len({o.text for o in expected}) > 1
    assert got.usage.prompt_tokens == len(ids)
    assert got.usage.completion_tokens == sum(len(o.token_ids) for o in expected)
    assert got.model_extra["metrics"] is None


def test_n_choices_streamed(server: Running, library: LLM) -> None:
    texts = ["", "", ""]
    stream = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, seed=5, max_tokens=20, stream=True
    )
    roles = []
    for chunk in stream:
        (choice,) = chunk.choices
        roles += [choice.index] if choice.delta.role else []
        texts[choice.index] += choice.delta.content or ""
    ids = library.encode_prompt(MESSAGES)
    expected = library.generate(
        [ids] * 3, [params({"max_tokens": 20}, seed=5 + i) for i in (0, 1, 2)]
    )
    assert texts == [o.text for o in expected]
    assert sorted(roles) == [0, 1, 2]


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, [PROMPT], ["one", "two and more"], [1, 2, 3, 200], [[5, 6], [7, 8, 9], [10]]],
)
def test_kinds_of_prompts(server: Running, library: LLM, prompt: Any) -> None:
    many = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    fields = {"seed": 1, "max_tokens": 12}
    got = server.client.completions.create(model="tiny", prompt=prompt, n=2, **fields)
    expected = library.generate(
        [p for p in many for _ in range(2)],
        [params({"max_tokens": 12}, seed=1 + i) for _ in many for i in range(2)],
    )
    assert [c.text for c in got.choices] == [o.text for o in expected]
    assert got.usage.prompt_tokens == sum(len(o.prompt_ids) for o in expected[::2])


def test_logprobs_of_chat(server: Running, library: LLM) -> None:
    expected = library.chat(MESSAGES, params(SEEDED, logprobs=3))
    assert expected.logprobs is not None
    create = server.client.chat.completions.create
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "logprobs": True, **SEEDED}
    whole = create(**asked, top_logprobs=3).choices[0].logprobs.content
    streamed = []
    for chunk in create(**asked, top_logprobs=3, stream=True):
        found = chunk.choices[0].logprobs
        streamed += found.content if found is not None else []
    assert streamed == whole and len(whole) == len(expected.token_ids)
    for entry, ours in zip(whole, expected.logprobs, strict=True):
        assert bytes(entry.bytes) == library.tokenizer.id_to_bytes(ours.token)
        assert entry.logprob == pytest.approx(ours.logprob)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx([v for _, v in ours.top])
    assert create(**asked).choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_completions(server: Running, library: LLM) -> None:
    (expected,) = library.generate(PROMPT, params(SEEDED, logprobs=2))
    assert expected.logprobs is not None
    create = server.client.completions.create
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "logprobs": 2, **SEEDED}
    whole = create(**asked).choices[0].logprobs
    assert whole.token_logprobs == pytest.approx([e.logprob for e in expected.logprobs])
    assert whole.text_offset[0] == 0 and len(whole.text_offset) == len(expected.token_ids)
    assert all(len(top) == 2 for top in whole.top_logprobs)
    parts = [c.choices[0].logprobs for c in create(**asked, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [x for p in parts if p is not None for x in getattr(p, name)]
        assert joined == getattr(whole, name)


def test_async_client_with_company(server: Running, library: LLM) -> None:
    """B31: eight at once on four slots, each the text it has alone."""
    prompts = [f"{PROMPT} number {i}" for i in range(8)]

    async def ask(client: Any, i: int) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": prompts[i]}], seed=i,
            max_tokens=24, stream=True,
        )  # fmt: skip
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them() -> list[str]:
        async with server.async_client() as client:
            return list(await asyncio.gather(*(ask(client, i) for i in range(8))))

    got = asyncio.run(all_of_them())
    for i, text in enumerate(got):
        message = [{"role": "user", "content": prompts[i]}]
        assert text == library.chat(message, params({"max_tokens": 24}, seed=i)).text


def test_content_parts_and_replayed_answers(server: Running) -> None:
    create = server.client.chat.completions.create
    plain = create(
        model="tiny", max_tokens=8, temperature=0, messages=[{"role": "user", "content": "ab"}]
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked: Any = [{"role": "user", "content": parts}]
    assert (
        create(model="tiny", max_tokens=8, temperature=0, messages=asked).choices[0].message
        == plain.choices[0].message
    )
    again: Any = [*asked, plain.choices[0].message, {"role": "user", "content": "on"}]
    assert create(model="tiny", max_tokens=2, messages=again, user="me", metadata={"a": "b"})


def test_models_version_and_tokens(server: Running, library: LLM) -> None:
    assert [m.id for m in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").object == "model"
    for prefix in ("", "/v1"):
        assert server.http.get(f"{prefix}/version").json()["version"]
        assert server.http.get(f"{prefix}/health").json() == {"status": "ok"}
        got = server.post(f"{prefix}/tokenize", prompt="héllo").json()
        ids = library.encode_prompt("héllo", raw=True)
        assert (tuple(got["tokens"]), got["count"]) == (ids, len(ids))
        back = server.post(f"{prefix}/detokenize", tokens=got["tokens"]).json()
        assert back == {"prompt": "héllo"}
    chat = server.post("/tokenize", messages=MESSAGES).json()
    assert tuple(chat["tokens"]) == library.encode_prompt(MESSAGES)
    short = server.post("/chat/completions", messages=MESSAGES, max_tokens=3, temperature=0)
    assert short.json()["usage"]["completion_tokens"] == 3
