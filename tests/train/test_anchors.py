"""Anchors and packs: who predicts what, and what lies behind the end weighs nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.train.anchors import choose, draw_unseen, pack_blocks
from dspark.train.features import Features

D, LAYERS = 4, 3


def features(length: int, start: int, first: int) -> Features:
    """Tokens first, first + 1, ...; row i of layer j holds first + i + 1000 j."""
    rows = torch.arange(first, first + length)
    layers = rows[:, None, None] + 1000 * torch.arange(LAYERS)[None, :, None]
    hidden = layers.expand(length, LAYERS, D).reshape(length, -1).half()
    return Features(rows, start, hidden, rows.float())


def test_anchors_are_answer_tokens_with_one_behind_them() -> None:
    f = features(9, 4, 0)
    assert choose(f, None, None).tolist() == [4, 5, 6, 7]
    assert choose(features(5, 4, 0), None, None).tolist() == []
    assert choose(features(5, 5, 0), 3, np.random.default_rng(0)).tolist() == []


def test_a_limit_draws_without_replacement_and_by_the_generator() -> None:
    f = features(60, 10, 0)
    drawn = [choose(f, 7, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    for a in drawn:
        assert len(set(a.tolist())) == 7 and a.tolist() == sorted(a.tolist())
        assert int(a.min()) >= 10 and int(a.max()) <= 58
    often = [choose(f, 7, np.random.default_rng(s)) for s in range(200)]
    assert torch.cat(often).unique().tolist() == list(range(10, 59)), "every one is possible"


def test_a_pack_of_two_sequences() -> None:
    f, g = features(6, 3, 10), features(5, 2, 40)
    pack = pack_blocks([f, g], [torch.tensor([3, 4]), torch.tensor([2])], 3, [2, 0], D)
    assert pack.tokens.tolist() == [10, 11, 12, 13, 14, 15, 40, 41, 42, 43, 44]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert pack.anchors.tolist() == [3, 4, 8]
    spans = [(d.first_row, d.last_row, d.first_block, d.last_block) for d in pack.documents]
    assert spans == [(0, 6, 0, 2), (6, 11, 2, 3)]
    assert pack.previous.tolist() == [[13, 14, 15], [14, 15, 15], [42, 43, 44]]
    assert pack.labels[pack.valid].tolist() == [14, 15, 15, 43, 44]
    assert pack.valid.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert pack.teachers.tolist() == [[3, 4, 5], [4, 5, 5], [8, 9, 10]]
    assert torch.equal(pack.tokens[pack.teachers], pack.previous)
    # Columns in the order asked for; the last stored layer is the teacher's.
    assert pack.context.dtype == pack.final.dtype == torch.float32
    assert pack.context[7].tolist() == [2041.0] * D + [41.0] * D
    assert pack.final[7].tolist() == [2041.0] * D


def test_slots_never_cross_into_the_next_sequence() -> None:
    f, g = features(6, 3, 10), features(6, 3, 40)
    pack = pack_blocks([f, g], [torch.tensor([4]), torch.tensor([3])], 5, [0], D)
    assert int(pack.teachers[0].max()) < 6 and int(pack.labels[0].max()) < 40
    assert pack.valid[0].tolist() == [True, False, False, False, False]


def test_an_anchor_on_the_last_row_is_a_block_without_a_valid_slot() -> None:
    pack = pack_blocks([features(5, 5, 0)], [torch.tensor([4])], 3, [0], D)
    assert not pack.valid.any() and pack.teachers.tolist() == [[4, 4, 4]]


def test_how_many_features_a_pack_lacks() -> None:
    """None, or as often as asked 1 to the block's length, each alike."""
    rng = np.random.default_rng(0)
    assert {draw_unseen(0.0, 4, rng) for _ in range(50)} == {0}
    drawn = np.array([draw_unseen(0.5, 4, rng) for _ in range(4000)])
    counts = np.bincount(drawn, minlength=5) / len(drawn)
    assert counts == pytest.approx([0.5, *[0.125] * 4], abs=0.03)
