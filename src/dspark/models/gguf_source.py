"""GGUF files: header, weights, and the metadata from which configuration and tokenizer are made.

The `gguf` library knows the quantisation formats and dequantises; its reader, however, takes six
seconds for the 98,000 strings of a tokenizer, so the header is scanned here, once, in a tenth of a
second.

llama.cpp stores the query and key rows of the llama architecture in interleaved rotary order; they
are put back into the half-split order of Hugging Face. Whole rows move, so quantised blocks stay
exact.

Not promised: big-endian files, files split into several, quantisation types other than those of
`_SUPPORTED`. They are refused by name when the file is opened.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.config import DecoderConfig, from_gguf
from dspark.models.weights import BLOCK, QuantBlocks

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


class GgufFile:
    """One GGUF file, mapped into memory; its metadata and tensor table are read at once."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if the file is missing, not a GGUF, or shorter than it says."""
        self.path = path
        try:
            with path.open("rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise CheckpointError(f"cannot read {path}: {e}") from e
        if self._map[:4] != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        try:
            self.metadata, self.entries = self._scan()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, RecursionError) as e:
            raise CheckpointError(
                f"{path} is damaged or truncated: its header does not end within its"
                f" {len(self._map)} bytes"
            ) from e
        for name, entry in self.entries.items():
            if entry.offset + entry.num_bytes > len(self._map):
                raise CheckpointError(
                    f"{path} is truncated: tensor {name} ends at byte"
                    f" {entry.offset + entry.num_bytes}, the file has {len(self._map)}"
                )

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as stored."""
        entry = self.entries[name]
        return np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.offset)

    def _scan(self) -> tuple[dict[str, Any], dict[str, _Entry]]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        data, at = self._map, 24
        version, num_tensors, num_pairs = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}, supported are 2 and 3")

        def take(code: str) -> Any:
            nonlocal at
            (value,) = struct.unpack_from("<" + code, data, at)
            at += struct.calcsize("<" + code)
            return value

        def text() -> str:
            nonlocal at
            size = take("Q")
            if at + size > len(data):
                raise struct.error("a string runs past the end")
            at += size
            return data[at - size : at].decode()

        def value(kind: int) -> Any:
            nonlocal at
            if kind == _STRING:
                return text()
            if kind == _ARRAY:
                inner, count = take("I"), take("Q")
                if inner in _SCALARS:
                    code = f"<{count}{_SCALARS[inner]}"
                    numbers = struct.unpack_from(code, data, at)
                    at += struct.calcsize(code)
                    return list(numbers)
                return [value(inner) for _ in range(count)]
            if kind not in _SCALARS:
                raise struct.error(f"unknown value type {kind}")
            return take(_SCALARS[kind])

        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = text()
            metadata[key] = value(take("I"))
        table = []
        for _ in range(num_tensors):
            name = text()
            dims = [take("Q") for _ in range(take("I"))]
            table.append((name, tuple(dims[::-1]), take("I"), take("Q")))
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {align!r}")
        start = -(-at // align) * align
        entries = {}
        for name, shape, number, offset in table:
            try:
                kind = GGMLQuantizationType(number)
            except ValueError as e:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has unknown type {number}"
                ) from e
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % per_block:
                raise CheckpointError(
                    f"{self.path}: tensor {name} of shape {list(shape)} does not divide into blocks"
                    f" of {per_block} ({kind.name})"
                )
            size = math.prod(shape) // per_block * block_bytes
            entries[name] = _Entry(shape, kind.name, start + offset, size)
        return metadata, entries

    def config(self) -> DecoderConfig:
        """The decoder that the metadata describes. Raises CheckpointError for another kind."""
        factors = None
        stretched = self.entries.get("rope_freqs.weight")
        if stretched is not None:  # how llama.cpp stores the llama3 stretching
            if stretched.kind != "F32":
                raise CheckpointError(
                    f"{self.path}: rope_freqs.weight is {stretched.kind}, not F32"
                )
            factors = tuple(self.raw("rope_freqs.weight").view(np.float32).tolist())
        layers = [p for n in self.entries if len(p := n.split(".")) == 4 and p[0] == "blk"]
        try:
            return from_gguf(
                self.metadata,
                tied="output.weight" not in self.entries,
                freq_factors=factors,
                biases=frozenset(p[2] for p in layers if p[3] == "bias"),
            )
        except CheckpointError as e:
            raise CheckpointError(f"{self.path}: {e}") from e
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"{self.path} holds a value of a wrong kind: {e}") from e


class GgufSource:
    """A `WeightSource` over a GGUF file of the llama architecture."""

    def __init__(self, file: GgufFile, config: DecoderConfig) -> None:
        self._file = file
        self._config = config
        self._stored = dict(self._rename())
        """Canonical name -> name in the file."""
        for name, stored in self._stored.items():
            if (kind := self._entry(name).kind) not in _SUPPORTED:
                raise CheckpointError(
                    f"{file.path}: tensor {stored} is {kind}, supported are {', '.join(_SUPPORTED)}"
                )

    def _rename(self) -> Iterator[tuple[str, str]]:
        for name in self._file.entries:
            if name in _NAMES:
                yield _NAMES[name], name
            elif name.startswith("blk.") and name.count(".") == 3:
                _, layer, part, ending = name.split(".")
                if part in _LAYER_NAMES:
                    yield f"model.layers.{layer}.{_LAYER_NAMES[part]}.{ending}", name

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def num_bytes(self) -> int:
        return sum(self._entry(n).num_bytes for n in self._stored)

    def tensor(self, name: str) -> Tensor:
        import gguf

        entry = self._entry(name)
        kind = gguf.GGMLQuantizationType[entry.kind]
        raw = self._file.raw(self._stored[name])
        if entry.kind in ("F32", "F16"):
            values = raw.view(np.float32 if entry.kind == "F32" else np.float16)
            values = values.astype(np.float32).reshape(entry.shape)
        else:
            rows = raw.reshape(*entry.shape[:-1], -1)
            values = gguf.quants.dequantize(rows, kind).reshape(entry.shape)
        rows_of = self._row_order(name)
        return torch.from_numpy(values if rows_of is None else values[rows_of])

    def blocks(self, name: str) -> QuantBlocks | None:
        entry = self._entry(name)
        sizes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
        if entry.kind not in sizes or len(entry.shape) != 2:
            return None
        raw = self._file.raw(self._stored[name])
        raw = raw.reshape(entry.shape[0], entry.shape[1] // BLOCK, sizes[entry.kind])
        rows_of = self._row_order(name)
        if rows_of is not None:
            raw = raw[rows_of]

        def half(at: int) -> npt.NDArray[np.float32]:
            return (
                np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)
            )

        scale = half(0)
        if entry.kind == "Q8_0":
            eight = np.ascontiguousarray(raw[..., 2:]).view(np.int8).reshape(entry.shape)
            # The kernels take magnitudes up to 127; a file with -128 is rounded again by its user.
            return None if eight.min() == -128 else QuantBlocks(8, eight, scale, None)
        nibbles = raw[..., 4:] if entry.kind == "Q4_1" else raw[..., 2:]
        four = np.concatenate([nibbles & 15, nibbles >> 4], -1).reshape(entry.shape)
        return QuantBlocks(4, four, scale, half(2) if entry.kind == "Q4_1" else -8 * scale)

    def _entry(self, name: str) -> _Entry:
        if name not in self._stored:
            raise CheckpointError(f"{self._file.path} has no tensor {name}")
        return self._file.entries[self._stored[name]]

    def _row_order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Stored row of each wanted row, for query and key projections."""
        for part, heads in (
            ("q_proj", self._config.num_heads),
            ("k_proj", self._config.num_kv_heads),
        ):
            if f"self_attn.{part}." in name:
                rows = np.arange(heads * self._config.head_dim).reshape(heads, -1, 2)
                return rows.swapaxes(1, 2).reshape(-1)
        return None
