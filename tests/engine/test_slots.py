"""Prefix reuse: what a prompt takes over from a former text, and that nothing shows it but time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from dspark.drafters.base import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.engine.slots import Slots
from dspark.types import Output, Request
from tests.drafters import tiny_drafters
from tests.engine.oracle import ByteTokenizer, Ids, Played, Spy, play, request
from tests.tiny import target

Maker = Callable[[Any], Drafter]
PLAIN: dict[str, Maker] = {"none": NoDrafter, "ngram": NgramDrafter}


def trained(form: str) -> Maker:
    return lambda model: tiny_drafters.drafter(
        model, form, num_draft_tokens=3 if form == "mtp" else None
    )


DRAFTERS: dict[str, Maker] = {**PLAIN, **{f: trained(f) for f in tiny_drafters.FORMS}}


def ids(n: int, seed: int) -> Ids:
    rng = random.Random(seed)
    return tuple(rng.randrange(257) for _ in range(n))


def warm(model: Any, drafter: Drafter, **options: Any) -> Engine:
    return Engine(model, drafter, ByteTokenizer(), prefix_reuse=True, **options)


def cold(model: Any, drafter: Drafter, r: Request) -> Played:
    return play(Engine(model, drafter, ByteTokenizer()), [r])


def run(engine: Engine, prompt: Ids, name: str = "r", **params: Any) -> Output:
    return play(engine, [request(prompt, name, **{"max_tokens": 12, **params})]).outputs[name]


@pytest.fixture(scope="module", params=["int8", "fp32"])
def model(request: pytest.FixtureRequest) -> Any:
    return target(dtype=request.param, num_slots=3)


@pytest.fixture(scope="module")
def int8() -> Any:
    return target(dtype="int8", num_slots=3)


# -- what is taken over ----------------------------------------------------------------------------


def test_the_next_turn_runs_only_what_is_new(int8: Any) -> None:
    """B33: tokens of prompt and text are there, but the last one, whose row was never run."""
    spy = Reusing(int8)
    engine = warm(spy, NgramDrafter(int8))
    first = run(engine, ids(30, 1))
    assert first.stats.cached_tokens == 0
    longer = (*first.prompt_ids, *first.token_ids, *ids(9, 2))
    spy.batches.clear()
    assert run(engine, longer).stats.cached_tokens == 30 + 12 - 1
    assert spy.batches[0].num_tokens == 1 + 9
    assert int(spy.batches[0].slots[0]) == 0  # in place: the other slots stay free for others


def test_one_token_of_a_known_prompt_is_run_for_its_logits(int8: Any) -> None:
    engine = warm(int8, NoDrafter(int8))
    first, again = run(engine, ids(20, 1)), run(engine, ids(20, 1))
    assert again.stats.cached_tokens == 19
    assert again.token_ids == first.token_ids


def test_a_running_text_lends_its_beginning(int8: Any) -> None:
    engine = warm(int8, NgramDrafter(int8), prefill_chunk=16)
    prompt = ids(40, 1)
    engine.submit(request(prompt, "long", max_tokens=60))
    for _ in range(2):
        engine.step()  # two chunks: 32 of 40 tokens have rows
    other = (*prompt, *ids(5, 2))
    engine.submit(request(other, "other", max_tokens=10))
    while engine.has_work:
        engine.step()
    outputs = {n: engine.take_output(n) for n in ("long", "other")}
    assert outputs["other"] is not None and outputs["long"] is not None
    assert outputs["other"].stats.cached_tokens == 32
    for r in (request(prompt, "long", max_tokens=60), request(other, "other", max_tokens=10)):
        expected = cold(int8, NgramDrafter(int8), r).ids(r.id)
        assert outputs[r.id].token_ids == expected  # type: ignore[union-attr]


def test_the_least_recently_used_text_is_evicted(int8: Any) -> None:
    """Three slots, four texts that share a beginning: the first one is gone, the others are not,
    although each was copied from another."""
    engine = warm(int8, NoDrafter(int8))
    head = ids(10, 0)
    prompts = [(*head, *ids(10, seed)) for seed in range(1, 5)]
    cached = [run(engine, p).stats.cached_tokens for p in prompts]
    assert cached == [0, 10, 10, 10]
    assert [run(engine, p).stats.cached_tokens for p in prompts[::-1]] == [19, 19, 19, 10]


def test_rejected_and_surplus_rows_are_not_kept(int8: Any) -> None:
    """The text ends inside an accepted block: what stands behind its end is no part of it."""
    prompt = (*ids(4, 3), *ids(4, 3), *ids(4, 3))
    engine = warm(int8, NgramDrafter(int8))
    whole = run(engine, prompt, max_tokens=40).token_ids
    for n in range(1, 12):
        engine = warm(int8, NgramDrafter(int8))
        run(engine, prompt, max_tokens=n)
        behind = (*prompt, *whole[:n], *whole[n : n + 8])  # as if the surplus had been emitted
        r = request(behind, max_tokens=12)
        got = play(engine, [r]).outputs["r"]
        assert got.stats.cached_tokens == len(prompt) + n - 1
        assert got.token_ids == cold(int8, NgramDrafter(int8), r).ids("r")


def test_a_cancelled_prompt_keeps_what_was_run(int8: Any) -> None:
    engine = warm(int8, NgramDrafter(int8), prefill_chunk=8)
    prompt = ids(30, 5)
    engine.submit(request(prompt, "gone"))
    engine.step()
    engine.cancel("gone")
    assert engine.take_output("gone") is not None
    r = request(prompt, max_tokens=10)
    got = play(engine, [r]).outputs["r"]
    assert got.stats.cached_tokens == 8
    assert got.token_ids == cold(int8, NgramDrafter(int8), r).ids("r")


def test_off_and_forgotten(int8: Any) -> None:
    engine = Engine(int8, NoDrafter(int8), ByteTokenizer())
    assert [run(engine, ids(20, 1)).stats.cached_tokens for _ in range(2)] == [0, 0]
    engine = warm(int8, NoDrafter(int8))
    run(engine, ids(20, 1))
    engine.forget()
    assert run(engine, ids(20, 1)).stats.cached_tokens == 0


def test_a_drafter_that_cannot_begin_in_the_middle_makes_a_cold_start(int8: Any) -> None:
    class Stubborn(NoDrafter):
        def reuse(self, source: int, slot: int, length: int) -> int:
            return 0

    engine = warm(int8, Stubborn(int8))
    assert [run(engine, ids(20, 1)).stats.cached_tokens for _ in range(2)] == [0, 0]


def test_a_target_that_cannot_go_back_makes_a_cold_start(int8: Any) -> None:
    """Rings: in place and not too far back, or not at all; the drafter is told of the cold start"""

    class Ring(Reusing):
        def reuse(self, source: int, slot: int, length: int) -> bool:
            return source == slot and length > 25

    engine = warm(Ring(int8), NgramDrafter(int8))
    first = run(engine, ids(20, 1))
    assert run(engine, ids(20, 1)).stats.cached_tokens == 0
    longer = (*first.prompt_ids, *first.token_ids, *ids(9, 2))
    r = request(longer, max_tokens=12)
    got = play(engine, [r])
    assert got.outputs["r"].stats.cached_tokens == 31
    assert got.shares("r") == cold(int8, NgramDrafter(int8), r).shares("r")


class Flaky(Drafter):
    """Loses sequences while `fail` is set."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.fail = inner, False
        self.cap, self.feature_layers = inner.cap, inner.feature_layers

    def propose(self, contexts: Any) -> Any:
        return self.inner.propose(contexts)

    def observe(self, committed: Any, features: Any) -> None:
        if self.fail:
            raise RuntimeError("broken")
        self.inner.observe(committed, features)

    def reuse(self, source: int, slot: int, length: int) -> int:
        return self.inner.reuse(source, slot, length)

    def release(self, slot: int) -> None:
        self.inner.release(slot)


def test_a_text_that_the_drafter_lost_is_not_lent(int8: Any) -> None:
    drafter = Flaky(NgramDrafter(int8))
    engine = warm(int8, drafter)
    drafter.fail = True
    run(engine, ids(20, 1))
    drafter.fail = False
    assert run(engine, ids(20, 1)).stats.cached_tokens == 0
    assert run(engine, ids(20, 1)).stats.cached_tokens == 19


def test_refusals_harm_no_other_text(int8: Any) -> None:
    """The best match is refused, the second best is taken as it is: nothing was copied into the
    least recently used slot meanwhile, and the drafter claims nothing there."""
    copied: list[tuple[int, int, int]] = []

    class Target(Reusing):
        def reuse(self, source: int, slot: int, length: int) -> bool:
            copied.append((source, slot, length))
            return True

    class Drafted(NoDrafter):
        released: list[int] = []  # noqa: RUF012

        def reuse(self, source: int, slot: int, length: int) -> int:
            return 0 if source == 2 else length

        def release(self, slot: int) -> None:
            self.released.append(slot)

    slots = Slots(Target(int8), Drafted(int8), reuse=True)
    slots._kept = {0: [9] * 20, 1: [1, 2, 3, 4], 2: [1, 2, 3, *range(5, 30)]}
    assert slots.take((1, 2, 3, 5, 6, 7, 8), ()) == (1, 3)
    assert copied == [(1, 1, 3)]
    assert Drafted.released == [0] and slots.free == [0, 2] and set(slots._kept) == {0, 2}


# -- nothing shows it but time ---------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_and_rounds_behind_a_hit_are_the_cold_ones(model: Any, name: str) -> None:
    """B33: drafts, accepts and texts, greedy and sampled, behind a shared beginning that is a part
    of the former prompt, reaches into its text, or is all of both."""
    make = DRAFTERS[name]
    engine = warm(model, make(model), prefill_chunk=16)
    former = run(engine, ids(37, 1), max_tokens=20)
    text = (*former.prompt_ids, *former.token_ids)
    for at in (len(text), 44, 37, 16, 2):  # downwards: each leaves what the next one shares
        how = {"temperature": 0.8, "seed": at} if at % 2 else {}
        r = request((*text[:at], *ids(7, at)), max_tokens=16, **how)
        got = play(engine, [r])
        assert min(at, len(text) - 1) - 1 <= got.outputs["r"].stats.cached_tokens <= at
        expected = cold(model, make(model), r)
        assert got.ids("r") == expected.ids("r")
        assert got.shares("r") == expected.shares("r")


@pytest.mark.parametrize("name", ["ngram", "mtp", "vanilla", "everything"])
def test_random_company(int8: Any, name: str) -> None:
    """Prompts that begin like prompts and texts before them, staggered, some cancelled."""
    rng = random.Random(1)
    make = DRAFTERS[name]
    engine = warm(int8, make(int8), prefill_chunk=5)
    known: list[Ids] = [ids(20, 0)]
    requests: list[Request] = []
    outputs: dict[str, Output] = {}
    while len(outputs) < 24:
        if len(requests) < 24:
            head = rng.choice(known)
            prompt = (*head[: rng.randint(1, len(head))], *ids(rng.randint(1, 9), rng.random()))
            how = rng.choice(({}, {"temperature": 1.0, "seed": len(requests)}))
            name_, n = str(len(requests)), rng.randint(1, 14)
            requests.append(request(prompt[:200], name_, max_tokens=n, **how))
            engine.submit(requests[-1])
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if rng.random() < 0.1:
            engine.cancel(str(rng.randrange(24)))
        for r in requests:
            if (output := engine.take_output(r.id)) is not None:
                outputs[r.id] = output
                known.append((*output.prompt_ids, *output.token_ids))
    for r in requests:
        expected = cold(int8, make(int8), r).ids(r.id)
        if outputs[r.id].finish_reason == "cancelled":
            expected = expected[: len(outputs[r.id].token_ids)]
        assert outputs[r.id].token_ids == expected
    assert sum(o.stats.cached_tokens for o in outputs.values()) > 50
    assert sorted(engine._slots.free) == list(range(3))


class Reusing(Spy):
    """A spy on a target that knows reuse."""

    def reuse(self, source: int, slot: int, length: int) -> bool:
        return bool(self._inner.reuse(source, slot, length))
