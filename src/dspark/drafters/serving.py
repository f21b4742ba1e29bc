"""What trained drafters share when they serve: which rows were committed, drawing from a
vocabulary, and the bounds of a block's length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.base import Committed
from dspark.errors import ConfigError
from dspark.sampling import argmax, distribution, draw
from dspark.types import SamplingParams


def feature_rows(
    committed: Sequence[Committed], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """[N] rows of the pass, slots and absolute positions of all committed tokens."""
    rows: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    for c in committed:
        n = len(c.tokens)
        rows += range(c.first_row, c.first_row + n)
        slots += [c.slot] * n
        positions += range(c.start, c.start + n)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(slots, device=device),
        torch.tensor(positions, device=device),
    )


class Vocabulary:
    """The tokens that can be drafted: draws from logits over them, speaks in token ids."""

    def __init__(self, size: int, ids: Tensor | None) -> None:
        """`size` of the whole vocabulary; `ids` [V'] of the drafted part, None for all."""
        self.size = size
        self.ids = ids

    def token(self, column: int) -> int:
        return column if self.ids is None else int(self.ids[column])

    def pick(
        self, logits: Tensor, params: SamplingParams, rng: np.random.Generator
    ) -> tuple[int, Tensor | None]:
        """One token from logits [V'] and q [V'] that it was drawn from; None where q is one-hot."""
        if params.is_greedy:
            return argmax(logits[None])[0], None
        q = distribution(logits[None].float(), params)[0]
        return draw(q, rng.random()), q

    def second(self, logits: Tensor, column: int) -> int:
        """The best token of logits [V'] beside the one in `column`."""
        rest = logits.clone()
        rest[column] = -torch.inf
        return self.token(argmax(rest[None])[0])

    def spread(self, rows: list[Tensor]) -> Tensor:
        """q over the drafted part, k rows [V'] -> [k, V] over the whole vocabulary."""
        q = torch.stack(rows)
        if self.ids is None:
            return q
        out = torch.zeros(len(rows), self.size, device=q.device)
        out[:, self.ids] = q
        return out


def check_length(num_draft_tokens: int | None, default: int, limit: int | None, name: str) -> int:
    """The cap on a block. Raises ConfigError outside 0..limit."""
    if num_draft_tokens is None:
        return default
    if num_draft_tokens < 0 or (limit is not None and num_draft_tokens > limit):
        expected = "0 (plain decoding) or more" if limit is None else f"0 to {limit}"
        raise ConfigError(
            f"num_draft_tokens={num_draft_tokens} is out of range: {name} takes {expected}"
        )
    return num_draft_tokens
