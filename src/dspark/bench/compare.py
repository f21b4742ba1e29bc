"""Compare drafters fairly: same process, same loaded target, same prompts, taking turns.

A speed-up is a ratio of two speeds, and both drift with the machine: its clock, its cache, its
neighbours. The drafters therefore take turns on every prompt, each prompt begins with another one,
and the ratio is formed within a repeat, then the median over repeats is reported. `none` is always
among them. It is plain decoding on the very same path, so the ratio credits drafting with nothing
but drafting.

With several pipeline modes each drafter takes part in each, as `dspark+on`. What two lanes gained
stands beside what the formula of `schedule.overlap` says.

At temperature 0 every drafter must produce the token ids of `none`, to the last one. `run` checks
that on every text; a speed without this verdict is worth nothing.

Not measured here: many users at once. One text is generated at a time.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from dspark.bench.definitions import DEFINITIONS
from dspark.errors import ConfigError
from dspark.schedule.overlap import check_mode, predicted_gain
from dspark.types import Output, SamplingParams, Stats

if TYPE_CHECKING:
    from dspark.bench.prompts import PromptSet
    from dspark.llm import LLM

T = TypeVar("T")
BASELINE = "none"
WARM_UP_TOKENS = 8
DOUBTFUL = 1.1
"""Speed-up per accepted length that timing noise alone no longer explains."""


@dataclass(frozen=True)
class BenchConfig:
    """What to measure."""

    drafters: tuple[str, ...] = (BASELINE, "ngram")
    """`none` is added in front when missing."""
    num_draft_tokens: int | None = None
    """Cap of a block; None leaves each drafter its own default."""
    pipeline: tuple[str, ...] = ("auto",)
    """Modes in which each drafter takes part."""
    verify: str = "auto"
    """How much of each draft is checked, as `LLM` takes it."""
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    """Of the first prompt; prompt i draws with seed + i, whatever the drafter."""
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ConfigError(f"repeat={self.repeat} measures nothing: expected 1 or more")
        first = () if BASELINE in self.drafters else (BASELINE,)
        # dict.fromkeys drops repetitions and keeps the order
        object.__setattr__(self, "drafters", tuple(dict.fromkeys((*first, *self.drafters))))
        object.__setattr__(self, "pipeline", tuple(dict.fromkeys(self.pipeline)))
        if not self.pipeline:
            raise ConfigError("no pipeline mode was given: expected off, on, auto, or several")
        for mode in self.pipeline:
            check_mode(mode)
        if self.verify != "auto":
            from dspark.schedule.policy import parse  # numpy, which `--help` does without

            parse(self.verify)
        self.params(0)  # an impossible temperature is better found before a model is loaded

    @property
    def variants(self) -> dict[str, tuple[str, str]]:
        """Name -> drafter and pipeline mode of everything that is compared."""
        several = len(self.pipeline) > 1
        return {BASELINE: (BASELINE, "off")} | {
            f"{d}+{mode}" if several else d: (d, mode)
            for d in self.drafters
            if d != BASELINE
            for mode in self.pipeline
        }

    def params(self, prompt: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed + prompt
        )


@dataclass(frozen=True)
class Text:
    """One measured text."""

    drafter: str
    repeat: int
    prompt: int
    output: Output
    seconds: float


@dataclass(frozen=True)
class Result:
    """One drafter's row; DEFINITIONS says what the numbers mean, None is "does not apply"."""

    drafter: str
    tokens: int
    seconds: float
    tokens_per_second: float | None
    speedup_vs_none: float | None
    drafted: int
    scheduled: int
    predicted: float
    accepted: int
    accepted_length: float | None
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    draft_ms: float | None
    verify_ms: float | None
    other_ms: float | None
    ttft_ms: float
    identical_to_none: bool | None
    pipeline: str
    hit_rate: float | None
    accepted_length_ahead: float | None
    accepted_length_fresh: float | None
    delta: float | None
    gain_vs_off: float | None
    gain_predicted: float | None


@dataclass(frozen=True)
class Report:
    """What `dspark bench` prints: the rows and all that is needed to judge them."""

    model: str
    dtype: str
    device: str
    threads: int
    config: BenchConfig
    prompts: PromptSet
    results: tuple[Result, ...]
    emulated: str | None
    """The device whose times these are, if they are not this machine's."""
    differences: tuple[str, ...]
    """One sentence for each drafter whose text was not that of `none`."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """Speed-ups that cannot be: a round yields `accepted_length` tokens and costs no less than
        one of `none`, so a larger ratio says that something else slowed the baseline down."""
        return tuple(
            f"the speed-up of {r.drafter}, {r.speedup_vs_none:.2f}, exceeds its accepted length, "
            f"{r.accepted_length:.2f}: the machine was disturbed, measure again with more repeats"
            for r in self.results
            if r.speedup_vs_none is not None
            and r.accepted_length is not None
            and r.speedup_vs_none > DOUBTFUL * r.accepted_length
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "emulated": self.emulated,
            "prompts": {
                "name": self.prompts.name,
                "sha256": self.prompts.sha256,
                "count": len(self.prompts),
            },
            "results": [asdict(r) for r in self.results],
            "doubts": list(self.doubts),
            "config": asdict(self.config),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "definitions": DEFINITIONS,
        }


def run(
    llm: LLM,
    prompts: PromptSet,
    config: BenchConfig,
    on_text: Callable[[Text], None] | None = None,
) -> Report:
    """Warm up, measure, compare. `on_text` hears of every measured text."""
    lanes: dict[str, str] = {}
    for variant in config.variants:
        _generate(llm, variant, prompts, 0, config, max_tokens=WARM_UP_TOKENS)
    texts: list[Text] = []
    for repeat in range(config.repeat):
        for i in range(len(prompts)):
            for variant in rotated(list(config.variants), repeat + i):
                output, seconds = _generate(llm, variant, prompts, i, config)
                lanes[variant] = llm.pipeline
                texts.append(Text(variant, repeat, i, output, seconds))
                if on_text is not None:
                    on_text(texts[-1])
    differences = {} if config.temperature > 0 else _differences(texts)
    speeds = {v: _speeds(texts, v, config.repeat) for v in config.variants}
    results = {
        v: _result(
            [t for t in texts if t.drafter == v],
            speeds[v],
            speeds[BASELINE],
            None if config.temperature > 0 else v not in differences,
            lanes[v],
        )
        for v in config.variants
    }
    return Report(
        model=llm.model_name,
        dtype=llm.dtype,
        device=llm.device,
        threads=llm.threads,
        config=config,
        prompts=prompts,
        results=tuple(_with_gain(v, results, speeds, config) for v in config.variants),
        emulated=None if llm.emulation is None else str(llm.emulation),
        differences=tuple(differences.values()),
    )


def _with_gain(
    variant: str,
    results: Mapping[str, Result],
    speeds: Mapping[str, Sequence[float | None]],
    config: BenchConfig,
) -> Result:
    """The row of a variant with what two lanes gained over one, if both were measured."""
    ours, plain = results[variant], f"{config.variants[variant][0]}+off"
    if plain not in results or plain == variant:
        return ours
    base, predicted, delta = results[plain], None, None
    h, tau, tau_off = ours.hit_rate, ours.accepted_length, base.accepted_length
    if h and tau and tau_off:
        delta = (1 - tau / tau_off) / h
    if h is not None and tau and tau_off and base.draft_ms is not None:
        assert base.verify_ms is not None and base.other_ms is not None
        r = base.draft_ms / (base.verify_ms + base.other_ms)
        predicted = tau / tau_off * predicted_gain(r, h)
    gain = known_median(
        [s / b if s and b else None for s, b in zip(speeds[variant], speeds[plain], strict=True)]
    )
    return replace(ours, delta=delta, gain_vs_off=gain, gain_predicted=predicted)


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The same in the same order, but beginning with another one."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def _generate(
    llm: LLM,
    variant: str,
    prompts: PromptSet,
    index: int,
    config: BenchConfig,
    max_tokens: int | None = None,
) -> tuple[Output, float]:
    # The baseline drafts nothing; a cap meant for the others is none of its business.
    drafter, mode = config.variants[variant]
    cap = None if drafter == BASELINE else config.num_draft_tokens
    llm.set_drafter(drafter, cap, verify=config.verify, pipeline=mode)
    params = config.params(index)
    if max_tokens is not None:
        params = SamplingParams(max_tokens=max_tokens, temperature=params.temperature, seed=0)
    start = time.perf_counter()
    output = llm.chat([{"role": "user", "content": prompts.prompts[index]}], params)
    return output, time.perf_counter() - start


def _speeds(texts: Sequence[Text], drafter: str, repeats: int) -> list[float | None]:
    """[repeat] decoding speed of a drafter over all prompts."""
    speeds = []
    for repeat in range(repeats):
        mine = [t.output.stats for t in texts if (t.drafter, t.repeat) == (drafter, repeat)]
        speeds.append(Stats.total(mine).tokens_per_second)
    return speeds


def _result(
    texts: Sequence[Text],
    speeds: Sequence[float | None],
    baseline: Sequence[float | None],
    identical: bool | None,
    pipeline: str,
) -> Result:
    stats = Stats.total([t.output.stats for t in texts])

    def per_round(ms: float) -> float | None:
        return ms / stats.rounds if stats.rounds else None

    return Result(
        drafter=texts[0].drafter,
        tokens=sum(len(t.output.token_ids) for t in texts),
        seconds=sum(t.seconds for t in texts),
        tokens_per_second=known_median(speeds),
        speedup_vs_none=known_median(
            [s / b if s and b else None for s, b in zip(speeds, baseline, strict=True)]
        ),
        drafted=stats.drafted,
        scheduled=stats.verified,
        predicted=stats.predicted,
        accepted=stats.accepted,
        accepted_length=stats.accepted_length,
        acceptance_rate=stats.acceptance_rate,
        acceptance_by_position=stats.acceptance_by_position,
        draft_ms=per_round(stats.draft_ms),
        verify_ms=per_round(stats.verify_ms),
        other_ms=per_round(stats.other_ms),
        ttft_ms=median(t.output.stats.ttft_ms for t in texts),
        identical_to_none=identical,
        pipeline=pipeline,
        hit_rate=None if pipeline == "off" else stats.hit_rate,
        accepted_length_ahead=stats.accepted_length_ahead,
        accepted_length_fresh=None if pipeline == "off" else stats.accepted_length_fresh,
        delta=None,
        gain_vs_off=None,
        gain_predicted=None,
    )


def known_median(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [v for v in values if v is not None]
    return median(known) if known else None


def _differences(texts: Sequence[Text]) -> dict[str, str]:
    """Drafter -> where its text first left that of the baseline; equal drafters are absent."""
    expected = {(t.repeat, t.prompt): t.output.token_ids for t in texts if t.drafter == BASELINE}
    found: dict[str, str] = {}
    for t in texts:
        ours, theirs = t.output.token_ids, expected[t.repeat, t.prompt]
        at = first_difference(ours, theirs)
        if at is not None and t.drafter not in found:
            found[t.drafter] = (
                f"the text of drafter {t.drafter} differs from that of {BASELINE} "
                f"on prompt {t.prompt + 1}, from token {at + 1} on"
            )
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two texts are not the same, ends included; None if they are."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the platform's own words have to do
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("dspark", "torch"):
        found[package] = importlib.metadata.version(package)
    return found
