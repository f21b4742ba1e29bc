"""How matrices are multiplied: the one place that knows fp32, bf16 and int8.

A module asks for `linear("a.weight", "b.weight")` and gets one map whose outputs lie side by side:
what reads the same input is one product, because a small model spends its time on starting
operations. Everything between products (norms, rotation, gates, Sinkhorn) is fp32 in every dtype.

int8 is the row-exact path of `models/int8.py`: 8-bit weights and activations, one scale for each
32 columns, on a CPU. What lies between products is `glue.c` there, so a row is equal to the bit
whatever shares the pass. In fp32 the same kernels serve passes of few rows, where starting
PyTorch's operations would take longer than they do; beyond, and in bf16 and on a GPU, rows agree to
rounding.

Shape suffixes: N rows, I inputs, O outputs, G groups.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError, ResourceError
from dspark.models.deepseek_v4 import kernels
from dspark.models.int8 import PackedLinear, quantise
from dspark.models.native import library
from dspark.models.tables import lazy_zeros
from dspark.models.weights import BLOCK, WeightSource


class Matrix:
    """A floating-point matrix [O, I] with an optional bias [O]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.struct = library.Linear(weight.data_ptr(), 0, *weight.shape, 32, 0)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Grouped:
    """A block-diagonal matrix: every group of rows and inputs for itself."""

    def __init__(self, weight: Tensor, maps: list[Matrix | PackedLinear]) -> None:
        self.maps = maps
        """One for each group; on floating-point matrices they share the weight's memory."""
        blocks = weight.view(len(maps), -1, weight.shape[1]).transpose(1, 2)  # [G, I / G, O / G]
        self._blocks = blocks if isinstance(maps[0], Matrix) else None

    def __call__(self, x: Tensor) -> Tensor:
        n, groups = len(x), len(self.maps)
        if self._blocks is None:
            parts = zip(self.maps, x.chunk(groups, -1), strict=True)
            return torch.cat([m(part) for m, part in parts], -1)
        x = x.to(self._blocks.dtype).view(n, groups, -1).transpose(0, 1)
        return torch.bmm(x, self._blocks).transpose(0, 1).reshape(n, -1)


class Arithmetic:
    """Weights of one checkpoint in one dtype on one device."""

    def __init__(
        self, weights: WeightSource, dtype: torch.dtype, device: torch.device, norm_eps: float
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.int8):
            raise ConfigError(f"DeepSeek-V4 runs in float32, bfloat16 or int8, not in {dtype}")
        if dtype == torch.int8 and device.type != "cpu":
            raise ConfigError("dtype int8 runs on a CPU only: take bf16 or device cpu")
        self.weights, self.device, self.norm_eps = weights, device, norm_eps
        self.integer = dtype == torch.int8
        self.dtype = torch.float32 if self.integer else dtype
        """Of activations at the door of a product, and of the attention tables."""
        self.kernels: kernels.Kernels | None = None
        if device.type == "cpu":
            try:
                self.kernels = kernels.load()
            except ResourceError:
                if self.integer:
                    raise

    def reading(self, weights: WeightSource) -> Arithmetic:
        """The same over another checkpoint."""
        other = copy.copy(self)
        other.weights = weights
        return other

    def elsewhere(self, device: torch.device) -> Arithmetic:
        """The same on another device; integer kernels become fp32."""
        return Arithmetic(self.weights, self.dtype, device, self.norm_eps)

    def native(self, rows: int) -> kernels.Kernels | None:
        """The kernels of `glue.c` where they are the better way: always on the integer path, whose
        rows must not depend on their number, and for few rows otherwise."""
        return self.kernels if self.integer or rows <= kernels.FEW else None

    def norm_rotate(
        self,
        x: Tensor,
        weight: Tensor | None,
        turns: Tensor | None,
        heads: int = 1,
        *,
        norm: bool = True,
    ) -> Tensor:
        """Each of `heads` vectors of a row normed, then its last dimensions rotated by the row's
        turns: [N, heads * dim] -> [N, heads * dim] fp32, a new tensor."""
        n = len(x)
        native = self.native(n)
        if native is not None:
            return native.norm_rotate(
                x.float(), heads, weight, self.norm_eps if norm else -1, turns
            )
        y = x.float().reshape(n, heads, -1)
        y = rms_norm(y, weight, self.norm_eps) if norm else y.clone()
        if turns is not None:
            rotate_(y, turns[:, None])
        return y.view(n, -1)

    def checked(self, name: str, *shape: int) -> Tensor:
        """A tensor as stored. Raises CheckpointError for another shape than the configuration's,
        which kernels would otherwise read past its end."""
        tensor = self.weights.tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, the configuration says {shape}"
            )
        return tensor

    def products(self, rows: int) -> kernels.Kernels | None:
        """The same for whole sublayers, products and all."""
        few = self.dtype == torch.float32 and rows <= kernels.FEW_PRODUCTS
        return self.kernels if self.integer or few else None

    def vector(self, name: str, *shape: int) -> Tensor:
        """A small tensor in fp32: norms, biases, gates."""
        return self.checked(name, *shape).to(self.device, torch.float32).contiguous()

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self.checked(name, *shape).to(self.device, self.dtype)

    def linear(
        self, *parts: str | tuple[str, int, int], shape: tuple[int, int]
    ) -> Matrix | PackedLinear:
        """Matrices one above the other as one map [N, I] -> [N, O].

        A part is a name, or (name, i, n): the i-th of n equal slices of that matrix's rows.
        """
        rows = []
        for part in parts:
            name, i, n = (part, 0, 1) if isinstance(part, str) else part
            rows.append(self.weights.tensor(name).chunk(n)[i].to(self.device, self.dtype))
        whole = torch.cat(rows) if len({r.shape[1:] for r in rows}) == 1 else rows[0][:0]
        if tuple(whole.shape) != shape:
            found = ", ".join(f"{p} {tuple(r.shape)}" for p, r in zip(parts, rows, strict=True))
            raise CheckpointError(f"{found}: the configuration says {shape} in all")
        return self.map(whole)

    def map(self, weight: Tensor, bias: Tensor | None = None) -> Matrix | PackedLinear:
        """A given weight [O, I] (and bias [O]) as a map in this arithmetic."""
        if self.integer:
            if weight.shape[1] % BLOCK:
                raise ConfigError(
                    f"dtype int8: a matrix has {weight.shape[1]} columns, the kernels need a"
                    f" multiple of {BLOCK}: take --dtype fp32 or bf16"
                )
            return PackedLinear(quantise(weight.cpu()), bias)
        w = weight.to(self.device, self.dtype).contiguous()
        b = None if bias is None else bias.to(self.device, self.dtype)
        return Matrix(w, b)

    def grouped(self, name: str, groups: int, shape: tuple[int, int]) -> Grouped:
        """A block-diagonal map: weight [O, I / G], whose rows and inputs fall into G groups."""
        w = self.matrix(name, *shape)
        return Grouped(w, [self.map(part) for part in w.chunk(groups)])

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A table of zeros, which costs memory where it is written."""
        dtype = dtype or self.dtype
        words = lazy_zeros(shape, np.float32 if dtype == torch.float32 else np.int16)
        return torch.from_numpy(words).view(dtype).to(self.device)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in fp32."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y.mul_(weight)


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last dimensions of x in place by complex `turns`."""
    pairs = turns.shape[-1]
    tail = x[..., -2 * pairs :].view(*x.shape[:-1], pairs, 2)
    torch.view_as_complex(tail).mul_(turns)
    return x
