"""Drafter checkpoints: what is written is read back, and what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters import checkpoint
from dspark.drafters.checkpoint import build_model, load, read_config, save
from dspark.drafters.config import DrafterConfig
from dspark.drafters.mtp import MtpModel
from dspark.errors import CheckpointError
from dspark.models.config import RopeConfig
from dspark.types import SamplingParams
from tests import tiny
from tests.drafters import tiny_drafters
from tests.drafters.tiny_drafters import FORMS

TARGET = tiny.target()
TRAINING = {"steps": 12, "accepted_length": 2.5, "text": "äöü"}


def written(
    folder: Path, form: str = "vanilla", **overrides: Any
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """A saved drafter, and the state it should have: weights that bf16 can hold."""
    config = replace(tiny_drafters.config(TARGET, form), **overrides)
    state = {
        n: t.detach().bfloat16().float()
        for n, t in tiny_drafters.model(config).state_dict().items()
    }
    save(folder, config, state, draft_ids=tiny_drafters.draft_ids(config), training=TRAINING)
    return config, state


def edit(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_back(form: str, tmp_path: Path) -> None:
    config, state = written(tmp_path / "a", form, target="tiny")
    found = load(tmp_path / "a")
    assert found.config == read_config(tmp_path / "a") == config
    assert found.training == TRAINING and found.path == tmp_path / "a"
    assert not found.model.training
    ids = tiny_drafters.draft_ids(config)
    if ids is None:
        assert found.draft_ids is None
    else:
        assert found.draft_ids is not None and found.draft_ids.dtype == torch.int64
        assert found.draft_ids.tolist() == ids.tolist()
        outside = torch.ones(config.vocab_size, dtype=torch.bool)
        outside[ids] = False
        state[checkpoint.W2][outside] = 0
    parameters = dict(found.model.named_parameters())
    assert parameters.keys() == state.keys()
    for name, p in parameters.items():
        assert p.dtype == torch.float32 and not p.requires_grad
        assert torch.equal(p, state[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_no_parameter_is_left_as_it_was_built(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, form)
    built: list[torch.nn.Module] = []

    def filled(config: DrafterConfig) -> Any:
        with torch.device("cpu"):
            model = build_model(config)
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.fill_(torch.nan)
        built.append(model)
        return model

    monkeypatch.setattr(checkpoint, "build_model", filled)
    model = load(tmp_path).model
    assert model is built[-1]
    for tensor in [*model.parameters(), *model.buffers()]:
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("form", ["everything", "rnn", "mtp", "dflash-masks"])
def test_a_loaded_drafter_proposes_what_the_saved_one_did(form: str, tmp_path: Path) -> None:
    """Through the registry, as a user gets it, and with the same rounding as before saving."""
    from dspark.drafters import base

    config, state = written(tmp_path, form)
    model = build_model(config)
    model.load_state_dict(state)
    from dspark.drafters.block import BlockModel
    from dspark.drafters.block_drafter import BlockDrafter
    from dspark.drafters.mtp_drafter import MtpDrafter

    ids = tiny_drafters.draft_ids(config)
    before = (
        BlockDrafter(TARGET, config, model.eval(), ids)
        if isinstance(model, BlockModel)
        else MtpDrafter(TARGET, config, model.eval(), ids)
    )
    after = base.build(str(tmp_path), TARGET)
    assert proposals(after) == proposals(before)
    assert any(proposals(after))


def proposals(drafter: Any) -> list[tuple[int, ...]]:
    """Greedy drafts behind every prefix of a text."""
    import numpy as np

    from dspark.drafters.base import Committed, DraftContext

    tokens = [5, 17, 99, 200, 17, 3, 8]
    out = []
    features = torch.randn(
        len(tokens), len(drafter.feature_layers) * 64, generator=torch.Generator().manual_seed(2)
    )
    for n in range(1, len(tokens)):
        drafter.observe([Committed(0, n - 1, (tokens[n - 1],), n - 1)], features)
        context = DraftContext(
            0, tokens[: n + 1], SamplingParams(temperature=0), 4, np.random.default_rng(0)
        )
        out.append(tuple(drafter.propose([context])[0].tokens))
    return out


def test_the_layout_is_the_one_that_others_read(tmp_path: Path) -> None:
    written(tmp_path, "gated")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel"] and raw["model_type"] == "qwen3"
    assert raw["block_size"] == 5 and raw["mask_token_id"] == 3
    assert raw["target_layer_ids"] == [0, 1] and raw["num_target_layers"] == 3
    assert raw["enable_confidence_head"] is True and raw["confidence_head_with_markov"] is True
    assert raw["markov_rank"] == 8 and raw["markov_head_type"] == "gated"
    assert raw["layer_types"] == ["full_attention"] * 2 and raw["dtype"] == "bfloat16"
    assert "dspark" not in raw, "nothing differs from the defaults"
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert {n: tuple(t.shape) for n, t in tensors.items() if "layers" not in n} == {
        "fc.weight": (64, 128),
        "hidden_norm.weight": (64,),
        "norm.weight": (64,),
        "markov_head.markov_w1.weight": (257, 8),
        "markov_head.markov_w2.weight": (257, 8),
        "markov_head.gate_proj.weight": (8, 72),
        "markov_head.gate_proj.bias": (8,),
        "confidence_head.proj.weight": (1, 72),
        "confidence_head.proj.bias": (1,),
    }


def test_only_what_differs_is_written_beside_the_layout(tmp_path: Path) -> None:
    written(tmp_path, "everything")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["dspark"] == {
        "inject": True,
        "conv": True,
        "layer_fusion": True,
        "draft_vocab_size": 100,
        "candidates": 16,
    }


def test_a_draft_vocabulary_stores_only_its_rows(tmp_path: Path) -> None:
    config, state = written(tmp_path, "everything")
    stored = load_file(tmp_path / "model.safetensors")
    ids = tiny_drafters.draft_ids(config)
    assert ids is not None
    assert torch.equal(stored[checkpoint.W2].float(), state[checkpoint.W2][ids])
    assert stored[checkpoint.W2].shape == (100, 8)
    assert stored["markov_head.markov_w1.weight"].shape == (257, 8)


def test_the_target_s_own_tensors_are_accepted_and_not_used(tmp_path: Path) -> None:
    config, _ = written(tmp_path)
    weight = torch.randn(config.vocab_size, config.hidden_size)
    edit_tensors(tmp_path, lambda t: t.update({"embed_tokens.weight": weight}))
    assert "embed_tokens.weight" not in load(tmp_path).model.state_dict()
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": weight[1:]}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[256, 64\].*\[257, 64\]"):
        load(tmp_path)


def test_names_may_have_a_prefix_and_several_files(tmp_path: Path) -> None:
    _, state = written(tmp_path)
    tensors = {f"model.{n}": t for n, t in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[:5], names[5:])):
        save_file({n: tensors[n] for n in part}, tmp_path / f"model-{i}.safetensors")
    found = load(tmp_path).model.state_dict()
    assert all(torch.equal(found[n], state[n]) for n in state)


def test_another_dtype_keeps_more(tmp_path: Path) -> None:
    config = tiny_drafters.config(TARGET)
    state = tiny_drafters.model(config).state_dict()
    for dtype, exact in ((torch.float32, True), (torch.bfloat16, False)):
        save(tmp_path, config, state, draft_ids=None, training={}, dtype=dtype)
        found = load(tmp_path).model.state_dict()
        assert torch.equal(found["fc.weight"], state["fc.weight"]) is exact
        torch.testing.assert_close(found["fc.weight"], state["fc.weight"], rtol=0.01, atol=0)


ROPES = [
    RopeConfig(theta=5e5, original_max_position=512),
    RopeConfig(theta=5e5, kind="linear", factor=4.0, original_max_position=512),
    RopeConfig(kind="llama3", factor=8.0, original_max_position=128, high_freq_factor=3.0),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=128, beta_fast=16.0, truncate=False),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=128, attention_factor=1.5),
    RopeConfig(theta=1e5, freq_factors=(1.0,) * 4 + (2.0,) * 4, original_max_position=512),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r.kind)
def test_rotation_comes_back(rope: RopeConfig, tmp_path: Path) -> None:
    config, _ = written(tmp_path, rope=rope)
    found = load(tmp_path)
    assert found.config == config
    expected = build_model(config).rotary
    assert torch.equal(found.model.rotary.inv_freq_R, expected.inv_freq_R)
    assert found.model.rotary.factor == expected.factor


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as info:
        load(folder)
    message = str(info.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    def break_(change: Callable[[dict[str, Tensor]], object]) -> str:
        written(tmp_path, "everything")
        edit_tensors(tmp_path, change)
        return refused(tmp_path)

    assert "lacks tensors: fc.weight" in break_(lambda t: t.pop("fc.weight"))
    assert "lacks tensors: draft_ids" in break_(lambda t: t.pop("draft_ids"))
    assert "unknown tensors: fc.bias" in break_(lambda t: t.update({"fc.bias": torch.ones(64)}))
    message = break_(lambda t: t.update({"norm.weight": torch.ones(63)}))
    assert "norm.weight has shape [63], the configuration wants [64]" in message
    whole = {checkpoint.W2: torch.ones(257, 8)}
    assert "has shape [257, 8], the configuration wants [100, 8]" in break_(
        lambda t: t.update(whole)
    )
    for bad in (torch.nan, torch.inf):
        message = break_(lambda t, bad=bad: t["fc.weight"][3].fill_(bad))  # type: ignore[misc]
        assert "fc.weight holds NaN or infinity" in message
    ids = torch.arange(100, dtype=torch.int32)
    assert "expected int64" in break_(lambda t: t.update({"draft_ids": ids.float()}))
    for wrong in (ids.flip(0), ids - 1, ids + 158, ids // 2):
        message = break_(lambda t, wrong=wrong: t.update({"draft_ids": wrong}))  # type: ignore[misc]
        assert "draft_ids must rise and stay within 0..256" in message
    quantised = {"fc.weight": torch.ones(128, 128, dtype=torch.int8)}
    assert "fc.weight is torch.int8" in break_(lambda t: t.update(quantised))


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    written(tmp_path)
    edit_tensors(tmp_path, lambda t: [t.pop(n) for n in list(t) if "self_attn" in n])
    assert refused(tmp_path).endswith(" and 7 more")


CONFIG_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"target_layer_ids": [0, 3]}, "3 is out of range"),
    ({"target_layer_ids": [0, 2]}, "final layer 2"),
    ({"target_layer_ids": []}, "is empty"),
    ({"target_layer_ids": ["1"]}, "expected a list of layers"),
    ({"target_layer_ids": None}, "expected a list of layers"),
    ({"num_target_layers": None}, "num_target_layers is missing"),
    ({"mask_token_id": 257}, "mask_token_id=257 is outside the embedding"),
    ({"mask_token_id": None}, "mask_token_id is missing"),
    ({"mask_token_id": "3"}, "mask_token_id is '3'"),
    ({"block_size": None}, "block_size is missing"),
    ({"block_size": 0}, "block_size=0 is out of range"),
    ({"markov_head_type": "lstm"}, "'lstm' is unknown"),
    ({"markov_rank": -1}, "markov_rank"),
    ({"hidden_size": "64"}, "hidden_size is '64'"),
    ({"num_key_value_heads": 3}, "cannot share"),
    ({"model_type": "gemma4"}, "unknown backbone"),
    ({"attention_bias": True}, "biases"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
    ({"rope_scaling": [1]}, "wrong kind"),
    ({"dspark": {"injekt": True}}, "unknown option in 'dspark': injekt"),
    ({"dspark": {"inject": "yes"}}, "inject is 'yes'"),
    ({"dspark": {"kind": "tree"}}, "kind is 'tree'"),
    ({"dspark": {"draft_vocab_size": 258}}, "draft_vocab_size=258 is out of range"),
    ({"enable_confidence_head": 1}, "enable_confidence_head is 1"),
    ({"training": [1]}, "training is no object"),
]


@pytest.mark.parametrize("change, message", CONFIG_ERRORS, ids=lambda v: str(v)[:40])
def test_configurations_that_make_no_sense_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written(tmp_path)
    load(tmp_path)
    edit(tmp_path, **change)
    assert message in refused(tmp_path)


def test_damaged_and_absent_files_are_refused(tmp_path: Path) -> None:
    assert "has no config.json" in refused(tmp_path / "nowhere")
    written(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:100], whole[:-64]):
        weights.write_bytes(damaged)
        assert "cannot be read" in refused(tmp_path)
    weights.unlink()
    assert "holds no model.safetensors" in refused(tmp_path)
    for text, expected in (("{", "is not JSON"), ("[]", "no JSON object")):
        config.write_text(text)
        assert expected in refused(tmp_path)
    config.write_bytes(b"\xff\xfe\xff")
    assert "is not JSON" in refused(tmp_path)


def test_saving_refuses_what_loading_would(tmp_path: Path) -> None:
    config = tiny_drafters.config(TARGET, "everything")
    ids = tiny_drafters.draft_ids(config)
    assert ids is not None
    state = dict(tiny_drafters.model(config).state_dict())

    def save_(message: str, draft_ids: Tensor | None = ids, training: Any = None) -> None:
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path / "x", config, state, draft_ids=draft_ids, training=training or {})
        assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())

    save_("draft_ids belong", draft_ids=None)
    save_("must rise", draft_ids=ids.flip(0))
    save_(r"draft_ids has shape \[99\]", draft_ids=ids[1:])
    save_("cannot be written", training={"loss": torch.nan})
    save_("cannot be written", training={"loss": object()})
    norm = state.pop("norm.weight")
    save_("lacks tensors: norm.weight")
    state["norm.weight"] = norm[1:]
    save_(r"norm.weight has shape \[63\]")
    state["norm.weight"] = norm * torch.nan
    save_("norm.weight holds NaN")


def test_a_failed_write_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, state = written(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert before.keys() == {"config.json", "model.safetensors"}

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, config, state, draft_ids=None, training={"other": 1})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_checkpoint_that_does_not_know_its_target_s_depth() -> None:
    config = replace(tiny_drafters.config(TARGET), num_target_layers=0)
    config.check_target(257, 64, 3, "x")
    with pytest.raises(CheckpointError, match="num_target_layers is 3, the target's is 2"):
        config.check_target(257, 64, 2, "x")  # layer 1 would be the final one


def test_mtp_is_written_under_its_own_name(tmp_path: Path) -> None:
    written(tmp_path, "mtp")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["DSparkMTPModel"] and raw["dspark"] == {"kind": "mtp"}
    assert isinstance(load(tmp_path).model, MtpModel)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"hnorm.weight", "enorm.weight", "eh_proj.weight", "norm.weight"} < names
