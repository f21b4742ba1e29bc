"""Checkpoints looked at by their headers: published sizes come out of files that hold no weights.

The large ones are sparse: headers that claim every tensor of the published checkpoints, and nothing
behind them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import CheckpointError
from dspark.models.fp8_fp4 import fp4_scale_shape, fp8_scale_shape
from dspark.models.inspect import inspect, inspect_drafter, is_drafter
from dspark.models.safetensors_header import BITS
from tests.models import official_v4 as official
from tests.models.official_v4 import FLASH_DSPARK, TINY, TINY_DSPARK
from tests.tiny import oracle

_DTYPES = {"FP8": "F8_E4M3", "FP4": "I8"}


def hollow(directory: Path, raw: dict[str, Any], num_shards: int) -> Path:
    """Sparse files whose headers claim a whole checkpoint in the official layout."""
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    for name, shape in official.shapes(raw, official.carried(raw)).items():
        how = official.kind(name)
        scale = name.removesuffix("weight") + "scale"
        if how == "FP8":
            entries.append((scale, "F8_E8M0", fp8_scale_shape(*shape)))
        elif how == "FP4":
            entries.append((scale, "F8_E8M0", fp4_scale_shape(*shape)))
            shape = (shape[0], shape[1] // 2)
        entries.append((name, _DTYPES.get(how, how), shape))
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    where = {}
    for i in range(num_shards):
        part = entries[i * len(entries) // num_shards : (i + 1) * len(entries) // num_shards]
        header, at = {}, 0
        for name, dtype, shape in part:
            end = at + math.prod(shape) * BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        file = directory / f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        text = json.dumps(header).encode()
        with file.open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + at)
        where.update(dict.fromkeys(header, file.name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def test_flash_with_dspark(tmp_path: Path) -> None:
    """Against what is published: 284.3 and 13.27 billion parameters, 72 317 tensors, 166.88 GB,
    19.85 billion and 10.86 GB of them DSpark's; 6 880 bytes a token and 17.8 MB in bf16."""
    hollow(tmp_path, FLASH_DSPARK, 48)
    begin = time.perf_counter()
    r = inspect(tmp_path)
    assert time.perf_counter() - begin < 10  # about one second on an idle machine
    assert (r.kind, r.num_files, r.num_tensors) == ("deepseek_v4", 48, 72_317)
    assert not r.problems
    assert r.parameters / 1e9 == pytest.approx(284.3, abs=0.05)
    assert r.active_parameters / 1e9 == pytest.approx(13.27, abs=0.005)
    assert r.num_bytes / 1e9 == pytest.approx(166.88, abs=0.01)
    (drafter,) = r.drafters
    assert (drafter.kind, drafter.stages) == ("dspark", 3)
    assert drafter.parameters / 1e9 == pytest.approx(19.85, abs=0.005)
    assert drafter.num_bytes / 1e9 == pytest.approx(10.86, abs=0.005)
    assert drafter.settings == {
        "block_size": 5, "target_layer_ids": [40, 41, 42], "noise_token_id": 128799,
        "markov_rank": 256, "confidence_head": True,
    }  # fmt: skip
    assert r.cache["bf16"].per_token == 6880
    assert r.cache["bf16"].per_sequence / 1e6 == pytest.approx(17.8, abs=0.05)
    assert r.cache["fp32"].per_token == 2 * 6880
    assert r.weights["bf16"] == 2 * r.parameters and r.weights["fp32"] == 4 * r.parameters
    eight = r.weights["int8"]
    assert eight is not None and 1.06 < eight / r.parameters < 1.08
    total = r.memory("bf16")
    ring = 3 * 128 * 512 * 2
    assert total == (
        2 * (r.parameters + drafter.parameters)
        + r.cache["bf16"].per_sequence + ring + 6880 * 8192
    )  # fmt: skip
    assert sum(p.num_bytes for p in r.parts) == r.num_bytes
    assert sum(p.parameters for p in r.parts) == r.parameters + drafter.parameters
    assert [p.name for p in r.parts][-3:] == [f"dspark stage {i}" for i in range(3)]
    experts = next(p for p in r.parts if p.name == "experts")
    assert experts.parameters == 43 * 256 * 3 * 4096 * 2048
    assert experts.num_bytes == experts.parameters * 17 // 32
    assert r.dtypes["I8"] == (46 * 256 * 3, 46 * 256 * 3 * 4096 * 2048 // 2)


@pytest.mark.parametrize("raw", [TINY, TINY_DSPARK], ids=["mtp1", "dspark"])
def test_tiny_official_files_counted_by_hand(tmp_path: Path, raw: dict[str, Any]) -> None:
    stored, values = official.tensors(raw, official.carried(raw))
    r = inspect(official.write(tmp_path, raw, stored, 3))
    numbers = {n: v.numel() for n, v in values.items() if "tid2eid" not in n}
    tower = {n: k for n, k in numbers.items() if not n.startswith("mtp.")}
    assert r.parameters == sum(tower.values())
    experts = sum(k for n, k in tower.items() if ".experts." in n)
    assert r.active_parameters == r.parameters - tower["embed.weight"] - experts // 3
    kind, stages = ("mtp1", 1) if raw is TINY else ("dspark", 3)
    assert [(d.kind, d.stages) for d in r.drafters] == [(kind, stages)]
    assert r.drafters[0].parameters == sum(numbers.values()) - r.parameters
    assert r.parts[-1].name == f"{kind} stage {stages - 1}"
    assert r.num_bytes == sum(t.nbytes for t in stored.values())
    assert r.num_tensors == len(stored) and not r.problems
    # Ratios 0, 4, 128, 4; head 32, index head 16; bf16.
    assert r.cache["bf16"].per_token == math.ceil(2 * 2 * (32 + 16) / 4 + 2 * 32 / 128)
    rings, csa, hca = 4 * 8 * 32 * 2, 2 * 8 * 2 * (32 + 16) * 2 * 4, 128 * 32 * 2 * 4
    assert r.cache["bf16"].per_sequence == rings + csa + hca
    assert r.weights["int8"] is None  # an expert's 48 columns are no whole blocks of 32


def test_saved_by_transformers_and_in_one_tensor(tmp_path: Path) -> None:
    import transformers

    model: Any = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**TINY))
    model.save_pretrained(tmp_path / "saved")
    state = {n: t.clone() for n, t in model.state_dict().items()}
    official.write(tmp_path / "modules", TINY, state)
    a, b = (inspect(tmp_path / n) for n in ("saved", "modules"))
    total = sum(p.numel() for n, p in state.items() if "tid2eid" not in n)
    assert a.parameters == b.parameters == total
    assert a.active_parameters == b.active_parameters
    assert not a.drafters and not a.problems and not b.problems


def test_what_would_not_load_is_told(tmp_path: Path) -> None:
    stored, _ = official.tensors(TINY)
    del stored["norm.weight"], stored["layers.3.ffn_norm.weight"]
    stored["layers.0.attn_norm.weight"] = torch.zeros(3)
    r = inspect(official.write(tmp_path, TINY, stored))
    assert r.problems == (
        "layers.0.attn_norm.weight has shape [3], the configuration wants [160]",
        "lacks norm.weight, layers.3.ffn_norm.weight",
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_llama_family(tmp_path: Path, kind: str, tied: bool) -> None:
    model = oracle(kind, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    r = inspect(tmp_path)
    total = sum(p.numel() for p in model.parameters())
    assert (r.kind, r.architecture, r.parameters) == ("hf", kind, total)
    assert r.active_parameters == total - (0 if tied else 257 * 64)
    assert r.num_files == len(list(tmp_path.glob("*.safetensors"))) >= 3
    assert r.num_bytes == 4 * total == r.weights["fp32"]
    assert r.dtypes == {"F32": (len(model.state_dict()) - tied, 4 * total)}
    parts = {p.name: p.parameters for p in r.parts}
    assert parts.keys() == {"embedding", "attention", "mlp", "norms", *(() if tied else ("head",))}
    assert parts["mlp"] == 3 * 3 * 64 * 128 and parts["embedding"] == 257 * 64
    assert (r.cache["fp32"].per_token, r.cache["bf16"].per_token) == (3 * 2 * 2 * 16 * 4, 384)
    assert r.context == 512 and r.memory("fp32") == 4 * total + 512 * 3 * 2 * 2 * 16 * 4
    assert r.weights["int8"] is not None and not r.drafters


def test_a_gguf_file() -> None:
    from dspark.models.loading import resolve

    r = inspect(resolve("default"))
    assert (r.kind, r.architecture, r.num_files) == ("gguf", "llama", 1)
    assert r.parameters == r.active_parameters == 134_515_008
    assert {p.name for p in r.parts} == {"embedding", "attention", "mlp", "norms"}
    assert sum(p.parameters for p in r.parts) == r.parameters
    assert r.weights["int8"] == pytest.approx(r.num_bytes, rel=0.001)  # blocks stay as they are


def test_a_drafter_directory(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {
        "fc.weight": torch.zeros(8, 16), "markov_head.markov_w1.weight": torch.zeros(10, 4),
        "layers.0.mlp.up_proj.weight": torch.zeros(12, 8), "hidden_norm.weight": torch.zeros(8),
        "layers.0.self_attn.q_proj.weight": torch.zeros(8, 8), "lm_head.weight": torch.ones(10, 8),
        "draft_ids": torch.zeros(5, dtype=torch.int32),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    r = inspect_drafter(
        tmp_path, "Qwen3DSparkModel", cache_numbers=6, context=100, sizes={}, details={"x": 1}
    )
    parts = {p.name: p.parameters for p in r.parts}
    assert parts == {
        "attention": 64, "mlp": 96, "norms": 8, "head": 80, "context": 128, "markov head": 40,
        "other": 0,
    }  # fmt: skip
    assert r.parameters == 416 and r.active_parameters == 336 and r.context == 100
    assert r.cache["bf16"].per_token == 12 and r.details == {"x": 1}


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, True),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, True),
        ({"speculators_model_type": "dflash"}, True),
        ({"dflash_config": {}}, True),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, False),
        (FLASH_DSPARK, False),
    ],
)
def test_drafters_are_told_from_targets(raw: dict[str, Any], found: bool) -> None:
    assert is_drafter(raw) is found


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        inspect(tmp_path)
    config = tmp_path / "config.json"
    for raw, message in (
        ({"model_type": "gpt2"}, "config.json: unknown architecture: model_type is 'gpt2'"),
        ({"model_type": "deepseek_v41", "text_config": {}}, "V4.1 is another architecture"),
        (TINY | {"head_dim": 0}, "config.json: head_dim is 0"),
        (TINY, r"holds no \*.safetensors"),
        ([], "holds no JSON object"),
    ):
        config.write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match=message):
            inspect(tmp_path)
    other = tmp_path / "weights.bin"
    other.write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        inspect(other)


def test_safetensors_are_looked_at_without_torch(tmp_path: Path) -> None:
    official.write(tmp_path, TINY, official.tensors(TINY)[0])
    code = (
        "import sys; from pathlib import Path; from dspark.models.inspect import inspect;"
        f"assert inspect(Path({str(tmp_path)!r})).parameters;"
        "print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
