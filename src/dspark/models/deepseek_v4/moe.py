"""Mixture of experts: each token through a few of many small MLPs, and through one shared one.

Scores are sqrt(softplus(gate x)). Scored layers take the experts with the best score + bias, hash
layers those that a table names for the token id; either way the unbiased scores of the chosen,
normalised and scaled, weight their outputs. Pairs (token, expert) are sorted by expert, so that
every expert that was hit multiplies its tokens once and no other is touched.

Shape suffixes: N tokens, D hidden size, K experts a token, P = N * K pairs, I inner size.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.deepseek_v4.arithmetic import Arithmetic
from dspark.models.deepseek_v4.config import V4Config


class MoE:
    """The experts of one layer."""

    def __init__(self, config: V4Config, maths: Arithmetic, prefix: str, *, hashed: bool) -> None:
        self.top_k, self.scale = config.experts_per_token, config.routed_scale
        self.limit, self.device = config.swiglu_limit, maths.device
        self.gate = maths.vector(prefix + "gate.weight")
        self.table: Tensor | None = None
        self.bias: Tensor | None = None
        if hashed:
            self.table = maths.weights.tensor(prefix + "gate.tid2eid").to(maths.device, torch.int64)
        else:
            self.bias = maths.vector(prefix + "gate.bias")

        self.shared_in = maths.linear(
            prefix + "shared_experts.w1.weight", prefix + "shared_experts.w3.weight"
        )
        self.shared_out = maths.linear(prefix + "shared_experts.w2.weight")
        names = [f"{prefix}experts.{e}." for e in range(config.num_experts)]
        self.inner = [maths.linear(n + "w1.weight", n + "w3.weight") for n in names]
        self.outer = [maths.linear(n + "w2.weight") for n in names]

    def route(self, x_ND: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts a token visits [N, K], and with what weight [N, K]."""
        scores = F.softplus(F.linear(x_ND, self.gate)).sqrt_()
        if self.table is not None:
            ids_NK = self.table[tokens_N]
        else:
            assert self.bias is not None
            ids_NK = (scores + self.bias).topk(self.top_k, -1).indices
        w_NK = scores.gather(1, ids_NK)
        return ids_NK, w_NK * (self.scale / (w_NK.sum(-1, keepdim=True) + 1e-20))

    def __call__(self, x_ND: Tensor, tokens_N: Tensor) -> Tensor:
        """x [N, D] fp32 -> [N, D] fp32."""
        n = len(x_ND)
        ids_NK, w_NK = self.route(x_ND, tokens_N)
        flat_P = ids_NK.flatten().cpu().numpy()
        order_P = np.argsort(flat_P, kind="stable")
        sorted_P = flat_P[order_P]
        edges = [0, *(np.flatnonzero(np.diff(sorted_P)) + 1).tolist(), len(sorted_P)]
        hit = [(int(sorted_P[a]), a, b) for a, b in pairwise(edges)]
        order = torch.from_numpy(order_P).to(self.device)
        rows_P = order // self.top_k
        x_PD = x_ND[rows_P]
        wide = [self.shared_in(x_ND), *(self.inner[e](x_PD[a:b]) for e, a, b in hit)]
        gate, up = torch.cat(wide).float().clamp_(max=self.limit).chunk(2, -1)
        h = F.silu(gate).mul_(up.clamp(min=-self.limit))
        h[n:].mul_(w_NK.flatten()[order, None])
        routed = torch.cat([self.outer[e](h[n + a : n + b]) for e, a, b in hit]).float()
        return self.shared_out(h[:n]).float().index_add_(0, rows_P, routed)
