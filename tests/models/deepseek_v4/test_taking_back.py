"""Rejected tokens leave no trace: nothing is rolled back, and nothing needs to be."""

from __future__ import annotations

import random

import pytest
import torch

from dspark.errors import ResourceError
from dspark.models.deepseek_v4.attention import best
from dspark.models.target import Segment, pack
from tests.models.deepseek_v4.tiny import (
    ALL_KINDS,
    CSA,
    HCA,
    SWA,
    expected,
    oracle,
    run,
    target,
    tokens,
)

KINDS = {"SWA": (SWA, SWA), "CSA": (CSA, CSA), "HCA": (HCA, HCA), "all": ALL_KINDS}
LONGEST = 80
CASES = [(n, right) for n in range(1, 9) for right in range(n + 1)]
"""Every number of guesses with every number of them right: 44 sequences in one batch."""


@pytest.mark.parametrize(("kind", "path"), [*((k, "kernels") for k in KINDS), ("all", "torch")])
def test_any_rejects_after_every_prefix(kind: str, path: str) -> None:
    """At each prefix length, every case verifies its guesses, accepts its own number of them and
    goes on with a block of one to nine tokens; the logits are those of never having guessed."""
    model = oracle(KINDS[kind])
    ids = tokens(LONGEST + 20)
    wanted = expected(model, ids)
    ours = target(model, num_slots=len(CASES), max_block=20, max_context=128, path=path)
    slots = range(len(CASES))
    junk = tokens(8, seed=5)
    ours.forward(pack([Segment(s, 0, ids[:1], 0) for s in slots]))
    for prefix in range(1, LONGEST + 1):
        # The token at `prefix` is the anchor, the guesses stand behind it.
        verify, go_on, rows = [], [], []
        for slot, (n, right) in enumerate(CASES):
            end = prefix + 1 + right
            guesses = ids[prefix + 1 : end] + junk[: n - right]
            verify.append(Segment(slot, prefix, (ids[prefix], *guesses), n + 1))
            size = 1 + (slot + prefix) % 9
            go_on.append(Segment(slot, end, ids[end : end + size], size))
            rows += range(end, end + size)
        ours.forward(pack(verify))
        got = ours.forward(pack(go_on)).logits
        torch.testing.assert_close(got, wanted[rows], atol=1e-4, rtol=1e-4)
        # For the next prefix all are taken back to the anchor, further than any engine would.


@pytest.mark.parametrize(("window", "path"), [(8, "kernels"), (64, "kernels"), (8, "torch")])
def test_a_walk_on_the_tightest_ring(window: int, path: str) -> None:
    """Rounds of eight guesses and random accepts, where a block fills all room the ring has."""
    model = oracle(sliding_window=window)
    ids = tokens(260)
    wanted = expected(model, ids)
    ours = target(model, num_slots=3, max_block=8, path=path)
    rng = random.Random(window)
    at = [0, 0, 0]
    for _ in range(50):
        segments, rows, ends = [], [], []
        for slot, start in enumerate(at):
            right = rng.randrange(9)
            guesses = ids[start + 1 : start + 1 + right] + tokens(8 - right, seed=start)
            segments.append(Segment(slot, start, (ids[start], *guesses), 9))
            rows.append(right + 1)
            ends.append(start + right + 1)
        logits = ours.forward(pack(segments)).logits.view(3, 9, -1)
        for slot, (start, n) in enumerate(zip(at, rows, strict=True)):
            got = logits[slot, :n]
            torch.testing.assert_close(got, wanted[start : start + n], atol=1e-4, rtol=1e-4)
        at = [e if e < 240 else 0 for e in ends]


def test_going_back_too_far_is_refused() -> None:
    ours = target(oracle((SWA, CSA)), max_block=8)
    ids = tokens(60)
    run(ours, ids)
    run(ours, ids[52:], 52)
    with pytest.raises(ResourceError, match="at most 8"):
        run(ours, ids[51:52], 51)
    run(ours, ids[:5], 0)  # another text may always begin
    run(ours, ids[5:6], 5)


@pytest.mark.parametrize("k", [1, 3, 4, 5])
def test_equal_scores_are_chosen_from_the_left(k: int) -> None:
    """Whatever the row's length: what lies behind the visible part changes nothing."""
    row = torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0, 0.0])
    for extra in (0, 1, 7, 40, 200):
        scores = torch.cat([row, torch.full((extra,), -torch.inf)])
        wanted = sorted(range(6), key=lambda i: (-row[i], i))[:k]
        assert best(scores, k).nonzero()[:, 0].tolist() == sorted(wanted)


def test_fewer_visible_than_wanted_are_all_chosen() -> None:
    scores = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf]])
    assert best(scores, 3)[0, 0]


def test_ties_do_not_depend_on_company() -> None:
    """Two index heads make most scores exactly zero: still, single steps, blocks and a pass over
    everything choose alike. (`transformers` differs from itself here.)"""
    model = oracle((CSA, CSA), index_n_heads=2)
    ids = tokens(160)
    ours = target(model, max_block=512)
    whole = run(ours, ids)
    steps = torch.cat([run(ours, ids[i : i + 1], i, 1) for i in range(160)])
    blocks = torch.cat([run(ours, ids[i : i + 7], i, 2) for i in range(0, 160, 7)])
    torch.testing.assert_close(steps, whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(blocks, whole, atol=1e-4, rtol=1e-4)
