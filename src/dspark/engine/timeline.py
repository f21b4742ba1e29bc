"""What both lanes did when, for a picture of them."""

from __future__ import annotations

from typing import Literal

from dspark.types import Span


class Timeline:
    """Collects spans while it hangs on an engine; a draft's kind is known behind its verdict."""

    def __init__(self) -> None:
        self._verified: list[Span] = []
        self._drafted: list[tuple[int, float, float]] = []
        self._kinds: dict[int, Literal["hit", "miss"]] = {}

    def verified(self, start: float, end: float) -> None:
        """A pass of the target."""
        self._verified.append(Span("verify", start, end))

    def drafted(self, ticket: int, start: float, end: float) -> None:
        """The lane worked on a batch."""
        self._drafted.append((ticket, start, end))

    def name(self, ticket: int, kind: Literal["hit", "miss"]) -> None:
        """A batch was drafted ahead, and used or not."""
        self._kinds[ticket] = kind

    def take(self) -> list[Span]:
        """The spans since the last call, which are forgotten here. To be called between rounds:
        the verdict on what was drafted ahead has been named by then."""
        found = self.spans
        if self._drafted:
            # The lane reports in the order in which it was asked: nothing older will come.
            newest = max(ticket for ticket, _, _ in self._drafted)
            self._kinds = {t: kind for t, kind in self._kinds.items() if t > newest}
        self._verified, self._drafted = [], []
        return found

    @property
    def spans(self) -> list[Span]:
        """By their beginnings."""
        drafted = [Span(self._kinds.get(t, "fresh"), a, b) for t, a, b in self._drafted]
        return sorted([*self._verified, *drafted], key=lambda s: s.start)
