"""What the drafters of DeepSeek-V4 compute, against a second implementation written plainly, row by
row and without any cache; and the law of what they leave behind at temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_names import CarriedDrafter
from dspark.models.target import Batch, Segment, TargetOutput, pack
from tests.drafters import tiny_v4
from tests.drafters.test_deepseek_v4 import feed, proposed
from tests.drafters.tiny_v4 import BLOCK, MTP, STAGES
from tests.engine.test_laws import V, p_value, table
from tests.models.deepseek_v4.tiny import tokens

Weights = Mapping[str, Tensor]


# -- one block, plainly ----------------------------------------------------------------------------


def rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turn(x: Tensor, positions: Tensor, c: V4Config, sign: int = 1) -> Tensor:
    """Rotate neighbouring pairs of the last dimensions of [N, heads, E]: base 10000, no scaling."""
    r = c.rope_dim
    angle = positions[:, None].double() * 10_000.0 ** (-torch.arange(0, r, 2).double() / r)
    cos, sin = angle.cos().float()[:, None], sign * angle.sin().float()[:, None]
    a, b = x[..., -r::2], x[..., 1 - r :: 2]
    out = x.clone()
    out[..., -r::2], out[..., 1 - r :: 2] = a * cos - b * sin, a * sin + b * cos
    return out


def mixing(w: Weights, c: V4Config, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s, flat = c.streams, x.flatten(1)
    fn, base, scale = (w[f"{name}_{part}"] for part in ("fn", "base", "scale"))
    mix = rms(flat, c.norm_eps) @ fn.T
    pre = torch.sigmoid(mix[:, :s] * scale[0] + base[:s]) + c.hc_eps
    post = 2 * torch.sigmoid(mix[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mix[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s).softmax(-1) + c.hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + c.hc_eps)
    for _ in range(c.sinkhorn_iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + c.hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + c.hc_eps)
    return pre, post, comb


def key_rows(w: Weights, c: V4Config, p: str, x: Tensor, positions: Tensor) -> Tensor:
    """[N, E]: keys, which are the values, too."""
    kv = rms(x @ w[p + "attn.wkv.weight"].T, c.norm_eps) * w[p + "attn.kv_norm.weight"]
    return turn(kv[:, None], positions, c)[:, 0]


def attention(
    w: Weights, c: V4Config, p: str, x: Tensor, positions: Tensor, keys: Tensor, seen: Tensor
) -> Tensor:
    """`seen` [N, K]: which of the keys [K, E] each row may read."""
    n, a = len(x), p + "attn."
    rank = rms(x @ w[a + "wq_a.weight"].T, c.norm_eps) * w[a + "q_norm.weight"]
    q = rms((rank @ w[a + "wq_b.weight"].T).view(n, c.num_heads, c.head_dim), c.norm_eps)
    q = turn(q, positions, c)
    scores = torch.einsum("nhe,ke->nhk", q, keys) * c.head_dim**-0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    sink = w[a + "attn_sink"][None, :, None].expand(n, -1, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    out = turn(torch.einsum("nhk,ke->nhe", weights, keys), positions, c, -1)
    out = out.reshape(n, c.o_groups, -1)
    wo_a = w[a + "wo_a.weight"].view(c.o_groups, c.o_rank, -1)
    return torch.einsum("ngi,goi->ngo", out, wo_a).flatten(1) @ w[a + "wo_b.weight"].T


def experts(w: Weights, c: V4Config, p: str, x: Tensor) -> Tensor:
    def expert(name: str, row: Tensor, weight: float) -> Tensor:
        gate, up = (row @ w[f"{p}ffn.{name}.{part}.weight"].T for part in ("w1", "w3"))
        limit = c.swiglu_limit
        h = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return (weight * h) @ w[f"{p}ffn.{name}.w2.weight"].T

    out = []
    for row in x:
        scores = F.softplus(row @ w[p + "ffn.gate.weight"].T).sqrt()
        chosen = (scores + w[p + "ffn.gate.bias"]).topk(c.experts_per_token).indices.tolist()
        total = sum(float(scores[e]) for e in chosen)
        y = expert("shared_experts", row, 1.0)
        for e in chosen:
            y = y + expert(f"experts.{e}", row, c.routed_scale * float(scores[e]) / total)
        out.append(y)
    return torch.stack(out)


def block(
    w: Weights, c: V4Config, p: str, x: Tensor, positions: Tensor, before: Tensor, seen: Tensor
) -> Tensor:
    """Streams [N, S, D] through one block; its rows' keys stand behind those `before`."""
    pre, post, comb = mixing(w, c, p + "hc_attn", x)
    h = rms(torch.einsum("ns,nsd->nd", pre, x), c.norm_eps) * w[p + "attn_norm.weight"]
    keys = torch.cat([before, key_rows(w, c, p, h, positions)])
    y = attention(w, c, p, h, positions, keys, seen)
    x = post[..., None] * y[:, None] + torch.einsum("nsk,nsd->nkd", comb, x)
    pre, post, comb = mixing(w, c, p + "hc_ffn", x)
    h = rms(torch.einsum("ns,nsd->nd", pre, x), c.norm_eps) * w[p + "ffn_norm.weight"]
    y = experts(w, c, p, h)
    return post[..., None] * y[:, None] + torch.einsum("nsk,nsd->nkd", comb, x)


def collapse(w: Weights, c: V4Config, p: str, x: Tensor) -> Tensor:
    mix = rms(x.flatten(1), c.norm_eps) @ w[p + "hc_head_fn"].T
    gate = torch.sigmoid(mix * w[p + "hc_head_scale"] + w[p + "hc_head_base"]) + c.hc_eps
    return torch.einsum("ns,nsd->nd", gate, x)


def logits_of(w: Weights, c: V4Config, p: str, x: Tensor) -> Tensor:
    return (rms(x, c.norm_eps) * w[p + "norm.weight"]) @ w["head.weight"].T


def weights_of(model: DeepseekV4) -> Weights:
    held = model.maths.weights
    return {name: held.tensor(name) for name in held.names()}


# -- DSpark ----------------------------------------------------------------------------------------


def dspark_round(
    model: DeepseekV4, d: CarriedDrafter, ids: list[int], drafts: tuple[int, ...], size: int
) -> tuple[Tensor, Tensor | None]:
    """Laws [size, V] and confidences of a block behind `ids`, given the tokens that were drawn."""
    w, c, settings = weights_of(model), model.config, d.settings
    assert settings is not None
    n = len(ids) - 1  # committed; ids[-1] is the anchor
    features = model.forward(pack([Segment(3, 0, tuple(ids[:-1]), 1)]), settings.target_layer_ids)
    assert features.features is not None
    main = rms(features.features @ w["mtp.0.main_proj.weight"].T, c.norm_eps)
    main = main * w["mtp.0.main_norm.weight"]
    first = max(0, n - c.window)
    block_ids = torch.tensor([ids[-1], *[settings.noise_token_id] * (size - 1)])
    positions = n + torch.arange(size)
    x = w["embed.weight"][block_ids][:, None].repeat(1, c.streams, 1)
    for stage in range(STAGES):
        p = f"mtp.{stage}."
        before = key_rows(w, c, p, main[first:], torch.arange(first, n))
        seen = torch.ones(size, len(before) + size, dtype=torch.bool)
        x = block(w, c, p, x, positions, before, seen)
    h = collapse(w, c, d.last, x)
    logits = logits_of(w, c, d.last, h)
    if d.markov is not None:
        rows = w[d.markov[0]][torch.tensor([ids[-1], *drafts[: size - 1]])]
        logits = logits + rows @ w[d.markov[1]].T
        h = torch.cat([h, rows], -1)
    sure = None
    if d.confidence:
        sure = torch.sigmoid(h @ w[d.last + "confidence_head.proj.weight"][0])
    return logits.softmax(-1), sure


FORMS = {
    "official": {"markov": 0},
    "V4.1 names": {"markov": 1},
    "no confidence": {"confidence": False},
    "no Markov head": {"markov": None},
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_round_of_dspark_is_the_plain_one(form: str, kernels: bool) -> None:
    d = tiny_v4.dspark(tiny_v4.config(), **FORMS[form])  # type: ignore[arg-type]
    model = tiny_v4.target(d, kernels=kernels)
    ids = list(tokens(40))
    cases = [(3, BLOCK), (9, BLOCK), (31, BLOCK), (31, 2)] if form == "official" else [(20, BLOCK)]
    for n, size in cases:
        drafter = tiny_v4.drafter(model, d, size)
        feed(model, drafter, ids[: n - 1], 16)
        draft = proposed(drafter, ids[:n])
        assert draft.probs is not None and len(draft) == size
        law, sure = dspark_round(model, d, ids[:n], draft.tokens, size)
        torch.testing.assert_close(draft.probs, law, atol=1e-5, rtol=1e-3)
        if sure is None:
            assert draft.confidence is None
        else:
            assert draft.confidence is not None
            torch.testing.assert_close(draft.confidence, sure, atol=1e-5, rtol=1e-3)


# -- MTP-1 -----------------------------------------------------------------------------------------


def mtp_round(model: DeepseekV4, ids: list[int], drafts: tuple[int, ...]) -> Tensor:
    """Laws [len(drafts), V] behind `ids`: all rows as one text, the streams of the drafted rows
    being the block's own output a position before."""
    w, c, p = weights_of(model), model.config, "mtp.0."
    out = model.forward(pack([Segment(3, 0, tuple(ids[:-1]), 1)]), (model.streams_layer,))
    assert out.features is not None
    streams = out.features.view(len(ids) - 1, c.streams, -1)
    told = [*ids, *drafts]
    laws = []
    for step in range(len(drafts)):
        n = len(streams)
        behind = w["embed.weight"][torch.tensor(told[1 : n + 1])]
        e = (rms(behind, c.norm_eps) * w[p + "enorm.weight"]) @ w[p + "e_proj.weight"].T
        h = (rms(streams, c.norm_eps) * w[p + "hnorm.weight"]) @ w[p + "h_proj.weight"].T
        at = torch.arange(n)
        back = at[:, None] - at
        seen = (back >= 0) & (back < c.window)
        x = block(w, c, p, h + e[:, None], at, torch.zeros(0, c.head_dim), seen)
        laws.append(logits_of(w, c, p, collapse(w, c, p, x[-1:]))[0].softmax(-1))
        streams = torch.cat([streams, x[-1:]])
        assert step == n - len(ids) + 1
    return torch.stack(laws)


@pytest.mark.parametrize("kernels", [True, False])
def test_mtp_is_the_plain_one(kernels: bool) -> None:
    model = tiny_v4.target(MTP, kernels=kernels)
    ids = list(tokens(40))
    for n in (2, 8, 9, 31):
        drafter = tiny_v4.drafter(model, MTP, 3)
        feed(model, drafter, ids[: n - 1], 16)
        draft = proposed(drafter, ids[:n])
        assert draft.probs is not None and len(draft) == 3
        law = mtp_round(model, ids[:n], draft.tokens)
        torch.testing.assert_close(draft.probs, law, atol=1e-5, rtol=1e-3)


# -- the law at temperature 1 ----------------------------------------------------------------------


class TableV4(DeepseekV4):
    """A tower whose logits are a table's, by the last token, and whose features are its own."""

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        out = super().forward(batch, feature_layers)
        return TargetOutput(table(0, 0.8)[batch.tokens[batch.logit_rows]], out.features)


@pytest.mark.parametrize("kind", ["mtp1", "dspark"])
def test_the_joint_law_of_three_tokens(kind: str) -> None:
    c = tiny_v4.config(
        vocab_size=V, num_hidden_layers=2, compress_ratios=[0, 4], n_routed_experts=3
    )
    carried = MTP if kind == "mtp1" else tiny_v4.dspark(c)
    model = tiny_v4.target(carried, c, num_slots=64, max_context=16, cls=TableV4)
    drafter = tiny_v4.drafter(model, carried, 2 if kind == "mtp1" else 3)
    assert p_value(drafter, table(0, 0.8), model, 1200) > 0.001
