"""The two lanes answer alike; the one in a process of its own dies, comes back and leaves nothing
behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dspark.drafters.base import Committed, DraftContext
from dspark.engine.lane import InlineLane, Lane
from dspark.engine.lane_process import ProcessLane
from dspark.engine.lane_wire import pieces
from dspark.errors import ResourceError
from dspark.models.target import Segment, pack
from dspark.sampling import streams
from dspark.types import SamplingParams
from tests.engine import lanes

TEXT = [1, 2, 3, 4, 5, 1, 2, 3, 0, 4, 5, 5, 2]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessLane]:
    lane = lanes.process(lanes.partial_trained())
    yield lane
    lane.close()


def context(
    tokens: list[int], slot: int = 0, seed: int | None = None, unseen: int = 0
) -> DraftContext:
    params = SamplingParams(temperature=0.0 if seed is None else 1.0)
    return DraftContext(slot, tokens, params, 4, streams(seed)[0], unseen)


def tell(lane: Lane, start: int, end: int, slot: int = 0) -> None:
    tokens = tuple(TEXT[start:end])
    batch = pack([Segment(slot, start, tokens, 1)])
    out = lanes.table_target().forward(batch, lane.feature_layers)
    lane.observe([Committed(slot, start, tokens, 0)], out.features)


def wait_until_back(lane: ProcessLane) -> None:
    deadline = time.monotonic() + 60
    while not lane.alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_both_lanes_answer_alike(process: ProcessLane) -> None:
    """Greedy and sampled, seen and unseen, laws and confidences bit for bit; streams move on only
    when an answer is taken."""
    inline = InlineLane(lanes.trained("vanilla"))
    found = []
    for lane in (process, inline):
        assert (lane.cap, lane.feature_layers, lane.ahead) == (5, (0, 1), True)
        tell(lane, 0, 6)
        tell(lane, 0, 8, slot=2)
        both = [context(TEXT[:7]), context(TEXT[:9], slot=2, seed=5)]
        ahead = context([*TEXT[:7], 4, 1], unseen=2, seed=7)
        before = ahead.rng.bit_generator.state
        first, second, third = lane.ask([both, [ahead], [context(TEXT[:7])]])
        lane.drop([third])
        answers = [lane.take(first)]
        assert (
            ahead.rng.bit_generator.state["state"]["counter"].tolist()
            == before["state"]["counter"].tolist()
            and ahead.rng.bit_generator.state["buffer_pos"] == before["buffer_pos"]
        )
        answers.append(lane.take(second))
        state = ahead.rng.bit_generator.state
        assert (
            state["buffer_pos"] != before["buffer_pos"]
            or (state["state"]["counter"] != before["state"]["counter"]).any()
        )
        assert all(a is not None and a.ended >= a.started for a in answers)
        found.append([d for a in answers if a is not None for d in a.drafts])
        for slot in (0, 2):
            lane.release(slot)
    for ours, theirs in zip(*found, strict=True):
        assert ours.tokens == theirs.tokens and len(ours) == 4
        assert (ours.probs is None) == (theirs.probs is None)
        if ours.probs is not None and theirs.probs is not None:
            assert torch.equal(ours.probs, theirs.probs)
        assert ours.confidence is not None and theirs.confidence is not None
        assert torch.equal(ours.confidence, theirs.confidence)
    assert found[0][1].probs is not None


def test_prefix_reuse_goes_through(process: ProcessLane) -> None:
    tell(process, 0, 8)
    assert process.reuse(0, 3, 6) == 6
    (wanted,) = process.propose([context(TEXT[:9])])
    tell(process, 6, 8, slot=3)
    (found,) = process.propose([context(TEXT[:9], slot=3)])
    assert found.tokens == wanted.tokens
    for slot in (0, 3):
        process.release(slot)


def test_a_process_that_dies_comes_back(
    process: ProcessLane, caplog: pytest.LogCaptureFixture
) -> None:
    """What was asked is answered by nothing; a slot whose context is lost gets no drafts until
    rows come, and its prefix is not reused."""
    tell(process, 0, 6)
    before = process.restarts
    (ticket,) = process.ask([[context(TEXT[:7])]])
    assert process.process is not None
    process.process.kill()
    process.process.wait()
    with caplog.at_level(logging.WARNING, logger="dspark.engine.lane_process"):
        answer = process.take(ticket)
    assert answer is None or len(answer.drafts[0]) == 4  # it may have answered before it died
    wait_until_back(process)
    assert process.restarts == before + 1
    assert f"restart {before + 1}" in caplog.text
    (draft,) = process.propose([context(TEXT[:7])])
    assert not len(draft)
    tell(process, 6, 8)
    (draft,) = process.propose([context(TEXT[:9])])
    assert len(draft) == 4
    assert process.reuse(0, 3, 6) == 0
    tell(process, 0, 8)
    assert process.reuse(0, 3, 6) == 6
    for slot in (0, 3):
        process.release(slot)


def test_errors_inside_are_counted_and_a_dead_one_is_not_started_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.engine.lane_process.MAX_RESTARTS", 1)
    lane = lanes.process(lanes.failing)
    try:
        tell(lane, 0, 2)
        assert not len(lane.propose([context([1, 2, 6])])[0])
        assert lane.failures == 1
        assert lane.propose([context([1, 2, 3])])[0].tokens == (3, 3, 3, 3)
        assert not len(lane.propose([context([1, 2, 7])])[0])
        wait_until_back(lane)
        tell(lane, 2, 4)
        assert lane.failures == 1
        assert not len(lane.propose([context([1, 2, 3, 4, 7])])[0])
        assert lane.restarts == 1 and lane.process is None
        tell(lane, 4, 5)
        assert not len(lane.propose([context([1, 2, 3, 4, 5, 1])])[0])
        assert "plain decoding from here on" in caplog.text
    finally:
        lane.close()


def test_a_process_that_is_silent_is_killed_and_started_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits gets no draft, and the restart is counted like any other."""
    monkeypatch.setattr("dspark.engine.lane_process.SILENT_SECONDS", 0.3)
    lane = lanes.process(lanes.sleeping)
    try:
        assert lane.process is not None
        pid = lane.process.pid
        tell(lane, 0, 2)
        assert len(lane.propose([context([1, 2, 3])])[0])
        assert not len(lane.propose([context([1, 2, 6])])[0])
        assert lane.restarts == 1 and "was silent for" in caplog.text
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        wait_until_back(lane)
        tell(lane, 2, 4)
        assert len(lane.propose([context([1, 2, 3, 4, 1])])[0])
    finally:
        lane.close()


def test_what_a_question_costs_beside_the_drafting(process: ProcessLane) -> None:
    assert 0 < process.round_trip_ms() < 1e3
    assert 0 <= InlineLane(lanes.sampled()).round_trip_ms() < 1e3


def test_a_drafter_that_cannot_be_built_is_an_error() -> None:
    with pytest.raises(ResourceError, match="did not start"):
        lanes.process(lanes.impossible)


def test_a_closed_lane_answers_nothing_and_its_process_is_gone() -> None:
    lane = lanes.process(lanes.sampled)
    assert lane.process is not None
    pid = lane.process.pid
    (ticket,) = lane.ask([[context([1], seed=1)]])
    lane.close()
    lane.close()
    assert lane.take(ticket) is None
    assert not len(lane.propose([context([1])])[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("ending", ["exit", "ctrl-c", "killed"])
def test_no_orphan_is_left(ending: str) -> None:
    """However the engine's process ends, that of its drafter does, too; nothing is said."""
    body = {"exit": "pass", "ctrl-c": "time.sleep(60)", "killed": "time.sleep(60)"}[ending]
    code = (
        "import time\nfrom tests.engine import lanes\nlane = lanes.process(lanes.sampled)\n"
        f"print(lane.process.pid, flush=True)\n{body}\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    line = parent.stdout.readline()
    assert line, parent.communicate()[1]
    pid = int(line)
    if ending != "exit":
        parent.send_signal(signal.SIGINT if ending == "ctrl-c" else signal.SIGKILL)
    _, error = parent.communicate(timeout=60)
    assert ("KeyboardInterrupt" in error) == (ending == "ctrl-c")
    assert "leaked" not in error and "lane_child" not in error
    deadline = time.monotonic() + 30
    while _alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Not a zombie that nobody waits for, either."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_rows_are_cut_into_pieces() -> None:
    """Every row once, in order, and verdicts only on entries that stay whole."""
    committed = [Committed(0, 4, (1, 2, 3), 2, 5, 2), Committed(1, 0, (4, 5, 6, 7), 10)]
    assert next(iter(pieces(committed, 9)))[1] == [2, 3, 4, 10, 11, 12, 13]
    found = list(pieces(committed, 2))
    assert [rows for _, rows in found] == [[2, 3], [4, 10], [11, 12], [13]]
    for part, rows in found:
        assert [r for c in part for r in range(c.first_row, c.first_row + len(c.tokens))] == list(
            range(len(rows))
        )
    flat = [
        (c.slot, c.start + i, t) for part, _ in found for c in part for i, t in enumerate(c.tokens)
    ]
    assert flat == [(0, 4, 1), (0, 5, 2), (0, 6, 3), (1, 0, 4), (1, 1, 5), (1, 2, 6), (1, 3, 7)]
    assert all(c.verified is None for part, _ in found for c in part)


def test_without_a_process_there_is_no_lane(
    process: ProcessLane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start an error; later plain decoding."""

    def refuse(*args: object, **options: object) -> None:
        raise OSError(11, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ResourceError, match="did not start"):
        lanes.process(lanes.sampled)
    assert process.process is not None
    process.process.kill()
    process.process.wait()
    assert not len(process.propose([context([1])])[0])
    assert process.dead and "no more processes" in caplog.text
