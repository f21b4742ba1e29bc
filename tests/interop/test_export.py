"""Exports: the same numbers in the layouts of others, and no word lost in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters import base
from dspark.drafters.checkpoint import load
from dspark.errors import CheckpointError, ConfigError
from dspark.interop.export import LAYOUTS, Layout, export
from tests import tiny
from tests.drafters import tiny_drafters
from tests.drafters.test_checkpoint import TARGET, edit, proposals, written

PLAIN = ("dflash", "vanilla", "gated", "rnn", "plain-confidence")
"""Forms that need no option of ours."""


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", [*PLAIN, "dflash-masks"])
def test_an_export_is_the_same_drafter(form: str, layout: Layout, tmp_path: Path) -> None:
    written(tmp_path / "a", form, target="some/target")
    if form == "dflash-masks" and layout == "deepspec":
        with pytest.raises(ConfigError, match="sample_from_anchor=false"):
            export(tmp_path / "a", tmp_path / "b", layout=layout)
        return
    assert export(tmp_path / "a", tmp_path / "b", layout=layout) == []
    before, after = load(tmp_path / "a"), load(tmp_path / "b")
    assert after.config == before.config and after.training == before.training
    state = after.model.state_dict()
    assert all(torch.equal(state[n], t) for n, t in before.model.state_dict().items())
    drafts = [proposals(base.build(str(tmp_path / d), TARGET)) for d in "ab"]
    assert drafts[0] == drafts[1] and any(drafts[0])


def test_deepspec_has_what_its_reference_insists_on(tmp_path: Path) -> None:
    written(tmp_path / "a", "gated")
    export(tmp_path / "a", tmp_path / "b")
    raw, tensors = stored(tmp_path / "b")
    assert raw["num_anchors"] == 512 and raw["architectures"] == ["Qwen3DSparkModel"]
    assert "dspark" not in raw
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())


def test_speculators_nests_counts_and_names(tmp_path: Path) -> None:
    written(tmp_path / "a", "dflash-masks", target="some/target")
    export(tmp_path / "a", tmp_path / "b", layout="speculators")
    raw, _ = stored(tmp_path / "b")
    assert raw["speculators_model_type"] == "dflash" and raw["sample_from_anchor"] is False
    assert raw["block_size"] == 6, "the anchor counts"
    assert raw["aux_hidden_state_layer_ids"] == [1, 2], "ours are [0, 1]"
    assert raw["transformer_layer_config"]["hidden_size"] == 64 and "hidden_size" not in raw
    about = raw["speculators_config"]
    assert about["verifier"]["name_or_path"] == "some/target"
    assert about["proposal_methods"][0]["speculative_tokens"] == 5
    written(tmp_path / "c", "rnn")
    notes = export(tmp_path / "c", tmp_path / "d", layout="speculators")
    raw, _ = stored(tmp_path / "d")
    assert raw["speculators_model_type"] == "dspark" and raw["block_size"] == 5
    assert raw["markov_head_type"] == "rnn" and raw["sample_from_anchor"] is True
    assert len(notes) == 1 and "no hub name" in notes[0]


REDUCED: dict[str, Any] = {"draft_vocab_size": 100, "candidates": 16, "target": "some/target"}


def test_a_draft_vocabulary_is_dropped_with_a_note_or_translated(tmp_path: Path) -> None:
    config, state = written(tmp_path / "a", "gated", **REDUCED)
    ids = tiny_drafters.draft_ids(config)
    assert ids is not None
    w2 = state["markov_head.markov_w2.weight"]

    notes = export(tmp_path / "a", tmp_path / "flat")
    assert len(notes) == 2
    assert "candidates=16 is dropped" in notes[0] and "draft_vocab_size=100 is dr" in notes[1]
    raw, tensors = stored(tmp_path / "flat")
    assert raw["dspark"] == {"target": "some/target"} and "draft_ids" not in tensors
    full = tensors["markov_head.markov_w2.weight"].float()
    assert full.shape == (257, 8) and torch.equal(full[ids], w2[ids])
    outside = torch.ones(257, dtype=torch.bool)
    outside[ids] = False
    assert (full[outside] == 0).all()
    assert load(tmp_path / "flat").draft_ids is None

    notes = export(tmp_path / "a", tmp_path / "spec", layout="speculators")
    assert len(notes) == 1 and "candidates" in notes[0]
    raw, tensors = stored(tmp_path / "spec")
    assert raw["draft_vocab_size"] == 100
    assert (torch.arange(100) + tensors["d2t"]).tolist() == ids.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(tensors["markov_head.markov_w2.weight"].float(), w2[ids])
    again = load(tmp_path / "spec")
    assert again.draft_ids is not None and again.draft_ids.tolist() == ids.tolist()
    edit(tmp_path / "a", dspark={"draft_vocab_size": 100})  # ranks all of them, as the copy does
    drafts = [proposals(base.build(str(tmp_path / d), TARGET)) for d in ("a", "spec")]
    assert drafts[0] == drafts[1] and any(drafts[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_options_that_a_layout_lacks_are_refused_by_name(layout: Layout, tmp_path: Path) -> None:
    written(tmp_path / "a", "everything", qk_norm=False)
    written(tmp_path / "b", "bilinear")
    written(tmp_path / "c", "mtp")
    for name, words in (
        ("a", "inject, conv, layer_fusion, qk_norm=false"),
        ("b", "markov_head_type=bilinear"),
        ("c", "kind=mtp"),
    ):
        with pytest.raises(ConfigError) as info:
            export(tmp_path / name, tmp_path / "x", layout=layout)
        assert str(info.value).endswith(f"no word for {words}")
        assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target on disk, untied; its tokenizer is not asked for."""
    folder = tmp_path_factory.mktemp("model")
    oracle = tiny.oracle("llama")
    (folder / "config.json").write_text(json.dumps(oracle.config.to_dict()))
    save_file(dict(oracle.state_dict()), folder / "model.safetensors")
    return str(folder)


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark.tokenizer import Tokenizer

    monkeypatch.setattr(Tokenizer, "from_directory", lambda path: None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embeddings_come_from_the_target(layout: Layout, model: str, tmp_path: Path) -> None:
    config, _ = written(tmp_path / "a", "gated", draft_vocab_size=100)
    ids = tiny_drafters.draft_ids(config)
    export(tmp_path / "a", tmp_path / "b", layout=layout, with_embeddings=model)
    raw, tensors = stored(tmp_path / "b")
    theirs = load_file(Path(model) / "model.safetensors")
    head = theirs["lm_head.weight"].bfloat16()
    assert torch.equal(
        tensors["embed_tokens.weight"], theirs["model.embed_tokens.weight"].bfloat16()
    )
    assert torch.equal(tensors["lm_head.weight"], head[ids] if layout == "speculators" else head)
    assert model in json.dumps(raw), "the target's name is known now"
    load(tmp_path / "b")


def test_a_tied_target_gives_its_embedding_twice(model: str, tmp_path: Path) -> None:
    tied = tmp_path / "tied"
    tied.mkdir()
    raw = json.loads((Path(model) / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    tensors = load_file(Path(model) / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors")
    written(tmp_path / "a")
    export(tmp_path / "a", tmp_path / "b", with_embeddings=str(tied))
    _, found = stored(tmp_path / "b")
    assert torch.equal(found["lm_head.weight"], found["embed_tokens.weight"])


def test_a_foreign_target_is_refused(model: str, tmp_path: Path) -> None:
    written(tmp_path / "a", num_target_layers=4)
    with pytest.raises(CheckpointError, match="num_target_layers is 4, the target's is 3"):
        export(tmp_path / "a", tmp_path / "b", with_embeddings=model)
    assert not (tmp_path / "b").exists()


def test_the_depth_of_the_target_is_asked_for_where_it_is_unknown(
    model: str, tmp_path: Path
) -> None:
    written(tmp_path / "a", num_target_layers=0)
    with pytest.raises(ConfigError, match="does not say how many layers"):
        export(tmp_path / "a", tmp_path / "b")
    export(tmp_path / "a", tmp_path / "b", with_embeddings=model)
    assert load(tmp_path / "b").config.num_target_layers == 3


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    written(tmp_path / "a")
    out = tmp_path / "b"
    out.mkdir()
    export(tmp_path / "a", out)  # empty is fine
    (out / "notes.txt").write_text("mine")
    (out / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not empty.*--force"):
        export(tmp_path / "a", out)
    assert (out / "config.json").read_text() == "{}"
    export(tmp_path / "a", out, force=True)
    load(out)
    assert (out / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a file"):
        export(tmp_path / "a", out / "notes.txt", force=True)
    with pytest.raises(ConfigError, match="unknown layout"):
        export(tmp_path / "a", tmp_path / "c", layout="gguf")  # type: ignore[arg-type]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export(tmp_path / "a", tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())
