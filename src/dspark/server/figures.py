"""What speculation brought one request, as its response says it.

The object `metrics` at the root of a response, with the names and definitions of vLLM's per-request
acceptance metrics, which benchmark tools read without being told:

    num_spec_steps             rounds that verified a draft token at least
    num_draft_tokens           draft tokens scheduled, and so verified
    num_accepted_draft_tokens  of these, the ones that were emitted; the bonus is none of them
    mean_acceptance_length     1 + num_accepted_draft_tokens / num_spec_steps
    draft_acceptance_rate      num_accepted_draft_tokens / num_draft_tokens, or 0
    acceptance_histogram       [j] steps that accepted j draft tokens
    acceptance_histogram_by_draft_length   the same for each length that was verified

and of the schedule and of the second lane, which vLLM has no names for:

    num_proposed_tokens            draft tokens before the scheduler cut any
    num_predicted_accepted_tokens  accepted ones as the confidences had foretold them
    num_pipeline_bets              rounds behind which a draft could have been ready: it was made
                                   ahead of their verdict, and the text went on
    num_pipeline_hits              rounds whose draft was ready

A text that ends inside an accepted block counts the tokens before its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspark.types import Round, Stats


@dataclass
class Figures:
    """Counts of one request; the times are seconds of one clock."""

    arrived: float
    started: float | None = None
    """When it got a slot."""
    first: float | None = None
    last: float | None = None
    by_length: dict[int, list[int]] = field(default_factory=dict)
    """[k][j]: steps that accepted j of k."""
    proposed: int = 0
    predicted: float = 0.0
    bets: int = 0
    hits: int = 0

    def add(self, r: Round) -> None:
        self.proposed += len(r.drafted)
        self.predicted += r.predicted
        self.bets += r.bet
        self.hits += r.ahead
        if r.verified:
            row = self.by_length.setdefault(r.verified, [0] * (r.verified + 1))
            row[r.accepted] += 1

    def speculation(self) -> dict[str, Any]:
        longest = max(self.by_length, default=0)
        histogram = [0] * (longest + 1)
        for row in self.by_length.values():
            for j, count in enumerate(row):
                histogram[j] += count
        steps = sum(histogram)
        accepted = sum(j * count for j, count in enumerate(histogram))
        drafted = sum(k * sum(row) for k, row in self.by_length.items())
        return {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {
                str(k): row for k, row in sorted(self.by_length.items())
            },
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": longest,
            "num_proposed_tokens": self.proposed,
            "num_predicted_accepted_tokens": self.predicted,
            "num_pipeline_bets": self.bets,
            "num_pipeline_hits": self.hits,
        }

    def metrics(self, stats: Stats, speculates: bool) -> dict[str, Any]:
        """The object for a response; `speculative_decoding` is null without a drafter."""
        first, last = self.first or self.arrived, self.last or self.arrived
        return {
            "time_to_first_token_ms": (first - self.arrived) * 1e3,
            "generation_time_ms": (last - first) * 1e3,
            "queue_time_ms": ((self.started or self.arrived) - self.arrived) * 1e3,
            "mean_itl_ms": stats.itl_ms,
            "tokens_per_second": stats.tokens_per_second,
            "speculative_decoding": self.speculation() if speculates else None,
        }
