"""Operations of V4 whose recorded form would cost more than the work: four small autograd nodes.

* `sinkhorn`: twenty rounds on sixteen numbers a token. Recorded, that is some three hundred nodes
  for each of two mixings a layer. Here tokens lie last, so every sum runs over whole vectors, and
  only the iterates are kept: a denominator is the ratio of two of them.
* `attend`: softmax over keys that are values, too, and a sink that takes weight and gives nothing.
* `grouped_linear`: every expert multiplies its own rows, one product each.
* `leave`: the streams behind a sublayer.

Each is checked against its plain form by numerical differentiation.

Shape suffixes: N tokens, S streams, D hidden size, G independent groups of queries, Q queries of a
group (all heads of all its tokens), K keys, E head dimension, P pairs (token, expert), X experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start_SSN: Tensor, rounds: int, eps: float) -> Tensor:
        iterates = [start_SSN]
        for i in range(2 * rounds - 1):
            x = iterates[-1]
            iterates.append(x / (x.sum(i % 2, keepdim=True) + eps))
        ctx.save_for_backward(*iterates)
        return iterates[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        iterates, grad = ctx.saved_tensors, grad.contiguous()
        for i in reversed(range(len(iterates) - 1)):
            # y = x / s with s = sum x + eps: dx = (dy - sum(dy y)) / s, and 1 / s = y / x.
            x, y = iterates[i], iterates[i + 1]
            grad = (grad - (grad * y).sum(i % 2, keepdim=True)).mul_(y).div_(x)
        return grad, None, None


def sinkhorn(logits_SSN: Tensor, rounds: int, eps: float) -> Tensor:
    """[S, S, N] (source, destination, token) -> nearly doubly stochastic matrices.

    A softmax over destinations, then sums over sources and over destinations divided by in turn,
    sources first and last: `rounds` times and `rounds` - 1 times.
    """
    start = logits_SSN.softmax(1) + eps
    return _Sinkhorn.apply(start, rounds, eps)  # type: ignore[no-untyped-call, no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_GQE: Tensor, keys_GKE: Tensor, mask: Tensor, sink_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        g, q, k = len(q_GQE), q_GQE.shape[1], keys_GKE.shape[1]
        heads = len(sink_H)
        scores = q_GQE.new_empty(g, q, k + 1)
        torch.bmm(q_GQE, keys_GKE.transpose(1, 2), out=scores[:, :, :k])
        split = scores.view(g, q // heads, heads, k + 1)
        split[..., :k].add_(mask[:, :, None])
        split[..., k] = sink_H
        p = scores.softmax(-1)
        ctx.save_for_backward(q_GQE, keys_GKE, p)
        ctx.heads = heads
        shown = p[:, :, :k]
        ctx.mark_non_differentiable(shown)
        return torch.bmm(shown, keys_GKE), shown

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        q, keys, p = ctx.saved_tensors
        grad = grad.contiguous()
        k = keys.shape[1]
        d_p = torch.zeros_like(p)
        torch.bmm(grad, keys.transpose(1, 2), out=d_p[:, :, :k])
        d_s = d_p.sub_((d_p * p).sum(-1, keepdim=True)).mul_(p)
        d_sink = d_s[:, :, k].reshape(-1, ctx.heads).sum(0)
        d_s, seen = d_s[:, :, :k], p[:, :, :k]
        d_keys = torch.bmm(d_s.transpose(1, 2), q).baddbmm_(seen.transpose(1, 2), grad)
        return torch.bmm(d_s, keys), d_keys, None, d_sink


def attend(q_GQE: Tensor, keys_GKE: Tensor, mask: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """The attention of V4: out [G, Q, E], and the weights [G, Q, K] without a gradient.

    Queries are scaled already and lie token by token, heads innermost. mask [G or 1, Q / H, K]: 0
    or minus infinity, and no gradient. A row that sees no key gives zeros: the sink takes it all.
    """
    return _Attend.apply(q_GQE, keys_GKE, mask, sink_H)  # type: ignore[no-untyped-call, no-any-return]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PI: Tensor, w_XOI: Tensor, counts: list[int]) -> Tensor:
        out = x_PI.new_empty(len(x_PI), w_XOI.shape[1])
        for x, w, y in zip(torch.split(x_PI, counts), w_XOI, torch.split(out, counts), strict=True):
            torch.mm(x, w.T, out=y)
        ctx.save_for_backward(x_PI, w_XOI)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_PI, w_XOI = ctx.saved_tensors
        d_x, d_w = torch.empty_like(x_PI), torch.empty_like(w_XOI)
        parts = (torch.split(t, ctx.counts) for t in (grad.contiguous(), x_PI, d_x))
        for g, x, dx, w, dw in zip(*parts, w_XOI, d_w, strict=True):
            torch.mm(g, w, out=dx)
            torch.mm(g.T, x, out=dw)
        return d_x, d_w, None


def grouped_linear(x_PI: Tensor, w_XOI: Tensor, counts: list[int]) -> Tensor:
    """Rows sorted by expert, `counts[x]` of them for expert x, through its matrix: [P, O]."""
    return _GroupedLinear.apply(x_PI, w_XOI, counts)  # type: ignore[no-untyped-call, no-any-return]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NSD: Tensor, y_ND: Tensor, post_NS: Tensor, comb_NSS: Tensor) -> Tensor:
        ctx.save_for_backward(x_NSD, y_ND, post_NS, comb_NSS)
        written = post_NS[:, :, None] * y_ND[:, None]
        return written.baddbmm_(comb_NSS.transpose(1, 2), x_NSD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, y, post, comb = ctx.saved_tensors
        d_y = torch.bmm(post[:, None], grad)[:, 0]
        d_post = torch.bmm(grad, y[:, :, None])[:, :, 0]
        return torch.bmm(comb, grad), d_y, d_post, torch.bmm(x, grad.transpose(1, 2))


def leave(x_NSD: Tensor, y_ND: Tensor, post_NS: Tensor, comb_NSS: Tensor) -> Tensor:
    """Streams behind a sublayer whose output is y: X'_k = post_k y + sum_j comb_jk X_j."""
    return _Leave.apply(x_NSD, y_ND, post_NS, comb_NSS)  # type: ignore[no-untyped-call, no-any-return]
