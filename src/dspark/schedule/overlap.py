"""Whether two lanes pay: drafting the next block while the present one is verified.

With T_v for a pass of the target, T_d for a draft and r = T_d / T_v, the time of a token falls by

    G = (1 + r) (1 - h delta) / (1 + (1 - eta) kappa r + (1 - h) r + s)

h      share of rounds whose block was ready (hits)
delta  share of tokens that a block drafted ahead loses, because it was made from older features
eta    share of the drafting that really disappears under the verification
kappa  blocks drafted ahead for each one that is used
s      what keeping the lanes in step costs, in units of T_v

so at most 1 + r, and below 1 if h (r - delta (1 + r)) < (1 - eta) kappa r + s. `predicted_gain` is
this formula; `foreseen_gain` the same for lanes that take threads from one another.

No second lane is needed to know the most of it. A round is a hit when all verified drafts are
accepted and the one behind them is, too, which `PlainRounds` reads off rounds of one lane, with
their times. delta and s are constants until a lane exists. Only where that promises more than
MARGIN is a lane begun.

Then `Overlap` decides from round to round, on a budget. A round in two lanes owes what it took
beyond the plain time of its tokens, or pays back what it saved. Lanes that owe ALLOWED plain rounds
rest, and earn another look with SHARE of every plain round meanwhile. So two lanes never cost more
than ALLOWED rounds and SHARE of the time, whatever was foreseen and however the machine changes; a
gain of a tenth is rarely mistaken for a loss. All of it knows rounds that are over and nothing of
drafts that were not verified, so it cannot bias a text.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark.errors import ConfigError

MODES = ("off", "on", "auto")
"""One lane; two in every round; two where they pay."""
EVIDENCE = 24
"""Plain rounds before anything is said of two lanes."""
MARGIN = 1.05
"""Gain that must be foreseen to begin a lane: below lies what the formula does not know."""
DELTA = 0.15
"""Loss of blocks drafted ahead, as long as nothing is known; what the nano DeepSeek-V4 loses."""
STEP_MS = 0.5
"""To ask a process and be answered, before it was measured."""
ALLOWED, CREDIT = 2.0, 8.0
"""Plain rounds that two lanes may owe, and that may be put aside for worse times."""
SHARE = 0.01
"""Of a plain round, earned by each for another look at two lanes."""
RETRY = 1.0
"""Plain rounds that a resting lane must have earned."""
LOOK_EVERY, LOOK = 256, 4
"""Overlapped rounds, and the plain ones behind them that keep the comparison young."""
MEMORY, TOKEN_MEMORY = 0.9, 0.998
"""Weight of the past in times and in tokens, each round: times change with the machine and vary
little from round to round, tokens vary much and change slowly."""


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
    """Milliseconds of a pass and of a draft on all threads, of both on the threads that each lane
    would have to itself, and of the rest of a round."""

    verify: float
    draft: float
    verify_apart: float
    draft_apart: float
    other: float = 0.0

    @property
    def slower(self) -> tuple[float, float]:
        """How much longer a pass and a draft take apart; 1 where nothing took any time."""
        verify = self.verify_apart / self.verify if self.verify else 1.0
        return verify, self.draft_apart / self.draft if self.draft else 1.0


def foreseen_gain(
    t: LaneTimes, hit_rate: float, delta: float = DELTA, step_ms: float = STEP_MS
) -> float:
    """Speed with two lanes over speed with one: a hit costs the longer lane, a miss one more draft.

    hit_rate   of blocks from true features; those drafted ahead are hit behind less often, by delta
    step_ms    s, in milliseconds
    """
    h = hit_rate / (1 + delta * hit_rate)
    hit = max(t.verify_apart, t.draft_apart) + t.other + step_ms
    one = t.verify + t.draft + t.other
    return one * (1 - h * delta) / (hit + (1 - h) * t.draft_apart)


@dataclass
class Rounds:
    """Fading sums of rounds of one kind."""

    count: int = 0
    """All of them, without fading."""
    weight: float = 0.0
    total_ms: float = 0.0
    token_weight: float = 0.0
    tokens: float = 0.0

    def add(self, ms: float, tokens: int) -> None:
        self.count += 1
        self.weight = MEMORY * self.weight + 1
        self.total_ms = MEMORY * self.total_ms + ms
        self.token_weight = TOKEN_MEMORY * self.token_weight + 1
        self.tokens = TOKEN_MEMORY * self.tokens + tokens

    @property
    def ms(self) -> float:
        """Of a round."""
        return self.total_ms / self.weight

    @property
    def yields(self) -> float:
        """Tokens of a round."""
        return self.tokens / self.token_weight


@dataclass
class PlainRounds(Rounds):
    """Rounds of single requests in one lane, and what they say of two. Rounds that are only added
    (`add`) say nothing of that."""

    shown: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    judged: float = 0.0
    hits: float = 0.0

    def add_round(
        self, draft_ms: float, verify_ms: float, other_ms: float, tokens: int, hit: float
    ) -> None:
        """hit: the chance that the next block would have been ready."""
        self.add(draft_ms + verify_ms + other_ms, tokens)
        self.shown = MEMORY * self.shown + 1
        self.draft_ms = MEMORY * self.draft_ms + draft_ms
        self.verify_ms = MEMORY * self.verify_ms + verify_ms
        self.other_ms = MEMORY * self.other_ms + other_ms
        self.judged = TOKEN_MEMORY * self.judged + 1
        self.hits = TOKEN_MEMORY * self.hits + hit

    @property
    def hit_rate(self) -> float:
        return self.hits / self.judged

    def lane_times(self, measured: LaneTimes | None) -> LaneTimes:
        """These rounds, with each lane as much slower by itself as was `measured`; None: not."""
        slower = (1.0, 1.0) if measured is None else measured.slower
        verify, draft = self.verify_ms / self.shown, self.draft_ms / self.shown
        other = self.other_ms / self.shown
        return LaneTimes(verify, draft, slower[0] * verify, slower[1] * draft, other)


class Overlap:
    """Ask `choose` before a round, tell `observe` behind it."""

    def __init__(self, *, always: bool = False, plain: Rounds | None = None) -> None:
        """always: overlap every round, whatever it costs.  plain: rounds without a second lane,
        which may go on to be added to by others."""
        self._always = always
        self.plain = Rounds() if plain is None else plain
        self.overlapped = Rounds()
        self._known = self.plain.count
        """Plain rounds whose earnings are in `_owed`."""
        self._owed = 0.0
        self._rests = False
        self._in_a_row = self._look = 0

    def choose(self) -> bool:
        """Whether the coming round overlaps. Asking changes nothing."""
        if self._always:
            return True
        return self.plain.count >= EVIDENCE and not self._look and not self.rests

    @property
    def rests(self) -> bool:
        """Two lanes have lost what they were allowed to, and not earned another look yet."""
        return self._rests and self._owed - self._earned > ALLOWED - RETRY

    @property
    def _earned(self) -> float:
        return SHARE * (self.plain.count - self._known)

    @property
    def gain(self) -> float | None:
        """Speed with overlap over speed without, as observed; None while one is unknown."""
        if not (self.plain.count and self.overlapped.count):
            return None
        plain, overlapped = self.plain, self.overlapped
        return plain.ms / overlapped.ms * overlapped.yields / plain.yields

    def observe(self, *, overlapped: bool, tokens: int, ms: float) -> None:
        """A round of `ms` milliseconds emitted `tokens`."""
        if not overlapped:
            self.plain.add(ms, tokens)
            self._look = max(self._look - 1, 0)
            return
        self.overlapped.add(ms, tokens)
        if self._always or not self.plain.count:
            return
        excess = ms / self.plain.ms - tokens / self.plain.yields
        # One round that stood still says nothing of the others.
        owed = self._owed - self._earned + min(excess, ALLOWED)
        self._known, self._owed = self.plain.count, max(owed, -CREDIT)
        self._rests = self._owed >= ALLOWED
        self._in_a_row += 1
        if self._in_a_row == LOOK_EVERY:
            self._in_a_row, self._look = 0, LOOK
