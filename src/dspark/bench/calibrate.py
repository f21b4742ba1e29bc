"""Fitting a drafter's calibration on texts that the engine really writes.

A confidence head says how likely each draft is to survive; heads are mostly too sure. Here the
engine writes texts with whole drafts (`verify="all"`, so nothing is left out for being doubtful),
and every round becomes a record: the head's own logits, and how many of its drafts were accepted.
`schedule.calibration` fits one temperature a position on the records of some of the prompts, and is
judged on those of the others. Prompts are what is divided, not records: rounds of one text resemble
each other, and a fit that saw half of them would look better than it is.

The head's own confidences are recorded (`Round.confidence`), before any calibration: fitting again
replaces an earlier calibration and does not stack upon it.

What a record does not know. Near the token limit drafts are cut to the room that is left, and a
text that ends inside an accepted draft says nothing of the tokens behind its end; such positions
are masked. Neither mask depends on the confidence in what it hides.

Not promised: that one temperature a position can make any head honest, or that other prompts and
temperatures behave alike. The report has, beside each error, what chance alone would show
(`ece_noise`) on so many records.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.bench.calibrate_config import CalibrateConfig
from dspark.bench.prompts import PromptSet, encode
from dspark.errors import ConfigError
from dspark.schedule import calibration as sts
from dspark.schedule.admission import Array
from dspark.schedule.calibration import Bin, Bools, Calibration, Quality
from dspark.types import Output, Round, SamplingParams

if TYPE_CHECKING:
    from dspark.llm import LLM

SMALLEST = 2.0**-24
"""Distance of the largest fp32 below 1: a confidence of 1 gets the logit of that."""


@dataclass(frozen=True, eq=False)
class Records:
    """n rounds: `prompt` [n] whose they are; logits, survived, known [n, gamma] as in
    `schedule.calibration`."""

    prompt: np.ndarray[Any, np.dtype[np.intp]]
    logits: Array
    survived: Array
    known: Bools

    def __len__(self) -> int:
        return len(self.prompt)

    def of(self, prompts: Bools) -> Records:
        """Those of the prompts that are marked in `prompts` [number of prompts]."""
        rows = prompts[self.prompt]
        return Records(self.prompt[rows], self.logits[rows], self.survived[rows], self.known[rows])


@dataclass(frozen=True)
class Position:
    """One draft position on the prompts not used for fitting, before and after."""

    temperature: float
    before: Quality
    after: Quality
    bins_before: tuple[Bin, ...]
    bins_after: tuple[Bin, ...]

    @property
    def chance(self) -> float | None:
        """The ECE that perfect scores would show on so many records; None without any."""
        return sts.ece_noise(self.after.samples) if self.after.samples else None


@dataclass(frozen=True)
class Report:
    """A calibration, and all that is needed to judge it."""

    model: str
    dtype: str
    drafter: str
    config: CalibrateConfig
    prompts: PromptSet
    fitted_prompts: int
    records: int
    """Of the prompts that were fitted on."""
    held_out_records: int
    calibration: Calibration
    positions: tuple[Position, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "drafter": self.drafter,
            "config": asdict(self.config),
            "prompts": {
                "name": self.prompts.name,
                "sha256": self.prompts.sha256,
                "count": len(self.prompts),
                "fitted": self.fitted_prompts,
            },
            "records": {"fitted": self.records, "held_out": self.held_out_records},
            "temperatures": list(self.calibration.temperatures),
            "held_out": [
                {"before": asdict(p.before), "after": asdict(p.after), "chance_ece": p.chance}
                for p in self.positions
            ],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: importlib.metadata.version(name) for name in ("dspark", "torch")},
        }


@dataclass(frozen=True)
class Step:
    """A text that was just written; `seconds` since the first began."""

    output: Output
    seconds: float


def load(llm: LLM, drafter: str) -> None:
    """Switch `llm` to a drafter that can be calibrated, with whole drafts.

    Raises ConfigError for one that cannot, and what `LLM.set_drafter` raises.
    """
    llm.set_drafter(drafter, verify="all", calibrated=False)
    inner = llm.engine.drafter.inner
    if not inner.cap or inner.sizes_drafts:
        raise ConfigError(
            f"the drafter {llm.drafter_name} has no confidence head to calibrate: give a trained"
            " one that has"
        )


def run(
    llm: LLM,
    prompts: PromptSet,
    config: CalibrateConfig,
    on_step: Callable[[Step], None] | None = None,
) -> Report:
    """Write the texts, fit, judge. `on_step` hears of every text.

    Raises ConfigError for a drafter without confidences and for too few records,
    InvalidRequestError for a prompt that does not fit, and what `LLM.set_drafter` raises.
    """
    load(llm, config.drafter)
    fitted = np.array(config.fitted(len(prompts)))
    records = _collect(llm, encode(llm, prompts), config, on_step)
    mine, others = records.of(fitted), records.of(~fitted)
    if len(mine) < sts.MIN_SAMPLES or not len(others):
        raise ConfigError(
            f"{len(mine)} drafts to fit on and {len(others)} to judge by are too few: at least"
            f" {sts.MIN_SAMPLES} are needed to fit on, so give more prompts, longer texts or more"
            " texts of each prompt"
        )
    dataset = (
        f"{prompts.name} (sha256 {prompts.sha256[:12]}), {int(fitted.sum())} of {len(prompts)}"
        f" prompts, temperature {config.temperature:g}"
    )
    found = sts.fit(mine.logits, mine.survived, mine.known, dataset=dataset).calibration
    return Report(
        llm.model_name,
        llm.dtype,
        llm.drafter_name,
        config,
        prompts,
        int(fitted.sum()),
        len(mine),
        len(others),
        found,
        _judge(found, others),
    )


def _collect(
    llm: LLM,
    ids: Sequence[tuple[int, ...]],
    config: CalibrateConfig,
    on_step: Callable[[Step], None] | None,
) -> Records:
    """The rounds of all texts as records."""
    gamma = llm.engine.drafter.cap
    rounds: dict[str, list[Round]] = {}

    def on_round(r: Round) -> None:
        if r.drafted and r.confidence is None:
            raise ConfigError(
                f"the drafter {llm.drafter_name} has no confidence head, so there is nothing to"
                " calibrate: train it with one"
            )
        rounds.setdefault(r.request_id, []).append(r)

    def texts() -> Iterator[tuple[tuple[int, ...], SamplingParams]]:
        for i in range(config.texts(len(ids))):
            yield ids[i % len(ids)], config.params(i)

    rows: list[tuple[int, Round]] = []
    start = time.perf_counter()
    llm.engine.on_round = on_round
    try:
        for number, output in llm.completions(texts()):
            mine = rounds.pop(output.request_id, [])
            rows += [(number % len(ids), r) for r in mine if r.drafted]
            if on_step is not None:
                on_step(Step(output, time.perf_counter() - start))
    finally:
        llm.engine.on_round = None
    return _records(rows, gamma)


def _records(rows: Sequence[tuple[int, Round]], gamma: int) -> Records:
    """One record for each round (prompt, round), all of whose drafts were verified."""
    n = len(rows)
    confidence = np.full((n, gamma), 0.5)
    survived, known = np.zeros((n, gamma)), np.zeros((n, gamma), np.bool_)
    for i, (_, r) in enumerate(rows):
        assert r.confidence is not None and r.verified == len(r.drafted)
        # A text that ended inside its draft, without the target's own token, tells no more of it.
        told = r.accepted if len(r.emitted) == r.accepted else len(r.drafted)
        confidence[i, :told] = r.confidence[:told]
        survived[i, : r.accepted] = 1
        known[i, :told] = True
    c = np.clip(confidence, SMALLEST, 1 - SMALLEST)
    whose = np.array([prompt for prompt, _ in rows], np.intp)
    return Records(whose, np.log(c) - np.log1p(-c), survived, known)


def _judge(found: Calibration, records: Records) -> tuple[Position, ...]:
    gamma = len(found.temperatures)
    data = records.logits, records.survived
    both = Calibration.identity(gamma), found
    before, after = (sts.evaluate(c, *data, records.known) for c in both)
    bins = [
        [sts.reliability(c, *data, k, records.known) for k in range(1, gamma + 1)] for c in both
    ]
    columns = zip(found.temperatures, before, after, *bins, strict=True)
    return tuple(Position(*column) for column in columns)
