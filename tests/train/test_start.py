"""What a run begins with: the target's bigram law in the Markov head, or another run's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.drafters.block import BlockModel
from dspark.errors import ConfigError
from dspark.train import setup
from dspark.train.features import Features
from dspark.train.prior import needs_start, start_markov_head
from dspark.train.setup import decide, make_model
from dspark.train.trainer import Outcome
from tests.train import tiny_runs


def changed(out: Path, form: str = "dspark", **drafter: object):  # type: ignore[no-untyped-def]
    made = tiny_runs.run(out, form)
    config = replace(made.config, drafter=replace(made.config.drafter, **drafter))  # type: ignore[arg-type]
    return decide(config, tiny_runs.checkpoint(), tiny_runs.samples(), (256,))


def test_the_head_starts_at_the_targets_law_and_it_is_asked_for_once(tmp_path: Path) -> None:
    run = tiny_runs.run(tmp_path)
    model = make_model(run)
    assert needs_start(model, run)
    asked: list[int] = []
    start_markov_head(run, model, lambda done, _: asked.append(done))
    assert asked
    again = make_model(run)
    assert isinstance(again, BlockModel)
    start_markov_head(run, again, lambda *_: pytest.fail("asked twice"))
    assert model.markov_head is not None and again.markov_head is not None
    assert run.draft_ids is not None
    for name in ("markov_w1", "markov_w2"):
        mine, other = (getattr(m.markov_head, name).weight for m in (model, again))
        assert torch.equal(mine, other)
        assert mine.requires_grad
    outside = torch.ones(257, dtype=torch.bool)
    outside[run.draft_ids] = False
    assert not model.markov_head.markov_w2.weight[outside].any()
    assert model.markov_head.markov_w2.weight[run.draft_ids].any(1).all()


def test_the_start_helps(tmp_path: Path) -> None:
    """Before any step, the drafter accepts more than one that starts at nothing."""
    run = changed(tmp_path, draft_vocab_size=0, markov_rank=32)
    plain, started = tiny_runs.trainer(run), tiny_runs.trainer(run)
    assert isinstance(started.model, BlockModel)
    start_markov_head(run, started.model)
    assert sum(started.evaluate()["accept"]) > 1.2 * sum(plain.evaluate()["accept"])


@pytest.mark.parametrize(
    ("form", "drafter"),
    [("mtp", {}), ("dflash", {}), ("dspark", {"markov_init": "none"})],
)
def test_others_do_not_start_there(tmp_path: Path, form: str, drafter: dict[str, str]) -> None:
    run = changed(tmp_path, form, **drafter)
    assert not needs_start(make_model(run), run)


def test_a_run_that_goes_on_does_not_start_again(tmp_path: Path) -> None:
    trainer = tiny_runs.trainer(tiny_runs.run(tmp_path))
    assert trainer.train() is Outcome.finished
    assert not needs_start(trainer.model, trainer.run)


def test_a_second_stage_begins_with_the_weights_of_the_first(tmp_path: Path) -> None:
    first = tiny_runs.trainer(tiny_runs.run(tmp_path / "a"))
    first.train()
    run = changed(tmp_path / "b", start_from=str(tmp_path / "a" / "drafter"))
    model = make_model(run)
    assert not needs_start(model, run)
    assert run.draft_ids is not None
    for (name, mine), other in zip(
        model.state_dict().items(), first.model.state_dict().values(), strict=True
    ):
        wanted = other.bfloat16().float()
        if name == "fc.weight":  # as it reads features that were not divided by their spread
            assert first.scale is not None
            wanted = (other * first.scale).bfloat16().float()
        if name == "markov_head.markov_w2.weight":
            mine, wanted = mine[run.draft_ids], wanted[run.draft_ids]
        assert torch.equal(mine, wanted), name


def test_a_second_stage_computes_what_the_first_did(tmp_path: Path) -> None:
    """The factors that the saved `fc` took in are divided out again."""
    first = tiny_runs.trainer(tiny_runs.run(tmp_path / "a"))
    first.train()
    second = tiny_runs.trainer(changed(tmp_path / "b", start_from=str(tmp_path / "a" / "drafter")))
    assert first.scale is not None and second.scale is not None
    assert float(first.scale.max()) < 0.5  # or this would show nothing
    before, after = first.evaluate(), second.evaluate()
    assert after["loss"] == pytest.approx(before["loss"], rel=0.01)  # bf16 on the way


@pytest.mark.parametrize("form", ["mtp", "dspark"])
def test_a_large_constant_channel_does_not_drown_the_others(tmp_path: Path, form: str) -> None:
    run = tiny_runs.run(tmp_path, form)
    features = setup.make_features(run)
    plain = setup.feature_scale(run, features)

    class Loud:
        def __getitem__(self, i: int) -> Features:
            f = features[i]
            hidden = f.hidden.clone()
            hidden[:, 3::64] = 500 + hidden[:, 3::64]
            hidden[:, 5::64] *= 100
            return replace(f, hidden=hidden)

    loud = setup.feature_scale(run, Loud())  # type: ignore[arg-type]
    constant = torch.arange(len(loud)) % 64 == 3
    louder = torch.arange(len(loud)) % 64 == 5
    assert (loud[constant] * 500 < 0.05).all()
    torch.testing.assert_close(loud[louder] * 100, plain[louder], rtol=1e-3, atol=1e-5)
    rest = ~(constant | louder)
    torch.testing.assert_close(loud[rest], plain[rest])
    if form == "mtp":
        model = setup.make_model(run)
        setup.standardise(model, loud)
        assert float(model.hnorm.weight[3].detach().abs()) < 0.05  # type: ignore[union-attr]


def test_another_drafter_is_refused_by_what_differs(tmp_path: Path) -> None:
    tiny_runs.trainer(tiny_runs.run(tmp_path / "a")).train()
    here = str(tmp_path / "a" / "drafter")
    with pytest.raises(ConfigError, match="markov_rank 8 and 4"):
        make_model(changed(tmp_path / "b", start_from=here, markov_rank=4))
    run = changed(tmp_path / "b", start_from=here)
    assert run.draft_ids is not None
    other = torch.cat([run.draft_ids[:-1], run.draft_ids[-1:] + 1])
    with pytest.raises(ConfigError, match="another draft vocabulary"):
        make_model(replace(run, draft_ids=other))
