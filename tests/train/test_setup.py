"""What a run decides from its text and its target: split, vocabulary, layers, weights, needs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import ConfigError, ResourceError
from dspark.models.decoder import Decoder
from dspark.train import plan as plans
from dspark.train.config import from_raw
from dspark.train.features import build_cache, read_meta
from dspark.train.plan import make_plan
from dspark.train.samples import Sample
from dspark.train.setup import (
    Run,
    decide,
    draft_vocabulary,
    make_features,
    make_model,
    split,
    unused_token,
)
from tests.tiny import target
from tests.train.tiny_runs import DRAFTERS, checkpoint, raw, run, samples


def decided(out: Path, **sections: dict[str, Any]) -> Run:
    base = raw(out)
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return decide(from_raw(base), checkpoint(), samples(), (256,))


# Split


def text(count: int) -> list[Sample]:
    """Four samples of every prompt: two at temperature 1, one at 0.7, one without an anchor."""
    found = []
    for i in range(count):
        prompt = (i, i + 1, i + 2)
        found += [Sample((*prompt, 7, 8, 9), 3, t) for t in (1.0, 0.7, 1.0)]
        found.append(Sample((*prompt, 7), 3, 1.0))
    return found


@pytest.mark.parametrize("held_out", [3, 8, 0.1, 0.25])
def test_held_out_samples(held_out: float) -> None:
    t = text(10)
    training, held = split(t, held_out)
    assert len(held) == (held_out if held_out >= 1 else round(held_out * 40))
    assert all(t[i].temperature == 1.0 and len(t[i].tokens) == 6 for i in held)
    prompts = {t[i].tokens[:3] for i in held}
    assert all(t[i].tokens[:3] not in prompts for i in training), "no prompt is on both sides"
    assert len(training) == 40 - 4 * len(prompts)
    assert split(t, held_out) == (training, held)


def test_more_text_moves_no_sample_across() -> None:
    few, many = text(10), text(20)
    _, a = split(few, 4)
    _, b = split(many, 8)
    kept = {few[i].tokens for i in a} & {many[i].tokens for i in b}
    assert len(kept) >= len({few[i].tokens for i in a}) / 2


def test_other_temperatures_come_last() -> None:
    t = [Sample((60 + i, 1, 2, 3), 1, 0.7) for i in range(4)] + text(3)
    _, held = split(t, 8)
    assert sum(t[i].temperature == 1.0 for i in held) == 6


def test_nothing_held_out_and_nothing_left() -> None:
    training, held = split(text(3), 0)
    assert training == tuple(range(12)) and len(held) == 9
    with pytest.raises(ConfigError, match="leaves no sample"):
        split(text(3), 12)


# Vocabulary and mask


def test_the_draft_vocabulary_is_what_answers_use_most() -> None:
    t = [Sample((1, 1, 1, 9, 9, 9, 5, 5, 7, 3), 3)]
    assert draft_vocabulary(t, 3, 20, (15,)).tolist() == [5, 9, 15]
    assert draft_vocabulary(t, 6, 20, (15,)).tolist() == [0, 3, 5, 7, 9, 15], "ties: lower ids"
    assert draft_vocabulary(t, 20, 20, (15,)).tolist() == list(range(20))
    for size in (1, 21):
        with pytest.raises(ConfigError, match="out of range"):
            draft_vocabulary(t, size, 20, (15,))


def test_its_counts_are_of_the_training_text(tmp_path: Path) -> None:
    made = run(tmp_path)
    assert made.draft_ids is not None and len(made.draft_ids) == 100 and 256 in made.draft_ids
    counts = Counter(
        x for i in made.training for x in made.samples[i].tokens[made.samples[i].start :]
    )
    least = min(counts[int(i)] for i in made.draft_ids if int(i) != 256)
    rest = set(range(256)) - set(made.draft_ids.tolist())
    assert max(counts[i] for i in rest) <= least


def test_the_mask_is_a_token_that_the_text_does_not_use() -> None:
    assert unused_token([Sample((1, 19, 18), 1)], 20) == 17
    assert unused_token([Sample(tuple(range(20)), 1)], 20) == 19


# Drafter and layers


@pytest.mark.parametrize("form", DRAFTERS)
def test_presets(tmp_path: Path, form: str) -> None:
    d = run(tmp_path, form).drafter
    assert d.kind == ("mtp" if form == "mtp" else "block")
    assert d.sample_from_anchor == (form != "dflash")
    assert bool(d.markov_rank) == d.confidence_head == (form == "dspark")
    assert d.target_layer_ids == ((2,) if form == "mtp" else (0,)) and d.target == "tiny"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "mtp", "num_layers": 2}, "one layer"),
        ({"kind": "mtp", "markov_rank": 4}, "block_size 1"),
        ({"init_layers": [1]}, "names 1 target layers, the drafter has 2"),
        ({"init_layers": [1, 3]}, "3 is out of range: 0 to 2"),
        ({"target_layer_ids": [2]}, "final layer"),
        ({"target_layer_ids": [5]}, "out of range"),
        ({"mask_token_id": 500}, "outside the embedding"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "needs markov_rank"),
    ],
)
def test_impossible_drafters(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    base = raw(tmp_path)
    base["drafter"] = values if values.get("kind") == "mtp" else {**DRAFTERS["dspark"], **values}
    with pytest.raises(ConfigError, match=words):
        decide(from_raw(base), checkpoint(), samples(), (256,))


def test_initial_weights(tmp_path: Path) -> None:
    weights = checkpoint().weights
    made = decided(tmp_path, drafter={"init_layers": [2, 0], "markov_head_type": "bilinear"})
    parts = make_model(made).state_dict()
    for mine, theirs in ((0, 2), (1, 0)):
        for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            source = weights.tensor(f"model.layers.{theirs}.{name}")
            assert torch.equal(parts[f"layers.{mine}.{name}"], source)
    assert torch.equal(parts["norm.weight"], weights.tensor("model.norm.weight"))
    assert float(parts["fc.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert not parts["markov_head.markov_w2.weight"].any()
    assert float(parts["markov_head.markov_w1.weight"].std()) == pytest.approx(1, rel=0.1)
    assert (parts["markov_head.hidden_proj.bias"] == 1).all()
    random = make_model(decided(tmp_path)).state_dict()
    assert float(random["layers.1.mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.05)
    again = make_model(decided(tmp_path)).state_dict()
    assert all(torch.equal(random[n], again[n]) for n in random)
    other = make_model(decided(tmp_path, train={"seed": 1})).state_dict()
    assert not torch.equal(random["fc.weight"], other["fc.weight"])


def test_stored_layers(tmp_path: Path) -> None:
    cache = {"mode": "cache"}
    assert decided(tmp_path, features=cache).layers == (0, 2)
    given = decided(tmp_path, features={**cache, "layers": [1, 0, 2]})
    assert given.layers == (1, 0, 2) and given.columns == (1,)
    for wrong in ([0, 1], [1, 2], [2, 0], [0, 0, 2]):
        with pytest.raises(ConfigError, match=r"needs \[0, 2\], the final layer last"):
            decided(tmp_path, features={**cache, "layers": wrong})


def test_a_cache_that_is_there_is_shared(tmp_path: Path) -> None:
    """Layers of a larger cache are taken over; a complete one needs no target; a part is filled."""
    model: Decoder = target()
    where = tmp_path / "features"
    build_cache(model, "tiny fp32", samples(), where, (1, 0, 2), 64)
    features = {"mode": "cache", "directory": str(where)}
    made = decided(tmp_path, features=features)
    assert made.layers == (1, 0, 2)
    have = made.cached()
    assert have is not None and have.complete == 12
    seen: list[int] = []
    make_features(made, lambda done, total: seen.append(done))
    assert not seen
    mtp = decided(tmp_path, features=features, drafter={"kind": "mtp", "num_layers": 1,
        "block_size": 1, "markov_rank": 0, "draft_vocab_size": 0})  # fmt: skip
    assert mtp.columns == (2,) and mtp.layers == (1, 0, 2)
    with pytest.raises(ConfigError, match="another target"):
        decided(tmp_path, features=features, target={"dtype": "bf16"}).cached()


def test_an_incomplete_cache_is_completed(tmp_path: Path) -> None:
    made = decided(tmp_path, features={"mode": "cache", "pass_tokens": 40})

    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > 100:
            raise StopError

    with pytest.raises(StopError):
        make_features(made, stop)
    assert 0 < read_meta(made.directory).complete < 12
    assert len(make_features(made)) == 12


# Plan


def test_a_plan_counts_what_is_known(tmp_path: Path) -> None:
    made = decided(tmp_path, features={"mode": "cache"})
    parameters = sum(p.numel() for p in make_model(made).parameters())
    plan = make_plan(made, parameters)
    facts = dict(plan.facts)
    assert facts["samples"] == f"12, {sum(len(s.tokens) for s in samples())} tokens"
    assert facts["held out"] == "3, 3 of them at temperature 1"
    assert facts["steps"].startswith("10, about ")
    needs = {n.name: n.bytes for n in plan.memory}
    assert needs["weights"] == 4 * parameters and needs["Adam"] == 8 * parameters
    assert plan.disk == made.cache.num_bytes
    make_features(made)
    after = make_plan(made, parameters)
    assert after.disk == 0 and "target" not in {n.name for n in after.memory}
    plan.check()
    assert len(plan.lines()) == len(plan.facts) + len(plan.memory) + 2


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decided(tmp_path, features={"mode": "cache"})
    with monkeypatch.context() as patch:
        patch.setattr(plans, "_free_memory", lambda run: 1000)
        with pytest.raises(ResourceError, match=r"not enough memory: .* most is"):
            make_plan(made, 10**6).check()
    with monkeypatch.context() as patch:
        patch.setattr(plans, "_disk", lambda run: (2**30, 2**20))
        with pytest.raises(ResourceError, match=r"needs 1\.00 GiB more at .*features"):
            make_plan(made, 10**6).check()
