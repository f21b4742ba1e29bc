"""Weights of a Hugging Face directory: one or many safetensors files, with or without an index.

Files are opened when one of their tensors is asked for, and only headers are read before: with an
index, two tensors of a sharded model open two files at most. Names may have a prefix
(`model.language_model.`, or none at all); they are recognised by where the first layer is.

Not promised: quantised tensors (int8, fp8, packed 4 bits), whose scales other tensors would hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.weights import QuantBlocks

_INDEX = "model.safetensors.index.json"
_LANDMARK = "layers.0.input_layernorm.weight"
_TABLE = "embed_tokens.weight"
_FLOATS = {"F64", "F32", "F16", "BF16"}


class SafetensorsSource:
    """A `WeightSource` over the safetensors files of a directory."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError without weights in this format, or with a damaged file."""
        self._directory = directory
        self._files: dict[str, Path] = {}
        """Stored name -> file."""
        index = directory / _INDEX
        if index.exists():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                self._files = {n: directory / f for n, f in weight_map.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
                raise CheckpointError(f"{index} is damaged: {e!r}") from e
        else:
            whole = directory / "model.safetensors"
            paths = [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))
            if not paths:
                other = sorted(p.name for p in directory.glob("*.bin"))
                hint = f" ({other[0]} is not read: convert it to safetensors)" if other else ""
                raise CheckpointError(f"{directory} holds no *.safetensors file{hint}")
            for path in paths:
                with _opened(path) as f:
                    self._files.update(dict.fromkeys(f.keys(), path))
        self._stored = dict(self._rename())
        self._shapes: dict[Path, dict[str, tuple[int, ...]]] = {}

    def _rename(self) -> Iterator[tuple[str, str]]:
        """Canonical name -> stored name."""
        prefixes = [n.removesuffix(_LANDMARK) for n in sorted(self._files) if n.endswith(_LANDMARK)]
        # Beside the text model there may be a vision tower or a predictor; neither embeds tokens.
        prefixes.sort(key=lambda p: p + _TABLE not in self._files)
        if not prefixes:
            raise CheckpointError(
                f"{self._directory} holds no decoder: no tensor is named ...{_LANDMARK};"
                f" it has {', '.join(sorted(self._files)[:3])}, ..."
            )
        for name in self._files:
            if name.startswith(prefixes[0]) and not name.endswith("lm_head.weight"):
                yield "model." + name.removeprefix(prefixes[0]), name
        heads = [n for n in self._files if n == "lm_head.weight" or n.endswith(".lm_head.weight")]
        if heads:
            yield "lm_head.weight", min(heads, key=len)

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._name(name)
        path = self._files[stored]
        if path not in self._shapes:
            with _opened(path) as f:
                inside = f.keys()
                self._shapes[path] = {n: tuple(f.get_slice(n).get_shape()) for n in inside}
        if stored not in self._shapes[path]:
            raise CheckpointError(f"{path} has no tensor {stored}, though {_INDEX} says so")
        return self._shapes[path][stored]

    def num_bytes(self) -> int:
        try:
            return sum(p.stat().st_size for p in set(self._files.values()))
        except OSError as e:
            raise CheckpointError(f"{e.filename} is missing") from e

    def tensor(self, name: str) -> Tensor:
        stored = self._name(name)
        with _opened(self._files[stored]) as f:
            kind = f.get_slice(stored).get_dtype()
            if kind not in _FLOATS:
                raise CheckpointError(
                    f"{self._files[stored]}: tensor {stored} is {kind}, expected one of"
                    f" {', '.join(sorted(_FLOATS))}: quantised checkpoints are not read"
                )
            tensor: Tensor = f.get_tensor(stored)
            return tensor

    def blocks(self, name: str) -> QuantBlocks | None:
        return None

    def _name(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(f"{self._directory} has no tensor {name}")
        return self._stored[name]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """`safe_open` with errors in our words, both at opening and at reading."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as f:
            yield f
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} is missing") from e
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from e
