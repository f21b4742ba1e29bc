"""Drafts that wait for their round, by request: ready, or on their way from the lane.

A block belongs to one text of one length. Whether it is used is decided by that alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dspark.engine.lane import Lane, Ticket
from dspark.types import Draft


@dataclass(frozen=True)
class Block:
    """A draft that is good behind the first `length` tokens of a text, or a place in an answer of
    the lane."""

    length: int
    ticket: Ticket | None = None
    place: int = 0
    draft: Draft | None = None
    ahead: bool = False
    """It was drafted before the verdict on the tokens in front of it."""


@dataclass(frozen=True)
class Bet:
    """If the verdict emits just these tokens, the block is ready."""

    tokens: tuple[int, ...]
    block: Block


@dataclass
class Counts:
    """Of rounds of single requests in two lanes."""

    bets: int = 0
    """Rounds that drafted ahead, or had a tail."""
    hits: int = 0
    """Of these, those behind which a block was ready."""
    ahead: int = 0
    """Rounds whose own block had been ready."""
    fresh: int = 0
    """Rounds whose block had to be waited for."""


class Blocks:
    """The blocks of all requests in flight."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._blocks: dict[str, Block] = {}

    @property
    def names(self) -> Collection[str]:
        """Ids of requests for which something is ready or on its way."""
        return tuple(self._blocks)

    def put(self, name: str, block: Block) -> None:
        self._blocks[name] = block

    def of(self, name: str, length: int) -> Block | None:
        """The block of a request, if it is good behind `length` tokens."""
        block = self._blocks.get(name)
        return block if block is not None and block.length == length else None

    def draft(self, name: str, length: int) -> Draft | None:
        """The draft behind `length` tokens, waited for; None if there is none, or the lane had no
        time for it."""
        block = self.of(name, length)
        if block is None or block.ticket is None:
            return None if block is None else _marked(block)
        answer = self._lane.take(block.ticket)
        for other, b in list(self._blocks.items()):  # a batch is one answer for many requests
            if b.ticket == block.ticket:
                draft = None if answer is None else answer.drafts[b.place]
                self._blocks[other] = replace(b, ticket=None, draft=draft)
        return _marked(self._blocks[name])

    def discard(self, names: Sequence[str]) -> None:
        """Forget blocks; answers that nobody waits for any more are dropped."""
        gone = {b.ticket for n in names if (b := self._blocks.pop(n, None)) is not None}
        wanted = {b.ticket for b in self._blocks.values()}
        self._lane.drop([t for t in gone - wanted if t is not None])


def _marked(block: Block) -> Draft | None:
    return None if block.draft is None else replace(block.draft, ahead=block.ahead)
