"""The nouns of the round: what goes in, what travels through it, what comes out.

Small dataclasses without behaviour beyond derived properties. Whoever reads these and
`Engine.step` knows the system. Words follow the method (see docs/concepts.md): the *anchor* is the
last emitted token, a *draft* is the block guessed behind it, a *round* is one draft and one
verification, the *bonus* is the target's own token that ends every round (a correction when the
draft was cut), the *accepted length* of a round counts the bonus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from dspark.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled"]


class Grammar(Protocol):
    """Which texts are allowed, token by token."""

    def allowed(self, text: Sequence[int], draft: Sequence[int]) -> Tensor:
        """[len(draft) + 1, V] bool: row i says which tokens may stand behind `text + draft[:i]`,
        the tokens generated so far; in each row some may, if only the end of text.

        Depends on its arguments alone. Rows behind a draft token that is not allowed, or that ends
        the text, are never looked at and may say anything.
        """
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when a text ends.

    The law is applied in this order: logit bias, penalties, `min_tokens`, grammar, temperature,
    top-k, top-p, min-p. `temperature=0` is greedy decoding: the highest logit after bias, penalties
    and grammar, the lowest id on a tie; the filters then change nothing.
    """

    max_tokens: int = 256
    """Tokens to generate at most; the end-of-text token counts as one."""
    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches p."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated so far (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once per time it was generated (OpenAI)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or text (CTRL)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids; -100 and below bans, +100 and above all but forces."""
    min_tokens: int = 0
    """No end-of-text or stop token before this many tokens were generated."""
    seed: int | None = None
    """Same seed, same text, whatever else is in the batch. None draws fresh entropy."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """Tokens that it forbids have probability zero. Where bans and `min_tokens` leave none of those
    that it allows, it wins."""
    logprobs: int | None = None
    """None: off. n: the log-probability of every emitted token and the n most probable ones."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InvalidRequestError(
                    f"{name}={getattr(self, name)!r} is out of range: expected {expected}"
                )

        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                     "repetition_penalty"):  # fmt: skip
            need(math.isfinite(getattr(self, name)), name, "a finite number")
        need(self.max_tokens >= 1, "max_tokens", "1 or more")
        need(self.temperature >= 0, "temperature", "0 (greedy) or more")
        need(self.top_k >= 0, "top_k", "0 (off) or more")
        need(0 < self.top_p <= 1, "top_p", "more than 0 and at most 1")
        need(0 <= self.min_p <= 1, "min_p", "0 to 1")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "-2 to 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "-2 to 2")
        need(self.repetition_penalty > 0, "repetition_penalty", "more than 0 (1 is off)")
        need(self.min_tokens >= 0, "min_tokens", "0 or more")
        need(all(self.stop), "stop", "strings that are not empty")
        need(self.grammar is None or not self.ignore_eos, "ignore_eos", "False with a grammar")
        need(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", "None or 0 to 100")
        need(self.seed is None or self.seed >= 0, "seed", "0 or more, or None")
        need(all(not math.isnan(b) for b in self.logit_bias.values()), "logit_bias", "numbers")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the law of a token depends on the tokens before it (beyond the logits)."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True)
class Request:
    """One text to generate: `prompt_ids` behind which the target goes on."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Draft:
    """One request's proposal of a round.

    tokens      k guessed ids behind the anchor; empty means plain decoding this round.
    probs       [k, V] fp32, q: the very tensor the tokens were drawn from. None says that the
                proposal was deterministic, that is, q is one-hot at the token.
    confidence  [k] fp32, the drafter's own probability that token i survives given that those
                before it did (paper, eq. 7); None when the drafter has no such head.
    others      k ids, the drafter's second guess at each place, or none if it was not asked: what
                a block may be prepared behind in case the first guess fails. They are no draft.
    ahead       made before the verdict on the tokens in front of it (`engine.pipeline`).
    """

    tokens: tuple[int, ...] = ()
    probs: Tensor | None = None
    confidence: Tensor | None = None
    others: tuple[int, ...] = ()
    ahead: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def truncated(self, length: int) -> Draft:
        """The first `length` tokens; what the scheduler decided to verify."""
        return self if length >= len(self.tokens) else self._part(slice(length))

    def behind(self, length: int) -> Draft:
        """What follows the first `length` tokens."""
        return self._part(slice(length, None))

    def _part(self, part: slice) -> Draft:
        return Draft(
            self.tokens[part],
            None if self.probs is None else self.probs[part],
            None if self.confidence is None else self.confidence[part],
            self.others[part],
            self.ahead,
        )


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probabilities under the target's unmodified softmax (temperature 1)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The n most probable ids with theirs, best first; n as the request asked."""


@dataclass(frozen=True)
class Verdict:
    """What the target made of one draft: `accepted` draft tokens, then its own token.

    `tokens` holds the accepted ones and the bonus behind them: len(tokens) == accepted + 1.
    """

    accepted: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def bonus(self) -> int:
        return self.tokens[-1]


@dataclass(frozen=True)
class Chunk:
    """One emitted token on its way to the user.

    `text` is what became certain with this token: empty while a multi-byte character is incomplete
    or while the tail may still turn out to be a stop string, and then longer than the token itself.
    """

    request_id: str
    token: int
    text: str
    drafted: bool
    """The drafter guessed this token and the target accepted it."""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Span:
    """What a lane did for a while, in seconds of `time.perf_counter`.

    kind: `verify` is a pass of the target; the others are drafting: `fresh` from true features,
    `hit` ahead and used, `miss` ahead and not.
    """

    kind: Literal["verify", "fresh", "hit", "miss"]
    start: float
    end: float


@dataclass(frozen=True)
class Round:
    """One request's share of one round, for `--trace` and for statistics.

    `drafted` is everything the drafter proposed, of which the first `verified` were in the pass and
    the first `accepted` were emitted. `emitted` are the tokens that the round added to the text (it
    ends early at a stop). `predicted` of the verified ones were expected to be accepted, by the
    drafter's confidence, calibrated where the scheduler has a calibration. Times are those of the
    whole pass, shared by all its requests.
    """

    request_id: str
    index: int
    drafted: tuple[int, ...]
    verified: int
    accepted: int
    emitted: tuple[int, ...]
    draft_ms: float
    verify_ms: float
    other_ms: float
    predicted: float = 0.0
    confidence: tuple[float, ...] | None = None
    """[len(drafted)] as in `Draft`: the drafter's own, before any calibration."""
    ahead: bool = False
    """Its draft was ready: made while the tokens in front of it were verified."""
    bet: bool = False
    """While it was verified the next draft was made, and the text went on: the next round's draft
    could have been ready, and is if the verdict was one that was foreseen."""


@dataclass
class Stats:
    """Counters of one request, or of many added up. Every ratio names its denominator.

    The first token of a text comes from the prefill and belongs to no round.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's: rows taken over from a text that began alike."""
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    """Draft tokens that the scheduler had checked: all or the first ones of each draft."""
    accepted: int = 0
    predicted: float = 0.0
    """Expected `accepted`, by the confidence in each draft."""
    ahead: int = 0
    """Rounds whose draft had been made while the tokens in front of it were verified."""
    tokens_ahead: int = 0
    """Tokens that those rounds emitted."""
    round_tokens: int = 0
    """Tokens emitted by rounds: completion_tokens less the one of the prefill."""
    verified_at: list[int] = field(default_factory=list)
    """[k] rounds whose draft token k was verified, from k = 0."""
    tried_at: list[int] = field(default_factory=list)
    """[k] rounds whose draft token k was verified and all before it accepted."""
    accepted_at: list[int] = field(default_factory=list)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    """Of a round: everything that is neither drafting nor the target's pass."""
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    """From arrival to the first token; the mean over requests when added up."""
    decode_ms: float = 0.0
    """From the first token to the last one."""

    def add_round(self, r: Round) -> None:
        self.rounds += 1
        self.drafted += len(r.drafted)
        self.verified += r.verified
        self.accepted += r.accepted
        self.predicted += r.predicted
        self.ahead += r.ahead
        self.tokens_ahead += len(r.emitted) * r.ahead
        self.round_tokens += len(r.emitted)
        tried = min(r.accepted + 1, r.verified)
        counters = (self.verified_at, self.tried_at, self.accepted_at)
        for counts, n in zip(counters, (r.verified, tried, r.accepted), strict=True):
            counts += [0] * (r.verified - len(counts))
            for k in range(n):
                counts[k] += 1
        self.draft_ms += r.draft_ms
        self.verify_ms += r.verify_ms
        self.other_ms += r.other_ms

    @property
    def accepted_length(self) -> float | None:
        """Tokens a round yields, bonus included: round_tokens / rounds."""
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def hit_rate(self) -> float | None:
        """Rounds whose draft was ready / rounds."""
        return self.ahead / self.rounds if self.rounds else None

    @property
    def accepted_length_ahead(self) -> float | None:
        """Tokens of a round whose draft was ready: tokens_ahead / ahead."""
        return self.tokens_ahead / self.ahead if self.ahead else None

    @property
    def accepted_length_fresh(self) -> float | None:
        """Tokens of any other round."""
        rest = self.rounds - self.ahead
        return (self.round_tokens - self.tokens_ahead) / rest if rest else None

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / verified; None when nothing was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """[k] conditional acceptance: rounds that accepted k / rounds that tried it (tried_at).

        Positions that were never tried are left off. A text that ends inside an accepted block
        counts the token behind its end as tried and not accepted.
        """
        pairs = zip(self.accepted_at, self.tried_at, strict=True)
        return [accepted / tried for accepted, tried in pairs if tried]

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed of the text behind its first token (one request)."""
        return self.round_tokens / self.decode_ms * 1e3 if self.decode_ms else None

    @property
    def itl_ms(self) -> float | None:
        """Mean milliseconds between tokens (inter-token latency)."""
        return self.decode_ms / self.round_tokens if self.round_tokens else None

    @staticmethod
    def total(parts: list[Stats]) -> Stats:
        """Sums over requests; `ttft_ms` is averaged."""
        out = Stats()
        for p in parts:
            for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens",
                         "rounds", "drafted", "verified", "accepted", "predicted", "ahead",
                         "tokens_ahead", "round_tokens",
                         "draft_ms", "verify_ms", "other_ms", "prefill_ms", "decode_ms",
                         "ttft_ms"):  # fmt: skip
                setattr(out, name, getattr(out, name) + getattr(p, name))
            for name in ("verified_at", "tried_at", "accepted_at"):
                mine, theirs = getattr(out, name), getattr(p, name)
                mine += [0] * (len(theirs) - len(mine))
                for k, n in enumerate(theirs):
                    mine[k] += n
        if parts:
            out.ttft_ms /= len(parts)
        return out


@dataclass(frozen=True)
class Output:
    """A finished text."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None
