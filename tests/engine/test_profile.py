"""Measuring costs: a table that a scheduler can use, kept, found again, refused where foreign."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.drafters.base import DraftContext, Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.engine import profile
from dspark.engine.engine import Engine
from dspark.models.decoder import Decoder
from dspark.models.target import Batch, TargetOutput
from dspark.schedule.admission import best_capacity
from dspark.schedule.cost import CostTable, Curve, table_path
from dspark.schedule.scheduler import Scheduler
from dspark.types import Draft
from tests.drafters import tiny_drafters
from tests.engine.oracle import ByteTokenizer, play, reference, request
from tests.tiny import target

NAME = {"model": "tiny"}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return target(dtype="int8", num_slots=4)


@pytest.mark.parametrize("form", ["vanilla", "mtp"])
def test_a_measured_table_and_an_idle_drafter_behind_it(model: Decoder, form: str) -> None:
    drafter = tiny_drafters.drafter(model, form)
    measured = profile.measure(model, drafter, NAME, 0.2)
    assert 1 < measured.max_tokens <= 4 * (drafter.cap + 1)
    lengths = [block for block, _ in measured.draft]
    assert lengths[-1] == drafter.cap and set(lengths) <= {drafter.cap // 2, drafter.cap}
    assert measured.draft_ms(1, drafter.cap) > 0 and measured.other_ms(4) > 0
    assert {1, 4} <= set(measured.other.at)
    engine = Engine(model, drafter, ByteTokenizer(), scheduler=Scheduler(table=measured))
    assert engine.scheduler.adapts
    played = play(engine, [request([5, 9, 200], max_tokens=20)])
    assert played.ids("r") == reference(model, [5, 9, 200], 20)


@dataclass
class Machine:
    """A target with a clock of its own: a pass takes `row` seconds for each row and for 14 more."""

    row: float
    num_slots: int = 8
    vocab_size: int = 257
    max_context: int = 2048
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    now: float = 0.0
    rows: list[int] = field(default_factory=list)
    """Of each pass."""

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        self.rows.append(batch.num_tokens)
        self.now += self.row * (14 + batch.num_tokens)
        return TargetOutput(torch.zeros(len(batch.logit_rows), self.vocab_size), None)

    def clock(self) -> float:
        return self.now


class Timed(Drafter):
    """Seven drafts, at the price of two rows a request."""

    cap = 7

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._machine.now += self._machine.row * 2 * len(contexts)
        return [Draft((0,) * min(self.cap, c.max_tokens)) for c in contexts]


@pytest.mark.parametrize("row_ms", [0.05, 0.5, 2.0, 4.0])
def test_the_deadline_holds_on_slow_machines_too(row_ms: float) -> None:
    """At 2 ms a row, a round of all eight users takes 108 ms and a pass of 64 rows 156 ms."""
    machine = Machine(row_ms / 1e3)
    measured = profile.measure(machine, Timed(machine), NAME, 3.0, machine.clock)
    assert machine.now < 3.0 * 1.1
    assert {1, 2, 4, 8, 16, 32} <= set(measured.verify.at)
    for tokens in (1, 24, 64):
        assert measured.verify_ms(tokens) == pytest.approx(row_ms * (14 + tokens))
    assert {1, 8} <= set(measured.other.at) and {1, 8} <= set(measured.draft[0][1].at)
    assert measured.slope.at != (1,), "long contexts were measured"
    if row_ms < 1:
        assert len(measured.verify.at) > 20 and set(measured.other.at) == {1, 2, 4, 8}


PASS_MS = {1: 10.6, 2: 13.7, 3: 16.2, 4: 19.7, 5: 24.2, 6: 29.1, 8: 36.8, 12: 53.0, 16: 69.5}
"""A pass of SmolLM2 by rows, docs/results.md; it goes on with its slope."""


@pytest.mark.parametrize("row_ms", [0.25, 1.0])
def test_a_short_measurement_decides_as_a_whole_table_would(row_ms: float) -> None:
    """At every load what it chooses reaches all but two hundredths of the best rate there is."""
    real = Curve(tuple(PASS_MS), tuple(PASS_MS.values()))
    scale, k, most = row_ms / 4.1, 7, 32

    class Real(Machine):
        def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
            before = self.now
            out = super().forward(batch, feature_layers)
            self.now = before + scale * real(batch.num_tokens) / 1e3
            return out

    machine = Real(row_ms / 1e3, num_slots=most)
    short = profile.measure(machine, Timed(machine), NAME, 3.0, machine.clock)
    assert machine.now < 3.3 and (row_ms < 1 or short.max_tokens < most * (k + 1))
    passes = [(n, 0.0, scale * real(n)) for n in range(1, most * (k + 1) + 1)]
    drafting = [(n, k, row_ms * 2 * n) for n in (1, most)]
    whole = CostTable.fit(NAME, passes, drafting)
    # Rounds are timed by the engine's own clock, which is the real one.
    short = replace(short, draft=whole.draft, other=whole.other)
    for users, chance in itertools.product((1, 2, 4, 8, 16, 32), (0.2, 0.5, 0.7, 0.9)):
        values = np.repeat(np.cumprod(np.full(k, chance)), users)
        last = users * (k + 1)
        costs = [np.array(t.curve(users, last, requests=users, block=k)) for t in (whole, short)]
        best, chosen = (best_capacity(values, c, users) for c in costs)
        tau = np.cumsum([users, *values])
        rate = tau / costs[0]
        assert rate[chosen] > 0.98 * rate[best], (users, chance)


def test_far_too_slow_machines_are_asked_for_the_least() -> None:
    """A second a row: nothing is measured twice, and nothing beyond where rows cost the same."""
    machine = Machine(1.0)
    measured = profile.measure(machine, Timed(machine), NAME, 3.0, machine.clock)
    passes, one, all_ = [1, 1, 2, 4, 8, 16, 32, 32], [2, 1, 1], [16, 8, 8]
    assert machine.rows == [*passes, *one, *all_]
    assert measured.draft[0][1].at == (1, 8)
    assert measured.verify_ms(64) == pytest.approx(78e3), "by the slope"


def test_passes_that_are_long_from_the_first_row_on_are_measured_to_the_end() -> None:
    """Bound by memory: 48 rows take the second that one takes, and more take more."""

    class Bound(Machine):
        def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
            self.now += 1.0 + 0.1 * max(batch.num_tokens - 48, 0)
            return super().forward(batch, feature_layers)

    machine = Bound(1e-6)
    assert profile.measure(machine, Timed(machine), NAME, 3.0, machine.clock).max_tokens == 64


def test_it_is_announced_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(profile.OFF)
    machine, heard = Machine(1e-6), []

    def measure(*_: object) -> CostTable:
        heard.extend(r.getMessage() for r in caplog.records)
        return CostTable.fit(NAME, [(1, 0.0, 1.0), (2, 0.0, 2.0)])

    monkeypatch.setattr(profile, "measure", measure)
    with caplog.at_level(logging.INFO, logger=profile.__name__):
        profile.obtain(machine, lambda: Timed(machine), NAME)
        profile.obtain(machine, lambda: Timed(machine), NAME)
    assert heard == ["measuring what a round costs (about 3 s, once)"]
    assert len(caplog.records) == 1  # a table that is found needs no time


def test_short_slots_are_no_obstacle() -> None:
    small = target(dtype="int8", num_slots=4, max_context=16)
    assert profile.measure(small, NgramDrafter(small), NAME, 0.3).verify_ms(1) > 0


def test_kept_found_again_and_measured_anew_when_damaged(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "SECONDS", 0.2)
    drafter = NgramDrafter(model)
    asked = profile.obtain(model, lambda: drafter, NAME)
    assert asked.table is None and profile.OFF in asked.reason  # as all tests run
    monkeypatch.delenv(profile.OFF)
    first = profile.obtain(model, lambda: drafter, NAME)
    assert first.table is not None and "measured in" in first.reason
    again = profile.obtain(model, lambda: pytest.fail("loaded for nothing"), NAME)
    assert again.table == first.table and "earlier" in again.reason
    table_path(NAME).write_text("{")
    assert "not usable" in profile.obtain(model, lambda: drafter, NAME).reason
    assert CostTable.load(table_path(NAME), NAME).verify_ms(1) > 0
