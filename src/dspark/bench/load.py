"""Speed under load: N users who each send the next prompt as soon as the last answer has ended.

A closed loop: the number of requests in flight is the load, and it stays what it is, because every
ended answer is replaced at once. Plain decoding, MTP-1, every fixed length of a drafter and its
schedules go through the same loop on the same loaded target:

    for each repeat: for each number of users: for each configuration, in turns: one run

so what disturbs the machine for a while disturbs configurations of the same load alike, and ratios
are formed within a repeat. User u of a repeat asks the same questions in the same order in all
configurations; answers have various lengths, drawn from the seed, and end at the end of text, too.

A run is warmed up until every user has got a token, and some rounds more, in which schedulers find
their feet. Then comes the window that counts (`closed_loop`).

A fixed length K drafts K tokens and verifies all of them. It saves the drafting of the rest, which
a schedule has paid when it decides: the stronger of the two ways to fix a length.

Everything is greedy, and every token of every text is compared with the plain text of its prompt,
written beforehand. A speed without this verdict is worth nothing.

Not promised: latencies of a server, which adds its own; and absolute speeds of a shared machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dspark.bench.closed_loop import Clock, Loop, Text, questions
from dspark.bench.compare import BASELINE, rotated
from dspark.bench.picture import labels
from dspark.errors import ConfigError, InvalidRequestError
from dspark.types import Output, SamplingParams, Stats

if TYPE_CHECKING:
    from dspark.bench.prompts import PromptSet
    from dspark.llm import LLM

Kind = Literal["plain", "mtp1", "fixed", "scheduled"]
PLAIN = "plain"
MTP = "mtp1"


@dataclass(frozen=True)
class LoadConfig:
    """What to measure."""

    users: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    drafters: tuple[str, ...] = ("auto",)
    """Plain decoding always takes part, and `mtp1` where the model has one."""
    verify: tuple[str, ...] = ("auto",)
    """Schedules, as `LLM` takes them."""
    fixed: tuple[int, ...] = ()
    """Fixed lengths to compare with; none given: all up to the drafter's block."""
    num_draft_tokens: int | None = None
    """Longest block of the schedules; None leaves each drafter its own."""
    tokens: int = 1024
    """Of all users together, in the window of a run."""
    max_tokens: int = 256
    """Of an answer; lengths lie between a quarter of it and all of it."""
    warm_up: int = 16
    """Rounds behind the first token of the last user that are not counted."""
    repeats: int = 3
    seed: int = 0
    """Of the questions and the lengths of their answers."""

    def __post_init__(self) -> None:
        for name in ("tokens", "max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} measures nothing: expected >= 1")
        if self.warm_up < 0:
            raise ConfigError(f"warm_up={self.warm_up} is out of range: expected 0 or more rounds")
        for name in ("users", "fixed"):
            values = getattr(self, name)
            if any(n < 1 for n in values):
                raise ConfigError(f"{name}={values} is out of range: expected numbers from 1 on")
            object.__setattr__(self, name, tuple(sorted(set(values))))
        if not self.users:
            raise ConfigError("no users given: there is nothing to measure")
        for name in ("drafters", "verify"):
            # dict.fromkeys drops repetitions and keeps the order
            given = dict.fromkeys(n for n in getattr(self, name) if n != BASELINE)
            object.__setattr__(self, name, tuple(given))
        if self.verify != ("auto",):
            from dspark.schedule.policy import parse  # numpy, which `--help` does without

            for mode in self.verify:
                parse(mode)


@dataclass(frozen=True)
class Setup:
    """One configuration. `block` is how much it drafts; None is the drafter's own default."""

    name: str
    kind: Kind
    drafter: str
    block: int | None
    verify: str
    reason: str = ""
    """What its schedule goes by."""


@dataclass(frozen=True)
class Run:
    """The window of one configuration under one load.

    steps     passes without prompt rows;  seconds  they took
    stats     of their rounds, a round being one request's share of a pass
    speeds    of each user: tokens a second in these passes
    window_seconds, window_tokens   of all passes
    ttft_ms   of each answer that was asked for and began in the window
    gaps      (milliseconds since the tokens before, tokens) of each delivery to a user
    texts     answers that ended in the window
    """

    setup: str
    users: int
    repeat: int
    steps: int
    seconds: float
    stats: Stats
    speeds: tuple[float, ...]
    window_seconds: float
    window_tokens: int
    ttft_ms: tuple[float, ...]
    gaps: tuple[tuple[float, int], ...]
    texts: int
    differences: tuple[str, ...]
    """A sentence for each text, warm-up included, that was not the plain one."""
    messages: tuple[str, ...] = ()
    """What the engine had to say behind it (stale costs, a drafter that failed)."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of all users together, in passes without prompt rows; None without such a pass."""
        return self.stats.round_tokens / self.seconds if self.seconds else None


def prepare(llm: LLM, config: LoadConfig) -> tuple[Setup, ...]:
    """Load every drafter and measure the costs that are missing, so that no run has to.

    Raises ConfigError for what `llm` does not have: slots, drafters, lengths, ways to verify.
    """
    if llm.target.num_slots < config.users[-1]:
        raise ConfigError(
            f"{config.users[-1]} users want as many slots, and {llm.target.num_slots} were made:"
            " load the model with max_users of the largest load"
        )
    setups = [Setup(PLAIN, "plain", BASELINE, None, "all")]
    drafters: list[str] = []
    for given in config.drafters:
        llm.set_drafter(given, config.num_draft_tokens, verify="all")
        drafters.append(llm.drafter_name)  # what `auto` came to
    short = labels(list(dict.fromkeys(drafters)))
    for drafter, name in short.items():
        llm.set_drafter(drafter, config.num_draft_tokens, verify="all")
        for k in config.fixed or range(1, llm.engine.drafter.cap + 1):
            setup = Setup(f"{name} K={k}", "fixed", drafter, k, f"static:{k}")
            _set(llm, setup)
            setups.append(setup)
        for mode in config.verify:
            llm.set_drafter(drafter, config.num_draft_tokens, verify=mode)
            block, reason = config.num_draft_tokens, llm.verify_reason
            label = f"{name} {mode}"
            setups.append(Setup(label, "scheduled", drafter, block, llm.verify, reason))
    if MTP not in short:
        mtp = Setup(MTP, "mtp1", MTP, 1, "all")
        try:
            _set(llm, mtp)
        except ConfigError:
            pass  # this model has none
        else:
            setups.insert(1, mtp)
    return tuple(setups)


def write_plain(
    llm: LLM,
    prompts: PromptSet,
    config: LoadConfig,
    on_text: Callable[[Output], None] | None = None,
) -> tuple[Text, ...]:
    """What plain decoding answers to every prompt, which every run is compared with.

    Raises InvalidRequestError for a prompt that does not fit.
    """
    llm.set_drafter(BASELINE)
    many = [llm.encode_prompt(p) for p in prompts.prompts]
    room = llm.target.max_context
    for number, ids in enumerate(many, start=1):
        if len(ids) >= room:
            raise InvalidRequestError(
                f"{prompts.name}: prompt {number} has {len(ids)} tokens and the context holds "
                f"{room}, one of them for the answer: shorten it or raise --max-context"
            )
    params = SamplingParams(config.max_tokens)
    plain: dict[int, tuple[int, ...]] = {}
    for number, output in llm.completions((ids, params) for ids in many):
        plain[number] = output.token_ids
        if on_text is not None:
            on_text(output)
    return tuple(Text(ids, plain[n]) for n, ids in enumerate(many))


def measure(
    llm: LLM,
    setups: Sequence[Setup],
    texts: Sequence[Text],
    config: LoadConfig,
    clock: Clock = time.perf_counter,
) -> Iterator[Run]:
    """Every run in its turn, as it is finished. Closing the iterator leaves no request behind."""
    for repeat in range(config.repeats):
        for turn, users in enumerate(config.users):
            for setup in rotated(setups, repeat + turn):
                _set(llm, setup)
                asked = [
                    questions(f"{config.seed} {repeat} {user}", len(texts), config.max_tokens)
                    for user in range(users)
                ]
                loop = Loop(llm, texts, asked, clock)
                try:
                    loop.warm_up(config.warm_up)
                    window = loop.measure(config.tokens)
                finally:
                    loop.close()
                yield Run(
                    setup.name,
                    users,
                    repeat,
                    window.steps,
                    window.seconds,
                    window.stats,
                    loop.speeds(),
                    window.end - window.start,
                    window.tokens,
                    tuple(window.ttft_ms),
                    tuple(window.gaps),
                    window.texts,
                    tuple(f"{setup.name}, {users} users: {d}" for d in loop.differences()),
                    tuple(f"{setup.name}: {m}" for m in llm.messages),
                )


def _set(llm: LLM, setup: Setup) -> None:
    llm.set_drafter(setup.drafter, setup.block, verify=setup.verify)
