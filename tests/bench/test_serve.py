"""The load on a server: figures by hand, both loops against a running one."""

from __future__ import annotations

import math
import subprocess
import sys
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from dspark.bench import serve
from dspark.bench.prompts import PromptSet
from dspark.bench.serve import Load, ServeConfig
from dspark.bench.serve_figures import (
    DEFINITIONS,
    Limits,
    Sample,
    Speculation,
    counters,
    percentile,
    result,
)
from dspark.client import Endpoint
from dspark.errors import ConfigError, InvalidRequestError
from tests.engine.oracle import PATTERNS
from tests.server.served import Running, Scripted, serving
from tests.test_client import saying

PROMPTS = PromptSet("one", "0" * 64, ("hi",))
PROMPT = b"user: hi\n"


def test_figures_follow_their_definitions() -> None:
    told = Speculation(drafts=2, draft_tokens=6, accepted=3)
    samples = [
        Sample(10.0, [10.1, 10.2, 10.4], 10.5, prompt_tokens=7, tokens=7, speculation=told),
        Sample(11.0, [11.3], 11.4, prompt_tokens=7, tokens=1, speculation=told),
        Sample(12.0, end=14.0, failure="full"),
    ]
    r = result("2 clients", samples, Limits(ttft_ms=200))
    assert (r.requests, r.failed, r.failures) == (3, 1, {"full": 1})
    assert (r.seconds, r.output_tokens, r.prompt_tokens) == (4.0, 8, 14)
    assert (r.output_tokens_per_second, r.requests_per_second) == (2.0, 0.5)
    assert (r.goodput, r.good_share) == (1 / 4, 1 / 3)
    assert r.ttft_ms is not None and r.ttft_ms["p50"] == pytest.approx(200)
    assert r.chunk_gap_ms is not None and r.chunk_gap_ms["max"] == pytest.approx(200)
    assert r.per_token_ms is not None and r.per_token_ms["mean"] == pytest.approx(300 / 6)
    assert r.e2e_ms is not None and r.e2e_ms["mean"] == pytest.approx(450)
    assert r.speculation == {
        "source": "responses", "drafts": 4, "draft_tokens": 12, "accepted": 6,
        "acceptance_length": 2.5, "acceptance_rate": 0.5,
    }  # fmt: skip
    assert {k for name in DEFINITIONS for k in name.split(", ")} > {"goodput", "e2e_ms"}


def test_nothing_answered() -> None:
    r = result("1 clients", [Sample(0.0, end=1.0, failure="no")], Limits())
    assert r.ttft_ms is r.e2e_ms is r.per_token_ms is r.speculation is r.goodput is None
    assert r.output_tokens_per_second == 0


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(), True),
        (Limits(ttft_ms=100.1, per_token_ms=50.1, e2e_ms=500.1), True),
        (Limits(ttft_ms=99), False),
        (Limits(per_token_ms=49), False),
        (Limits(e2e_ms=499), False),
    ],
)
def test_limits(limits: Limits, good: bool) -> None:
    assert Sample(0.0, [0.1, 0.4], 0.5, tokens=7).keeps(limits) is good
    assert not Sample(0.0, [0.1, 0.4], 0.5, tokens=7, failure="x").keeps(limits)


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_percentiles_are_numpys(n: int) -> None:
    values = sorted(np.random.default_rng(n).exponential(size=n).tolist())
    for p in (0, 50, 90, 99, 100):
        assert percentile(values, p) == pytest.approx(np.percentile(values, p))


def test_arrivals_are_poisson_and_seeded() -> None:
    at = Load(rate=5.0).arrivals(4000, seed=1)
    assert at == Load(rate=5.0).arrivals(4000, seed=1) != Load(rate=5.0).arrivals(4000, seed=2)
    gaps = np.diff(at)
    assert len(at) == 4000 and at[0] == 0 and (gaps > 0).all()
    # Exponential gaps: mean and deviation both 1 / rate, within 5 standard errors.
    assert abs(fmean(gaps.tolist()) - 0.2) < 5 * 0.2 / math.sqrt(4000)
    assert abs(float(gaps.std()) - 0.2) < 5 * 0.2 * math.sqrt(2 / 4000)
    assert Load(concurrency=3).arrivals(5, 0) == [0.0] * 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Load(),
        lambda: Load(1, 1.0),
        lambda: Load(concurrency=0),
        lambda: Load(rate=0.0),
        lambda: Load(rate=math.inf),
        lambda: Limits(ttft_ms=0),
        lambda: ServeConfig(loads=()),
        lambda: ServeConfig(requests=0),
    ],
)
def test_impossible_configs(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
    with pytest.raises(InvalidRequestError, match="temperature"):
        ServeConfig(temperature=-1)


def test_counters_of_a_page() -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    page = "".join(
        f'# HELP x\nvllm:spec_decode_{n}_total{{engine="{e}"}} {v}\n'
        for v, n in enumerate(names, start=1)
        for e in "01"
    )
    assert counters(page) == Speculation(2, 4, 6)
    assert counters(page.replace("num_drafts", "others")) is None
    assert Speculation(2, 4, 6) - Speculation(1, 1, 1) == Speculation(1, 3, 5)


def measured(s: Running, config: ServeConfig, prompts: PromptSet = PROMPTS) -> list[Any]:
    report = serve.run(Endpoint(s.url, s.key), prompts, config)
    assert (report.model, report.url) == ("scripted", s.url)
    return report.as_json()["results"]


@pytest.mark.parametrize("load", [Load(concurrency=3), Load(rate=200.0)])
def test_against_a_running_server(load: Load) -> None:
    model = Scripted(b"abcdefghijklmnopqrstuvwxyz", PROMPT, right=PATTERNS["some"], slots=4)
    with serving(model, api_key="secret") as s:
        before = s.series("dspark:spec_decode_num_drafts_total")
        found = measured(s, ServeConfig((load,), requests=7, max_tokens=20, ignore_eos=True))[0]
        drafts = s.series("dspark:spec_decode_num_drafts_total") - before
        assert s.series("dspark:request_success_total") == 8
        s.idle()
    assert found["failures"] == {} and found["load"] == str(load)
    assert (found["requests"], found["output_tokens"]) == (7, 7 * 20)
    assert found["prompt_tokens"] == 7 * len(PROMPT)
    assert 0 < found["ttft_ms"]["p50"] <= found["e2e_ms"]["p50"] < 60e3
    assert found["speculation"]["source"] == "responses"
    assert 0 < found["speculation"]["drafts"] < drafts  # the warm-up's are in the second
    assert found["speculation"]["acceptance_length"] > 1


def test_a_closed_loop_keeps_its_number_of_clients() -> None:
    model = Scripted(b"x" * 40, PROMPT, slots=8, seconds=0.002)
    most = 0
    with serving(model) as s:
        worker = s.worker
        real = worker.submit

        def submit(jobs: Any) -> None:
            nonlocal most
            real(jobs)
            most = max(most, worker.open_requests)

        worker.submit = submit  # type: ignore[method-assign]
        measured(s, ServeConfig((Load(concurrency=2),), requests=6, max_tokens=8))
        assert most == 2
        measured(s, ServeConfig((Load(concurrency=1), Load(rate=1e4)), requests=6, max_tokens=8))
        assert most == 6  # all of an open loop, whether or not they were answered


def test_requests_that_fail_are_counted() -> None:
    with serving(Scripted(b"x" * 99, PROMPT, slots=1, seconds=0.01), max_queue=0) as s:
        found = measured(s, ServeConfig((Load(concurrency=4),), requests=4, max_tokens=20))[0]
    assert 1 <= found["failed"] < 4
    assert "answered 429" in next(iter(found["failures"]))


def test_speculation_from_the_page_where_responses_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dspark.server.figures.Figures.metrics", lambda *args: None)
    with serving(Scripted(b"x" * 99, PROMPT, right=PATTERNS["all"])) as s:
        found = measured(s, ServeConfig(requests=2, max_tokens=13))[0]
    assert found["speculation"]["source"] == "/metrics"
    assert found["speculation"]["acceptance_length"] == 6  # blocks of five, all accepted


def test_no_figures_of_speculation_without_a_drafter() -> None:
    with serving(Scripted(b"x" * 99, PROMPT)) as s:
        assert measured(s, ServeConfig(requests=1))[0]["speculation"] is None


def test_a_server_without_usage_is_refused() -> None:
    bare = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    with saying(200, bare) as url, pytest.raises(ConfigError, match="sends no usage"):
        serve.run(Endpoint(url), PROMPTS, ServeConfig(), model="m")


def test_a_message_of_another_protocol_fails_its_request() -> None:
    strange = b'data: {"usage": {"tokens": 3}}\n\ndata: [DONE]\n\n'
    with saying(200, strange) as url:
        report = serve.run(Endpoint(url), PROMPTS, ServeConfig(requests=2), model="m")
    assert report.results[0].failed == 2
    assert "another protocol" in next(iter(report.results[0].failures))


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from dspark.cli import bench_serve; from dspark.bench import serve;"
        "from dspark.client import Endpoint; Endpoint('http://a').open().close();"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
