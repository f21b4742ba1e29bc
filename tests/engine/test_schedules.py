"""Every way to verify, through the engine: the law, the greedy text, the rows of a pass, the books.

`Doubter` draws its tokens and says a confidence that depends on them, as trained heads do: the case
in which a scheduler that looks where it must not would bias the text.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine.engine import Engine
from dspark.models.decoder import Decoder
from dspark.schedule.cost import CostTable
from dspark.schedule.scheduler import Scheduler
from dspark.types import Draft, Request, Stats
from tests.engine.oracle import (
    PATTERNS,
    ByteTokenizer,
    Ids,
    OracleDrafter,
    Recorder,
    SampledDrafter,
    Spy,
    TableTarget,
    play,
    reference,
    request,
)
from tests.engine.test_laws import V, joint_law, table
from tests.tiny import oracle, target

MODES = ("all", "static:2", "threshold:0.4", "causal", "lagged", "auto")


def costs(block: int, row: float = 0.4, steps: int = 4) -> CostTable:
    """1 ms, and `row` for each further token, in steps: so schedules do differ with the load."""
    passes = [(t, 0.0, 1 + row * steps * ((t - 1) // steps)) for t in range(1, 65)]
    drafting = [(r, k, 0.1 * r * k / block) for r in (1, 16) for k in {1, block}]
    return CostTable.fit({}, passes, drafting, [(1, 0.1), (16, 0.1)])


def scheduler(mode: str, block: int, measured: bool = True) -> Scheduler:
    return Scheduler(mode, table=costs(block) if measured else None)


def doubt(draft: Draft, ahead: int = 0) -> Draft:
    """Sure behind even tokens, hardly so behind odd ones, less further back. `ahead` 1 lets each
    confidence know the very token that it is about, which no drafter may."""
    before = (0, *draft.tokens)[ahead : len(draft) + ahead]
    c = [(0.95 if t % 2 == 0 else 0.3) * 0.95**k for k, t in enumerate(before)]
    return Draft(draft.tokens, draft.probs, torch.tensor(c))


class Doubter(Drafter):
    """Adds token-dependent confidences to the drafts of another."""

    def __init__(self, inner: Drafter, ahead: int = 0) -> None:
        self.inner, self.cap, self._ahead = inner, inner.cap, ahead

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [doubt(d, self._ahead) for d in self.inner.propose(contexts)]

    def release(self, slot: int) -> None:
        self.inner.release(slot)


# -- the law ---------------------------------------------------------------------------------------


def p_value(
    mode: str,
    users: int,
    *,
    seeded: bool = False,
    measured: bool = True,
    ahead: int = 0,
    n: int = 1200,
) -> float:
    """Chi-square of three tokens of requests, `users` at a time, against their joint law.

    Requests of two lengths: rounds then mix their stages, and requests join as others leave.
    """
    drafter = Doubter(SampledDrafter(torch.softmax(table(2, 1.5), 1), 3), ahead)
    engine = Engine(
        TableTarget(table(0, 0.8), num_slots=users),
        drafter,
        ByteTokenizer(),
        scheduler=scheduler(mode, 3, measured),
    )
    for i in range(n):
        seed = i if seeded else None
        engine.submit(request((0,), str(i), temperature=1.0, seed=seed, max_tokens=4 + i % 3))
    while engine.has_work:
        engine.step()
    counts = np.zeros((V, V, V))
    for i in range(n):
        output = engine.take_output(str(i))
        assert output is not None
        counts[output.token_ids[:3]] += 1
    law = joint_law(table(0, 0.8), 0).ravel()
    observed, wanted = counts.ravel(), law * n
    rare = wanted < 5  # added up, as the test wants no small cells
    cells = np.append(observed[~rare], observed[rare].sum())
    return float(stats.chisquare(cells, np.append(wanted[~rare], wanted[rare].sum())).pvalue)


@pytest.mark.parametrize(("mode", "users"), [*((m, 6) for m in MODES), ("causal", 1), ("auto", 1)])
def test_the_joint_law_of_three_tokens(mode: str, users: int) -> None:
    """B46, B48: whatever is cut by whom, and whoever shares the budget."""
    assert p_value(mode, users) > 1e-4


def test_the_joint_law_of_seeded_requests_in_company() -> None:
    assert p_value("auto", 6, seeded=True) > 1e-4


def test_the_harness_finds_a_confidence_that_knows_its_token() -> None:
    """Or the tests above would have no eyes."""
    assert p_value("threshold:0.4", 6, seeded=True, ahead=1, n=3000) < 1e-6


# -- greedy text -----------------------------------------------------------------------------------

LENGTHS = (5, 1, 12, 3, 17, 2, 19, 4, 9, 6, 1, 8, 11, 2, 7, 90)
"""Of sixteen prompts; the last one is long."""


def prompts() -> list[Ids]:
    rng = random.Random(0)
    return [tuple(rng.randrange(257) for _ in range(n)) for n in LENGTHS]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return target(dtype="int8", num_slots=16)


@pytest.fixture(scope="module")
def texts(model: Decoder) -> dict[Ids, Ids]:
    return {p: reference(model, p, 24) for p in prompts()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("batch", "every"), [(1, 0), (2, 1), (5, 0), (16, 0), (16, 1)])
def test_greedy_text_is_the_plain_one(
    model: Decoder, texts: dict[Ids, Ids], mode: str, batch: int, every: int
) -> None:
    """B01, B31: and the long prompt in chunks among the short ones."""
    chosen = prompts()[-batch:]
    recorder = Recorder(Doubter(OracleDrafter(texts, 5, PATTERNS["some"])))
    spy = Spy(model)
    engine = Engine(spy, recorder, ByteTokenizer(), prefill_chunk=16, scheduler=scheduler(mode, 5))
    requests = [request(p, str(i), max_tokens=14 + i % 8) for i, p in enumerate(chosen)]
    played = play(engine, requests, every)
    for r in requests:
        assert played.ids(r.id) == texts[r.prompt_ids][: r.params.max_tokens]
    # B50: only what was scheduled is in the pass.
    assert len(spy.batches) == len(recorder.passes)
    for rows, committed in zip(spy.batches, recorder.passes, strict=True):
        assert rows.num_tokens == sum(
            len(c.tokens) if c.verified is None else c.verified + 1 for c in committed
        )
    total = Stats.total([o.stats for o in played.outputs.values()])
    assert total.accepted <= total.verified <= total.drafted
    assert 0 <= total.predicted <= total.verified
    rounds = [r for name in played.rounds for r in played.rounds[name]]
    assert total.predicted == pytest.approx(sum(r.predicted for r in rounds))
    if mode == "all":
        assert total.verified == total.drafted
    else:
        assert total.verified < total.drafted


def test_a_long_prompt_does_not_stall_the_others(model: Decoder) -> None:
    """Whoever decodes gets a token in every round while the prompt is read chunk by chunk."""
    long = prompts()[-1]
    engine = Engine(model, NoTokens(), ByteTokenizer(), prefill_chunk=8, scheduler=Scheduler())
    engine.submit(request((1, 2), "short", max_tokens=20))
    engine.step()
    engine.submit(request(long, "long", max_tokens=2))
    order = [sorted(c.request_id for c in engine.step()) for _ in range(12)]
    assert order[:11] == [["short"]] * 11 and order[11] == ["long", "short"]


class NoTokens(Drafter):
    """Asked, it has nothing to propose."""

    def __init__(self) -> None:
        self.cap = 4

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [Draft()] * len(contexts)


# -- seeds, the gate -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_seeded_text_does_not_depend_on_its_company(model: Decoder, mode: str) -> None:
    """B08: the same under costs, whoever is there and whether or not others draft."""
    q = torch.softmax(torch.randn(257, 257, generator=torch.Generator().manual_seed(3)) * 3, 1)
    params = {"temperature": 1.0, "seed": 11, "max_tokens": 24}

    def text(company: int, row: float) -> Ids:
        drafter = Doubter(SampledDrafter(q, 4))
        chosen = Scheduler(mode, table=costs(4, row))
        engine = Engine(model, drafter, ByteTokenizer(), prefill_chunk=6, scheduler=chosen)
        crowd = [request(p, str(i), max_tokens=30) for i, p in enumerate(prompts()[:company])]
        return play(engine, [*crowd, request((5, 6, 7), "it", **params)], every=1).ids("it")

    alone = text(0, 0.4)
    assert text(9, 0.4) == alone == text(3, 5.0)


def test_where_drafting_never_pays_the_engine_decodes_plainly(
    model: Decoder, texts: dict[Ids, Ids]
) -> None:
    prompt = prompts()[0]
    long = reference(model, prompt, 120)
    steep = CostTable.fit({}, [(t, 0.0, 10.0 * t) for t in (1, 8)], [(1, 5, 50.0)], [(1, 0.1)])
    drafter = OracleDrafter({prompt: long}, 5, PATTERNS["none"])
    engine = Engine(model, drafter, ByteTokenizer(), scheduler=Scheduler(table=steep))
    played = play(engine, [request(prompt, max_tokens=100)])
    assert played.ids("r") == long[:100]
    drafting = [bool(r.drafted) for r in played.rounds["r"]]
    assert any(drafting[:30]) and not any(drafting[-40:])
    whole = Engine(model, OracleDrafter({prompt: long}, 5), ByteTokenizer())
    assert all(r.drafted for r in play(whole, [request(prompt, max_tokens=60)]).rounds["r"])


def test_a_probe_drafts_for_the_youngest_text_alone(model: Decoder, texts: dict[Ids, Ids]) -> None:
    steep = CostTable.fit({}, [(t, 0.0, 10.0 * t) for t in (1, 8)], [(1, 5, 50.0)], [(1, 0.1)])
    scheduler = Scheduler(table=steep)
    assert scheduler.gate is not None
    level = scheduler.gate.lane(3)
    level.enter("plain")
    level.due = 4
    engine = Engine(model, Doubter(OracleDrafter(texts, 5)), ByteTokenizer(), scheduler=scheduler)
    played = play(engine, [request(p, str(i), max_tokens=16) for i, p in enumerate(prompts()[:3])])
    drafting = {name: [bool(r.drafted) for r in rounds] for name, rounds in played.rounds.items()}
    assert not any(drafting["0"][:6] + drafting["1"][:6])
    assert drafting["2"][:6] == [False] * 4 + [True] * 2
    assert all(played.ids(str(i)) == texts[p][:16] for i, p in enumerate(prompts()[:3]))


# -- a drafter that fails, and much traffic --------------------------------------------------------


class Flaky(Drafter):
    """Raises now and then, from each of its three methods."""

    def __init__(self, inner: Drafter, chance: float) -> None:
        self.inner, self.cap, self._chance = inner, inner.cap, chance
        self._rng = random.Random(7)
        self.raised = 0
        self.open: set[int] = set()

    def _maybe(self) -> None:
        if self._rng.random() < self._chance:
            self.raised += 1
            raise RuntimeError("out of luck")

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        assert {c.slot for c in contexts} <= self.open
        self._maybe()
        return self.inner.propose(contexts)

    def observe(self, committed: Sequence[Committed], features: torch.Tensor | None) -> None:
        self.open |= {c.slot for c in committed if c.start == 0}
        try:
            self._maybe()
        except RuntimeError:
            self.open -= {c.slot for c in committed}  # must not be asked about these any more
            raise

    def release(self, slot: int) -> None:
        self.open.discard(slot)
        self.inner.release(slot)
        self._maybe()


def test_a_failing_drafter_costs_speed_and_no_text(
    model: Decoder, texts: dict[Ids, Ids], caplog: pytest.LogCaptureFixture
) -> None:
    flaky = Flaky(Doubter(OracleDrafter(texts, 5)), 0.2)
    engine = Engine(model, flaky, ByteTokenizer(), scheduler=scheduler("auto", 5))
    requests = [request(p, str(i), max_tokens=20) for i, p in enumerate(prompts())]
    played = play(engine, requests, every=2)
    assert all(played.ids(r.id) == texts[r.prompt_ids][:20] for r in requests)
    assert engine.drafter.failures == flaky.raised > 3
    assert len([r for r in caplog.records if "drafter failed" in r.message]) == 1
    assert Stats.total([o.stats for o in played.outputs.values()]).accepted > 0


def test_a_broken_contract_is_not_survived() -> None:
    class Wrong(NoTokens):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            raise AssertionError("rows are missing")

    engine = Engine(TableTarget(table(0, 1.0)), Wrong(), ByteTokenizer())
    engine.submit(request((1,), max_tokens=4))
    engine.step()
    with pytest.raises(AssertionError, match="rows are missing"):
        engine.step()


ENDS = tuple(range(0, 257, 12))
"""Many ends of text, so that random texts do meet one."""


def stress(model: Decoder, n: int) -> tuple[list[Request], set[str], Engine, Flaky, Engine]:
    """Requests, those that may be cancelled, an engine with a flaky drafter and one without."""
    rng = random.Random(3)
    q = torch.softmax(torch.randn(257, 257, generator=torch.Generator().manual_seed(3)) * 3, 1)
    flaky = Flaky(Doubter(SampledDrafter(q, 4)), 0.02)
    flawed, sound = (
        Engine(model, d, ByteTokenizer(ENDS), prefill_chunk=24, scheduler=scheduler("auto", 4))
        for d in (flaky, Doubter(SampledDrafter(q, 4)))
    )
    requests = []
    for i in range(n):
        greedy = rng.random() < 0.5
        requests.append(
            request(
                [rng.randrange(257) for _ in range(rng.choice((1, 3, 9, 40)))],
                str(i),
                temperature=0.0 if greedy else rng.choice((0.5, 1.0)),
                seed=None if greedy else i,
                top_k=rng.choice((0, 5)),
                repetition_penalty=rng.choice((1.0, 1.2)),
                ignore_eos=rng.random() < 0.5,
                max_tokens=rng.randint(1, 12),
            )
        )
    return requests, {r.id for r in requests if rng.random() < 0.15}, flawed, flaky, sound


def test_500_requests_with_cancellations_and_failures() -> None:
    """Each ends with its full text or its cancellation; nothing is left behind. Texts are those
    alone, but for sampled ones that lost a draft: these spend other random numbers from there."""
    model = target(oracle("llama", num_hidden_layers=1), dtype="int8", num_slots=8)
    requests, doomed, engine, flaky, sound = stress(model, 500)
    waiting, rng, ended, compared = (
        list(requests),
        random.Random(4),
        Counter[str](),
        Counter[bool](),
    )
    disturbed: set[str] = set()
    while waiting or engine.has_work:
        for _ in range(min(rng.randrange(5), len(waiting))):
            engine.submit(waiting.pop(0))
        if rng.random() < 0.3 and doomed:
            engine.cancel(rng.choice(sorted(doomed)))  # waiting, running, ended or yet to come
        failures, present = flaky.raised, {s.request.id for s in engine._running}
        present |= {c.request_id for c in engine.step()} | {s.request.id for s in engine._running}
        if flaky.raised > failures:
            disturbed |= present
    assert flaky.raised > 5 and engine.drafter.failures == flaky.raised
    assert sorted(engine._slots.free) == list(range(8)) and not flaky.open
    for r in requests:
        output = engine.take_output(r.id)
        assert output is not None and engine.take_output(r.id) is None
        ended[output.finish_reason] += 1
        assert output.stats.completion_tokens == len(output.token_ids)
        greedy = r.params.is_greedy
        if output.finish_reason != "cancelled" and (greedy or r.id not in disturbed):
            compared[greedy] += 1
            assert output.token_ids == play(sound, [r]).ids(r.id)
    assert not engine._arrived and not engine._outputs
    assert ended["cancelled"] > 10 and ended["stop"] > 10 and ended["length"] > 100
    assert min(compared.values()) > 80, compared
