"""Mixture of experts: each token through a few of many small MLPs, and through one shared one.

Scores are sqrt(softplus(gate x)). Scored layers take the experts with the best score + bias, hash
layers those that a table names for the token id; either way the unbiased scores of the chosen,
normalised and scaled, weight their outputs. Pairs (token, expert) are sorted by expert, so that
every expert that was hit multiplies its tokens once and no other is touched.

Shape suffixes: N tokens, D hidden size, K experts a token, P = N * K pairs, I inner size.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.deepseek_v4.arithmetic import Arithmetic, Matrix
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.kernels import Experts
from dspark.models.int8 import PackedLinear


class MoE:
    """The experts of one layer."""

    def __init__(self, config: V4Config, maths: Arithmetic, prefix: str, *, hashed: bool) -> None:
        self.top_k, self.scale = config.experts_per_token, config.routed_scale
        self.limit, self.device = config.swiglu_limit, maths.device
        self._maths = maths
        c = config
        self.gate = maths.vector(prefix + "gate.weight", c.num_experts, c.hidden_size)
        self.table: Tensor | None = None
        self.bias: Tensor | None = None
        if hashed:
            name = prefix + "gate.tid2eid"
            table = maths.checked(name, c.vocab_size, c.experts_per_token)
            self.table = table.to(maths.device, torch.int64)
            if int(self.table.min()) < 0 or int(self.table.max()) >= c.num_experts:
                raise CheckpointError(f"{name} names experts outside 0..{c.num_experts - 1}")
        else:
            self.bias = maths.vector(prefix + "gate.bias", c.num_experts)

        def expert(p: str) -> tuple[Matrix | PackedLinear, Matrix | PackedLinear]:
            wide = maths.linear(
                p + "w1.weight", p + "w3.weight", shape=(2 * c.expert_size, c.hidden_size)
            )
            return wide, maths.linear(p + "w2.weight", shape=(c.hidden_size, c.expert_size))

        self.shared_in, self.shared_out = expert(prefix + "shared_experts.")
        routed = [expert(f"{prefix}experts.{e}.") for e in range(c.num_experts)]
        self.inner, self.outer = [i for i, _ in routed], [o for _, o in routed]
        self._struct = self._lay_out(config) if maths.dtype == torch.float32 else None

    def _lay_out(self, config: V4Config) -> Experts | None:
        """All of this for the kernels, which compute a layer's experts in one call."""
        kernels = self._maths.kernels
        if kernels is None:
            return None
        pointers = ctypes.c_void_p * (config.num_experts + 1)

        def table(maps: list[Matrix | PackedLinear]) -> ctypes.Array[ctypes.c_void_p]:
            return pointers(*(ctypes.addressof(m.struct) for m in maps))

        self._tables = table([*self.inner, self.shared_in]), table([*self.outer, self.shared_out])
        return Experts(
            self.gate.data_ptr(), None if self.bias is None else self.bias.data_ptr(),
            *(ctypes.addressof(t) for t in self._tables),
            kernels.products[self.shared_in.struct.bits], config.num_experts,
            config.hidden_size, config.expert_size, self.top_k, self.scale, self.limit,
        )  # fmt: skip

    def route(self, x_ND: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts a token visits [N, K], and with what weight [N, K]."""
        kernels = self._maths.native(len(x_ND))
        if kernels is not None:
            ids = None if self.table is None else self.table.index_select(0, tokens_N)
            return kernels.route(x_ND, self.gate, self.bias, ids, self.top_k, self.scale)
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
        kernels = self._maths.products(len(x_ND))
        if kernels is not None and self._struct is not None:
            chosen = None if self.table is None else self.table.index_select(0, tokens_N)
            return kernels.experts(self._struct, x_ND, chosen)
        ids_NK, w_NK = self.route(x_ND, tokens_N)
        pairs: dict[int, list[int]] = {}
        for pair, expert in enumerate(ids_NK.flatten().tolist()):
            pairs.setdefault(expert, []).append(pair)
        hit = sorted(pairs)
        ends = list(accumulate(len(pairs[e]) for e in hit))
        spans = list(zip(hit, [0, *ends], ends, strict=False))
        order_P = torch.tensor([p for e in hit for p in pairs[e]], device=self.device)
        rows_P = order_P // self.top_k
        x_PD = x_ND.index_select(0, rows_P)
        wide = torch.cat([self.inner[e](x_PD[a:b]) for e, a, b in spans])
        h_PI = self.gated(wide, w_NK.view(-1).index_select(0, order_P))
        routed = torch.cat([self.outer[e](h_PI[a:b]) for e, a, b in spans]).float()
        out_ND = self.shared_out(self.gated(self.shared_in(x_ND), None)).float()
        return out_ND.index_add_(0, rows_P, routed)

    def gated(self, wide: Tensor, weights: Tensor | None) -> Tensor:
        """The SwiGLU of V4, whose inputs are clipped, weighted: [.., 2 * I] -> [.., I] fp32."""
        kernels = self._maths.native(len(wide))
        if kernels is not None:
            return kernels.swiglu(wide.float(), self.limit, weights)
        gate, up = wide.float().chunk(2, -1)
        h = F.silu(gate.clamp(max=self.limit)).mul_(up.clamp(-self.limit, self.limit))
        return h if weights is None else h.mul_(weights[:, None])
