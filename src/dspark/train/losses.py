"""What a drafter learns from (paper, 3.3), without ever holding all logits.

For slot k of a block, q the drafter's and p the target's distribution, w_k = exp(-(k-1)/decay):

    ce    - w_k log q(x*)            x* the token the target really wrote
    kl    - w_k sum_v p(v) log q(v)  the same with the target's whole distribution for a label
    tv      w_k || p - q ||_1        twice the probability that the draft is rejected
    conf    w_k BCE(c, 1 - || p - q ||_1 / 2)        the confidence head's, (eq. 8)

Each is divided by the sum of weights, so that batches of any size compare. p over a restricted
draft vocabulary is exact, because the denominator log Z over the whole vocabulary is stored: what p
has outside counts as mass that q can never cover. The confidence loss teaches the confidence head
alone: the hidden states and the Markov embedding reach it detached, so that it cannot change the
drafter.

Logits exist for a chunk of blocks at a time: `chunked` computes the gradient of a chunk at once and
keeps that instead, so memory grows neither with tokens nor with tokens x vocabulary. It is one
autograd node, so wrappers that count gradients (data parallel, sharding) see one backward pass.

Shape suffixes: C blocks of a chunk, K slots, D hidden size, V tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TERMS = ("ce", "kl", "tv", "conf")


@dataclass(frozen=True)
class LossWeights:
    """Factors of the terms, and the decay of a slot's weight along the block."""

    ce: float = 0.1
    kl: float = 0.0
    tv: float = 0.9
    conf: float = 1.0
    decay: float = 4.0

    def slots(self, num_slots: int) -> Tensor:
        """[K] w_k."""
        return torch.exp(-torch.arange(num_slots) / self.decay)


@dataclass
class Terms:
    """Weighted sums over slots (divide by `weight`) and counts by position.

    loss_terms  [4] of TERMS;  weight  [] the sum of w_k over valid slots
    valid       [K] valid slots
    accept      [K] sum of 1 - TV(p, q) over valid slots
    agree       [K] slots where q and p have the same most probable token
    survive     [K] sum over blocks of prod_{j<k} min(1, q/p)(x_j) * (1 - TV_k): the probability
                that drafts 1..k are all accepted, if the text was sampled from p at temperature 1
    conf_error  [K] sum of |c - (1 - TV)|
    """

    loss_terms: Tensor
    weight: Tensor
    valid: Tensor
    accept: Tensor
    agree: Tensor
    survive: Tensor
    conf_error: Tensor

    def flat(self) -> Tensor:
        """All numbers in one vector, to be summed over chunks, batches and machines."""
        return torch.cat([getattr(self, n).reshape(-1) for n in self.__dataclass_fields__])

    @staticmethod
    def unflat(flat: Tensor, num_slots: int) -> Terms:
        parts = torch.split(flat, [len(TERMS), 1, *[num_slots] * 5])
        return Terms(parts[0], parts[1][0], *parts[2:])

    def means(self) -> dict[str, Any]:
        """What to log: mean loss terms, and by position acceptance and confidence error."""
        n = self.valid.clamp(min=1)
        accept = self.accept / n
        return {
            **dict(zip(TERMS, (self.loss_terms / self.weight).tolist(), strict=True)),
            "accept": accept.tolist(),
            "agree": (self.agree / n).tolist(),
            "accepted_length": 1 + float((self.survive / n).sum()),
            "conf_error": (self.conf_error / n).tolist(),
        }


def slot_terms(
    logits_CKV: Tensor,
    p_CKV: Tensor,
    label_CK: Tensor,
    valid_CK: Tensor,
    w_K: Tensor,
    confidence_CK: Tensor | None,
) -> Terms:
    """The terms of some blocks; only `loss_terms` carries gradients.

    logits     of the drafter over the draft vocabulary;  p  the target's, exact there
    label      column of the token the target wrote, -1 if it cannot be drafted
    confidence logits of the confidence head
    """
    log_q = F.log_softmax(logits_CKV.float(), -1)
    q = log_q.exp()
    w_CK = w_K * valid_CK
    known_CK = (label_CK >= 0) & valid_CK
    column = label_CK.clamp(min=0)[..., None]
    log_q_label = log_q.gather(-1, column)[..., 0]
    outside_CK = (1 - p_CKV.sum(-1)).clamp(min=0)
    l1_CK = (p_CKV - q).abs().sum(-1) + outside_CK
    ce = -(w_CK * known_CK * log_q_label).sum()
    kl = -(w_CK * (p_CKV * log_q).sum(-1)).sum()
    tv = (w_CK * l1_CK).sum()
    with torch.no_grad():
        accept_CK = (1 - l1_CK / 2).clamp(0, 1)
        p_label = p_CKV.gather(-1, column)[..., 0]
        ratio = (log_q_label.exp() / p_label.clamp(min=1e-30)).clamp(max=1) * known_CK
        before = torch.cumprod(torch.cat([torch.ones_like(ratio[:, :1]), ratio[:, :-1]], 1), 1)
        agree_CK = (logits_CKV.argmax(-1) == p_CKV.argmax(-1)).float()
    conf = torch.zeros((), device=logits_CKV.device)
    error_CK = torch.zeros_like(accept_CK)
    if confidence_CK is not None:
        c = confidence_CK.float()
        conf = (w_CK * F.binary_cross_entropy_with_logits(c, accept_CK, reduction="none")).sum()
        error_CK = (torch.sigmoid(c.detach()) - accept_CK).abs()

    def by_position(x_CK: Tensor) -> Tensor:
        return (x_CK * valid_CK).sum(0).detach()

    return Terms(
        torch.stack([ce, kl, tv, conf]),
        w_CK.sum(),
        valid_CK.sum(0).float(),
        by_position(accept_CK),
        by_position(agree_CK),
        by_position(before * accept_CK),
        by_position(error_CK),
    )


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        terms_of: Callable[[Tensor, slice], Terms],
        factors: Tensor,
        chunk: int,
        h: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        needs = [p for p in parameters if p.requires_grad]
        grad_h, total = torch.zeros_like(h), None
        sums = [torch.zeros_like(p) for p in needs]
        loss = torch.zeros((), device=h.device)
        for first in range(0, len(h), chunk):
            rows = slice(first, first + chunk)
            with torch.enable_grad():
                part = h[rows].detach().requires_grad_()
                terms = terms_of(part, rows)
                value = (terms.loss_terms * factors).sum()
            grads = torch.autograd.grad(value, [part, *needs], allow_unused=True)
            if grads[0] is not None:
                grad_h[rows] = grads[0]
            for s, g in zip(sums, grads[1:], strict=True):
                if g is not None:
                    s += g
            loss += value.detach()
            flat = terms.flat().detach()
            total = flat if total is None else total + flat
        ctx.save_for_backward(grad_h, *sums)
        ctx.which = [p.requires_grad for p in parameters]
        assert total is not None
        ctx.mark_non_differentiable(total)
        return loss, total

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        grad_h, *sums = ctx.saved_tensors
        found = iter(sums)
        return (
            None, None, None, grad_loss * grad_h,
            *(grad_loss * next(found) if wanted else None for wanted in ctx.which),
        )  # fmt: skip


def chunked(
    terms_of: Callable[[Tensor, slice], Terms],
    h_BKD: Tensor,
    parameters: Sequence[Tensor],
    factors: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """sum(factors * loss_terms) over all blocks, and the flat `Terms`, `chunk` blocks at a time.

    terms_of    (hidden states of some blocks, which blocks) -> their terms
    parameters  everything else that `terms_of` differentiates through
    factors     [4] of TERMS
    """
    if torch.is_grad_enabled():
        loss, flat = _Chunked.apply(terms_of, factors, chunk, h_BKD, *parameters)  # type: ignore[no-untyped-call]
        return loss, flat
    parts = []
    for first in range(0, len(h_BKD), chunk):
        rows = slice(first, first + chunk)
        parts.append(terms_of(h_BKD[rows], rows).flat())
    flat = torch.stack(parts).sum(0)
    return (flat[: len(TERMS)] * factors).sum(), flat
