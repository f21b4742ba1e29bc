"""Serving a block drafter: DFlash without a sequential head, DSpark with one.

One parallel pass over the blocks of all sequences gives hidden states and base logits; then the
sequential stage walks all blocks from left to right, slot by slot, adding the head's bias and
drawing. A block may be shorter than the trained one. Known tokens that have no context row yet
(`DraftContext.unseen`) enter in front of the block as embeddings. The weights run in the target's
arithmetic (integer kernels beside an int8 target), the output head and the embedding are the
target's own.

Shape suffixes as in `layers.py`; V tokens that can be drafted, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.drafters.block import BlockModel
from dspark.drafters.config import DrafterConfig
from dspark.drafters.layers import serve_with
from dspark.drafters.serving import Vocabulary, check_length, feature_rows
from dspark.drafters.stack import stack_for
from dspark.models.target import Shared
from dspark.types import Draft


class BlockDrafter(Drafter):
    """Drafts with a trained `BlockModel`; see the module docstring."""

    patient = ahead = True

    def __init__(
        self,
        target: Shared,
        config: DrafterConfig,
        model: BlockModel,
        draft_ids: Tensor | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """`model` is taken over: its linear maps are replaced by the target's.

        draft_ids         [V] rising ids that can be drafted; None: all
        num_draft_tokens  0 to block_size; None is block_size

        Raises ConfigError for another length.
        """
        self.cap = check_length(num_draft_tokens, config.block_size, config.block_size, "the block")
        self.feature_layers = config.target_layer_ids
        self._target, self._config = target, config
        self._vocabulary = Vocabulary(target.vocab_size, draft_ids)
        self._head = target.output_head(draft_ids)
        head = model.markov_head
        if head is not None:
            w2 = head.markov_w2.weight.detach()
            self._w2_Vr = (w2 if draft_ids is None else w2[draft_ids]).to(target.device)
            self._bias = target.linear(self._w2_Vr)
            head.markov_w2 = nn.Identity()  # type: ignore[assignment]  # only its rows are used
        self._model = model.to(target.device).eval().requires_grad_(False)
        self._stack = stack_for(config, target, self._model.layers, self._model.rotary)
        serve_with(self._model, target.linear)
        assert config.mask_token_id is not None
        self._mask_D = target.embed(torch.tensor([config.mask_token_id], device=target.device))[0]
        width = config.hidden_size * (config.num_layers if config.layer_fusion else 1)
        self._last = torch.zeros(target.num_slots, width, device=target.device)

    @torch.inference_mode()
    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        """Write the context rows of committed tokens."""
        if not committed:
            return
        assert features is not None
        rows, slots, positions = feature_rows(committed, features.device)
        context = self._model.context(features[rows])
        self._stack.write(slots, positions, self._model.keys_values(context, positions))
        at = -1
        for c in committed:
            at += len(c.tokens)
            self._last[c.slot] = context[at]
            self._stack.lengths[c.slot] = c.start + len(c.tokens)

    def reuse(self, source: int, slot: int, length: int) -> int:
        """The context rows; the last one, which is kept apart, comes with the next pass."""
        return length if self._stack.copy(source, slot, length) else 0

    def release(self, slot: int) -> None:
        self._stack.lengths[slot] = 0

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft for each context, of `cap` tokens where there is room."""
        if self.cap == 0:
            return [Draft()] * len(contexts)
        for c in contexts:
            known = len(c.tokens) - 1 - c.unseen
            assert self._stack.lengths[c.slot] == known, "context ends at the first unseen token"
        # Room cuts drafts and not blocks: with fewer slots the others would guess differently, and
        # the room is the company's, too.
        drafts: list[Draft] = [Draft()] * len(contexts)
        kinds = [(c.unseen, c.length(self.cap)) for c in contexts]
        for unseen, length in set(kinds):
            alike = [b for b, kind in enumerate(kinds) if kind == (unseen, length)]
            group = [contexts[b] for b in alike]
            h_BKD = self._hidden(group, length, unseen)
            base_BKV = self._head(h_BKD.flatten(0, 1)).view(*h_BKD.shape[:2], -1).float()
            for b, draft in zip(alike, self._walk(group, h_BKD, base_BKV), strict=True):
                drafts[b] = draft
        return drafts

    def _hidden(self, contexts: Sequence[DraftContext], k: int, unseen: int) -> Tensor:
        """The parallel stage: [B, K, D]; each context has as many `unseen` tokens."""
        device = self._target.device
        slots = [c.slot for c in contexts]
        starts = [len(c.tokens) - 1 - unseen for c in contexts]
        tail_BU = torch.tensor([list(c.tokens[-1 - unseen :]) for c in contexts], device=device)
        front_BUD = self._target.embed(tail_BU.flatten()).view(*tail_BU.shape, -1)
        block = self._model.inputs(front_BUD[:, -1], self._mask_D, self._last[slots], k)
        x_BKD = torch.cat([front_BUD[:, :-1].to(block.dtype), block], 1) if unseen else block
        return self._model.outputs(self._stack.run(x_BKD, slots, starts)[:, unseen:])

    def _walk(
        self, contexts: Sequence[DraftContext], h_BKD: Tensor, base_BKV: Tensor
    ) -> list[Draft]:
        """The sequential stage, all sequences in step."""
        model, words = self._model, self._vocabulary
        previous = [c.tokens[-1] for c in contexts]
        tokens: list[list[int]] = [[] for _ in contexts]
        probs: list[list[Tensor]] = [[] for _ in contexts]
        others: list[list[int]] = [[] for _ in contexts]
        before: list[Tensor] = []
        state = None
        for h_BD, logits_BV in zip(h_BKD.unbind(1), base_BKV.unbind(1), strict=True):
            if model.markov_head is not None:
                e_Br = model.markov_head.embed(torch.tensor(previous, device=h_BD.device))
                before.append(e_Br)
                z_Br, state = model.markov_head.step(e_Br, h_BD, state)
                logits_BV = self._biased(logits_BV, z_Br.float())
            for b, c in enumerate(contexts):
                column, q = words.pick(logits_BV[b], c.params, c.rng)
                previous[b] = words.token(column)
                tokens[b].append(previous[b])
                if q is not None:
                    probs[b].append(q)
                if c.others:
                    others[b].append(words.second(logits_BV[b], column))
        c_BK = None
        if (
            model.confidence_head is not None
        ):  # of no draft's own token: it may decide on that draft
            e_BKr = torch.stack(before, 1) if before else None
            c_BK = torch.sigmoid(model.confidence_head(h_BKD, e_BKr).float()).cpu()
        return [
            Draft(
                tuple(tokens[b]),
                words.spread(probs[b]) if probs[b] else None,
                None if c_BK is None else c_BK[b],
                tuple(others[b]),
            ).truncated(c.max_tokens)
            for b, c in enumerate(contexts)
        ]

    def _biased(self, base_BV: Tensor, z_Br: Tensor) -> Tensor:
        """U_k + z W2, or that over the best tokens of U_k alone: q is zero elsewhere."""
        if not 0 < self._config.candidates < base_BV.shape[1]:
            return base_BV + self._bias(z_Br)
        best = base_BV.topk(self._config.candidates, sorted=False)
        bias_BC = (self._w2_Vr[best.indices] @ z_Br[..., None])[..., 0]
        out = torch.full_like(base_BV, -torch.inf)
        return out.scatter_(1, best.indices, best.values + bias_BC)
