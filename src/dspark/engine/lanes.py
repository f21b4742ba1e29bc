"""Whether an engine gets a second lane, and the lane itself.

    off    one lane: the plain round, the drafter in the engine's own process
    on     two lanes: every round overlaps, whatever it costs
    auto   two lanes where they can be expected to pay here, and in rounds where they do

`auto` decides between texts, step by step, so that nobody pays for finding out what is evident
(`schedule.overlap`). A drafter that costs nothing, a single core: off, at once. Else the first
rounds have one lane, in the plain engine with the drafter in this process, which is `off` to the
letter. When enough of them have shown that two lanes could gain by their times and hits, a few
rounds are timed on the threads that each lane would have to itself. Only where that promises a
gain, too, the lane's process is begun, beside the texts, and used for the first one that begins
when it is ready. A pair that loses after all goes back to the plain engine with the next text.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dspark.drafters.base import Drafter, build
from dspark.engine import profile
from dspark.engine.emulate import EmulatedTarget, Emulation
from dspark.engine.engine import Engine, TokenText
from dspark.engine.lane import InlineLane, Lane
from dspark.engine.lane_process import ProcessLane
from dspark.engine.pipeline import PipelinedEngine
from dspark.engine.placement import Placement
from dspark.engine.timeline import Timeline
from dspark.models.build import build_target, choose
from dspark.models.loading import load_checkpoint
from dspark.models.target import Target
from dspark.schedule.cost import CostTable
from dspark.schedule.overlap import (
    EVIDENCE,
    MARGIN,
    STEP_MS,
    LaneTimes,
    Overlap,
    PlainRounds,
    foreseen_gain,
)
from dspark.schedule.scheduler import Scheduler


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter that another process can build: it loads what `LLM` loaded, and its own weights."""

    model: str
    dtype: str
    device: str
    num_slots: int
    max_context: int
    drafter: str
    num_draft_tokens: int | None

    def __call__(self) -> Drafter:
        checkpoint = load_checkpoint(self.model)
        choice = choose(checkpoint.config, self.dtype, self.device)
        target = build_target(
            checkpoint, choice, num_slots=self.num_slots, max_context=self.max_context
        )
        return build(
            self.drafter,
            target,
            self.num_draft_tokens,
            model=checkpoint.name,
            carried=checkpoint.carried,
        )


@dataclass(frozen=True)
class Verdict:
    """Whether there are two lanes, and in a few words why."""

    two: bool
    reason: str
    times: LaneTimes | None = None
    """What was measured to decide."""
    overlaps: dict[int, Overlap] | None = None
    """Which rounds overlap, by load; None: all of them."""

    def mode(self, asked: str) -> str:
        """What came of the mode that was asked for."""
        return asked if self.two else "off"

    def scaled(self, table: CostTable | None) -> CostTable | None:
        """A table of rounds on all threads as one of overlapped rounds."""
        if table is None or self.times is None or not self.two:
            return table
        verify, draft = self.times.slower
        return table.scaled(verify=verify, draft=draft)


class Lanes:
    """Builds the engines of an `LLM`; each drafter that ever had a lane keeps its process."""

    def __init__(
        self,
        target: Target,
        threads: int,
        emulation: Emulation | None = None,
        placement: Placement | None = None,
    ) -> None:
        """`placement`: where drafters draft; None: where the target is, lanes are processes."""
        self._placement = placement if placement is not None and placement.threads else None
        self._target, self._threads, self._emulation = target, threads, emulation
        self._times: dict[DrafterSpec, LaneTimes] = {}
        self._open: dict[DrafterSpec, Lane] = {}
        self._steps: dict[DrafterSpec, float] = {}
        """Milliseconds to ask and be answered."""
        self._failed: dict[DrafterSpec, str] = {}
        """Why there will be no second lane."""
        self._plain: dict[tuple[DrafterSpec, str], PlainRounds] = {}
        self._overlaps: dict[tuple[DrafterSpec, str], dict[int, Overlap]] = {}

    @property
    def measurements(self) -> int:
        """How often rounds were measured: each time nothing in the target's slots is anybody's."""
        return len(self._times)

    def plain(self, spec: DrafterSpec, verify: str) -> PlainRounds:
        """What rounds of this drafter in one lane have shown; whoever schedules them adds to it."""
        return self._plain.setdefault((spec, verify), PlainRounds())

    def decide(self, mode: str, drafter: Drafter, spec: DrafterSpec, verify: str) -> Verdict:
        """How many lanes this drafter gets now; the target and the drafter must be idle. Asking
        again is cheap, but for the one time that rounds are measured."""
        if mode == "off":
            return Verdict(False, "as asked")
        if not drafter.cap or not drafter.ahead:
            return Verdict(False, f"{spec.drafter} drafts in no time")
        if mode == "on":
            times = None if self._hindered else self._measured(drafter, spec)
            return Verdict(True, "as asked", times)
        plain = self.plain(spec, verify)
        hindered = self._hindered or self._failed.get(spec)
        if hindered:
            return Verdict(False, hindered)
        if plain.count < EVIDENCE:
            return Verdict(False, "the first rounds of a drafter have one lane")
        # One that grows couples a token more than any that was verified; it is as often right.
        hits = plain.hit_rate * (plain.hit_rate if drafter.grows else 1.0)
        step = self._steps.get(spec, STEP_MS)
        gain = foreseen_gain(plain.lane_times(None), hits, step_ms=step)
        times = None
        if gain > MARGIN:
            times = self._measured(drafter, spec)
            gain = foreseen_gain(plain.lane_times(times), hits, step_ms=step)
        if gain <= MARGIN:
            return Verdict(False, f"{gain:.2f} times expected of two lanes, at {hits:.0%} hits")
        made = {1: Overlap(plain=plain)}
        overlaps = self._overlaps.setdefault((spec, verify), made)
        if overlaps[1].rests:
            return Verdict(False, f"two lanes reached {overlaps[1].gain or 0:.2f} times one here")
        if not self._is_ready(drafter, spec):
            return Verdict(False, self._failed.get(spec, "a second lane is being begun"))
        if spec not in self._steps:
            self._steps[spec] = self._open[spec].round_trip_ms()
            return self.decide(mode, drafter, spec, verify)
        return Verdict(True, f"{gain:.2f} times expected, at {hits:.0%} hits", times, overlaps)

    def engine(
        self,
        verdict: Verdict,
        drafter: Drafter,
        spec: DrafterSpec,
        tokenizer: TokenText,
        scheduler: Scheduler,
        prefix_reuse: bool,
    ) -> Engine:
        """An engine by this verdict. Raises ResourceError if two lanes were asked for and the
        second cannot be begun."""
        target: Target = self._target
        if self._emulation is not None:
            target = EmulatedTarget(target, self._emulation.verify_ms)
        options: dict[str, Any] = {"scheduler": scheduler, "prefix_reuse": prefix_reuse}
        if verdict.two:
            lane = self._begin(drafter, spec)
            for slot in range(self._target.num_slots):
                lane.release(slot)
            return PipelinedEngine(
                target,
                lane,
                tokenizer,
                cap=drafter.cap,
                always=verdict.overlaps is None,
                set_threads=lambda overlapped: self._set_threads(lane, overlapped),
                overlaps=verdict.overlaps,
                **options,
            )
        torch.set_num_threads(self._threads)
        if self._emulation is not None and drafter.cap:
            drafter = InlineLane(drafter, self._emulation.draft_ms)
        return Engine(target, drafter, tokenizer, **options)

    def close(self) -> None:
        """End all processes."""
        for lane in self._open.values():
            lane.close()
        self._open.clear()

    # -- the decision ----------------------------------------------------------------------------

    @property
    def _apart(self) -> tuple[int, int]:
        """Threads of the target and of the drafter when both work."""
        lane = max(self._threads // 4, 1)
        return max(self._threads - lane, 1), lane

    def _set_threads(self, lane: Lane, overlapped: bool) -> None:
        """Lanes that take turns have all threads in turn."""
        verify, draft = self._apart if overlapped else (self._threads, self._threads)
        torch.set_num_threads(verify)
        lane.set_threads(draft)

    @property
    def _hindered(self) -> str:
        """Why nothing can be foreseen of two lanes here; empty if it can."""
        if self._emulation is not None:
            return ""
        if self._placement is not None:
            return "what a thread gains is not foreseen: --pipeline on asks for it"
        if cores() < 2 or self._threads < 2:
            return "one core has no room for two lanes"
        return f"nothing is measured, {profile.OFF} is set" if profile.is_off() else ""

    def _measured(self, drafter: Drafter, spec: DrafterSpec) -> LaneTimes | None:
        """Rounds on the threads of both lanes; None where times are those of another device."""
        if self._emulation is not None:
            return None
        if spec not in self._times:
            self._times[spec] = profile.lane_times(
                self._target, drafter, self._threads, self._apart
            )
        return self._times[spec]

    def _is_ready(self, drafter: Drafter, spec: DrafterSpec) -> bool:
        """Whether the lane is there; if not, it is begun and nobody waits for it."""
        lane = self._begin(drafter, spec, wait=False)
        if lane.dead:
            self._failed[spec] = "the drafter's process could not be started, or died too often"
        return lane.alive

    def _begin(self, drafter: Drafter, spec: DrafterSpec, *, wait: bool = True) -> Lane:
        """The lane of this drafter."""
        lane = self._open.get(spec)
        if lane is None or (lane.dead and wait):
            more = drafter.cap + drafter.grows
            pad_ms = 0.0 if self._emulation is None else self._emulation.draft_ms
            if self._placement is not None:
                lane = self._placement.lane(spec.drafter, more, pad_ms)
            else:
                lane = ProcessLane(
                    replace(spec, num_draft_tokens=more),
                    num_slots=self._target.num_slots,
                    vocab_size=self._target.vocab_size,
                    max_draft=more,
                    threads=self._apart[1],
                    pad_ms=pad_ms,
                )
            self._open[spec] = lane
        if wait:
            lane.wait()
        return lane


def record(engine: Engine) -> Timeline | None:
    """What both lanes of an engine do from now on; None with one lane."""
    return engine.record() if isinstance(engine, PipelinedEngine) else None


def cores() -> int:
    """That this process may use."""
    usable: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
