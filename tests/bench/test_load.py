"""`bench.load`: configurations, turns, runs that agree, what they come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dspark.bench.closed_loop import Text
from dspark.bench.load import LoadConfig, Run, Setup, measure, prepare, write_plain
from dspark.bench.load_report import DEFINITIONS, LoadReport, Percentiles, percentile
from dspark.bench.prompts import PromptSet
from dspark.errors import ConfigError, InvalidRequestError
from dspark.types import Stats
from tests.bench.load_llm import LoadLLM, Ticks, prompt_set

SMALL = LoadConfig(users=(1, 2), verify=("all", "causal"), tokens=20, max_tokens=16, warm_up=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"users": ()}, "no users"),
        ({"users": (0, 1)}, "users=.0, 1. is out of range"),
        ({"fixed": (0,)}, "fixed=.0,. is out of range"),
        ({"tokens": 0}, "tokens=0 measures nothing"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"repeats": 0}, "repeats=0"),
        ({"warm_up": -1}, "warm_up=-1"),
        ({"verify": ("auto", "wise")}, "unknown way to verify 'wise'"),
    ],
)
def test_impossible_configs(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadConfig(**options)


def test_configs_are_put_in_order() -> None:
    config = LoadConfig(users=(4, 1, 4), fixed=(3, 2), drafters=("none", "ngram", "ngram"))
    assert (config.users, config.fixed, config.drafters) == ((1, 4), (2, 3), ("ngram",))


def test_setups_are_plain_mtp_every_length_and_the_schedules() -> None:
    llm = LoadLLM()
    setups = prepare(llm, SMALL)
    assert [(s.name, s.kind, s.drafter, s.block, s.verify) for s in setups] == [
        ("plain", "plain", "none", None, "all"),
        ("mtp1", "mtp1", "mtp1", 1, "all"),
        ("best K=1", "fixed", "best", 1, "static:1"),
        ("best K=2", "fixed", "best", 2, "static:2"),
        ("best K=3", "fixed", "best", 3, "static:3"),
        ("best all", "scheduled", "best", None, "all"),
        ("best causal", "scheduled", "best", None, "causal"),
    ]
    assert setups[-1].reason == "as it is"


def test_setups_without_an_mtp_module_and_with_chosen_lengths() -> None:
    names = [s.name for s in prepare(LoadLLM(mtp=False), replace(SMALL, fixed=(2,)))]
    assert names == ["plain", "best K=2", "best all", "best causal"]
    asked_for = [s.name for s in prepare(LoadLLM(), replace(SMALL, drafters=("mtp1",), fixed=(1,)))]
    assert asked_for == ["plain", "mtp1 K=1", "mtp1 all", "mtp1 causal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"users": (1, 5)}, "5 users want as many slots, and 4 were made"),
        ({"drafters": ("psychic",)}, "no drafter 'psychic'"),
        ({"fixed": (4,)}, "with blocks of 4"),
    ],
)
def test_what_the_model_lacks_is_told_before_anything_is_measured(
    options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(LoadLLM(), replace(SMALL, **options))


def test_plain_texts_and_a_prompt_that_does_not_fit() -> None:
    llm = LoadLLM()
    heard: list[Any] = []
    assert write_plain(llm, prompt_set(), SMALL, heard.append) == llm.texts
    assert len(heard) == 2
    long = PromptSet("long", "0" * 64, ("ok", "x" * 256))
    with pytest.raises(InvalidRequestError, match="prompt 2 has 256 tokens and the context holds"):
        write_plain(llm, long, SMALL)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    llm = LoadLLM()
    config = replace(SMALL, repeats=2)
    return list(measure(llm, prepare(llm, config), llm.texts, config, Ticks()))


def test_configurations_take_turns(runs: list[Run]) -> None:
    assert [(r.repeat, r.users) for r in runs[::7]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    names = [r.setup for r in runs]
    assert names[:3] == ["plain", "mtp1", "best K=1"]
    assert names[7:9] == ["mtp1", "best K=1"]  # each load begins with another one
    assert all(len(set(names[i : i + 7])) == 7 for i in range(0, 28, 7))


def test_runs_do_what_their_configuration_says(runs: list[Run]) -> None:
    for r in runs:
        assert r.differences == () and r.messages == ()
        assert r.window_tokens >= 20 and r.seconds == pytest.approx(r.steps * 0.01)
        assert r.window_seconds > r.seconds > 0
        assert len(r.speeds) == r.users
        longest = {"plain": 0, "mtp1": 1, "best K=1": 1, "best K=2": 2}.get(r.setup, 3)
        verified = len(r.stats.verified_at)
        assert verified == longest or (r.setup == "best causal" and 0 < verified < longest)


def test_a_wrong_text_names_its_configuration_and_load() -> None:
    llm = LoadLLM(mtp=False)
    first, second = llm.texts
    wrong = (Text(first.prompt, (first.plain[0] ^ 1, *first.plain[1:])), second)
    config = replace(SMALL, users=(2,), verify=(), fixed=(2,), repeats=1)
    setups = prepare(llm, config)
    report = report_of(setups, list(measure(llm, setups, wrong, config, Ticks())), config)
    assert report.differences == tuple(
        f"{name}, 2 users: prompt 1 was answered differently from token 1 on"
        for name in ("plain", "best K=2")
    )
    assert [r.identical_to_plain for r in report.results()] == [False, False]


# -- what the runs come to -------------------------------------------------------------------------

SETUPS = (
    Setup("plain", "plain", "none", None, "all"),
    Setup("d K=1", "fixed", "d", 1, "static:1"),
    Setup("d K=2", "fixed", "d", 2, "static:2"),
    Setup("d auto", "scheduled", "d", None, "auto"),
)


def run(setup: str, users: int, repeat: int, speed: float, **fields: Any) -> Run:
    stats = Stats(rounds=40, drafted=100, verified=60, accepted=30, predicted=28.5, round_tokens=70)
    given: dict[str, Any] = {
        "stats": stats,
        "seconds": 70 / speed,
        "speeds": (speed / users,) * users,
        "window_seconds": 100 / speed,
        "window_tokens": 80,
        "ttft_ms": (50.0,),
        "gaps": ((20.0, 2), (30.0, 1)),
        "texts": 1,
        "differences": (),
    }
    return Run(setup, users, repeat, 20, **given | fields)


def report_of(setups: Any, runs: list[Run], config: LoadConfig) -> LoadReport:
    return LoadReport("small", "fp32", "cpu", 1, config, prompt_set(), tuple(setups), tuple(runs))


def known(measured: dict[str, list[list[float]]], **fields: Any) -> LoadReport:
    """Speeds by configuration, load (1 and 8 users) and repeat."""
    config = LoadConfig(users=(1, 8), repeats=3)
    made = [
        run(name, users, repeat, speed, **fields)
        for name, loads in measured.items()
        for users, repeats in zip((1, 8), loads, strict=False)
        for repeat, speed in enumerate(repeats)
    ]
    return report_of(SETUPS, made, config)


SPEEDS = {
    "plain": [[100, 50, 100], [400, 400, 400]],
    "d K=1": [[110, 60, 120], [400, 440, 380]],
    "d K=2": [[150, 70, 130], [300, 300, 310]],
    "d auto": [[150, 77, 143], [420, 440, 399]],
}


def test_ratios_are_medians_within_repeats() -> None:
    report = known(SPEEDS)
    rows = {(r.configuration, r.users): r for r in report.results()}
    assert list(rows) == [(s.name, u) for u in (1, 8) for s in SETUPS]
    auto = rows["d auto", 1]
    assert auto.tokens_per_second == pytest.approx(143)
    assert auto.vs_plain == pytest.approx(1.5)  # 1.5, 1.54, 1.43
    assert auto.vs_best_fixed == pytest.approx(1.1)  # of K=2: 1, 1.1, 1.1
    assert rows["d auto", 8].vs_best_fixed == pytest.approx(1.05)  # of K=1: 1.05, 1, 1.05
    assert rows["plain", 8].vs_best_fixed is None and rows["plain", 8].vs_plain == 1
    assert rows["d K=2", 1].vs_best_fixed == 1
    assert report.complete


def test_comparisons_are_geometric_means_over_loads() -> None:
    one, two = known(SPEEDS).comparisons()
    assert (one.scheduled, one.fixed, one.users) == ("d auto", "d K=1", (1, 8))
    # 150/110, 77/60, 143/120: the median is 77/60. Then 1.05, 1, 1.05.
    assert one.mean == pytest.approx((77 / 60 * 1.05) ** 0.5)
    assert (one.worst, one.worst_users) == (pytest.approx(1.05), 8)
    assert (two.fixed, two.worst_users) == ("d K=2", 1)


def test_sums_and_percentiles() -> None:
    row = known(SPEEDS).results()[-1]
    assert (row.tokens, row.texts, row.repeats) == (240, 3, 3)
    assert row.with_prompts_tokens_per_second == pytest.approx(0.8 * 420)
    assert (row.drafted, row.scheduled, row.predicted, row.accepted) == (300, 180, 85.5, 90)
    assert row.rows_per_round == pytest.approx((120 + 180) / 60)
    assert row.budget == pytest.approx(1.5) and row.accepted_length == pytest.approx(1.75)
    assert row.user_tokens_per_second == pytest.approx(420 / 8)
    assert row.ttft_ms == Percentiles(50, 50, 50)
    assert row.itl_ms == Percentiles(10, 30, 30)  # two tokens of 10 ms for each of 30


def test_the_slowest_tenth_of_the_users() -> None:
    report = known({"plain": [[100.0] * 3]}, speeds=tuple(float(n) for n in range(1, 21)))
    (row,) = report.results()
    assert row.user_tokens_per_second_p10 == 2 and row.user_tokens_per_second == 10.5


def test_what_was_stopped_is_reported_as_far_as_it_came() -> None:
    report = known({"plain": [[100.0]], "d auto": [[150.0, 150.0]]}, ttft_ms=(), speeds=())
    assert not report.complete
    plain, auto = report.results()
    assert (auto.repeats, auto.vs_plain, auto.vs_best_fixed) == (2, 1.5, None)
    assert plain.ttft_ms is None and plain.user_tokens_per_second is None
    assert report.comparisons() == []


def test_windows_full_of_prompts_have_no_speed() -> None:
    report = known({name: [[100.0] * 3] for name in SPEEDS}, seconds=0.0, speeds=())
    assert all(r.tokens_per_second is r.vs_plain is r.vs_best_fixed is None
               for r in report.results())  # fmt: skip
    assert report.comparisons() == []


def test_percentile_is_the_nearest_rank() -> None:
    values = [(float(n), 1) for n in range(100, 0, -1)]
    assert [percentile(values, p) for p in (0.0, 0.5, 0.95, 1.0)] == [1, 50, 95, 100]
    assert percentile([(1.0, 99), (9.0, 1)], 0.99) == 1


def test_the_report_explains_itself() -> None:
    found = known(SPEEDS).as_json()
    explained = {name for names in DEFINITIONS for name in names.split(", ")}
    unexplained = {"configuration", "kind", "repeats"}
    also = {"user_tokens_per_second_p10"}  # in the words on user_tokens_per_second
    assert found["results"][0].keys() - unexplained - also == explained - {"K"}
    assert found["complete"] and len(found["comparisons"]) == 2
    assert {"machine", "versions", "config", "date", "configurations"} <= found.keys()
