"""Orthogonal updates: what they are, and who gets them."""

from __future__ import annotations

import torch
from torch import nn

from dspark.train.v4.muon import Muon, orthogonal, takes


def test_singular_values_come_near_one_and_directions_stay() -> None:
    g = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 20), (2, 20, 8), (1, 16, 16)):
        x = torch.randn(shape, generator=g)
        found = orthogonal(x)
        values = torch.linalg.svdvals(found)
        assert found.shape == x.shape and values.min() > 0.5 and values.max() < 1.3
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        cosine = torch.nn.functional.cosine_similarity(found.flatten(1), (u @ v).flatten(1))
        assert cosine.min() > 0.97


def test_matrices_of_one_shape_are_updated_as_they_would_be_alone() -> None:
    g = torch.Generator().manual_seed(1)
    values = [torch.randn(s, generator=g) for s in ((6, 4), (6, 4), (2, 6, 4), (4, 6))]
    grads = [torch.randn(v.shape, generator=g) for v in values]

    def step(which: list[int]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(values[i].clone()) for i in which]
        for p, i in zip(parameters, which, strict=True):
            p.grad = grads[i].clone()
        Muon(parameters, 0.1, 0.5).step()
        return [p.detach() for p in parameters]

    together = step([0, 1, 2, 3])
    for i in range(4):
        assert torch.allclose(together[i], step([i])[0], atol=1e-6)
        moved = together[i] - values[i] * (1 - 0.1 * 0.5)
        assert moved.abs().max() > 0 and (moved * grads[i]).sum() < 0, "downhill"


def test_tables_mixings_and_vectors_are_left_to_adamw() -> None:
    matrix, vector = torch.zeros(4, 4), torch.zeros(4)
    assert takes("layers.0.attn.wq_a.weight", matrix)
    assert takes("layers.0.ffn.experts.w13", torch.zeros(2, 2, 4, 4))
    for name in ("embed.weight", "head.weight", "layers.0.hc_attn_fn", "layers.0.ffn.gate.weight"):
        assert not takes(name, matrix)
    assert not takes("norm.weight", vector)
