"""Whether two lanes pay: drafting the next block while the present one is verified.

With T_v for a pass of the target, T_d for a draft and r = T_d / T_v, the time of a token falls by

    G = (1 + r) (1 - h delta) / (1 + (1 - eta) kappa r + (1 - h) r + s)

h      share of rounds whose block was ready (hits)
delta  share of tokens that a block drafted ahead loses, because it was made from older features
eta    share of the drafting that really disappears under the verification
kappa  blocks drafted ahead for each one that is used
s      what keeping the lanes in step costs, in units of T_v

so at most 1 + r, and below 1 if h (r - delta (1 + r)) < (1 - eta) kappa r + s. `predicted_gain` is
this formula; `foreseen_gain` what it says before a second lane exists, from times on fewer threads.

`Overlap` decides in a running engine. All that the formula names ends up in two numbers, which
can be observed: milliseconds and tokens of rounds with overlap and without. So it takes turns at
the start, goes on with what was faster, and looks at the other way again later, at doubling
distances while the answer stays the same. Its verdict knows rounds that are over and nothing of
drafts that were not verified, so it cannot bias a text.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark.errors import ConfigError

MODES = ("off", "on", "auto")
"""One lane; two in every round; two where they pay."""
PROBE = 12
"""Rounds of one way before the other gets its turn."""
TURNS = 4
FIRST_WAIT, LONGEST_WAIT = 256, 4096
"""Rounds of the chosen way before the other is tried again."""
MARGIN = 1.02
"""What overlap must gain to be chosen: below lies noise."""
MEMORY, TOKEN_MEMORY = 0.9, 0.998
"""Weight of the past in times and in tokens, each round."""
PRIOR = 50.0
"""Rounds that "both ways yield the same" is worth."""
HOPED_HITS = 0.7
"""Of a drafter that nothing is known of."""


def check_mode(mode: str) -> None:
    """Raise ConfigError for an unknown one."""
    if mode not in MODES:
        raise ConfigError(f"unknown pipeline mode {mode!r}: expected one of {', '.join(MODES)}")


def predicted_gain(
    r: float,
    hit_rate: float,
    delta: float = 0.0,
    *,
    eta: float = 1.0,
    kappa: float = 1.0,
    s: float = 0.0,
) -> float:
    """G of the module docstring: speed with two lanes over speed with one."""
    return (1 + r) * (1 - hit_rate * delta) / (1 + (1 - eta) * kappa * r + (1 - hit_rate) * r + s)


@dataclass(frozen=True)
class LaneTimes:
    """Milliseconds on all threads, and on those that each lane would have to itself."""

    verify: float
    draft: float
    verify_apart: float
    draft_apart: float


def foreseen_gain(t: LaneTimes, hit_rate: float = HOPED_HITS) -> float:
    """The speed that two lanes can hope for: a hit costs the longer lane, a miss both."""
    hit, miss = max(t.verify_apart, t.draft_apart), t.verify_apart + t.draft_apart
    return (t.verify + t.draft) / (hit_rate * hit + (1 - hit_rate) * miss)


@dataclass
class Arm:
    """Fading sums of rounds of one way. Times change with the machine and vary little from round to
    round; tokens vary much and change slowly."""

    rounds: float = 0.0
    ms: float = 0.0
    token_rounds: float = 0.0
    tokens: float = 0.0

    def add(self, ms: float, tokens: int) -> None:
        self.rounds = MEMORY * self.rounds + 1
        self.ms = MEMORY * self.ms + ms
        self.token_rounds = TOKEN_MEMORY * self.token_rounds + 1
        self.tokens = TOKEN_MEMORY * self.tokens + tokens

    def yields(self, usual: float) -> float:
        """Tokens a round; as `usual` until there is evidence."""
        return (self.tokens + PRIOR * usual) / (self.token_rounds + PRIOR)


class Overlap:
    """Ask `choose` before a round, tell `observe` behind it."""

    def __init__(self, *, always: bool = False) -> None:
        """always: overlap every round, whatever it costs."""
        self._always = always
        self._arms = {False: Arm(), True: Arm()}
        self._overlapped = False
        self._left, self._turns = PROBE, TURNS - 1
        self._wait = FIRST_WAIT
        self.losses = 0
        """Verdicts against overlap since the last one for it."""

    def choose(self) -> bool:
        """Whether the coming round overlaps. Asking changes nothing."""
        return self._always or self._overlapped

    @property
    def gain(self) -> float | None:
        """Speed with overlap over speed without, as observed; None while one is unknown."""
        serial, overlapped = self._arms[False], self._arms[True]
        if not (serial.ms and overlapped.ms):
            return None
        usual = (serial.tokens + overlapped.tokens) / (
            serial.token_rounds + overlapped.token_rounds
        )
        faster = serial.ms / serial.rounds * overlapped.rounds / overlapped.ms
        return faster * overlapped.yields(usual) / serial.yields(usual)

    def observe(self, *, overlapped: bool, tokens: int, ms: float) -> None:
        """A round of `ms` milliseconds emitted `tokens`."""
        self._arms[overlapped].add(ms, tokens)
        if self._always or overlapped != self._overlapped:
            return
        self._left -= 1
        if self._left > 0:
            return
        if self._turns:
            self._turns -= 1
            self._overlapped, self._left = not self._overlapped, PROBE
            return
        self._decide()

    def _decide(self) -> None:
        gain = self.gain
        pays = gain is not None and gain > MARGIN
        same = pays == (not self.losses)
        self._wait = min(2 * self._wait, LONGEST_WAIT) if same else FIRST_WAIT
        self.losses = 0 if pays else self.losses + 1
        # The chosen way for long, then a turn of the other, then the next verdict.
        self._overlapped, self._left, self._turns = pays, self._wait, 1
