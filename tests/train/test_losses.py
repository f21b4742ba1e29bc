"""Losses: the written-out gradient against autograd, chunks against the whole, the estimate against
a simulation, and what memory holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.train.losses import TERMS, Blocks, LossWeights, Terms, block_losses

K, D, R, V, VOCAB = 5, 8, 3, 37, 60


@dataclass
class Case:
    blocks: Blocks
    probabilities: Tensor
    inputs: dict[str, Tensor]


def case(count: int = 13, chunk: int = 4, seed: int = 0) -> Case:
    """Random blocks over a vocabulary of which the drafter knows the first V tokens."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    p_NV = torch.softmax(2 * randn(count + K, VOCAB), -1)[:, :V].contiguous()
    teachers = torch.arange(count)[:, None] + torch.arange(K)
    labels = torch.randint(-1, V, (count, K), generator=g)
    valid = torch.arange(K) < torch.randint(1, K + 1, (count, 1), generator=g)
    valid[3] = False
    labels = torch.where(valid, labels, -1)

    def teach(rows: slice) -> tuple[Tensor, Tensor]:
        unique, index = torch.unique(teachers[rows], return_inverse=True)
        return p_NV[unique], index

    weights = LossWeights(0.3, 0.2, 0.9, 0.7, 3.0)
    factors = torch.tensor([weights.ce, weights.kl, weights.tv, weights.conf]) / 7
    blocks = Blocks(randn(V, D), teach, labels, valid, weights.slots(K), factors, chunk)
    inputs = {
        "h": randn(count, K, D), "z": randn(count, K, R), "w2": randn(V, R),
        "confidence": randn(count, K),
    }  # fmt: skip
    return Case(blocks, p_NV[teachers], {n: x.requires_grad_() for n, x in inputs.items()})


def naive(c: Case) -> Tensor:
    """The loss as the paper writes it, whole and by autograd."""
    b, x = c.blocks, c.inputs
    logits = x["h"] @ b.head.T + x["z"] @ x["w2"].T
    log_q = F.log_softmax(logits, -1)
    label = log_q.gather(-1, b.labels.clamp(min=0)[..., None])[..., 0]
    outside = 1 - c.probabilities.sum(-1)
    l1 = (c.probabilities - log_q.exp()).abs().sum(-1) + outside
    accept = (1 - l1 / 2).detach()
    bce = F.binary_cross_entropy_with_logits(x["confidence"], accept, reduction="none")
    w = b.slots * b.valid
    terms = (-(w * (b.labels >= 0) * label).sum(), -(w * (c.probabilities * log_q).sum(-1)).sum(),
             (w * l1).sum(), (w * bce).sum())  # fmt: skip
    return (torch.stack(terms) * b.factors).sum()


def gradients(c: Case, loss: Tensor) -> dict[str, Tensor]:
    names = list(c.inputs)
    found = torch.autograd.grad(loss, [c.inputs[n] for n in names])
    return dict(zip(names, found, strict=True))


def test_the_gradient_is_autograds() -> None:
    c = case()
    loss, _ = block_losses(c.blocks, *c.inputs.values())
    wanted = naive(c)
    torch.testing.assert_close(loss, wanted)
    mine, theirs = gradients(c, loss), gradients(c, wanted)
    for name in c.inputs:
        assert float(theirs[name].abs().max()) > 1e-3
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("term", range(4), ids=TERMS)
def test_every_term_alone(term: int) -> None:
    c = case()
    factors = torch.zeros(4)
    factors[term] = 1.0
    c.blocks = replace(c.blocks, factors=factors)
    mine = gradients(c, 2 * block_losses(c.blocks, *c.inputs.values())[0])
    logits_only = {n: x for n, x in c.inputs.items() if (n == "confidence") == (term == 3)}
    theirs = torch.autograd.grad(2 * naive(c), list(logits_only.values()))
    for name, wanted in zip(logits_only, theirs, strict=True):
        torch.testing.assert_close(mine[name], wanted, atol=1e-6, rtol=1e-4)
    for name in set(c.inputs) - set(logits_only):
        assert not mine[name].any()


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunks_change_nothing(chunk: int) -> None:
    whole = case(chunk=13)
    parts = case(chunk=chunk)
    loss, flat = block_losses(whole.blocks, *whole.inputs.values())
    loss_parts, flat_parts = block_losses(parts.blocks, *parts.inputs.values())
    torch.testing.assert_close(loss_parts, loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(flat_parts, flat, atol=1e-5, rtol=1e-5)
    a, b = gradients(whole, loss), gradients(parts, loss_parts)
    for name in a:
        torch.testing.assert_close(b[name], a[name], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        validation, same = block_losses(parts.blocks, *parts.inputs.values())
    torch.testing.assert_close(validation, loss.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(same, flat_parts)


class Largest(TorchDispatchMode):
    """The largest result of any operation, in numbers."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage():
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("count", [16, 64, 200])
def test_memory_holds_the_logits_of_one_chunk(count: int) -> None:
    """Four times the blocks: nothing larger than a chunk's logits, or a row of hidden size each."""
    c = case(count, chunk=16)
    with Largest() as largest:
        loss, _ = block_losses(c.blocks, *c.inputs.values())
        loss.backward()  # type: ignore[no-untyped-call]
    assert 16 * K * V <= largest.numel <= max(16 * K * V, count * K * D)


def test_the_estimate_is_what_rejection_sampling_accepts() -> None:
    """`survive` and `accept` against a simulation over text drawn from p."""
    g = torch.Generator().manual_seed(5)
    n, k, v = 4000, 3, 6
    p = torch.softmax(torch.randn(k, v, generator=g), -1)
    q_logits = torch.randn(k, v, generator=g)
    q = torch.softmax(q_logits, -1)
    labels = torch.stack([torch.multinomial(p[i], n, True, generator=g) for i in range(k)], 1)

    def teach(rows: slice) -> tuple[Tensor, Tensor]:
        return p, torch.arange(k).expand(len(labels[rows]), k)

    blocks = Blocks(torch.eye(v), teach, labels, torch.ones(n, k, dtype=torch.bool),
                    torch.ones(k), torch.ones(4), 512)  # fmt: skip
    with torch.no_grad():
        _, flat = block_losses(blocks, q_logits.expand(n, k, v))
    means = Terms.unflat(flat, k).means()
    rates = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(torch.tensor(means["accept"]), rates)
    exact = 1 + float(torch.cumprod(rates, 0).sum())
    assert means["accepted_length"] == pytest.approx(exact, abs=0.05)
    assert means["tv"] == pytest.approx(2 * float((1 - rates).mean()), rel=1e-4)
    best = (p.argmax(-1) == q.argmax(-1)).float()
    torch.testing.assert_close(torch.tensor(means["agree"]), best)


def test_blocks_that_weigh_nothing_give_zero() -> None:
    c = case()
    none = torch.zeros_like(c.blocks.valid)
    blocks = replace(c.blocks, valid=none, labels=torch.full_like(c.blocks.labels, -1))
    loss, flat = block_losses(blocks, *c.inputs.values())
    assert float(loss.detach()) == 0 and not flat.any()
    assert all(not g.any() for g in gradients(c, loss).values())


def test_extreme_logits_stay_finite() -> None:
    """A drafter that is certain and wrong: log q of -1000, no NaN."""
    c = case()
    with torch.no_grad():
        c.inputs["h"] *= 1e3
    loss, flat = block_losses(c.blocks, *c.inputs.values())
    assert torch.isfinite(loss) and torch.isfinite(flat).all()
    assert all(torch.isfinite(g).all() for g in gradients(c, loss).values())


def test_products_in_bf16_are_near() -> None:
    c = case()
    loss, _ = block_losses(c.blocks, *c.inputs.values())
    low, _ = block_losses(replace(c.blocks, dtype=torch.bfloat16), *c.inputs.values())
    torch.testing.assert_close(low, loss, atol=0, rtol=0.02)
    a, b = gradients(c, loss), gradients(c, low)
    for name in a:
        assert b[name].dtype == torch.float32
        assert float((a[name] - b[name]).norm() / a[name].norm()) < 0.03
