"""The official layout on disk: names, dtypes, files; read for training and written for serving.

Training holds the routed experts of a layer in two tensors (`layers.py`), the official layout each
matrix of each expert by itself. Weights are written in bf16; what the published checkpoints hold in
fp32 (mixings, sinks, positions, router biases) is fp32 here, too. A drafter is written into a
directory of its own: `config.json` with the target's sizes and `model.safetensors` with `mtp.*`.

Files are written under other names and moved into place, the weights last: a directory that has
them is whole.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dspark.errors import CheckpointError
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.weights import WeightSource

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_STACKED = re.compile(r"(.*\.ffn\.experts)\.(w13|w2)")
_FP32 = re.compile(r".*(hc_\w+_(fn|base|scale)|attn_sink|ape|gate\.bias)")


def official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors under their official names, experts apart, in the dtypes of a checkpoint."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            out[name] = tensor
        elif match[2] == "w2":
            out |= {f"{match[1]}.{e}.w2.weight": w for e, w in enumerate(tensor)}
        else:
            for e, both in enumerate(tensor):
                out |= {
                    f"{match[1]}.{e}.{w}.weight": part
                    for w, part in zip(("w1", "w3"), both, strict=True)
                }
    return {n: _stored(n, t) for n, t in out.items()}


def _stored(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.contiguous()
    return tensor.to(torch.float32 if _FP32.fullmatch(name) else torch.bfloat16).contiguous()


def trained(
    weights: WeightSource, names: Mapping[str, Tensor], config: V4Config
) -> dict[str, Tensor]:
    """The tensors `names` (of a module's state) out of a checkpoint, in fp32. Raises
    CheckpointError for a missing or misshapen one."""
    out: dict[str, Tensor] = {}
    for name, like in names.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            found = weights.tensor(name)
        else:
            experts = [f"{match[1]}.{e}" for e in range(config.num_experts)]
            if match[2] == "w2":
                found = torch.stack([weights.tensor(f"{e}.w2.weight") for e in experts])
            else:
                pairs = [[weights.tensor(f"{e}.{w}.weight") for w in ("w1", "w3")] for e in experts]
                found = torch.stack([torch.stack(pair) for pair in pairs])
        if found.shape != like.shape:
            raise CheckpointError(
                f"{name} has shape {list(found.shape)}, the configuration wants {list(like.shape)}"
            )
        out[name] = found.to(like.dtype)
    return out


def start_from(module: nn.Module, config: V4Config, weights: WeightSource) -> None:
    """Begin with the weights of a checkpoint. Raises CheckpointError if it has other sizes."""
    module.load_state_dict(trained(weights, module.state_dict(), config))


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """`config.json` and the weights. Raises CheckpointError if the disk does not take them."""
    temporary = directory / f".{WEIGHTS}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / CONFIG, config)
        save_file(dict(tensors), temporary, {"format": "pt"})
        temporary.replace(directory / WEIGHTS)
    except (OSError, SafetensorError) as e:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {directory}: {e}") from e


def assemble(model: Path, drafter: Path, out: Path) -> None:
    """The checkpoint of a tower and a drafter's directory as one checkpoint that carries the
    drafter, as the published ones do: the tower in the first shard, `mtp.*` in the last.

    Raises CheckpointError if a file is missing or OUT exists.
    """
    part = out.with_name(f".{out.name}.part")
    shards = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    where: dict[str, str] = {}
    try:
        if out.exists():
            raise CheckpointError(f"{out} exists: name another directory")
        part.mkdir(parents=True)
        for source, shard in zip((model, drafter), shards, strict=True):
            shutil.copyfile(source / WEIGHTS, part / shard)
            with safe_open(part / shard, "pt") as file:
                where.update(dict.fromkeys(file.keys(), shard))
        shutil.copyfile(drafter / CONFIG, part / CONFIG)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(model / name, part / name)
        total = sum((part / shard).stat().st_size for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(part / f"{WEIGHTS}.index.json", index)
        part.replace(out)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"cannot assemble {out}: {e}") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
