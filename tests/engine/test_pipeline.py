"""Two lanes change no text: every drafter, every way a text ends, alone and in company."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from dspark.drafters.base import DraftContext, Drafter
from dspark.engine.engine import Engine
from dspark.engine.lane import Answer, InlineLane, Lane
from dspark.engine.lane_process import ProcessLane
from dspark.engine.pipeline import PipelinedEngine
from dspark.engine.timeline import Timeline
from dspark.models.target import Target
from dspark.schedule.scheduler import Scheduler
from dspark.types import Draft, Request
from tests.drafters import tiny_drafters
from tests.drafters.tiny_v4 import Guided
from tests.engine import lanes
from tests.engine.oracle import (
    PATTERNS,
    ByteTokenizer,
    Ids,
    OracleDrafter,
    Played,
    play,
    reference,
    request,
)
from tests.tiny import target

PROMPTS: tuple[Ids, ...] = ((5, 9, 200, 31), tuple(range(40, 60)), (7, 7, 7, 1, 2, 250), (3,))
TEXT = 30


class AheadOracle(OracleDrafter):
    """Believes in a text and can be asked behind tokens that are still in flight: the round counts
    by position, so that every outcome of a bet occurs."""

    ahead = True

    def _propose(self, c: DraftContext) -> Draft:
        prompt = max((p for p in self._texts if tuple(c.tokens[: len(p)]) == p), key=len)
        done = len(c.tokens) - len(prompt)
        guess = [*self._texts[prompt][done : done + self._block]]
        guess += [0] * (self._block - len(guess))
        spoilt = self._right(done, self._rows[prompt])
        others = list(guess)
        if spoilt < len(guess):
            guess[spoilt] = (guess[spoilt] + 1) % self._vocab_size
        return Draft(tuple(guess), others=tuple(others) if c.others else ())


class Roomy(InlineLane):
    """Its drafts seem to take no time, so it always has some to spare."""

    seconds = 1e-9

    def ask(self, batches: Sequence[Sequence[DraftContext]]) -> list[int]:
        work, self.on_work = self.on_work, None
        tickets = super().ask(batches)
        self.on_work = work
        if work is not None:
            work(tickets[0], 0.0, self.seconds)
        return tickets


class Tight(Roomy):
    """It never has."""

    seconds = 1e3


@pytest.fixture(scope="module")
def model() -> Target:
    return target(dtype="int8", num_slots=8)


@pytest.fixture(scope="module")
def texts(model: Target) -> dict[Ids, Ids]:
    return {p: reference(model, p, TEXT + 10) for p in PROMPTS}


def run(
    model: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    verify: str = "all",
    every: int = 0,
    eos: Ids = (),
    lane: Callable[[Drafter], Lane] = Tight,
    **options: Any,
) -> tuple[Played, PipelinedEngine]:
    engine = PipelinedEngine(
        model, lane(drafter), ByteTokenizer(eos), scheduler=Scheduler(verify), **options
    )
    return play(engine, requests, every), engine


def many(n: int, **params: Any) -> list[Request]:
    return [
        request(PROMPTS[i % len(PROMPTS)], str(i), **{"max_tokens": TEXT - i, **params})
        for i in range(n)
    ]


# -- one request, any outcome --------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["all", "static:1", "static:0", "causal"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("lane", [Tight, Roomy])
def test_outcomes_of_bets(
    model: Target, texts: dict[Ids, Ids], pattern: str, verify: str, lane: Callable[..., Lane]
) -> None:
    for prompt in PROMPTS:
        drafter = AheadOracle(texts, 5, PATTERNS[pattern])
        played, engine = run(
            model, drafter, [request(prompt, max_tokens=TEXT)], verify=verify, lane=lane
        )
        assert played.ids("r") == texts[prompt][:TEXT]
        counts, rounds = engine.counts, played.rounds["r"]
        # A round says so itself: the sums over requests are what a server counts.
        assert (sum(r.bet for r in rounds), sum(r.ahead for r in rounds)) == (
            counts.bets,
            counts.hits,
        )
        assert all(b.bet for b, a in pairwise(rounds) if a.ahead) and not rounds[-1].bet
        if pattern == "all":
            assert counts.bets and counts.hits == counts.bets
        if pattern == "none" and lane is Tight and verify != "static:0":
            assert counts.bets and not counts.hits
        if pattern == "none" and lane is Roomy:
            assert counts.hits > counts.bets / 2  # the second guess is right


def test_a_hit_is_verified_without_a_draft_in_between(model: Target, texts: dict[Ids, Ids]) -> None:
    """The lane is asked once to begin with; then every block was drafted ahead."""
    asked: list[int] = []

    class Counting(AheadOracle):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            asked.extend(c.unseen for c in contexts)
            return super().propose(contexts)

    prompt = PROMPTS[0]
    played, engine = run(model, Counting(texts, 5), [request(prompt, max_tokens=TEXT)])
    assert asked[0] == 0 and all(asked[1:])
    assert all(len(s[3]) == 5 for s in played.shares("r")[:5])
    assert engine.counts.fresh == 1


def test_a_tail_is_a_block(model: Target, texts: dict[Ids, Ids]) -> None:
    """static:1 verifies one of six and couples one: two more rounds live on what is left."""
    asked: list[int] = []

    class Counting(AheadOracle):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            asked.extend(c.unseen for c in contexts)
            return super().propose(contexts)

    played, engine = run(
        model, Counting(texts, 6), [request(PROMPTS[0], max_tokens=TEXT)], verify="static:1"
    )
    assert played.ids("r") == texts[PROMPTS[0]][:TEXT]
    assert len(asked) * 3 <= len(played.rounds["r"]) + 3
    assert engine.counts.hits == engine.counts.bets


def test_one_more_token_is_drafted_where_the_lane_can(model: Target, texts: dict[Ids, Ids]) -> None:
    """cap 1, as MTP-1: one token is verified and the next is coupled."""
    played, _ = run(model, AheadOracle(texts, 2), [request(PROMPTS[0], max_tokens=TEXT)], cap=1)
    assert {len(s[3]) for s in played.shares("r")[:-1]} == {2}
    assert {s[1] for s in played.shares("r")[:-1]} == {1}


# -- every drafter -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mtp", "dflash", "vanilla", "everything"])
@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_trained_drafters(model: Target, texts: dict[Ids, Ids], form: str, batch: int) -> None:
    drafter = tiny_drafters.drafter(model, form, num_draft_tokens=3 if form == "mtp" else None)  # type: ignore[arg-type]
    played, _ = run(model, drafter, many(batch), verify="causal", every=batch // 3)
    for r in many(batch):
        assert played.ids(r.id) == texts[r.prompt_ids][: r.params.max_tokens]


@pytest.fixture(scope="module", params=lanes.V4_KINDS)
def v4(request: pytest.FixtureRequest) -> tuple[str, Target]:
    return request.param, lanes.v4_target(request.param)


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_drafters_of_deepseek_v4(
    v4: tuple[str, Target], texts: dict[Ids, Ids], batch: int, pattern: str
) -> None:
    """Guided, so that hits happen: the drafter's own context lives through every round."""
    kind, model = v4
    prompts = [(1, 2, 3), tuple(range(20)), (9,) * 5]
    plain = {p: reference(model, p, TEXT) for p in prompts}
    inner = lanes.V4_KINDS[kind]
    drafter = GuidedAhead(
        lanes.tiny_v4.drafter(model, inner, 3 if kind == "v4 mtp" else None),  # type: ignore[arg-type]
        AheadOracle(plain, 5, PATTERNS[pattern], model.vocab_size),
    )
    requests = [request(prompts[i % 3], str(i), max_tokens=TEXT - i) for i in range(batch)]
    played, engine = run(model, drafter, requests)
    for r in requests:
        assert played.ids(r.id) == plain[r.prompt_ids][: r.params.max_tokens]
    assert not engine.drafter.failures
    if batch == 1 and pattern == "all":
        assert engine.counts.hits == engine.counts.bets > 3


class GuidedAhead(Guided):
    ahead = True


def test_prompt_lookup_goes_through_the_second_loop_unharmed(
    model: Target, texts: dict[Ids, Ids]
) -> None:
    """It learns from its own proposals and is not asked ahead; halves suit it."""
    from dspark.drafters.ngram import NgramDrafter

    for batch in (1, 4):
        played, engine = run(model, NgramDrafter(model), many(batch))
        for r in many(batch):
            assert played.ids(r.id) == texts[r.prompt_ids][: r.params.max_tokens]
        assert not engine.counts.bets


# -- endings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_texts_end_where_they_end(model: Target, texts: dict[Ids, Ids], batch: int) -> None:
    """Everywhere in a block: end of text, stop ids, stop strings, budgets."""
    for at in range(3, 16):
        text = texts[PROMPTS[0]]
        letters = "".join(ByteTokenizer().id_to_bytes(t).decode("latin-1") for t in text[at:])
        ends: list[dict[str, Any]] = [{"max_tokens": at}, {"stop_token_ids": (text[at],)}]
        if letters and letters.isascii():
            ends.append({"stop": (letters[:1],)})
        for end in ends:
            requests = [
                request(PROMPTS[0], str(i), **{"max_tokens": TEXT, **end}) for i in range(batch)
            ]
            wanted = play(Engine(model, AheadOracle(texts, 5), ByteTokenizer()), requests)
            played, engine = run(model, AheadOracle(texts, 5), requests)
            for r in requests:
                ours, theirs = played.outputs[r.id], wanted.outputs[r.id]
                assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
                assert ours.finish_reason == theirs.finish_reason
            assert not engine._blocks.names and not engine.has_work
        eos = (text[at],)
        played, _ = run(model, AheadOracle(texts, 5), many(batch), eos=eos)
        first = text.index(text[at])
        assert played.ids("0") == text[: first + 1]


def test_cancelling_forgets_what_was_drafted(model: Target, texts: dict[Ids, Ids]) -> None:
    for batch in (1, 4):
        engine = PipelinedEngine(model, InlineLane(AheadOracle(texts, 5)), ByteTokenizer())
        for r in many(batch):
            engine.submit(r)
        for _ in range(6):
            engine.step()
        engine.cancel("0")
        while engine.has_work:
            engine.step()
        output = engine.take_output("0")
        assert output is not None and output.finish_reason == "cancelled"
        assert output.token_ids == texts[PROMPTS[0]][: len(output.token_ids)]
        engine.submit(request(PROMPTS[1], "again", max_tokens=TEXT))
        while engine.has_work:
            engine.step()
        again = engine.take_output("again")
        assert again is not None and again.token_ids == texts[PROMPTS[1]][:TEXT]
        lane = engine.lane
        assert isinstance(lane, InlineLane) and not lane._answers


def test_the_edge_of_the_context(texts: dict[Ids, Ids]) -> None:
    """A slot that ends inside a block that is drafted ahead, for a trained drafter, too."""
    small = target(dtype="int8", num_slots=4, max_context=20)
    for form in ("mtp", "vanilla"):
        drafter = tiny_drafters.drafter(small, form, num_draft_tokens=4)
        played, _ = run(small, drafter, many(1, max_tokens=99))
        assert len(played.ids("0")) == 16 and played.ids("0") == texts[PROMPTS[0]][:16]


# -- many requests -------------------------------------------------------------------------------


def test_halves_take_turns(model: Target, texts: dict[Ids, Ids]) -> None:
    """Each half is drafted for with true features while the other is verified."""
    order: list[str] = []

    class Watched(InlineLane):
        def ask(self, batches: Sequence[Sequence[DraftContext]]) -> list[int]:
            order.append("ask " + "".join(sorted(str(c.slot) for c in batches[0])))
            assert not any(c.unseen for c in batches[0])
            return super().ask(batches)

        def take(self, ticket: int) -> Answer | None:
            order.append("take")
            return super().take(ticket)

    played, _ = run(model, AheadOracle(texts, 5, PATTERNS["some"]), many(4), lane=Watched)
    for r in many(4):
        assert played.ids(r.id) == texts[r.prompt_ids][: r.params.max_tokens]
    steady = order[6:14]
    asks = [o for o in steady if o != "take"]
    assert len(set(asks)) == 2 and asks[0] != asks[1] and asks[:2] == asks[2:4]


def test_a_seeded_text_is_the_same_in_both_loops(model: Target) -> None:
    """Alone and in company, and with a lane that drafts one more."""
    for form, k in (("vanilla", None), ("mtp", 2)):
        params = {"temperature": 1.0, "seed": 11, "max_tokens": 20}
        plain = tiny_drafters.drafter(model, form, num_draft_tokens=k)  # type: ignore[arg-type]
        engine = Engine(model, plain, ByteTokenizer())
        wanted = play(engine, [request(PROMPTS[0], "it", **params)]).ids("it")
        more = None if k is None else k + 1
        for company in (0, 3):
            drafter = tiny_drafters.drafter(model, form, num_draft_tokens=more)  # type: ignore[arg-type]
            crowd = [request(PROMPTS[0], "it", **params), *many(company, temperature=1.0)]
            played, _ = run(model, drafter, crowd, cap=k, every=1)
            assert played.ids("it") == wanted


# -- in a process of its own ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessLane]:
    lane = lanes.process(lanes.partial_trained("vanilla"))
    yield lane
    lane.close()


def test_texts_of_a_process(process: ProcessLane) -> None:
    model = lanes.table_target()
    prompts: list[Ids] = [(1, 2, 3), (4,), (5, 6, 7, 0, 1)]
    for batch in (1, 3, 8):
        requests = [request(prompts[i % 3], str(i), max_tokens=40 - i) for i in range(batch)]
        engine = PipelinedEngine(model, process, ByteTokenizer())
        engine.timeline = Timeline()
        played = play(engine, requests)
        for r in requests:
            assert played.ids(r.id) == reference(model, r.prompt_ids, r.params.max_tokens)
        kinds = {s.kind for s in engine.timeline.spans}
        assert kinds >= {"verify", "fresh"} and (batch > 1 or kinds & {"hit", "miss"})
        assert all(s.end >= s.start for s in engine.timeline.spans)


def test_the_process_is_killed_in_the_middle_of_twenty_requests(
    process: ProcessLane, caplog: pytest.LogCaptureFixture
) -> None:
    model = lanes.table_target()
    prompts: list[Ids] = [(1, 2, 3), (4,), (5, 6, 7, 0, 1)]
    requests = [request(prompts[i % 3], str(i), max_tokens=30 + i) for i in range(20)]
    engine = PipelinedEngine(model, process, ByteTokenizer())
    for r in requests:
        engine.submit(r)
    before, steps = process.restarts, 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps == 12:
            assert process.process is not None
            process.process.kill()
    for r in requests:
        output = engine.take_output(r.id)
        assert output is not None and output.finish_reason == "length"
        assert output.token_ids == reference(model, r.prompt_ids, r.params.max_tokens)
    assert process.restarts == before + 1
    assert f"restart {before + 1}" in caplog.text
