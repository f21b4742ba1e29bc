"""The loop: order of the data, learning rate, what stops it, and what it decides from the text."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.drafters import checkpoint
from dspark.errors import DSparkError
from dspark.train import setup, state
from dspark.train.batches import Item, Order, Place, anchor_rng
from dspark.train.config import TrainSection, from_raw
from dspark.train.features import LiveFeatures
from dspark.train.samples import Sample
from dspark.train.setup import make_features
from dspark.train.trainer import Outcome, Report, decays, interrupts, learning_rate
from tests.train import tiny_runs
from tests.train.tiny_runs import raw, run, samples, trainer

# Learning rate and decay


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 0.5, 1.0])
def test_the_rate_never_exceeds_its_peak(warmup: float, schedule: Any) -> None:
    c = TrainSection(lr=6e-4, warmup=warmup, schedule=schedule)
    for total in (1, 2, 3, 7, 100, 1999, 2000):
        rates = [learning_rate(step, total, c) for step in range(total)]
        assert all(0 < r <= c.lr for r in rates)
        peak = rates.index(max(rates))
        assert rates[:peak] == sorted(rates[:peak])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        if total > 10:
            assert max(rates) == c.lr
            assert peak == max(0, round(warmup * total) - 1)
            if schedule == "cosine" and warmup < 1:
                assert rates[-1] == pytest.approx(c.lr * c.min_lr)


def test_the_optimiser_gets_that_rate_and_decays_matrices_only(tmp_path: Path) -> None:
    made = trainer(run(tmp_path, warmup=0.5))
    for step in range(4):
        items, _ = made.order.batch(Place(0, 0))
        made.train_step(items)
        assert {g["lr"] for g in made.adam.param_groups} == {learning_rate(step, 10, made.config)}
    decayed = {made.names[p] for p in made.adam.param_groups[0]["params"]}
    rest = {made.names[p] for p in made.adam.param_groups[1]["params"]}
    assert [g["weight_decay"] for g in made.adam.param_groups] == [0.01, 0.0]
    assert "layers.0.self_attn.q_proj.weight" in decayed and "fc.weight" in decayed
    assert {"norm.weight", "confidence_head.proj.bias"} <= rest
    assert not decays("layers.0.attn_conv.base", torch.zeros(2, 8))


# Order of the data


def order(**train: Any) -> Order:
    text = samples(20)
    return Order(text, range(2, 20), TrainSection(**train))


def test_an_epoch_holds_every_sequence_once_in_another_order_each() -> None:
    o, place = order(anchors_per_step=40), Place()
    seen: list[Item] = []
    while place.epoch < 3:
        items, place = o.batch(place)
        assert o.anchors_of(items) >= 40 > o.anchors_of(items[:-1])
        seen += items
    epochs = [[i.sequence for i in seen if i.epoch == e] for e in range(3)]
    assert [sorted(e) for e in epochs] == [list(range(2, 20))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    again, there = order(anchors_per_step=40), place
    assert again.batch(there) == o.batch(there), "a place is enough to go on"
    assert order(anchors_per_step=40, seed=1).batch(Place()) != o.batch(Place())


def test_lengths_of_runs() -> None:
    per_epoch = order().anchors_per_epoch
    assert order(steps=7).total_steps() == 7
    assert order(anchors_per_step=per_epoch).total_steps() == 1
    assert order(anchors_per_step=per_epoch, epochs=3).total_steps() == 3
    assert order(sequences_per_step=6, epochs=2).total_steps() == 6
    steps = order(anchors_per_step=40, anchors=1000).total_steps()
    assert 1000 / 70 < steps <= 25
    assert order(anchors_per_sequence=2).anchors_per_epoch == 36


def test_sequences_without_an_anchor_are_left_out() -> None:
    text = [Sample((1, 2, 3), 2), Sample((1, 2, 3, 4), 2)]
    o = Order(text, (0, 1), TrainSection(sequences_per_step=3))
    assert [i.sequence for i in o.batch(Place())[0]] == [1, 1, 1]


def test_anchors_are_drawn_anew_in_every_epoch() -> None:
    def draw(*key: int, seed: int = 0) -> int:
        return int(anchor_rng(seed, Item(*key)).integers(2**62))

    assert draw(3, 0) == draw(3, 0)
    assert len({draw(3, 0), draw(3, 1), draw(4, 0), draw(3, -1), draw(3, 0, seed=1)}) == 5


# What stops a run


def test_it_learns(tmp_path: Path) -> None:
    reports: list[Report] = []
    made = trainer(run(tmp_path, "dspark", steps=60, eval_every=60))
    assert made.train(reports.append) is Outcome.finished
    losses = [r.values["loss"] for r in reports if r.kind == "log"]
    assert losses[-1] < 0.8 * losses[0]
    assert [r.step for r in reports if r.kind == "saved"] == list(range(5, 61, 5))
    written = checkpoint.load(tmp_path / "drafter")
    assert written.training["anchors"] == made.counters.anchors
    assert written.training["accepted_length"] == made.estimate["served_length"] > 1
    assert written.training["temperature"] == 1.0 and written.training["text"] == made.run.text
    assert made.scale is not None  # factors on the features, which the saved `fc` has taken in
    trained = made.weights()
    trained["fc.weight"] = trained["fc.weight"] * made.scale
    for name, p in trained.items():
        torch.testing.assert_close(written.model.state_dict()[name].float(), p.bfloat16().float())


@pytest.mark.parametrize(("where", "word"), [("weight", "loss"), ("gradient", "gradient")])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stops_before_the_update(
    tmp_path: Path, where: str, word: str, value: float
) -> None:
    made = trainer(run(tmp_path, save_every=2))

    def poison(report: Report) -> None:
        if report.kind == "step" and report.step == 3:
            if where == "weight":
                made.model.norm.weight.data[0] = value
            else:
                made.model.norm.weight.register_hook(lambda g: g * value)

    with pytest.raises(DSparkError) as e:
        made.train(poison)
    text = str(e.value)
    assert "\n" not in text and f"the {word} is not finite at step 4, batch of sequences" in text
    items, _ = made.order.batch(Place(made.counters.epoch, made.counters.offset))
    assert ", ".join(str(i.sequence) for i in items) in text
    found = state.load(tmp_path)
    assert found is not None and found.counters.step == 2
    assert all(torch.isfinite(p).all() for p in found.model.values())
    assert trainer(run(tmp_path, save_every=2)).train() is Outcome.finished


def test_ctrl_c_stops_behind_the_step(tmp_path: Path) -> None:
    made = trainer(run(tmp_path, save_every=100))

    def press(report: Report) -> None:
        if report.kind == "step" and report.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with interrupts() as interrupted:
        assert made.train(press, interrupted) is Outcome.interrupted
        with pytest.raises(KeyboardInterrupt):  # who presses again does not want to wait
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    found = state.load(tmp_path)
    assert found is not None and found.counters.step == 3
    assert (tmp_path / "drafter" / "config.json").exists()


def test_max_minutes(tmp_path: Path) -> None:
    made = trainer(run(tmp_path, max_minutes=1e-9))
    assert made.train() is Outcome.out_of_time and made.counters.step == 1
    found = state.load(tmp_path)
    assert found is not None and found.counters.step == 1 and found.counters.seconds > 0


def test_live_and_cached_features_give_the_same_losses(tmp_path: Path) -> None:
    live = run(tmp_path / "live")
    raw_ = raw(tmp_path / "cache")
    raw_["features"] = {"mode": "cache", "layers": [1, 0, 2]}
    cached = setup.decide(from_raw(raw_), tiny_runs.checkpoint(), samples(), (256,))
    assert isinstance(make_features(live), LiveFeatures) and cached.layers == (1, 0, 2)
    assert cached.columns == tuple(cached.layers.index(i) for i in cached.drafter.target_layer_ids)
    losses = []
    for made in (trainer(live), trainer(cached)):
        pack = made.make_pack([Item(i, 0) for i in range(6)], None)
        losses.append(made._losses(pack))
    torch.testing.assert_close(losses[0][0], losses[1][0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(losses[0][1], losses[1][1], atol=0.05, rtol=1e-3)
