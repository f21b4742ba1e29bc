"""B41: weights of Hugging Face directories in every layout, and every way they can be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models import safetensors_source
from dspark.models.config import from_hf
from dspark.models.decoder import TorchDecoder
from dspark.models.loading import check_shapes
from dspark.models.safetensors_source import SafetensorsSource
from dspark.models.target import Segment, pack
from tests.tiny import oracle

IDS = tuple(range(3, 250, 7))
INDEX = "model.safetensors.index.json"


def saved(
    directory: Path, *, tied: bool = False, shards: bool = False, kind: str = "llama"
) -> tuple[Path, Tensor]:
    """An oracle as `transformers` saves it, and its logits for IDS."""
    model = oracle(kind, tie_word_embeddings=tied)
    model.save_pretrained(directory, max_shard_size="100KB" if shards else "1GB")
    return directory, logits_of(model)


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(torch.tensor([IDS])).logits[0]
    return result


def renamed(directory: Path, old: str, new: str) -> None:
    """Give the tensors of a single file another prefix."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({n.replace(old, new, 1): t for n, t in tensors.items()}, path)


def loaded(directory: Path) -> Tensor:
    """The logits of our decoder, loaded from a directory."""
    config = from_hf(json.loads((directory / "config.json").read_text()))
    weights = SafetensorsSource(directory)
    check_shapes(config, weights, directory)
    decoder = TorchDecoder(
        config,
        weights,
        dtype=torch.float32,
        num_slots=1,
        max_context=64,
        device=torch.device("cpu"),
    )
    return decoder.forward(pack([Segment(0, 0, IDS, len(IDS))])).logits


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_saved_by_transformers(tmp_path: Path, kind: str, tied: bool, shards: bool) -> None:
    """B41: a tied head is not stored, and a single file has no index."""
    directory, expected = saved(tmp_path, tied=tied, shards=shards, kind=kind)
    files = list(directory.glob("*.safetensors"))
    assert (len(files) >= 3) == shards == (directory / INDEX).exists()
    assert ("lm_head.weight" in SafetensorsSource(directory).names()) is not tied
    same(loaded(directory), expected)


def test_shards_without_an_index(tmp_path: Path) -> None:
    directory, expected = saved(tmp_path, shards=True)
    (directory / INDEX).unlink()
    same(loaded(directory), expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_other_prefixes(tmp_path: Path, prefix: str, tied: bool) -> None:
    """B41: a prefix of a larger model, or none at all."""
    directory, expected = saved(tmp_path, tied=tied)
    renamed(directory, "model.", prefix)
    same(loaded(directory), expected)


def test_a_prefixed_head(tmp_path: Path) -> None:
    """B41: multimodal checkpoints put the head under the language model, too."""
    directory, expected = saved(tmp_path)
    renamed(directory, "model.", "language_model.model.")
    renamed(directory, "lm_head.", "language_model.lm_head.")
    same(loaded(directory), expected)


def test_the_tied_flag_with_both_tensors(tmp_path: Path) -> None:
    """B41: the flag says tied, and yet the head is stored as well."""
    directory, expected = saved(tmp_path, tied=True)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, path)
    assert "lm_head.weight" in SafetensorsSource(directory).names()
    same(loaded(directory), expected)


def test_only_needed_shards_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B41: not the whole target for two tensors."""
    directory, _ = saved(tmp_path, shards=True)
    opened: list[Path] = []
    real = safetensors_source._opened

    def spy(path: Path) -> Any:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(safetensors_source, "_opened", spy)
    source = SafetensorsSource(directory)
    assert not opened and len(source.names()) > 20
    places = json.loads((directory / INDEX).read_text())["weight_map"]
    wanted = ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight")
    for name in wanted:
        assert source.tensor(name).shape == source.shape(name)
        assert source.blocks(name) is None
    assert {p.name for p in opened} == {places[n] for n in wanted}
    assert len({*places.values()}) > len({*opened})


def test_bytes_of_all_files(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path, shards=True)
    files = directory.glob("*.safetensors")
    assert SafetensorsSource(directory).num_bytes() == sum(f.stat().st_size for f in files)


@pytest.mark.parametrize("keep", [0, 5, 300, -10], ids=["empty", "length", "header", "data"])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    directory, _ = saved(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        loaded(directory)


def test_a_truncated_shard(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path, shards=True)
    path = sorted(directory.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        loaded(directory)


def test_a_missing_shard(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path, shards=True)
    path = sorted(directory.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        loaded(directory)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        b"\xff\xfe\xff",
    ],
)
def test_a_damaged_index(tmp_path: Path, text: str | bytes) -> None:
    directory, _ = saved(tmp_path, shards=True)
    (directory / INDEX).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        SafetensorsSource(directory)


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path, shards=True)
    index = json.loads((directory / INDEX).read_text())
    name, files = "model.norm.weight", sorted({*index["weight_map"].values()})
    other = next(f for f in files if f != index["weight_map"][name])
    index["weight_map"][name] = other
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{other} has no tensor {name}"):
        loaded(directory)


def test_a_missing_tensor(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks {name}$"):
        loaded(directory)
    source = SafetensorsSource(directory)
    for ask in (source.tensor, source.shape):
        with pytest.raises(CheckpointError, match=f"has no tensor {name}"):
            ask(name)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".layers.2." not in n}
    save_file(kept, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\..*and 4 more"):
        loaded(directory)


def test_a_wrong_shape(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[31, 64\].*\[32, 64\]"):
        loaded(directory)


def test_only_a_bin_file(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not read: convert it"):
        SafetensorsSource(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file$"):
        SafetensorsSource(tmp_path)


def test_weights_of_something_else(tmp_path: Path) -> None:
    """B41: a clear list of what there is."""
    save_file({"vision.patch": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds no decoder.*it has vision\.patch"):
        SafetensorsSource(tmp_path)
