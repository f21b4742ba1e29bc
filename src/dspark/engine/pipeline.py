"""The round in two lanes: while one block is verified, the next is drafted.

A second loop over the stages of `Engine.step`, whose documentation is that one:

    admission -> blocks -> schedule -> [ask the lane] -> one ragged pass -> accept -> commit -> text

*One request.* A draft of k tokens is verified but for its last one at most: the token behind the
verified ones is *coupled* to the row that would draw the bonus (`verify.accept`). During the pass
the lane drafts behind "all of these are accepted": it is asked with the tokens, of which the target
has not computed features yet (`DraftContext.unseen`). If the verdict emits just these tokens, a
hit, the next block is ready; else the lane drafts afresh, from true features. With time to spare
the lane also drafts behind other outcomes, which are looked up by the tokens that were emitted. A
tail that the scheduler cut is a ready block, too, where lengths depend on each request's own
past tokens only; then nothing is asked.

*Many requests.* Two halves take turns: one is verified while the other is drafted for, with true
features, and nothing is guessed.

Lossless, for four reasons. The law q that a token is judged by is the stored tensor it was drawn
from, however long ago. Whether a ready block is used depends on the verdict, never on its own
tokens. Numbers that draft are independent of those that judge. And what is emitted is always the
target's verdict: a block is used because it stands behind these tokens, no token is emitted because
a block stands behind it.

A request that samples under a seed is drafted for as in the plain round, with true features and as
many tokens: its text is the same in both loops. Not promised: anything about the order in which
requests are answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from dspark.drafters.base import DraftContext
from dspark.engine.batch import Sequence, committed_rows, load_of, prompt_chunks
from dspark.engine.blocks import Bet, Block, Blocks, Counts
from dspark.engine.engine import Engine, TokenText
from dspark.engine.lane import Lane, Ticket
from dspark.engine.timeline import Timeline
from dspark.models.target import Batch, Target, TargetOutput, pack
from dspark.schedule.monitor import Times
from dspark.schedule.overlap import Overlap
from dspark.schedule.policy import Load
from dspark.schedule.scheduler import Scheduler
from dspark.types import Chunk, Draft, Round, Verdict

MAX_BRANCHES = 3
"""Outcomes that are drafted behind beside the optimistic one."""
ROOM = 0.8
"""Share of a pass that may be planned for: a lane that is late keeps a miss waiting."""
RECENT = 0.9
"""Weight of the past in the running times of both lanes."""


class PipelinedEngine(Engine):
    """An `Engine` whose drafter is a lane."""

    def __init__(
        self,
        target: Target,
        lane: Lane,
        tokenizer: TokenText,
        *,
        cap: int | None = None,
        always: bool = True,
        set_threads: Callable[[bool], None] = lambda overlapped: None,
        overlaps: dict[int, Overlap] | None = None,
        prefill_chunk: int = 256,
        scheduler: Scheduler | None = None,
        prefix_reuse: bool = False,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        """As `Engine`, and

        cap          drafts that a plain round verifies at most; None takes the lane's. A lane that
                     drafts one more loses nothing to coupling
        always       overlap every round; else those where it pays (`schedule.overlap`)
        set_threads  called when rounds begin to overlap and when they cease to
        overlaps     what earlier engines with this lane have learned, and this one will
        """
        super().__init__(
            target,
            lane,
            tokenizer,
            prefill_chunk=prefill_chunk,
            scheduler=scheduler,
            prefix_reuse=prefix_reuse,
            on_round=on_round,
        )
        self.lane = lane
        self.timeline: Timeline | None = None
        self.counts = Counts()
        self._cap = self.drafter.cap = lane.cap if cap is None else cap
        self._always, self._set_threads = always, set_threads
        self._overlaps: dict[int, Overlap] = {} if overlaps is None else overlaps
        self._overlapping: bool | None = None
        self._blocks = Blocks(lane)
        self._halves: dict[str, int] = {}
        self._last_half = 1
        self._draft_ms = self._verify_ms = 0.0
        self._coupling = False
        lane.on_work = self._worked

    def overlap(self, requests: int) -> Overlap:
        """The decision at this load: one for each power of two of requests."""
        level = max(requests, 1).bit_length()
        if level not in self._overlaps:
            self._overlaps[level] = Overlap(always=self._always)
        return self._overlaps[level]

    @property
    def messages(self) -> list[str]:
        n = self.lane.restarts
        died = [f"the drafter's process died and was started again, {n} times"] if n else []
        return [*died, *super().messages]

    def record(self) -> Timeline:
        """From now on what both lanes do is recorded here, until `timeline` is None again."""
        self.timeline = Timeline()
        return self.timeline

    def step(self) -> list[Chunk]:
        self._admit()
        running = list(self._running)
        for s in running:
            s.bet = False
        decoding = [s for s in running if not s.in_prefill]
        overlap = self.overlap(len(running))
        overlapped = bool(decoding) and overlap.choose()
        if overlapped and len(running) == 1:
            overlapped = self.lane.ahead and not running[0].seeded
        if overlapped != self._overlapping:
            self._set_threads(overlapped)
            self._overlapping = overlapped
        prompts_wait = len(decoding) < len(running)
        start = time.perf_counter()
        if overlapped:
            group = self._turn() if len(running) > 1 else running
            chunks = self._round(group)
        else:
            self._coupling = False
            chunks = super().step()
        if decoding and not prompts_wait:  # passes over prompts are of another kind
            ms = (time.perf_counter() - start) * 1e3
            overlap.observe(overlapped=overlapped, tokens=len(chunks), ms=ms)
        self._forget_ended()
        return chunks

    def _round(self, group: list[Sequence]) -> list[Chunk]:
        """One round for the requests of `group`."""
        clock = [time.perf_counter()]
        decoding = [s for s in group if not s.in_prefill]
        prompts = prompt_chunks(group, self._prefill_chunk)
        self._coupling = coupling = len(self._running) == 1
        waiting = any(s.request.id in self._blocks.names for s in decoding)
        drafts_pay = waiting or self.scheduler.should_draft(len(decoding))
        load = load_of(decoding, prompts, self._cap if drafts_pay else 0)
        clock.append(time.perf_counter())
        whole = self._propose(decoding, load)
        clock.append(time.perf_counter())
        # The last token is not verified but coupled: where the cut lies looks at no token.
        proposed = [d.truncated(len(d) - 1) if coupling and len(d) else d for d in whole]
        plan = self._plan(decoding, proposed, load)
        sequences, segments, drafts = self._assemble(decoding, proposed, plan, prompts)
        if not segments:
            return []
        judged = list(drafts)
        bets: list[Bet] = []
        if coupling and decoding and len(whole[0]):
            judged[0] = whole[0].truncated(plan.lengths[0] + 1)
            bets = self._bet(decoding[0], whole[0], plan.lengths[0])
        batch = pack(segments, self.target.device)
        clock.append(time.perf_counter())
        output = self._forward(batch)
        clock.append(time.perf_counter())
        verdicts = self._verify(sequences, segments, judged, output.logits)
        chunks = [self._emit(s, v) for s, v in zip(sequences, verdicts, strict=True)]
        rows = committed_rows(segments, batch.cu_lens, drafts, verdicts)
        self.drafter.observe(rows, output.features)
        if coupling:
            self._settle(decoding, verdicts, bets)
        else:
            self._ask_next(group)
        clock.append(time.perf_counter())
        self._follow(clock, whole)
        admit, draft, assemble, verify, rest = ((b - a) * 1e3 for a, b in pairwise(clock))
        times = Times(draft, verify, admit + assemble + rest)
        self.scheduler.observe(
            [v.accepted for v in verdicts[: len(decoding)] if v], self._table_times(times)
        )
        offered = [*whole, *drafts[len(whole) :]]
        predicted = [*plan.predicted, *[0.0] * len(prompts)]
        for s, d, cut, p, emitted in zip(
            sequences, offered, drafts, predicted, chunks, strict=True
        ):
            self._count(s, d, cut, p, emitted, times)
        self._retire()
        return [c for emitted in chunks for c in emitted]

    # -- blocks ----------------------------------------------------------------------------------

    def _propose(self, decoding: list[Sequence], load: Load) -> list[Draft]:
        """Blocks that are ready or on their way; the lane drafts afresh where there is none."""
        asked = [s for s in decoding if s.draft_room > 0 and (load.block or s.seeded)]
        found: dict[int, Draft] = {}
        for s in asked:
            draft = self._blocks.draft(s.request.id, len(s.tokens))
            if draft is not None:
                found[s.slot] = draft
        self._blocks.discard([s.request.id for s in decoding])
        missing = [s for s in asked if s.slot not in found]
        drafts = self.drafter.propose([self._context(s) for s in missing]) if missing else []
        found |= {s.slot: d for s, d in zip(missing, drafts, strict=True)}
        return [found.get(s.slot, Draft()).truncated(s.draft_room) for s in decoding]

    def _context(self, s: Sequence) -> DraftContext:
        """One token more than is verified where it can be coupled."""
        context = s.context()
        room = min(s.draft_room, self._cap + self._coupling)
        return replace(context, max_tokens=room, others=self._coupling and self._spare > 0)

    @property
    def _spare(self) -> int:
        """Blocks that the lane has time for in a pass, beside the one it is asked for."""
        fits = int(ROOM * self._verify_ms / self._draft_ms) - 1 if self._draft_ms else 0
        return min(max(fits, 0), MAX_BRANCHES)

    def _forget_ended(self) -> None:
        running = {s.request.id for s in self._running}
        self._blocks.discard([name for name in self._blocks.names if name not in running])
        self._halves = {n: half for n, half in self._halves.items() if n in running}

    # -- one request: ahead of the verdict ---------------------------------------------------------

    def _bet(self, s: Sequence, whole: Draft, verified: int) -> list[Bet]:
        """What stands ready, or is asked for, behind likely verdicts on the first `verified` tokens
        of a draft and the coupled one behind them; likeliest first."""
        emitted = whole.tokens[: verified + 1]
        room = s.draft_room - len(emitted)
        if room < 1 or not self.lane.ahead or len(emitted) <= verified:
            return []
        bets: list[Bet] = []
        outcomes = self._outcomes(whole, verified)
        tail = whole.behind(len(emitted))
        # The cut must not have looked at the tail, nor may its confidences decide on itself later.
        if self.scheduler.policy.own_draft_only and len(tail) > verified:
            bets.append(Bet(emitted, Block(len(s.tokens) + len(emitted), draft=tail, ahead=True)))
        else:
            outcomes.insert(0, emitted)
        contexts = [
            replace(
                self._context(s),
                tokens=[*s.tokens, *tokens],
                unseen=len(tokens),
                max_tokens=min(s.draft_room - len(tokens), self._cap + 1),
            )
            for tokens in outcomes
        ]
        if self.drafter.known(contexts):
            tickets = self.lane.ask([[c] for c in contexts])
            bets += [
                Bet(tokens, Block(len(c.tokens), ticket, ahead=True))
                for tokens, c, ticket in zip(outcomes, contexts, tickets, strict=True)
            ]
        return bets

    def _outcomes(self, whole: Draft, verified: int) -> list[tuple[int, ...]]:
        """Other verdicts, likeliest first, as many as the lane has time for: the draft is rejected
        at some token, and the drafter's second guess stands there."""
        if not self._spare or not whole.others:
            return []
        known = whole.confidence
        sure = self.scheduler.acceptance.confidence(len(whole)) if known is None else known.tolist()
        reached, weighted = 1.0, []
        for k in range(verified + 1):
            weighted.append((reached * (1 - sure[k]), (*whole.tokens[:k], whole.others[k])))
            reached *= sure[k]
        weighted.sort(key=lambda w: -w[0])
        return [tokens for _, tokens in weighted[: self._spare]]

    def _settle(
        self, decoding: list[Sequence], verdicts: list[Verdict | None], bets: list[Bet]
    ) -> None:
        """The verdict is known: the block behind it stands ready, the others are dropped."""
        if not bets:
            return
        (s,), verdict = decoding, verdicts[0]
        assert verdict is not None
        won = None
        if s.finish_reason is None:
            s.bet = True
            won = next((b for b in bets if b.tokens == verdict.tokens), None)
            self.counts.bets += 1
            self.counts.hits += won is not None
        if won is not None:
            self._blocks.put(s.request.id, won.block)
        for bet in bets:
            if bet.block.ticket is not None:
                if self.timeline is not None:
                    self.timeline.name(bet.block.ticket, "hit" if bet is won else "miss")
                if bet is not won:
                    self.lane.drop([bet.block.ticket])

    # -- many requests: two halves take turns ----------------------------------------------------

    def _turn(self) -> list[Sequence]:
        """The half that was not the last one; the other if nobody is in it."""
        sizes = [0, 0]
        for s in self._running:
            half = self._halves.get(s.request.id)
            if half is not None:
                sizes[half] += 1
        for s in self._running:
            if s.request.id not in self._halves:
                half = self._halves[s.request.id] = int(sizes[1] < sizes[0])
                sizes[half] += 1
        for s in reversed(self._running):  # texts end: the halves are kept alike
            half = self._halves[s.request.id]
            if sizes[half] > sizes[1 - half] + 1:
                self._halves[s.request.id] = 1 - half
                sizes[half], sizes[1 - half] = sizes[half] - 1, sizes[1 - half] + 1
        self._last_half = 1 - self._last_half
        if not sizes[self._last_half]:
            self._last_half = 1 - self._last_half
        return [s for s in self._running if self._halves[s.request.id] == self._last_half]

    def _ask_next(self, group: list[Sequence]) -> None:
        """The lane drafts for this half while the other one is verified."""
        going = [s for s in group if s.finish_reason is None and not s.in_prefill]
        pays = self.scheduler.should_draft(len(going))
        by_slot = {s.slot: s for s in going if s.draft_room > 0 and (pays or s.seeded)}
        known = self.drafter.known([self._context(s) for s in by_slot.values()])
        if not known:
            return
        (ticket,) = self.lane.ask([known])
        for place, c in enumerate(known):
            self._blocks.put(by_slot[c.slot].request.id, Block(len(c.tokens), ticket, place))

    # -- what is measured --------------------------------------------------------------------------

    def _forward(self, batch: Batch) -> TargetOutput:
        """Recorded in rounds of either kind; a pass over prompts alone checks nothing."""
        start = time.perf_counter()
        output = super()._forward(batch)
        if self.timeline is not None and not all(s.in_prefill for s in self._running):
            self.timeline.verified(start, time.perf_counter())
        return output

    def _worked(self, ticket: Ticket, started: float, ended: float) -> None:
        """The lane has worked on a batch."""
        self._draft_ms = _running(self._draft_ms, (ended - started) * 1e3)
        if self.timeline is not None:
            self.timeline.drafted(ticket, started, ended)

    def _follow(self, clock: list[float], whole: list[Draft]) -> None:
        """Running times and counts of an overlapped round; readings 3 and 4 enclose the pass."""
        self._verify_ms = _running(self._verify_ms, (clock[4] - clock[3]) * 1e3)
        if self._coupling and whole and len(whole[0]):
            self.counts.ahead += whole[0].ahead
            self.counts.fresh += not whole[0].ahead

    def _table_times(self, times: Times) -> Times:
        """What the cost table calls drafting is the drafting, not the wait for it."""
        return Times(max(times.draft, self._draft_ms), times.verify, times.other)


def _running(before: float, now: float) -> float:
    return RECENT * before + (1 - RECENT) * now if before else now
