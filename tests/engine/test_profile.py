"""Measuring costs: a table that a scheduler can use, kept, found again, refused where foreign."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.drafters.ngram import NgramDrafter
from dspark.engine import profile
from dspark.engine.engine import Engine
from dspark.models.decoder import Decoder
from dspark.schedule.cost import CostTable, table_path
from dspark.schedule.scheduler import Scheduler
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
    assert measured.max_tokens == 4 * (drafter.cap + 1)
    assert [block for block, _ in measured.draft] == [drafter.cap]
    assert measured.draft_ms(1, drafter.cap) > 0 and measured.other_ms(4) > 0
    assert {1, 4} <= set(measured.other.at)
    engine = Engine(model, drafter, ByteTokenizer(), scheduler=Scheduler(table=measured))
    assert engine.scheduler.adapts
    played = play(engine, [request([5, 9, 200], max_tokens=20)])
    assert played.ids("r") == reference(model, [5, 9, 200], 20)


def test_short_slots_are_no_obstacle() -> None:
    small = target(dtype="int8", num_slots=4, max_context=16)
    assert profile.measure(small, NgramDrafter(small), NAME, 0.3).verify_ms(1) > 0


def test_kept_found_again_and_measured_anew_when_damaged(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "SECONDS", 0.2)
    drafter = NgramDrafter(model)
    asked = profile.obtain(model, drafter, NAME)
    assert asked.table is None and profile.OFF in asked.reason  # as all tests run
    monkeypatch.delenv(profile.OFF)
    first = profile.obtain(model, drafter, NAME)
    assert first.table is not None and "measured in" in first.reason
    again = profile.obtain(model, drafter, NAME)
    assert again.table == first.table and "earlier" in again.reason
    table_path(NAME).write_text("{")
    assert "not usable" in profile.obtain(model, drafter, NAME).reason
    assert CostTable.load(table_path(NAME), NAME).max_tokens == first.table.max_tokens
