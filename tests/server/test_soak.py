"""Many users at once, some of whom hang up or talk nonsense: nothing leaks, no text changes."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import httpx

from dspark import SamplingParams
from dspark.llm import LLM
from tests.server.served import Running

REQUESTS, USERS = 60, 8
KINDS = ["whole"] * 5 + ["stream"] * 4 + ["slow"] + ["abort"] * 1 + ["malformed"]


def plan(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    made = []
    for i in range(REQUESTS):
        body = {
            "prompt": "a b c d " * rng.randint(1, 12),
            "max_tokens": rng.randint(1, 40),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "top_p": rng.choice([1.0, 0.8]),
            "frequency_penalty": rng.choice([0.0, 0.5]),
            "stop": rng.choice([[], ["a"], ["e", "\n"]]),
            "seed": i,
        }
        kind = "malformed" if i % 20 == 7 else "abort" if i % 10 == 3 else rng.choice(KINDS[:10])
        made.append((kind, body))
    return made


async def one(http: httpx.AsyncClient, kind: str, body: dict[str, Any], rng: random.Random) -> Any:
    if kind == "whole":
        answer = await http.post("/v1/completions", json=body)
        return answer.json()["choices"][0]["text"]
    if kind == "malformed":
        bad = rng.choice([{"prompt": 3}, {**body, "top_p": 7}, {**body, "what": 1}])
        assert (await http.post("/v1/completions", json=bad)).status_code == 400
        return None
    if kind == "abort":
        long = {**body, "max_tokens": 150, "stop": [], "stream": rng.random() < 0.5}
        task = asyncio.create_task(http.post("/v1/completions", json=long))
        await asyncio.sleep(rng.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    text = ""
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
                await asyncio.sleep(0.01 if kind == "slow" else 0)
    return text


async def soak(url: str, work: list[tuple[str, dict[str, Any]]]) -> tuple[list[Any], float]:
    """The texts, and the slowest /health meanwhile."""
    rng = random.Random(1)
    waiting = list(enumerate(work))[::-1]
    found: list[Any] = [None] * len(work)
    slowest = 0.0
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def user() -> None:
            while waiting:
                i, (kind, body) = waiting.pop()
                found[i] = await one(http, kind, body, rng)

        async def health() -> None:
            nonlocal slowest
            while True:
                begun = time.perf_counter()
                assert (await http.get("/health")).status_code == 200
                slowest = max(slowest, time.perf_counter() - begun)
                await asyncio.sleep(0.1)

        watch = asyncio.create_task(health())
        await asyncio.gather(*(user() for _ in range(USERS)))
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return found, slowest


def test_soak(server: Running, library: LLM) -> None:
    work = plan(random.Random(0))
    kinds = [kind for kind, _ in work]
    assert (kinds.count("abort"), kinds.count("malformed")) == (6, 3)
    found, slowest = asyncio.run(soak(server.url, work))
    assert slowest < 0.5
    server.idle()
    assert not server.worker._live
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.series(f"dspark:{name}") == 0
    for (kind, body), text in zip(work, found, strict=True):
        if kind in ("whole", "stream", "slow"):
            prompt, fields = body["prompt"], {k: v for k, v in body.items() if k != "prompt"}
            params = SamplingParams(**{**fields, "stop": tuple(fields["stop"])})
            assert text == library.generate(prompt, params)[0].text
