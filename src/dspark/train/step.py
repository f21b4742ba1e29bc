"""One drafter and its losses as one module: a pack of blocks in, the loss and its terms out.

The frozen parts of the target that a drafter shares (embedding, final norm, head) come in as a
`Teacher`; they receive no gradient. Embedding rows and teacher rows are looked up, so neither the
embedding nor the head is part of what is trained or saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.block import BlockModel
from dspark.drafters.layers import Span
from dspark.drafters.mtp import MtpModel
from dspark.errors import ConfigError
from dspark.models.config import DecoderConfig
from dspark.models.weights import WeightSource
from dspark.train.anchors import Pack
from dspark.train.losses import Blocks, LossWeights, block_losses


@dataclass(frozen=True)
class Teacher:
    """The target's own matrices, in fp32.

    embedding  [vocabulary, D];  head  [V, D] the rows of the draft vocabulary;  norm  [D]
    draft_ids  [V] their token ids, rising; None: the whole vocabulary
    """

    embedding: Tensor
    norm: Tensor
    head: Tensor
    eps: float
    draft_ids: Tensor | None = None

    @staticmethod
    def of(config: DecoderConfig, weights: WeightSource, draft_ids: Tensor | None) -> Teacher:
        """Read them from a checkpoint."""
        embedding = weights.tensor("model.embed_tokens.weight").float()
        head = embedding if config.tie_embeddings else weights.tensor("lm_head.weight").float()
        if draft_ids is not None:
            if (draft_ids[1:] <= draft_ids[:-1]).any():
                raise ConfigError("draft_ids must rise")
            head = head[draft_ids].clone()
        norm = weights.tensor("model.norm.weight").float()
        return Teacher(embedding, norm, head, config.rms_norm_eps, draft_ids)

    def probabilities(self, final_ND: Tensor, log_z_N: Tensor) -> Tensor:
        """The target's softmax over the whole vocabulary, [N, V] of it."""
        # Never in bf16: an error in a logit is a factor in a probability.
        with torch.autocast(final_ND.device.type, enabled=False):
            normed = F.rms_norm(final_ND, list(self.norm.shape), self.norm, self.eps)
            # At most 1 also for rows without a log Z (in front of the answer), so that what
            # weighs nothing is finite.
            p_NV = torch.exp_((normed @ self.head.T).sub_(log_z_N[:, None]).clamp_(max=0))
            # An int8 target rounds on its way to log Z: 4 % of noise, and no law may exceed 1.
            return p_NV.div_(p_NV.sum(-1, keepdim=True).clamp_(min=1))

    def columns(self, tokens: Tensor) -> Tensor:
        """Token ids -> columns of the draft vocabulary, -1 for what it lacks."""
        if self.draft_ids is None:
            return tokens
        at = torch.searchsorted(self.draft_ids, tokens).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[at] == tokens, at, -1)


def _product_dtype(device: torch.device) -> torch.dtype:
    """Of products over the vocabulary: what autocast says, if it is on."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32


class TrainStep(nn.Module):
    """forward(pack, denominator) -> (loss, flat Terms)."""

    def __init__(
        self,
        model: BlockModel | MtpModel,
        teacher: Teacher,
        weights: LossWeights,
        chunk: int = 64,
        scale: Tensor | None = None,
    ) -> None:
        """`scale` [m * D] multiplies a block drafter's features; whoever saves the model multiplies
        the columns of its `fc` instead."""
        super().__init__()
        self.scale = scale
        self.model = model
        self.teacher = teacher
        self.weights = weights
        self.chunk = chunk
        self.num_slots = model.config.block_size

    def forward(self, pack: Pack, denominator: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weighted mean loss, and the sums of `Terms`.

        denominator   sum of slot weights to divide by; None takes this pack's own. Data-parallel
                      runs pass the mean over machines, so that their mean gradient is the one of
                      the whole batch.
        """
        w = self.weights
        h_BKD = self._hidden(pack)
        slots_K = w.slots(self.num_slots).to(h_BKD.device)
        if denominator is None:
            denominator = (slots_K * pack.valid).sum()
        # A valid block weighs at least 1 (its first slot); none at all shall give 0, not NaN.
        denominator = denominator.clamp(min=1.0 / 4096)
        factors = torch.tensor([w.ce, w.kl, w.tv, w.conf], device=h_BKD.device) / denominator
        teacher = self.teacher

        def teach(rows: slice) -> tuple[Tensor, Tensor]:
            teachers, index = torch.unique(pack.teachers[rows], return_inverse=True)
            return teacher.probabilities(pack.final[teachers], pack.log_z[teachers]), index

        blocks = Blocks(
            teacher.head,
            teach,
            teacher.columns(pack.labels),
            pack.valid,
            slots_K,
            factors,
            self.chunk,
            _product_dtype(h_BKD.device),
        )
        return block_losses(blocks, h_BKD, *self._heads(h_BKD, pack.previous))

    def _logits(self, h_BKD: Tensor, previous_BK: Tensor) -> tuple[Tensor, Tensor | None]:
        """All logits of some blocks, and those of the confidence head: what `block_losses` never
        holds at once, for checks on small blocks."""
        z_BKr, w2_Vr, confidence_BK = self._heads(h_BKD, previous_BK)
        logits = h_BKD @ self.teacher.head.T.to(h_BKD.dtype)
        if z_BKr is not None and w2_Vr is not None:
            logits = logits + z_BKr @ w2_Vr.T
        return logits, confidence_BK

    def _heads(
        self, h_BKD: Tensor, previous_BK: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Latents of the Markov head and the rows of W2 that count, and the confidence logits."""
        model, ids = self.model, self.teacher.draft_ids
        e_BKr = z_BKr = w2_Vr = confidence_BK = None
        if model.markov_head is not None:
            e_BKr = model.markov_head.embed(previous_BK)
            z_BKr = model.markov_head.latents(e_BKr, h_BKD)
            w2_Vr = model.markov_head.markov_w2.weight
            w2_Vr = w2_Vr if ids is None else w2_Vr[ids]
        if model.confidence_head is not None:
            seen = None if e_BKr is None else e_BKr.detach()
            confidence_BK = model.confidence_head(h_BKD.detach(), seen)
        return z_BKr, w2_Vr, confidence_BK

    def _hidden(self, pack: Pack) -> Tensor:
        embedded = F.embedding(pack.tokens, self.teacher.embedding)
        if isinstance(self.model, MtpModel):
            return self._mtp_hidden(self.model, pack, embedded)
        return self._block_hidden(self.model, pack, embedded)

    def _block_hidden(self, model: BlockModel, pack: Pack, embedded: Tensor) -> Tensor:
        context = model.context(pack.context if self.scale is None else pack.context * self.scale)
        first = pack.fronts[:, 0]
        spans = [
            [
                Span(d.first_block, d.last_block, keys[d.first_row : d.last_row],
                     values[d.first_row : d.last_row],
                     pack.positions[first[d.first_block : d.last_block]])
                for d in pack.documents
            ]
            for keys, values in model.keys_values(context, pack.positions)
        ]  # fmt: skip
        assert model.config.mask_token_id is not None
        return model.hidden(
            embedded[pack.fronts],
            self.teacher.embedding[model.config.mask_token_id],
            pack.positions[first],
            context[first - 1],
            spans,
        )

    def _mtp_hidden(self, model: MtpModel, pack: Pack, embedded: Tensor) -> Tensor:
        # Row i holds (h_i, t_{i+1}); the last row of a sequence wraps round and is read by nobody.
        x_ND = model.inputs(pack.context, embedded.roll(-1, 0))
        keys, values = model.keys_values(x_ND, pack.positions)[0]
        rows = pack.anchors - 1
        spans = [
            Span(d.first_block, d.last_block, keys[d.first_row : d.last_row],
                 values[d.first_row : d.last_row],
                 pack.positions[rows[d.first_block : d.last_block]])
            for d in pack.documents
        ]  # fmt: skip
        return model.norm(model.hidden(x_ND[rows], pack.positions[rows], spans))[:, None]  # type: ignore[no-any-return]
