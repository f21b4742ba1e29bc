"""Compile `kernels.c` and `blocks.h` once a machine and bring it into the process.

A C compiler is asked for rather than wheels for every processor: the kernels are one file, compile
in about two seconds, and `-march=native` then means this processor. The result is kept in
`$XDG_CACHE_HOME/dspark/` under a name made of the source, the flags, the compiler and the
processor's features, so a changed file or a moved home directory compiles anew.

Threads: PyTorch brings an OpenMP runtime of its own. A second one would keep a second pool of
spinning threads on the same cores, so the library is linked without any and resolves its few OpenMP
symbols from PyTorch's copy.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint8, c_uint16, c_void_p
from importlib import resources
from pathlib import Path

from dspark.errors import ResourceError

FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-tree-reassoc",
    "-fPIC",
    "-std=gnu11",
)


class Linear(Structure):
    """A packed matrix, as in kernels.c."""

    _fields_ = (("data", c_void_p), ("bias", c_void_p), ("out", c_int32), ("in_", c_int32),
                ("bits", c_int32), ("pad", c_int32))  # fmt: skip


class Layer(Structure):
    """The weights of one decoder layer, as in kernels.c."""

    _fields_ = (("qkv", Linear), ("o", Linear), ("gate_up", Linear), ("down", Linear),
                ("attn_norm", c_void_p), ("mlp_norm", c_void_p), ("q_norm", c_void_p),
                ("k_norm", c_void_p), ("window", c_int32), ("rotate", c_int32))  # fmt: skip


class Dims(Structure):
    """Sizes shared by all layers, as in kernels.c."""

    _fields_ = (("hidden", c_int32), ("inter", c_int32), ("heads", c_int32),
                ("kv_heads", c_int32), ("head_dim", c_int32), ("max_context", c_int32),
                ("threads", c_int32), ("eps", c_float), ("attn_scale", c_float))  # fmt: skip


class Pass(Structure):
    """Rows and scratch of one pass, as in kernels.c."""

    _fields_ = (("n", c_int32), ("stride", c_int32), ("position", c_void_p), ("slot", c_void_p),
                ("end", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("x", c_void_p),
                ("wide", c_void_p), ("attn", c_void_p), ("scores", c_void_p), ("q", c_void_p),
                ("q_scale", c_void_p), ("q_sum", c_void_p), ("keep", c_void_p),
                ("kept", c_void_p))  # fmt: skip


def cache_dir() -> Path:
    """Where compiled kernels and measured tables are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dspark"


@functools.cache
def load(extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The kernels, compiled if need be. Raises ResourceError without a working C compiler."""
    try:
        lib = ctypes.CDLL(str(_compiled(extra_flags)))
    except OSError as e:
        raise ResourceError(
            f"the int8 kernels cannot be kept or loaded in {cache_dir()} ({e}): set"
            " XDG_CACHE_HOME to a folder that can be written, or take --dtype fp32 or bf16"
        ) from e
    i32, ptr = c_int32, c_void_p
    lib.dspark_pack.argtypes = [
        POINTER(c_uint8), POINTER(c_uint16), POINTER(c_uint16), i32, i32, i32, ptr
    ]  # fmt: skip
    lib.dspark_rows.argtypes = [POINTER(Linear), ptr, i32, ptr]
    lib.dspark_layers.argtypes = [
        POINTER(Dims), POINTER(Layer), i32, ptr, ptr, c_int64, POINTER(Pass)
    ]  # fmt: skip
    lib.dspark_linear.argtypes = [POINTER(Linear), ptr, i32, ptr, ptr, ptr, ptr, i32]
    lib.dspark_rms_norm.argtypes = [ptr, ptr, i32, i32, c_float, ptr]
    for name in ("dspark_pack", "dspark_rows", "dspark_layers", "dspark_linear", "dspark_rms_norm"):
        getattr(lib, name).restype = None
    return lib


def _compiled(extra_flags: tuple[str, ...]) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler or not shutil.which(compiler):
        raise ResourceError(
            f"no C compiler found ({compiler or 'cc, gcc'}): dtype int8 compiles its kernels on"
            " first use; install gcc or clang, or take --dtype fp32 or bf16"
        )
    here = resources.files("dspark.models.native")
    sources = {name: here.joinpath(name).read_bytes() for name in ("kernels.c", "blocks.h")}
    openmp = _torch_openmp()
    flags = (*FLAGS, *(("-fopenmp",) if openmp else ()), *extra_flags)
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    key = hashlib.sha256(
        b"\0".join((*sources.values(), " ".join(flags).encode(), version, _cpu_features()))
    )
    target = cache_dir() / f"kernels-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as tmp:
        c, o, so = (Path(tmp) / f"kernels.{end}" for end in ("c", "o", "so"))
        for name, source in sources.items():
            (Path(tmp) / name).write_bytes(source)
        for command in (
            [compiler, *flags, "-c", str(c), "-o", str(o)],
            [compiler, "-shared", str(o), "-o", str(so), "-lm"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ResourceError(
                    f"the C compiler {compiler} failed on the int8 kernels"
                    f" ({(done.stderr.strip().splitlines() or ['no message'])[0]}):"
                    " take --dtype fp32 or bf16, or set CC to another compiler"
                )
        so.replace(target)
    return target


def _torch_openmp() -> bool:
    """Make PyTorch's OpenMP symbols visible to libraries loaded later, if it has a GNU runtime."""
    import torch

    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return True
    return False


def _cpu_features() -> bytes:
    """What `-march=native` depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.encode()
    return platform.processor().encode()


__all__ = ["Dims", "Layer", "Linear", "Pass", "cache_dir", "load"]
