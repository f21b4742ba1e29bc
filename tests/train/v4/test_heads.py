"""Drafters as they train against drafters as they serve: the same weights, the same proposals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.drafters.base import DraftContext
from dspark.drafters.deepseek_v4_dspark import V4DSparkDrafter
from dspark.drafters.deepseek_v4_mtp import V4MtpDrafter
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4_names import CarriedDrafter, stage_shapes, tower_shapes
from dspark.sampling import streams
from dspark.train.anchors import Pack, pack_blocks
from dspark.train.samples import Sample
from dspark.train.v4 import checkpoint
from dspark.train.v4.drafter import tower_features
from dspark.train.v4.heads import DSparkHeads, Heads, MtpHeads
from dspark.train.v4.tower import Tower
from dspark.types import SamplingParams
from tests.drafters import tiny_v4
from tests.drafters.test_deepseek_v4 import feed, proposed
from tests.tiny import DictSource
from tests.train.v4.test_tower import documents, served

ANCHORS = (1, 2, 5, 9, 30, 62)
LENGTHS = (70, 69)


def made(c: V4Config, drafter: CarriedDrafter) -> tuple[Tower, Heads, DictSource]:
    weights = DictSource(
        tiny_v4.tensors(c, tower_shapes(c)) | tiny_v4.tensors(c, stage_shapes(c, drafter), 1)
    )
    tower = Tower(c)
    tower.load_state_dict(checkpoint.trained(weights, tower.state_dict(), c))
    tower.requires_grad_(False)
    heads: Heads = MtpHeads(c, tower.embed.weight)
    if drafter.settings is not None:
        heads = DSparkHeads(c, drafter.settings, tower.embed.weight, confidence=drafter.confidence)
    heads.load_state_dict(checkpoint.trained(weights, heads.state_dict(), c))
    return tower, heads, weights


def packed(
    tower: Tower,
    heads: Heads,
    texts: list[tuple[int, ...]],
    anchors: tuple[int, ...] = ANCHORS,
    unseen: int = 0,
) -> Pack:
    settings = heads.settings if isinstance(heads, DSparkHeads) else None
    layers = None if settings is None else settings.target_layer_ids
    # In fp32: what is compared are the stages.
    found = tower_features(tower, [Sample(t, 1) for t in texts], layers, dtype=torch.float32)
    d = tower.config.hidden_size
    columns = range(found[0].hidden.shape[1] // d - 1)
    slots = 1 if settings is None else settings.block_size
    chosen = [torch.tensor(anchors)] * len(texts)
    return pack_blocks(found, chosen, slots, columns, d, unseen)


def laws(tower: Tower, heads: Heads, pack: Pack, previous: Tensor) -> tuple[Tensor, Tensor | None]:
    """q [B, K, V] and the confidences, the tokens before each slot being `previous`."""
    with torch.no_grad():
        x = heads(pack)
        e, w2 = heads.markov(previous)
        logits = tower.head(heads.exit.norm(x))
        if e is not None and w2 is not None:
            logits = logits + e @ w2.T
        sure = heads.confidence(x, e)
    return logits.softmax(-1), None if sure is None else sure.sigmoid()


@pytest.mark.parametrize("form", ["mtp1", "dspark", "dspark without heads"])
def test_proposals_are_the_served_ones(form: str) -> None:
    c = tiny_v4.config()
    drafter = tiny_v4.MTP if form == "mtp1" else tiny_v4.dspark(c)
    if form == "dspark without heads":
        drafter = tiny_v4.dspark(c, markov=None, confidence=False)
    tower, heads, weights = made(c, drafter)
    texts = documents(c, *LENGTHS)
    pack = packed(tower, heads, texts)
    target = served(c, weights)
    serve: Any = V4MtpDrafter if form == "mtp1" else V4DSparkDrafter
    for i, text in enumerate(texts):
        for j, anchor in enumerate(ANCHORS):
            running = serve(target, drafter)
            ids = list(text[: anchor + 1])
            feed(target, running, ids[:-1], 32)
            draft = proposed(running, ids)
            assert draft.probs is not None
            block = i * len(ANCHORS) + j
            previous = pack.previous.clone()
            previous[block, 1:] = torch.tensor(draft.tokens[:-1])
            q, sure = laws(tower, heads, pack, previous)
            assert (q[block] - draft.probs).abs().max() < 1e-4
            if sure is not None:
                assert (sure[block] - draft.confidence).abs().max() < 1e-4
            else:
                assert draft.confidence is None
    assert len(draft.tokens) == (1 if form == "mtp1" else tiny_v4.BLOCK)


def test_blocks_without_the_last_features_are_those_drafted_ahead() -> None:
    """The served drafter, told of rows up to three before the anchor, draws from the same law; and
    no gradient reaches the features that were left out."""
    c = tiny_v4.config()
    drafter = tiny_v4.dspark(c)
    tower, heads, weights = made(c, drafter)
    texts, unseen = documents(c, *LENGTHS), 3
    pack = packed(tower, heads, texts, (5, 30, 62), unseen)
    assert pack.unseen == unseen
    target = served(c, weights)
    for j, anchor in enumerate((5, 30, 62)):
        running = V4DSparkDrafter(target, drafter)
        ids = list(texts[0][: anchor + 1])
        feed(target, running, ids[: anchor - unseen], 32)
        context = DraftContext(
            0, ids, SamplingParams(temperature=1.0), tiny_v4.BLOCK, streams(1)[0], unseen
        )
        (draft,) = running.propose([context])
        assert draft.probs is not None and draft.confidence is not None
        previous = pack.previous.clone()
        previous[j, 1:] = torch.tensor(draft.tokens[:-1])
        q, sure = laws(tower, heads, pack, previous)
        assert sure is not None
        assert (q[j] - draft.probs).abs().max() < 1e-4
        assert (sure[j] - draft.confidence).abs().max() < 1e-4
        read = pack.context.clone().requires_grad_()
        (grad,) = torch.autograd.grad(heads(replace(pack, context=read))[j].square().sum(), [read])
        seen = grad.abs().sum(-1) > 0
        assert seen[max(anchor - unseen - c.window, 0) : anchor - unseen].all()
        assert not seen[anchor - unseen :].any()


@pytest.mark.parametrize("form", ["mtp1", "dspark"])
def test_every_parameter_learns_and_the_confidence_head_alone_from_its_loss(form: str) -> None:
    c = tiny_v4.config()
    drafter = tiny_v4.MTP if form == "mtp1" else tiny_v4.dspark(c)
    tower, heads, _ = made(c, drafter)
    pack = packed(tower, heads, documents(c, *LENGTHS))
    x = heads(pack)
    e, w2 = heads.markov(pack.previous)
    logits = tower.head(heads.exit.norm(x))
    logits = logits if e is None or w2 is None else logits + e @ w2.T
    parameters = dict(heads.named_parameters())
    log_q = logits.log_softmax(-1).gather(-1, pack.labels[..., None])
    grads = torch.autograd.grad(log_q.mean(), list(parameters.values()), allow_unused=True)
    for (name, _), grad in zip(parameters.items(), grads, strict=True):
        taught = grad is not None and bool(grad.abs().max() > 0)
        assert taught != ("confidence" in name), name
    sure = heads.confidence(heads(pack), heads.markov(pack.previous)[0])
    if sure is not None:
        grads = torch.autograd.grad(sure.sum(), list(parameters.values()), allow_unused=True)
        taught = [n for n, g in zip(parameters, grads, strict=True) if g is not None]
        assert taught == ["mtp.2.confidence_head.proj.weight"]


def test_their_tensors_have_the_names_and_shapes_that_are_read() -> None:
    c = tiny_v4.config()
    for drafter in (tiny_v4.MTP, tiny_v4.dspark(c)):
        _, heads, _ = made(c, drafter)
        written = checkpoint.official(heads.state_dict())
        assert {n: tuple(t.shape) for n, t in written.items()} == stage_shapes(c, drafter)
    assert {
        n: tuple(t.shape) for n, t in checkpoint.official(Tower(c).state_dict()).items()
    } == tower_shapes(c)
