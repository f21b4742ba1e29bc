"""Whether an engine gets a second lane, and the lane itself.

    off    one lane: the plain round, the drafter in the engine's own process
    on     two lanes: every round overlaps, whatever it costs
    auto   two lanes where they can be expected to pay here, and in rounds where they do

`auto` decides in two steps, so that nobody pays for finding out what is evident. Before a process
exists, times of a few rounds say what two lanes could gain at best (`schedule.overlap`): on all
threads, and on the threads that each lane would have to itself. A drafter that costs nothing, a
single core, a target that uses all cores well: off, within milliseconds. Where a gain is in sight
the lane is begun, and the engine compares rounds of both kinds from then on.
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
from dspark.engine.timeline import Timeline
from dspark.errors import ResourceError
from dspark.models.build import build_target, choose
from dspark.models.loading import load_checkpoint
from dspark.models.target import Target
from dspark.schedule.cost import CostTable
from dspark.schedule.overlap import MARGIN, LaneTimes, Overlap, foreseen_gain
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

    def mode(self, asked: str) -> str:
        """What came of the mode that was asked for."""
        return asked if self.two else "off"

    def scaled(self, table: CostTable | None) -> CostTable | None:
        """A table of rounds on all threads as one of overlapped rounds."""
        t = self.times
        if table is None or t is None or not (self.two and t.verify and t.draft):
            return table
        return table.scaled(verify=t.verify_apart / t.verify, draft=t.draft_apart / t.draft)


class Lanes:
    """Builds the engines of an `LLM`; each drafter that ever had a lane keeps its process."""

    def __init__(self, target: Target, threads: int, emulation: Emulation | None = None) -> None:
        self._target, self._threads, self._emulation = target, threads, emulation
        self._verdicts: dict[object, Verdict] = {}
        self._open: dict[DrafterSpec, ProcessLane] = {}
        self._overlaps: dict[tuple[str, DrafterSpec], dict[int, Overlap]] = {}

    def decide(self, mode: str, drafter: Drafter, spec: DrafterSpec) -> Verdict:
        """How many lanes this drafter gets. The first `auto` for a drafter measures a few rounds;
        the target and the drafter must be idle."""
        if mode == "off":
            return Verdict(False, "as asked")
        if not drafter.cap or not drafter.ahead:
            return Verdict(False, f"{spec.drafter} drafts in no time")
        if (mode, spec) not in self._verdicts:
            foreseen = self._foresee(drafter)
            if mode == "on":
                foreseen = Verdict(True, "as asked", foreseen.times)
            self._verdicts[mode, spec] = foreseen
        return self._verdicts[mode, spec]

    def engine(
        self,
        verdict: Verdict,
        mode: str,
        drafter: Drafter,
        spec: DrafterSpec,
        tokenizer: TokenText,
        scheduler: Scheduler,
        prefix_reuse: bool,
    ) -> tuple[Engine, Verdict]:
        """An engine by this verdict, and the verdict that came true. Raises ResourceError if two
        lanes were asked for and the second cannot be begun."""
        target: Target = self._target
        if self._emulation is not None:
            target = EmulatedTarget(target, self._emulation.verify_ms)
        options: dict[str, Any] = {"scheduler": scheduler, "prefix_reuse": prefix_reuse}
        if verdict.two:
            try:
                lane = self._begin(drafter, spec)
            except ResourceError as e:
                if mode == "on":
                    raise
                verdict = self._verdicts[mode, spec] = Verdict(False, str(e))
            else:
                pipelined = PipelinedEngine(
                    target,
                    lane,
                    tokenizer,
                    cap=drafter.cap,
                    always=mode == "on",
                    set_threads=lambda overlapped: self._set_threads(lane, overlapped),
                    overlaps=self._overlaps.setdefault((mode, spec), {}),
                    **options,
                )
                return pipelined, verdict
        torch.set_num_threads(self._threads)
        if self._emulation is not None and drafter.cap:
            drafter = InlineLane(drafter, self._emulation.draft_ms)
        return Engine(target, drafter, tokenizer, **options), verdict

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

    def _foresee(self, drafter: Drafter) -> Verdict:
        if self._emulation is not None:
            e = self._emulation
            times = LaneTimes(e.verify_ms, e.draft_ms, e.verify_ms, e.draft_ms)
            if not (e.verify_ms and e.draft_ms):
                return Verdict(False, "only one of both times is emulated")
        elif self._target.device.type != "cpu":
            return Verdict(False, "two lanes were not tried on this device yet")
        elif cores() < 2 or self._threads < 2:
            return Verdict(False, "one core has no room for two lanes")
        elif profile.is_off():
            return Verdict(False, f"nothing is measured, {profile.OFF} is set")
        else:
            times = profile.lane_times(self._target, drafter, self._threads, self._apart)
        gain = foreseen_gain(times)
        said = (
            f"{gain:.2f} times expected: a pass of {times.verify:.1f} ms and a draft of"
            f" {times.draft:.1f} ms take {times.verify_apart:.1f} and {times.draft_apart:.1f} side"
            " by side"
        )
        return Verdict(gain > MARGIN, said, None if self._emulation else times)

    def _begin(self, drafter: Drafter, spec: DrafterSpec) -> Lane:
        """The lane of this drafter, with nothing in its slots."""
        lane = self._open.get(spec)
        if lane is None or lane.dead:
            more = drafter.cap + drafter.grows
            lane = self._open[spec] = ProcessLane(
                replace(spec, num_draft_tokens=more),
                num_slots=self._target.num_slots,
                vocab_size=self._target.vocab_size,
                max_draft=more,
                threads=self._apart[1],
                pad_ms=0.0 if self._emulation is None else self._emulation.draft_ms,
            )
        for slot in range(self._target.num_slots):
            lane.release(slot)
        return lane


def record(engine: Engine) -> Timeline | None:
    """What both lanes of an engine do from now on; None with one lane."""
    return engine.record() if isinstance(engine, PipelinedEngine) else None


def cores() -> int:
    """That this process may use."""
    usable: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
