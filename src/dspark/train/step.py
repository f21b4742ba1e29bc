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
from dspark.train.losses import LossWeights, Terms, chunked, slot_terms


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
            return torch.exp(normed @ self.head.T - log_z_N[:, None])

    def columns(self, tokens: Tensor) -> Tensor:
        """Token ids -> columns of the draft vocabulary, -1 for what it lacks."""
        if self.draft_ids is None:
            return tokens
        at = torch.searchsorted(self.draft_ids, tokens).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[at] == tokens, at, -1)


class TrainStep(nn.Module):
    """forward(pack, denominator) -> (loss, flat Terms)."""

    def __init__(
        self,
        model: BlockModel | MtpModel,
        teacher: Teacher,
        weights: LossWeights,
        chunk: int = 64,
    ) -> None:
        super().__init__()
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
        model, w = self.model, self.weights
        h_BKD = self._hidden(pack)
        slots_K = w.slots(self.num_slots).to(h_BKD.device)
        if denominator is None:
            denominator = (slots_K * pack.valid).sum()
        # A valid block weighs at least 1 (its first slot); none at all shall give 0, not NaN.
        denominator = denominator.clamp(min=1.0 / 4096)
        factors = torch.tensor([w.ce, w.kl, w.tv, w.conf], device=h_BKD.device) / denominator
        heads = [m for m in (model.markov_head, model.confidence_head) if m is not None]
        parameters = [p for m in heads for p in m.parameters()]
        labels = self.teacher.columns(pack.labels)

        def terms_of(h_CKD: Tensor, rows: slice) -> Terms:
            with torch.no_grad():  # neighbouring anchors share teachers: each row once
                teachers, index = torch.unique(pack.teachers[rows], return_inverse=True)
                p = self.teacher.probabilities(pack.final[teachers], pack.log_z[teachers])[index]
                # Rows in front of the answer have no log Z; no valid slot is taught by one.
                p = p.masked_fill_(~pack.valid[rows][..., None], 0.0)
            logits, confidence = self._logits(h_CKD, pack.previous[rows])
            return slot_terms(logits, p, labels[rows], pack.valid[rows], slots_K, confidence)

        return chunked(terms_of, h_BKD, parameters, factors, self.chunk)

    def _logits(self, h_CKD: Tensor, previous_CK: Tensor) -> tuple[Tensor, Tensor | None]:
        model, ids = self.model, self.teacher.draft_ids
        logits = h_CKD @ self.teacher.head.T.to(h_CKD.dtype)
        e_CKr = None
        if model.markov_head is not None:
            e_CKr = model.markov_head.embed(previous_CK)
            w2_Vr = model.markov_head.markov_w2.weight
            w2_Vr = w2_Vr if ids is None else w2_Vr[ids]
            logits = logits + model.markov_head.latents(e_CKr, h_CKD) @ w2_Vr.T
        confidence = None
        if model.confidence_head is not None:
            seen = None if e_CKr is None else e_CKr.detach()
            confidence = model.confidence_head(h_CKD.detach(), seen)
        return logits, confidence

    def _hidden(self, pack: Pack) -> Tensor:
        embedded = F.embedding(pack.tokens, self.teacher.embedding)
        if isinstance(self.model, MtpModel):
            return self._mtp_hidden(self.model, pack, embedded)
        return self._block_hidden(self.model, pack, embedded)

    def _block_hidden(self, model: BlockModel, pack: Pack, embedded: Tensor) -> Tensor:
        context = model.context(pack.context)
        spans = [
            [
                Span(d.first_block, d.last_block, keys[d.first_row : d.last_row],
                     values[d.first_row : d.last_row],
                     pack.positions[pack.anchors[d.first_block : d.last_block]])
                for d in pack.documents
            ]
            for keys, values in model.keys_values(context, pack.positions)
        ]  # fmt: skip
        assert model.config.mask_token_id is not None
        return model.hidden(
            embedded[pack.anchors],
            self.teacher.embedding[model.config.mask_token_id],
            pack.positions[pack.anchors],
            context[pack.anchors - 1],
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
