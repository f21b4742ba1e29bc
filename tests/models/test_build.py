"""From a checkpoint to a target: what `auto` takes, what it says, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import ConfigError, ResourceError
from dspark.models import build
from dspark.models.build import Choice, build_target, choose, parameters
from dspark.models.decoder import TorchDecoder
from dspark.models.int8 import Int8Decoder
from dspark.models.loading import Checkpoint
from dspark.models.native import library
from dspark.models.target import Segment, pack
from tests.tiny import oracle, source

CONFIG, WEIGHTS = source(oracle("llama"))
CPU = torch.device("cpu")


def checkpoint() -> Checkpoint:
    tokenizer: Any = None
    return Checkpoint("tiny", Path("tiny"), "hf", CONFIG, WEIGHTS, tokenizer)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither a compiler nor kernels compiled earlier."""
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_on_a_cpu_as_asked(dtype: str, device: str) -> None:
    assert choose(CONFIG, dtype, device) == Choice(dtype, CPU, "as asked")  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_auto_takes_int8_on_a_cpu(device: str) -> None:
    choice = choose(CONFIG, "auto", device)
    assert (choice.dtype, choice.device) == ("int8", CPU)
    assert choice.reason == "no GPU; integer kernels are the fastest on a CPU"


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_on_a_gpu(device: str) -> None:
    assert choose(CONFIG, "auto", device).dtype == "bf16"
    assert choose(CONFIG, "auto", device).reason == "a GPU is here"
    for dtype in ("fp32", "bf16"):
        choice = choose(CONFIG, dtype, device)
        assert (choice.dtype, choice.device.type) == (dtype, "cuda")
    with pytest.raises(ConfigError, match="int8 runs on a CPU only: take --dtype bf16 or"):
        choose(CONFIG, "int8", device)
    assert choose(CONFIG, "int8", "cpu").device == CPU


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "int8"])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_no_gpu_is_here(device: str, dtype: str) -> None:
    with pytest.raises(ResourceError, match="PyTorch sees none: take --device cpu"):
        choose(CONFIG, dtype, device)


@pytest.mark.parametrize("dtype", ["", "float32", "INT8", "int4"])
def test_unknown_dtypes(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown dtype '{dtype}': expected auto, fp32, bf16, "):
        choose(CONFIG, dtype)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:x", "cpu:cpu", "mps", "meta"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"un\w+ device '{device}': expected auto, cpu or cuda"):
        choose(CONFIG, "fp32", device)


@pytest.mark.usefixtures("no_gpu", "no_compiler")
def test_without_a_compiler() -> None:
    choice = choose(CONFIG)
    assert (choice.dtype, choice.device) == ("fp32", CPU)
    assert "int8 is not possible here: no C compiler found (/no/such/compiler)" in choice.reason
    with pytest.raises(ResourceError, match=r"no C compiler found.*take --dtype fp32 or bf16"):
        build_target(checkpoint(), choose(CONFIG, "int8"), num_slots=1)
    assert isinstance(build_target(checkpoint(), choice, num_slots=1), TorchDecoder)


@pytest.mark.usefixtures("no_gpu")
def test_a_model_that_does_not_fit_the_kernels() -> None:
    config, weights = source(oracle("llama", intermediate_size=120))
    choice = choose(config)
    assert choice.dtype == "fp32"
    assert "intermediate_size is 120, the kernels need a multiple of 32" in choice.reason
    narrow = Checkpoint("narrow", Path("narrow"), "hf", config, weights, checkpoint().tokenizer)
    with pytest.raises(ConfigError, match="int8: intermediate_size is 120"):
        build_target(narrow, choose(config, "int8"), num_slots=1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_the_target_is_the_one_chosen(dtype: str) -> None:
    built = build_target(checkpoint(), choose(CONFIG, dtype, "cpu"), num_slots=2, max_context=64)
    assert isinstance(built, Int8Decoder if dtype == "int8" else TorchDecoder)
    assert (built.num_slots, built.max_context, built.vocab_size) == (2, 64, 257)
    logits = built.forward(pack([Segment(1, 0, (1, 2, 3), 1)])).logits
    assert logits.shape == (1, 257) and logits.isfinite().all()


def test_the_context_is_the_models_unless_asked() -> None:
    choice = choose(CONFIG, "fp32", "cpu")
    assert build_target(checkpoint(), choice, num_slots=1).max_context == 512
    assert build_target(checkpoint(), choice, num_slots=1, max_context=2).max_context == 2
    assert build_target(checkpoint(), choice, num_slots=1, max_context=512).max_context == 512


def test_long_contexts_are_cut_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "DEFAULT_CONTEXT", 100)
    choice = choose(CONFIG, "fp32", "cpu")
    assert build_target(checkpoint(), choice, num_slots=1).max_context == 100
    assert build_target(checkpoint(), choice, num_slots=1, max_context=300).max_context == 300


@pytest.mark.parametrize("context", [-5, 0, 1, 513])
def test_a_context_out_of_range(context: int) -> None:
    choice = choose(CONFIG, "fp32", "cpu")
    with pytest.raises(ConfigError, match=f"max_context={context} is out of range: tiny holds 2 "):
        build_target(checkpoint(), choice, num_slots=1, max_context=context)


@pytest.mark.parametrize("slots", [0, -1])
def test_slots_out_of_range(slots: int) -> None:
    with pytest.raises(ConfigError, match=f"max_users={slots} is out of range"):
        build_target(checkpoint(), choose(CONFIG, "fp32", "cpu"), num_slots=slots)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_not_enough_memory(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_available_memory", lambda: 100_000)
    with pytest.raises(ResourceError, match=rf"GiB in {dtype} and .* 0\.0 GiB are free: take a "):
        build_target(checkpoint(), choose(CONFIG, dtype, "cpu"), num_slots=1, max_context=2)


def test_caches_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the message: 1 GiB is free, a million slots of 512 tokens want 375."""
    monkeypatch.setattr(build, "_available_memory", lambda: 2**30)
    choice = choose(CONFIG, "fp32", "cpu")
    wanted = 2 * 3 * 2 * 16 * 512 * 2**20 * 4 / 2**30
    with pytest.raises(ResourceError, match=rf"caches up to {wanted:.1f} GiB, 1\.0 GiB are free"):
        build_target(checkpoint(), choice, num_slots=2**20)
    build_target(checkpoint(), choice, num_slots=4)


def test_available_memory_is_plausible() -> None:
    assert 2**24 < build._available_memory() < 2**50


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(tied: bool) -> None:
    model = oracle("llama", tie_word_embeddings=tied)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert parameters(source(model)[0]) == matrices
