"""Whether to draft at all in the coming round.

A schedule of length 0 saves the rows, not the draft. When drafting itself does not pay (a busy
machine, a hard text, a drafter as slow as its target) the engine should decode plainly for a while
and look again later. The decision is taken before anything is drafted, from rounds that are over,
so it cannot bias the text (`admission`); it makes seeded sampling depend on the machine, as costs
do, so requests that promise reproducibility draft regardless.

The measure is time. A drafting round that yielded n tokens for R requests did the work of n / R
plain rounds; `worth` is what those would have taken, `spent` what the round took, both by the cost
table at the machine's present speed (`monitor.LiveCost.present`: medians, no single hiccups):

    gain = sum of worth / sum of spent        over recent drafting rounds, older ones fading

What noise is left is luck in acceptance. So tokens are counted as *predicted* times the slow ratio
of emitted to predicted, which has the same mean and much less noise.

Gain depends on the load, so each power of two of requests has its own state: going from 1 user to
32 and back asks no one to learn anew. It falls with the load, on every machine, because rows that
were nearly free beside one another begin to cost: so a load that is met for the first time begins
plainly where the next smaller one that is known rests.

    drafting --(gain below CLOSE after enough rounds)--> plain, for `wait` rounds
    plain    --(waited)--> probing: rounds in which one request drafts, with fresh sums
    probing  --(gain above OPEN)--> drafting;   --(else)--> plain, for twice as long

Hysteresis: OPEN is above CLOSE, and every closing doubles the wait, up to a bound, until drafting
has paid for long. Noise around a gain of 1 can thus flip the state a few times early on and then
hardly ever; being wrong there costs nothing by definition.

*The price of looking.* A probe drafts for one request and foresees what all would bring
(`scheduler`), so it costs little where plain rounds are long. It ends early where the gain is
HOPELESS. And it is priced: what its rounds took beyond the time of plain ones, catching up with
the text included, may be PROBING of all time at most, so a dear probe is followed by a long wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CLOSE = 0.98
OPEN = 1.03
MEMORY = 0.97
"""Weight of the past in the sums, each drafting round."""
HOPELESS = 0.85
"""A probe that gains less ends after MIN_ROUNDS."""
EVIDENCE = 16
"""Drafts that a verdict needs; a probe takes half."""
MIN_ROUNDS = 4
FIRST_WAIT = 128
"""Plain rounds before the first probe."""
LONGEST_WAIT = 4096
PROBING = 0.01
"""Share of time that probes may lose, as far as LONGEST_WAIT allows."""
FORGIVEN = 512
"""Drafting rounds after which the wait is short again."""

Mode = Literal["drafting", "plain", "probing"]


@dataclass
class Lane:
    """The state at one level of load."""

    mode: Mode = "drafting"
    worth: float = 0.0
    spent: float = 0.0
    rounds: int = 0
    """Drafting rounds in this mode, or plain ones."""
    evidence: int = 0
    lost: float = 0.0
    """Plain rounds that this probe has cost so far."""
    wait: int = FIRST_WAIT // 2
    """Doubled by every closing."""
    due: int = 0
    """Plain rounds until the next probe: `wait`, or more if the last one was dear."""
    switches: int = 0

    @property
    def gain(self) -> float | None:
        return self.worth / self.spent if self.spent else None

    def enter(self, mode: Mode, *, keep: bool = False) -> None:
        self.mode, self.rounds, self.evidence, self.lost = mode, 0, 0, 0.0
        self.switches += mode != "probing"
        if not keep:
            self.worth = self.spent = 0.0


class Gate:
    """Ask `asks` before every round, tell `observe` or `observe_plain` after it."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self._predicted = self._emitted = 0.0

    def lane(self, requests: int) -> Lane:
        level = max(requests, 1).bit_length()
        if level not in self.lanes:
            lane = self.lanes[level] = Lane()
            smaller = max((known for known in self.lanes if known < level), default=None)
            if smaller is not None and self.lanes[smaller].mode == "plain":
                self._close(lane)
        return self.lanes[level]

    def should_draft(self, requests: int) -> bool:
        """Whether the coming round of `requests` drafts. Asking changes nothing."""
        lane = self.lane(requests)
        return lane.mode != "plain" or lane.rounds >= lane.due

    def asks(self, requests: int) -> int:
        """Of how many: all, one in a probe, or none."""
        if self.lane(requests).mode == "drafting":
            return requests
        return min(requests, int(self.should_draft(requests)))

    def observe_plain(self, requests: int) -> None:
        """A round without drafts is over."""
        lane = self.lane(requests)
        if lane.mode == "plain":
            lane.rounds += 1

    def observe(
        self,
        requests: int,
        *,
        predicted: float,
        emitted: float,
        spent_ms: float,
        plain_ms: float,
        asked: int | None = None,
        lost: float = 0.0,
    ) -> None:
        """A drafting round is over. What is said of it holds for drafts of all requests; in a probe
        it is foreseen from the `asked` ones (None: all were).

        predicted    tokens expected of it, the target's own included (no prediction: `emitted`)
        emitted      tokens it yielded
        spent_ms     what it cost;  plain_ms  what it would have cost to decode plainly
        lost         plain rounds that it really took, less those that its tokens were worth
        """
        lane = self.lane(requests)
        if lane.mode == "plain":
            lane.enter("probing")
        slow = MEMORY ** (1 / 4)
        self._predicted = slow * self._predicted + predicted
        self._emitted = slow * self._emitted + emitted
        honest = self._emitted / self._predicted if self._predicted else 1.0
        lane.worth = MEMORY * lane.worth + predicted * honest * plain_ms / requests
        lane.spent = MEMORY * lane.spent + spent_ms
        lane.rounds += 1
        lane.evidence += requests if asked is None else asked
        lane.lost += lost
        self._decide(lane)

    def _decide(self, lane: Lane) -> None:
        gain = lane.gain
        needed = EVIDENCE if lane.mode == "drafting" else EVIDENCE // 2
        if gain is None or lane.rounds < MIN_ROUNDS:
            return
        if lane.evidence < needed and not (lane.mode == "probing" and gain < HOPELESS):
            return
        if lane.mode == "probing":
            if gain > OPEN:
                lane.enter("drafting", keep=True)
            else:
                self._close(lane)
        elif gain < CLOSE:
            self._close(lane)
        elif lane.rounds >= FORGIVEN:
            lane.wait, lane.rounds = FIRST_WAIT // 2, MIN_ROUNDS

    @staticmethod
    def _close(lane: Lane) -> None:
        lane.due = lane.wait = min(2 * lane.wait, LONGEST_WAIT)
        if lane.mode == "probing":
            lane.due = min(max(lane.wait, round(lane.lost / PROBING)), LONGEST_WAIT)
            lane.switches -= 1  # a failed probe is no switch
        lane.enter("plain")
