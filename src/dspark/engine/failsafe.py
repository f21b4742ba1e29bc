"""A drafter that may fail without harm.

A drafter is a guess about speed; a text must not be lost because one raised. `Failsafe` stands
between engine and drafter. Where `propose` raises, the round goes on with empty drafts, which is
plain decoding. Where `observe` raises, the drafter missed rows of the sequences of that pass: it is
not asked about them again until their slots are given to others, since its context has a hole. Each
failure is counted, the first one is logged with its traceback.

It is also where the rows of a patient drafter wait while no draft is wanted (`backlog`).

Assertions pass through: they say that the engine broke its contract with the drafter, a bug that
shall be seen and not survived.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine.backlog import Backlog
from dspark.types import Draft

log = logging.getLogger(__name__)


class Failsafe(Drafter):
    """Passes everything on to `inner`; see the module docstring."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.cap, self.feature_layers = inner.cap, inner.feature_layers
        self._failures = 0
        self._lost: set[int] = set()
        self._backlog = Backlog()

    @property
    def failures(self) -> int:  # type: ignore[override]
        return self._failures + self.inner.failures

    def known(self, contexts: Sequence[DraftContext]) -> list[DraftContext]:
        """Those that `inner` may be asked about: it has been told of all their rows."""
        self._tell([c.slot for c in contexts])
        return [c for c in contexts if c.slot not in self._lost]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        known = self.known(contexts)
        try:
            found = self.inner.propose(known) if known else []
            drafts = dict(zip((c.slot for c in known), found, strict=True))
        except AssertionError:
            raise
        except Exception as e:
            self._failed("propose", e)
            drafts = {}
        return [drafts.get(c.slot, Draft()) for c in contexts]

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        # Rows are told also of lost sequences where a slot begins anew: position 0 is no hole.
        self._lost -= {c.slot for c in committed if c.start == 0}
        told = [c for c in committed if c.slot not in self._lost]
        if features is None or not self.inner.patient:
            self._observe(told, features)
            return
        self._tell([c.slot for c in told if not self._backlog.continues(c)])
        self._tell(self._backlog.add(told, features))

    def _tell(self, slots: Sequence[int]) -> None:
        """Nothing waits in these slots any more."""
        late = [slot for slot in slots if slot in self._backlog.waiting]
        if late:
            self._observe(*self._backlog.take(late))

    def _observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        try:
            if committed:
                self.inner.observe(committed, features)
        except AssertionError:
            raise
        except Exception as e:
            self._failed("observe", e)
            self._lost |= {c.slot for c in committed}

    def reuse(self, source: int, slot: int, length: int) -> int:
        # Of a text that others begin like, its beginning is told and the rest goes on waiting.
        behind = self._backlog.set_aside(source, length)
        self._tell([source])
        if source in self._lost:
            return 0
        self._backlog.put_back(source, behind)
        try:
            start = self.inner.reuse(source, slot, length)
        except AssertionError:
            raise
        except Exception as e:
            self._failed("reuse", e)
            return 0
        if start:
            self._backlog.drop(slot)
            self._lost.discard(slot)
        return start

    def release(self, slot: int) -> None:
        self._backlog.drop(slot)
        try:
            self.inner.release(slot)
        except AssertionError:
            raise
        except Exception as e:
            self._failed("release", e)

    def _failed(self, where: str, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning(
                "the drafter failed in %s (%s: %s): requests go on without drafts where it does;"
                " further failures are counted and not reported",
                where,
                type(error).__name__,
                error,
                exc_info=error,
            )
