"""Muon: updates of a matrix made orthogonal, which is how DeepSeek trained V4, too.

A step of AdamW moves along few directions of a matrix, those in which gradients are large. Muon
(Jordan et al. 2024) replaces the momentum of a matrix by the nearest matrix whose singular values
are all about one, found by five rounds of a Newton-Schulz polynomial, so that rare directions move
as far as frequent ones. A small model learns the same from about two thirds of the text. Updates
are scaled to the size of AdamW's (Liu et al. 2025), so one learning rate serves both.

It is for matrices between hidden states. Embedding, output matrix, mixings, gates and vectors stay
with AdamW (`takes`). Matrices of one shape, experts and layers alike, are made orthogonal together.

Shape suffixes: M matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
ROUNDS = 5
_POLYNOMIAL = 3.4445, -4.775, 2.0315
_SIZE = 0.2
"""Root mean square of AdamW's update in practice."""
_NOT = ("embed.", "head.", "hc_", "gate.", "weights_proj.", "markov_", "confidence_", ".ape")


def takes(name: str, p: Tensor) -> bool:
    return p.dim() >= 2 and not any(part in name for part in _NOT)


class Muon(torch.optim.Optimizer):
    """Its state is one momentum a matrix."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            same: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"].lerp_(p.grad, 1 - MOMENTUM)
                same.setdefault(tuple(p.shape), []).append((p, p.grad.lerp(m, MOMENTUM)))
            for shape, pairs in same.items():
                found = orthogonal(torch.stack([u for _, u in pairs]).view(-1, *shape[-2:]))
                scale = _SIZE * max(shape[-2:]) ** 0.5
                for (p, _), u in zip(pairs, found.view(-1, *shape), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(u, alpha=-group["lr"] * scale)


def orthogonal(x_MRC: Tensor) -> Tensor:
    """Every matrix with its singular values pushed to between 0.7 and 1.2."""
    tall = x_MRC.shape[1] > x_MRC.shape[2]
    x = x_MRC.transpose(1, 2) if tall else x_MRC
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _POLYNOMIAL
    for _ in range(ROUNDS):
        square = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x
