"""The hand-written gradients against numerical ones, and the values against plain forms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import gradcheck

from dspark.train.v4.operations import attend, grouped_linear, leave, sinkhorn


def random(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()


def test_sinkhorn_is_softmax_and_alternating_sums() -> None:
    logits = random(4, 4, 5)
    wanted = logits.permute(2, 0, 1).softmax(-1) + 1e-6
    wanted = wanted / (wanted.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        wanted = wanted / (wanted.sum(2, keepdim=True) + 1e-6)
        wanted = wanted / (wanted.sum(1, keepdim=True) + 1e-6)
    found = sinkhorn(logits, 20, 1e-6)
    assert torch.allclose(found.permute(2, 0, 1), wanted, atol=1e-12)
    assert gradcheck(lambda x: sinkhorn(x, 20, 1e-6), (random(4, 4, 3),))
    assert gradcheck(lambda x: sinkhorn(x, 1, 1e-6), (random(3, 3, 2),))


def test_attention_has_a_sink_and_one_tensor_for_keys_and_values() -> None:
    q, keys, sink = random(2, 6, 4), random(2, 5, 4, seed=1), random(2, seed=2)
    mask = torch.zeros(2, 3, 5, dtype=torch.float64)
    mask[0, 0] = -torch.inf  # sees nothing but the sink
    mask[1, 2, 3:] = -torch.inf
    out, p = attend(q, keys, mask, sink)
    scores = (q @ keys.transpose(1, 2)).view(2, 3, 2, 5) + mask[:, :, None]
    whole = torch.cat([scores, sink.view(1, 1, 2, 1).expand(2, 3, 2, 1)], -1).softmax(-1)
    wanted = whole[..., :5].reshape(2, 6, 5)
    assert torch.allclose(p, wanted) and torch.allclose(out, wanted @ keys)
    assert not out[0, :2].any()
    assert gradcheck(lambda q, k, s: attend(q, k, mask, s)[0], (q, keys, sink))


def test_every_expert_multiplies_its_own_rows_and_may_have_none() -> None:
    x, w = random(5, 3), random(3, 2, 3, seed=1)
    found = grouped_linear(x, w, [2, 0, 3])
    wanted = torch.cat([x[:2] @ w[0].T, x[2:] @ w[2].T])
    assert torch.allclose(found, wanted)
    assert gradcheck(lambda x, w: grouped_linear(x, w, [2, 0, 3]), (x, w))


def test_streams_are_written_and_stirred() -> None:
    x, y, post, comb = random(3, 4, 5), random(3, 5, seed=1), random(3, 4), random(3, 4, 4, seed=2)
    found = leave(x, y, post, comb)
    wanted = torch.einsum("nk,nd->nkd", post, y) + torch.einsum("njk,njd->nkd", comb, x)
    assert torch.allclose(found, wanted)
    assert gradcheck(leave, (x, y, post, comb))
