"""What a safetensors file holds, read from its first bytes alone.

The format (https://github.com/huggingface/safetensors#format): eight bytes, the length of what
follows as a little-endian integer; a JSON object, name -> `dtype`, `shape`, `data_offsets`; the
bytes. So the shapes of a checkpoint of 167 GB are known after a few megabytes, and a tensor can be
read without touching its neighbours. No torch here: asking what a file is shall not take seconds.

Every offset is checked against the file when its header is read, so that a file cut short in a
download is refused by the name of its first missing tensor, and not in the middle of loading.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from dspark.errors import CheckpointError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of one element, by the format's own names."""
_LONGEST = 100_000_000
"""Bytes of a header; the format's own limit."""


class Entry(NamedTuple):
    """One tensor of a file: `num_bytes` bytes from byte `start`, counted from the file's first."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> entry of one file. Raises CheckpointError if it is missing, no safetensors file, cut
    short, or if a tensor's bytes do not fit its shape."""
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or not 2 <= length <= min(_LONGEST, size - 8):
                raise CheckpointError(
                    f"{path} is no safetensors file, or cut short: its header would have {length}"
                    f" bytes, the file has {size}"
                )
            raw = json.loads(f.read(length))
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} is missing") from e
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise CheckpointError(f"{path} is damaged: its header is not JSON") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is damaged: its header is no JSON object")
    begin = 8 + length
    return {
        name: _entry(path, name, value, begin, size)
        for name, value in raw.items()
        if name != "__metadata__"
    }


def _entry(path: Path, name: str, value: Any, begin: int, size: int) -> Entry:
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        first, last = value["data_offsets"]
        bits = BITS[dtype] * math.prod(shape)
        ok = first >= 0 and min(shape, default=0) >= 0 and (last - first) * 8 == bits
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{path}: the header of tensor {name} is damaged: {value!r}") from e
    if not ok:
        raise CheckpointError(
            f"{path}: tensor {name} is damaged: {dtype} of shape {list(shape)} does not fill its"
            f" {last - first} bytes"
        )
    if begin + last > size:
        raise CheckpointError(
            f"{path} is cut short: tensor {name} ends at byte {begin + last}, the file has {size}"
        )
    return Entry(dtype, shape, begin + first, last - first)


class Shards:
    """The tensors of a directory: one file, many, with or without an index.

    With an index the names are known at once and a file's header is read when one of its tensors is
    asked for; without, every header is read.
    """

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError without a safetensors file or with a damaged index."""
        self.directory = directory
        self.files: dict[str, Path] = {}
        """Stored name -> file."""
        self._headers: dict[Path, dict[str, Entry]] = {}
        index = directory / INDEX
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                paths = {f: directory / f for f in set(weight_map.values())}
                self.files = {n: paths[f] for n, f in weight_map.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
                raise CheckpointError(f"{index} is damaged: {e!r}") from e
            return
        whole = directory / WHOLE
        found = [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{directory} holds no *.safetensors file")
        for path in found:
            self.files.update(dict.fromkeys(self.header(path), path))

    def header(self, path: Path) -> dict[str, Entry]:
        if path not in self._headers:
            self._headers[path] = read_header(path)
        return self._headers[path]

    def entry(self, name: str) -> Entry:
        """Raises CheckpointError if the name is unknown, or its file lacks it or is damaged."""
        if name not in self.files:
            raise CheckpointError(f"{self.directory} has no tensor {name}")
        path = self.files[name]
        header = self.header(path)
        if name not in header:
            raise CheckpointError(f"{path} has no tensor {name}, though {INDEX} says so")
        return header[name]

    def read(self, name: str, first: int = 0, size: int | None = None) -> bytearray:
        """The bytes of one tensor, or `size` of them from its byte `first`. Raises
        CheckpointError."""
        entry, path = self.entry(name), self.files[name]
        data = bytearray(entry.num_bytes if size is None else size)
        assert first + len(data) <= entry.num_bytes
        try:
            with path.open("rb") as f:
                f.seek(entry.start + first)
                read = f.readinto(data)
        except OSError as e:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {e.strerror}") from e
        if read != len(data):
            raise CheckpointError(f"{path}: tensor {name} is cut short: {read} bytes are left")
        return data

    def paths(self) -> list[Path]:
        return sorted(set(self.files.values()))

    def num_bytes(self) -> int:
        """Sizes of all files. Raises CheckpointError if one is missing."""
        try:
            return sum(p.stat().st_size for p in self.paths())
        except OSError as e:
            raise CheckpointError(f"{e.filename} is missing") from e
