"""DSpark of DeepSeek-V4: a whole block at once over the target's own layers as context.

    anchor noise noise noise noise      slots at positions P .. P + 4 (P: the anchor's)
       |     |     |     |     |        embedded, copied into all residual streams
     [ stages mtp.0, mtp.1, mtp.2 ] <-- keys of positions P - window .. P - 1
       |     |     |     |     |
      x_0   x_1   x_2   x_3   x_4       streams gated into one; U_i = head(norm(x_i))

The context of a position is what three layers of the tower computed for it, the mean over the
streams of each, through one projection and a norm, computed once; every stage makes its own keys of
it. A stage is a block of the tower's kind, but inside the block every slot sees every slot, and the
window in front of the block is the same for all of them. The rows of a block are no context: what
they leave in the ring is overwritten by the true rows when their positions are committed.

Then the sequential stage (`heads.py`, vanilla form): token by token from the left, the anchor
being the one before the first,

    logits_i = U_i + W2 W1[t_{i-1}]         confidence_i = sigmoid(w [x_i ; W1[t_{i-1}]])

with x_i before the norm, in fp32. The confidence never looks at the token it speaks of. Greedily
on a CPU this is one call, because seven steps of a few operations each cost as much as the stages.

The weights know no width, but every slot's result depends on it, being drawn from all of them.
A block may be shorter than the trained one; a longer one is refused, because acceptance falls.
Source: the DSpark paper and DeepSeek's reference code beside the checkpoints.

Shape suffixes as in `deepseek_v4_stage.py`; F feature layers, r Markov rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.drafters.deepseek_v4_stage import Stages
from dspark.drafters.serving import Vocabulary, check_length
from dspark.errors import CheckpointError
from dspark.models.deepseek_v4.arithmetic import Matrix
from dspark.models.deepseek_v4.hyper import expand
from dspark.models.deepseek_v4.kernels import Walk
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_names import MARKOV, CarriedDrafter
from dspark.models.int8 import PackedLinear
from dspark.models.target import Segment
from dspark.models.weights import WeightSource
from dspark.types import Draft


class V4DSparkDrafter(Drafter):
    """Drafts with the stages `mtp.*` of the target's own checkpoint; see the module docstring."""

    patient = ahead = True

    def __init__(
        self,
        target: DeepseekV4,
        drafter: CarriedDrafter,
        num_draft_tokens: int | None = None,
        weights: WeightSource | None = None,
    ) -> None:
        """`num_draft_tokens`: 0 to the checkpoint's block size, which None takes. `weights`: where
        `mtp.*` are, if not in the target's own checkpoint.

        Raises ConfigError for another length, CheckpointError for a damaged drafter.
        """
        settings = drafter.settings
        if settings is None:
            raise CheckpointError("there are DSpark stages, but no dspark_block_size in the config")
        size = settings.block_size
        self.cap = check_length(num_draft_tokens, size, size, "the block")
        self.feature_layers = settings.target_layer_ids
        self._target, self._noise = target, settings.noise_token_id
        self.stages = Stages(target, drafter, 2 * self.cap + 1, weights)  # unseen and drafted
        self._main_proj = self.stages.linear("mtp.0.main_proj.weight")
        self._main_norm_D = self.stages.vector("mtp.0.main_norm.weight")
        self._head = target.output_head()
        self._vocabulary = Vocabulary(target.vocab_size, None)
        self._w1_Vr: Tensor | None = None
        if settings.markov_rank:
            w1, w2 = drafter.markov or [drafter.last + name for name in MARKOV[0]]
            self._w1_Vr, self._w2 = self.stages.vector(w1), self.stages.linear(w2)
        self._confidence: Tensor | None = None
        if drafter.confidence:
            self._confidence = self.stages.vector(drafter.last + "confidence_head.proj.weight")
        self._greedy = self._lay_out()

    def _lay_out(self) -> Walk | None:
        """The sequential stage for the kernels, which walk a greedy block in one call."""
        maths = self._target.maths
        if maths.kernels is None or self._w1_Vr is None or maths.dtype != torch.float32:
            return None
        if not isinstance(self._w2, Matrix | PackedLinear):
            return None
        confidence = self._confidence
        return Walk(
            self._w1_Vr.data_ptr(), None if confidence is None else confidence.data_ptr(),
            ctypes.addressof(self._w2.struct), maths.kernels.products[self._w2.struct.bits],
            self._target.hidden_size,
        )  # fmt: skip

    @torch.inference_mode()
    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        """Write the context rows of every committed position that can still be read."""
        if not committed:
            return
        assert features is not None
        rows: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for c in committed:
            n, end = self.stages.recent(len(c.tokens)), c.start + len(c.tokens)
            last = c.first_row + len(c.tokens)
            rows += range(last - n, last)
            slots += [c.slot] * n
            positions += range(end - n, end)
            self.stages.lengths[c.slot] = end
        main_ND = self._main_proj(features[torch.tensor(rows, device=features.device)])
        main_ND = self._target.maths.norm_rotate(main_ND, self._main_norm_D, None)
        self.stages.write(main_ND, slots, positions)

    def release(self, slot: int) -> None:
        self.stages.lengths[slot] = 0

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft for each context, of `cap` tokens where there is room."""
        if not self.cap or not contexts:
            return [Draft()] * len(contexts)
        self.stages.check(contexts, behind=1)
        # Room cuts the draft and not the block, which would be another one; a slot's end cuts both.
        # Unseen tokens stand in front of the block as what they are.
        anchors = [len(c.tokens) - 1 for c in contexts]
        room = self._target.max_context
        sizes = [
            min(c.length(self.cap), room - at) for c, at in zip(contexts, anchors, strict=True)
        ]
        segments = [
            Segment(
                c.slot,
                at - c.unseen,
                (*c.tokens[at - c.unseen :], *[self._noise] * (n - 1)),
                0,
            )
            for c, at, n in zip(contexts, anchors, sizes, strict=True)
        ]
        p = self.stages.begin(segments, blocks=True)
        x_NSD = expand(self._target.embed(p.tokens), self._target.config.streams)
        x_ND = self.stages.exit.collapse(self.stages.run(x_NSD, p))
        base_NV = self._head(self.stages.exit.norm(x_ND)).float()
        if self._greedy is not None and all(c.params.is_greedy and not c.others for c in contexts):
            return self._walk_greedily(self._greedy, contexts, sizes, x_ND, base_NV)
        return self._walk(contexts, sizes, x_ND, base_NV)

    def _walk_greedily(
        self,
        walk: Walk,
        contexts: Sequence[DraftContext],
        sizes: Sequence[int],
        x_ND: Tensor,
        base_NV: Tensor,
    ) -> list[Draft]:
        """The sequential stage in the kernels, block by block: what `_walk` does."""
        kernels = self._target.maths.kernels
        assert kernels is not None
        drafts, first = [], 0
        for c, n in zip(contexts, sizes, strict=True):
            first += c.unseen
            rows = slice(first, first + min(n, c.max_tokens))
            tokens, sure_N = kernels.walk(walk, base_NV[rows], x_ND[rows], c.tokens[-1])
            drafts.append(Draft(tuple(tokens), None, sure_N))
            first += n
        return drafts

    def _walk(
        self, contexts: Sequence[DraftContext], sizes: Sequence[int], x_ND: Tensor, base_NV: Tensor
    ) -> list[Draft]:
        """The sequential stage, all sequences in step; block b owns the next sizes[b] rows behind
        those of its unseen tokens."""
        device = x_ND.device
        ends = list(accumulate(c.unseen + n for c, n in zip(contexts, sizes, strict=True)))
        first = [end - n for end, n in zip(ends, sizes, strict=True)]
        rooms = [min(n, c.max_tokens) for n, c in zip(sizes, contexts, strict=True)]
        previous = [c.tokens[-1] for c in contexts]
        tokens: list[list[int]] = [[] for _ in contexts]
        probs: list[list[Tensor]] = [[] for _ in contexts]
        others: list[list[int]] = [[] for _ in contexts]
        for i in range(max(rooms)):
            active = [b for b, room in enumerate(rooms) if room > i]
            rows = [base_NV[first[b] + i] for b in active]
            if self._w1_Vr is not None:
                ids = torch.tensor([previous[b] for b in active], device=device)
                bias_BV = self._w2(F.embedding(ids, self._w1_Vr)).float()
                rows = [row + bias for row, bias in zip(rows, bias_BV, strict=True)]
            for b, logits_V in zip(active, rows, strict=True):
                c = contexts[b]
                previous[b], q = self._vocabulary.pick(logits_V, c.params, c.rng)
                tokens[b].append(previous[b])
                if q is not None:
                    probs[b].append(q)
                if c.others:
                    others[b].append(self._vocabulary.second(logits_V, previous[b]))
        sure = self._sure(contexts, tokens, x_ND, first)
        return [
            Draft(tuple(t), torch.stack(q) if q else None, confident, tuple(o))
            for t, q, confident, o in zip(tokens, probs, sure, others, strict=True)
        ]

    def _sure(
        self,
        contexts: Sequence[DraftContext],
        tokens: Sequence[Sequence[int]],
        x_ND: Tensor,
        first: Sequence[int],
    ) -> Sequence[Tensor | None]:
        """The confidences of all blocks at once: each of a slot and the token before it."""
        if self._confidence is None:
            return [None] * len(contexts)
        rows = [row + i for row, own in zip(first, tokens, strict=True) for i in range(len(own))]
        h_ND = x_ND[torch.tensor(rows, device=x_ND.device)].float()
        if self._w1_Vr is not None:
            pairs = zip(contexts, tokens, strict=True)
            before = [t for c, own in pairs for t in (c.tokens[-1], *own[:-1])]
            e_Nr = self._w1_Vr[torch.tensor(before, device=x_ND.device)]
            h_ND = torch.cat([h_ND, e_Nr], -1)
        sure_N = torch.sigmoid(F.linear(h_ND, self._confidence)[:, 0]).cpu()
        return sure_N.split_with_sizes([len(own) for own in tokens])
