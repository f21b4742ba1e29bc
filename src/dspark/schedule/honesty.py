"""Confidences set right by what came of them.

A confidence head was trained, and perhaps calibrated, for one law of texts and one temperature. On
greedy texts the same head is too modest: the likeliest token is accepted more often than a drawn
one. A schedule that believes it verifies too little. One number repairs most of that: what is added
to the log-odds of every confidence, moved after each round by the surprise of its verdicts:

    logit(c') = logit(c) + shift
    shift += sum of (accepted - c') / (DEPTH + sum of c' (1 - c'))       over the drafts tried

That is Newton's step on the likelihood of the verdicts, against DEPTH of information from before:
about a hundred verdicts, so it follows what the present requests are like, and a round of many
requests moves it no further than it knows.

The shift is made of rounds that are over, so no text changes its law (`admission`). It is made of
other requests' rounds, too: pinned requests, whose lengths must not depend on their company, and
policies that look at a draft alone do without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dspark.schedule.admission import Array, Drafts

DEPTH = 20.0
"""What the past counts for, in units of c (1 - c): a verdict that could go either way has 1/4."""
LIMIT = 3.0
"""The shift stays within this, in units of log-odds."""


class Honesty:
    """The running correction of one drafter under one scheduler."""

    def __init__(self) -> None:
        self.shift = 0.0

    def applied(self, drafts: Drafts) -> Drafts:
        """The same drafts with corrected survivals, but for pinned requests."""
        if not self.shift or not drafts.survival.size:
            return drafts
        c = conditional(drafts.survival)
        factor = math.exp(self.shift)
        corrected = np.cumprod(c * factor / (1 + c * (factor - 1)), axis=0)
        return replace(drafts, survival=np.where(drafts.pinned, drafts.survival, corrected))

    def observe(self, drafts: Drafts, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """The verdicts of one round on drafts as they came out of `applied`: verified and accepted
        ones [R]. A draft is tried if it was verified and all before it were accepted."""
        if not drafts.survival.size:
            return
        position = np.arange(len(drafts.survival))[:, None]
        v, a = np.array(verified, np.intp), np.array(accepted, np.intp)
        tried = (position < np.minimum(a + 1, v)) & ~drafts.pinned
        c = conditional(drafts.survival)[tried]
        right = np.minimum(a, v)[~drafts.pinned].sum()  # all of the tried ones but the last
        step = float(right - c.sum()) / (DEPTH + float(c @ (1 - c)))
        self.shift = min(max(self.shift + step, -LIMIT), LIMIT)


def conditional(survival: Array) -> Array:
    """[k, R] c_j of a_j; 0 behind a survival of 0."""
    before = np.concatenate((np.ones((1, survival.shape[1])), survival[:-1]))
    out: Array = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
    return np.minimum(out, 1.0)
