"""Who gets a second lane: what is evident costs nothing, the rest is known from plain rounds."""

from __future__ import annotations

from collections.abc import Callable
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
from dspark.schedule.overlap import EVIDENCE, LaneTimes
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


class Process(InlineLane):
    """A lane that is there when it was looked at as often as `patience`, or never was begun."""

    patience, works = 1, True

    def __init__(self, build: Callable[[], Drafter], *, pad_ms: float, **options: Any) -> None:
        super().__init__(lanes.trained("vanilla"), pad_ms)
        self._looks = 0
        self.dead = not self.works

    @property
    def alive(self) -> bool:
        self._looks += 1
        return self._looks > self.patience


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> type[Process]:
    monkeypatch.setattr("dspark.engine.lanes.ProcessLane", Process)
    monkeypatch.setattr(Process, "works", True)
    return Process


def decide(made: Lanes, mode: str = "auto", drafter: Drafter | None = None) -> Verdict:
    return made.decide(mode, drafter or lanes.trained("vanilla"), SPEC, "all")


def watch(made: Lanes, rounds: int = EVIDENCE, hit: float = 0.9, draft_ms: float = 8.0) -> None:
    for _ in range(rounds):
        made.plain(SPEC, "all").add_round(draft_ms, 20.0, 1.0, 4, hit)


def two_lanes(threads: int = 2, **options: Any) -> Lanes:
    return Lanes(lanes.table_target(), threads, **options)


def test_what_is_evident_is_not_measured(measured: list[LaneTimes]) -> None:
    """Nothing is left to pop, so a measurement would raise; no process is begun."""
    target = lanes.table_target()
    assert not decide(two_lanes(), "off").two
    for drafter in (NoDrafter(target), NgramDrafter(target)):
        for mode in ("on", "auto"):
            verdict = decide(two_lanes(), mode, drafter)
            assert not verdict.two and "no time" in verdict.reason
    one = two_lanes(threads=1)
    watch(one)
    assert not decide(one).two and "one core" in decide(one).reason


def test_plain_rounds_come_first(measured: list[LaneTimes]) -> None:
    """And are all that is needed to see that hits are too few, or drafts too short."""
    made = two_lanes()
    watch(made, EVIDENCE - 1)
    assert "first rounds" in decide(made).reason
    for hit, draft_ms in ((0.3, 8.0), (0.9, 0.5)):
        made = two_lanes()
        watch(made, hit=hit, draft_ms=draft_ms)
        verdict = decide(made)
        assert not verdict.two and f"at {hit:.0%} hits" in verdict.reason
        assert made.measurements == 0


def test_lanes_that_would_take_cores_from_one_another(
    measured: list[LaneTimes], process: type[Process]
) -> None:
    """A target that uses both cores well keeps them; that is measured once."""
    made = two_lanes()
    watch(made)
    measured.append(LaneTimes(20, 8, 38, 15))
    for _ in range(2):
        verdict = decide(made)
        assert not verdict.two and verdict.reason.startswith("0.6")
    assert made.measurements == 1
    measured.append(LaneTimes(20, 8, 38, 15))
    forced = decide(two_lanes(), "on")
    assert forced.two and forced.overlaps is None


def test_a_lane_is_begun_beside_the_texts_and_used_when_it_is_there(
    measured: list[LaneTimes], process: type[Process]
) -> None:
    made = two_lanes()
    watch(made)
    measured.append(LaneTimes(20, 8, 20, 8))
    assert decide(made).reason == "a second lane is being begun"
    verdict = decide(made)
    assert verdict.two and "1.1" in verdict.reason and verdict.overlaps is not None
    drafter = lanes.trained("vanilla")
    engine = made.engine(verdict, drafter, SPEC, ByteTokenizer(), Scheduler("all"), False)
    assert isinstance(engine, PipelinedEngine)
    assert engine.overlap(1).choose() and not engine.overlap(2).choose()
    made.close()


def test_a_pair_that_lost_has_one_lane_until_it_has_earned_another_look(
    measured: list[LaneTimes], process: type[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "patience", 0)
    made = two_lanes()
    watch(made)
    measured.append(LaneTimes(20, 8, 20, 8))
    overlaps = decide(made).overlaps
    assert overlaps is not None
    for _ in range(20):
        overlaps[1].observe(overlapped=True, tokens=3, ms=30.0)
    verdict = decide(made)
    assert not verdict.two and verdict.reason == "two lanes reached 0.72 times one here"
    watch(made, 500)
    assert decide(made).two


def test_a_process_that_does_not_answer_in_time_is_no_gain(
    measured: list[LaneTimes], process: type[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it costs to be answered is measured where the lane is."""
    monkeypatch.setattr(process, "patience", 0)
    monkeypatch.setattr(process, "round_trip_ms", lambda self: 9.0)
    made = two_lanes()
    watch(made)
    measured.append(LaneTimes(20, 8, 20, 8))
    verdict = decide(made)
    assert not verdict.two and verdict.reason.startswith("0.8")


def test_a_process_that_cannot_be_begun(
    measured: list[LaneTimes], process: type[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "works", False)
    made = two_lanes()
    watch(made)
    measured.append(LaneTimes(20, 8, 20, 8))
    for _ in range(2):
        verdict = decide(made)
        assert not verdict.two and "could not be started" in verdict.reason


def test_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.engine.lanes.cores", lambda: 2)
    made = two_lanes()
    watch(made)
    assert not decide(made).two and "DSPARK_NO_PROFILE" in decide(made).reason
    assert decide(made, "on").two


def test_emulated_times_need_no_measurement(process: type[Process]) -> None:
    """Nor a second core: who sleeps takes none."""
    made = two_lanes(1, emulation=Emulation(20, 10))
    watch(made)
    assert "being begun" in decide(made).reason and decide(made).two
    assert made.measurements == 0


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
    verdict = made.decide("off", drafter, SPEC, "all")
    engine = made.engine(verdict, drafter, SPEC, ByteTokenizer(), Scheduler("all"), False)
    assert not isinstance(engine, PipelinedEngine) and isinstance(engine.drafter.inner, InlineLane)
    played = play(engine, [request((1, 2), max_tokens=12)])
    plain = Engine(target, NoDrafter(target), ByteTokenizer())
    assert played.ids("r") == play(plain, [request((1, 2), max_tokens=12)]).ids("r")
    drafting = [r for r in played.rounds["r"] if r.drafted]
    assert drafting and all(r.draft_ms >= 3 for r in drafting)
    assert all(r.verify_ms >= 4 for r in played.rounds["r"])
