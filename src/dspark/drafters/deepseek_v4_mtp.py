"""MTP-1 of DeepSeek-V4: one block of the tower's kind that predicts one token ahead.

Row i pairs the target's state at position i with the token behind it. Unlike in a model with one
residual stream, the state is all of them, as they stand behind the last layer, before anything is
gated or normed:

    X_i [S, D] = h_proj(hnorm(x_i)) for each stream + e_proj(enorm(embed(t_{i+1}))) in all of them
    X_i -> one block, sliding attention only -> own hc_head -> own norm -> the target's head

which is a draft for t_{i+2}. For more (k > 1) the block's own streams take the place of the
target's: the same block again, a position further. With two drafts and more the first rows of those
positions are provisional, and are overwritten when the true ones come.

A pass commits states of which the last one waits for its token; that is the next anchor, and the
pair of both is the row that drafts. Source: DeepSeek's reference code and the names of its weights.

Shape suffixes as in `deepseek_v4_stage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.drafters.deepseek_v4_stage import Stages
from dspark.drafters.serving import Vocabulary, check_length
from dspark.errors import CheckpointError
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_names import CarriedDrafter
from dspark.models.target import Segment
from dspark.models.weights import WeightSource
from dspark.types import Draft


class V4MtpDrafter(Drafter):
    """Drafts with `mtp.0` of the target's own checkpoint; see the module docstring."""

    patient = ahead = grows = True

    def __init__(
        self,
        target: DeepseekV4,
        drafter: CarriedDrafter,
        num_draft_tokens: int | None = None,
        weights: WeightSource | None = None,
    ) -> None:
        """`num_draft_tokens`: 0 or more; None is 1, as DeepSeek runs it. `weights`: where
        `mtp.*` are, if not in the target's own checkpoint.

        Raises ConfigError for another length, CheckpointError for a damaged drafter.
        """
        if drafter.stages != 1:
            raise CheckpointError(
                f"the checkpoint's MTP drafter has {drafter.stages} blocks, only one is supported"
            )
        self.cap = check_length(num_draft_tokens, 1, None, "mtp1")
        self.feature_layers = (target.streams_layer,)
        self._target, self._streams = target, target.config.streams
        self.stages = Stages(target, drafter, 2 * self.cap + 1, weights)  # unseen and drafted
        self._e_proj = self.stages.linear("mtp.0.e_proj.weight")
        self._h_proj = self.stages.linear("mtp.0.h_proj.weight")
        self._enorm_D = self.stages.vector("mtp.0.enorm.weight")
        self._hnorm_D = self.stages.vector("mtp.0.hnorm.weight")
        self._head = target.output_head()
        self._vocabulary = Vocabulary(target.vocab_size, None)
        self._waiting = torch.zeros(
            target.num_slots, self._streams * target.hidden_size, device=target.device
        )

    @torch.inference_mode()
    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        """Pair every committed state with the token behind it, as far as that is known."""
        if not committed:
            return
        assert features is not None
        states: list[Tensor] = []
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for c in committed:
            rows = features[c.first_row : c.first_row + len(c.tokens)]
            behind = c.tokens if c.start else c.tokens[1:]
            pairs = rows[:-1]
            if c.start:
                pairs = torch.cat([self._waiting[c.slot, None], pairs])
            n, end = self.stages.recent(len(behind)), c.start + len(c.tokens) - 1
            states.append(pairs[len(pairs) - n :])
            tokens += behind[len(behind) - n :]
            slots += [c.slot] * n
            positions += range(end - n, end)
            self._waiting[c.slot] = rows[-1]
            self.stages.lengths[c.slot] = end
        if tokens:
            mix = self.stages.layers[0].attn_mix
            x_ND, _, _ = mix.enter(self._inputs(torch.cat(states), tokens))
            self.stages.write(x_ND, slots, positions)

    def release(self, slot: int) -> None:
        self.stages.lengths[slot] = 0

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft for each context, of `cap` tokens where there is room."""
        drafts: list[list[int]] = [[] for _ in contexts]
        probs: list[list[Tensor]] = [[] for _ in contexts]
        others: list[list[int]] = [[] for _ in contexts]
        self.stages.check(contexts, behind=2)
        rooms = [
            c.unseen + min(c.length(self.cap), c.max_tokens) if self.cap else 0 for c in contexts
        ]
        rows = [len(c.tokens) - 2 - c.unseen for c in contexts]
        last = [c.tokens[-1 - c.unseen] for c in contexts]
        states = self._waiting[[c.slot for c in contexts]]
        for step in range(max(rooms, default=0)):
            active = [b for b, room in enumerate(rooms) if room > step]
            segments = [Segment(contexts[b].slot, rows[b] + step, (last[b],), 0) for b in active]
            p = self.stages.begin(segments, blocks=False)
            x_NSD = self.stages.run(self._inputs(states[active], [last[b] for b in active]), p)
            states[active] = x_NSD.flatten(1)
            guessing = [i for i, b in enumerate(active) if step >= contexts[b].unseen]
            for b in active:
                if step < contexts[b].unseen:
                    last[b] = contexts[b].tokens[rows[b] + step + 2]
            if not guessing:
                continue
            end = self.stages.exit
            logits_NV = self._head(end.norm(end.collapse(x_NSD[guessing]))).float()
            for i, logits_V in zip(guessing, logits_NV, strict=True):
                b, c = active[i], contexts[active[i]]
                last[b], q = self._vocabulary.pick(logits_V, c.params, c.rng)
                drafts[b].append(last[b])
                if q is not None:
                    probs[b].append(q)
                if c.others:
                    others[b].append(self._vocabulary.second(logits_V, last[b]))
        return [
            Draft(tuple(t), torch.stack(q) if q else None, others=tuple(o))
            for t, q, o in zip(drafts, probs, others, strict=True)
        ]

    def _inputs(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """States [N, S * D] and the tokens behind them -> what enters the block [N, S, D]."""
        norm, streams = self._target.maths.norm_rotate, self._streams
        ids = torch.tensor(tokens, device=states.device)
        e_ND = self._e_proj(norm(self._target.embed(ids), self._enorm_D, None)).float()
        each = states.reshape(len(tokens) * streams, -1)
        h_NSD = self._h_proj(norm(each, self._hnorm_D, None)).float()
        return h_NSD.view(len(tokens), streams, -1) + e_ND[:, None]
