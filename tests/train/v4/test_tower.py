"""The tower that trains against the tower that serves: the same weights, the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_names import tower_shapes
from dspark.models.target import Segment, pack
from dspark.train.distributed import Group
from dspark.train.v4 import checkpoint
from dspark.train.v4.tower import Tower, initialise
from tests.drafters.tiny_v4 import config, tensors
from tests.tiny import DictSource


def tower(c: V4Config, seed: int = 0) -> tuple[Tower, DictSource]:
    """A tower with random weights in which nothing is neutral, and their source."""
    weights = DictSource(tensors(c, tower_shapes(c), seed))
    made = Tower(c)
    made.load_state_dict(checkpoint.trained(weights, made.state_dict(), c))
    return made, weights


def served(c: V4Config, weights: DictSource, num_slots: int = 4) -> DeepseekV4:
    return DeepseekV4(
        c, weights, dtype=torch.float32, num_slots=num_slots, max_context=256,
        device=torch.device("cpu"),
    )  # fmt: skip


def documents(c: V4Config, *lengths: int) -> list[tuple[int, ...]]:
    g = torch.Generator().manual_seed(sum(lengths))
    return [tuple(torch.randint(c.vocab_size, (n,), generator=g).tolist()) for n in lengths]


KINDS: dict[str, dict[str, Any]] = {
    "sliding, hash": {"compress_ratios": [0], "num_hash_layers": 1},
    "sliding, scored": {"compress_ratios": [0], "num_hash_layers": 0},
    "sparse": {"compress_ratios": [4], "num_hash_layers": 0},
    "sparse, all entries": {"compress_ratios": [4], "num_hash_layers": 0, "index_topk": 64},
    "heavily compressed": {"compress_ratios": [8], "num_hash_layers": 0},
    "heavily compressed by 128": {"compress_ratios": [128], "num_hash_layers": 0},
    "all of them": {"compress_ratios": [0, 4, 8, 4, 0], "num_hash_layers": 1},
    "window 64": {"compress_ratios": [0, 4, 8, 4, 0], "sliding_window": 64},
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_the_tower_that_serves(kind: str) -> None:
    c = config(**{**KINDS[kind], "num_hidden_layers": len(KINDS[kind]["compress_ratios"])})
    # Another seed than 0, where one token's router has a tie within rounding.
    made, weights = tower(c, seed=1)
    texts = documents(c, 150, 7, 96, 33)
    docs = made.documents(texts)
    with torch.no_grad():
        x_NSD, kept = made.streams(docs, (0, c.num_layers - 1))
        logits = made.head(made.final(x_NSD)).view(docs.num, docs.length, -1)
    target = served(c, weights)
    layers = (0, c.num_layers - 1, target.streams_layer)
    segments = [Segment(i, 0, t, len(t)) for i, t in enumerate(texts)]
    out = target.forward(pack(segments), layers)
    assert out.features is not None
    found = torch.cat([logits[i, : len(t)] for i, t in enumerate(texts)])
    assert (found - out.logits).abs().max() < 1e-4
    assert out.logits.std() > 0.3
    features = torch.cat([kept[0], kept[c.num_layers - 1], x_NSD.flatten(1)], -1)[docs.real_N]
    assert torch.allclose(features, out.features, rtol=1e-4, atol=1e-4)


def test_the_loss_is_that_of_the_logits_over_real_tokens() -> None:
    c = config()
    made, _ = tower(c)
    texts = documents(c, 40, 9)
    with torch.no_grad():
        loss, count = made.loss(made.documents(texts))
        logits = [made(made.documents([t])) for t in texts]
    each = [
        torch.nn.functional.cross_entropy(x[: len(t) - 1], torch.tensor(t[1:]), reduction="sum")
        for x, t in zip(logits, texts, strict=True)
    ]
    assert count == 39 + 8
    assert loss == pytest.approx(float(sum(each)), rel=1e-5)


def test_every_parameter_learns_and_the_indexer_from_its_own_loss_alone() -> None:
    c = config(num_hidden_layers=5, compress_ratios=[0, 4, 8, 4, 0])
    made, _ = tower(c)
    docs = made.documents(documents(c, 96, 64, 80))
    loss, _ = made.loss(docs)
    parameters = dict(made.named_parameters())
    grads = torch.autograd.grad(
        loss, list(parameters.values()), allow_unused=True, retain_graph=True
    )
    for (name, _), grad in zip(parameters.items(), grads, strict=True):
        if ".indexer." in name:
            assert grad is None, name
        else:
            assert grad is not None and grad.abs().max() > 0, name
    assert len(docs.index_losses) == 2
    grads = torch.autograd.grad(
        sum(docs.index_losses), list(parameters.values()), allow_unused=True
    )
    for (name, _), grad in zip(parameters.items(), grads, strict=True):
        assert (grad is not None) == (".indexer." in name), name
        assert grad is None or grad.abs().max() > 0, name


def test_padding_and_neighbours_change_nothing() -> None:
    c = config()
    made, _ = tower(c)
    texts = documents(c, 70, 20)
    with torch.no_grad():
        both = made(made.documents(texts)).view(2, -1, c.vocab_size)
        alone = made(made.documents(texts[1:]))
    assert (both[1, :20] - alone[:20]).abs().max() < 1e-5


def test_fresh_weights_mix_streams_hardly_and_know_nothing() -> None:
    c = config(num_hidden_layers=5)
    made = Tower(c)
    initialise(made, c, torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss, count = made.loss(made.documents(documents(c, 60, 60)))
    uniform = torch.log(torch.tensor(float(c.vocab_size)))
    assert float(loss / count) == pytest.approx(float(uniform), rel=0.05)


def test_experts_of_a_token_differ_and_a_busy_one_loses_bias() -> None:
    c = config()
    made, _ = tower(c)
    fresh = Tower(c).layers[0].ffn.gate.tid2eid
    assert (fresh.sort(-1).values.diff(dim=-1) > 0).all()
    assert fresh.flatten().bincount(minlength=c.num_experts).min() > 0
    moe = made.layers[2].ffn
    made.loss(made.documents(documents(c, 90)))
    assert moe.load_X is not None and int(moe.load_X.sum()) == 90 * c.experts_per_token
    before, load = moe.gate.bias.clone(), moe.load_X.float()
    moe.balance(0.01, Group())
    moved = moe.gate.bias - before
    assert torch.equal(moved.sign(), (load.mean() - load).sign()) and moe.load_X is None
