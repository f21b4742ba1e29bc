"""Prompt lookup: the text so far is the drafter (Saxena 2023, "prompt lookup decoding").

What: take the last n tokens, find where they stood before, propose what followed there. n runs from
4 down to 1 and the longest n with a match wins; among several matches the most recent one. Code,
quotations, summaries and edits repeat themselves and gain much; it needs no weights.

Why a length of its own: a wrong guess is not free. On a small CPU each row of a verification costs
ROW_COST of a whole pass, so a block of ten hopeless guesses would double the price of a token. Each
slot therefore keeps, for each n, the rate at which its guesses were accepted, and proposes the k
that maximises what a round yields per cost,

    (1 + a + a^2 + ... + a^k) / (1 + ROW_COST k)        (paper, eq. 1 with a constant rate a)

which is 0 when a < ROW_COST, and the cap when nearly everything is accepted. Rates start at
a prior (a match of four tokens deserves trust, one of a single token hardly any) that weighs as
much as PRIOR_WEIGHT tries. Old evidence fades by FADE a round, so a slot that went silent probes
again with a token or two after some twenty rounds.

The rate is the confidence of the draft, too: it is of the past, and of this text and match alone,
so a scheduler can tell hopeful guesses of one request from doubtful ones of another.

A continuation that reaches the end of the text goes on with the guess itself, as if it had been
emitted: "a b a b" proposes "a b a b a b ...". Small models do fall into such loops.

Not promised: a gain on text that repeats nothing (the loss is a few per cent at worst), and rates
are per token of a match length, not per position of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.errors import ConfigError
from dspark.models.target import Target
from dspark.types import Draft

DEFAULT_DRAFT_TOKENS = 10
ROW_COST = 0.125
"""One more row of a verification, in passes of one row."""
PRIOR: Mapping[int, float] = MappingProxyType({4: 0.8, 3: 0.6, 2: 0.4, 1: 0.16})
"""Match length n -> expected chance that the next token is right; its keys are the n tried."""
PRIOR_WEIGHT = 2.0
FADE = 0.97


@dataclass
class _Rate:
    """Acceptance of guesses that came from a match of one length."""

    prior: float
    hits: float = 0.0
    tries: float = 0.0

    @property
    def value(self) -> float:
        return (PRIOR_WEIGHT * self.prior + self.hits) / (PRIOR_WEIGHT + self.tries)

    def fade(self) -> None:
        self.hits *= FADE
        self.tries *= FADE


@dataclass
class _Slot:
    """One sequence: where each n-gram was last followed by something, and how guesses fared."""

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> index of the token that followed its last occurrence."""
    indexed: int = 0
    """Tokens seen; every n-gram that ends before this index is in `follows`."""
    last: int = -1
    """The token at indexed - 1: tells a sequence from another that took its slot."""
    rates: dict[int, _Rate] = field(default_factory=lambda: {n: _Rate(a) for n, a in PRIOR.items()})
    matched: int = 0
    """The n of the last proposal."""

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` goes on from what was indexed (as far as one token tells)."""
        return not self.indexed or (
            self.indexed <= len(tokens) and tokens[self.indexed - 1] == self.last
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that has a follower; each token is visited once in its life."""
        for end in range(max(self.indexed, 1), len(tokens)):
            for n in PRIOR:
                if n <= end:
                    self.follows[tuple(tokens[end - n : end])] = end
        self.indexed, self.last = len(tokens), tokens[-1]


class NgramDrafter(Drafter):
    """Prompt lookup with a length that follows recent acceptance; see the module docstring."""

    sizes_drafts = True

    def __init__(self, target: Target, num_draft_tokens: int | None = None) -> None:
        """`num_draft_tokens` caps a block: None is 10, 0 never drafts. ConfigError below 0."""
        if num_draft_tokens is not None and num_draft_tokens < 0:
            raise ConfigError(
                f"num_draft_tokens={num_draft_tokens} is out of range: the ngram drafter takes"
                " 0 (plain decoding) or more"
            )
        self.cap = DEFAULT_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
        self._slots: dict[int, _Slot] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """A copy of what followed the longest match; `probs` is None, the guess is certain."""
        return [self._propose(c) for c in contexts]

    def _propose(self, context: DraftContext) -> Draft:
        tokens = context.tokens
        slot = self._slots.get(context.slot)
        if slot is None or not slot.knows(tokens):
            slot = self._slots[context.slot] = _Slot()
        slot.extend(tokens)
        for kept in slot.rates.values():
            kept.fade()
        slot.matched = 0
        for n in PRIOR:
            start = slot.follows.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                slot.matched = n
                rate = slot.rates[n].value
                k = best_length(rate, min(context.length(self.cap), context.max_tokens))
                return Draft(_copy(tokens, start, k), confidence=torch.full((k,), rate))
        return Draft()

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        """Count tried and accepted guesses; a prefill from position 0 starts a new sequence."""
        for c in committed:
            slot = self._slots.get(c.slot)
            if slot is None:
                continue
            if c.verified is None or c.accepted is None:
                if c.start == 0:
                    self.release(c.slot)
            elif slot.matched:
                rate = slot.rates[slot.matched]
                rate.hits += c.accepted
                rate.tries += min(c.accepted + 1, c.verified)  # behind a miss nothing was tried

    def reuse(self, source: int, slot: int, length: int) -> int:
        """Its context is the text itself; how guesses fared belongs to the former one."""
        self.release(slot)
        return length

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`, if there is one."""
        self._slots.pop(slot, None)


def best_length(rate: float, cap: int) -> int:
    """The k <= cap with the highest yield per cost at a constant acceptance `rate` (eq. 1)."""
    best, best_speed = 0, 1.0
    tokens = 1.0
    for k in range(1, cap + 1):
        tokens += rate**k
        speed = tokens / (1 + ROW_COST * k)
        if speed <= best_speed:  # concave over linear: it never rises again
            break
        best, best_speed = k, speed
    return best


def _copy(tokens: Sequence[int], start: int, k: int) -> tuple[int, ...]:
    """k tokens from `start` on, going round through the copy itself at the end of the text."""
    period = tokens[start : start + k]
    return tuple(period[i % len(period)] for i in range(k))
