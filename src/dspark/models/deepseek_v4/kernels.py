"""`glue.c` for tensors: a mixing of streams, a layer's attention or its experts in one call.

On a CPU, between products always in fp32; the products are fp32 or the integer kernels'.

Compiled once a machine, as the integer kernels are (`models/native/library.py`). Without a compiler
fp32 and bf16 run on PyTorch's operations instead, which do the same and are slower to start.

Shape suffixes as in the modules that call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dspark.errors import ResourceError
from dspark.models.native import library

FEW = 64
"""Rows up to which a call here beats PyTorch's operations; beyond, their matrix products win."""
FEW_PRODUCTS = 8
"""The same for calls that hold fp32 products."""


class Hyper(Structure):
    """The parameters of one mixing of streams, as in glue.c."""

    _fields_ = (("fn", c_void_p), ("base", c_void_p), ("scale", c_void_p), ("norm", c_void_p),
                ("streams", c_int32), ("hidden", c_int32), ("rounds", c_int32), ("eps", c_float),
                ("norm_eps", c_float))  # fmt: skip


class Attention(Structure):
    """One layer's attention: weights, tables, sizes; as in attention.h."""

    _fields_ = (
        *((n, c_void_p) for n in (
            "in_", "q", "index_q", "out", "groups", "product", "rank_norm", "q_norm", "kv_norm",
            "sink", "bias", "entry_norm", "index_norm", "keys", "inputs", "index_keys",
        )),
        *((n, c_int64) for n in (
            "hidden", "rank", "heads", "dim", "num_groups", "group_rank", "pairs", "ratio", "span",
            "width", "index_heads", "index_dim", "topk", "ring", "stride", "slot_entries",
        )),
        ("eps", c_float),
    )  # fmt: skip


class Rows(Structure):
    """The addresses of a pass in the layers of one ratio, as in attention.h."""

    _fields_ = (
        *((n, c_int64) for n in ("n", "closing", "entries")),
        *((n, c_void_p) for n in (
            "slot", "position", "first", "last", "key_rows", "input_rows", "turns", "pool_rows",
            "entry_rows", "index_rows", "entry_turns",
        )),
    )  # fmt: skip


class Experts(Structure):
    """The experts of one layer, as in glue.c."""

    _fields_ = (("gate", c_void_p), ("bias", c_void_p), ("inner", c_void_p), ("outer", c_void_p),
                ("product", c_void_p), ("experts", c_int64), ("hidden", c_int64),
                ("size", c_int64), ("k", c_int64), ("scale", c_float),
                ("limit", c_float))  # fmt: skip


class Walk(Structure):
    """The sequential stage of a DSpark drafter, as in glue.c."""

    _fields_ = (("w1", c_void_p), ("confidence", c_void_p), ("w2", c_void_p),
                ("product", c_void_p), ("hidden", c_int64))  # fmt: skip


class Kernels:
    """The functions of glue.c. Tensors are contiguous fp32 (ids int64) unless said otherwise."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        p, n, i, f = c_void_p, c_int64, c_int32, c_float
        self._enter = _typed(lib.v4_enter, POINTER(Hyper), p, n, p, p, p, i, i)
        self._leave = _typed(lib.v4_leave, p, p, p, p, n, n, n, p, i)
        self._norm_rotate = _typed(lib.v4_norm_rotate, p, n, n, n, n, p, f, p, n, p, i)
        self._attention = _typed(lib.v4_attention, POINTER(Attention), POINTER(Rows), p, p, i)
        self._route = _typed(lib.v4_route, p, n, n, p, n, p, p, n, f, p, p)
        self._swiglu = _typed(lib.v4_swiglu, p, n, n, f, p, p)
        self._experts = _typed(lib.v4_experts, POINTER(Experts), p, n, p, p, i)
        self._walk = _typed(lib.v4_walk, POINTER(Walk), p, p, n, n, p, p, i)
        self.products = {
            32: ctypes.cast(lib.v4_linear, p).value,
            8: ctypes.cast(library.load().dspark_linear, p).value,
        }
        """Addresses of the products by the bits of their matrices."""

    def enter(
        self, hyper: Hyper, x_NSD: Tensor, raw: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_NSD = x_NSD.contiguous()
        n, s, d = x_NSD.shape
        y, post, comb = torch.empty(n, d), torch.empty(n, s), torch.empty(n, s, s)
        self._enter(
            byref(hyper), x_NSD.data_ptr(), n, y.data_ptr(), post.data_ptr(), comb.data_ptr(),
            int(raw), _threads(n),
        )  # fmt: skip
        return y, post, comb

    def leave(self, x_NSD: Tensor, y_ND: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        x_NSD = x_NSD.contiguous()
        n, s, d = x_NSD.shape
        y_ND, out = y_ND.contiguous(), torch.empty_like(x_NSD)
        self._leave(
            x_NSD.data_ptr(), y_ND.data_ptr(), post.data_ptr(), comb.data_ptr(), n, s, d,
            out.data_ptr(), _threads(n),
        )  # fmt: skip
        return out

    def norm_rotate(
        self, x: Tensor, heads: int, weight: Tensor | None, eps: float, turns: Tensor | None
    ) -> Tensor:
        """x [N, heads * dim], rows at any stride, each vector normed (not if eps < 0), then rotated
        (not without turns [N, R / 2]): [N, heads * dim]."""
        n, width = x.shape
        out = torch.empty(n, width)
        self._norm_rotate(
            x.data_ptr(), x.stride(0), n, heads, width // heads, _pointer(weight), eps,
            _pointer(turns), 0 if turns is None else turns.shape[-1], out.data_ptr(), _threads(n),
        )  # fmt: skip
        return out

    def attention(self, layer: Attention, rows: Rows, x: Tensor) -> Tensor:
        """x [N, D] -> [N, D]; writes the rows' state."""
        out = torch.empty_like(x)
        self._attention(
            byref(layer), byref(rows), x.data_ptr(), out.data_ptr(), torch.get_num_threads()
        )
        return out

    def route(
        self,
        x: Tensor,
        gate: Tensor,
        bias: Tensor | None,
        chosen: Tensor | None,
        k: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Experts [N, K] of each row and their weights [N, K]."""
        n, d = x.shape
        ids, weights = torch.empty(n, k, dtype=torch.int64), torch.empty(n, k)
        self._route(
            x.data_ptr(), n, d, gate.data_ptr(), len(gate), _pointer(bias), _pointer(chosen), k,
            scale, ids.data_ptr(), weights.data_ptr(),
        )  # fmt: skip
        return ids, weights

    def swiglu(self, x: Tensor, limit: float, weights: Tensor | None) -> Tensor:
        """x [N, 2 * I] -> [N, I]."""
        n, size = x.shape[0], x.shape[1] // 2
        out = torch.empty(n, size)
        self._swiglu(x.data_ptr(), n, size, limit, _pointer(weights), out.data_ptr())
        return out

    def experts(self, experts: Experts, x: Tensor, chosen: Tensor | None) -> Tensor:
        """x [N, D] -> [N, D]; chosen [N, K] experts from a table."""
        out = torch.empty_like(x)
        self._experts(
            byref(experts), x.data_ptr(), len(x), _pointer(chosen), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def walk(
        self, walk: Walk, base_NV: Tensor, x_ND: Tensor, token: int
    ) -> tuple[list[int], Tensor | None]:
        """The greedy tokens of a block behind `token`, and their confidences [N]."""
        n = len(base_NV)
        ids, sure = (c_int64 * n)(), torch.empty(n) if walk.confidence else None
        self._walk(
            byref(walk), base_NV.data_ptr(), x_ND.data_ptr(), n, token, ids, _pointer(sure),
            torch.get_num_threads(),
        )  # fmt: skip
        return list(ids), sure


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _threads(rows: int) -> int:
    """Waking a team for a few rows costs more than the rows do."""
    return torch.get_num_threads() if rows > 8 else 1


def _typed(function: Any, *types: object) -> Callable[..., None]:
    function.argtypes, function.restype = types, None
    return cast(Callable[..., None], function)


@functools.cache
def load() -> Kernels:
    """Compiled if need be. Raises ResourceError without a working C compiler."""
    library.load()  # says in a line what is wrong with the compiler, if anything is
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "cc"
    here = resources.files("dspark.models.deepseek_v4")
    names = ("glue.c", "attention.h", "vectors.h")
    sources = {name: here.joinpath(name).read_bytes() for name in names}
    flags = [*library.FLAGS, *(["-fopenmp"] if library._torch_openmp() else [])]
    command = " ".join([compiler, *flags]).encode()
    key = hashlib.sha256(b"\0".join((*sources.values(), command, library._cpu_features())))
    target = library.cache_dir() / f"v4-{key.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as tmp:
            c, o, so = (Path(tmp) / f"glue.{end}" for end in ("c", "o", "so"))
            for name, source in sources.items():
                (Path(tmp) / name).write_bytes(source)
            _run([compiler, *flags, "-c", str(c), "-o", str(o)])
            _run([compiler, "-shared", str(o), "-o", str(so), "-lm"])
            so.replace(target)
    try:
        return Kernels(ctypes.CDLL(str(target)))
    except OSError as e:
        raise ResourceError(f"the DeepSeek-V4 kernels cannot be loaded: {e}") from e


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise ResourceError(f"the C compiler {command[0]} failed on the kernels of V4 ({first})")
