"""The comparison: turns, baseline, definitions, verdict."""

from dataclasses import replace
from typing import Any

import pytest

from dspark.bench.compare import WARM_UP_TOKENS, BenchConfig, Text, _with_gain, run
from dspark.bench.definitions import DEFINITIONS
from dspark.bench.prompts import PromptSet
from dspark.errors import ConfigError, InvalidRequestError
from tests.fake_llm import FakeLLM

PROMPTS = PromptSet("two", "0" * 64, ("a", "b"))


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(FakeLLM, "created", [], raising=False)
    return FakeLLM()


def test_none_always_takes_part_and_names_are_unique() -> None:
    assert BenchConfig(drafters=("ngram", "ngram")).drafters == ("none", "ngram")
    assert BenchConfig(drafters=("ngram", "none")).drafters == ("ngram", "none")
    assert BenchConfig(drafters=()).drafters == ("none",)


def test_impossible_configs() -> None:
    with pytest.raises(ConfigError, match="repeat=0"):
        BenchConfig(repeat=0)
    with pytest.raises(InvalidRequestError, match="temperature"):
        BenchConfig(temperature=-1)


def test_drafters_take_turns_after_a_warm_up(llm: Any) -> None:
    heard: list[Text] = []
    run(llm, PROMPTS, BenchConfig(repeat=2), heard.append)
    assert {p.max_tokens for _, p in llm.seen[:2]} == {WARM_UP_TOKENS}
    assert {p.max_tokens for _, p in llm.seen[2:]} == {BenchConfig().max_tokens}
    assert [(t.repeat, t.prompt, t.drafter) for t in heard] == [
        (0, 0, "none"),
        (0, 0, "ngram"),
        (0, 1, "ngram"),
        (0, 1, "none"),
        (1, 0, "ngram"),
        (1, 0, "none"),
        (1, 1, "none"),
        (1, 1, "ngram"),
    ]


def test_numbers_follow_their_definitions(llm: Any) -> None:
    report = run(llm, PROMPTS, BenchConfig(drafters=("none", "ngram", "blind"), repeat=3))
    none, ngram, blind = report.results
    assert none.tokens == ngram.tokens == 2 * 3 * 10
    assert none.tokens_per_second == pytest.approx(100)
    # Ten tokens: one of the prefill, then five rounds of 12 ms that yield nine.
    assert ngram.tokens_per_second == pytest.approx(9 / 0.060)
    assert ngram.speedup_vs_none == pytest.approx(1.5)
    assert blind.speedup_vs_none == pytest.approx(0.5)
    assert none.speedup_vs_none == 1
    assert none.accepted_length == 1 and none.acceptance_rate is None
    assert none.acceptance_by_position == []
    assert ngram.accepted_length == pytest.approx(9 / 5)
    assert ngram.acceptance_rate == pytest.approx(0.5)
    assert ngram.acceptance_by_position == [1.0, 0.0]
    assert (ngram.draft_ms, ngram.verify_ms, ngram.other_ms) == (1, 10, 1)
    assert ngram.ttft_ms == 40
    assert ngram.seconds > 0
    assert all(r.identical_to_none for r in report.results)
    assert report.differences == ()


def test_a_speed_up_that_cannot_be_is_doubted(llm: Any) -> None:
    report = run(llm, PROMPTS, BenchConfig(drafters=("ngram", "lucky")))
    (doubt,) = report.doubts
    assert doubt.startswith("the speed-up of lucky, 2.00, exceeds its accepted length, 1.00")
    assert report.as_json()["doubts"] == [doubt]


def test_a_text_of_one_token_has_no_speed(llm: Any) -> None:
    report = run(llm, PROMPTS, BenchConfig(max_tokens=1))
    for result in report.results:
        assert result.tokens == 2
        assert result.tokens_per_second is result.speedup_vs_none is None
        assert result.accepted_length is result.draft_ms is None


def test_a_changed_text_is_found(llm: Any) -> None:
    report = run(llm, PROMPTS, BenchConfig(drafters=("liar", "ngram")))
    verdicts = {r.drafter: r.identical_to_none for r in report.results}
    assert verdicts == {"none": True, "liar": False, "ngram": True}
    assert report.differences == (
        "the text of drafter liar differs from that of none on prompt 1, from token 3 on",
    )


def test_sampling_gives_no_verdict(llm: Any) -> None:
    report = run(llm, PROMPTS, BenchConfig(drafters=("liar",), temperature=0.5))
    assert [r.identical_to_none for r in report.results] == [None, None]
    assert report.differences == ()


def test_report_explains_itself(llm: Any) -> None:
    found = run(llm, PROMPTS, BenchConfig()).as_json()
    assert found["prompts"] == {"name": "two", "sha256": "0" * 64, "count": 2}
    assert {"date", "machine", "versions", "config", "definitions"} <= found.keys()
    assert found["versions"].keys() == {"python", "dspark", "torch"}
    explained = {name for names in DEFINITIONS for name in names.split(", ")}
    assert found["results"][0].keys() - {"drafter"} == explained


def test_variants_are_drafters_in_each_mode() -> None:
    several = BenchConfig(drafters=("ngram", "blind"), pipeline=("off", "on", "off"))
    assert several.variants == {
        "none": ("none", "off"),
        "ngram+off": ("ngram", "off"),
        "ngram+on": ("ngram", "on"),
        "blind+off": ("blind", "off"),
        "blind+on": ("blind", "on"),
    }
    assert list(BenchConfig().variants) == ["none", "ngram"]
    for wrong in ((), ("perhaps",)):
        with pytest.raises(ConfigError, match="pipeline mode"):
            BenchConfig(pipeline=wrong)


def test_delta_is_what_hits_lose(llm: Any) -> None:
    """Half of the rounds are hits, and two tokens a round become one and a half."""
    report = run(llm, PROMPTS, BenchConfig(pipeline=("off", "on")))
    _, off, on = report.results
    assert off.delta is None and on.delta is None  # there were no hits
    on = replace(on, hit_rate=0.5, accepted_length=1.5)
    results = {"ngram+off": replace(off, accepted_length=2.0), "ngram+on": on}
    speeds = {name: [1.0] for name in results}
    found = _with_gain("ngram+on", results, speeds, report.config)
    assert found.delta == pytest.approx(0.5)
    assert found.gain_predicted == pytest.approx(0.75 * (1 + 1 / 11) / (1 + 0.5 / 11))


def test_the_gain_of_two_lanes_and_the_formula(llm: Any) -> None:
    """The stand-in is as fast with two lanes: 1 of 12 ms drafts, nothing is ever ready."""
    report = run(llm, PROMPTS, BenchConfig(pipeline=("off", "on"), repeat=2))
    none, off, on = report.results
    assert none.gain_vs_off is off.gain_vs_off is none.hit_rate is off.hit_rate is None
    assert (on.hit_rate, on.gain_vs_off) == (0, pytest.approx(1))
    assert on.gain_predicted == pytest.approx(1)
    assert report.emulated is None and on.pipeline == "on"
