"""Who gets a second lane: what is evident costs nothing, the rest is measured shortly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.drafters.base import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoDrafter
from dspark.engine import profile
from dspark.engine.emulate import Emulation
from dspark.engine.engine import Engine
from dspark.engine.lane import InlineLane
from dspark.engine.lanes import DrafterSpec, Lanes, Verdict, cores
from dspark.engine.pipeline import PipelinedEngine
from dspark.schedule.cost import CostTable
from dspark.schedule.overlap import LaneTimes
from dspark.schedule.scheduler import Scheduler
from tests.engine import lanes
from tests.engine.oracle import ByteTokenizer, play, request

SPEC = DrafterSpec("m", "fp32", "cpu", 4, 64, "dspark", None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[LaneTimes]:
    """Two cores, and what is measured on them: a test puts it here; what was asked for is gone."""
    times: list[LaneTimes] = []
    monkeypatch.setattr("dspark.engine.lanes.cores", lambda: 2)
    monkeypatch.setattr(profile, "is_off", lambda: False)
    monkeypatch.setattr(profile, "lane_times", lambda *a: times.pop())
    return times


def decide(mode: str, drafter: Drafter | None = None, **options: Any) -> Verdict:
    made = Lanes(lanes.table_target(), options.pop("threads", 2), **options)
    return made.decide(mode, drafter or lanes.trained("vanilla"), SPEC)


def test_what_is_evident_is_not_measured(measured: list[LaneTimes]) -> None:
    """Nothing is left to pop, so a measurement would raise."""
    target = lanes.table_target()
    assert not decide("off").two
    for drafter in (NoDrafter(target), NgramDrafter(target)):
        for mode in ("on", "auto"):
            verdict = decide(mode, drafter)
            assert not verdict.two and "no time" in verdict.reason
    one = decide("auto", threads=1)
    assert not one.two and "one core" in one.reason


def test_times_decide(measured: list[LaneTimes]) -> None:
    """A target that uses both cores well keeps them; one that does not shares them."""
    measured.append(LaneTimes(20, 6, 38, 11))
    verdict = decide("auto")
    assert not verdict.two and verdict.reason.startswith("0.6")
    measured.append(LaneTimes(20, 6, 20, 6))
    verdict = decide("auto")
    assert verdict.two and "1.19 times expected" in verdict.reason
    measured.append(LaneTimes(20, 6, 38, 11))
    assert decide("on").two


def test_a_verdict_is_found_once(measured: list[LaneTimes]) -> None:
    made = Lanes(lanes.table_target(), 2)
    measured.append(LaneTimes(20, 6, 20, 6))
    drafter = lanes.trained("vanilla")
    first = made.decide("auto", drafter, SPEC)
    assert made.decide("auto", drafter, SPEC) is first


def test_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.engine.lanes.cores", lambda: 2)
    verdict = decide("auto")
    assert not verdict.two and "DSPARK_NO_PROFILE" in verdict.reason
    assert decide("on").two


def test_emulated_times_need_no_measurement() -> None:
    assert decide("auto", emulation=Emulation(20, 10)).two
    assert not decide("auto", emulation=Emulation(20, 0.1)).two
    half = decide("auto", emulation=Emulation(20))
    assert not half.two and "only one" in half.reason


def test_a_table_is_scaled_to_the_threads_of_a_lane() -> None:
    passes = [(n, 64.0, 10.0 + n) for n in (1, 2, 4)]
    table = CostTable.fit({}, passes, [(1, 2, 3.0)], [(1, 0.5)])
    verdict = Verdict(True, "", LaneTimes(10, 4, 15, 6))
    scaled = verdict.scaled(table)
    assert scaled is not None
    assert scaled.verify_ms(2, 0) == pytest.approx(1.5 * table.verify_ms(2, 0))
    assert scaled.draft_ms(1, 2) == pytest.approx(1.5 * table.draft_ms(1, 2))
    assert Verdict(False, "", verdict.times).scaled(table) is table
    assert Verdict(True, "").scaled(None) is None


def test_times_of_lanes_are_those_of_rounds() -> None:
    """And the threads are what they were, the drafter idle."""
    target = lanes.table_target()
    drafter = lanes.trained("vanilla")
    before = torch.get_num_threads()
    times = profile.lane_times(target, drafter, before, (1, 1))
    assert torch.get_num_threads() == before
    assert min(times.verify, times.draft, times.verify_apart, times.draft_apart) > 0
    assert cores() >= 1


def test_one_lane_with_emulated_times() -> None:
    """Text is what it was, and each part of a round takes at least its time."""
    target = lanes.table_target()
    made = Lanes(target, torch.get_num_threads(), Emulation(4, 3))
    drafter = lanes.trained("vanilla")
    verdict = made.decide("off", drafter, SPEC)
    engine, _ = made.engine(verdict, "off", drafter, SPEC, ByteTokenizer(), Scheduler("all"), False)
    assert not isinstance(engine, PipelinedEngine) and isinstance(engine.drafter.inner, InlineLane)
    played = play(engine, [request((1, 2), max_tokens=12)])
    plain = Engine(target, NoDrafter(target), ByteTokenizer())
    assert played.ids("r") == play(plain, [request((1, 2), max_tokens=12)]).ids("r")
    drafting = [r for r in played.rounds["r"] if r.drafted]
    assert drafting and all(r.draft_ms >= 3 for r in drafting)
    assert all(r.verify_ms >= 4 for r in played.rounds["r"])
