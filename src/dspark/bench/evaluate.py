"""How good a drafter is, apart from how fast it is.

`dspark bench` measures seconds, which belong to a machine. This measures guesses, which belong to
the drafter: how many tokens a round yields, and how often the guess at each place of the block is
right. Neither depends on what else is in the batch, so several texts are written at once. Every
drafter works over the same loaded target, on the same prompts with the same seeds.

Acceptance by position comes in two shares. *Conditional*: of the rounds that tried position k (all
before it accepted), those that accepted it; it shows how a drafter's guesses decay along the block,
whatever came before. *Cumulative*: of all rounds, those that accepted position k, and so all before
it; these shares add up to the accepted draft tokens of a round.

A position counts only where the drafter drafted it and the schedule had it verified (`tried_at` of
`dspark.types.Stats`). A drafter that shortens its own drafts leaves out the guesses it doubts, and
its conditional acceptance at late positions looks better than that of full blocks would. Compare
`drafted_per_round` before comparing curves. Late positions are also seen only where the early ones
went well, on easy text; that is what the method's own figure shows, too.

Ends of texts. Near the token limit the draft is cut to the room that is left, so late positions go
untried there; the round still counts for `accepted_length`. A text that ends at a stop inside an
accepted block counts the token behind its end as tried and not accepted, and its last round yields
no token of the target's own (`texts_ended_in_draft` counts them). Both make short texts look a
little worse than the drafter is.

Not promised: that the texts are right (`dspark bench` compares them), and that a few prompts tell
more than they do: `standard_error` says how much the accepted length would scatter.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.bench.prompts import PromptSet, encode
from dspark.errors import CheckpointError, ConfigError
from dspark.types import Output, SamplingParams, Stats

if TYPE_CHECKING:
    from dspark.llm import LLM

CLOSE = 0.05
"""Relative difference up to which an estimate counts as right."""
MEAN = "mean"

DEFINITIONS = {
    "texts, rounds, tokens": "how much was measured; the first token of a text is in no round",
    "drafted_per_round": "draft tokens verified / rounds",
    "accepted_length": "tokens / rounds: what a round yields, the target's own token included",
    "standard_error": "of accepted_length, from its scatter over texts; null for fewer than two",
    "full_block_length": "1 + the sum over k of the product of conditional[0..k]: what a round "
    "would yield if every draft were as long as the longest",
    "acceptance_rate": "accepted draft tokens / verified draft tokens",
    "conditional": "[k] rounds that accepted draft token k / rounds that verified it and accepted "
    "all before it (tried_at)",
    "cumulative": "[k] rounds that accepted draft token k / all rounds",
    "verified_at, tried_at, accepted_at": "[k] the rounds behind these shares",
    "texts_ended_in_draft": "texts whose last token was an accepted draft: the draft token behind "
    "it, if any, counts as tried and not accepted, and no token of the target's own follows",
    "means": "each prompt set weighs the same; counts are sums; a position that a set never tried "
    "is averaged over the others",
}


@dataclass(frozen=True)
class EvalConfig:
    """What to measure."""

    drafters: tuple[str, ...] = ("auto",)
    """Names or checkpoint directories, as `LLM.set_drafter` takes them."""
    num_draft_tokens: int | None = None
    """Longest block; None leaves each drafter its own."""
    verify: str = "all"  # as for `LLM`; what is not checked is not counted
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 128
    """Of each text."""
    seed: int = 0
    """Of the first text of a set; the next one draws with seed + 1, whatever the drafter."""
    repeat: int = 1
    """Texts of a prompt when sampling. A greedy text is written once: it would be the same."""
    batch: int = 8
    """Texts in flight."""

    def __post_init__(self) -> None:
        for name in ("repeat", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: expected >= 1")
        for name in ("drafters", "temperatures"):
            if not getattr(self, name):
                raise ConfigError(f"no {name} given: there is nothing to measure")
            # dict.fromkeys drops repetitions and keeps the order
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for temperature in self.temperatures:
            self.params(temperature, 0)  # impossible values are better found before a model loads

    def params(self, temperature: float, text: int) -> SamplingParams:
        """Of text `text` of a set. Raises InvalidRequestError."""
        return SamplingParams(self.max_tokens, temperature, seed=self.seed + text)

    def texts(self, temperature: float, prompts: int) -> int:
        """How many texts are written for a set of so many prompts."""
        return prompts * (self.repeat if temperature > 0 else 1)


@dataclass(frozen=True)
class Estimate:
    """What a drafter's trainer expects of it on held-out text.

    accepted_length  1 + the sum over k of the product of the expected acceptances (1 - TV, the
                     total variation distance) of the first k positions
    temperature      at which that was computed, and at which it can be compared
    """

    accepted_length: float
    temperature: float = 1.0
    source: str = "as given"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.accepted_length) and self.accepted_length >= 1):
            raise ConfigError(f"{self.accepted_length} is no accepted length: expected 1 or more")


@dataclass(frozen=True)
class Result:
    """One drafter at one temperature on one prompt set, or the mean of its sets.

    DEFINITIONS says what the numbers mean; None is "does not apply".
    """

    drafter: str
    temperature: float
    prompts: str
    texts: int
    rounds: int
    tokens: int
    drafted_per_round: float | None
    accepted_length: float | None
    standard_error: float | None
    full_block_length: float | None
    acceptance_rate: float | None
    conditional: list[float]
    cumulative: list[float]
    verified_at: list[int]
    tried_at: list[int]
    accepted_at: list[int]
    texts_ended_in_draft: int


@dataclass(frozen=True)
class Agreement:
    """A trainer's estimate beside what was served, at the estimate's temperature.

    `served` is the accepted length of the prompt sets that were given (their mean), so a difference
    may lie in the estimate, in the drafter, or in prompts unlike the held-out text.
    """

    drafter: str
    temperature: float
    estimated: float
    source: str
    served: float
    standard_error: float | None
    served_full_blocks: float | None
    difference: float
    """served / estimated - 1; `within` says whether it is at most CLOSE, either way."""
    within: bool

    @property
    def certain(self) -> bool:
        """Whether twice the standard error leaves the verdict as it is."""
        if self.standard_error is None:
            return False
        return abs(abs(self.difference) - CLOSE) > 2 * self.standard_error / self.estimated


@dataclass(frozen=True)
class Report:
    """What `dspark eval` prints: the numbers and all that is needed to judge them."""

    model: str
    dtype: str
    device: str
    config: EvalConfig
    prompts: tuple[PromptSet, ...]
    results: tuple[Result, ...]
    means: tuple[Result, ...]
    """One for each drafter and temperature; empty when there is one prompt set."""
    agreements: tuple[Agreement, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "prompts": [
                {"name": p.name, "sha256": p.sha256, "count": len(p)} for p in self.prompts
            ],
            "results": [asdict(r) for r in self.results],
            "means": [asdict(r) for r in self.means],
            "estimates": [asdict(a) | {"certain": a.certain} for a in self.agreements],
            "config": asdict(self.config),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in ("dspark", "torch")},
            "definitions": DEFINITIONS,
        }


@dataclass(frozen=True)
class Step:
    """A batch of texts that was just written."""

    drafter: str
    temperature: float
    prompts: str
    outputs: tuple[Output, ...]
    seconds: float


def read_estimate(drafter: str) -> Estimate | None:
    """The trainer's estimate in `DRAFTER/config.json`, key `training`; None if there is none.

    Raises CheckpointError for a file that cannot be read or a value that cannot be.
    """
    file = Path(drafter) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        training = config.get("training") if isinstance(config, dict) else None
        if not isinstance(training, dict) or "accepted_length" not in training:
            return None
        length, temperature = training["accepted_length"], training.get("temperature", 1.0)
        return Estimate(float(length), float(temperature), str(file))
    except (OSError, ValueError, TypeError, ConfigError) as error:
        raise CheckpointError(f"cannot read the training estimate of {file}: {error}") from error


def run(
    llm: LLM,
    sets: Sequence[PromptSet],
    config: EvalConfig,
    estimates: Mapping[str, Estimate] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> Report:
    """Write all texts and count. `estimates` is by drafter; `on_step` hears of every batch.

    Raises ConfigError or CheckpointError for a drafter that `llm` cannot load and
    InvalidRequestError for a prompt that does not fit, both before any text is written.
    """
    names = {d: _load(llm, d, config) for d in config.drafters}
    ids = [encode(llm, s) for s in sets]
    results: list[Result] = []
    for drafter, name in names.items():
        _load(llm, drafter, config)
        for temperature in config.temperatures:
            for prompts, prompt_ids in zip(sets, ids, strict=True):
                outputs: list[Output] = []
                for part, seconds in _write(llm, prompt_ids, temperature, config):
                    outputs += part
                    if on_step is not None:
                        on_step(Step(name, temperature, prompts.name, tuple(part), seconds))
                counted = _result(name, temperature, prompts.name, [o.stats for o in outputs])
                results.append(counted)
    groups = [results[i : i + len(sets)] for i in range(0, len(results), len(sets))]
    known = {names[d]: e for d, e in (estimates or {}).items() if d in names}
    pairs = [(_mean(group), known.get(group[0].drafter)) for group in groups]
    return Report(
        model=llm.model_name,
        dtype=llm.dtype,
        device=llm.device,
        config=config,
        prompts=tuple(sets),
        results=tuple(results),
        means=tuple(mean for mean, _ in pairs if len(sets) > 1),
        agreements=tuple(a for pair in pairs if (a := _agreement(*pair)) is not None),
    )


def _load(llm: LLM, drafter: str, config: EvalConfig) -> str:
    """Switch to a drafter and return its name, which for `auto` is what that came to."""
    llm.set_drafter(drafter, config.num_draft_tokens, verify=config.verify)
    return f"{llm.drafter_name} (auto)" if drafter == "auto" else drafter


def _write(
    llm: LLM, ids: Sequence[tuple[int, ...]], temperature: float, config: EvalConfig
) -> Iterator[tuple[list[Output], float]]:
    """The texts of a set and the seconds they took, batch by batch."""
    total = config.texts(temperature, len(ids))
    for first in range(0, total, config.batch):
        texts = range(first, min(first + config.batch, total))
        start = time.perf_counter()
        outputs = llm.generate(
            [ids[i % len(ids)] for i in texts], [config.params(temperature, i) for i in texts]
        )
        yield outputs, time.perf_counter() - start


def _result(drafter: str, temperature: float, prompts: str, texts: Sequence[Stats]) -> Result:
    s = Stats.total(list(texts))
    conditional = s.acceptance_by_position
    products = [math.prod(conditional[: k + 1]) for k in range(len(conditional))]
    return Result(
        drafter=drafter,
        temperature=temperature,
        prompts=prompts,
        texts=len(texts),
        rounds=s.rounds,
        tokens=s.round_tokens,
        drafted_per_round=s.verified / s.rounds if s.rounds else None,
        accepted_length=s.accepted_length,
        standard_error=_standard_error(texts),
        full_block_length=1 + sum(products) if s.rounds else None,
        acceptance_rate=s.acceptance_rate,
        conditional=conditional,
        cumulative=[n / s.rounds for n in s.accepted_at],
        verified_at=s.verified_at,
        tried_at=s.tried_at,
        accepted_at=s.accepted_at,
        # A round emits what it accepted and, unless the text ended before it, the target's own.
        texts_ended_in_draft=s.rounds - (s.round_tokens - s.accepted),
    )


def _standard_error(texts: Sequence[Stats]) -> float | None:
    """Of tokens / rounds, taking texts as independent (rounds of one text are not)."""
    s, n = Stats.total(list(texts)), len(texts)
    if n < 2 or not s.rounds:
        return None
    ratio = s.round_tokens / s.rounds
    squares = sum((t.round_tokens - ratio * t.rounds) ** 2 for t in texts)
    return math.sqrt(squares * n / (n - 1)) / s.rounds


def _mean(sets: Sequence[Result]) -> Result:
    """Each set weighs the same, however many rounds it took."""
    errors = [r.standard_error for r in sets if r.standard_error is not None]

    def columns(name: str) -> list[list[Any]]:
        """[k] the values at position k of the sets that have it."""
        lists = [getattr(r, name) for r in sets]
        return [[v[k] for v in lists if k < len(v)] for k in range(max(map(len, lists)))]

    found: dict[str, Any] = {}
    for name in ("texts", "rounds", "tokens", "texts_ended_in_draft"):
        found[name] = sum(getattr(r, name) for r in sets)
    for name in ("drafted_per_round", "accepted_length", "full_block_length", "acceptance_rate"):
        known = [v for r in sets if (v := getattr(r, name)) is not None]
        found[name] = sum(known) / len(known) if known else None
    for name in ("verified_at", "tried_at", "accepted_at"):
        found[name] = [sum(values) for values in columns(name)]
    return Result(
        drafter=sets[0].drafter,
        temperature=sets[0].temperature,
        prompts=MEAN,
        standard_error=math.hypot(*errors) / len(sets) if len(errors) == len(sets) else None,
        conditional=[sum(values) / len(values) for values in columns("conditional")],
        # A set without the position accepted nothing there.
        cumulative=[sum(values) / len(sets) for values in columns("cumulative")],
        **found,
    )


def _agreement(served: Result, estimate: Estimate | None) -> Agreement | None:
    """None without an estimate for this temperature, or without a round to compare it with."""
    length = served.accepted_length
    if estimate is None or length is None or estimate.temperature != served.temperature:
        return None
    difference = length / estimate.accepted_length - 1
    return Agreement(
        drafter=served.drafter,
        temperature=served.temperature,
        estimated=estimate.accepted_length,
        source=estimate.source,
        served=length,
        standard_error=served.standard_error,
        served_full_blocks=served.full_block_length,
        difference=difference,
        within=abs(difference) <= CLOSE,
    )
