"""The drafters of a V4 checkpoint as they learn: many blocks over one document, with gradients.

Both are made of blocks of the tower's kind (`layers.py`) with sliding attention, under the official
names `mtp.N.*`, and read a frozen tower; how they draft is told where they serve
(`drafters/deepseek_v4_mtp.py`, `drafters/deepseek_v4_dspark.py`). What training may do at once:

* MTP-1: row i holds the streams at i and the token behind. Rows see one another as in a layer of
  the tower, so one pass over the document trains all of them.
* DSpark: context keys are computed once for every position and stage; the block of an anchor sees
  the `window` of them in front of it, and itself.

`tests/train/v4/test_heads.py` holds their proposals equal to the served ones.

Shape suffixes: N rows of all documents, B blocks, K slots, S streams, D hidden size, H heads,
E head dimension, W window, F feature layers, r Markov rank, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4_config import V4DSpark
from dspark.train.anchors import Pack
from dspark.train.v4.layers import CHUNK, Attention, Block, Documents, Norm, linear, turns
from dspark.train.v4.operations import attend
from dspark.train.v4.tower import Exit, initialise


class Markov(nn.Module):
    """The two tables of the sequential head."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = linear(vocab_size, rank)


class Confidence(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = linear(1, size)


class Stage(Block):
    """A block with sliding attention and scored experts. The first and the last stage hold what is
    before and behind all of them, as in the official layout."""

    e_proj: nn.Linear
    h_proj: nn.Linear
    enorm: Norm
    hnorm: Norm
    main_proj: nn.Linear
    main_norm: Norm
    norm: Norm
    markov_head: Markov
    confidence_head: Confidence

    def __init__(self, config: V4Config) -> None:
        super().__init__(config, ratio=0, hashed=False)


class Heads(nn.Module, ABC):
    """Stages `mtp.0` ... and their way out, whose tensors belong to the last stage."""

    def __init__(self, config: V4Config, stages: int, embedding: Tensor) -> None:
        """`embedding` [V, D] is the tower's, frozen and not part of what is trained."""
        super().__init__()
        self.config = config
        self.mtp = nn.ModuleList(Stage(config) for _ in range(stages))
        exit_, last = Exit(config), self.stages[-1]
        for name, parameter in exit_.named_parameters(recurse=False):
            last.register_parameter(name, parameter)
        last.norm = exit_.norm
        # In a tuple, so that it is not registered once more.
        self._exit, self._embedding = (exit_,), embedding.detach()

    @property
    def exit(self) -> Exit:
        return self._exit[0]

    @property
    def stages(self) -> list[Stage]:
        return [cast(Stage, stage) for stage in self.mtp]

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding)

    @abstractmethod
    def forward(self, pack: Pack) -> Tensor:
        """[B, K, D]: the collapsed state of every slot, before the norm."""

    def markov(self, previous_BK: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Rows of W1 [B, K, r] for the tokens in front of the slots, and W2 [V, r]."""
        return None, None

    def confidence(self, x_BKD: Tensor, e_BKr: Tensor | None) -> Tensor | None:
        """Logits [B, K] of the confidence head, which teach it alone."""
        return None


class MtpHeads(Heads):
    """MTP-1. Its pack's context holds all streams behind the last layer [N, S * D]."""

    def __init__(self, config: V4Config, embedding: Tensor) -> None:
        super().__init__(config, 1, embedding)
        d, eps, stage = config.hidden_size, config.norm_eps, self.stages[0]
        stage.e_proj, stage.h_proj = linear(d, d), linear(d, d)
        stage.enorm, stage.hnorm = Norm(d, eps), Norm(d, eps)

    def forward(self, pack: Pack) -> Tensor:
        stage = self.stages[0]
        ends = torch.tensor([d.last_row for d in pack.documents])
        firsts = torch.tensor([d.first_row for d in pack.documents])
        longest = -(-int((ends - firsts).max()) // CHUNK) * CHUNK
        rows_BL = firsts[:, None] + torch.arange(longest)
        # The last row of a document stands for the padding, too, and for the token behind it that
        # there is not: nobody reads what comes of either.
        rows_N = torch.minimum(rows_BL, ends[:, None] - 1).reshape(-1)
        behind_N = torch.minimum(rows_BL + 1, ends[:, None] - 1).reshape(-1)
        docs = Documents(self.config, pack.tokens[rows_N].view_as(rows_BL), ends - firsts)
        x_NSD = self.inputs(pack.context[rows_N], pack.tokens[behind_N])
        x_NSD = stage(x_NSD, docs.tokens_N, lambda x: stage.attn(x, docs), docs.real_N)
        # Rows of the pack to rows of the padded documents.
        block = torch.tensor([d.last_block for d in pack.documents])
        document_B = torch.searchsorted(block, torch.arange(len(pack.anchors)), right=True)
        row_B = pack.anchors - 1 - firsts[document_B] + document_B * longest
        return self.exit.collapse(x_NSD[row_B])[:, None]

    def inputs(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Streams [N, S * D] and the tokens behind them -> what enters the block [N, S, D]."""
        stage = self.stages[0]
        e_ND = stage.e_proj(stage.enorm(self.embed(tokens)))
        h_NSD = stage.h_proj(stage.hnorm(states.view(len(tokens), self.config.streams, -1)))
        return cast(Tensor, h_NSD + e_ND[:, None])


class DSparkHeads(Heads):
    """DSpark. Its pack's context holds the feature layers [N, F * D]."""

    def __init__(
        self,
        config: V4Config,
        settings: V4DSpark,
        embedding: Tensor,
        *,
        stages: int = 3,
        confidence: bool = True,
    ) -> None:
        super().__init__(config, stages, embedding)
        d, first, last = config.hidden_size, self.stages[0], self.stages[-1]
        self.settings, self._confidence = settings, confidence
        first.main_proj = linear(d, len(settings.target_layer_ids) * d)
        first.main_norm = Norm(d, config.norm_eps)
        rank = settings.markov_rank
        if rank:
            last.markov_head = Markov(config.vocab_size, rank)
        if confidence:
            last.confidence_head = Confidence(d + rank)

    def forward(self, pack: Pack) -> Tensor:
        c, stage, fronts_BU = self.config, self.stages[0], pack.fronts
        slots, first_B = pack.unseen + pack.valid.shape[1], fronts_BU[:, 0]
        main_ND = stage.main_norm(stage.main_proj(pack.context))
        # Context rows of each block, and which of them there are.
        starts = torch.tensor([d.first_row for d in pack.documents])
        block = torch.tensor([d.last_block for d in pack.documents])
        document_B = torch.searchsorted(block, torch.arange(len(pack.anchors)), right=True)
        context_BW = first_B[:, None] - c.window + torch.arange(c.window)
        seen_BW = context_BW >= starts[document_B][:, None]
        context_BW = context_BW.clamp(min=0)
        seen = F.pad(seen_BW, (0, slots), value=True)
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        mask = mask[:, None].expand(-1, slots, -1)
        at_N = turns(c, 0, c.head_dim, pack.positions)
        positions_BK = pack.positions[first_B][:, None] + torch.arange(slots)
        at_BK = turns(c, 0, c.head_dim, positions_BK)
        tokens_BK = torch.full(positions_BK.shape, self.settings.noise_token_id)
        tokens_BK[:, : pack.unseen + 1] = pack.tokens[fronts_BU]
        tokens = tokens_BK.flatten()
        x_NSD = self.embed(tokens)[:, None].repeat(1, c.streams, 1)
        for stage in self.stages:
            a = stage.attn
            keys_NE = a.keys(a.wkv(main_ND), at_N)
            context = keys_NE.index_select(0, context_BW.flatten()).view(*context_BW.shape, -1)

            def attention(x: Tensor, a: Attention = a, context: Tensor = context) -> Tensor:
                rank = a.q_norm(a.wq_a(x))
                own = a.keys(a.wkv(x).view(*at_BK.shape[:2], -1), at_BK)
                q = a.queries(rank, at_BK).flatten(1, 2)
                out, _ = attend(q, torch.cat([context, own], 1), mask, a.attn_sink)
                return a.output(out.view(*at_BK.shape[:2], c.num_heads, -1), at_BK)

            x_NSD = stage(x_NSD, tokens, attention)
        return self.exit.collapse(x_NSD).view(len(pack.anchors), slots, -1)[:, pack.unseen :]

    def markov(self, previous_BK: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not self.settings.markov_rank:
            return None, None
        head = self.stages[-1].markov_head
        return head.markov_w1(previous_BK), head.markov_w2.weight

    def confidence(self, x_BKD: Tensor, e_BKr: Tensor | None) -> Tensor | None:
        if not self._confidence:
            return None
        h = x_BKD.detach()
        h = h if e_BKr is None else torch.cat([h, e_BKr.detach()], -1)
        return cast(Tensor, self.stages[-1].confidence_head.proj(h)[..., 0])


@torch.no_grad()
def initialise_heads(heads: Heads, exit_norm: Tensor, generator: torch.Generator) -> None:
    """Fresh weights like a tower's, but for what meets the frozen tower: the last norm begins as
    the tower's own, the Markov head with no bias and the confidence head undecided."""
    initialise(heads, heads.config, generator)
    heads.exit.norm.weight.copy_(exit_norm)
    for name, p in heads.named_parameters():
        if name.endswith("markov_w1.weight"):
            p.normal_(generator=generator)
        elif name.endswith(("markov_w2.weight", "confidence_head.proj.weight")):
            p.zero_()
