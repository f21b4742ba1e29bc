"""The accepted length told from text is the one that the engine then reaches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.engine.engine import Engine
from dspark.train.anchors import choose, pack_blocks
from dspark.train.estimate import accepted_length, chances, expected_rounds
from dspark.train.features import compute
from dspark.train.losses import LossWeights
from dspark.train.samples import Sample
from dspark.train.step import Teacher, TrainStep
from dspark.types import Stats
from tests.drafters import tiny_drafters
from tests.engine.oracle import ByteTokenizer, play, request
from tests.tiny import oracle, source, target


@pytest.mark.parametrize(
    ("chance", "slots", "tokens", "rounds"),
    [(1.0, 2, 6, 2), (1.0, 2, 7, 3), (0.0, 3, 5, 5), (1.0, 5, 1, 1)],
)
def test_certain_rounds(chance: float, slots: int, tokens: int, rounds: float) -> None:
    assert expected_rounds(torch.full((tokens, slots), chance)) == pytest.approx(rounds)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 12))
def test_expected_rounds_are_those_of_many_walks(seed: int, slots: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.random((tokens, slots))
    walks, n = 0, 4000
    for _ in range(n):
        at = 0
        while at < tokens:
            walks += 1
            misses = np.flatnonzero(rng.random(slots) >= table[at])
            at += (int(misses[0]) if misses.size else slots) + 1
    found = expected_rounds(torch.from_numpy(table))
    assert found == pytest.approx(walks / n, abs=5 * tokens / n**0.5)


def test_no_text_is_no_estimate() -> None:
    assert accepted_length([]) is None


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("form", ["mtp", "dflash", "rnn", "everything"])
def test_it_is_what_serving_reaches(form: str, temperature: float) -> None:
    """Field failure B54: the metric of training and the served value, within 5 %."""
    model = target(oracle("llama"), num_slots=8)
    config, weights = source(oracle("llama"))
    c = tiny_drafters.config(model, form, candidates=0)
    ids = tiny_drafters.draft_ids(c)
    with torch.no_grad():
        trained = tiny_drafters.model(c)
        if form != "mtp":  # flat distributions, which are accepted now and then
            trained.norm.weight *= 0.3
    drafter = tiny_drafters.drafter(model, form, candidates=0)
    with torch.no_grad():
        drafter._model.norm.weight.copy_(trained.norm.weight)  # type: ignore[attr-defined]
    engine = Engine(model, drafter, ByteTokenizer())
    count = 120 if temperature else 24
    prompts = {str(i): [i % 250 + 1, 7, (i * 31) % 257] for i in range(count)}
    played = play(engine, [
        request(p, n, temperature=temperature, seed=int(n), max_tokens=24)
        for n, p in prompts.items()
    ])  # fmt: skip
    served = Stats.total([played.outputs[n].stats for n in prompts]).accepted_length
    step = TrainStep(trained, Teacher.of(config, weights, ids), LossWeights())
    layers = (*c.target_layer_ids, model.num_layers - 1)
    texts = []
    for n, p in prompts.items():
        sample = Sample((*p, *played.ids(n)), len(p))
        features = compute(model, [sample], layers)
        pack = pack_blocks(features, [choose(features[0], None, None)], c.block_size,
                           range(c.num_features), c.hidden_size)  # fmt: skip
        texts.append(chances(step, pack, greedy=temperature == 0))
    told = accepted_length(texts)
    assert served is not None and told is not None
    assert told == pytest.approx(served, rel=0.05)
    if temperature:
        assert told > 1.03  # or nothing was told
