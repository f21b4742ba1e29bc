"""The contract of a drafter, and the names under which drafters are found.

A drafter guesses the tokens behind each sequence's anchor. It may be wrong without harm:
verification keeps the text exactly the target's. It must not be dishonest: `Draft.probs` is the
very distribution its tokens were drawn from, or None for a deterministic guess.

A drafter keeps its own context by slot and absolute position, as the target does, and is told of
every pass through `observe`: after a prefill chunk all rows are committed, after a verification the
anchor and the accepted drafts are. It never sees a row that was not committed. One that only keeps
context may say that it is `patient`: then it is told of many passes at once, before it is asked.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from torch import Tensor

from dspark.models.deepseek_v4_names import CarriedDrafter
from dspark.models.target import Shared
from dspark.types import Draft, SamplingParams

DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "none": "dspark.drafters.none:NoDrafter",
        "ngram": "dspark.drafters.ngram:NgramDrafter",
    }
)
"""Name -> "module:class"; a new drafter without weights is one new file and one line here."""


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may know of one sequence when it drafts.

    tokens     prompt and emitted tokens; the last one is the anchor, at position len(tokens) - 1
    max_tokens no more than this many drafts can be emitted (token budget, context limit); >= 1
    rng        the request's drafting stream, independent of the one that accepts
    unseen     tokens right in front of the anchor of which `observe` has not told yet, because the
               target is running them; only drafters that draft `ahead` are given any
    others     second guesses are wanted, too (`Draft.others`); they may be left out
    block      no longer block is wanted, which may change what is guessed and what it costs, as
               `max_tokens` does not; None: the drafter's own
    """

    slot: int
    tokens: Sequence[int]
    params: SamplingParams
    max_tokens: int
    rng: np.random.Generator
    unseen: int = 0
    others: bool = False
    block: int | None = None

    def length(self, cap: int) -> int:
        """Of the block that a drafter of at most `cap` tokens drafts."""
        return cap if self.block is None else min(cap, self.block)


@dataclass(frozen=True)
class Committed:
    """The rows of one sequence that a pass made permanent.

    tokens were processed at positions start, start + 1, ...; their features are rows
    first_row .. first_row + len(tokens) of the pass. `verified` and `accepted` count the draft
    tokens of a verification; both are None for a prefill chunk.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    first_row: int
    verified: int | None = None
    accepted: int | None = None


class Drafter(ABC):
    """Proposes tokens; see the module docstring."""

    sizes_drafts: bool = False
    """It offers only what it expects to pay: `--verify auto` then checks all of it."""
    ahead: bool = False
    """It can draft behind tokens whose rows it has not been told of (`DraftContext.unseen`). What
    stands in for them leaves no trace: the true rows follow, or those of another continuation."""
    grows: bool = False
    """Built for one token more, it drafts the same ones and one behind them."""
    patient: bool = False
    """Rows may reach `observe` late and in lumps, `verified` and `accepted` left out."""
    failures: int = 0
    """Errors that it survived on its own."""
    cap: int = 8
    """Longest block it drafts; 0: it never does. What drafting costs is told by this."""
    feature_layers: tuple[int, ...] = ()
    """Target layers whose hidden states `observe` wants (i: output of layer i, -1: embedding)."""

    def __init__(self, target: Shared, num_draft_tokens: int | None = None) -> None:
        """`num_draft_tokens` caps a block; None takes the drafter's own default. A value that the
        drafter cannot honour raises ConfigError."""

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft for each context, of at most `context.max_tokens` tokens, possibly empty."""

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        """Learn of a pass: features [N, F * D] of all its rows, and which were committed."""

    def reuse(self, source: int, slot: int, length: int) -> int:
        """A new sequence in `slot` begins with the `length` first tokens of the one that is or was
        in `source` (perhaps the same slot): take over their context and nothing else.

        Returns the position from which it will be told of rows: `length`, or `length - 1` if it
        needs the last one anew, or 0 if it can only begin from nothing, as behind `release`.
        """
        return 0

    def release(self, slot: int) -> None:
        """Forget what is in `slot`: its sequence has ended, or an unlike one begins there."""


def build(
    name: str,
    target: Shared,
    num_draft_tokens: int | None = None,
    *,
    model: str = "",
    carried: Sequence[CarriedDrafter] = (),
) -> Drafter:
    """The drafter called `name` for `target`: a registered one, one that the target's checkpoint
    carries, the one of that name that ships for `model`, or the one in the directory `name`.

    Raises ConfigError for an unknown name or a length it cannot honour, CheckpointError for a
    checkpoint that is damaged or was made for another target.
    """
    if name not in DRAFTERS:
        from dspark.drafters import trained

        return trained.build(name, target, num_draft_tokens, model, carried)
    module, cls = DRAFTERS[name].split(":")
    drafter: Drafter = getattr(importlib.import_module(module), cls)(target, num_draft_tokens)
    return drafter
