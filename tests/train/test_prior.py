"""The Markov head's start: the target's own bigram law, as well as its rank allows."""

from __future__ import annotations

import torch

from dspark.models.target import Segment, pack
from dspark.train.prior import bigram_law, low_rank
from tests.tiny import target

PREFIX = (3, 4)


def test_the_law_is_what_the_target_says_behind_prefix_and_token() -> None:
    model = target(num_slots=3)
    tokens, columns = torch.tensor([9, 200, 9, 17, 0]), torch.tensor([1, 5, 77])
    seen: list[tuple[int, int]] = []
    law = bigram_law(model, PREFIX, tokens, columns, lambda a, b: seen.append((a, b)))
    assert law.shape == (5, 3)
    for row, token in zip(law, tokens.tolist(), strict=True):
        out = model.forward(pack([Segment(0, 0, (*PREFIX, token), 1)]))
        wanted = torch.log_softmax(out.logits[0], -1)[columns]
        torch.testing.assert_close(row.float(), wanted, atol=2e-2, rtol=1e-3)
    assert seen == [(3, 5), (5, 5)]
    whole = bigram_law(model, PREFIX, tokens, None)
    torch.testing.assert_close(whole.float().exp().sum(1), torch.ones(5), atol=1e-2, rtol=0)


def acceptance(law: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    q = torch.softmax(w1 @ w2.T, -1)
    return torch.minimum(law.float().exp(), q).sum(1)


def test_a_law_of_low_rank_comes_back() -> None:
    g = torch.Generator().manual_seed(0)
    law = torch.log_softmax(torch.randn(60, 5, generator=g) @ torch.randn(5, 40, generator=g), -1)
    counts = torch.randint(0, 100, (60,), generator=g)
    before = torch.random.get_rng_state()
    w1, w2 = low_rank(law, counts, 8)
    assert torch.equal(before, torch.random.get_rng_state())
    assert w1.shape == (60, 8) and w2.shape == (40, 8)
    assert 0.5 < float(w1.std()) < 2
    assert float(acceptance(law, w1, w2).min()) > 0.999


def test_more_rank_is_closer_and_rank_beyond_the_matrix_is_allowed() -> None:
    model = target(num_slots=8)
    law = bigram_law(model, PREFIX, torch.arange(50), torch.arange(30))
    law = torch.log_softmax(law.float(), -1)
    counts = torch.ones(50)
    found = [float(acceptance(law, *low_rank(law, counts, r)).mean()) for r in (1, 4, 16, 64)]
    assert found == sorted(found)
    assert found[-1] > 0.999
