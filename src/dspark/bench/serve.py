"""Load on any OpenAI-compatible server, and what its clients feel.

Two kinds of load. *Closed*: a fixed number of clients, each of which asks again as soon as it was
answered; that shows throughput. *Open*: requests arrive as a Poisson process of a given rate,
whether or not the server keeps up, as those of people do; that shows latency. In an open loop time
counts from the planned arrival, so a late client cannot make a server look quick.

Tokens are counted by the server (`usage` of the stream); without that nothing is measured, as a
chunk may hold any number of tokens. Speculative decoding makes that number vary, so two figures
stand side by side: time between chunks is what a reader sees, time per token what it comes to.

What speculation brought comes from the last message of each stream, where the server puts it there
(`metrics.speculative_decoding`), otherwise from its Prometheus page, before and after: that counts
other clients, too. Every result says which.

Not promised: figures of the server alone. The client shares the machine with a server on the
loopback address. This module imports no torch.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import httpx

from dspark import client
from dspark.bench.serve_figures import (
    DEFINITIONS,
    Limits,
    Result,
    Sample,
    Speculation,
    counters,
    result,
)
from dspark.errors import ConfigError, DSparkError
from dspark.types import SamplingParams

if TYPE_CHECKING:
    from dspark.bench.prompts import PromptSet

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """One load: so many clients, or so many arrivals a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("a load is either a concurrency or a rate: give one")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency} is out of range: expected 1 or more")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ConfigError(f"rate={self.rate} is out of range: expected more than 0 a second")

    def __str__(self) -> str:
        return f"{self.concurrency} clients" if self.rate is None else f"{self.rate:g} /s"

    def arrivals(self, requests: int, seed: int) -> list[float]:
        """Seconds at which requests are due; all at once in a closed loop, where clients wait."""
        if self.rate is None:
            return [0.0] * requests
        rng, at = random.Random(seed), [0.0]
        while len(at) < requests:
            at.append(at[-1] + rng.expovariate(self.rate))
        return at


@dataclass(frozen=True)
class ServeConfig:
    """What to measure."""

    loads: tuple[Load, ...] = (Load(concurrency=1),)
    requests: int = 32
    """Of each load; request i asks prompt i, beginning again behind the last one."""
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    """Of the arrivals and of the first request; request i has seed + i."""
    ignore_eos: bool = False
    """Texts of exactly `max_tokens`. Not OpenAI's field: vLLM, SGLang and dspark know it."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.loads:
            raise ConfigError("no load to measure: give a concurrency or a rate")
        if self.requests < 1:
            raise ConfigError(f"requests={self.requests} measures nothing: expected 1 or more")
        self.body("", "", 0)  # an impossible temperature is better found before anything is asked

    def body(self, model: str, prompt: str, number: int) -> dict[str, Any]:
        """Request `number`. Raises InvalidRequestError for what no server can serve."""
        p = SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed + number
        )
        return {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": p.max_tokens,
            "temperature": p.temperature,
            "seed": p.seed,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass(frozen=True)
class Report:
    """What `dspark bench serve` prints."""

    url: str
    model: str
    config: ServeConfig
    prompts: PromptSet
    results: tuple[Result, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "model": self.model,
            "prompts": {
                "name": self.prompts.name,
                "sha256": self.prompts.sha256,
                "count": len(self.prompts),
            },
            "results": [asdict(r) for r in self.results],
            "config": asdict(self.config),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "definitions": DEFINITIONS,
        }


def run(
    endpoint: client.Endpoint,
    prompts: PromptSet,
    config: ServeConfig,
    *,
    model: str | None = None,
    on_sample: Callable[[Load, Sample], None] = lambda load, sample: None,
) -> Report:
    """Ask one short text that does not count, then measure each load; `on_sample` hears of every
    request that ended. Without `model` the first one that the server lists is asked.

    Raises ResourceError or ConfigError if the server cannot be reached or refuses that first text.
    """
    with endpoint.open() as http:
        name = client.only_model(endpoint, http) if model is None else model
        _warm_up(endpoint, http, name, prompts, config)

    async def measure() -> list[Result]:
        async with endpoint.open_async() as http:
            return [
                await _measure(endpoint, http, name, prompts, config, load, on_sample)
                for load in config.loads
            ]

    return Report(endpoint.url, name, config, prompts, tuple(asyncio.run(measure())))


def _warm_up(
    endpoint: client.Endpoint,
    http: httpx.Client,
    model: str,
    prompts: PromptSet,
    config: ServeConfig,
) -> None:
    body = config.body(model, prompts.prompts[0], 0)
    body["max_tokens"] = min(WARM_UP_TOKENS, config.max_tokens)
    if not any(m.get("usage") for m in client.stream(endpoint, http, body)):
        raise ConfigError(
            f"{endpoint.url} sends no usage in its streams, so nobody can tell how many tokens it"
            " wrote: expected a server that knows stream_options.include_usage"
        )


async def _measure(
    endpoint: client.Endpoint,
    http: httpx.AsyncClient,
    model: str,
    prompts: PromptSet,
    config: ServeConfig,
    load: Load,
    on_sample: Callable[[Load, Sample], None],
) -> Result:
    places = asyncio.Semaphore(load.concurrency or config.requests)
    before = await _counters(endpoint, http)
    begun = time.perf_counter()

    async def one(number: int, arrival: float) -> Sample:
        await asyncio.sleep(max(0.0, begun + arrival - time.perf_counter()))
        async with places:
            due = time.perf_counter() if load.rate is None else begun + arrival
            prompt = prompts.prompts[number % len(prompts)]
            sample = await _ask(endpoint, http, config.body(model, prompt, number), due)
        on_sample(load, sample)
        return sample

    arrivals = load.arrivals(config.requests, config.seed)
    samples = await asyncio.gather(*(one(i, at) for i, at in enumerate(arrivals)))
    after = await _counters(endpoint, http)
    counted = None if before is None or after is None else after - before
    return result(str(load), samples, config.limits, counted)


async def _ask(
    endpoint: client.Endpoint, http: httpx.AsyncClient, body: dict[str, Any], due: float
) -> Sample:
    sample = Sample(due)
    try:
        async for message in client.stream_async(endpoint, http, body):
            if any(_has_text(c.get("delta") or {}) for c in message.get("choices") or ()):
                sample.chunks.append(time.perf_counter())
            if message.get("usage"):
                sample.tokens = int(message["usage"]["completion_tokens"])
                sample.prompt_tokens = int(message["usage"]["prompt_tokens"])
            found = message.get("metrics")
            if isinstance(found, dict) and isinstance(found.get("speculative_decoding"), dict):
                sample.speculation = Speculation.of_response(found["speculative_decoding"])
    except DSparkError as e:
        sample.failure = str(e)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        sample.failure = f"{endpoint.url} sent a message of another protocol: {e!r}"
    sample.end = time.perf_counter()
    return sample


def _has_text(delta: dict[str, Any]) -> bool:
    """Text to read, or reasoning, which servers put under one of two names."""
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning"))


async def _counters(endpoint: client.Endpoint, http: httpx.AsyncClient) -> Speculation | None:
    """The server's own counters, where it has such a page."""
    try:
        answer = await http.get(f"{endpoint.root}/metrics")
    except httpx.HTTPError:
        return None
    return counters(answer.text) if answer.status_code == 200 else None
