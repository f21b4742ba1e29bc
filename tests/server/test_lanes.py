"""Two lanes, as clients see them: what was drafted ahead, and what both did, for who watches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from dspark.engine.pipeline import PipelinedEngine
from dspark.server.figures import Figures
from dspark.server.metrics import Metrics, Report
from dspark.types import Round
from tests.engine.oracle import PATTERNS, Pattern
from tests.server.served import EOS, Running, Scripted, serving
from tests.server.test_streams import messages

TEXT = b"abcdefghijklmnopqrstuvwxyz, and once more: abcdefghijklmnopqrstuvwxyz."
ASK: dict[str, Any] = {"prompt": "hello", "max_tokens": 60, "temperature": 0}
ROUNDS = {"stream": True, "dspark": {"rounds": True}}


def model(right: Pattern | None = None, **options: Any) -> Scripted:
    """By default some of the bets are lost."""

    def often(n: int, row: int) -> int:
        return 99 if n % 5 else 2

    return Scripted([*TEXT, EOS], right=right or often, lanes=True, **options)


def lanes(s: Running) -> PipelinedEngine:
    engine = s.worker.ready().engine
    assert isinstance(engine, PipelinedEngine)
    return engine


def pipeline(response: dict[str, Any]) -> tuple[int, int]:
    spec = response["metrics"]["speculative_decoding"]
    return spec["num_pipeline_bets"], spec["num_pipeline_hits"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sums_of_requests_are_the_counters(pattern: str) -> None:
    """And the engine's own count; a text that samples under a seed is not drafted for ahead."""
    with serving(model(PATTERNS[pattern])) as s:
        found = [pipeline(s.post("/v1/completions", **{**ASK, "max_tokens": n}).json())
                 for n in (9, 33, 60)]  # fmt: skip
        bets, hits = (sum(figures) for figures in zip(*found, strict=True))
        counts = lanes(s).counts
        assert (bets, hits) == (counts.bets, counts.hits) and bets >= 10
        assert hits == bets if pattern == "all" else hits < bets
        seeded = s.post("/v1/completions", **{**ASK, "temperature": 1, "seed": 3}).json()
        assert pipeline(seeded) == (0, 0)
        assert s.series("dspark:spec_decode_num_pipeline_bets_total") == bets
        assert s.series("dspark:spec_decode_num_pipeline_hits_total") == hits


def test_one_lane_hits_nothing() -> None:
    with serving(Scripted([*TEXT, EOS], right=PATTERNS["all"])) as s:
        assert pipeline(s.post("/v1/completions", **ASK).json()) == (0, 0)
        raw = s.post("/v1/completions", **ASK, **ROUNDS)
        assert not any("lanes" in m.get("dspark", {}) for m in messages(raw.text))
        assert s.series("dspark:spec_decode_num_pipeline_bets_total") == 0


def test_the_log_line_says_hits_while_there_are_bets() -> None:
    metrics = Metrics()
    metrics.start("m")
    report = Report(metrics, 0.0)
    for bet, ahead in ((True, False), (True, True), (False, True)):
        r = Round("r", 0, (1, 2), 2, 1, (1, 3), 0, 0, 0, ahead=ahead, bet=bet)
        metrics.round(r)
    assert report.lines(1.0)[-1].endswith("rate: 50.0%, Pipeline hits: 2 of 2 drafts ahead")
    metrics.round(Round("r", 0, (1, 2), 2, 1, (1, 3), 0, 0, 0))
    assert report.lines(2.0)[-1].endswith("rate: 50.0%")


def test_a_round_that_verified_nothing_may_have_been_bet_on() -> None:
    """static:0 verifies none of a draft and couples its first token."""
    figures = Figures(0.0)
    figures.add(Round("r", 0, (1, 2), 0, 0, (1,), 0, 0, 0, ahead=True, bet=True))
    spec = figures.speculation()
    assert (spec["num_pipeline_bets"], spec["num_pipeline_hits"]) == (1, 1)
    assert spec["num_spec_steps"] == 0


def test_what_both_lanes_did_is_told_to_who_watches() -> None:
    """Every pass of its rounds and every draft, once; recorded while somebody watches."""
    with serving(model(seconds=0.002)) as s:
        assert lanes(s).timeline is None
        s.post("/v1/completions", **ASK)
        plain = messages(s.post("/v1/completions", **ASK, stream=True).text)
        assert lanes(s).timeline is None and not any("dspark" in m for m in plain)
        found = messages(s.post("/v1/completions", **ASK, **ROUNDS).text)
        events = [m["dspark"] for m in found if "dspark" in m]
        rounds = [e["round"] for e in events if e["round"]]
        spans = [span for e in events for span in e.get("lanes", [])]
        assert sum(span["kind"] == "verify" for span in spans) == len(rounds)
        kinds = {span["kind"] for span in spans}
        assert {"verify", "fresh", "hit", "miss"} == kinds
        for span in spans:
            assert set(span) == {"kind", "start_ms", "end_ms"}
            assert span["start_ms"] < span["end_ms"]
        passes = [span for span in spans if span["kind"] == "verify"]
        for before, after in pairwise(passes):
            assert before["end_ms"] <= after["start_ms"]
        hits = sum(span["kind"] == "hit" for span in spans)
        _, counted = pipeline(s.post("/v1/completions", **ASK).json())
        assert hits >= counted > 0
        assert lanes(s).timeline is None  # nobody watched the last one


def test_who_waits_is_told_nothing_of_others() -> None:
    """What lies before its own first round is not its own; memory is bounded."""
    with serving(model(slots=1, seconds=0.01)) as s:
        asked = {**ASK, "n": 2, **ROUNDS}
        found = messages(s.post("/v1/completions", **asked).text)
        each: list[list[Any]] = [[], []]
        for m in found:
            if "dspark" in m:
                each[m["choices"][0]["index"]] += m["dspark"].get("lanes", [])
        first, second = sorted(each, key=lambda spans: spans[0]["start_ms"])
        assert max(x["end_ms"] for x in first) <= min(x["start_ms"] for x in second)
