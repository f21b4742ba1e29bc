"""The accepted length that a drafter will have when it serves, from text alone.

The mean over anchors is not it: a round that accepts much skips the easy anchors behind it, so
serving meets the hard ones more often. The text says how it goes. If x was drawn from p behind a
draft from q, then, given x, the draft was accepted with probability

    P(accepted | x) = min(p, q)(x) / p(x) = min(1, q(x) / p(x))            (temperature 1)

and greedily it was accepted if it is the most probable token of q. So from the first anchor of a
text, the probability of starting a round at every later one follows step by step, and their sum is
the expected number of rounds. Accepted length = tokens behind the first / rounds, bonus included,
as `Stats` counts it.

It holds for text that was drawn at the temperature asked for, verified in whole blocks. Not
promised: the same value on prompts of another kind.

Shape suffixes: B blocks, K slots.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dspark.train.anchors import Pack
from dspark.train.step import TrainStep


@torch.no_grad()
def chances(step: TrainStep, pack: Pack, greedy: bool) -> Tensor:
    """[B, K] probability that draft k is accepted, given that those before it were and given the
    text; 0 behind its end."""
    h_BKD = step._hidden(pack)
    labels_BK = step.teacher.columns(pack.labels)
    known_BK = (labels_BK >= 0) & pack.valid
    column_BK1 = labels_BK.clamp(min=0)[..., None]
    found = []
    for rows in torch.split(torch.arange(len(h_BKD), device=h_BKD.device), step.chunk):
        logits_CKV = step._logits(h_BKD[rows], pack.previous[rows])[0].float()
        column = column_BK1[rows]
        if greedy:
            found.append((logits_CKV.argmax(-1, keepdim=True) == column)[..., 0].float())
            continue
        log_q = torch.log_softmax(logits_CKV, -1).gather(-1, column)[..., 0]
        at = pack.teachers[rows]
        p = step.teacher.probabilities(pack.final[at.flatten()], pack.log_z[at.flatten()])
        p_x = p.view(*at.shape, -1).gather(-1, column)[..., 0]
        found.append((log_q.exp() / p_x.clamp(min=1e-30)).clamp(max=1))
    return torch.cat(found) * known_BK


def expected_rounds(chances_BK: Tensor) -> float:
    """Rounds that a text takes, from the chances at all its anchors in order: B tokens are emitted
    behind the first anchor."""
    total, slots = chances_BK.shape
    prefix = torch.cumprod(chances_BK.double(), 1)
    # ends[i, j]: probability that a round at anchor i accepts exactly j drafts
    ends = torch.cat([torch.ones(total, 1, dtype=torch.float64), prefix.cpu()], 1)
    ends[:, :slots] -= ends[:, 1:].clone()
    visits = torch.zeros(total + slots + 1, dtype=torch.float64)
    visits[0] = 1
    for i in range(total):
        visits[i + 1 : i + slots + 2] += visits[i] * ends[i]
    return float(visits[:total].sum())


def accepted_length(texts: Iterable[Tensor]) -> float | None:
    """Tokens per round over texts, each given by its `chances`; None without any."""
    tokens, rounds = 0, 0.0
    for chances_BK in texts:
        tokens += len(chances_BK)
        rounds += expected_rounds(chances_BK)
    return tokens / rounds if rounds else None
