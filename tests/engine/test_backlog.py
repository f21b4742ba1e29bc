"""Committed rows wait for the next draft, in order, and not for ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine.backlog import ENOUGH, Backlog
from dspark.engine.failsafe import Failsafe
from dspark.types import Draft


class Listener(Drafter):
    """Notes (slot, start, tokens, first column of the features) of what it is told."""

    cap, feature_layers, patient = 2, (0,), True

    def __init__(self) -> None:
        self.told: list[tuple[int, int, tuple[int, ...], list[float]]] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [Draft()] * len(contexts)

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        assert features is not None
        for c in committed:
            rows = features[c.first_row : c.first_row + len(c.tokens), 0].tolist()
            self.told.append((c.slot, c.start, c.tokens, rows))


def rows(*values: float) -> Tensor:
    return torch.tensor(values)[:, None].repeat(1, 3)


@pytest.fixture
def heard() -> tuple[Failsafe, Listener]:
    listener = Listener()
    return Failsafe(listener), listener


def test_rows_of_a_slot_are_told_in_one_lump(heard: tuple[Failsafe, Listener]) -> None:
    """Rejected rows of the passes lie between them and are not told."""
    drafter, listener = heard
    drafter.observe([Committed(0, 0, (5, 6), 0), Committed(1, 9, (7,), 2)], rows(0, 1, 2, 3))
    drafter.observe([Committed(1, 10, (8, 9), 0, 3, 1)], rows(4, 5, 6, 7))
    assert not listener.told
    drafter.propose([])
    assert listener.told == [(0, 0, (5, 6), [0.0, 1.0]), (1, 9, (7, 8, 9), [2.0, 4.0, 5.0])]
    drafter.propose([])
    assert len(listener.told) == 2


def test_enough_rows_are_told_unasked(heard: tuple[Failsafe, Listener]) -> None:
    """Of one slot; the others go on waiting."""
    drafter, listener = heard
    drafter.observe([Committed(1, 0, (9,), 0)], rows(0))
    for i in range(ENOUGH - 1):
        drafter.observe([Committed(3, i, (i,), 0)], rows(i))
    assert not listener.told
    drafter.observe([Committed(3, ENOUGH - 1, (0,), 0)], rows(1))
    assert [(t[0], t[1], len(t[2])) for t in listener.told] == [(3, 0, ENOUGH)]
    drafter.propose([])
    assert [t[0] for t in listener.told] == [3, 1]


def test_a_slot_that_begins_anew(heard: tuple[Failsafe, Listener]) -> None:
    """Released: what waited is forgotten. Not released: it is told first, never mixed."""
    drafter, listener = heard
    drafter.observe([Committed(0, 4, (1,), 0)], rows(0))
    drafter.release(0)
    drafter.observe([Committed(0, 0, (2,), 0)], rows(1))
    drafter.observe([Committed(0, 0, (3, 4), 0)], rows(2, 3))
    drafter.propose([])
    assert [t[:3] for t in listener.told] == [(0, 0, (2,)), (0, 0, (3, 4))]


def test_a_failure_loses_all_who_waited(heard: tuple[Failsafe, Listener]) -> None:
    drafter, listener = heard
    listener.observe = lambda *_: 1 / 0  # type: ignore[assignment]
    drafter.observe([Committed(0, 4, (1,), 0)], rows(0))
    drafter.observe([Committed(1, 4, (1,), 0)], rows(0))
    drafter.propose([])
    assert drafter.failures == 1 and drafter._lost == {0, 1}


def test_a_pass_is_not_kept_alive() -> None:
    backlog, features = Backlog(), torch.zeros(256, 8)
    backlog.add([Committed(0, 0, (1,), 0)], features)
    assert backlog._features[0][0].untyped_storage().nbytes() == 8 * 4
    assert backlog.waiting == {0: 1} and not backlog.full
