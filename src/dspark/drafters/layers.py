"""The layers of a drafter: queries come from the block, keys and values also from the context.

One attention serves all drafters (paper, eq. 3): K = [W_K H_ctx ; W_K H_d], V alike. A block of
DSpark attends to its context and, both ways, to itself. The MTP module is the same with blocks of
one slot, each of which becomes context for the next. Training packs many blocks over one context
and limits what each may see; serving has one block a sequence. Both are spans:

    Span(first, last, keys, values, visible)    blocks first..last see rows < visible of keys

Shape suffixes: B blocks, K slots of a block, L context rows, D hidden size, H query heads, G
key/value heads, E head dimension, R = E / 2 (in rotations) or H / G (inside attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.models.rope import inverse_frequencies


@dataclass(frozen=True)
class Span:
    """Consecutive blocks over one context.

    keys, values  [L, G, E], keys rotated
    visible       [blocks] rows of the context that each block may see; None: all of them
    """

    first: int
    last: int
    keys: Tensor
    values: Tensor
    visible: Tensor | None = None


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32 with a weight [D]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.rms_norm(x.float(), list(self.weight.shape), self.weight.float(), self.eps)
        return y.to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of absolute positions, as the target has them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        inv_freq_R, self.factor = inverse_frequencies(config.rope, config.head_dim)
        self.inv_freq_R: Tensor
        self.register_buffer("inv_freq_R", inv_freq_R, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[...] -> cos and sin [..., 1, R], ready for [..., heads, E]."""
        angles = positions[..., None, None].float() * self.inv_freq_R
        return angles.cos() * self.factor, angles.sin() * self.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of [..., heads, E]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class TwoTap(nn.Module):
    """y_t = k_0 * x_t + k_1 * x_{t-1} inside a block, kernels a base and a correction.

    The correction is predicted from the input, one number for every 16 channels; slot 0 has no
    predecessor. It begins as the identity.
    """

    GROUP = 16

    def __init__(self, size: int) -> None:
        super().__init__()
        self.groups = size // self.GROUP
        self.base = nn.Parameter(torch.stack([torch.ones(size), torch.zeros(size)]))
        self.correction = nn.Linear(size, 2 * self.groups)
        nn.init.zeros_(self.correction.weight)
        nn.init.zeros_(self.correction.bias)

    def forward(self, x_BKD: Tensor) -> Tensor:
        before_BKD = F.pad(x_BKD, (0, 0, 1, 0))[:, :-1]
        change = self.correction(x_BKD).repeat_interleave(self.GROUP, -1)
        now, then = change.chunk(2, -1)
        return (self.base[0] + now) * x_BKD + (self.base[1] + then) * before_BKD  # type: ignore[no-any-return]


class DraftAttention(nn.Module):
    """Grouped-query attention of a block over its context and itself."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] -> rotated keys and values [..., G, E]."""
        heads = (*x.shape[:-1], self.kv_heads, self.head_dim)
        k, v = self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        return rotate(self.k_norm(k), cos, sin), v

    def forward(self, x_BKD: Tensor, cos: Tensor, sin: Tensor, spans: Sequence[Span]) -> Tensor:
        q_BKHE = self.q_proj(x_BKD).view(*x_BKD.shape[:-1], self.heads, self.head_dim)
        q_BKHE = rotate(self.q_norm(q_BKHE), cos, sin)
        k_BKGE, v_BKGE = self.keys_values(x_BKD, cos, sin)
        parts = [attend(q_BKHE[s.first : s.last], k_BKGE[s.first : s.last],
                        v_BKGE[s.first : s.last], s) for s in spans]  # fmt: skip
        return self.o_proj(torch.cat(parts))  # type: ignore[no-any-return]


def attend(q_BKHE: Tensor, k_BKGE: Tensor, v_BKGE: Tensor, span: Span) -> Tensor:
    """Blocks of one span over its context and themselves: [B, K, H * E]."""
    B, K, H, E = q_BKHE.shape
    L, G = span.keys.shape[:2]
    R = H // G
    q = q_BKHE.view(B, K, G, R, E).permute(2, 0, 1, 3, 4) * E**-0.5  # G B K R E
    to_context = q.reshape(G, B * K * R, E) @ span.keys.permute(1, 2, 0)
    to_context = to_context.view(G, B, K * R, L)
    if span.visible is not None:
        hidden_BL = torch.arange(L, device=q.device) >= span.visible[:, None]
        to_context = to_context.masked_fill(hidden_BL[None, :, None], -torch.inf)
    to_self = q.reshape(G, B, K * R, E) @ k_BKGE.permute(2, 0, 3, 1)
    # The block always sees itself, so no row is fully masked and none can become NaN.
    weights = torch.softmax(torch.cat([to_context, to_self], -1).float(), -1).to(q.dtype)
    out = (weights[..., :L].reshape(G, B * K * R, L) @ span.values.transpose(0, 1)).view(
        G, B, K * R, E
    )
    out = out + weights[..., L:] @ v_BKGE.permute(2, 0, 1, 3)
    return out.view(G, B, K, R, E).permute(1, 2, 0, 3, 4).reshape(B, K, H * E)


class Mlp(nn.Module):
    """Down(silu(gate) * up)."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP, with the two-tap convolution in front of both if asked for."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(c)
        self.mlp = Mlp(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn_conv = TwoTap(c.hidden_size) if c.conv else nn.Identity()
        self.mlp_conv = TwoTap(c.hidden_size) if c.conv else nn.Identity()

    def forward(self, x_BKD: Tensor, cos: Tensor, sin: Tensor, spans: Sequence[Span]) -> Tensor:
        normed = self.attn_conv(self.input_layernorm(x_BKD))
        x_BKD = x_BKD + self.self_attn(normed, cos, sin, spans)
        return x_BKD + self.mlp(self.mlp_conv(self.post_attention_layernorm(x_BKD)))  # type: ignore[no-any-return]


class MappedLinear(nn.Module):
    """A linear map that somebody else computes: the target's kernels at serving time."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def serve_with(
    module: nn.Module, linear: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
) -> None:
    """Replace every nn.Linear below `module` by the map that `linear(weight, bias)` makes of it.

    A drafter need not be exact, so its weights may be rounded as the target's kernels like them.
    """
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            bias = None if child.bias is None else child.bias.detach()
            setattr(module, name, MappedLinear(linear(child.weight.detach(), bias)))
        else:
            serve_with(child, linear)
