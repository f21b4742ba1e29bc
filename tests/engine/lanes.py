"""Drafters that a lane's process can build: functions by name, of targets without large weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine.lane_process import ProcessLane
from dspark.types import Draft
from tests.drafters import tiny_drafters, tiny_v4
from tests.engine.oracle import SampledDrafter
from tests.engine.table import TableDecoder, V, table

V4_KINDS = {"v4 mtp": tiny_v4.MTP, "v4 dspark": tiny_v4.dspark(tiny_v4.config())}
SLOTS = 8


def table_target() -> TableDecoder:
    return TableDecoder(table(0, 0.8), num_slots=SLOTS, max_context=256)


def v4_target(kind: str) -> tiny_v4.DeepseekV4:
    return tiny_v4.target(V4_KINDS[kind], num_slots=SLOTS)


def trained(form: str, k: int | None = None) -> Drafter:
    """A random drafter of any form for `table_target`."""
    return tiny_drafters.drafter(table_target(), form, num_draft_tokens=k)  # type: ignore[arg-type]


def partial_trained(form: str = "vanilla", k: int | None = None) -> Callable[[], Drafter]:
    return partial(trained, form, k)


def v4(kind: str, k: int | None = None) -> Drafter:
    return tiny_v4.drafter(v4_target(kind), V4_KINDS[kind], k)


class Sampled(SampledDrafter):
    """Draws from a table and can do so ahead; its context is the last token."""

    ahead = True


def sampled(block: int = 4, seed: int = 2, scale: float = 1.0) -> Drafter:
    return Sampled(torch.softmax(table(seed, scale), 1), block)


class Failing(Drafter):
    """Raises, or ends its process, when it meets a token."""

    ahead = True

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        for c in contexts:
            if c.tokens[-1] == 6:
                raise RuntimeError("six")
            if c.tokens[-1] == 7:
                os._exit(3)
        return [Draft((c.tokens[-1],) * min(self.cap, c.max_tokens)) for c in contexts]

    def observe(self, committed: Sequence[Committed], features: object) -> None:
        pass


def failing() -> Drafter:
    return Failing(table_target())


class Sleeping(Failing):
    """Never answers behind token 6."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        if any(c.tokens[-1] == 6 for c in contexts):
            time.sleep(600)
        return super().propose(contexts)


def sleeping() -> Drafter:
    return Sleeping(table_target())


def impossible() -> Drafter:
    raise RuntimeError("there is no such drafter")


def process(build: Callable[[], Drafter], vocab: int = V) -> ProcessLane:
    lane = ProcessLane(build, num_slots=SLOTS, vocab_size=vocab, max_draft=6)
    lane.wait()
    return lane


def near(block: int, far: float) -> Drafter:
    """Draws from the law of `table_target` but for noise: right most of the time."""
    return Sampled(torch.softmax(table(0, 0.8) + table(1, far), 1), block)
