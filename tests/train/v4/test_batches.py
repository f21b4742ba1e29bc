"""Batches of documents of like length."""

from __future__ import annotations

import numpy as np

from dspark.train.batches import Place
from dspark.train.v4.batches import Buckets

LENGTHS = np.random.default_rng(0).integers(5, 300, 300).tolist()


def test_an_epoch_has_every_document_once_in_batches_of_one_size() -> None:
    order = Buckets(LENGTHS, range(0, 300, 2), 1024, 0)
    for epoch in range(2):
        batches = order.epoch(epoch)
        assert sorted(i for b in batches for i in b) == list(range(0, 300, 2))
        padded = [len(b) * -(-max(LENGTHS[i] for i in b) // 32) * 32 for b in batches]
        assert max(padded) <= 1024
        assert sum(LENGTHS[i] for i in range(0, 300, 2)) > 0.75 * sum(padded)
    assert order.epoch(0) != order.epoch(1)


def test_places_lead_through_all_epochs_and_any_place_can_be_the_first() -> None:
    order = Buckets(LENGTHS, range(300), 1024, 0)
    place, seen = Place(), []
    for _ in range(order.total_steps(2)):
        seen.append(place)
        items, place = order.batch(place)
        assert {i.epoch for i in items} == {seen[-1].epoch}
    assert place == Place(2)
    middle = seen[len(seen) // 2]
    assert Buckets(LENGTHS, range(300), 1024, 0).batch(middle) == order.batch(middle)
    assert Buckets(LENGTHS, range(300), 1024, 1).epoch(0) != order.epoch(0)
    assert Buckets([400], [0], 256, 0).epoch(0) == [[0]], "one too long is a batch of its own"
