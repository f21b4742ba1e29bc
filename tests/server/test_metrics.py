"""The figures of speculation: by hand, against /metrics, and in the log line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.drafters.base import DraftContext, Drafter
from dspark.errors import ConfigError
from dspark.llm import LLM
from dspark.schedule.scheduler import Scheduler
from dspark.server.figures import Figures
from dspark.server.metrics import Metrics, Report
from dspark.types import Draft, Round
from tests.engine.oracle import PATTERNS
from tests.server.served import EOS, Scripted, serving


def round_of(verified: int, accepted: int, drafted: int = 7) -> Round:
    """Half of what was verified was expected to be accepted."""
    emitted, predicted = tuple(range(accepted + 1)), verified / 2
    return Round("r", 0, tuple(range(drafted)), verified, accepted, emitted, 0, 0, 0, predicted)


def test_by_hand() -> None:
    """A round that verified nothing is no step; what the scheduler cut is not drafted."""
    figures, metrics = Figures(0.0), Metrics("vllm")
    metrics.start("m")
    report = Report(metrics, 0.0)
    for r in (round_of(3, 3), round_of(3, 1), round_of(2, 0), round_of(0, 0)):
        figures.add(r)
        metrics.round(r)
    assert figures.speculation() == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 0, 1],
        "acceptance_histogram_by_draft_length": {"2": [1, 0, 0], "3": [0, 1, 0, 1]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 3,
        "num_proposed_tokens": 28,
        "num_predicted_accepted_tokens": 4.0,
        "num_pipeline_bets": 0,
        "num_pipeline_hits": 0,
    }
    metrics.schedule(5, [0.25, -0.5])
    page = metrics.page().decode()
    for line in (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 8.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 4.0',
        'vllm:spec_decode_num_proposed_tokens_total{engine="0",model_name="m"} 28.0',
        'vllm:spec_decode_num_predicted_accepted_tokens_total{engine="0",model_name="m"} 4.0',
        'vllm:spec_decode_verification_budget{engine="0",model_name="m"} 5.0',
        'calibration_error{engine="0",model_name="m",position="0"} 0.25',
        'calibration_error{engine="0",model_name="m",position="1"} -0.5',
        'accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 2.0',
        'accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0',
    ):
        assert line in page
    metrics.tokens(prompt=20, generated=10)
    metrics.load(2, 1, 0.5)
    assert report.lines(2.0) == [
        "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s,"
        " Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 50.0%",
        "SpecDecoding metrics: Mean acceptance length: 2.33, Accepted throughput: 2.00 tokens/s,"
        " Drafted throughput: 4.00 tokens/s, Accepted: 4 tokens, Drafted: 8 tokens,"
        " Per-position acceptance rate: 0.667, 0.333, 0.333, Avg Draft acceptance rate: 50.0%",
    ]
    metrics.load(0, 0, 0.0)
    assert report.lines(4.0) == []  # B23: nothing drafted, nothing divided by zero


def test_nothing_drafted() -> None:
    """B23"""
    empty = Figures(0.0).speculation()
    assert (empty["mean_acceptance_length"], empty["draft_acceptance_rate"]) == (1.0, 0.0)
    assert empty["acceptance_histogram"] == [0]


@pytest.mark.parametrize("prefix", ["", "a b", "1a", "a:b"])
def test_bad_prefix(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        Metrics(prefix)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_known_patterns(pattern: str) -> None:
    """B23: tokens are accounted for, with an end of text inside a block."""
    text = b"abcdefghijklmnopqrstuvw"
    with serving(Scripted([*text, EOS], right=PATTERNS[pattern])) as s:
        got = s.post("/v1/completions", prompt="hello", max_tokens=60, temperature=0).json()
    spec = got["metrics"]["speculative_decoding"]
    assert got["usage"]["completion_tokens"] == len(text) + 1
    steps, accepted = spec["num_spec_steps"], spec["num_accepted_draft_tokens"]
    assert 0 <= spec["draft_acceptance_rate"] <= 1
    assert sum(spec["acceptance_histogram"]) == steps
    # One token is the prefill's; a round adds its accepted ones and, but for the last, a bonus.
    assert got["usage"]["completion_tokens"] - 1 - accepted in (steps, steps - 1)


def test_no_drafter_no_figures() -> None:
    with serving(Scripted(b"abc")) as s:
        got = s.post("/v1/completions", prompt="hello", max_tokens=3, temperature=0).json()
        assert got["metrics"]["speculative_decoding"] is None
        assert got["metrics"]["time_to_first_token_ms"] > 0
        assert s.series("dspark:spec_decode_num_drafts_total") == 0


def test_sums_over_requests_are_the_counters(library: LLM) -> None:
    """Per-request figures, usage and /metrics tell one story."""
    sums: Counter[str] = Counter()
    predicted = 0.0
    with serving(lambda: library, metrics_prefix="vllm") as s:
        for i in range(6):
            asked: dict[str, Any] = {"prompt": "one two one two one" * (i + 1), "max_tokens": 30}
            got = s.post("/v1/completions", **asked, seed=i, temperature=i / 5).json()
            spec = got["metrics"]["speculative_decoding"]
            sums += Counter({k: v for k, v in spec.items() if isinstance(v, int)})
            predicted += spec["num_predicted_accepted_tokens"]
            sums += Counter({k: v for k, v in got["usage"].items() if isinstance(v, int)})
            for k, row in spec["acceptance_histogram_by_draft_length"].items():
                assert len(row) == int(k) + 1
                for position in range(int(k)):
                    sums[f"at {position}"] += sum(row[position + 1 :])
        s.idle()
        assert sums["num_draft_tokens"] > sums["num_accepted_draft_tokens"] > 0
        assert s.series("vllm:spec_decode_num_drafts_total") == sums["num_spec_steps"]
        assert s.series("vllm:spec_decode_num_draft_tokens_total") == sums["num_draft_tokens"]
        proposed = s.series("vllm:spec_decode_num_proposed_tokens_total")
        assert proposed == sums["num_proposed_tokens"] >= sums["num_draft_tokens"]
        foretold = s.series("vllm:spec_decode_num_predicted_accepted_tokens_total")
        assert foretold == pytest.approx(predicted) and predicted > 0
        accepted = s.series("vllm:spec_decode_num_accepted_tokens_total")
        assert accepted == sums["num_accepted_draft_tokens"]
        page = s.http.get("/metrics").text
        for position, value in re.findall(r'per_pos_total{.*position="(\d+)"} (\S+)', page):
            assert float(value) == sums[f"at {position}"]
        assert s.series("vllm:prompt_tokens_total") == sums["prompt_tokens"]
        assert s.series("vllm:generation_tokens_total") == sums["completion_tokens"]
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert s.series(f"vllm:{name}_count") == 6
        assert s.series("vllm:request_success_total") == 6
        assert s.series("vllm:inter_token_latency_seconds_count") > 0
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert s.series(f"vllm:{name}") == 0
    assert not library.engine.has_work
    library.engine.on_round = None


def test_the_engine_of_an_llm_is_the_one_of_its_drafter(library: LLM) -> None:
    """The seam that a server uses."""
    before = library.engine
    library.set_drafter("none")
    assert library.engine is not before and library.engine.target is library.target
    library.set_drafter("ngram")


def test_a_schedule_that_cuts_shows_what_it_cut() -> None:
    """Half of a block is verified; a head that is sure of all of it is wrong by what was missed."""
    text = b"abcdefghijklmnopqrstuvw"
    model = Scripted([*text, EOS], right=lambda n, row: 1)
    model.engine.drafter.inner = Sure(model.engine.drafter.inner)
    model.engine.scheduler = Scheduler("static:2")
    with serving(model) as s:
        got = s.post("/v1/completions", prompt="hello", max_tokens=19, temperature=0).json()
        spec = got["metrics"]["speculative_decoding"]
        assert spec["num_proposed_tokens"] > 2 * spec["num_draft_tokens"] > 0
        assert spec["num_predicted_accepted_tokens"] == spec["num_draft_tokens"]
        # One token of the prefill, nine rounds of two: the last one had room for one draft.
        assert s.series("dspark:spec_decode_verification_budget") == 1
        page = s.http.get("/metrics").text
        found = dict(re.findall(r'calibration_error{.*position="(\d+)"} (\S+)', page))
        assert {k: float(v) for k, v in found.items() if int(k) < 2} == {"0": 0.0, "1": 1.0}


class Sure(Drafter):
    """Another's drafts, each of which it is certain of."""

    def __init__(self, inner: Drafter) -> None:
        self._inner, self.cap = inner, inner.cap

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [replace(d, confidence=torch.ones(len(d))) for d in self._inner.propose(contexts)]

    def release(self, slot: int) -> None:
        self._inner.release(slot)
