"""Weights of a Hugging Face directory: one or many safetensors files, with or without an index.

Files are opened when one of their tensors is asked for, and only headers are read before. Names
may have a prefix (`model.language_model.`, or none at all); they are recognised by where the first
layer is.
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
            except (ValueError, KeyError) as e:
                raise CheckpointError(f"{index} is damaged: {e!r}") from e
            self._files = {n: directory / f for n, f in weight_map.items()}
        else:
            paths = sorted(directory.glob("*.safetensors"))
            if not paths:
                other = sorted(p.name for p in directory.glob("*.bin"))
                hint = f" ({other[0]} is not read: convert it to safetensors)" if other else ""
                raise CheckpointError(f"{directory} holds no *.safetensors file{hint}")
            for path in paths:
                with _opened(path) as f:
                    self._files.update(dict.fromkeys(f.keys(), path))
        self._stored = dict(self._rename())

    def _rename(self) -> Iterator[tuple[str, str]]:
        """Canonical name -> stored name."""
        prefix = next(
            (n.removesuffix(_LANDMARK) for n in sorted(self._files) if n.endswith(_LANDMARK)), None
        )
        if prefix is None:
            raise CheckpointError(
                f"{self._directory} holds no decoder: no tensor is named ...{_LANDMARK};"
                f" it has {', '.join(sorted(self._files)[:3])}, ..."
            )
        for name in self._files:
            if name.endswith("lm_head.weight"):
                yield "lm_head.weight", name
            elif name.startswith(prefix):
                yield "model." + name.removeprefix(prefix), name

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._name(name)
        with _opened(self._files[stored]) as f:
            return tuple(f.get_slice(stored).get_shape())

    def num_bytes(self) -> int:
        return sum(p.stat().st_size for p in set(self._files.values()))

    def tensor(self, name: str) -> Tensor:
        stored = self._name(name)
        with _opened(self._files[stored]) as f:
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
