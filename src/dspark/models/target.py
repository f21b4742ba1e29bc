"""The contract between the engine and any target model.

A target takes N flattened tokens of any number of sequences in one pass, without padding, and
returns next-token logits and the hidden states of chosen layers. Rows are independent: what a row
yields does not depend on which other rows share the pass, beyond floating-point rounding; on the
int8 path not even on that (its bits are compared in a test).

Caches are addressed by absolute position in a *slot* (one slot a sequence). A pass writes rows
`positions` of each token's slot and reads rows 0..position. Nothing is ever rolled back: a rejected
token's row lies beyond the sequence's length, is never read, and is overwritten when that position
is processed again. So accepting is nothing but moving a length.

Shape suffixes: N tokens of the pass, M rows that get logits, V vocabulary, D hidden size, F =
number of feature layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""A linear map [N, I] -> [N, O]."""


@dataclass(frozen=True)
class Batch:
    """N tokens of S sequences, flattened in sequence order.

    tokens     [N] int64
    positions  [N] int64, absolute, from 0; rising by one inside a sequence
    slots      [N] int64, the cache slot of every token
    cu_lens    S + 1 offsets: sequence s owns rows cu_lens[s] .. cu_lens[s + 1]
    logit_rows [M] int64, the rows whose logits are wanted (a prefill wants only the last)
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    cu_lens: tuple[int, ...]
    logit_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.cu_lens) - 1


@dataclass(frozen=True)
class Segment:
    """A run of consecutive tokens of one sequence in a pass: where it stands and what it wants."""

    slot: int
    start: int
    """Absolute position of the first token."""
    tokens: tuple[int, ...]
    num_logits: int
    """Logits are wanted for the last `num_logits` tokens."""


def pack(segments: list[Segment], device: torch.device | str = "cpu") -> Batch:
    """Flatten segments into one ragged batch, in the order given."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    cu_lens = [0]
    for s in segments:
        n = len(s.tokens)
        tokens += s.tokens
        positions += range(s.start, s.start + n)
        slots += [s.slot] * n
        cu_lens.append(len(tokens))
        rows += range(len(tokens) - s.num_logits, len(tokens))

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(column(tokens), column(positions), column(slots), tuple(cu_lens), column(rows))


@dataclass(frozen=True)
class TargetOutput:
    """logits [M, V] fp32 for `batch.logit_rows`; features [N, F * D] fp32, or None without F."""

    logits: Tensor
    features: Tensor | None


class Shared(Protocol):
    """What a trained drafter shares with its target, on the device where it drafts
    (`elsewhere.lend`)."""

    vocab_size: int
    max_context: int
    """Tokens (prompt and text) that a slot holds."""
    num_slots: int
    device: torch.device
    hidden_size: int
    num_layers: int

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] int64 -> [N, D] in the target's floating-point type."""
        ...

    def output_head(self, ids: Tensor | None = None) -> Linear:
        """The output matrix alone, without the norm in front: all rows, shared, or those of some
        token ids [V'] int64."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """weight [O, I] (and bias [O]) as a map in this target's own arithmetic: its dtype, its
        device, its rounding."""
        ...


class Target(Shared, Protocol):
    """What the engine needs to know of a model."""

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        """One pass. `feature_layers` are layer indices: i is the output of decoder layer i (before
        the final norm), -1 the embedding."""
        ...

    def reuse(self, source: int, slot: int, length: int) -> bool:
        """Make `slot` hold the first `length` rows of `source`, perhaps the same slot, so that a
        pass may go on from there; False, and nothing done, if the cache cannot."""
        ...
