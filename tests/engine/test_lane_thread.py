"""The lane in a thread of this process keeps the promises of the one in a process: it answers as a
drafter at hand does, and costs no text, whatever becomes of it."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.drafters.block import BlockModel
from dspark.drafters.block_drafter import BlockDrafter
from dspark.drafters.mtp_drafter import MtpDrafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.engine.lane_thread import ThreadLane
from dspark.engine.pipeline import PipelinedEngine
from dspark.models.decoder import Decoder
from dspark.models.elsewhere import Lent
from dspark.types import Draft
from tests.drafters import tiny_drafters
from tests.engine import lanes, test_lane
from tests.engine.oracle import ByteTokenizer, Ids, play, reference, request
from tests.engine.test_lane import TEXT, context, tell
from tests.tiny import target

CPU = torch.device("cpu")
PROMPTS: tuple[Ids, ...] = ((5, 9, 200, 31), tuple(range(40, 60)), (7, 7, 7, 1, 2, 250), (3,))


@pytest.fixture
def made() -> Iterator[Callable[[Drafter], ThreadLane]]:
    """Makes lanes, which are closed behind the test."""
    open_: list[ThreadLane] = []

    def make(drafter: Drafter) -> ThreadLane:
        open_.append(ThreadLane(drafter, CPU, CPU))
        return open_[-1]

    yield make
    for lane in open_:
        lane.close()


Make = Callable[[Drafter], ThreadLane]


class Slow(Drafter):
    """Waits until it is let go; guesses the anchor again and again."""

    ahead = True

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.asked: list[int] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.began.set()
        assert self.go.wait(60)
        self.asked += [c.slot for c in contexts]
        return [Draft((c.tokens[-1],)) for c in contexts]


class Broken(lanes.Failing):
    """Raises what `failsafe` survives (6), and what it does not (7)."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        assert all(c.tokens[-1] != 7 for c in contexts), "seven"
        return super().propose(contexts)


def test_it_answers_as_a_drafter_at_hand(made: Make) -> None:
    """Bit for bit, and streams move on only when an answer is taken."""
    lane = made(lanes.trained("vanilla"))
    test_lane.test_both_lanes_answer_alike(lane)  # type: ignore[arg-type]
    test_lane.test_prefix_reuse_goes_through(lane)  # type: ignore[arg-type]


def test_the_caller_goes_on_meanwhile(made: Make) -> None:
    """What it does to its texts then is not seen; bets are drafted while nothing else is said."""
    drafter = Slow()
    lane = made(drafter)
    worked: list[int] = []
    lane.on_work = lambda ticket, started, ended: worked.append(ticket)
    text = [1, 2]
    first, *bets = lane.ask([[context(text)], [context([4], slot=1)], [context([5], slot=2)]])
    assert drafter.began.wait(60)
    text.append(3)
    lane.drop([bets[1]])
    drafter.go.set()
    answer = lane.take(first)
    assert answer is not None and answer.drafts[0].tokens == (2,)
    assert lane.take(bets[0]) is not None and drafter.asked == [0, 1]
    assert worked == [first, bets[0]]

    drafter.began.clear()
    drafter.go.clear()
    first, bet = lane.ask([[context(text)], [context([4], slot=1)]])
    assert drafter.began.wait(60)
    lane.release(5)
    drafter.go.set()
    assert lane.take(first) is not None and lane.take(bet) is None
    assert drafter.asked == [0, 1, 0]


def test_failures_are_survived(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    """An error costs a draft; what ends the thread's work is logged, and then it drafts no more."""
    lane = made(Broken(lanes.table_target()))
    tell(lane, 0, 2)
    assert not len(lane.propose([context([1, 2, 6])])[0])
    assert lane.failures == 1 and not lane.dead
    assert lane.propose([context([1, 2, 3])])[0].tokens == (3, 3, 3, 3)
    waiting = lane.ask([[context([1, 2, 7])], [context([1, 2, 3])]])
    with caplog.at_level(logging.WARNING, logger="dspark.engine.lane_thread"):
        assert [lane.take(t) for t in waiting] == [None, None]
    assert lane.dead and lane.failures == 2 and "AssertionError: seven" in caplog.text
    tell(lane, 2, 4)
    assert not len(lane.propose([context([1, 2, 3, 4, 3])])[0]) and lane.reuse(0, 1, 2) == 0


@pytest.mark.parametrize("batch", [1, 4])
def test_a_lane_that_ends_costs_no_text(made: Make, batch: int) -> None:
    model = lanes.table_target()
    requests = [request((1, 2, i), str(i), max_tokens=40) for i in range(batch)]
    engine = PipelinedEngine(model, made(Broken(model)), ByteTokenizer())
    played = play(engine, requests)
    for r in requests:
        assert played.ids(r.id) == reference(model, r.prompt_ids, 40)
    assert engine.drafter.failures and any("failed" in m for m in engine.messages)


def test_closed_and_forgotten_lanes_end_their_thread(made: Make) -> None:
    drafter = Slow()
    lane = made(drafter)
    first, second = (lane.ask([[context([1])]])[0] for _ in range(2))
    assert drafter.began.wait(60)
    threading.Timer(0.05, drafter.go.set).start()
    lane.close()
    lane.close()
    assert lane.take(second) is None and not len(lane.propose([context([1])])[0])
    done = lane.take(first)
    assert done is not None and done.drafts[0].tokens == (1,)  # it was at work on this one

    before = {*threading.enumerate()}
    forgotten = ThreadLane(lanes.sampled(), CPU, CPU)
    forgotten.propose([context([1])])
    (thread,) = {*threading.enumerate()} - before
    del forgotten
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def model() -> Decoder:
    return target(dtype="int8", num_slots=8)


@pytest.mark.parametrize("form", ["mtp", "vanilla"])
@pytest.mark.parametrize("batch", [1, 5])
def test_texts(model: Decoder, made: Make, form: str, batch: int) -> None:
    """In both loops, and with drafters over what the target lends."""
    requests = [
        request(PROMPTS[i % 4], str(i), max_tokens=30 - i, stop_token_ids=(9,) if i == 1 else ())
        for i in range(batch)
    ]
    plain = play(Engine(model, NoDrafter(model), ByteTokenizer()), requests)
    c = tiny_drafters.config(model, form)
    for home in (model, Lent(model, CPU)):
        weights = tiny_drafters.model(c)
        if isinstance(weights, BlockModel):
            lane = made(BlockDrafter(home, c, weights))
        else:
            lane = made(MtpDrafter(home, c, weights, num_draft_tokens=3))
        for engine in (
            PipelinedEngine(model, lane, ByteTokenizer()),
            Engine(model, lane, ByteTokenizer()),
        ):
            played = play(engine, requests)
            assert all(played.ids(r.id) == plain.ids(r.id) for r in requests)
            assert any(r.drafted for rounds in played.rounds.values() for r in rounds)
            assert not engine.drafter.failures


def test_the_drafters_of_deepseek_v4_elsewhere(made: Make) -> None:
    """Over the tower without its layers they draft what they do beside it."""
    for kind, carried in lanes.V4_KINDS.items():
        model = lanes.v4_target(kind)
        requests = [request(p, str(i), max_tokens=20) for i, p in enumerate(((1, 2, 3), (9,) * 5))]
        found = []
        for home in (model, model.lend(CPU)):
            drafter = lanes.tiny_v4.drafter(home, carried)  # type: ignore[arg-type]
            engine = Engine(model, made(drafter), ByteTokenizer())
            found.append(play(engine, requests))
            assert not engine.drafter.failures
        for r in requests:
            assert found[0].shares(r.id) == found[1].shares(r.id)
            assert found[0].ids(r.id) == reference(model, r.prompt_ids, 20)


def test_observing_does_not_wait_for_the_drafter(made: Make) -> None:
    drafter = Slow()
    lane = made(drafter)
    (ticket,) = lane.ask([[context([1])]])
    assert drafter.began.wait(60)
    lane.observe([Committed(0, 0, tuple(TEXT[:2]), 0)], torch.zeros(2, 4))  # or this would hang
    lane.release(0)
    drafter.go.set()
    assert lane.take(ticket) is not None
