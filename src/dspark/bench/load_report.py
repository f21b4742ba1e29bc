"""What the runs of `bench.load` come to: a row for each configuration and load, and the verdicts.

Throughputs are medians over repeats, and ratios are formed within a repeat first, as in
`bench.compare`. Percentiles are those of all answers of all repeats together, since one window
holds few. The best fixed length is chosen for each load by its own median, so a schedule is
compared with one that was picked in hindsight: a ratio a little below 1 may be the luck of the
best of several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from dspark.bench.compare import known_median, machine, versions
from dspark.bench.load import PLAIN, LoadConfig, Run, Setup
from dspark.types import Stats

if TYPE_CHECKING:
    from dspark.bench.prompts import PromptSet

DEFINITIONS = {
    "users": "requests in flight; each user asks again as soon as an answer has ended",
    "tokens_per_second": "decoding speed of all users together: tokens / seconds of the passes "
    "without prompt rows, in which every user is decoding; median over repeats",
    "with_prompts_tokens_per_second": "the same over all passes of the window, prompts included: "
    "which prompts fall into it is chance; median over repeats",
    "vs_plain": "tokens_per_second / that of plain under the same load in the same repeat; median "
    "over repeats",
    "vs_best_fixed": "the same against the fixed length K of this drafter with the highest median "
    "under this load",
    "user_tokens_per_second": "of a user, over the same passes; median over users, "
    "user_tokens_per_second_p10: the slowest tenth ends there; medians over repeats",
    "rows_per_round": "anchors and scheduled drafts in a pass; like all below down to predicted, "
    "of passes without prompt rows",
    "budget": "verification budget: scheduled / request-rounds, a request-round being the share of "
    "one request in a pass",
    "accepted_length": "tokens a request-round yields, the target's own token included",
    "drafted, scheduled, accepted": "draft tokens that were guessed, of these verified, of these "
    "right; sums over repeats",
    "predicted": "draft tokens expected to be accepted among the scheduled ones, by the drafter's "
    "confidence",
    "ttft_ms": "from asking to the first token, of answers that were asked for in the window",
    "itl_ms": "between tokens: time since the delivery before / tokens that came together, each "
    "token counted once",
    "tokens, seconds, texts": "of the windows: all tokens, all seconds, and answers that ended",
    "identical_to_plain": "every token of every text, warm-up included, equals the plain answer",
    "K": "drafts K tokens and verifies all of them",
}


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Result:
    """A row; DEFINITIONS says what the numbers mean, None is "does not apply"."""

    configuration: str
    kind: str
    users: int
    repeats: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    with_prompts_tokens_per_second: float
    vs_plain: float | None
    vs_best_fixed: float | None
    user_tokens_per_second: float | None
    user_tokens_per_second_p10: float | None
    rows_per_round: float | None
    budget: float | None
    accepted_length: float | None
    drafted: int
    scheduled: int
    predicted: float
    accepted: int
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    texts: int
    identical_to_plain: bool


@dataclass(frozen=True)
class Comparison:
    """A schedule against one fixed length of its drafter, over all loads that both were run at.

    mean   geometric mean over loads of the median ratio of tokens_per_second
    worst  the smallest of these ratios, and the load where it is
    """

    scheduled: str
    fixed: str
    users: tuple[int, ...]
    mean: float
    worst: float
    worst_users: int


@dataclass(frozen=True)
class LoadReport:
    """What `dspark bench load` prints: the rows and all that is needed to judge them."""

    model: str
    dtype: str
    device: str
    threads: int
    config: LoadConfig
    prompts: PromptSet
    setups: tuple[Setup, ...]
    runs: tuple[Run, ...]

    @property
    def complete(self) -> bool:
        """Whether all runs were made."""
        wanted = len(self.setups) * len(self.config.users) * self.config.repeats
        return len(self.runs) == wanted

    @property
    def differences(self) -> tuple[str, ...]:
        return _unique(d for r in self.runs for d in r.differences)

    @property
    def messages(self) -> tuple[str, ...]:
        return _unique(m for r in self.runs for m in r.messages)

    def results(self) -> list[Result]:
        """A row for each load and configuration that was run, loads rising."""
        return [
            self._result(setup, users, runs)
            for users in self.config.users
            for setup in self.setups
            if (runs := self._runs(setup.name, users))
        ]

    def comparisons(self) -> list[Comparison]:
        """Every schedule against every fixed length of its drafter."""
        pairs = [
            (s, f)
            for s in self.setups
            for f in self.setups
            if (s.kind, f.kind) == ("scheduled", "fixed") and s.drafter == f.drafter
        ]
        found = []
        for s, f in pairs:
            ratios = {u: self._ratio(s.name, f.name, u) for u in self.config.users}
            known = {u: r for u, r in ratios.items() if r is not None}
            if known:
                worst = min(known, key=lambda u: known[u])
                mean = geometric_mean(known.values())
                found.append(Comparison(s.name, f.name, tuple(known), mean, known[worst], worst))
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "prompts": {
                "name": self.prompts.name,
                "sha256": self.prompts.sha256,
                "count": len(self.prompts),
            },
            "complete": self.complete,
            "configurations": [asdict(s) for s in self.setups],
            "results": [asdict(r) for r in self.results()],
            "comparisons": [asdict(c) for c in self.comparisons()],
            "differences": list(self.differences),
            "messages": list(self.messages),
            "config": asdict(self.config),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "definitions": DEFINITIONS,
        }

    def _runs(self, name: str, users: int) -> list[Run]:
        return [r for r in self.runs if (r.setup, r.users) == (name, users)]

    def _ratio(self, ours: str, theirs: str, users: int) -> float | None:
        """The median over the repeats in which both were run."""
        other = {r.repeat: r.tokens_per_second for r in self._runs(theirs, users)}
        pairs = [(r.tokens_per_second, other.get(r.repeat)) for r in self._runs(ours, users)]
        return known_median([a / b if a and b else None for a, b in pairs])

    def _best_fixed(self, drafter: str, users: int) -> str | None:
        """The name of the fastest fixed length."""
        medians = {
            s.name: speed
            for s in self.setups
            if (s.kind, s.drafter) == ("fixed", drafter)
            and (speed := known_median([r.tokens_per_second for r in self._runs(s.name, users)]))
        }
        return max(medians, key=lambda name: medians[name]) if medians else None

    def _result(self, setup: Setup, users: int, runs: Sequence[Run]) -> Result:
        stats, steps = Stats.total([r.stats for r in runs]), sum(r.steps for r in runs)
        best = self._best_fixed(setup.drafter, users)
        ttft = [(ms, 1) for r in runs for ms in r.ttft_ms]
        itl = [(ms / n, n) for r in runs for ms, n in r.gaps]
        return Result(
            configuration=setup.name,
            kind=setup.kind,
            users=users,
            repeats=len(runs),
            tokens=sum(r.window_tokens for r in runs),
            seconds=sum(r.window_seconds for r in runs),
            tokens_per_second=known_median([r.tokens_per_second for r in runs]),
            with_prompts_tokens_per_second=median(r.window_tokens / r.window_seconds for r in runs),
            vs_plain=self._ratio(setup.name, PLAIN, users),
            vs_best_fixed=None if best is None else self._ratio(setup.name, best, users),
            user_tokens_per_second=_over_repeats(runs, median),
            user_tokens_per_second_p10=_over_repeats(
                runs, lambda speeds: percentile([(s, 1) for s in speeds], 0.1)
            ),
            rows_per_round=(stats.rounds + stats.verified) / steps if steps else None,
            budget=stats.verified / stats.rounds if stats.rounds else None,
            accepted_length=stats.accepted_length,
            drafted=stats.drafted,
            scheduled=stats.verified,
            predicted=stats.predicted,
            accepted=stats.accepted,
            ttft_ms=_percentiles(ttft),
            itl_ms=_percentiles(itl),
            texts=sum(r.texts for r in runs),
            identical_to_plain=not any(r.differences for r in runs),
        )


def percentile(weighted: Sequence[tuple[float, int]], share: float) -> float:
    """The smallest value that `share` of all (value, weight) do not exceed (nearest rank)."""
    ordered = sorted(weighted)
    rank = max(math.ceil(share * sum(n for _, n in ordered)), 1)
    for value, n in ordered:
        rank -= n
        if rank <= 0:
            return value
    raise ValueError("a percentile of nothing")


def _percentiles(weighted: Sequence[tuple[float, int]]) -> Percentiles | None:
    if not weighted:
        return None
    return Percentiles(*(percentile(weighted, share) for share in (0.5, 0.95, 0.99)))


def _over_repeats(
    runs: Sequence[Run], of_users: Callable[[Sequence[float]], float]
) -> float | None:
    """The median over repeats of a figure over users."""
    return known_median([of_users(r.speeds) if r.speeds else None for r in runs])


def _unique(sentences: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences))
