"""Trained drafters as they serve: exact texts, the context that training had, no memory of others.

Random weights make bad guesses, so accept counts of 0 dominate; the draft vocabulary, the heads and
the block lengths are what is exercised here. A drafter that is never wrong is in the last tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.drafters.base import DraftContext, Drafter
from dspark.drafters.block_drafter import BlockDrafter
from dspark.drafters.mtp_drafter import MtpDrafter
from dspark.engine.engine import Engine
from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.models.target import Segment, pack
from dspark.sampling import streams
from dspark.train.anchors import pack_blocks
from dspark.train.features import compute
from dspark.train.losses import LossWeights
from dspark.train.samples import Sample
from dspark.train.step import Teacher, TrainStep
from dspark.types import Draft, Request, SamplingParams
from tests.drafters import tiny_drafters
from tests.drafters.tiny_drafters import FORMS
from tests.engine.oracle import ByteTokenizer, Recorder, play, reference, request
from tests.tiny import oracle, source, target

PROMPTS = [[5, 9, 200, 31], list(range(40, 60)), [7] * 3 + [1, 2, 250]]


@pytest.fixture(scope="module", params=["fp32", "int8"])
def model(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    yield target(oracle("llama"), dtype=request.param)


@pytest.mark.parametrize("form", FORMS)
def test_greedy_ids_equal_plain_decoding(model: Decoder, form: str) -> None:
    drafter = tiny_drafters.drafter(model, form)
    engine = Engine(model, drafter, ByteTokenizer())
    played = play(engine, [request(p, str(i), max_tokens=24) for i, p in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        assert played.ids(str(i)) == reference(model, prompt, 24)


@pytest.mark.parametrize("form", ["mtp", "vanilla", "dflash-masks", "everything"])
def test_every_length_up_to_the_trained_one(form: str) -> None:
    model = target()
    for k in range(6):
        drafter = tiny_drafters.drafter(model, form, num_draft_tokens=k)
        drafter = Recorder(drafter, drafter.feature_layers)
        engine = Engine(model, drafter, ByteTokenizer())
        played = play(engine, [request(PROMPTS[0], max_tokens=12)])
        assert played.ids("r") == reference(model, PROMPTS[0], 12)
        drafted = {len(share[0]) for share in played.shares("r")}
        assert max(drafted) == k


def test_a_length_beyond_the_block_is_refused() -> None:
    model = target()
    for k in (-1, 6):
        with pytest.raises(ConfigError, match="0 to 5"):
            tiny_drafters.drafter(model, "vanilla", num_draft_tokens=k)
    with pytest.raises(ConfigError, match=r"0 .plain decoding. or more"):
        tiny_drafters.drafter(model, "mtp", num_draft_tokens=-1)


def feed(model: Decoder, drafter: Drafter, tokens: list[int], chunk: int, slot: int = 0) -> None:
    """A prefill in chunks, as the engine does it."""
    from dspark.drafters.base import Committed

    for start in range(0, len(tokens), chunk):
        part = tuple(tokens[start : start + chunk])
        out = model.forward(pack([Segment(slot, start, part, 1)]), drafter.feature_layers)
        drafter.observe([Committed(slot, start, part, 0)], out.features)


def context(tokens: list[int], slot: int = 0, room: int = 99, **params: float) -> DraftContext:
    return DraftContext(slot, tokens, SamplingParams(**params), room, streams(3)[0])  # type: ignore[arg-type]


def proposed(drafter: Drafter, tokens: list[int], **params: float) -> Draft:
    return drafter.propose([context(tokens, **params)])[0]


@pytest.mark.parametrize("form", FORMS)
def test_proposals_do_not_depend_on_the_chunks_of_a_prefill(form: str) -> None:
    model = target()
    tokens = [(i * 37) % 257 for i in range(100)]
    found = []
    for chunk in (100, 32, 1):
        drafter = tiny_drafters.drafter(model, form)
        feed(model, drafter, tokens[:-1], chunk)
        found.append(proposed(drafter, tokens, temperature=1.0))
    for other in found[1:]:
        assert other.tokens == found[0].tokens
        assert other.probs is not None and found[0].probs is not None
        torch.testing.assert_close(other.probs, found[0].probs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("form", "unseen"), [*((f, 0) for f in FORMS), *((f, 3) for f in FORMS if f != "mtp")]
)
def test_serving_sees_what_training_saw(form: str, unseen: int) -> None:
    """The same sequence through `TrainStep` and through observe/propose: the same q at slot 0 and,
    where no head depends on drawn tokens, at every slot. So it is for blocks drafted ahead."""
    model = target()
    config, weights = source(oracle("llama"))
    c = tiny_drafters.config(model, form)
    trained, ids = tiny_drafters.model(c), tiny_drafters.draft_ids(c)
    tokens = [(i * 37) % 257 for i in range(60)]
    layers = (*c.target_layer_ids, model.num_layers - 1)
    features = compute(model, [Sample(tuple(tokens), 10)], layers)
    anchors = torch.tensor([12, 30, 54])
    columns = range(c.num_features)
    pack_ = pack_blocks(features, [anchors], c.block_size, columns, c.hidden_size, unseen)
    step = TrainStep(trained, Teacher.of(config, weights, ids), LossWeights())
    with torch.no_grad():
        logits, confidence = step._logits(step._hidden(pack_), pack_.previous)
    wanted = torch.softmax(logits, -1)
    for b, anchor in enumerate(anchors.tolist()):
        drafter = tiny_drafters.drafter(model, form, candidates=0)
        feed(model, drafter, tokens[: anchor - unseen], 100)
        asked = replace(context(tokens[: anchor + 1], temperature=1.0), unseen=unseen)
        (draft,) = drafter.propose([asked])
        assert draft.probs is not None
        q = draft.probs if ids is None else draft.probs[:, ids]
        slots = 1 if c.markov_rank else c.block_size
        torch.testing.assert_close(q[:slots], wanted[b, :slots], atol=1e-5, rtol=1e-3)
        if confidence is not None:
            assert draft.confidence is not None
            mine, theirs = draft.confidence[0], torch.sigmoid(confidence[b, 0])
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("form", ["vanilla", "rnn", "everything"])
def test_the_sequential_stage_is_the_trained_one(form: str) -> None:
    """Force the drawn tokens into the labels: then every slot agrees with teacher forcing."""
    model = target()
    config, weights = source(oracle("llama"))
    c = tiny_drafters.config(model, form, candidates=0)
    trained, ids = tiny_drafters.model(c), tiny_drafters.draft_ids(c)
    tokens = [(i * 37) % 257 for i in range(31)]
    drafter = tiny_drafters.drafter(model, form, candidates=0)
    feed(model, drafter, tokens[:-1], 100)
    draft = proposed(drafter, tokens, temperature=1.0)
    assert draft.probs is not None
    forced = tuple(tokens) + draft.tokens
    layers = (*c.target_layer_ids, model.num_layers - 1)
    features = compute(model, [Sample(forced, 10)], layers)
    pack_ = pack_blocks(
        features, [torch.tensor([30])], c.block_size, range(c.num_features), c.hidden_size
    )
    step = TrainStep(trained, Teacher.of(config, weights, ids), LossWeights())
    with torch.no_grad():
        logits, _ = step._logits(step._hidden(pack_), pack_.previous)
    q = draft.probs if ids is None else draft.probs[:, ids]
    torch.testing.assert_close(q, torch.softmax(logits[0], -1), atol=1e-5, rtol=1e-3)
    assert all(draft.probs[i, t] > 0 for i, t in enumerate(draft.tokens))


def test_tokens_outside_the_draft_vocabulary_and_the_candidates_have_no_mass() -> None:
    model = target()
    drafter = tiny_drafters.drafter(model, "everything")
    ids = tiny_drafters.draft_ids(tiny_drafters.config(model, "everything"))
    assert ids is not None
    tokens = [(i * 37) % 257 for i in range(31)]
    feed(model, drafter, tokens[:-1], 100)
    probs = proposed(drafter, tokens, temperature=1.0).probs
    assert probs is not None
    outside = torch.ones(257, dtype=torch.bool)
    outside[ids] = False
    assert (probs[:, outside] == 0).all()
    assert ((probs > 0).sum(1) <= 16).all()
    torch.testing.assert_close(probs.sum(1), torch.ones(5))


@pytest.mark.parametrize("form", FORMS)
def test_company_changes_no_proposal(form: str) -> None:
    model = target()
    texts = [[(i * k) % 257 for i in range(10 + 7 * k)] for k in range(1, 6)]
    together = tiny_drafters.drafter(model, form)
    for slot, tokens in enumerate(texts):
        feed(model, together, tokens[:-1], 100, slot)
    many = together.propose([context(t, slot) for slot, t in enumerate(texts)])
    for slot, tokens in enumerate(texts):
        alone = tiny_drafters.drafter(model, form)
        feed(model, alone, tokens[:-1], 100, slot)
        one = alone.propose([context(tokens, slot)])[0]
        assert one.tokens == many[slot].tokens


@pytest.mark.parametrize("form", FORMS)
def test_a_shorter_block_is_that_of_a_drafter_made_for_it(form: str) -> None:
    model = target()
    whole = tiny_drafters.drafter(model, form, num_draft_tokens=4)
    texts = [[(i * k) % 257 for i in range(12 + 5 * k)] for k in range(1, 4)]
    wanted = (2, None, 1)
    for slot, tokens in enumerate(texts):
        feed(model, whole, tokens[:-1], 100, slot)
    contexts = [
        replace(context(t, slot), block=k)
        for slot, (t, k) in enumerate(zip(texts, wanted, strict=True))
    ]
    drafts = whole.propose(contexts)
    for slot, (tokens, k) in enumerate(zip(texts, wanted, strict=True)):
        alone = tiny_drafters.drafter(model, form, num_draft_tokens=k or 4)
        feed(model, alone, tokens[:-1], 100, slot)
        assert drafts[slot].tokens == alone.propose([context(tokens, slot)])[0].tokens


def test_room_cuts_each_draft_by_itself() -> None:
    model = target()
    for form in ("vanilla", "mtp"):
        drafter = tiny_drafters.drafter(model, form, num_draft_tokens=4)
        for slot in range(3):
            feed(model, drafter, PROMPTS[1][:-1], 100, slot)
        rooms = (1, 3, 99)
        drafts = drafter.propose([context(PROMPTS[1], s, r) for s, r in enumerate(rooms)])
        assert [len(d) for d in drafts] == [1, 3, 4]
        assert all(d.tokens == drafts[2].tokens[: len(d)] for d in drafts)


@pytest.mark.parametrize("form", ["vanilla", "mtp", "dflash"])
def test_the_room_of_others_changes_no_draft(form: str) -> None:
    """A seeded text ends as it does alone: neither its drafts nor its random stream know what room
    the company has."""
    model = target(dtype="int8")
    requests = [
        request(PROMPTS[1], str(i), max_tokens=n, temperature=1.0, seed=i)
        for i, n in enumerate((6, 9, 14))
    ]

    def texts(some: list[Request]) -> list[tuple[int, ...]]:
        drafter = tiny_drafters.drafter(model, form, num_draft_tokens=4)
        played = play(Engine(model, drafter, ByteTokenizer()), some)
        return [played.ids(r.id) for r in some]

    assert texts(requests) == [text for r in requests for text in texts([r])]


def test_the_anchor_stands_at_the_index_of_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    drafter = tiny_drafters.drafter(model, "vanilla")
    assert isinstance(drafter, BlockDrafter)
    seen: list[int] = []
    run = drafter._stack.run

    def spy(x: Tensor, slots: list[int], starts: list[int]) -> Tensor:
        seen.extend(starts)
        return run(x, slots, starts)

    monkeypatch.setattr(drafter._stack, "run", spy)
    recorder = Recorder(drafter, drafter.feature_layers)  # checks that asked-for anchors are next
    engine = Engine(model, recorder, ByteTokenizer())
    played = play(engine, [request(PROMPTS[1], max_tokens=30)])
    lengths = [len(PROMPTS[1])]
    for _, _, _, emitted in played.shares("r"):
        lengths.append(lengths[-1] + len(emitted))
    assert seen == lengths[: len(seen)]
    assert len(seen) > 5


def test_mtp_rows_are_those_of_one_long_prefill() -> None:
    """After any mixture of accepts, the context of the next draft is that of a fresh prefill."""
    model = target()
    drafter = tiny_drafters.drafter(model, "mtp", num_draft_tokens=3)
    assert isinstance(drafter, MtpDrafter)
    engine = Engine(model, drafter, ByteTokenizer())
    engine.submit(request(PROMPTS[1], max_tokens=20))
    while engine.has_work:
        engine.step()
        sequences = engine._running
        if not sequences or sequences[0].in_prefill:
            continue
        s = sequences[0]
        engine.drafter.propose([context(s.tokens, s.slot)])  # its rows wait no longer
        fresh = tiny_drafters.drafter(model, "mtp", num_draft_tokens=3)
        assert isinstance(fresh, MtpDrafter)
        other = target()
        feed(other, fresh, s.tokens[:-1], 100, s.slot)
        n = len(s.tokens) - 2
        assert drafter._stack.lengths[s.slot] == fresh._stack.lengths[s.slot] == n
        torch.testing.assert_close(
            drafter._stack.keys[0, s.slot, :n], fresh._stack.keys[0, s.slot, :n],
            atol=1e-4, rtol=1e-3,
        )  # fmt: skip
