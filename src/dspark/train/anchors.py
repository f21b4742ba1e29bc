"""From sequences with features to packed blocks: which anchors, what each slot should predict.

An anchor is a token that the target wrote. Its block predicts the tokens behind it, from context
strictly before it and from itself. Many anchors of a sequence share its context (paper, 3.3), so
that a context row is computed once for all of them.

    tokens    ... a-1 |  a   a+1  a+2 ...       row a is the anchor
    context   ...  x  |                         rows < a of the same sequence
    slot k            |  0    1    2            its teacher is row a + k, its label token a + k + 1

Slots whose label lies behind the end of their sequence are invalid and weigh nothing.

*Unseen features.* A drafter that drafts while its tokens are verified lacks the target's features
of the last ones (`DraftContext.unseen`). `unseen` of a pack makes blocks of that kind: the context
ends so many rows before the anchor, and those tokens enter in front of the block as embeddings, as
they do in serving.

Shape suffixes: N rows of all sequences, B blocks, K slots, m feature layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.train.features import Features


@dataclass(frozen=True)
class Document:
    """One sequence inside a pack: rows first_row..last_row, blocks first_block..last_block."""

    first_row: int
    last_row: int
    first_block: int
    last_block: int


@dataclass(frozen=True)
class Pack:
    """Sequences with their anchors, flattened.

    tokens, positions, log_z  [N];  context  [N, m * D] the drafter's feature layers
    final      [N, D] the final layer's output, before the final norm: the teacher
    anchors    [B] row of each anchor
    labels     [B, K] the token that slot k should predict; previous [B, K] the one in front of it
    teachers   [B, K] the row whose logits predict the label;  valid  [B, K] bool
    unseen     rows in front of each anchor that are no context
    """

    tokens: Tensor
    positions: Tensor
    log_z: Tensor
    context: Tensor
    final: Tensor
    documents: tuple[Document, ...]
    anchors: Tensor
    labels: Tensor
    previous: Tensor
    teachers: Tensor
    valid: Tensor
    unseen: int = 0

    @property
    def fronts(self) -> Tensor:
        """[B, unseen + 1] rows of the tokens that enter as embeddings: each anchor, last, and what
        is unseen in front of it."""
        return self.anchors[:, None] + torch.arange(-self.unseen, 1, device=self.anchors.device)


def draw_unseen(share: float, slots: int, rng: np.random.Generator) -> int:
    """How many features a pack lacks in front of its anchors: 1 to `slots` in `share` of the packs,
    else none."""
    return int(rng.integers(1, slots + 1)) if rng.random() < share else 0


def choose(f: Features, limit: int | None, rng: np.random.Generator | None) -> Tensor:
    """Sorted anchors of one sequence: answer tokens with at least one token behind them.

    At most `limit`, drawn without replacement by `rng`; None takes all of them.
    """
    available = np.arange(f.start, len(f.tokens) - 1)
    if limit is not None and limit < len(available):
        assert rng is not None
        available = np.sort(rng.choice(available, limit, replace=False))
    return torch.from_numpy(available)


def pack_blocks(
    features: Sequence[Features],
    anchors: Sequence[Tensor],
    num_slots: int,
    columns: Sequence[int],
    hidden_size: int,
    unseen: int = 0,
) -> Pack:
    """Flatten sequences and their anchors.

    columns   which of the stored layers (by index) the drafter reads, in its order; the last stored
              one is the teacher's
    unseen    of all blocks; fewer if an anchor has no more context in front of that than a row
    """
    least = min((int(a.min()) for a in anchors if len(a)), default=1)
    unseen = max(min(unseen, least - 1), 0)
    documents, rows, blocks = [], 0, 0
    at, ends, positions = [], [], []
    for f, a in zip(features, anchors, strict=True):
        documents.append(Document(rows, rows + len(f.tokens), blocks, blocks + len(a)))
        at.append(a + rows)
        ends.append(torch.full((len(a),), rows + len(f.tokens)))
        positions.append(torch.arange(len(f.tokens)))
        rows, blocks = rows + len(f.tokens), blocks + len(a)
    tokens = torch.cat([f.tokens for f in features])
    hidden = torch.cat([f.hidden for f in features]).view(rows, -1, hidden_size)
    anchors_B, ends_B = torch.cat(at), torch.cat(ends)
    teachers_BK = anchors_B[:, None] + torch.arange(num_slots)
    valid_BK = teachers_BK + 1 < ends_B[:, None]
    # An invalid slot points at the last row of its sequence: in range, and weighing nothing.
    teachers_BK = torch.minimum(teachers_BK, ends_B[:, None] - 1)
    return Pack(
        tokens,
        torch.cat(positions),
        torch.cat([f.log_z for f in features]),
        hidden[:, list(columns)].flatten(1).float(),
        hidden[:, -1].float(),
        tuple(documents),
        anchors_B,
        tokens[torch.minimum(teachers_BK + 1, ends_B[:, None] - 1)],
        tokens[teachers_BK],
        teachers_BK,
        valid_BK,
        unseen,
    )
