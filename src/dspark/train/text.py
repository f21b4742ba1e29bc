"""Write training text: prompts, and behind each the target's own answer.

A drafter is trained on what its target says, not on what others wrote: it shall guess the target's
next word, right or wrong. So the target answers prompts at the temperatures it will serve with, and
each answer becomes one row of DIR/text.jsonl in the format of `dspark.train.samples` (the folder
itself is in `dspark.train.text_folder`).

One stream of requests goes through the engine, read as slots come free: an answer where a prompt is
ready, else the next prompt to be written (`prompts.OwnPrompts`). So the batch is full until the
last rows, where batches with a common end would wait for their longest text each time.

Row k depends on the options, the seed and k alone. The text is rows 0 to K, the shortest beginning
that holds the tokens asked for. Rows are appended as they finish, out of order; when the last one
is there the file is sorted and cut once. A run that was stopped reads what is there and goes on, to
the same file that it would have written undisturbed, as far as the arithmetic is exact: in int8 to
the bit; in fp32 and bf16 the company in a batch may tip a near tie, and then the rest of that row
differs.

Not promised: that encoding `answer` gives back the very ids that were drawn. A model may spell a
word in another way than its tokenizer would; `tokens` counts what was drawn.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dspark.errors import ConfigError
from dspark.train.prompts import (
    Candidate,
    Conversation,
    FilePrompts,
    OwnPrompts,
    openings_sha256,
    seed_of,
)
from dspark.train.samples import messages_of
from dspark.train.text_folder import Folder
from dspark.types import SamplingParams

if TYPE_CHECKING:
    from dspark.llm import LLM

PROMPT_ROOM = 512
"""Tokens of the context that are kept for a prompt, template included."""
PRIOR_ROWS = 8
"""How many rows the first guess of an answer's length counts for."""


@dataclass(frozen=True)
class TextConfig:
    """What to write. Of these, only `tokens` may grow when a folder is continued."""

    tokens: int = 1_000_000
    """Answer tokens in all, end-of-text tokens included."""
    max_tokens: int = 320
    """Of one answer."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """Each answer takes one of them by chance."""
    seed: int = 0
    prompt_tokens: int = 128
    """Of one prompt that the target writes; longer ones are dropped."""
    prompt_temperature: float = 0.9

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of range."""

        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is out of range: expected {expected}"
                )

        for name in ("tokens", "max_tokens", "prompt_tokens"):
            need(getattr(self, name) >= 1, name, "1 or more")
        need(bool(self.temperatures), "temperatures", "one or more numbers")
        for name, values in (
            ("temperatures", self.temperatures),
            ("prompt_temperature", (self.prompt_temperature,)),
        ):
            need(all(math.isfinite(t) and t >= 0 for t in values), name, "0 (greedy) or more")
        need(self.seed >= 0, "seed", "0 or more")

    def identity(self) -> dict[str, Any]:
        """The options that decide what the rows say."""
        options = {k: v for k, v in asdict(self).items() if k != "tokens"}
        return {**options, "temperatures": list(self.temperatures)}


@dataclass(frozen=True)
class Written:
    """What a writer made of one request."""

    text: str
    tokens: int
    """Drawn, the end-of-text token included."""
    finish_reason: str
    """`stop` or `length`."""


Ask = tuple[Sequence[int] | Sequence[Mapping[str, str]], SamplingParams]
"""Ids to continue, or a conversation to answer."""


Writing = Generator[tuple[int, Written | None], None, None]
"""(number of the ask, text) as they finish; closing it cancels the rest."""


class Writer(Protocol):
    """Who writes: the engine, or a server (`dspark.train.endpoint`)."""

    def fits(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> bool:
        """Whether there is room for a conversation and `max_tokens` behind it."""
        ...

    def completions(self, asks: Iterable[Ask]) -> Writing:
        """Write; asks are read as they can be begun, and may depend on texts yielded before.

        None: this one is refused, as too long for instance, and others are not.
        """
        ...


class EngineWriter:
    """The project's own engine: a full batch, with the serving template."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def fits(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> bool:
        return len(self.llm.encode_prompt(messages)) + max_tokens <= self.llm.target.max_context

    def completions(self, asks: Iterable[Ask]) -> Writing:
        answers: set[int] = set()

        def noted() -> Iterator[Ask]:
            for number, (prompt, params) in enumerate(asks):
                if prompt and isinstance(prompt[0], Mapping):
                    answers.add(number)
                yield prompt, params

        for number, out in self.llm.completions(noted()):
            text = out.text
            if number in answers:
                # As `samples.encode` reads it: without SentencePiece's space before a first word.
                answers.remove(number)
                text = self.llm.tokenizer.decode(out.token_ids)
            if out.finish_reason == "length":
                text = text.rstrip("\ufffd")  # half of a character, cut off with the rest
            yield number, Written(text, len(out.token_ids), out.finish_reason)


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    rows: int
    tokens: int
    """In rows that are kept or may be."""
    new_tokens: int
    """Answer tokens that this run wrote."""
    prompts: int
    """Known so far."""


@dataclass(frozen=True)
class Summary:
    """What is there at the end, and what this run did."""

    rows: int
    tokens: int
    complete: bool
    """Whether the tokens asked for were reached; prompts from files may run out before."""
    new_tokens: int
    """Answer tokens that this run wrote, those of rows cut off at the end included."""
    seconds: float
    """Of this run, writing prompts included, loading the model not."""
    dropped: dict[str, int]
    """Prompts that were not answered, by reason."""

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


def write_text(
    writer: Writer,
    prompts: FilePrompts | OwnPrompts,
    config: TextConfig,
    out: Path,
    identity: Mapping[str, Any],
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Write DIR `out` or go on with it, until it holds `config.tokens` answer tokens.

    identity     what else decides the text (model, dtype): it must be the same when a folder is
                 continued, as the options must
    on_progress  called at the start and at each finished text

    KeyboardInterrupt leaves every finished row in the folder. Raises ConfigError for a folder that
    cannot be continued so, and what the writer raises.
    """
    options = {**identity, **_prompt_options(prompts), **config.identity()}
    folder = Folder(out, options, config.tokens)
    try:
        return _Run(writer, prompts, config, folder, on_progress).run()
    finally:
        folder.close()


def _prompt_options(prompts: FilePrompts | OwnPrompts) -> dict[str, str]:
    if isinstance(prompts, FilePrompts):
        return {"prompts": "files", "prompts_sha256": prompts.sha256}
    return {"prompts": "own", "prompts_sha256": openings_sha256()}


class _Run:
    """One stream of asks, and what comes back.

    `_next` is the first index that was not looked at yet: all below are done or in flight.
    `_covered` counts the tokens below it. No further answer is begun when they and those in flight
    seem enough; the run ends when the shortest beginning of done rows (`_last`, `_tokens`) is.
    """

    def __init__(
        self,
        writer: Writer,
        prompts: FilePrompts | OwnPrompts,
        config: TextConfig,
        folder: Folder,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._writer, self._prompts, self._config = writer, prompts, config
        self._folder, self._on_progress = folder, on_progress
        self._asked: dict[int, Candidate | tuple[int, Conversation, float]] = {}
        self._next = self._covered = self._last = self._tokens = self._new = 0
        self._answers = self._candidates = 0  # in flight
        self._skipped: set[int] = set()
        if isinstance(prompts, OwnPrompts):
            for number, prompt, ended in folder.prompts:
                prompts.deliver(number, prompt, ended)

    def run(self) -> Summary:
        began = time.perf_counter()
        self._report()
        try:
            while not self._enough() and self._round():
                pass
        except BaseException:
            self._folder.write_meta(complete=False)
            raise
        complete = self._enough()
        self._folder.finish(self._last, complete)
        dropped = dict(self._prompts.dropped)
        if self._skipped:
            dropped["refused or too long"] = len(self._skipped)
        seconds = time.perf_counter() - began
        f = self._folder
        return Summary(len(f.done), f.tokens, complete, self._new, seconds, dropped)

    def _enough(self) -> bool:
        """Move on over what is done without a gap."""
        while self._tokens < self._config.tokens and (
            self._last in self._folder.done or self._last in self._skipped
        ):
            self._tokens += self._folder.done.get(self._last, 0)
            self._last += 1
        return self._tokens >= self._config.tokens

    def _round(self) -> bool:
        """One stream of asks, as many as seem to be needed; False if there is nothing to ask."""
        asked = False
        with closing(self._writer.completions(self._asks())) as writing:
            for number, written in writing:
                asked = True
                self._take(self._asked.pop(number), written)
                if self._enough():
                    break
        return asked

    def _asks(self) -> Iterator[Ask]:
        """Answers while the tokens that are likely to come do not suffice, else prompts for them.

        A guess that was too low costs another round with the few rows that are missing.
        """
        self._asked.clear()
        self._answers = self._candidates = number = 0
        while (missing := self._missing()) > 0:
            ask = self._answer() or self._prompt(missing)
            if ask is None:
                return
            self._asked[number], what = ask
            number += 1
            yield what

    def _missing(self) -> float:
        """Answers to be begun yet, by the mean length so far (at first half of the longest)."""
        f = self._folder
        mean = (f.tokens + PRIOR_ROWS * self._config.max_tokens / 2) / (len(f.done) + PRIOR_ROWS)
        return (self._config.tokens - self._covered) / mean + 1 - self._answers

    def _answer(self) -> tuple[tuple[int, Conversation, float], Ask] | None:
        """The next answer whose prompt is known and that is not there yet."""
        c = self._config
        while (conversation := self._prompts.get(k := self._next)) is not None:
            self._next += 1
            if k in self._folder.done:
                self._covered += self._folder.done[k]
                continue
            messages = messages_of(conversation)
            if not self._writer.fits(messages, c.max_tokens):
                self._skipped.add(k)
                continue
            seed = seed_of(c.seed, "answer", k)
            temperature = random.Random(seed).choice(c.temperatures)
            params = SamplingParams(max_tokens=c.max_tokens, temperature=temperature, seed=seed)
            self._answers += 1
            return (k, conversation, temperature), (messages, params)
        return None

    def _prompt(self, missing: float) -> tuple[Candidate, Ask] | None:
        """The next prompt that the target shall write, if more than those in flight are needed."""
        if not isinstance(self._prompts, OwnPrompts) or self._candidates >= 2 * missing:
            return None
        self._candidates += 1
        candidate = self._prompts.next_candidate()
        params = SamplingParams(
            max_tokens=self._config.prompt_tokens,
            temperature=self._config.prompt_temperature,
            seed=candidate.seed,
            stop=self._prompts.turn.stop,
            stop_token_ids=self._prompts.turn.stop_ids,
        )
        return candidate, (candidate.ids, params)

    def _take(
        self, what: Candidate | tuple[int, Conversation, float], written: Written | None
    ) -> None:
        if isinstance(what, Candidate):
            assert isinstance(self._prompts, OwnPrompts) and written is not None
            self._candidates -= 1
            ended = written.finish_reason == "stop"
            prompt = what.opening + written.text
            self._folder.add_prompt(what.number, prompt, ended)
            self._prompts.deliver(what.number, prompt, ended)
            self._report()
            return
        self._answers -= 1
        if written is None:
            self._skipped.add(what[0])
        else:
            index, conversation, temperature = what
            row = {
                "index": index,
                **conversation,
                "answer": written.text,
                "temperature": temperature,
                "finish_reason": written.finish_reason,
                "tokens": written.tokens,
            }
            self._folder.add_row(row)
            self._covered += written.tokens
            self._new += written.tokens
        self._report()

    def _report(self) -> None:
        f = self._folder
        self._on_progress(Progress(len(f.done), f.tokens, self._new, len(self._prompts)))
