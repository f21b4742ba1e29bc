"""Weights of a DeepSeek-V4 directory, dequantised one tensor at a time as they are asked for.

Names are the official ones whatever the files call them (`deepseek_v4_names.py`); the scales of
quantised weights are no tensors of their own here. How a weight is stored is told by its dtype in
the file, not by the configuration:

    F8_E4M3             fp8, with `<name>.scale` for each 128 x 128
    I8                  two fp4 values a byte, with `<name>.scale` for each 32 columns
    BF16, F16, F32, F64 as it is
    I64, I32            `tid2eid`, the experts of each token id

A tensor is read straight from its bytes in the file: what loading needs beyond the model is one
tensor, and a shard without a wanted tensor is never opened. Where `transformers` keeps all experts
of a layer in one tensor, each expert is a slice of it.

Nothing is guessed: a scale that is missing or of a foreign shape, a dtype that does not belong, a
value that is not finite is a CheckpointError with the name of the tensor as the file has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models import fp8_fp4
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4_names import FUSED, canonical
from dspark.models.safetensors_header import Shards
from dspark.models.weights import QuantBlocks

_FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16
}  # fmt: skip
_INTEGERS = {"I64": torch.int64, "I32": torch.int32}
_SCALES = {"F8_E8M0": torch.float8_e8m0fnu, "F32": torch.float32}
_TABLE = ".tid2eid"
_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight")


@dataclass(frozen=True)
class _Slice:
    """One expert's matrix in a fused tensor: index `expert`, rows `first` .. `first + rows`."""

    stored: str
    expert: int
    first: int
    rows: int


class DeepseekV4Source:
    """A `WeightSource` over the safetensors files of a DeepSeek-V4 directory."""

    def __init__(self, directory: Path, config: V4Config, dtype: torch.dtype | None = None) -> None:
        """`dtype` is what quantised weights become: fp32 unless told otherwise; bf16 is as exact
        and half as large.

        Raises CheckpointError without weights in this format, or if two tensors share a name.
        """
        self._shards = Shards(directory)
        self._config = config
        self._dtype = dtype or torch.float32
        stored: dict[str, str] = {}
        for name in self._shards.files:
            ours = canonical(name)
            if ours in stored:
                raise CheckpointError(f"{directory}: {stored[ours]} and {name} are the same tensor")
            stored[ours] = name
        self._scales = {
            n.removesuffix(".scale") + ".weight": stored.pop(n)
            for n in [n for n in stored if n.endswith(".scale")]
        }
        self._slices: dict[str, _Slice] = {}
        for name in [n for n in stored if n.endswith(FUSED)]:
            self._split(name, stored.pop(name))
        self._stored = stored

    def _split(self, name: str, stored: str) -> None:
        """The experts of a fused tensor: w1 above w3 in one, w2 alone in the other."""
        prefix, _, part = name.rpartition(".")
        c = self._config
        wanted = (c.num_experts, 2 * c.expert_size, c.hidden_size)
        parts = {"w1": (0, c.expert_size), "w3": (c.expert_size, c.expert_size)}
        if part == "down_proj":
            wanted = (c.num_experts, c.hidden_size, c.expert_size)
            parts = {"w2": (0, c.hidden_size)}
        if self._shards.entry(stored).shape != wanted:
            raise _shape_error(self._shards, stored, self._shards.entry(stored).shape, wanted)
        for expert in range(c.num_experts):
            for w, (first, rows) in parts.items():
                self._slices[f"{prefix}.{expert}.{w}.weight"] = _Slice(stored, expert, first, rows)

    def names(self) -> frozenset[str]:
        return frozenset(self._stored) | frozenset(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape as the model sees it, unpacked. Opens the header of the tensor's file."""
        if name in self._slices:
            part = self._slices[name]
            return part.rows, self._shards.entry(part.stored).shape[-1]
        entry = self._shards.entry(self._name(name))
        if entry.dtype == "I8" and len(entry.shape) == 2:
            return entry.shape[0], 2 * entry.shape[1]
        return entry.shape

    def num_bytes(self) -> int:
        return self._shards.num_bytes()

    def tensor(self, name: str) -> Tensor:
        """The tensor: quantised ones in the source's dtype, others as stored.

        Raises CheckpointError, with the tensor's name, for whatever is wrong with it.
        """
        result = self._tensor(name)
        if result.is_floating_point() and not torch.isfinite(result).all():
            raise CheckpointError(f"{self._where(name)} holds NaN or infinity: it is damaged")
        return result

    def _tensor(self, name: str) -> Tensor:
        if name in self._slices:
            return self._sliced(self._slices[name])
        stored = self._name(name)
        dtype = self._shards.entry(stored).dtype
        if name.endswith(_TABLE):
            table = self._plain(stored, _INTEGERS).long()
            if ((table < 0) | (table >= self._config.num_experts)).any():
                raise CheckpointError(
                    f"{self._where(name)} is damaged: it names experts beyond the"
                    f" {self._config.num_experts} there are"
                )
            return table
        if dtype == "F8_E4M3" and name.endswith(".weight"):
            weight = self._plain(stored, {"F8_E4M3": torch.float8_e4m3fn})
            self._matrix(name, weight)
            return fp8_fp4.from_fp8(
                weight, self._scale(name, fp8_fp4.fp8_scale_shape(*weight.shape)), self._dtype
            )
        if dtype == "I8" and name.endswith(".weight"):
            return fp8_fp4.from_fp4(*self._packed(name), self._dtype)
        return self._plain(stored, _FLOATS)

    def _sliced(self, part: _Slice) -> Tensor:
        """One expert of a fused tensor; only its bytes are read."""
        entry = self._shards.entry(part.stored)
        dtype = self._known(part.stored, _FLOATS)
        _, rows, columns = entry.shape
        row = columns * dtype.itemsize
        first = (part.expert * rows + part.first) * row
        data = self._shards.read(part.stored, first, part.rows * row)
        return _as_tensor(data, (part.rows, columns), dtype)

    def blocks(self, name: str) -> QuantBlocks | None:
        """An fp4 matrix as 8-bit blocks, exactly; None for every other."""
        if name in self._slices or self._shards.entry(self._name(name)).dtype != "I8":
            return None
        packed, scale = self._packed(name)
        if not torch.isfinite(scale.float()).all():
            raise CheckpointError(f"{self._where(name)} holds NaN or infinity: it is damaged")
        return fp8_fp4.fp4_blocks(packed, scale)

    def _packed(self, name: str) -> tuple[Tensor, Tensor]:
        packed = self._plain(self._name(name), {"I8": torch.int8})
        self._matrix(name, packed)
        rows, half = packed.shape
        return packed, self._scale(name, fp8_fp4.fp4_scale_shape(rows, 2 * half))

    def _scale(self, name: str, wanted: tuple[int, int]) -> Tensor:
        stored = self._scales.get(name)
        if stored is None:
            raise CheckpointError(
                f"{self._where(name)} is quantised, but its scale"
                f" {self._name(name).removesuffix('.weight')}.scale is missing"
            )
        shape = self._shards.entry(stored).shape
        if shape != wanted:
            raise _shape_error(self._shards, stored, shape, wanted)
        return self._plain(stored, _SCALES)

    def _matrix(self, name: str, weight: Tensor) -> None:
        if weight.dim() != 2:
            raise CheckpointError(
                f"{self._where(name)} is quantised and of shape {list(weight.shape)}: expected a"
                " matrix"
            )

    def _plain(self, stored: str, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        """The bytes of a stored tensor as one of `dtypes`."""
        dtype = self._known(stored, dtypes)
        return _as_tensor(self._shards.read(stored), self._shards.entry(stored).shape, dtype)

    def _known(self, stored: str, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
        kind = self._shards.entry(stored).dtype
        if kind not in dtypes:
            raise CheckpointError(
                f"{self._shards.files[stored]}: tensor {stored} is {kind}, expected"
                f" {', '.join(dtypes)}"
            )
        return dtypes[kind]

    def _name(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(f"{self._shards.directory} has no tensor {name}")
        return self._stored[name]

    def _where(self, name: str) -> str:
        stored = self._slices[name].stored if name in self._slices else self._name(name)
        return f"{self._shards.files[stored]}: tensor {stored}"


def check_shapes(
    source: DeepseekV4Source, expected: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Raises CheckpointError naming what is missing of `expected`, or the first tensor of a wrong
    shape. Reads the headers of the files with these tensors, and no others."""
    names = source.names()
    missing = [n for n in expected if n not in names]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{what} lacks {', '.join(missing[:5])}{more}")
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise CheckpointError(
                f"{what}: tensor {name} has shape {list(source.shape(name))}, the configuration"
                f" wants {list(shape)}"
            )


def _as_tensor(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _shape_error(
    shards: Shards, stored: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> CheckpointError:
    return CheckpointError(
        f"{shards.files[stored]}: tensor {stored} has shape {list(shape)}, expected {list(wanted)}"
    )
