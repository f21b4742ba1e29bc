"""Sampled text of two lanes has the target's law; four plausible shortcuts do not, and are seen.

The target is a Markov chain, so behind every pair of tokens the next one is drawn from a known row,
independently of all else: a text is hundreds of tests, of every kind of round. Drafts made
ahead come from another law than fresh ones, as older features make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dspark.drafters.base import DraftContext, Drafter
from dspark.engine import engine as engine_module
from dspark.engine.batch import Sequence as Running
from dspark.engine.blocks import Blocks
from dspark.engine.engine import Engine
from dspark.engine.lane import Lane
from dspark.engine.lane_thread import ThreadLane
from dspark.engine.pipeline import PipelinedEngine
from dspark.models.target import Segment
from dspark.sampling import draw, streams
from dspark.schedule.policy import Load
from dspark.schedule.scheduler import Scheduler
from dspark.types import Draft, Verdict
from tests.engine import lanes
from tests.engine.oracle import ByteTokenizer, request
from tests.engine.table import TableDecoder, V, table
from tests.engine.test_pipeline import Roomy, Tight

LAW = table(0, 1.0)
FRESH = torch.softmax(table(0, 1.0) + table(1, 0.6), 1)
OLD = torch.softmax(table(0, 1.0) + table(2, 1.2), 1)
SURE = torch.softmax(1.4 * LAW, 1)
LENGTH = 400
TOKENS = 2000
Engines = type[PipelinedEngine]


@pytest.fixture(autouse=True)
def _reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed, which is what the lanes draft ahead for, but the same every time."""
    number = count(100)
    monkeypatch.setattr(engine_module, "streams", lambda seed: streams(next(number)))


class Guesser(Drafter):
    """Draws from FRESH, and from OLD behind tokens in flight; sure of itself as q is."""

    ahead = True

    def __init__(self, block: int = 4, confident: bool = True, old: Tensor = OLD) -> None:
        self.cap, self._confident, self._old = block, confident, old

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._propose(c) for c in contexts]

    def _propose(self, c: DraftContext) -> Draft:
        q = self._old if c.unseen else FRESH
        walk, others = [c.tokens[-1]], []
        for _ in range(min(self.cap, c.max_tokens)):
            row = q[walk[-1]]
            walk.append(draw(row, c.rng.random()))
            others.append(int(row.index_fill(0, torch.tensor([walk[-1]]), 0.0).argmax()))
        # Causal: of the token in front, not of the token itself.
        sure = q[walk[:-1]].amax(1) if self._confident else None
        return Draft(tuple(walk[1:]), q[walk[:-1]], sure, tuple(others) if c.others else ())


def p_value(
    drafter: Drafter,
    *,
    engine: Engines = PipelinedEngine,
    lane: Callable[[Drafter], Lane] = Tight,
    verify: str = "all",
    slots: int = 1,
    tokens: int = TOKENS,
    kinds: dict[str, int] | None = None,
) -> float:
    """Chi-square of every token behind the one, and behind the two in front of it; the smaller of
    both p-values, corrected for the choice."""
    target = TableDecoder(LAW, num_slots=slots, max_context=LENGTH + 2)
    running = engine(target, lane(drafter), ByteTokenizer(), scheduler=Scheduler(verify))
    texts = -(-tokens // LENGTH)
    for i in range(texts):
        running.submit(request((i % V,), str(i), temperature=1.0, max_tokens=LENGTH))
    while running.has_work:
        running.step()
    seen = np.zeros((V, V, V))
    for i in range(texts):
        output = running.take_output(str(i))
        assert output is not None
        ids = np.array(output.token_ids)
        np.add.at(seen, (ids[:-2], ids[1:-1], ids[2:]), 1)
    if kinds is not None:
        counts = running.counts
        kinds |= {"hits": counts.ahead, "fresh": counts.fresh}
    law = torch.softmax(LAW.double(), 1).numpy()
    return min(1.0, 2 * min(chi_square(seen, law[None]), chi_square(seen.sum(0), law)))


def chi_square(seen: np.ndarray, law: np.ndarray) -> float:
    """Of rows of counts [..., V] against rows of a law; rows have their own totals."""
    wanted = seen.sum(-1, keepdims=True) * law
    large = wanted > 5
    statistic = (((seen - wanted) ** 2)[large] / wanted[large]).sum()
    # Small cells are left out, so a row loses its one constraint where any is.
    freedom = large.sum() - (large.all(-1) & (seen.sum(-1) > 0)).sum()
    return float(stats.chi2.sf(statistic, freedom))


class InThread(ThreadLane):
    """Its times seem to be those of `Tight`, so a run is the same every time."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter, torch.device("cpu"), torch.device("cpu"))

    def _report(self) -> None:
        while self._worked:
            ticket, *_ = self._worked.popleft()
            if self.on_work is not None:
                self.on_work(ticket, 0.0, Tight.seconds)


WAYS: dict[str, dict[str, object]] = {
    "coupled bonus": {},
    "one verified, tail reused": {"verify": "static:1"},
    "nothing verified, tail reused": {"verify": "static:0"},
    "threshold, tail reused": {"verify": "threshold:0.3"},
    "causal": {"verify": "causal"},
    "auto": {"verify": "auto"},
    "outcome cache": {"lane": Roomy},
    "outcome cache and tails": {"lane": Roomy, "verify": "static:1"},
    "ping-pong": {"slots": 4},
    "ping-pong, lagged": {"slots": 6, "verify": "lagged"},
    "coupled bonus, in a thread": {"lane": InThread},
    "nothing verified, tail reused, in a thread": {"lane": InThread, "verify": "static:0"},
    "ping-pong, in a thread": {"lane": InThread, "slots": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_law(way: str) -> None:
    kinds: dict[str, int] = {}
    options = WAYS[way]
    assert p_value(Guesser(2), kinds=kinds, **options) > 0.001  # type: ignore[arg-type]
    if "slots" not in options:
        assert kinds["hits"] > 50 and (kinds["fresh"] > 50 or "lane" in options or "tail" in way)


def test_the_law_without_confidences() -> None:
    assert p_value(Guesser(confident=False), verify="auto", lane=Roomy) > 0.001


@pytest.mark.parametrize("form", ["vanilla", "mtp"])
def test_the_law_with_trained_drafters(form: str) -> None:
    drafter = lanes.trained(form, 3 if form == "mtp" else None)
    assert p_value(drafter, tokens=600, verify="causal") > 0.001


# -- shortcuts that bias -------------------------------------------------------------------------


class FreshLaw(Guesser):
    """An old block is judged by the law that a fresh one would have had."""

    def _propose(self, c: DraftContext) -> Draft:
        draft = super()._propose(c)
        return replace(draft, probs=FRESH[[c.tokens[-1], *draft.tokens[:-1]]])


class Picky(Blocks):
    """A ready block is thrown away for what it says: its first token was not the likeliest."""

    def draft(self, name: str, length: int) -> Draft | None:
        found = super().draft(name, length)
        if found is None or found.probs is None:
            return found
        return found if found.tokens[0] == int(found.probs[0].argmax()) else None


class PickyEngine(PipelinedEngine):
    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._blocks = Picky(self.lane)


class ForcedBonus(PipelinedEngine):
    """The guess behind an accepted block is emitted, because a block stands behind it."""

    def _verify(
        self,
        sequences: list[Running],
        segments: list[Segment],
        drafts: list[Draft | None],
        logits: Tensor,
    ) -> list[Verdict | None]:
        verdicts = super()._verify(sequences, segments, drafts, logits)
        draft, verdict = drafts[0], verdicts[0]
        if draft and verdict and verdict.accepted + 1 == len(draft) == len(segments[0].tokens):
            verdicts[0] = replace(verdict, tokens=draft.tokens)
        return verdicts


class Shy(PipelinedEngine):
    """A draft is not verified because its own token was unlikely to be drawn."""

    def _propose(self, decoding: list[Running], load: Load) -> list[Draft]:
        return [
            d if d.probs is None or float(d.probs[0, d.tokens[0]]) > 0.3 else Draft()
            for d in super()._propose(decoding, load)
        ]


SHORTCUTS: dict[str, tuple[Drafter, Engines]] = {
    "an old block under a fresh law": (FreshLaw(2), PipelinedEngine),
    "a ready block discarded for its tokens": (Guesser(2, old=SURE), PickyEngine),
    "the guessed bonus forced": (Guesser(2), ForcedBonus),
    "a draft dropped for its own q": (Guesser(2), Shy),
}


# Fewer tokens would not show the second one.
@pytest.mark.parametrize("shortcut", SHORTCUTS)
def test_shortcuts_are_caught(shortcut: str) -> None:
    drafter, engine = SHORTCUTS[shortcut]
    assert p_value(drafter, engine=engine, tokens=4 * TOKENS) < 1e-6


def test_the_plain_loop_passes_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test would be of the table."""
    monkeypatch.setattr(PipelinedEngine, "step", Engine.step)
    assert p_value(Guesser()) > 0.001
