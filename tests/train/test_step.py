"""What reaches what: a block sees the context in front of its anchor, of its own sequence, and its
own slots; and gradients reach the drafter alone (paper, 3.3; field failures of training)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.models.decoder import Decoder
from dspark.train.anchors import Pack, pack_blocks
from dspark.train.features import Features, compute
from dspark.train.losses import LossWeights, Terms
from dspark.train.samples import Sample
from dspark.train.step import Teacher, TrainStep
from tests.drafters import tiny_drafters
from tests.drafters.tiny_drafters import FORMS
from tests.tiny import oracle, source, target
from tests.train.tiny_runs import samples

TEXT = samples(3, seed=4)
ANCHORS = [torch.tensor([s.start + 1, s.start + 4, len(s.tokens) - 2]) for s in TEXT]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return target()


@pytest.fixture(scope="module")
def features(model: Decoder) -> list[Features]:
    return compute(model, TEXT, (0, 1, 2))


def make(
    model: Decoder, form: str, weights: LossWeights | None = None, **overrides: Any
) -> TrainStep:
    c = tiny_drafters.config(model, form, **overrides)
    teacher = Teacher.of(*source(oracle("llama")), tiny_drafters.draft_ids(c))
    return TrainStep(tiny_drafters.model(c), teacher, weights or LossWeights(), chunk=4)


def packed(step: TrainStep, features: list[Features], anchors: list[Tensor] | None = None) -> Pack:
    c = step.model.config
    columns = list(c.target_layer_ids)
    anchors = ANCHORS if anchors is None else anchors
    return pack_blocks(features, anchors, c.block_size, columns, c.hidden_size)


@pytest.mark.parametrize("form", FORMS)
def test_a_block_sees_context_in_front_of_its_anchor_only(
    model: Decoder, features: list[Features], form: str
) -> None:
    """The loss's gradient at every row from the anchor on, and of other sequences, is exactly 0."""
    step = make(model, form)
    pack = packed(step, features)
    for b, anchor in enumerate(pack.anchors.tolist()):
        document = next(d for d in pack.documents if d.first_block <= b < d.last_block)
        valid = torch.zeros_like(pack.valid)
        valid[b] = pack.valid[b]
        context = pack.context.clone().requires_grad_()
        loss, _ = step(replace(pack, context=context, valid=valid))
        (grad,) = torch.autograd.grad(loss, [context])
        seen = grad.abs().sum(-1)
        assert not seen[anchor:].any() and not seen[: document.first_row].any()
        assert (seen[document.first_row : anchor] > 0).all(), "and all of it is used"


@pytest.mark.parametrize("form", [f for f in FORMS if f != "mtp"])
def test_unseen_features_cannot_be_seen(
    model: Decoder, features: list[Features], form: str
) -> None:
    """Not by the loss, and their tokens are: as embeddings in front of the block."""
    step = make(model, form)
    c = step.model.config
    args = (features, ANCHORS, c.block_size, list(c.target_layer_ids), c.hidden_size)
    pack = pack_blocks(*args, unseen=2)
    assert pack.unseen == 2 and torch.equal(pack.labels, packed(step, features).labels)
    assert torch.equal(pack.fronts[:, -1], pack.anchors)
    for b, anchor in enumerate(pack.anchors.tolist()):
        document = next(d for d in pack.documents if d.first_block <= b < d.last_block)
        valid = torch.zeros_like(pack.valid)
        valid[b] = pack.valid[b]
        context = pack.context.clone().requires_grad_()
        loss, _ = step(replace(pack, context=context, valid=valid))
        (grad,) = torch.autograd.grad(loss, [context])
        seen = grad.abs().sum(-1)
        assert not seen[anchor - 2 :].any() and not seen[: document.first_row].any()
        assert (seen[document.first_row : anchor - 2] > 0).all()
        with torch.no_grad():
            tokens = pack.tokens.clone()
            tokens[anchor - 1] = (tokens[anchor - 1] + 7) % 200
            changed = step._hidden(replace(pack, tokens=tokens))[b]
            assert not torch.allclose(changed, step._hidden(pack)[b])
    short = pack_blocks(features, [torch.tensor([2])] * 3, *args[2:], unseen=5)
    assert short.unseen == 1  # a row of context stays


@pytest.mark.parametrize("form", FORMS)
def test_tokens_behind_the_anchor_and_other_blocks_change_nothing(
    model: Decoder, features: list[Features], form: str
) -> None:
    step = make(model, form)
    pack = packed(step, features)
    with torch.no_grad():
        before = step._hidden(pack)
        for b, anchor in enumerate(pack.anchors.tolist()):
            if form != "mtp":  # which reads tokens, see below
                tokens = (pack.tokens + 7) % 200
                tokens[anchor] = pack.tokens[anchor]
                after = step._hidden(replace(pack, tokens=tokens))[b]
                torch.testing.assert_close(after, before[b], atol=1e-5, rtol=1e-4)
            alone = [a[:0] for a in ANCHORS]
            document, inside = divmod(b, 3)
            alone[document] = ANCHORS[document][inside : inside + 1]
            torch.testing.assert_close(
                step._hidden(packed(step, features, alone))[0], before[b], atol=1e-5, rtol=1e-4
            )


def test_mtp_sees_the_tokens_up_to_its_anchor(model: Decoder, features: list[Features]) -> None:
    """Its rows hold the token behind each hidden state, so the anchor and all before it."""
    step = make(model, "mtp")
    pack = packed(step, features)
    with torch.no_grad():
        before = step._hidden(pack)
        for b, anchor in enumerate(pack.anchors.tolist()):
            later, at = pack.tokens.clone(), pack.tokens.clone()
            later[anchor + 1 :] = (later[anchor + 1 :] + 7) % 200
            at[anchor] = (at[anchor] + 7) % 200
            after = step._hidden(replace(pack, tokens=later))[b]
            torch.testing.assert_close(after, before[b], atol=1e-6, rtol=1e-5)
            assert not torch.allclose(step._hidden(replace(pack, tokens=at))[b], before[b])


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_alone_and_in_a_pack(
    model: Decoder, features: list[Features], form: str
) -> None:
    step = make(model, form)
    with torch.no_grad():
        together = step._hidden(packed(step, features))
        alone = [
            step._hidden(packed(step, [f], [a])) for f, a in zip(features, ANCHORS, strict=True)
        ]
    torch.testing.assert_close(torch.cat(alone), together, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", [n for n in FORMS if FORMS[n].get("confidence_head")])
def test_the_confidence_loss_reaches_its_head_alone(
    model: Decoder, features: list[Features], form: str
) -> None:
    step = make(model, form, LossWeights(ce=0, kl=0, tv=0, conf=1))
    loss, _ = step(packed(step, features))
    loss.backward()
    for name, p in step.model.named_parameters():
        grad = 0.0 if p.grad is None else float(p.grad.abs().sum())
        assert (grad > 0) == name.startswith("confidence_head."), name


@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_the_whole_drafter_and_nothing_else(
    model: Decoder, features: list[Features], form: str
) -> None:
    step = make(model, form)
    teacher = step.teacher
    frozen = (teacher.embedding, teacher.norm, teacher.head)
    before = [x.clone() for x in frozen]
    loss, _ = step(packed(step, features))
    loss.backward()
    for name, p in step.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name
        assert float(p.grad.abs().sum()) > 0, name
    for x, was in zip(frozen, before, strict=True):
        assert x.grad is None and not x.requires_grad and torch.equal(x, was)
    names = {id(p) for p in step.parameters()}
    assert not names & {id(x) for x in frozen}, "the teacher is no part of what is saved"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("anchor", ["dummy", "one valid slot"])
def test_nothing_to_learn_is_finite(
    model: Decoder, layers: int, precision: str, anchor: str
) -> None:
    """A sample without an answer token, one anchor: zero loss or a finite one, never NaN."""
    text = [Sample(TEXT[0].tokens[:9], 9)]
    (f,) = compute(model, text, (0, 1, 2))
    step = make(model, "vanilla", num_layers=layers)
    pack = packed(step, [f], [torch.tensor([8 if anchor == "dummy" else 7])])
    assert int(pack.valid.sum()) == (anchor != "dummy")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss, flat = step(pack)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(flat).all()
    assert (float(loss.detach()) == 0) == (anchor == "dummy")
    for p in step.parameters():
        assert p.grad is None or torch.isfinite(p.grad).all()


def test_bf16_is_near_fp32(model: Decoder, features: list[Features]) -> None:
    step = make(model, "everything")
    pack = packed(step, features)
    with torch.no_grad():
        loss, _ = step(pack)
        with torch.autocast("cpu", torch.bfloat16):
            low, _ = step(pack)
    assert low.dtype == torch.float32 and float(low) != float(loss)
    torch.testing.assert_close(low, loss, atol=0, rtol=0.05)


@pytest.mark.parametrize("form", ["mtp", "everything"])
def test_shares_of_a_batch_add_up(model: Decoder, features: list[Features], form: str) -> None:
    """Two machines with one common denominator: their mean loss and gradient are the whole's."""
    step = make(model, form)
    parts = [packed(step, features[:2], ANCHORS[:2]), packed(step, features[2:], ANCHORS[2:])]
    slots = LossWeights().slots(step.num_slots)
    common = torch.stack([(slots * p.valid).sum() for p in parts]).sum() / 2
    loss, flat = step(packed(step, features))
    whole = torch.autograd.grad(loss, list(step.parameters()))
    halves = [step(p, common) for p in parts]
    mean = (halves[0][0] + halves[1][0]) / 2
    torch.testing.assert_close(mean, loss)
    torch.testing.assert_close(halves[0][1] + halves[1][1], flat, atol=1e-4, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(mean, list(step.parameters())), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-3)


def test_a_restricted_vocabulary_counts_what_it_lacks(
    model: Decoder, features: list[Features]
) -> None:
    """With the whole vocabulary as a list of ids nothing changes; with less, less is accepted."""
    whole = make(model, "vanilla")
    ids = torch.arange(257)
    listed = TrainStep(
        whole.model, Teacher.of(*source(oracle("llama")), ids), LossWeights(), chunk=4
    )
    few = TrainStep(
        whole.model, Teacher.of(*source(oracle("llama")), ids[:20]), LossWeights(), chunk=4
    )
    with torch.no_grad():
        flats = [s(packed(s, features))[1] for s in (whole, listed, few)]
    torch.testing.assert_close(flats[0], flats[1])
    terms = [Terms.unflat(f, whole.num_slots) for f in flats]
    p = whole.teacher.probabilities(torch.cat([f.hidden[:, -64:] for f in features]),
                                    torch.cat([f.log_z for f in features]))  # fmt: skip
    assert float(p[:, :20].sum(-1).max()) < 1
    assert (terms[2].accept < terms[2].valid).all()
    assert few.teacher.columns(torch.tensor([3, 19, 20, 256])).tolist() == [3, 19, -1, -1]
