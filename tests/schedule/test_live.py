"""A simulated clock: what the monitors notice, when the gate closes, what the scheduler chooses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dspark.errors import ConfigError
from dspark.schedule.calibration import Calibration
from dspark.schedule.cost import CostTable
from dspark.schedule.gate import FIRST_WAIT, LONGEST_WAIT, PROBING, Gate
from dspark.schedule.monitor import STALE_ROUNDS, Acceptance, Drift, LiveCost, Times
from dspark.schedule.policy import Load
from dspark.schedule.scheduler import Scheduler

K = 5


def table(row: float, draft: float = 1.0, steps: int = 1) -> CostTable:
    """10 ms and `row` for each further row, in steps of `steps` rows."""
    verify = [(t, 0.0, 10 + row * steps * ((t - 1) // steps)) for t in range(1, 65)]
    return CostTable.fit({}, verify, [(r, K, draft) for r in (1, 32)], [(1, 0.2), (32, 0.2)])


class Clock:
    """An engine without a model: drafts are accepted by chance, rounds cost what `truth` says.

    `times` scales the parts as time goes on; noise multiplies them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        truth: CostTable,
        *,
        chance: float = 0.9,
        noise: float = 0.05,
        heads: bool = True,
        seed: int = 0,
    ) -> None:
        self.scheduler, self.truth, self.chance, self.noise = scheduler, truth, chance, noise
        self.heads = heads
        self.rng = np.random.default_rng(seed)
        self.drafted: list[int] = []
        """How many requests were drafted for in each round."""
        self.lengths: list[tuple[int, ...]] = []
        self.spent = self.plain = 0.0
        self.tokens = 0

    def run(self, rounds: int, requests: int = 1) -> None:
        for _ in range(rounds):
            asked = self.scheduler.asks(requests)
            block = K if asked else 0
            c = np.clip(self.rng.normal(self.chance, 0.05, (requests, block)), 0.01, 0.99)
            c[asked:] = 0.0
            counts = [block] * asked + [0] * (requests - asked)
            given = [
                row[:n] if self.heads else None for row, n in zip(c.tolist(), counts, strict=True)
            ]
            plan = self.scheduler.plan(range(requests), counts, given, Load(block))
            hits = np.cumprod(self.rng.random(c.shape) < c, axis=1).sum(axis=1)
            accepted = [min(int(h), n) for h, n in zip(hits, plan.lengths, strict=True)]
            rows = requests + sum(plan.lengths)
            d, v, o = self.rng.lognormal(0, self.noise, 3)
            if self.rng.random() < 0.02:
                v *= 30  # a hiccup
            t = self.truth
            times = Times(
                t.draft_ms(asked, block) * d, t.verify_ms(rows) * v, t.other_ms(requests) * o
            )
            self.scheduler.observe(accepted, times)
            self.drafted.append(asked)
            self.lengths.append(plan.lengths)
            self.spent += t.draft_ms(asked, block) + t.verify_ms(rows) + t.other_ms(requests)
            self.tokens += requests + sum(accepted)
            self.plain += t.round_ms(requests, requests=requests)

    def gain(self, requests: int) -> float:
        """Tokens per millisecond over plain decoding's; true costs, hiccups left out."""
        return self.tokens / self.spent * self.plain / (requests * len(self.drafted))


# -- what is chosen ------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("verify", ["causal", "lagged", "auto"])
def test_steep_costs_choose_nothing_and_cheap_ones_everything(verify: str, requests: int) -> None:
    steep, cheap = (Clock(Scheduler(verify, table=t), t) for t in (table(12.0), table(0.05)))
    for clock in (steep, cheap):
        clock.run(12, requests)
    assert set(steep.lengths) == {(0,) * requests}
    assert set(cheap.lengths[3:]) == {(K,) * requests}


def test_the_budget_falls_as_users_grow() -> None:
    """Constant costs shared by more rows: each row weighs more."""
    t = table(2.0)
    budgets = []
    for requests in (1, 4, 16):
        clock = Clock(Scheduler("lagged", table=t), t, chance=0.7)
        clock.run(20, requests)
        budgets.append(np.mean([sum(n) / requests for n in clock.lengths[4:]]))
    assert all(a > b + 0.1 for a, b in itertools.pairwise(budgets))


def test_staircases_are_used_to_their_edge() -> None:
    """Rows cost in tiles of 8: with 4 users a schedule ends where a tile does, and beyond the first
    one, where the early stop halts."""
    t = table(0.4, steps=8)
    clock = Clock(Scheduler("lagged", table=t), t, chance=0.8)
    early = Clock(Scheduler("causal", table=t), t, chance=0.8)
    for c in (clock, early):
        c.run(60, 4)
    rows = [4 + sum(n) for n in clock.lengths[2:]]
    assert np.mean([r % 8 == 0 for r in rows]) > 0.9 and np.mean(rows) > 12
    assert {4 + sum(n) for n in early.lengths} == {8}
    assert clock.gain(4) > 1.1 * early.gain(4)


# -- costs that change ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["verify", "draft"])
def test_doubled_costs_are_noticed_within_50_rounds(part: str) -> None:
    before = table(1.0, draft=4.0)
    clock = Clock(Scheduler("auto", table=before), before, noise=0.1)
    cost = clock.scheduler.cost
    assert cost is not None
    clock.run(200)
    assert cost.scales == {"draft": 1, "verify": 1, "other": 1} and not cost.stale
    clock.truth = before.scaled(**{part: 2.0})
    clock.run(16)
    assert cost.scales[part] > 1.5
    clock.run(29)
    assert cost.scales[part] == pytest.approx(2.0, rel=0.15)
    assert cost.current.round_ms(4, block=K) == pytest.approx(
        clock.truth.round_ms(4, block=K), rel=0.15
    )
    assert not clock.scheduler.messages
    clock.run(STALE_ROUNDS - 25)
    assert cost.stale and "measured again" in clock.scheduler.messages[0]
    clock.truth = before
    clock.run(45)
    assert not cost.stale and cost.scales[part] == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize(
    ("part", "factor"), [("draft", 6.0), ("draft", 1 / 6), ("verify", 4.0), ("verify", 1 / 4)]
)
def test_a_table_that_was_measured_on_a_busy_machine_is_found_out(
    part: str, factor: float, requests: int
) -> None:
    """Whichever part it has too dear or too cheap: what pays is done, and what does not is not."""
    for draft, chance, pays in ((3.0, 0.9, True), (30.0, 0.5, False)):
        truth = table(0.5, draft=draft)
        wrong = Scheduler("auto", table=truth.scaled(**{part: factor}))
        clock = Clock(wrong, truth, chance=chance)
        clock.run(1000, requests)
        late = clock.drafted[-100:]
        assert set(late) == {requests} if pays else sum(late) <= 8


def test_outliers_and_small_parts_change_nothing() -> None:
    cost = LiveCost(table(1.0))
    honest = cost.foreseen(3, 1, 0, K)
    for i in range(300):
        odd = honest
        if i % 3 == 0:
            odd = Times(honest.draft * 50, honest.verify * 40, 100.0)
        cost.observe(replace(odd, other=odd.other * 5), 3, 1, 0, K)
        assert cost.current is cost.table and not cost.stale and cost.message is None
    slower = Times(honest.draft * 1.2, honest.verify * 1.2, 0.2)
    for _ in range(100):
        cost.observe(slower, 3, 1, 0, K)
    assert cost.current is cost.table and not cost.stale  # a fifth is within a third
    assert cost.present(3, 1, 0, K).verify == pytest.approx(honest.verify * 1.2)


# -- drafting or not -----------------------------------------------------------------------------


def switches(drafted: Sequence[bool]) -> int:
    return sum(a and not b for a, b in itertools.pairwise(drafted))


@pytest.mark.parametrize("requests", [1, 16])
def test_a_drafter_that_does_not_pay_is_left_alone(requests: int) -> None:
    """Steep rows and a dear drafter: soon plain decoding, but for probes that grow rarer."""
    t = table(12.0, draft=5.0)
    clock = Clock(Scheduler("auto", table=t), t)
    clock.run(60, requests)
    assert not any(clock.drafted[16:])
    clock.drafted, clock.spent, clock.plain, clock.tokens = [], 0.0, 0.0, 0
    clock.run(1600, requests)
    late = clock.drafted[-800:]
    assert sum(late) <= 20 and any(clock.drafted)
    assert max(clock.drafted) == 1, "a probe drafts for one of them"
    assert clock.gain(requests) > 0.99


def test_a_drafter_that_pays_is_never_stopped() -> None:
    t = table(0.5)
    for seed in range(2):
        clock = Clock(Scheduler("auto", table=t), t, chance=0.8, noise=0.3, seed=seed)
        clock.run(700)
        assert all(clock.drafted) and clock.gain(1) > 1.5


def test_the_gate_opens_again_when_drafting_pays_again() -> None:
    t = table(3.0, draft=4.0)
    clock = Clock(Scheduler("auto", table=t), t, chance=0.15)
    clock.run(FIRST_WAIT)
    assert not any(clock.drafted[32:])
    clock.chance = 0.97
    clock.run(4 * FIRST_WAIT)
    assert all(clock.drafted[-20:])


def test_a_dear_probe_is_followed_by_a_long_wait() -> None:
    """A probe may lose a hundredth of all time, whatever it costs; a hopeless one ends early."""
    for lost, waits in ((0.2, 2 * FIRST_WAIT), (3.0, 4 * 3.0 / PROBING), (1e6, LONGEST_WAIT)):
        gate = Gate()
        asked = []
        for _ in range(20 + FIRST_WAIT + LONGEST_WAIT):
            asked.append(gate.asks(16))
            if not asked[-1]:
                gate.observe_plain(16)
                continue
            cost = {"predicted": 16.0, "emitted": 16.0, "spent_ms": 20.0, "plain_ms": 10.0}
            gate.observe(16, **cost, asked=asked[-1], lost=lost)
        probes = [i for i, n in enumerate(asked) if n == 1]
        assert probes[3] - probes[0] == 3, "four rounds of one request"
        assert (probes[4:] or [len(asked)])[0] - probes[3] - 1 == pytest.approx(waits, abs=20)


@pytest.mark.parametrize("requests", [1, 4])
def test_noise_around_break_even_does_not_flap(requests: int) -> None:
    """Gains of 0.97 to 1.03 with full luck of acceptance."""
    rng = np.random.default_rng(1)
    for mean in (0.97, 1.0, 1.03):
        gate = Gate()
        drafted = []
        for _ in range(4000):
            drafted.append(gate.should_draft(requests))
            if not drafted[-1]:
                gate.observe_plain(requests)
                continue
            tokens = 2.5 + rng.normal(0, 1.2) / requests**0.5
            gate.observe(
                requests,
                predicted=requests * tokens,
                emitted=requests * tokens,
                spent_ms=10 * 2.5 / mean,
                plain_ms=10.0,
            )
        assert switches(drafted) <= 12
        assert switches(drafted[2000:]) <= 3


def test_each_load_has_its_own_verdict() -> None:
    gate = Gate()
    for _ in range(40):
        if gate.should_draft(32):
            gate.observe(32, predicted=64, emitted=64, spent_ms=30, plain_ms=10)
    assert not gate.should_draft(32) and gate.should_draft(1) and gate.should_draft(8)
    assert not gate.should_draft(64), "a larger load begins as the smaller one rests"
    for _ in range(2 * FIRST_WAIT):
        gate.observe_plain(64)
    assert gate.should_draft(64), "and is tried later"


def test_the_gate_trusts_what_is_emitted_over_what_was_predicted() -> None:
    """A head that promises 3 tokens and delivers 1 is found out."""
    gate = Gate()
    for _ in range(400):
        if gate.should_draft(1):
            gate.observe(1, predicted=3, emitted=1, spent_ms=20, plain_ms=10)
        else:
            gate.observe_plain(1)
    assert not gate.should_draft(1)


def test_baselines_and_tableless_schedulers_are_not_gated() -> None:
    t = table(12.0, draft=9.0)
    for scheduler in (Scheduler("static:2", table=t), Scheduler("all", table=t), Scheduler()):
        clock = Clock(scheduler, t)
        clock.run(300)
        assert all(clock.drafted) and not scheduler.adapts
    assert Scheduler("auto", table=t).adapts
    with pytest.raises(ConfigError, match="static:K"):
        Scheduler("fast")


# -- confidences that lie ------------------------------------------------------------------------


def verdicts(drift: Drift, rounds: int, true: float, said: float, seed: int = 0) -> int:
    """Feed rounds of 4 requests; how many of them ended with a warning."""
    rng = np.random.default_rng(seed)
    survival = np.cumprod(np.full((3, 4), said), axis=0)
    warned = 0
    for _ in range(rounds):
        hits = np.cumprod(rng.random((3, 4)) < true, axis=0).sum(axis=0)
        verified = rng.integers(1, 4, 4)
        drift.observe(survival, verified.tolist(), np.minimum(hits, verified).tolist())
        warned += bool(drift.drifted)
    return warned


def test_drift_is_reported_and_only_drift() -> None:
    for seed in range(3):
        drift = Drift()
        assert verdicts(drift, 1500, 0.8, 0.8, seed) == 0 and drift.message is None
    assert verdicts(drift, 300, 0.6, 0.8) > 100
    assert drift.message is not None and "draft 1 by +" in drift.message
    verdicts(drift, 600, 0.8, 0.8)
    assert drift.message is None  # and back
    t = drift.totals
    assert len(t) == 3 and t[0].verified == 4 * 2400 > t[1].verified > t[2].verified
    assert t[0].gap == pytest.approx(0.2 * 300 / 2400, abs=0.01)


def test_the_band_is_what_calibration_left_over() -> None:
    assert verdicts(Drift(bands=(0.15, 0.15, 0.15)), 800, 0.7, 0.8) == 0
    assert verdicts(Drift(), 800, 0.7, 0.8) > 100


def test_acceptance_learns_and_forgets() -> None:
    seen = Acceptance()
    assert seen.confidence(3) == [0.7] * 3
    for _ in range(500):
        seen.observe([3, 2], [1, 1])
    first, second, third = seen.confidence(3)
    assert first > 0.97 and second < 0.03 and third == 0.7
    for _ in range(1000):
        seen.observe([0], [0])
    assert seen.confidence(2) == pytest.approx([0.7, 0.7], abs=0.02)


@pytest.mark.parametrize(("chance", "row", "low", "high"), [(0.9, 0.5, 4, 5), (0.2, 5.0, 0, 1)])
def test_drafters_without_confidence_are_judged_by_their_past(
    chance: float, row: float, low: float, high: float
) -> None:
    t = table(row, draft=0.1)
    clock = Clock(Scheduler("causal", table=t), t, chance=chance, heads=False)
    clock.run(300)
    late = [n for (n,), d in zip(clock.lengths[100:], clock.drafted[100:], strict=True) if d]
    assert low <= np.mean(late) <= high


def test_calibration_reaches_the_schedule_and_the_statistics() -> None:
    sure = [[0.9, 0.9]]
    plain, cool = Scheduler("static:2"), Scheduler("static:2", calibration=Calibration((2.0, 2.0)))
    assert plain.plan(["a"], [2], sure, Load(2)).predicted == pytest.approx((0.9 + 0.81,))
    assert cool.plan(["a"], [2], sure, Load(2)).predicted == pytest.approx((0.75 + 0.5625,))


def test_a_pinned_draft_without_confidence_is_verified_whole() -> None:
    s = Scheduler("causal", table=table(12.0))
    plan = s.plan(["a", "b"], [4, 4], [None, None], Load(4), pinned=[True, False])
    assert plan.lengths == (4, 0)


def test_rounds_without_requests_or_drafts_pass() -> None:
    s = Scheduler("auto", table=table(1.0))
    for keys in ([], ["a"], ["a", "b"]):
        n = len(keys)
        assert s.plan(keys, [0] * n, [None] * n, Load(0)).lengths == (0,) * n
        s.observe([0] * n, Times(0, 10, 0.2))
