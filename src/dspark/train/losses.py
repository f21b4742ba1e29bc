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

Logits exist for a chunk of blocks at a time and are turned into gradients at once, so memory grows
neither with tokens nor with tokens x vocabulary. The gradient is written out instead of recorded,
because passes over V numbers cost as much as the products around them. With a = [q > p],
Q = sum_v a q and P = sum_v p <= 1:

    || p - q ||_1 = 2 (sum_v max(p, q) - P),     what p has outside of the draft vocabulary included
    d ce / d logit = q - [v = x*]      d kl / d logit = P q - p      d tv / d logit = 2 q (a - Q)

All of it is one autograd node, so wrappers that count gradients (sharding) see one backward pass.

Shape suffixes: B blocks, K slots, D hidden size, r rank of the Markov head, V tokens that can be
drafted, M = rows of a chunk (slots of its blocks).
"""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True)
class Blocks:
    """What the losses of B blocks are made of, besides what is differentiated.

    head      [V, D] the target's output matrix
    teach     which blocks -> (p [U, V] the target's distributions, exact, and for each slot of the
              blocks which of them [C, K]); neighbouring blocks share teachers, so U is small
    labels    [B, K] column of the token that the target wrote, -1 if it cannot be drafted
    valid     [B, K]
    slots     [K] w_k
    factors   [4] of TERMS
    chunk     blocks at a time
    dtype     of the products: fp32 or bf16
    """

    head: Tensor
    teach: Callable[[slice], tuple[Tensor, Tensor]]
    labels: Tensor
    valid: Tensor
    slots: Tensor
    factors: Tensor
    chunk: int
    dtype: torch.dtype = torch.float32


@dataclass
class _Gradients:
    """Of the loss, filled chunk by chunk."""

    h: Tensor
    z: Tensor | None
    w2: Tensor | None
    confidence: Tensor | None


def block_losses(
    blocks: Blocks,
    h_BKD: Tensor,
    z_BKr: Tensor | None = None,
    w2_Vr: Tensor | None = None,
    confidence_BK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """sum(factors * loss terms), differentiable, and the flat `Terms`.

    The drafter's logits are h head^T + z w2^T; `confidence` holds the confidence head's logits.
    """
    if not torch.is_grad_enabled():
        flat = _losses(blocks, h_BKD, z_BKr, w2_Vr, confidence_BK, None)
        return (flat[: len(TERMS)] * blocks.factors).sum(), flat
    loss, flat = _BlockLosses.apply(blocks, h_BKD, z_BKr, w2_Vr, confidence_BK)  # type: ignore[no-untyped-call]
    return loss, flat


class _BlockLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Blocks,
        h: Tensor,
        z: Tensor | None,
        w2: Tensor | None,
        confidence: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        grads = [None if x is None else torch.zeros_like(x) for x in (h, z, w2, confidence)]
        assert grads[0] is not None
        flat = _losses(blocks, h, z, w2, confidence, _Gradients(grads[0], *grads[1:]))
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(flat)
        return (flat[: len(TERMS)] * blocks.factors).sum(), flat

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        # The usual factor is 1, so this multiplies what is small: nothing has V rows but w2.
        return (None, *(None if g is None else g * grad_loss for g in ctx.saved_tensors))


def _losses(
    blocks: Blocks,
    h_BKD: Tensor,
    z_BKr: Tensor | None,
    w2_Vr: Tensor | None,
    confidence_BK: Tensor | None,
    grads: _Gradients | None,
) -> Tensor:
    total: Tensor | None = None
    with torch.no_grad(), torch.autocast(h_BKD.device.type, enabled=False):
        head = blocks.head.to(blocks.dtype)
        w2 = None if w2_Vr is None else w2_Vr.to(blocks.dtype)
        for first in range(0, len(h_BKD), blocks.chunk):
            rows = slice(first, first + blocks.chunk)
            h = h_BKD[rows].flatten(0, 1).to(blocks.dtype)
            z = None if z_BKr is None else z_BKr[rows].flatten(0, 1).to(blocks.dtype)
            logits = h @ head.T
            if z is not None and w2 is not None:
                logits.addmm_(z, w2.T)
            c = None if confidence_BK is None else confidence_BK[rows].float()
            terms, d_logits, d_c = slot_terms(blocks, rows, logits.float(), c, grads is not None)
            if grads is not None and d_logits is not None:
                d_logits = d_logits.to(blocks.dtype)
                grads.h[rows] = (d_logits @ head).view_as(grads.h[rows])
                if z is not None and w2 is not None and grads.z is not None:
                    grads.z[rows] = (d_logits @ w2).view_as(grads.z[rows])
                    assert grads.w2 is not None
                    if blocks.dtype == grads.w2.dtype:
                        grads.w2.addmm_(d_logits.T, z)
                    else:
                        grads.w2 += d_logits.T @ z
                if grads.confidence is not None and d_c is not None:
                    grads.confidence[rows] = d_c
            flat = terms.flat()
            total = flat if total is None else total + flat
    assert total is not None
    return total


def slot_terms(
    blocks: Blocks, rows: slice, logits_MV: Tensor, c_CK: Tensor | None, with_gradient: bool
) -> tuple[Terms, Tensor | None, Tensor | None]:
    """The terms of some blocks, and the gradients of their loss: [M, V] of the logits, [C, K] of
    the confidence logits. Overwrites the logits."""
    valid_CK, label_CK = blocks.valid[rows], blocks.labels[rows]
    p_UV, index_CK = blocks.teach(rows)
    shape = valid_CK.shape
    index_M = index_CK.flatten()
    p_MV = p_UV[index_M]
    w_CK = blocks.slots * valid_CK
    known_CK = (label_CK >= 0) & valid_CK
    column_M1 = label_CK.clamp(min=0).view(-1, 1)

    best_M = logits_MV.argmax(-1)
    agree_CK = (best_M == p_UV.argmax(-1)[index_M]).view(shape).float()
    cross_M = torch.linalg.vecdot(p_MV, logits_MV)
    top_M1 = logits_MV.gather(-1, best_M[:, None])
    shifted = logits_MV.sub_(top_M1)
    label_logit_M = shifted.gather(-1, column_M1)[:, 0]
    q_MV = shifted.exp_()
    sum_M = q_MV.sum(-1)
    q_MV.div_(sum_M[:, None])
    log_q_label_CK = (label_logit_M - sum_M.log()).view(shape)
    P_M = p_UV.sum(-1)[index_M]
    union_M = torch.maximum(p_MV, q_MV).sum(-1)
    l1_CK = (2 * (union_M - P_M)).clamp(0, 2).view(shape)
    cross_CK = (cross_M - P_M * (top_M1[:, 0] + sum_M.log())).view(shape)

    accept_CK = 1 - l1_CK / 2
    p_label_CK = p_MV.gather(-1, column_M1).view(shape)
    ratio = (log_q_label_CK.exp() / p_label_CK.clamp(min=1e-30)).clamp(max=1) * known_CK
    before = torch.cumprod(torch.cat([torch.ones_like(ratio[:, :1]), ratio[:, :-1]], 1), 1)

    ce = -(w_CK * known_CK * log_q_label_CK).sum()
    kl = -(w_CK * cross_CK).sum()
    tv = (w_CK * l1_CK).sum()
    conf = torch.zeros_like(tv)
    error_CK = torch.zeros_like(accept_CK)
    d_c = None
    f_ce, f_kl, f_tv, f_conf = blocks.factors
    if c_CK is not None:
        bce = F.binary_cross_entropy_with_logits(c_CK, accept_CK, reduction="none")
        conf = (w_CK * bce).sum()
        difference = torch.sigmoid(c_CK) - accept_CK
        error_CK = difference.abs()
        d_c = f_conf * w_CK * difference

    def by_position(x_CK: Tensor) -> Tensor:
        return (x_CK * valid_CK).sum(0)

    terms = Terms(
        torch.stack([ce, kl, tv, conf]),
        w_CK.sum(),
        valid_CK.sum(0).float(),
        by_position(accept_CK),
        by_position(agree_CK),
        by_position(before * accept_CK),
        by_position(error_CK),
    )
    if not with_gradient:
        return terms, None, None
    w_M, known_M = w_CK.flatten(), known_CK.flatten()
    d_MV = torch.where(q_MV > p_MV, q_MV, 0.0)
    Q_M = d_MV.sum(-1)
    d_MV.mul_((2 * f_tv * w_M)[:, None])
    d_MV.addcmul_(q_MV, (w_M * (f_ce * known_M + f_kl * P_M - 2 * f_tv * Q_M))[:, None])
    d_MV.addcmul_(p_MV, (-f_kl * w_M)[:, None])
    d_MV.scatter_add_(-1, column_M1, (-f_ce * w_M * known_M)[:, None])
    return terms, d_MV, d_c
