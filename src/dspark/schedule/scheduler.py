"""What the engine talks to: confidences, costs, policy, gate and monitors behind three calls.

    scheduler = Scheduler("auto", table=table, calibration=calibration)

    asks = scheduler.asks(len(decoding))    # all, one or none; before anything is drafted
    block = scheduler.block(len(decoding), drafter.cap)                   # how long a block
    drafts = propose(...) of as many requests, empty ones of the others
    plan = scheduler.plan(keys, counts, confidences, Load(block, context, prompt_rows), pinned)
    ... one pass over the anchors and the first plan.lengths[r] drafts of each request ...
    scheduler.observe([v.accepted for v in verdicts], Times(draft, verify, other))

`plan` is called once a round, also with empty drafts, with one entry for each request that decodes,
in an order that has nothing to do with what was drawn (that of arrival); `observe` once behind it.
Requests may come and go between rounds: `keys` tell who is who.

`pinned` marks requests whose seeded text must not depend on their company (`policy`): seed given,
sampling, draft with a distribution. The engine lets them draft even where `asks` says no.

A *probe* drafts for one request of many and says what drafting for all of them would be worth: the
share of its tokens and rows is multiplied, the costs are those of the table. So looking whether
drafting pays costs a busy machine one draft and not all.

Times are of the same kind as those that the table was measured from. What the drafter does in
plain rounds, too (taking in features to stay up to date) belongs to `other` in both, or plain
rounds look cheaper than they are.

Without a table nothing adapts to costs: a straight line stands in, the gate stays open, and
`adapts` says so. With one, confidences are corrected by what came of them (`honesty`); whether they
drifted from their calibration is told by the uncorrected ones.

A drafter without confidences is judged by the acceptance of past rounds, at each position the same
for all; that makes even `threshold` depend on the company. The gate closes only under schedulers
that weigh costs: whoever asks for `static:4` gets it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from dspark.schedule.admission import Drafts
from dspark.schedule.blocks import Blocks
from dspark.schedule.calibration import Calibration
from dspark.schedule.cost import CostTable
from dspark.schedule.gate import Gate
from dspark.schedule.honesty import Honesty
from dspark.schedule.monitor import Acceptance, Drift, LiveCost, Times
from dspark.schedule.overlap import PlainRounds
from dspark.schedule.policy import DEFAULT, Load, Plan, parse


class Scheduler:
    """One for each engine and drafter."""

    def __init__(
        self,
        verify: str = DEFAULT,
        *,
        table: CostTable | None = None,
        calibration: Calibration | None = None,
        plain: PlainRounds | None = None,
        longest: int | None = None,
    ) -> None:
        """verify: see `policy.parse`. Raises ConfigError for an unknown one.

        longest: no longer blocks are asked for

        plain: hears of rounds of single requests, if these are rounds of one lane (`overlap`)
        """
        self.cost = None if table is None else LiveCost(table)
        self.policy = parse(verify, self.cost)
        self.calibration = calibration
        self.gate = None if self.cost is None or self.policy.own_draft_only else Gate()
        self.drift = Drift(() if calibration is None else calibration.ece_after)
        self.acceptance = Acceptance()
        self._plain = plain
        self.honesty = None if self.gate is None else Honesty()
        self.blocks = None if self.cost is None or self.gate is None else Blocks(self.cost)
        self.longest = longest
        self._cap = 0
        self._round: tuple[Drafts, Drafts, Plan, Load, bool] | None = None

    @property
    def adapts(self) -> bool:
        """Whether lengths follow measured costs."""
        return self.cost is not None and not self.policy.own_draft_only

    def asks(self, requests: int) -> int:
        """Of how many of the `requests` drafts are wanted in the coming round: all, one (a probe)
        or none; from past rounds alone."""
        return requests if self.gate is None else self.gate.asks(requests)

    def should_draft(self, requests: int) -> bool:
        """Whether drafts are wanted of any; also where no request decodes yet."""
        return self.gate is None or self.gate.should_draft(requests)

    def block(self, requests: int, cap: int) -> int:
        """How many tokens a drafter of at most `cap` shall draft in the coming round; 0: none."""
        self._cap = cap = cap if self.longest is None else min(cap, self.longest)
        if not self.should_draft(requests):
            return 0
        probing = self.asks(requests) < requests
        return cap if self.blocks is None or probing else self.blocks.length(requests, cap)

    def plan(
        self,
        keys: Sequence[Hashable],
        counts: Sequence[int],
        confidences: Sequence[Sequence[float] | None],
        load: Load,
        pinned: Sequence[bool] = (),
    ) -> Plan:
        """How much of each draft to verify.

        keys         [R] identities;  counts  [R] drafted tokens, possibly 0
        confidences  [R] the drafter's own, uncalibrated, or None if it has none
        """
        if not any(counts):  # many rounds are plain, and must cost no more than plain ones
            n = len(keys)
            plan = Plan((0,) * n, (0.0,) * n)
            nothing = Drafts.none(keys)
            self._round = (nothing, nothing, plan, load, False)
            return plan
        flags = pinned or [False] * len(keys)
        filled: list[Sequence[float]] = []
        judged = True
        for count, confidence, alone in zip(counts, confidences, flags, strict=True):
            if confidence is not None:
                filled.append(confidence[:count])
            elif alone:  # nothing of its own to judge by: the whole draft
                filled.append([1.0] * count)
            else:
                filled.append(self.acceptance.confidence(count))
            judged &= confidence is not None or not count
        temperatures = self.calibration.temperatures if self.calibration and judged else None
        claimed = Drafts.of(keys, filled, pinned=flags, temperatures=temperatures)
        drafts = claimed if self.honesty is None else self.honesty.applied(claimed)
        plan = self.policy.plan(drafts, load)
        self._round = (claimed, drafts, plan, load, judged)
        return plan

    def observe(self, accepted: Sequence[int], times: Times) -> None:
        """The planned round is over: accepted drafts [R] of each request, and what it took."""
        assert self._round is not None, "plan comes before observe"
        claimed, drafts, plan, load, judged = self._round
        self._round = None
        requests = len(drafts)
        if not requests:
            return
        if drafts.survival.size:
            self.acceptance.observe(plan.lengths, accepted)
        if self._plain is not None and requests == 1 and not load.extra_rows:
            self._remember(self._plain, int(drafts.counts[0]), plan.lengths[0], accepted[0], times)
        if judged:
            self.drift.observe(claimed.survival, plan.lengths, accepted)
            if self.honesty is not None:
                self.honesty.observe(drafts, plan.lengths, accepted)
        if self.blocks is not None and load.block and self._cap:  # two lanes have their own length
            self.blocks.observe(drafts, load.block, self._cap)
        if self.cost is None:
            return
        base = requests + load.extra_rows
        rows = sum(plan.lengths)
        asked = self._asked(drafts)
        if not load.extra_rows:  # prompt rows want no logits: their passes are of another kind
            shape = (base + rows, requests, load.context, load.block)
            self.cost.observe(times, *shape, drafting=asked)
        if self.gate is None:
            return
        if not load.block:
            self.gate.observe_plain(requests)
            return
        share = requests / asked
        whole = (base + round(rows * share), requests, load.context, load.block)
        plain_ms = self.cost.present(base, requests, load.context, 0).total
        self.gate.observe(
            requests,
            asked=asked,
            predicted=requests + sum(plan.predicted) * share,
            emitted=requests + sum(accepted) * share,
            spent_ms=self.cost.present(*whole).total,
            plain_ms=plain_ms,
            lost=times.total / plain_ms - 1 - sum(accepted) / requests,
        )

    def _asked(self, drafts: Drafts) -> int:
        """How many requests the drafter was asked about. In a probe that is one, or those that have
        a draft: pinned ones draft in any case, and another engine may ask for all."""
        requests = len(drafts)
        if self.asks(requests) == requests:
            return requests
        return max(int(np.count_nonzero(drafts.counts)), 1)

    def _remember(
        self, plain: PlainRounds, drafted: int, verified: int, accepted: int, times: Times
    ) -> None:
        """A round of one request. In two lanes the draft behind the verified ones would be coupled
        to the bonus; a draft that was verified whole would have kept its last one for that."""
        behind = 1.0
        if verified < drafted:
            behind = self.acceptance.confidence(verified + 1)[verified]
        hit = behind if drafted and accepted == verified else 0.0
        plain.add_round(times.draft, times.verify, times.other, accepted + 1, hit)

    @property
    def messages(self) -> list[str]:
        """What whoever runs the engine should know now; one line each, none if all is well."""
        # Confidences that nobody calibrated are not expected to be right.
        drift = self.drift.message if self.calibration else None
        found = [drift, self.cost.message if self.cost else None]
        return [m for m in found if m is not None]
