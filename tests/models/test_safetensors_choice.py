"""Which tensors of a directory are the decoder's, and which kinds of number are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.safetensors_source import SafetensorsSource
from tests.tiny import oracle

NORM = "layers.0.input_layernorm.weight"


def minimal(prefix: str, value: float) -> dict[str, Tensor]:
    """As much of a decoder as its recognition looks at."""
    return {
        f"{prefix}{NORM}": torch.full((4,), value),
        f"{prefix}embed_tokens.weight": torch.full((3, 4), value),
    }


def test_other_layouts_beside_the_usual_file(tmp_path: Path) -> None:
    """Mistral's repositories hold the same weights twice, the second time under other names."""
    save_file(minimal("model.", 1.0), tmp_path / "model.safetensors")
    save_file(minimal("", 2.0), tmp_path / "consolidated.safetensors")
    assert SafetensorsSource(tmp_path).tensor(f"model.{NORM}").tolist() == [1.0] * 4


@pytest.mark.parametrize("tower", ["a_tower.", "z_tower."])
def test_a_tower_of_layers_beside_the_text_model(tmp_path: Path, tower: str) -> None:
    """B41: a vision tower may have layers of the same names; it embeds no tokens."""
    other = {f"{tower}{NORM}": torch.zeros(4), f"{tower}lm_head.weight": torch.zeros(3, 4)}
    head = {"lm_head.weight": torch.ones(3, 4)}
    tensors = {**minimal("model.language_model.", 1.0), **other, **head}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.tensor(f"model.{NORM}").tolist() == [1.0] * 4
    assert source.tensor("lm_head.weight").tolist() == [[1.0] * 4] * 3


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8")],
)
def test_quantised_numbers_are_refused(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    """Read as they stand, without the scales kept elsewhere, they would be wrong silently."""
    tensors = minimal("model.", 1.0)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(4, 4).to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError, match=rf"up_proj\.weight is {name}, expected one of"):
        source.tensor("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_as_they_are_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle("llama").to(dtype).save_pretrained(tmp_path)
    source = SafetensorsSource(tmp_path)
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        got = source.tensor(name)
        assert got.dtype == dtype and torch.equal(got, expected)
        assert source.shape(name) == tuple(expected.shape)


def test_old_buffers_do_no_harm(tmp_path: Path) -> None:
    """Older files store the rotary frequencies of every layer."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**minimal("model.", 1.0), **extra}, tmp_path / "model.safetensors")
    assert f"model.{NORM}" in SafetensorsSource(tmp_path).names()


def test_the_size_of_a_missing_file(tmp_path: Path) -> None:
    save_file(minimal("model.", 1.0), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        source.num_bytes()
