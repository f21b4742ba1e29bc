"""Prometheus counters and the periodic log line, with vLLM's names and definitions.

    spec_decode_num_drafts           rounds of a request that verified a draft token at least
    spec_decode_num_draft_tokens     draft tokens verified
    spec_decode_num_accepted_tokens  of these, emitted (the bonus is none of them)
    spec_decode_num_accepted_tokens_per_pos{position}   rounds that accepted the token at a position

and, of the schedule and the second lane, which vLLM has no names for,

    spec_decode_num_proposed_tokens            draft tokens before the scheduler cut any
    spec_decode_num_predicted_accepted_tokens  accepted ones as the confidences had foretold them
    spec_decode_calibration_error{position}    mean predicted survival less the share that survived
    spec_decode_verification_budget            draft tokens verified in the last round, of all texts
    spec_decode_num_pipeline_bets              rounds behind which a draft could have been ready
    spec_decode_num_pipeline_hits              rounds whose draft was ready

so that acceptance length is 1 + accepted / drafts, acceptance rate accepted / draft tokens, and the
rate of a position accepted_per_pos / drafts. All carry a prefix (`dspark:`, or `vllm:` for
dashboards that exist) and the labels `model_name` and `engine`.

The engine thread writes, a scrape in the event loop reads; the client library locks its values.
Each app has a registry of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dspark.errors import ConfigError
from dspark.types import Round

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
             1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
           240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip

COUNTERS = {
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Rounds that verified a draft.",
    "spec_decode_num_draft_tokens": "Draft tokens verified, as many as were scheduled.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "spec_decode_num_proposed_tokens": "Draft tokens proposed, scheduled or not.",
    "spec_decode_num_predicted_accepted_tokens": "Draft tokens expected to be accepted.",
    "spec_decode_num_pipeline_bets": "Rounds whose next draft was made ahead of their verdict.",
    "spec_decode_num_pipeline_hits": "Rounds whose draft had been made ahead.",
}
GAUGES = {
    "num_requests_running": "Requests that hold a slot.",
    "num_requests_waiting": "Requests that wait for one.",
    "kv_cache_usage_perc": "Cache rows in use; 1 is all.",
    "spec_decode_verification_budget": "Draft tokens verified in the last round.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", TTFT),
    "inter_token_latency_seconds": ("Between two outputs of a request; a round is one.", PER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean of a request's tokens.", PER_TOKEN),
    "e2e_request_latency_seconds": ("From arrival to the last token.", LATENCY),
    "request_queue_time_seconds": ("From arrival to a slot.", LATENCY),
}


@dataclass
class Totals:
    """The counters once more, as numbers, for the log line."""

    prompt: int = 0
    generated: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    bets: int = 0
    hits: int = 0
    accepted_at: list[int] = field(default_factory=list)


class Metrics:
    """All that is counted of one server."""

    def __init__(self, prefix: str = "dspark") -> None:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
            raise ConfigError(
                f"metrics prefix {prefix!r} cannot be part of a name: expected letters, digits, _"
            )
        self.registry = CollectorRegistry()
        self.totals = Totals()
        self.running = self.waiting = 0
        self.cache_usage = 0.0
        self._prefix = prefix

    def start(self, model_name: str) -> None:
        """Create the series, now that the model's name is known."""
        labels = {"model_name": model_name, "engine": "0"}
        names = list(labels)

        def make(kind: type, name: str, text: str, extra: tuple[str, ...] = (), **more: Any) -> Any:
            full = f"{self._prefix}:{name}"
            return kind(full, text, [*names, *extra], registry=self.registry, **more)

        self._counters: dict[str, Counter] = {
            n: make(Counter, n, text).labels(**labels) for n, text in COUNTERS.items()
        }
        self._gauges: dict[str, Gauge] = {
            n: make(Gauge, n, text).labels(**labels) for n, text in GAUGES.items()
        }
        self._histograms: dict[str, Histogram] = {
            n: make(Histogram, n, text, buckets=buckets).labels(**labels)
            for n, (text, buckets) in HISTOGRAMS.items()
        }
        self._positions: Counter = make(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted the draft token at a position.",
            ("position",),
        )
        self._errors: Gauge = make(
            Gauge,
            "spec_decode_calibration_error",
            "Mean predicted survival of verified drafts less the share that survived.",
            ("position",),
        )
        self._ended: Counter = make(
            Counter, "request_success", "Requests that ended, by reason.", ("finished_reason",)
        )
        self._labels = labels

    def round(self, r: Round) -> None:
        t = self.totals
        t.bets += r.bet
        t.hits += r.ahead
        self._counters["spec_decode_num_pipeline_bets"].inc(r.bet)
        self._counters["spec_decode_num_pipeline_hits"].inc(r.ahead)
        self._counters["spec_decode_num_proposed_tokens"].inc(len(r.drafted))
        if not r.verified:
            return
        t.drafts += 1
        t.drafted += r.verified
        t.accepted += r.accepted
        t.accepted_at += [0] * (r.verified - len(t.accepted_at))
        self._counters["spec_decode_num_drafts"].inc()
        self._counters["spec_decode_num_draft_tokens"].inc(r.verified)
        self._counters["spec_decode_num_accepted_tokens"].inc(r.accepted)
        self._counters["spec_decode_num_predicted_accepted_tokens"].inc(r.predicted)
        for k in range(r.accepted):
            t.accepted_at[k] += 1
            self._positions.labels(**self._labels, position=str(k)).inc()

    def tokens(self, *, prompt: int = 0, generated: int = 0) -> None:
        self.totals.prompt += prompt
        self.totals.generated += generated
        self._counters["prompt_tokens"].inc(prompt)
        self._counters["generation_tokens"].inc(generated)

    def observe(self, histogram: str, seconds: float) -> None:
        self._histograms[histogram].observe(max(0.0, seconds))

    def ended(self, reason: str) -> None:
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def load(self, running: int, waiting: int, cache_usage: float) -> None:
        self.running, self.waiting, self.cache_usage = running, waiting, cache_usage
        self._gauges["num_requests_running"].set(running)
        self._gauges["num_requests_waiting"].set(waiting)
        self._gauges["kv_cache_usage_perc"].set(cache_usage)

    def schedule(self, budget: int, errors: Sequence[float]) -> None:
        """A round verified `budget` drafts; `errors` [k] of the confidences since the start."""
        self._gauges["spec_decode_verification_budget"].set(budget)
        for k, error in enumerate(errors):
            self._errors.labels(**self._labels, position=str(k)).set(error)

    def page(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)


class Report:
    """The log lines about the time since the last ones."""

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics, self._at = metrics, now
        self._before = Totals()

    def lines(self, now: float) -> list[str]:
        """Nothing while nothing happens; the second line only if something was drafted, its end
        only if something was drafted ahead."""
        new, old = self._metrics.totals, self._before
        elapsed = max(now - self._at, 1e-9)
        prompt, generated = new.prompt - old.prompt, new.generated - old.generated
        drafts, drafted = new.drafts - old.drafts, new.drafted - old.drafted
        accepted = new.accepted - old.accepted
        bets, hits = new.bets - old.bets, new.hits - old.hits
        old_at = old.accepted_at + [0] * (len(new.accepted_at) - len(old.accepted_at))
        at = [a - b for a, b in zip(list(new.accepted_at), old_at, strict=False)]
        self._at, self._before = now, replace(new, accepted_at=list(new.accepted_at))
        m = self._metrics
        out = []
        if prompt or generated or m.running:
            out.append(
                f"Engine 000: Avg prompt throughput: {prompt / elapsed:.1f} tokens/s,"
                f" Avg generation throughput: {generated / elapsed:.1f} tokens/s,"
                f" Running: {m.running} reqs, Waiting: {m.waiting} reqs,"
                f" KV cache usage: {m.cache_usage * 100:.1f}%"
            )
        if drafts and drafted:
            out.append(
                f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f},"
                f" Accepted throughput: {accepted / elapsed:.2f} tokens/s,"
                f" Drafted throughput: {drafted / elapsed:.2f} tokens/s,"
                f" Accepted: {accepted} tokens, Drafted: {drafted} tokens,"
                f" Per-position acceptance rate: {', '.join(f'{a / drafts:.3f}' for a in at)},"
                f" Avg Draft acceptance rate: {accepted / drafted * 100:.1f}%"
                + (f", Pipeline hits: {hits} of {bets} drafts ahead" if bets else "")
            )
        return out
