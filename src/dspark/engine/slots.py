"""Cache slots, and what the rows of a free one are still good for.

A cache row depends on the tokens up to its position and on nothing else, and nothing is cleared
when a text ends. So a slot that was given back remembers its tokens, and a new prompt that begins
with the same ones starts behind them: their rows are neither computed nor written again. The
drafter's context follows the same positions and comes along, so what it guesses behind a hit is
what it would have guessed cold.

    free slot that shares half of its rows or more (the next turn)      taken as it is
    any other slot, also one in use (the same system prompt)            its rows are copied into the
                                                                        least recently used free one

Only rows of tokens that were emitted count: drafts that were rejected, and what was accepted behind
the end of a text, lie beyond. One token of a prompt at least is always run, for its logits. What a
cache cannot give (a ring that has moved on, a drafter whose context has a hole) it refuses; then
the next best slot is asked, and without any the prompt starts cold.

Not promised: that of prompts which arrive together one waits for the rows of another.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import islice

from dspark.drafters.base import Drafter
from dspark.engine.batch import Sequence
from dspark.models.target import Target


class Slots:
    """Gives out the slots of a target and its drafter."""

    def __init__(self, target: Target, drafter: Drafter, *, reuse: bool) -> None:
        """Without `reuse` every prompt starts cold."""
        self._target, self._drafter, self._reuse = target, drafter, reuse
        self.free = list(range(target.num_slots))
        """Least recently used first."""
        self._kept: dict[int, list[int]] = {}
        """Tokens whose rows a free slot holds."""

    def take(self, prompt: Items[int], running: Items[Sequence]) -> tuple[int, int]:
        """A free slot, and how many tokens of `prompt` it holds already, less than all of them."""
        slot, cached = self._begin(prompt, running)
        if self._reuse and not cached:
            self._drafter.release(slot)
        self.free.remove(slot)
        self._kept.pop(slot, None)
        return slot, cached

    def give_back(self, sequence: Sequence) -> None:
        """The text in this slot has ended."""
        self.free.append(sequence.slot)
        if self._reuse:
            self._kept[sequence.slot] = sequence.tokens[: sequence.cached]
        else:
            self._drafter.release(sequence.slot)

    def forget(self) -> None:
        """Somebody else has used the caches: no free slot holds anything."""
        self._kept.clear()

    def _begin(self, prompt: Items[int], running: Items[Sequence]) -> tuple[int, int]:
        oldest = self.free[0]
        for source, shared, held in self._alike(prompt, running) if self._reuse else ():
            places = [oldest] if source not in self.free else [oldest, source]
            for slot in places if 2 * shared < held else places[::-1]:
                # The drafter first: it has less to copy, and may want a row less.
                start = self._drafter.reuse(source, slot, shared)
                if start and self._target.reuse(source, slot, start):
                    return slot, start
                if slot != source:  # the text that is there keeps its rows, not the drafter's
                    self._drafter.release(slot)
        return oldest, 0

    def _alike(self, prompt: Items[int], running: Items[Sequence]) -> list[tuple[int, int, int]]:
        """(slot, tokens it shares with `prompt`, tokens it holds): the longest beginning first, of
        equals the least recently used one."""
        held = [(slot, self._kept[slot]) for slot in self.free if slot in self._kept]
        held += [(s.slot, s.tokens[: s.cached]) for s in running]
        found = [(slot, _common(t, prompt, len(prompt) - 1), len(t)) for slot, t in held]
        return sorted((f for f in found if f[1]), key=lambda f: -f[1])


def _common(a: Items[int], b: Items[int], limit: int) -> int:
    """Length of the longest common beginning, at most `limit`."""
    limit = min(limit, len(a))
    pairs = islice(zip(a, b, strict=False), limit)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), limit)
