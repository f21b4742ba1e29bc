"""The DeepSeek-V4 tower against `transformers`, in every shape a pass can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.target import Segment, pack
from tests.models.deepseek_v4.tiny import (
    ALL_KINDS,
    CSA,
    HCA,
    SWA,
    expected,
    official,
    oracle,
    run,
    source,
    target,
    tokens,
)
from tests.tiny import DictSource

LENGTH = 300
MODELS: dict[str, dict[str, Any]] = {
    "all kinds, window 8": {"kinds": ALL_KINDS},
    "all kinds, window 64": {"kinds": ALL_KINDS, "sliding_window": 64, "seed": 1},
    "hash layers only": {"kinds": (HCA, CSA), "num_hash_layers": 2, "seed": 2},
    "no yarn, all entries": {
        "kinds": (CSA, SWA, HCA, CSA),
        "num_hash_layers": 0,
        "rope_scaling": None,
        "index_topk": 512,
        "seed": 3,
    },
}


@dataclass(frozen=True)
class Pair:
    ours: DeepseekV4
    ids: tuple[int, ...]
    logits: Tensor
    """What the oracle says to `ids`."""

    def check(self, got: Tensor, start: int, size: int) -> None:
        wanted = self.logits[start : start + size]
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


PATHS = [
    *((name, "mixed") for name in list(MODELS)[2:]),
    *((name, path) for name in list(MODELS)[:2] for path in ("kernels", "torch", "mixed")),
]


@pytest.fixture(params=PATHS, ids=", ".join, scope="module")
def pair(request: pytest.FixtureRequest) -> Pair:
    name, path = request.param
    model = oracle(**MODELS[name])
    ids = tokens(LENGTH)
    return Pair(target(model, path=path), ids, expected(model, ids))


def test_full_pass(pair: Pair) -> None:
    """Longer than `max_block`: one pass for the caller, several inside."""
    pair.check(run(pair.ours, pair.ids), 0, LENGTH)


def test_a_block_as_long_as_the_text() -> None:
    model = oracle()
    ids = tokens(LENGTH)
    ours = target(model, max_block=512)
    torch.testing.assert_close(run(ours, ids), expected(model, ids), atol=1e-4, rtol=1e-4)


def test_single_steps(pair: Pair) -> None:
    got = torch.cat([run(pair.ours, pair.ids[i : i + 1], i) for i in range(90)])
    pair.check(got, 0, 90)


def test_blocks_at_every_offset(pair: Pair) -> None:
    """Sizes 1-9 from every offset, so that each meets every boundary of a window."""
    run(pair.ours, pair.ids[:80])
    for offset in range(72):
        # On PyTorch alone one size an offset: it takes its time.
        every = range(1, 10) if pair.ours.maths.kernels else (1 + offset % 9,)
        for size in every:
            got = run(pair.ours, pair.ids[offset : offset + size], offset)
            pair.check(got, offset, size)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 9, 16, 17, 63])
def test_block_after_block(pair: Pair, size: int) -> None:
    n = 130
    got = [run(pair.ours, pair.ids[i : min(i + size, n)], i) for i in range(0, n, size)]
    pair.check(torch.cat(got), 0, n)


def test_ragged_batch(pair: Pair) -> None:
    """Sequences of all lengths and stages share a pass, in any order, some longer than a block."""
    starts, sizes = (0, 201, 41, 7), (150, 1, 9, 30)
    for slot, start in enumerate(starts):
        if start:
            run(pair.ours, pair.ids[:start], 0, slot)
    order = (2, 0, 3, 1)
    segments = [
        Segment(s, starts[s], pair.ids[starts[s] : starts[s] + sizes[s]], sizes[s]) for s in order
    ]
    logits = pair.ours.forward(pack(segments)).logits
    parts = torch.split(logits, [sizes[s] for s in order])
    for s, part in zip(order, parts, strict=True):
        pair.check(part, starts[s], sizes[s])


def test_a_slot_is_used_again_by_a_shorter_text(pair: Pair) -> None:
    run(pair.ours, tokens(250, seed=9), 0, slot=1)
    got = [run(pair.ours, pair.ids[:21], 0, slot=1)]
    got += [run(pair.ours, pair.ids[i : i + 3], i, slot=1) for i in range(21, 60, 3)]
    pair.check(torch.cat(got), 0, 60)


def test_features() -> None:
    """Block outputs as the mean over the streams, the embedding, and the streams themselves."""
    model = oracle()
    ids = tokens(150)
    with torch.inference_mode():
        hidden = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    ours = target(model)
    streams = ours.streams_layer
    got = ours.forward(pack([Segment(0, 0, ids, 1)]), (-1, 1, 4, streams)).features
    assert got is not None
    states = [h[0] for h in hidden.hidden_states]
    wanted = [model.model.embed_tokens.weight[list(ids)].detach()]
    wanted += [states[2].mean(1), states[5].mean(1), states[5].flatten(1)]
    assert streams == 5 and got.shape == (150, 7 * 64)
    torch.testing.assert_close(got, torch.cat(wanted, -1), atol=1e-4, rtol=1e-4)


def test_bf16_follows_fp32() -> None:
    model = oracle(index_topk=512)  # rounding may not change what an indexer chooses
    ids = tokens(60)
    ours = target(model, dtype=torch.bfloat16)
    got = torch.cat([run(ours, ids[:40]), *(run(ours, ids[i : i + 1], i) for i in range(40, 60))])
    # A row in which rounding changes the choice of an expert is another row; most are not.
    near = torch.cosine_similarity(got, expected(model, ids), -1)
    assert near.median() > 0.999 and near.mean() > 0.98


def test_int8_products_follow_fp32() -> None:
    model = oracle(index_topk=512)
    ids = tokens(60)
    ours = target(model, dtype=torch.int8)
    got = torch.cat([run(ours, ids[:40]), *(run(ours, ids[i : i + 1], i) for i in range(40, 60))])
    near = torch.cosine_similarity(got, expected(model, ids), -1)
    assert near.median() > 0.99 and near.mean() > 0.9


def test_int8_rows_are_equal_to_the_bit() -> None:
    """Whatever shares the pass: one by one, in blocks, beside others; and so is every feature."""
    model = oracle(sliding_window=16)
    ids = tokens(130)
    ours = target(model, dtype=torch.int8)
    layers = (1, 4, ours.streams_layer)
    whole = ours.forward(pack([Segment(0, 0, ids, 130)]), layers)
    rows = [ours.forward(pack([Segment(1, i, ids[i : i + 1], 1)]), layers) for i in range(130)]
    assert whole.features is not None
    for i, row in enumerate(rows):
        assert row.features is not None
        assert torch.equal(row.logits[0], whole.logits[i])
        assert torch.equal(row.features[0], whole.features[i])
    for at in range(100, 110):
        run(ours, tokens(200, seed=at), 0, slot=2)
        segments = [
            Segment(2, 150, tokens(9, seed=at), 9),
            Segment(1, at, ids[at : at + 7], 7),
            Segment(3, 0, tokens(at, seed=1), 1),
        ]
        assert torch.equal(ours.forward(pack(segments)).logits[9:16], whole.logits[at : at + 7])


def test_int8_bits_do_not_depend_on_threads() -> None:
    ours = target(oracle(), dtype=torch.int8)
    ids = tokens(150)
    alone = run(ours, ids)
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(ours, ids, slot=1), alone)
    finally:
        torch.set_num_threads(1)


def test_only_the_rows_asked_for_get_logits(pair: Pair) -> None:
    batch = pack([Segment(0, 0, pair.ids[:20], 1), Segment(1, 0, pair.ids[:5], 2)])
    got = pair.ours.forward(batch).logits
    pair.check(got[:1], 19, 1)
    pair.check(got[1:], 3, 2)


def test_what_a_drafter_shares() -> None:
    model = oracle()
    ours = target(model)
    x = torch.randn(3, 64)
    head = model.lm_head.weight.detach()
    torch.testing.assert_close(ours.output_head()(x), x @ head.T)
    torch.testing.assert_close(ours.output_head(torch.tensor([5, 2]))(x), x @ head[[5, 2]].T)
    torch.testing.assert_close(ours.linear(head[:7], torch.ones(7))(x), x @ head[:7].T + 1)
    assert torch.equal(ours.embed(torch.tensor([3])), model.model.embed_tokens.weight[[3]].detach())


def test_only_weights_that_can_matter_are_read() -> None:
    """Where all entries always fit the choice, nobody asks for the indexer."""
    model = oracle((CSA, SWA), index_topk=128)
    config, weights = source(model)
    kept = {n: weights.tensor(n) for n in weights.names() if "indexer" not in n}
    assert len(kept) < len(official(dict(model.state_dict())))
    ours = DeepseekV4(
        config,
        DictSource(kept),
        dtype=torch.float32,
        num_slots=1,
        max_context=512,
        device=torch.device("cpu"),
    )
    ids = tokens(200)
    torch.testing.assert_close(run(ours, ids), expected(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.hc_attn_fn",
        "layers.1.attn.wq_a.weight",
        "layers.1.attn.indexer.compressor.ape",
        "layers.0.ffn.gate.tid2eid",
        "layers.1.ffn.experts.3.w2.weight",
        "head.weight",
    ],
)
def test_tensors_of_a_wrong_shape_are_named(name: str) -> None:
    """Kernels would read past their ends."""
    config, weights = source(oracle((SWA, CSA)))
    tensors = {n: weights.tensor(n) for n in weights.names()}
    where = torch.device("cpu")
    for damaged in (tensors[name][:-1], tensors[name] + 1000):
        if damaged.shape == tensors[name].shape and damaged.dtype != torch.int64:
            continue
        with pytest.raises(CheckpointError, match=name):
            DeepseekV4(
                config,
                DictSource({**tensors, name: damaged}),
                dtype=torch.float32,
                num_slots=1,
                max_context=64,
                device=where,
            )
