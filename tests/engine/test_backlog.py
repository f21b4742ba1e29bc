"""Committed rows wait for the next draft, in order, and not for ever."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine.backlog import ENOUGH, SMALL, Backlog
from dspark.engine.failsafe import Failsafe
from dspark.types import Draft, SamplingParams


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


def ask(drafter: Failsafe, *slots: int) -> list[int]:
    """Ask for drafts in these slots; those it was known enough of."""
    contexts = [DraftContext(s, (0,), SamplingParams(), 1, np.random.default_rng(0)) for s in slots]
    drafter.propose(contexts)
    return [c.slot for c in drafter.known(contexts)]


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
    ask(drafter, 0, 1)
    assert listener.told == [(0, 0, (5, 6), [0.0, 1.0]), (1, 9, (7, 8, 9), [2.0, 4.0, 5.0])]
    ask(drafter, 0, 1)
    assert len(listener.told) == 2


def test_only_those_who_are_asked_about_are_caught_up_with(
    heard: tuple[Failsafe, Listener],
) -> None:
    drafter, listener = heard
    drafter.observe([Committed(0, 0, (5,), 0), Committed(1, 0, (6,), 1)], rows(0, 1))
    assert ask(drafter, 1) == [1]
    assert [t[0] for t in listener.told] == [1]
    assert ask(drafter, 0) == [0]
    assert [t[0] for t in listener.told] == [1, 0]


def test_enough_rows_are_told_unasked(heard: tuple[Failsafe, Listener]) -> None:
    """Of one slot; the others go on waiting."""
    drafter, listener = heard
    drafter.observe([Committed(1, 0, (9,), 0)], rows(0))
    for i in range(ENOUGH - 1):
        drafter.observe([Committed(3, i, (i,), 0)], rows(i))
    assert not listener.told
    drafter.observe([Committed(3, ENOUGH - 1, (0,), 0)], rows(1))
    assert [(t[0], t[1], len(t[2])) for t in listener.told] == [(3, 0, ENOUGH)]
    ask(drafter, 1, 3)
    assert [t[0] for t in listener.told] == [3, 1]


def test_a_slot_that_begins_anew(heard: tuple[Failsafe, Listener]) -> None:
    """Released: what waited is forgotten. Not released: it is told first, never mixed."""
    drafter, listener = heard
    drafter.observe([Committed(0, 4, (1,), 0)], rows(0))
    drafter.release(0)
    drafter.observe([Committed(0, 0, (2,), 0)], rows(1))
    drafter.observe([Committed(0, 0, (3, 4), 0)], rows(2, 3))
    ask(drafter, 0)
    assert [t[:3] for t in listener.told] == [(0, 0, (2,)), (0, 0, (3, 4))]


def test_a_failure_loses_all_who_waited(heard: tuple[Failsafe, Listener]) -> None:
    drafter, listener = heard
    listener.observe = lambda *_: 1 / 0  # type: ignore[assignment]
    drafter.observe([Committed(0, 4, (1,), 0)], rows(0))
    drafter.observe([Committed(1, 4, (1,), 0)], rows(0))
    assert ask(drafter, 0, 1) == []
    assert drafter.failures == 1 and drafter._lost == {0, 1}


def test_of_a_text_that_others_begin_like_the_beginning_is_told(
    heard: tuple[Failsafe, Listener],
) -> None:
    """The text itself goes on, and loses no row; what waited in the new slot is gone."""
    drafter, listener = heard
    listener.reuse = lambda source, slot, length: length  # type: ignore[method-assign]
    drafter.observe([Committed(2, 0, (9, 9), 0)], rows(8, 9))
    drafter.observe([Committed(0, 0, (1, 2, 3), 1)], rows(7, 0, 1, 2, 3))
    drafter.observe([Committed(0, 3, (4,), 0)], rows(3))
    assert drafter.reuse(0, 2, 2) == 2
    assert listener.told == [(0, 0, (1, 2), [0.0, 1.0])]
    assert drafter.reuse(0, 1, 2) == 2 and len(listener.told) == 1, "told already"
    drafter.observe([Committed(2, 2, (5,), 0)], rows(5))
    ask(drafter, 0, 2)
    assert listener.told[1:] == [(0, 2, (3, 4), [2.0, 3.0]), (2, 2, (5,), [5.0])]


def test_a_text_that_begins_again_in_its_own_slot(heard: tuple[Failsafe, Listener]) -> None:
    drafter, listener = heard
    listener.reuse = lambda source, slot, length: length  # type: ignore[method-assign]
    drafter.observe([Committed(0, 0, (1, 2, 3), 0)], rows(0, 1, 2))
    assert drafter.reuse(0, 0, 1) == 1
    drafter.observe([Committed(0, 1, (7,), 0)], rows(7))
    ask(drafter, 0)
    assert listener.told == [(0, 0, (1,), [0.0]), (0, 1, (7,), [7.0])]


def test_a_beginning_that_could_not_be_told_is_not_gone_on_from(
    heard: tuple[Failsafe, Listener],
) -> None:
    drafter, listener = heard
    listener.observe = lambda *_: 1 / 0  # type: ignore[assignment]
    drafter.observe([Committed(0, 0, (1, 2, 3), 0)], rows(0, 1, 2))
    assert drafter.reuse(0, 1, 2) == 0
    assert ask(drafter, 0) == [] and drafter.failures == 1


@pytest.mark.parametrize(("size", "kept"), [(SMALL, SMALL), (SMALL + 1, 1)])
def test_small_passes_are_kept_whole_and_large_ones_are_not(size: int, kept: int) -> None:
    """Nothing is copied in plain rounds; prompt chunks of others are not kept alive."""
    backlog, features = Backlog(), torch.zeros(size, 8)
    assert backlog.add([Committed(0, 0, (1,), 3)], features) == []
    assert backlog._rows[0][0][1].untyped_storage().nbytes() == kept * 8 * 4
    assert backlog.waiting == {0: 1}
