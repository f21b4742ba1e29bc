"""The drafters that a DeepSeek-V4 checkpoint carries, as they serve: exact texts, a context that is
always that of a fresh prefill, no memory of others. What they compute is checked in
`test_deepseek_v4_maths.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.drafters.base import build as build_drafter
from dspark.engine.engine import Engine
from dspark.errors import CheckpointError, ConfigError
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_names import CarriedDrafter, stage_shapes
from dspark.models.target import Segment, pack
from dspark.sampling import streams
from dspark.types import Draft, SamplingParams
from tests.drafters import tiny_v4
from tests.drafters.tiny_v4 import BLOCK, MTP, Guided, V4Drafter
from tests.engine.oracle import (
    PATTERNS,
    ByteTokenizer,
    Ids,
    OracleDrafter,
    Recorder,
    play,
    reference,
    request,
)
from tests.models.deepseek_v4.tiny import VOCAB, tokens
from tests.tiny import DictSource

PROMPTS: tuple[Ids, ...] = tuple(tokens(n, seed=n) for n in (5, 1, 30, 12))
TEXT = 40
DSPARK = tiny_v4.dspark(tiny_v4.config())
BY_KIND = {"mtp1": MTP, "dspark": DSPARK}


@pytest.fixture(scope="module", params=BY_KIND)
def kind(request: pytest.FixtureRequest) -> CarriedDrafter:
    return BY_KIND[request.param]


@pytest.fixture(scope="module")
def model(kind: CarriedDrafter) -> DeepseekV4:
    return tiny_v4.target(kind)


@pytest.fixture(scope="module")
def texts(model: DeepseekV4) -> dict[Ids, Ids]:
    return {p: reference(model, p, TEXT) for p in PROMPTS}


def check(
    model: DeepseekV4, texts: dict[Ids, Ids], drafter: Drafter, batch: int = 4
) -> list[tuple[Ids, int, int, Ids]]:
    """Texts are the plain ones; returns all rounds."""
    engine = Engine(model, Recorder(drafter, drafter.feature_layers), ByteTokenizer())
    played = play(
        engine, [request(p, str(i), max_tokens=TEXT) for i, p in enumerate(PROMPTS[:batch])]
    )
    for i, p in enumerate(PROMPTS[:batch]):
        assert played.ids(str(i)) == texts[p]
    assert engine.drafter.failures == 0
    return [share for i in range(batch) for share in played.shares(str(i))]


def lengths(kind: CarriedDrafter) -> list[int]:
    return [1, 2, 3] if kind.kind == "mtp1" else [1, 2, 3, 4, 5]


def test_greedy_text_is_the_plain_one(
    kind: CarriedDrafter, model: DeepseekV4, texts: dict[Ids, Ids]
) -> None:
    for k in lengths(kind):
        rounds = check(model, texts, tiny_v4.drafter(model, kind, k))
        assert max(len(drafted) for drafted, *_ in rounds) == k


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_in_batches_of_every_size(
    kind: CarriedDrafter, model: DeepseekV4, texts: dict[Ids, Ids], batch: int
) -> None:
    check(model, texts, tiny_v4.drafter(model, kind), batch)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rejects_of_every_length_change_no_token(
    kind: CarriedDrafter, model: DeepseekV4, texts: dict[Ids, Ids], pattern: str
) -> None:
    k = lengths(kind)[-1]
    oracle = OracleDrafter(texts, k, PATTERNS[pattern], VOCAB)
    rounds = check(model, texts, Guided(tiny_v4.drafter(model, kind, k), oracle))
    accepted = {a for drafted, _, a, _ in rounds if len(drafted) == k}
    if pattern == "some":
        assert accepted == set(range(k + 1))


def test_int8_and_bf16_run(kind: CarriedDrafter) -> None:
    """int8: drafts are wrong or right, the text is plain decoding's up to near ties; here it is."""
    for dtype in (torch.int8, torch.bfloat16):
        model = tiny_v4.target(kind, dtype=dtype)
        engine = Engine(model, tiny_v4.drafter(model, kind), ByteTokenizer())
        played = play(engine, [request(PROMPTS[0], max_tokens=8)])
        assert len(played.ids("r")) == 8 and engine.drafter.failures == 0
        if dtype == torch.int8:
            assert played.ids("r") == reference(model, PROMPTS[0], 8)


# -- the context -----------------------------------------------------------------------------------


def feed(model: DeepseekV4, drafter: Drafter, ids: list[int], chunk: int, slot: int = 0) -> None:
    """A prefill in chunks, as the engine does it."""
    for start in range(0, len(ids), chunk):
        part = tuple(ids[start : start + chunk])
        out = model.forward(pack([Segment(slot, start, part, 1)]), drafter.feature_layers)
        drafter.observe([Committed(slot, start, part, 0)], out.features)


def proposed(drafter: Drafter, ids: list[int], slot: int = 0, room: int = 99) -> Draft:
    params = SamplingParams(temperature=1.0)
    return drafter.propose([DraftContext(slot, ids, params, room, streams(3)[0])])[0]


def context_rows(drafter: V4Drafter, slot: int, n: int) -> list[Tensor]:
    """The keys of the last `window` of n committed positions, in every stage."""
    layout = drafter.stages.layout
    at = torch.arange(max(0, n - layout.window), n)
    rows = slot * layout.stride(0) + at % layout.ring
    return [layer.attention.keys[rows] for layer in drafter.stages.layers]


def test_proposals_do_not_depend_on_the_chunks_of_a_prefill(
    kind: CarriedDrafter, model: DeepseekV4
) -> None:
    ids = list(tokens(100))
    found = []
    for chunk in (100, 32, 1):
        drafter = tiny_v4.drafter(model, kind, lengths(kind)[-1])
        feed(model, drafter, ids[:-1], chunk)
        found.append(proposed(drafter, ids))
    for other in found[1:]:
        assert other.tokens == found[0].tokens
        assert other.probs is not None and found[0].probs is not None
        torch.testing.assert_close(other.probs, found[0].probs, atol=1e-5, rtol=1e-3)


def test_the_context_is_that_of_a_fresh_prefill_after_any_accepts(
    kind: CarriedDrafter, model: DeepseekV4, texts: dict[Ids, Ids]
) -> None:
    k = lengths(kind)[-1]
    drafter = tiny_v4.drafter(model, kind, k)
    other = tiny_v4.target(kind)
    engine = Engine(
        model, Guided(drafter, OracleDrafter(texts, k, PATTERNS["some"], VOCAB)), ByteTokenizer()
    )
    for i, p in enumerate(PROMPTS):
        engine.submit(request(p, str(i), max_tokens=TEXT))
    compared = 0
    while engine.has_work:
        engine.step()
        for s in engine._running:
            if s.in_prefill:
                continue
            fresh = tiny_v4.drafter(other, kind, k)
            feed(other, fresh, s.tokens[:-1], 100, s.slot)
            n = len(s.tokens) - (2 if kind.kind == "mtp1" else 1)
            assert drafter.stages.lengths[s.slot] == fresh.stages.lengths[s.slot] == n
            for mine, theirs in zip(
                context_rows(drafter, s.slot, n), context_rows(fresh, s.slot, n), strict=True
            ):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
            compared += 1
    assert compared > 30 and engine.drafter.failures == 0


def test_nobody_asks(kind: CarriedDrafter, model: DeepseekV4) -> None:
    drafter = tiny_v4.drafter(model, kind)
    drafter.observe([], None)
    assert drafter.propose([]) == []


def test_company_changes_no_proposal(kind: CarriedDrafter, model: DeepseekV4) -> None:
    several = [list(tokens(n, seed=n)) for n in (3, 40, 11, 9)]
    together = tiny_v4.drafter(model, kind)
    for slot, ids in enumerate(several):
        feed(model, together, ids[:-1], 100, slot)
    params = SamplingParams()
    many = together.propose(
        [DraftContext(s, ids, params, 99, streams(3)[0]) for s, ids in enumerate(several)]
    )
    for slot, ids in enumerate(several):
        alone = tiny_v4.drafter(model, kind)
        feed(model, alone, ids[:-1], 100, slot)
        one = alone.propose([DraftContext(slot, ids, params, 99, streams(3)[0])])[0]
        assert one.tokens == many[slot].tokens


def test_a_shorter_block_is_that_of_a_drafter_made_for_it(
    kind: CarriedDrafter, model: DeepseekV4
) -> None:
    whole = tiny_v4.drafter(model, kind, 3)
    several, wanted = [list(tokens(n, seed=n)) for n in (3, 40, 11)], (2, None, 1)
    contexts = []
    for slot, (ids, k) in enumerate(zip(several, wanted, strict=True)):
        feed(model, whole, ids[:-1], 100, slot)
        contexts.append(DraftContext(slot, ids, SamplingParams(), 99, streams(3)[0], block=k))
    drafts = whole.propose(contexts)
    for slot, (ids, k) in enumerate(zip(several, wanted, strict=True)):
        alone = tiny_v4.drafter(model, kind, k or 3)
        feed(model, alone, ids[:-1], 100, slot)
        one = alone.propose([DraftContext(slot, ids, SamplingParams(), 99, streams(3)[0])])[0]
        assert drafts[slot].tokens == one.tokens and len(one) == (k or 3)


def test_room_cuts_each_draft_by_itself(kind: CarriedDrafter, model: DeepseekV4) -> None:
    drafter = tiny_v4.drafter(model, kind, 3)
    ids = list(tokens(20))
    for slot in range(3):
        feed(model, drafter, ids[:-1], 100, slot)
    drafts = drafter.propose(
        [
            DraftContext(s, ids, SamplingParams(), room, streams(3)[0])
            for s, room in enumerate((1, 2, 99))
        ]
    )
    assert [len(d) for d in drafts] == [1, 2, 3]
    assert all(d.tokens == drafts[2].tokens[: len(d)] for d in drafts)


def test_a_greedy_block_in_one_call_is_the_one_of_many_steps() -> None:
    for name in (DSPARK, tiny_v4.dspark(tiny_v4.config(), confidence=False)):
        model = tiny_v4.target(name)
        drafter = tiny_v4.drafter(model, name)
        contexts = []
        for slot, (n, unseen, room) in enumerate([(20, 0, 99), (9, 2, 3), (33, 1, 5)]):
            ids = list(tokens(n, seed=n))
            feed(model, drafter, ids[: n - 1 - unseen], 100, slot)
            params, rng = SamplingParams(temperature=0), streams(3)[0]
            contexts.append(DraftContext(slot, ids, params, room, rng, unseen))
        at_once = drafter.propose(contexts)
        step_by_step = drafter.propose([replace(c, others=True) for c in contexts])
        assert [len(d) for d in at_once] == [BLOCK, 3, BLOCK]
        for a, b in zip(at_once, step_by_step, strict=True):
            assert a.tokens == b.tokens and len(b.others) == len(b)
            assert (a.confidence is None) == (b.confidence is None) == (not name.confidence)
            if a.confidence is not None and b.confidence is not None:
                torch.testing.assert_close(a.confidence, b.confidence)


def test_a_slot_can_be_filled_to_its_last_token(kind: CarriedDrafter) -> None:
    model = tiny_v4.target(kind, max_context=24)
    prompt = tokens(18)
    drafter = tiny_v4.drafter(model, kind)
    engine = Engine(model, drafter, ByteTokenizer())
    played = play(engine, [request(prompt, max_tokens=99)])
    assert played.ids("r") == reference(model, prompt, 6)
    assert engine.drafter.failures == 0


# -- lengths, names, damage ------------------------------------------------------------------------


def test_lengths_that_cannot_be_honoured_are_refused() -> None:
    model = tiny_v4.target(DSPARK)
    for k in (-1, BLOCK + 1):
        with pytest.raises(ConfigError, match="0 to 5"):
            tiny_v4.drafter(model, DSPARK, k)
    model = tiny_v4.target(MTP)
    with pytest.raises(ConfigError, match=r"0 .plain decoding. or more"):
        tiny_v4.drafter(model, MTP, -1)
    ids = list(tokens(9))
    for carried in (MTP, DSPARK):
        model = tiny_v4.target(carried)
        none = tiny_v4.drafter(model, carried, 0)
        feed(model, none, ids[:-1], 100)
        assert len(proposed(none, ids)) == 0


def test_names_mean_what_the_checkpoint_carries(kind: CarriedDrafter, model: DeepseekV4) -> None:
    found = build_drafter(kind.kind, model, carried=(kind,))
    assert type(found) is type(tiny_v4.drafter(model, kind))
    other = "mtp1" if kind.kind == "dspark" else "dspark"
    with pytest.raises(ConfigError, match=f"unknown drafter '{other}'.*{kind.kind}"):
        build_drafter(other, model, carried=(kind,))


def test_damage_is_named(kind: CarriedDrafter) -> None:
    model = tiny_v4.target(kind)
    held = model.maths.weights
    assert isinstance(held, DictSource)
    for name, shape in stage_shapes(model.config, kind).items():
        if ".experts." in name:
            continue
        kept = held._tensors.pop(name)
        with pytest.raises(CheckpointError, match=f"lacks {name}"):
            tiny_v4.drafter(model, kind)
        held._tensors[name] = torch.zeros(*shape[:-1], shape[-1] + 1)
        with pytest.raises(CheckpointError, match=f"{name} has shape"):
            tiny_v4.drafter(model, kind)
        held._tensors[name] = kept
