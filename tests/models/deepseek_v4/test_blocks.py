"""A drafter's block: bidirectional inside, a window of context in front, nothing kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.models.deepseek_v4.attention import Attention
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4.passes import Pass
from dspark.models.target import Segment, pack
from tests.models.deepseek_v4.tiny import SWA, oracle, target

WINDOW = 8


def naive(a: Attention, model: DeepseekV4, x: Tensor, context: int) -> Tensor:
    """What the last rows of x [N, D] read as one block behind `context` tokens, written plainly."""
    c, turns = model.config, model.rotations.at(0, torch.arange(len(x)))
    rank, kv = torch.split(a.w_in(x), [c.q_rank, c.head_dim], -1)
    norm = model.maths.norm_rotate
    kv = norm(kv, a.kv_norm, turns)
    q = norm(a.wq_b(norm(rank, a.q_norm, None)), a.scale_E, turns, c.num_heads)
    q = q.view(len(x), c.num_heads, c.head_dim)[context:]
    keys = kv[max(0, context - WINDOW) :]
    scores = torch.einsum("nhe,ke->nhk", q, keys)
    scores = torch.cat([scores, a.sink_H[None, :, None].expand(len(q), -1, -1)], -1)
    out = torch.einsum("nhk,ke->nhe", scores.softmax(-1)[..., :-1], keys)
    tail = torch.view_as_complex(out[..., -c.rope_dim :].unflatten(-1, (-1, 2)).contiguous())
    back = torch.view_as_real(tail * turns[context:, None].conj()).flatten(-2)
    out = torch.cat([out[..., : -c.rope_dim], back], -1)
    return a.wo_b(a.wo_a(out.flatten(1)))


@pytest.mark.parametrize("path", ["kernels", "torch"])
@torch.inference_mode()
def test_a_block_sees_all_of_itself_and_a_window(path: str) -> None:
    model = target(oracle((SWA,)), max_block=8, path=path)
    attention = model.layers[0].attention
    contexts, sizes = (0, 3, 30, 8), (5, 2, 5, 4)
    inputs = [torch.randn(c + n, 64) for c, n in zip(contexts, sizes, strict=True)]
    for slot, (context, x) in enumerate(zip(contexts, inputs, strict=True)):
        for at in range(0, context, 8):
            part = x[at : min(at + 8, context)]
            batch = pack([Segment(slot, at, (0,) * len(part), 0)])
            attention(part, Pass(model.config, model.layout, model.rotations, batch))
    batch = pack(
        [Segment(s, c, (0,) * n, 0) for s, (c, n) in enumerate(zip(contexts, sizes, strict=True))]
    )
    p = Pass(model.config, model.layout, model.rotations, batch, blocks=True)
    got = attention(torch.cat([x[c:] for x, c in zip(inputs, contexts, strict=True)]), p)
    wanted = [naive(attention, model, x, c) for x, c in zip(inputs, contexts, strict=True)]
    torch.testing.assert_close(got, torch.cat(wanted), atol=1e-5, rtol=1e-4)
