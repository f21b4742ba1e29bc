"""The mixture of experts with gradients: every expert multiplies its own rows once.

Experts are balanced without a loss, as in V3 and V4: a bias that only the choice sees is moved
after every step, against the load (`MoE.balance`).

Parameters have the official names, but for the routed experts of a layer, which lie in two tensors:
`experts.w13` [X, 2, I, D], w1 and w3, and `experts.w2` [X, D, I] (`checkpoint.py` splits them).

Shape suffixes: N rows, D hidden size, X experts, K experts a token, P = N * K pairs, I inner size.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models.deepseek_v4.config import V4Config
from dspark.train.distributed import Group
from dspark.train.v4.operations import grouped_linear


class Expert(nn.Module):
    """The shared expert's matrices under their official names."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.expert_size, bias=False)
        self.w2 = nn.Linear(config.expert_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.expert_size, bias=False)


class Routed(nn.Module):
    """All routed experts: w1 and w3, and w2."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        x, i, d = config.num_experts, config.expert_size, config.hidden_size
        self.w13 = nn.Parameter(torch.empty(x, 2, i, d))
        self.w2 = nn.Parameter(torch.empty(x, d, i))


class Gate(nn.Module):
    """Scores of experts; `tid2eid` names the experts of a token id, `bias` helps to choose."""

    bias: Tensor
    tid2eid: Tensor

    def __init__(self, config: V4Config, *, hashed: bool) -> None:
        super().__init__()
        c, k = config, config.experts_per_token
        self.hashed = hashed
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        if hashed:
            # Token id after token id to the next expert: frequent ids, which are neighbours in a
            # trained vocabulary, spread evenly.
            ids, place = torch.arange(c.vocab_size)[:, None], torch.arange(k)
            step = 1 + ids // c.num_experts % max(1, (c.num_experts - 1) // max(1, k - 1))
            self.register_buffer("tid2eid", (ids + place * step) % c.num_experts)
        else:
            self.register_buffer("bias", torch.zeros(c.num_experts))


class MoE(nn.Module):
    """Each token through a few of many small MLPs, and through one shared one."""

    def __init__(self, config: V4Config, *, hashed: bool) -> None:
        super().__init__()
        c = config
        self.top_k, self.scale, self.limit = c.experts_per_token, c.routed_scale, c.swiglu_limit
        self.gate = Gate(c, hashed=hashed)
        self.shared_experts, self.experts = Expert(c), Routed(c)
        self.load_X: Tensor | None = None
        """Visits since the last `balance`."""

    def forward(self, x_ND: Tensor, tokens_N: Tensor, real_N: Tensor | None = None) -> Tensor:
        """`real` [N]: which rows count for the load; None: all."""
        gate = self.gate
        scores = F.softplus(F.linear(x_ND, gate.weight)).sqrt()
        if gate.hashed:
            ids_NK = gate.tid2eid[tokens_N]
        else:
            ids_NK = (scores.detach() + gate.bias).topk(self.top_k, -1).indices
            if torch.is_grad_enabled():
                seen = ids_NK if real_N is None else ids_NK[real_N]
                load = seen.flatten().bincount(minlength=scores.shape[1])
                self.load_X = load if self.load_X is None else self.load_X + load
        w_NK = scores.gather(1, ids_NK)
        w_NK = w_NK * (self.scale / (w_NK.sum(-1, keepdim=True) + 1e-20))
        ids_P = ids_NK.flatten()
        counts = ids_P.bincount(minlength=scores.shape[1]).tolist()
        order_P = ids_P.argsort()
        rows_P = order_P // self.top_k
        wide = grouped_linear(x_ND.index_select(0, rows_P), self.experts.w13.flatten(1, 2), counts)
        h = self._gated(wide) * w_NK.view(-1).index_select(0, order_P)[:, None]
        routed = grouped_linear(h, self.experts.w2, counts)
        s = self.shared_experts
        out_ND = s.w2(self._gated(F.linear(x_ND, torch.cat([s.w1.weight, s.w3.weight]))))
        return cast(Tensor, out_ND.index_add(0, rows_P, routed))

    def _gated(self, wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, -1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    @torch.no_grad()
    def balance(self, speed: float, group: Group) -> None:
        """Move the bias of every scored expert by `speed` against its load, and begin anew."""
        if self.load_X is not None:
            load = group.sum(self.load_X).float()
            self.gate.bias.add_((load.mean() - load).sign(), alpha=speed)
            self.load_X = None
