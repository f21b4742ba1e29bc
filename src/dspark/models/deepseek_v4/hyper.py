"""Manifold-constrained hyper-connections: the residual stream of V4 (Xie et al. 2026).

A token is not one residual vector but four (`streams`). A sublayer reads a mixture of them and
writes back into all of them, while a 4 x 4 matrix stirs the four:

    y   = sublayer(norm(sum_j pre_j X_j))
    X_k = post_k y + sum_j comb_jk X_j

`pre`, `post` and `comb` come from the streams themselves through one small product. `comb` is made
doubly stochastic by Sinkhorn's iteration (divide by row sums, by column sums, and again), so that
no number of layers can blow the streams up. That iteration is twenty rounds on sixteen numbers:
nothing to compute, but over a hundred operations to start if written naively. Here the sixteen
numbers of a token are a row, and a product with a fixed 16 x 16 matrix of ones and zeros yields
every sum in its place, epsilon included: two operations for each half-round on any device.

Shape suffixes: N tokens, S streams (4), D hidden size, M = S * (S + 2) mixing coefficients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.deepseek_v4.arithmetic import Arithmetic, rms_norm
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.kernels import Hyper


def expand(x_ND: Tensor, streams: int) -> Tensor:
    """How a tower begins: the embedding in every stream [N, S, D]."""
    return x_ND.float()[:, None].repeat(1, streams, 1)


class HyperConnection:
    """The mixing around one sublayer; `prefix` names its parameters, `norm` the sublayer's norm."""

    def __init__(self, config: V4Config, maths: Arithmetic, prefix: str, norm: str) -> None:
        s = self.streams = config.streams
        self.eps, self.norm_eps = config.hc_eps, config.norm_eps
        self.rounds = config.sinkhorn_iterations
        d, m = config.hidden_size, s * (s + 2)
        self.fn_M_SD = maths.vector(prefix + "_fn", m, s * d)
        self.base_M = maths.vector(prefix + "_base", m)
        sizes = torch.tensor([s, s, s * s], device=maths.device)
        self.scale_M = maths.vector(prefix + "_scale", 3).repeat_interleave(sizes)
        self.norm_D = maths.vector(norm, d)
        one, eye = torch.ones(s, s, device=maths.device), torch.eye(s, device=maths.device)
        self._row_sums = torch.kron(eye, one)  # entry (j, k) receives the sum of row j
        self._column_sums = torch.kron(one, eye)
        self._eps = torch.full((s * s,), config.hc_eps, device=maths.device)
        self._maths = maths
        self._struct = Hyper(
            *(x.data_ptr() for x in (self.fn_M_SD, self.base_M, self.scale_M, self.norm_D)),
            s, config.hidden_size, self.rounds, self.eps, self.norm_eps,
        )  # fmt: skip

    def enter(self, x_NSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normed input of the sublayer [N, D], and post [N, S] and comb [N, S, S]."""
        kernels = self._maths.native(len(x_NSD))
        if kernels is not None:
            return kernels.enter(self._struct, x_NSD)
        s = self.streams
        mix_NM = F.linear(rms_norm(x_NSD.flatten(1), None, self.norm_eps), self.fn_M_SD)
        mix_NM = torch.addcmul(self.base_M, mix_NM, self.scale_M)
        gates_N2S = mix_NM[:, : 2 * s].sigmoid()
        comb = mix_NM[:, 2 * s :].view(-1, s, s).softmax(-1).flatten(1).add_(self.eps)
        comb.div_(torch.addmm(self._eps, comb, self._column_sums))
        for _ in range(self.rounds - 1):
            comb.div_(torch.addmm(self._eps, comb, self._row_sums))
            comb.div_(torch.addmm(self._eps, comb, self._column_sums))
        pre_N1S = gates_N2S[:, None, :s] + self.eps
        x_ND = torch.bmm(pre_N1S, x_NSD)[:, 0]
        post_NS = 2 * gates_N2S[:, s:]
        return rms_norm(x_ND, self.norm_D, self.norm_eps), post_NS, comb.view(-1, s, s)

    def leave(self, x_NSD: Tensor, y_ND: Tensor, post_NS: Tensor, comb_NSS: Tensor) -> Tensor:
        """The streams behind the sublayer whose output is y [N, D]."""
        kernels = self._maths.native(len(x_NSD))
        if kernels is not None:
            return kernels.leave(x_NSD, y_ND.float(), post_NS, comb_NSS)
        written = post_NS[:, :, None] * y_ND.float()[:, None]
        return torch.baddbmm(written, comb_NSS.transpose(1, 2), x_NSD)


class HyperHead:
    """How a tower ends: the streams gated into one, then the norm before the output head."""

    def __init__(self, config: V4Config, maths: Arithmetic, prefix: str = "") -> None:
        self.eps, self.norm_eps = config.hc_eps, config.norm_eps
        s, d = config.streams, config.hidden_size
        self.fn_S_SD = maths.vector(prefix + "hc_head_fn", s, s * d)
        self.base_S = maths.vector(prefix + "hc_head_base", s)
        self.scale_S = maths.vector(prefix + "hc_head_scale", 1).repeat(s)
        self.norm_D = maths.vector(prefix + "norm.weight", d)
        self._maths = maths
        self._struct = Hyper(
            *(x.data_ptr() for x in (self.fn_S_SD, self.base_S, self.scale_S, self.norm_D)),
            config.streams, config.hidden_size, 0, self.eps, self.norm_eps,
        )  # fmt: skip

    def collapse(self, x_NSD: Tensor) -> Tensor:
        """[N, D], before the norm."""
        kernels = self._maths.native(len(x_NSD))
        if kernels is not None:
            return kernels.enter(self._struct, x_NSD, raw=True)[0]
        mix_NS = F.linear(rms_norm(x_NSD.flatten(1), None, self.norm_eps), self.fn_S_SD)
        gate_NS = torch.addcmul(self.base_S, mix_NS, self.scale_S).sigmoid() + self.eps
        return torch.bmm(gate_NS[:, None], x_NSD)[:, 0]

    def norm(self, x_ND: Tensor) -> Tensor:
        """Before the output matrix."""
        return self._maths.norm_rotate(x_ND, self.norm_D, None)
