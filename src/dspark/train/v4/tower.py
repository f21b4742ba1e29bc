"""The whole tower with gradients: documents in, hidden states out.

The way out (gating the streams into one vector, its norm) is `Exit`, which drafters end in, too.

Initial weights: matrices normal with a standard deviation of half the inverse root of their inputs,
those that write into the streams smaller by the root of twice the number of layers; the embedding
0.25, the output matrix 0.02. Mixings begin as the identity between streams, with gates whose biases
differ a little from stream to stream: equal streams would learn equal things.

Shape suffixes as in `layers.py`; V vocabulary.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models.deepseek_v4.config import V4Config
from dspark.train.v4.layers import CHUNK, Block, Documents, Norm, linear, mixing

IDENTITY = 4.0
"""Logit of a stream's own weight in a fresh mixing: 0.95 of what a stream keeps is its own."""


class Exit(nn.Module):
    """Streams -> one vector, and the norm in front of the output matrix."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        s, d = config.streams, config.hidden_size
        self.config = config
        self.hc_head_fn = nn.Parameter(torch.empty(s, s * d))
        self.hc_head_base = nn.Parameter(torch.zeros(s))
        self.hc_head_scale = nn.Parameter(torch.ones(1))
        self.norm = Norm(d, config.norm_eps)

    def collapse(self, x_NSD: Tensor) -> Tensor:
        """[N, D], before the norm."""
        mix = mixing(x_NSD, self.hc_head_fn, self.config.norm_eps)
        gate = torch.addcmul(self.hc_head_base, mix, self.hc_head_scale).sigmoid()
        return torch.bmm((gate + self.config.hc_eps)[:, None], x_NSD)[:, 0]


class Tower(Exit):
    """All layers, under the official names."""

    def __init__(self, config: V4Config) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, ratio=ratio, hashed=i < config.num_hash_layers)
            for i, ratio in enumerate(config.ratios)
        )
        self.head = linear(config.vocab_size, config.hidden_size)

    def documents(self, tokens: list[tuple[int, ...]]) -> Documents:
        """Documents padded to one length, a multiple of `CHUNK`."""
        longest = -(-max(map(len, tokens)) // CHUNK) * CHUNK
        rows = torch.tensor([[*t, *[0] * (longest - len(t))] for t in tokens])
        return Documents(self.config, rows, torch.tensor([len(t) for t in tokens]))

    def streams(
        self, docs: Documents, keep: tuple[int, ...] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The streams [N, S, D] behind the last layer, and of the layers in `keep` the mean over
        the streams [N, D]."""
        x_NSD = self.embed(docs.tokens_N)[:, None].repeat(1, self.config.streams, 1)
        kept = {}
        for i, layer in enumerate(self.layers):
            block = cast(Block, layer)
            x_NSD = block(x_NSD, docs.tokens_N, lambda x, a=block.attn: a(x, docs), docs.real_N)
            if i in keep:
                kept[i] = x_NSD.mean(1)
        return x_NSD, kept

    def final(self, x_NSD: Tensor) -> Tensor:
        """What the output matrix reads: [N, D]."""
        return cast(Tensor, self.norm(self.collapse(x_NSD)))

    def forward(self, docs: Documents) -> Tensor:
        """Logits [N, V]."""
        return cast(Tensor, self.head(self.final(self.streams(docs)[0])))

    def loss(self, docs: Documents) -> tuple[Tensor, Tensor]:
        """The sum of -log p over all tokens that have one in front of them, and their number."""
        x_NSD, _ = self.streams(docs)
        real_BL = docs.real_N.view(docs.num, -1)
        rows = (real_BL & F.pad(real_BL[:, 1:], (0, 1))).reshape(-1).nonzero()[:, 0]
        logits = self.head(self.final(x_NSD[rows]))
        loss = F.cross_entropy(logits, docs.tokens_N[rows + 1], reduction="sum")
        return loss, torch.tensor(float(len(rows)))


@torch.no_grad()
def initialise(module: nn.Module, config: V4Config, generator: torch.Generator) -> None:
    """Fresh weights for a tower or for the stages of a drafter; see the module docstring."""
    deep = math.sqrt(2 * config.num_layers)
    s = config.streams
    for name, p in module.named_parameters():
        if name.endswith("_base") and "hc_head" not in name:
            p.normal_(std=0.5, generator=generator)
            p[2 * s :] = IDENTITY * torch.eye(s).flatten()
        elif name.endswith("hc_head_base"):
            p.normal_(std=0.5, generator=generator)
        elif p.dim() >= 2 and not name.endswith(".ape"):
            std = 0.5 * p.shape[-1] ** -0.5
            if name.endswith(("wo_b.weight", "w2.weight", "experts.w2")):
                std /= deep
            fixed = {"embed.weight": 0.25, "head.weight": 0.02}
            p.normal_(std=fixed.get(name, std), generator=generator)
