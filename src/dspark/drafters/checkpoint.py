"""A drafter on disk: a directory with `config.json` and `model.safetensors`.

`dialects.py` says how the configuration is spelled. The tensors have the names of the modules,
which are those that DeepSpec gives them, so that other engines read a checkpoint of ours:

    fc.weight [D, m * D]  hidden_norm.weight [D]  norm.weight [D]
    layers.{i}.self_attn.{q,k,v,o}_proj.weight    layers.{i}.self_attn.{q,k}_norm.weight
    layers.{i}.mlp.{gate,up,down}_proj.weight     layers.{i}.{input,post_attention}_layernorm.weight
    markov_head.markov_w1.weight [V, r]           markov_head.markov_w2.weight [V, r]
    markov_head.{gate,joint}_proj.{weight,bias}   confidence_head.proj.{weight,bias}
    ours: inject.weight, layers.{i}.{attn,mlp}_conv.*, markov_head.hidden_proj.*, draft_ids
    mtp:  hnorm.weight, enorm.weight, eh_proj.weight, layers.0.*, norm.weight

Embedding and head are the target's and are left out; a file that has them is read as well, and its
copies are not used. Where only V' of the V tokens can be drafted, `draft_ids` [V'] lists them in
rising order, and `markov_w2` has only their rows [V', r]: the others would never be looked at.
speculators stores the same list as differences, `d2t[j]` = id - j, beside the mask `t2d` [V].

Nothing is guessed. A tensor too many, too few or of another shape is refused before any weight is
read, a number that is not finite after; every parameter comes from the file.

D hidden size, m feature layers, r Markov rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.drafters import dialects
from dspark.drafters.block import BlockModel
from dspark.drafters.config import DrafterConfig
from dspark.drafters.layers import Rotary
from dspark.drafters.mtp import MtpModel
from dspark.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
W2 = "markov_head.markov_w2.weight"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter as found on disk.

    model      fp32, in evaluation mode, without gradients
    draft_ids  int64 [draft_vocab_size], rising; None: the whole vocabulary can be drafted
    training   what its training wrote down; {} if nothing
    """

    config: DrafterConfig
    model: BlockModel | MtpModel
    draft_ids: Tensor | None
    training: dict[str, Any]
    path: Path


def build_model(config: DrafterConfig) -> BlockModel | MtpModel:
    """The module of a configuration, freshly initialised."""
    return MtpModel(config) if config.kind == "mtp" else BlockModel(config)


def read_config(directory: Path) -> DrafterConfig:
    """The configuration alone. Raises CheckpointError if it is missing, damaged or unsupported."""
    return _config(directory, _read_json(directory))


def load(directory: Path) -> LoadedDrafter:
    """Read a drafter in any layout of `dialects.py`.

    Raises CheckpointError, in one line, for a file that is missing or damaged, a configuration that
    makes no sense, a tensor that is missing, unknown, misshapen or not finite.
    """
    raw = _read_json(directory)
    config = _config(directory, raw)
    training = raw.get("training", {})
    if not isinstance(training, dict):
        raise CheckpointError(f"{directory / CONFIG}: training is no object")
    # On the meta device nothing is allocated or initialised: what the file does not fill shows.
    with torch.device("meta"):
        model = build_model(config)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    with torch.no_grad():
        state, draft_ids = _read_weights(directory, config, shapes)
    model.load_state_dict(state, assign=True)
    model.rotary = Rotary(config)
    model.eval().requires_grad_(False)
    return LoadedDrafter(config, model, draft_ids, training, directory)


def save(
    directory: Path,
    config: DrafterConfig,
    state: Mapping[str, Tensor],
    *,
    draft_ids: Tensor | None,
    training: Mapping[str, object],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a drafter so that `load` reads it back, each file complete or not at all.

    state      every parameter of `build_model(config)`, of its full shape
    draft_ids  [draft_vocab_size] rising ids that can be drafted; None with draft_vocab_size 0
    training   put under the key "training"

    Raises CheckpointError if the state does not fit the configuration or holds a number that is not
    finite, and if the directory cannot be written.
    """
    with torch.device("meta"):
        model = build_model(config)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    what = f"cannot write {directory}"
    _check_names(what, state, shapes)
    _check_shapes(what, {name: tuple(t.shape) for name, t in state.items()}, shapes)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in state.items()}
    for name, tensor in tensors.items():
        _check_finite(what, name, tensor)
    if (draft_ids is None) != (config.draft_vocab_size == 0):
        raise CheckpointError(f"{what}: draft_ids belong to draft_vocab_size above 0, and only so")
    if draft_ids is not None:
        ids = draft_ids.detach().to("cpu", torch.int64)
        _check_draft_ids(what, ids, config)
        if W2 in tensors:
            tensors[W2] = tensors[W2][ids].contiguous()
        tensors["draft_ids"] = ids.to(torch.int32)
    raw = dialects.to_flat(config) | {"dtype": str(dtype).removeprefix("torch.")}
    if "num_anchors" in training:
        raw["num_anchors"] = training["num_anchors"]
    write(directory, raw | {"training": dict(training)}, tensors)


def write(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors` under other names first, then move them into
    place: a reader never finds half a file. Raises CheckpointError."""
    from safetensors.torch import save_file

    try:
        text = json.dumps(raw, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{CONFIG} of {directory} cannot be written: {e}") from e
    parts = {name: directory / f".{name}.{os.getpid()}.tmp" for name in (WEIGHTS, CONFIG)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), parts[WEIGHTS], metadata={"format": "pt"})
        parts[CONFIG].write_text(text, encoding="utf-8")
        for name, part in parts.items():
            part.replace(directory / name)
    except Exception as e:  # safetensors has its own class, which is no OSError
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {directory}: {e}") from e


def _read_json(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise CheckpointError(f"{directory} holds no drafter: it has no {CONFIG}") from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return raw


def _config(directory: Path, raw: Mapping[str, Any]) -> DrafterConfig:
    try:
        return dialects.parse(raw)
    except CheckpointError as e:
        raise CheckpointError(f"{directory / CONFIG}: {e}") from e


class _Files:
    """The tensors of one or more safetensors files; headers are read at once, tensors when asked
    for."""

    def __init__(self, directory: Path) -> None:
        whole = directory / WEIGHTS
        paths = [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{directory} holds no {WEIGHTS}")
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            for name, shape in self._header(path):
                self._files[name] = path
                self.shapes[name] = shape
        # Some writers put the decoder's part of the names in front.
        prefix = "model." if "model.norm.weight" in self._files else ""
        self._stored = {
            dialects.tensor_name(name.removeprefix(prefix)): name for name in self._files
        }
        self.shapes = {name: self.shapes[stored] for name, stored in self._stored.items()}

    @staticmethod
    def _header(path: Path) -> list[tuple[str, tuple[int, ...]]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as f:
                return [(name, tuple(f.get_slice(name).get_shape())) for name in f.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{path} cannot be read: {e}") from e

    def tensor(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._files[self._stored[name]]
        try:
            with safe_open(path, framework="pt") as f:
                tensor: Tensor = f.get_tensor(self._stored[name])
                return tensor
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{path} cannot be read: {e}") from e


def _read_weights(
    directory: Path, c: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Parameters in fp32 by the model's names, of the model's shapes, and the drafted ids."""
    files, what = _Files(directory), str(directory)
    stored = dict(files.shapes)
    wanted = dict(shapes)
    if c.draft_vocab_size:
        ids_name = "d2t" if "d2t" in stored else "draft_ids"
        wanted[ids_name] = (c.draft_vocab_size,)
        if W2 in wanted:
            wanted[W2] = (c.draft_vocab_size, c.markov_rank)
    for name, shape in _copies(c).items():
        if name in stored and name not in wanted:
            _check_shapes(what, {name: stored.pop(name)}, {name: shape})
    _check_names(what, stored, wanted)
    _check_shapes(what, stored, wanted)
    draft_ids = None
    if c.draft_vocab_size:
        draft_ids = files.tensor(ids_name)
        if draft_ids.dtype not in (torch.int32, torch.int64):
            raise CheckpointError(f"{what}: tensor {ids_name} is {draft_ids.dtype}, expected int64")
        draft_ids = draft_ids.long() + (torch.arange(len(draft_ids)) if ids_name == "d2t" else 0)
        _check_draft_ids(what, draft_ids, c)
    state = {}
    for name in shapes:
        tensor = files.tensor(name)
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{what}: tensor {name} is {tensor.dtype}, expected floating point: quantised"
                " checkpoints are not read"
            )
        _check_finite(what, name, tensor)
        state[name] = tensor.float()
    if draft_ids is not None and W2 in state:
        whole = torch.zeros(c.vocab_size, c.markov_rank)
        whole[draft_ids] = state[W2]
        state[W2] = whole
    return state, draft_ids


def _copies(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """What belongs to the target and may be stored beside a drafter; none of it is used."""
    head = (c.draft_vocab_size or c.vocab_size, c.hidden_size)
    return {
        "embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "lm_head.weight": head,
        "verifier_lm_head.weight": head,
        "verifier_norm.weight": (c.hidden_size,),
        "t2d": (c.vocab_size,),
    }


def _check_names(what: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    found, wanted = set(found), set(wanted)
    for verb, names in (("lacks", wanted - found), ("has unknown", found - wanted)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(f"{what} {verb} tensors: {', '.join(sorted(names)[:5])}{more}")


def _check_shapes(
    what: str, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in found.items():
        if shape != wanted[name]:
            raise CheckpointError(
                f"{what}: tensor {name} has shape {list(shape)}, the configuration wants"
                f" {list(wanted[name])}"
            )


def _check_finite(what: str, name: str, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{what}: tensor {name} holds NaN or infinity: it is damaged")


def _check_draft_ids(what: str, ids: Tensor, c: DrafterConfig) -> None:
    if tuple(ids.shape) != (c.draft_vocab_size,):
        raise CheckpointError(
            f"{what}: draft_ids has shape {list(ids.shape)}, the configuration wants"
            f" [{c.draft_vocab_size}]"
        )
    if (ids[1:] <= ids[:-1]).any() or ids[0] < 0 or ids[-1] >= c.vocab_size:
        raise CheckpointError(f"{what}: draft_ids must rise and stay within 0..{c.vocab_size - 1}")
