"""From the requests of one load to its figures: percentiles, throughput, goodput, speculation.

Pure arithmetic on what `bench.serve` saw; DEFINITIONS says what each number means, and goes along
with every report.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from dspark.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)

DEFINITIONS = {
    "ttft_ms": "from the request (open loop: its planned arrival) to the first chunk with text",
    "chunk_gap_ms": "between neighbouring chunks with text, over all requests: what a reader sees",
    "per_token_ms": "of a request: from its first to its last chunk with text / (its tokens - 1)",
    "e2e_ms": "from the request (open loop: its planned arrival) to the end of its stream",
    "output_tokens_per_second": "output tokens of all completed requests / seconds",
    "requests_per_second": "completed requests / seconds",
    "goodput": "completed requests a second that kept every limit; null without limits",
    "good_share": "those requests / all requests, failed ones included",
    "seconds": "from the first request to the last end of a stream",
    "speculation": "sums over the load: drafts are rounds that verified a draft token; "
    "acceptance_length is 1 + accepted / drafts, acceptance_rate accepted / draft_tokens",
    "percentiles": "p50 ... p99 by linear interpolation; mean and max beside them",
}


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good; None is no limit. Milliseconds."""

    ttft_ms: float | None = None
    per_token_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} is no limit: expected more than 0 milliseconds")

    @property
    def any(self) -> bool:
        return any(v is not None for v in asdict(self).values())


@dataclass(frozen=True)
class Speculation:
    """Counts of one answer, of many added up, or of a server so far."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0

    @staticmethod
    def of_response(found: Mapping[str, Any]) -> Speculation:
        """`metrics.speculative_decoding` of a response."""
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        return Speculation(*(int(found[name]) for name in names))

    def __add__(self, other: Speculation) -> Speculation:
        return Speculation(*(a + b for a, b in zip(self._all, other._all, strict=True)))

    def __sub__(self, other: Speculation) -> Speculation:
        return Speculation(*(a - b for a, b in zip(self._all, other._all, strict=True)))

    @property
    def _all(self) -> tuple[int, int, int]:
        return self.drafts, self.draft_tokens, self.accepted

    def as_json(self, source: str) -> dict[str, Any]:
        return {
            "source": source,
            **asdict(self),
            "acceptance_length": 1 + self.accepted / self.drafts if self.drafts else None,
            "acceptance_rate": self.accepted / self.draft_tokens if self.draft_tokens else None,
        }


@dataclass
class Sample:
    """One request; times are seconds of one clock."""

    due: float
    chunks: list[float] = field(default_factory=list)
    """When each chunk with text came."""
    end: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    speculation: Speculation | None = None
    failure: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        return (self.chunks[0] - self.due) * 1e3 if self.chunks else None

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in pairwise(self.chunks)]

    @property
    def per_token_ms(self) -> float | None:
        if self.tokens < 2 or not self.chunks:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) * 1e3

    @property
    def e2e_ms(self) -> float:
        return (self.end - self.due) * 1e3

    def keeps(self, limits: Limits) -> bool:
        """Whether it was answered within `limits`; a figure it does not have breaks none."""
        if self.failure is not None:
            return False
        pairs = (
            (self.ttft_ms, limits.ttft_ms),
            (self.per_token_ms, limits.per_token_ms),
            (self.e2e_ms, limits.e2e_ms),
        )
        return all(v is None or most is None or v <= most for v, most in pairs)


@dataclass(frozen=True)
class Result:
    """One load's row; DEFINITIONS says what the numbers mean, None is "does not apply"."""

    load: str
    requests: int
    failed: int
    failures: dict[str, int]
    """What was said -> how often."""
    seconds: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    goodput: float | None
    good_share: float | None
    ttft_ms: dict[str, float] | None
    chunk_gap_ms: dict[str, float] | None
    per_token_ms: dict[str, float] | None
    e2e_ms: dict[str, float] | None
    speculation: dict[str, Any] | None


def result(
    load: str, samples: Sequence[Sample], limits: Limits, counted: Speculation | None = None
) -> Result:
    """The figures of one load. `counted` is what the server's own counters grew by."""
    done = [s for s in samples if s.failure is None]
    seconds = max(s.end for s in samples) - min(s.due for s in samples)
    good = sum(s.keeps(limits) for s in samples)
    tokens = sum(s.tokens for s in done)
    return Result(
        load=load,
        requests=len(samples),
        failed=len(samples) - len(done),
        failures=dict(Counter(s.failure for s in samples if s.failure is not None)),
        seconds=seconds,
        prompt_tokens=sum(s.prompt_tokens for s in done),
        output_tokens=tokens,
        output_tokens_per_second=tokens / seconds,
        requests_per_second=len(done) / seconds,
        goodput=good / seconds if limits.any else None,
        good_share=good / len(samples) if limits.any else None,
        ttft_ms=summary([s.ttft_ms for s in done]),
        chunk_gap_ms=summary([gap for s in done for gap in s.gaps_ms]),
        per_token_ms=summary([s.per_token_ms for s in done]),
        e2e_ms=summary([s.e2e_ms for s in done]),
        speculation=_speculation(done, counted),
    )


def summary(values: Sequence[float | None]) -> dict[str, float] | None:
    """Percentiles, mean and maximum of the values that exist."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    found = {f"p{p}": percentile(known, p) for p in PERCENTILES}
    return found | {"mean": fmean(known), "max": known[-1]}


def percentile(ascending: Sequence[float], p: float) -> float:
    """Linear between the two nearest ranks, as numpy's default."""
    at = (len(ascending) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (at - low)


def _speculation(done: Sequence[Sample], counted: Speculation | None) -> dict[str, Any] | None:
    told = [s.speculation for s in done if s.speculation is not None]
    if told:
        return sum(told, Speculation()).as_json("responses")
    return counted.as_json("/metrics") if counted is not None and counted.drafts else None


def counters(page: str) -> Speculation | None:
    """vLLM's counters in a Prometheus page, whatever their prefix; None where one is missing."""
    found = []
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        series = rf"^\w+:spec_decode_{name}_total(?:{{.*}})? ([0-9.eE+-]+)"
        values = [float(v) for v in re.findall(series, page, re.MULTILINE)]
        if not values:
            return None
        found.append(int(sum(values)))
    return Speculation(*found)
