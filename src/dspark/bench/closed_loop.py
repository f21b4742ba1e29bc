"""N users who each ask again as soon as they are answered, and what they see in a window of time.

The number of requests in flight is the load, and in a closed loop it stays what it is. First
answers are cut at random places, so users are spread over their answers from the start; the window
opens when all of them have got a token and some rounds more have passed; what is in flight behind
it is cancelled. So no figure holds an empty machine at either end.

Two speeds are told apart. A long prompt takes as long to read as a hundred tokens to write, and
which prompts fall into a window is chance. So the passes *without any prompt rows*, in which every
user is decoding, are counted by themselves; waiting times count whatever the machine did.

Everything is greedy, and every token is compared with the plain text of its prompt, also those of
the warm-up and of texts that were cancelled.

Not here: a server and its latencies, and users who stop to think.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from dspark.bench.compare import first_difference
from dspark.types import Output, Request, Round, SamplingParams, Stats

if TYPE_CHECKING:
    from dspark.llm import LLM

Clock = Callable[[], float]
"""Seconds from anywhere."""


@dataclass(frozen=True)
class Text:
    """A question as ids, and its plain answer of `max_tokens` tokens at most."""

    prompt: tuple[int, ...]
    plain: tuple[int, ...]


@dataclass
class _User:
    """Who asks, and how the current answer stands."""

    questions: Iterator[tuple[int, int]]
    """(number of the text, tokens to answer with at most), without end."""
    text: int = 0
    max_tokens: int = 0
    sent: float = 0.0
    last: float | None = None
    """When the last tokens of this answer came."""
    tokens: int = 0
    """Of the passes that are counted by themselves."""
    started: bool = False


@dataclass
class Window:
    """What happens from `start` to `end`, both in seconds.

    tokens    delivered to all users together;  texts  answers that ended
    ttft_ms   of each answer that was asked for and began in the window
    gaps      (milliseconds since the tokens before, tokens) of each delivery
    steps     passes without prompt rows;  seconds  they took
    stats     of their rounds, a round being one request's share of a pass
    """

    start: float
    end: float
    tokens: int = 0
    texts: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)

    def deliver(self, user: _User, count: int, now: float) -> None:
        """`user` gets `count` tokens at `now`."""
        self.tokens += count
        if user.last is not None:
            self.gaps.append(((now - user.last) * 1e3, count))
        elif user.sent >= self.start:
            self.ttft_ms.append((now - user.sent) * 1e3)


class Loop:
    """A closed loop over the engine of `llm`, which it has for itself until `close`."""

    def __init__(
        self,
        llm: LLM,
        texts: Sequence[Text],
        users: Sequence[Iterator[tuple[int, int]]],
        clock: Clock,
    ) -> None:
        """users: what each of them asks, see `questions`; clock: in seconds."""
        self._engine, self._texts, self._clock = llm.engine, texts, clock
        self._users = [_User(asked) for asked in users]
        self._asking: dict[str, _User] = {}
        self._sent = 0
        self._seconds = 0.0
        self._rounds: list[Round] = []
        self._answers: list[tuple[int, int, Output]] = []
        self._engine.on_round = self._rounds.append

    def warm_up(self, rounds: int) -> None:
        """Until every user has got a token, and `rounds` more."""
        window = self._open()
        for user in self._users:
            self._ask(user, window.start)
        while not all(user.started for user in self._users):
            self._step(window)
        for _ in range(rounds):
            self._step(window)

    def measure(self, tokens: int) -> Window:
        """The window that counts: until `tokens` tokens have come, of all users together."""
        window = self._open()
        for user in self._users:
            user.tokens = 0
            if user.last is not None:  # a delivery counts from the start on, not from before it
                user.last = window.start
        while window.tokens < tokens:
            self._step(window)
        self._seconds = window.seconds
        return window

    def close(self) -> None:
        """Cancel what is in flight; the engine is idle again."""
        self._engine.on_round = None
        for name, user in self._asking.items():
            self._engine.cancel(name)
            self._keep(name, user)
        self._asking.clear()

    def speeds(self) -> tuple[float, ...]:
        """Tokens a second of each user in passes without prompt rows; none without such a pass."""
        return tuple(u.tokens / self._seconds for u in self._users if self._seconds)

    def differences(self) -> Iterator[str]:
        """A sentence for each text that is not the plain one, as far as it was written."""
        for number, max_tokens, output in self._answers:
            ids, plain = output.token_ids, self._texts[number].plain
            cut = output.finish_reason == "cancelled"
            at = first_difference(ids, plain[: len(ids) if cut else max_tokens])
            if at is not None:
                yield f"prompt {number + 1} was answered differently from token {at + 1} on"

    def _open(self) -> Window:
        now = self._clock()
        return Window(now, now)

    def _step(self, window: Window) -> None:
        reading = any(user.last is None for user in self._users)
        self._rounds.clear()
        chunks = self._engine.step()
        now = self._clock()
        if not reading:
            window.steps += 1
            window.seconds += now - window.end
            for r in self._rounds:
                window.stats.add_round(r)
        window.end = now
        for name, count in Counter(c.request_id for c in chunks).items():
            user = self._asking[name]
            window.deliver(user, count, now)
            user.tokens += 0 if reading else count
            user.last, user.started = now, True
        for chunk in chunks:
            if chunk.finish_reason is not None:
                window.texts += 1
                user = self._asking.pop(chunk.request_id)
                self._keep(chunk.request_id, user)
                self._ask(user, now)

    def _ask(self, user: _User, now: float) -> None:
        user.text, user.max_tokens = next(user.questions)
        user.sent, user.last = now, None
        self._sent += 1
        name = f"load-{self._sent}"
        params = SamplingParams(user.max_tokens)
        self._engine.submit(Request(name, self._texts[user.text].prompt, params))
        self._asking[name] = user

    def _keep(self, name: str, user: _User) -> None:
        output = self._engine.take_output(name)
        if output is not None:
            self._answers.append((user.text, user.max_tokens, output))


def questions(seed: str, texts: int, max_tokens: int) -> Iterator[tuple[int, int]]:
    """What a user asks, without end: (number of the text, tokens to answer with at most).

    All texts in a random order, then again in another one. Lengths lie between a quarter of
    `max_tokens` and all of it; the first answer is cut at a random place, as if the user had been
    here for long.
    """
    rng = Random(seed)
    first = True
    while True:
        for number in rng.sample(range(texts), texts):
            length = rng.randint(-(-max_tokens // 4), max_tokens)
            yield number, rng.randint(1, length) if first else length
            first = False
