"""What the engine talks to: confidences, costs, policy, gate and monitors behind three calls.

    scheduler = Scheduler("auto", table=table, calibration=calibration)

    block = K if scheduler.should_draft(len(decoding)) else 0    # before anything is drafted
    drafts = propose(...) if block else empty ones
    plan = scheduler.plan(keys, counts, confidences, Load(block, context, prompt_rows), pinned)
    ... one pass over the anchors and the first plan.lengths[r] drafts of each request ...
    scheduler.observe([v.accepted for v in verdicts], Times(draft, verify, other))

`plan` is called once a round, also with empty drafts, with one entry for each request that decodes,
in an order that has nothing to do with what was drawn (that of arrival); `observe` once behind it.
Requests may come and go between rounds: `keys` tell who is who.

`pinned` marks requests whose seeded text must not depend on their company (`policy`): seed given,
sampling, draft with a distribution. The engine lets them draft even where `should_draft` says no.

Times are of the same kind as those that the table was measured from. What the drafter does in
plain rounds, too (taking in features to stay up to date) belongs to `other` in both, or plain
rounds look cheaper than they are.

Without a table nothing adapts to costs: a straight line stands in, the gate stays open, and
`adapts` says so. A drafter without confidences is judged by the acceptance of past rounds, at each
position the same for all; that makes even `threshold` depend on the company. The gate closes only
under schedulers that weigh costs: whoever asks for `static:4` gets it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from dspark.schedule.admission import Drafts
from dspark.schedule.calibration import Calibration
from dspark.schedule.cost import CostTable
from dspark.schedule.gate import Gate
from dspark.schedule.monitor import Acceptance, Drift, LiveCost, Times
from dspark.schedule.policy import DEFAULT, Load, Plan, parse


class Scheduler:
    """One for each engine and drafter."""

    def __init__(
        self,
        verify: str = DEFAULT,
        *,
        table: CostTable | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """verify: see `policy.parse`. Raises ConfigError for an unknown one."""
        self.cost = None if table is None else LiveCost(table)
        self.policy = parse(verify, self.cost)
        self.calibration = calibration
        self.gate = None if self.cost is None or self.policy.own_draft_only else Gate()
        self.drift = Drift(() if calibration is None else calibration.ece_after)
        self.acceptance = Acceptance()
        self._round: tuple[Drafts, Plan, Load, bool] | None = None

    @property
    def adapts(self) -> bool:
        """Whether lengths follow measured costs."""
        return self.cost is not None and not self.policy.own_draft_only

    def should_draft(self, requests: int) -> bool:
        """Whether the coming round of `requests` should draft; from past rounds alone."""
        return self.gate is None or self.gate.should_draft(requests)

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
        drafts = Drafts.of(keys, filled, pinned=flags, temperatures=temperatures)
        plan = self.policy.plan(drafts, load)
        self._round = (drafts, plan, load, judged)
        return plan

    def observe(self, accepted: Sequence[int], times: Times) -> None:
        """The planned round is over: accepted drafts [R] of each request, and what it took."""
        assert self._round is not None, "plan comes before observe"
        drafts, plan, load, judged = self._round
        self._round = None
        requests = len(drafts)
        if not requests:
            return
        self.acceptance.observe(plan.lengths, accepted)
        if judged:
            self.drift.observe(drafts.survival, plan.lengths, accepted)
        if self.cost is None:
            return
        base = requests + load.extra_rows
        shape = (base + sum(plan.lengths), requests, load.context, load.block)
        if not load.extra_rows:  # prompt rows want no logits: their passes are of another kind
            self.cost.observe(times, *shape)
        if self.gate is None:
            return
        if not load.block:
            self.gate.observe_plain(requests)
            return
        self.gate.observe(
            requests,
            predicted=requests + sum(plan.predicted),
            emitted=requests + sum(accepted),
            spent_ms=self.cost.present(*shape).total,
            plain_ms=self.cost.present(base, requests, load.context, 0).total,
        )

    @property
    def messages(self) -> list[str]:
        """What whoever runs the engine should know now; one line each, none if all is well."""
        # Confidences that nobody calibrated are not expected to be right.
        drift = self.drift.message if self.calibration else None
        found = [drift, self.cost.message if self.cost else None]
        return [m for m in found if m is not None]
