"""The length of a block is what would have paid for blocks of the past."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.schedule.admission import Drafts
from dspark.schedule.blocks import EVERY, LEAST, Blocks
from dspark.schedule.cost import CostTable

CAP = 7


def table(row: float, token: float) -> CostTable:
    """A pass takes 10 ms and `row` for each row; drafting `token` for each token of a request."""
    passes = [(n, 0.0, 10 + row * n) for n in range(1, 257)]
    drafting = [(n, k, token * n * k) for n in (1, 32) for k in (1, CAP)]
    return CostTable.fit({"of": "a test"}, passes, drafting, [(1, 0.5), (32, 0.5)])


def whole(requests: int, chance: float, pinned: bool = False) -> Drafts:
    rows = [[chance] * CAP] * requests
    return Drafts.of(list(range(requests)), rows, pinned=[pinned] * requests)


def taught(cost: CostTable, chance: float, requests: int = LEAST) -> Blocks:
    blocks = Blocks(cost)
    assert blocks.length(requests, CAP) == CAP, "nothing is known yet"
    blocks.observe(whole(requests, chance), CAP, CAP)
    return blocks


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(("row", "token"), [(0.3, 0.2), (0.05, 0.01), (1.0, 0.5)])
@pytest.mark.parametrize("requests", [1, 4, 16])
def test_it_is_the_best_length_by_the_table(
    chance: float, row: float, token: float, requests: int
) -> None:
    cost = table(row, token)
    found = taught(cost, chance).length(requests, CAP)

    def rate(k: int) -> float:
        """All drafts are alike: the best is one count for all, k of them paid for."""
        tokens = requests * np.cumsum([1.0, *np.cumprod([chance] * k)])
        ms = [cost.round_ms(requests * (1 + v), requests=requests, block=k) for v in range(k + 1)]
        return float((tokens / ms).max())

    rates = [rate(k) for k in range(1, CAP + 1)]
    assert rates[found - 1] > 0.97 * max(rates)


def test_free_drafts_are_drafted_whole() -> None:
    assert taught(table(0.3, 0.0), 0.5).length(8, CAP) == CAP


def test_without_the_price_of_shorter_blocks_they_are_whole() -> None:
    passes = [(n, 0.0, 10.0 + n) for n in range(1, 65)]
    cost = CostTable.fit({}, passes, [(n, CAP, 2.0 * n) for n in (1, 8)])
    assert taught(cost, 0.3).length(8, CAP) == CAP


def test_a_whole_block_comes_back_now_and_then() -> None:
    blocks = taught(table(1.0, 0.5), 0.3)
    asked = []
    for _ in range(3 * (EVERY + 1)):
        k = blocks.length(8, CAP)
        asked.append(k)
        rows = [[0.3] * k] * 8
        blocks.observe(Drafts.of(list(range(8)), rows), k, CAP)
    assert asked[0] < CAP
    assert [i for i, k in enumerate(asked) if k == CAP] == [EVERY - 1, 2 * EVERY, 3 * EVERY + 1]


def test_pinned_drafts_and_short_ones_teach_nothing() -> None:
    blocks = Blocks(table(1.0, 0.5))
    blocks.observe(whole(32, 0.3, pinned=True), CAP, CAP)
    blocks.observe(Drafts.of([0], [[0.3] * 2]), CAP, CAP)  # a text that had room for two
    assert blocks.length(8, CAP) == CAP


def test_one_token_is_no_choice() -> None:
    blocks = Blocks(table(1.0, 0.5))
    blocks.observe(Drafts.of(list(range(LEAST)), [[0.1]] * LEAST), 1, 1)
    assert blocks.length(8, 1) == 1
