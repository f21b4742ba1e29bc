"""Serving the MTP module: one draft a round, or more by feeding its output back.

Row j of its context pairs the target's hidden state h_j with the token behind it. A pass commits
hidden states, of which the last one waits for its token: that is the next anchor, and the pair of
both is the row that drafts. Behind a beginning that is shared with another text, the state that
waited there is gone, so the target runs its position again. With k > 1 the row's output takes the
place of the hidden state that the target has not computed yet; those rows are overwritten when the
true ones come. So do they behind tokens that are known but not run (`DraftContext.unseen`).

Shape suffixes as in `layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.layers import serve_with
from dspark.drafters.mtp import MtpModel
from dspark.drafters.serving import Vocabulary, check_length
from dspark.drafters.stack import stack_for
from dspark.models.target import Shared
from dspark.types import Draft


class MtpDrafter(Drafter):
    """Drafts with a trained `MtpModel`; see the module docstring."""

    patient = ahead = grows = True

    def __init__(
        self,
        target: Shared,
        config: DrafterConfig,
        model: MtpModel,
        draft_ids: Tensor | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """`model` is taken over: its linear maps are replaced by the target's.

        draft_ids         [V] rising ids that can be drafted; None: all
        num_draft_tokens  0 or more; None is 1, the MTP-1 baseline

        Raises ConfigError for another length.
        """
        self.cap = check_length(num_draft_tokens, 1, None, "mtp")
        self.feature_layers = config.target_layer_ids
        self._target = target
        self._vocabulary = Vocabulary(target.vocab_size, draft_ids)
        self._head = target.output_head(draft_ids)
        self._model = model.to(target.device).eval().requires_grad_(False)
        self._stack = stack_for(config, target, self._model.layers, self._model.rotary)
        serve_with(self._model, target.linear)
        self._waiting = torch.zeros(target.num_slots, config.hidden_size, device=target.device)

    @torch.inference_mode()
    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        """Pair every committed hidden state with the token behind it, as far as that is known."""
        if not committed:
            return
        assert features is not None
        hidden: list[Tensor] = []
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for c in committed:
            first, n = c.first_row, len(c.tokens)
            rows = features[first : first + n]
            if c.start in (0, self._stack.lengths[c.slot]):  # nothing waits
                pairs, start, behind = rows[:-1], c.start, c.tokens[1:]
            else:
                pairs = torch.cat([self._waiting[c.slot, None], rows[:-1]])
                start, behind = c.start - 1, c.tokens
            hidden.append(pairs)
            tokens += behind
            slots += [c.slot] * len(behind)
            positions += range(start, start + len(behind))
            self._waiting[c.slot] = rows[-1]
            self._stack.lengths[c.slot] = c.start + n - 1
        if tokens:
            x_ND = self._inputs(torch.cat(hidden), tokens)
            self._write(x_ND, slots, positions)

    def reuse(self, source: int, slot: int, length: int) -> int:
        """The pairs in front of the last shared token, whose own state is needed anew."""
        return length - 1 if self._stack.copy(source, slot, length - 1) else 0

    def release(self, slot: int) -> None:
        self._stack.lengths[slot] = 0

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft for each context, of `cap` tokens where there is room."""
        steps = max(c.unseen + min(c.length(self.cap), c.max_tokens) for c in contexts)
        if self.cap == 0:
            return [Draft()] * len(contexts)
        slots = [c.slot for c in contexts]
        rows = [len(c.tokens) - 2 - c.unseen for c in contexts]
        assert rows == [self._stack.lengths[s] for s in slots], "context ends at the anchor"
        words = self._vocabulary
        tokens: list[list[int]] = [[] for _ in contexts]
        probs: list[list[Tensor]] = [[] for _ in contexts]
        others: list[list[int]] = [[] for _ in contexts]
        hidden_BD, last = self._waiting[slots], [c.tokens[-1 - c.unseen] for c in contexts]
        for step in range(steps):
            x_BD = self._inputs(hidden_BD, last)
            # A sequence at the end of its slot repeats the last row; it drafts no more.
            at = [min(r + step, self._target.max_context - 1) for r in rows]
            hidden_BD = self._stack.run(x_BD[:, None], slots, at)[:, 0]
            guessing = step >= min(c.unseen for c in contexts)
            logits_BV = self._head(self._model.norm(hidden_BD)).float() if guessing else hidden_BD
            for b, c in enumerate(contexts):
                if step < c.unseen:
                    last[b] = c.tokens[rows[b] + step + 2]
                    continue
                # Others go on; its random stream must not.
                if step >= c.unseen + min(c.length(self.cap), c.max_tokens):
                    continue
                column, q = words.pick(logits_BV[b], c.params, c.rng)
                last[b] = words.token(column)
                tokens[b].append(last[b])
                if q is not None:
                    probs[b].append(q)
                if c.others:
                    others[b].append(words.second(logits_BV[b], column))
            if step + 1 < steps:
                self._write(x_BD, slots, at)
        return [
            Draft(tuple(t), words.spread(q) if q else None, others=tuple(o))
            for t, q, o in zip(tokens, probs, others, strict=True)
        ]

    def _inputs(self, hidden_ND: Tensor, tokens: Sequence[int]) -> Tensor:
        embedded = self._target.embed(torch.tensor(tokens, device=hidden_ND.device))
        return self._model.inputs(hidden_ND.to(embedded.dtype), embedded)

    def _write(self, x_ND: Tensor, slots: Sequence[int], positions: Sequence[int]) -> None:
        at = torch.tensor(positions, device=x_ND.device)
        rows = self._model.keys_values(x_ND, at)
        self._stack.write(torch.tensor(slots, device=x_ND.device), at, rows)
