"""The round.

    admission -> draft -> schedule -> one ragged pass -> accept -> commit -> text

`Engine.step` is that, on one screen, for every drafter; plain decoding is the drafter `none` on the
same path. All requests in flight share the pass: those still reading their prompt contribute a
chunk of it, the others their anchor and as much of the draft behind it as the scheduler finds worth
verifying, each with its own length, parameters and accept count.

Exactness. Greedy ids equal plain decoding: in int8 to the bit, because no row of a pass depends on
its neighbours; in fp32 as long as no two logits lie within rounding of each other. Sampled text
follows the target's law exactly; its random numbers differ from plain decoding's. bf16 promises
neither: matrix kernels there round differently for different row counts, and near ties may fall the
other way.

*Seeds.* A text sampled under a seed is the same whatever else is in the batch. Such a request
drafts in every round and is *pinned* (`schedule.policy`), if its draft was drawn from a law.

*A drafter that fails* costs speed and no text (`failsafe`).

Not here: threads, timeouts, HTTP. The engine is a plain object that whoever owns it steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.engine.batch import Sequence, committed_rows, load_of, prompt_chunks
from dspark.engine.failsafe import Failsafe
from dspark.engine.slots import Slots
from dspark.engine.stream import TextStream
from dspark.errors import ConfigError, InvalidRequestError
from dspark.models.target import Batch, Segment, Target, TargetOutput, pack
from dspark.sampling import check_params, streams
from dspark.schedule.monitor import Times
from dspark.schedule.policy import Load, Plan
from dspark.schedule.scheduler import Scheduler
from dspark.types import Chunk, Draft, Output, Request, Round, Stats, Verdict
from dspark.verify import accept


class TokenText(Protocol):
    """What the engine needs to know of a tokenizer."""

    eos_ids: tuple[int, ...]

    def id_to_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; none for a special token."""
        ...


class Engine:
    """Runs any number of requests over one target with one drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tokenizer: TokenText,
        *,
        prefill_chunk: int = 256,
        scheduler: Scheduler | None = None,
        prefix_reuse: bool = False,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        """Serve requests over `target`.

        prefill_chunk  caps the prompt tokens of one pass, over all requests
        scheduler      decides how much of each draft is verified; it learns, so it belongs to one
                       drafter. None verifies whole drafts
        prefix_reuse   a prompt starts from the rows of an earlier text that began alike (`slots`);
                       then nobody else may use the target, or must call `forget` behind it
        """
        if prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk={prefill_chunk} is out of range: expected 1 or more")
        self.target = target
        self.drafter = Failsafe(drafter)
        self.scheduler = Scheduler("all") if scheduler is None else scheduler
        self.on_round = on_round
        self._tokenizer = tokenizer
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Request] = deque()
        self._arrived: dict[str, float] = {}
        self._running: list[Sequence] = []
        self._slots = Slots(target, self.drafter, reuse=prefix_reuse)
        self._outputs: dict[str, Output] = {}

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError if it can never be served."""
        context = self.target.max_context
        if not request.prompt_ids:
            raise InvalidRequestError("the prompt is empty: at least one token is needed")
        if len(request.prompt_ids) >= context:
            raise InvalidRequestError(
                f"the prompt has {len(request.prompt_ids)} tokens and the context holds {context},"
                " one of them for the answer: shorten it or raise --max-context"
            )
        if not all(0 <= t < self.target.vocab_size for t in request.prompt_ids):
            raise InvalidRequestError(
                f"the prompt holds an id outside 0..{self.target.vocab_size - 1}"
            )
        if request.id in self._arrived:
            raise InvalidRequestError(f"a request with id {request.id!r} is already here")
        check_params(request.params, self.target.vocab_size, self._tokenizer.eos_ids)
        self._arrived[request.id] = time.perf_counter()
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """End a request now; what it emitted is its output. Unknown and ended ids are ignored."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                empty = Output(
                    request.id, request.prompt_ids, (), "", "cancelled", Stats(requests=1)
                )
                self._outputs[request.id] = empty
                return
        for sequence in self._running:
            if sequence.request.id == request_id:
                sequence.finish_reason = "cancelled"
                sequence.stream.finish()
        self._retire()

    def forget(self) -> None:
        """Start every prompt cold that is yet to come: somebody else has used the target."""
        self._slots.forget()

    @property
    def messages(self) -> list[str]:
        """What whoever runs the engine should know now, one line each."""
        failures = self.drafter.failures
        failed = [f"the drafter failed {failures} times: no drafts there"] if failures else []
        return [*failed, *self.scheduler.messages]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def take_output(self, request_id: str) -> Output | None:
        """The finished text of a request, once; None while it runs."""
        output = self._outputs.pop(request_id, None)
        if output is not None:
            self._arrived.pop(request_id, None)
        return output

    # -- the round -----------------------------------------------------------------------------

    def step(self) -> list[Chunk]:
        """One round for all requests in flight; returns the tokens it emitted, in order."""
        clock = [time.perf_counter()]
        self._admit()
        decoding = [s for s in self._running if not s.in_prefill]
        prompts = prompt_chunks(self._running, self._prefill_chunk)
        wanted = self.scheduler.block(len(decoding), self.drafter.cap)
        load = load_of(decoding, prompts, wanted)
        clock.append(time.perf_counter())
        proposed = self._propose(decoding, load)
        clock.append(time.perf_counter())
        plan = self._plan(decoding, proposed, load)
        sequences, segments, drafts = self._assemble(decoding, proposed, plan, prompts)
        if not segments:
            return []
        batch = pack(segments, self.target.device)
        clock.append(time.perf_counter())
        output = self._forward(batch)
        clock.append(time.perf_counter())
        verdicts = self._verify(sequences, segments, drafts, output.logits)
        chunks = [self._emit(s, v) for s, v in zip(sequences, verdicts, strict=True)]
        rows = committed_rows(segments, batch.cu_lens, drafts, verdicts)
        self.drafter.observe(rows, output.features)
        clock.append(time.perf_counter())
        admit, draft, assemble, verify, rest = ((b - a) * 1e3 for a, b in pairwise(clock))
        times = Times(draft, verify, admit + assemble + rest)
        self.scheduler.observe([v.accepted for v in verdicts[: len(decoding)] if v], times)
        whole = [*proposed, *drafts[len(proposed) :]]
        predicted = [*plan.predicted, *[0.0] * len(prompts)]
        for s, d, cut, p, emitted in zip(sequences, whole, drafts, predicted, chunks, strict=True):
            self._count(s, d, cut, p, emitted, times)
        self._retire()
        return [c for emitted in chunks for c in emitted]

    def _admit(self) -> None:
        """Requests enter in order of arrival while slots are free."""
        while self._waiting and self._slots.free:
            request = self._waiting.popleft()
            draft_rng, accept_rng = streams(request.params.seed)
            room = self.target.max_context - len(request.prompt_ids)
            slot, cached = self._slots.take(request.prompt_ids, self._running)
            self._running.append(
                Sequence(
                    request,
                    slot,
                    TextStream(self._tokenizer.id_to_bytes, request.params.stop),
                    draft_rng,
                    accept_rng,
                    max_tokens=min(request.params.max_tokens, room),
                    arrived=self._arrived[request.id],
                    tokens=list(request.prompt_ids),
                    cached=cached,
                    stats=Stats(cached_tokens=cached),
                )
            )

    def _propose(self, decoding: list[Sequence], load: Load) -> list[Draft]:
        """The drafter's guesses. It is not asked where only the target's own token has room, nor
        about more texts than the scheduler says, but for those that depend on their drafts. Of some
        the youngest are taken: they have the least to catch up with."""
        room = [s for s in decoding if s.draft_room > 0]
        wanted = self.scheduler.asks(len(decoding)) if load.block else 0
        late = len(room) - wanted
        asked = [s for i, s in enumerate(room) if i >= late or s.seeded]
        drafts = iter(
            self.drafter.propose([s.context(load.block or None) for s in asked]) if asked else ()
        )
        slots = {s.slot for s in asked}
        return [
            next(drafts).truncated(s.draft_room) if s.slot in slots else Draft() for s in decoding
        ]

    def _plan(self, decoding: list[Sequence], proposed: list[Draft], load: Load) -> Plan:
        """How much of each draft this pass verifies. Order of arrival: it knows no token."""
        return self.scheduler.plan(
            [s.request.id for s in decoding],
            [len(d) for d in proposed],
            [None if d.confidence is None else d.confidence.tolist() for d in proposed],
            load,
            [s.seeded and d.probs is not None for s, d in zip(decoding, proposed, strict=True)],
        )

    def _assemble(
        self,
        decoding: list[Sequence],
        proposed: list[Draft],
        plan: Plan,
        prompts: list[tuple[Sequence, Segment]],
    ) -> tuple[list[Sequence], list[Segment], list[Draft | None]]:
        """Who takes part in this pass, with which tokens. A draft of None marks a prompt chunk."""
        kept = [d.truncated(n) for d, n in zip(proposed, plan.lengths, strict=True)]
        segments = [s.verify_segment(d) for s, d in zip(decoding, kept, strict=True)]
        return (
            [*decoding, *(s for s, _ in prompts)],
            [*segments, *(segment for _, segment in prompts)],
            [*kept, *[None] * len(prompts)],
        )

    def _forward(self, batch: Batch) -> TargetOutput:
        """The pass of the target."""
        return self.target.forward(batch, self.drafter.feature_layers)

    def _verify(
        self,
        sequences: list[Sequence],
        segments: list[Segment],
        drafts: list[Draft | None],
        logits: Tensor,
    ) -> list[Verdict | None]:
        """The verdict on each draft; None for a chunk that does not end its prompt."""
        verdicts: list[Verdict | None] = []
        row = 0
        for s, segment, draft in zip(sequences, segments, drafts, strict=True):
            rows, row = logits[row : row + segment.num_logits], row + segment.num_logits
            if not segment.num_logits:
                verdicts.append(None)
                continue
            r = s.request
            verdicts.append(
                accept(
                    draft or Draft(),
                    rows,
                    r.params,
                    s.tokens,
                    s.prompt_len,
                    self._tokenizer.eos_ids,  # min_tokens bans them under ignore_eos, too
                    s.accept_rng,
                )
            )
        for s, segment, verdict in zip(sequences, segments, verdicts, strict=True):
            s.cached += (
                len(segment.tokens) if verdict is None or s.in_prefill else verdict.accepted + 1
            )
        return verdicts

    # -- what follows from a verdict -------------------------------------------------------------

    def _emit(self, s: Sequence, verdict: Verdict | None) -> list[Chunk]:
        """Append the verdict's tokens one by one until the text ends."""
        chunks: list[Chunk] = []
        if verdict is None:
            return chunks
        now = time.perf_counter()
        for i, token in enumerate(verdict.tokens):
            s.tokens.append(token)
            s.last_token_at = now
            if s.first_token_at is None:
                s.first_token_at = now
            logprob = verdict.logprobs[i] if verdict.logprobs is not None else None
            if logprob is not None:
                s.logprobs.append(logprob)
            text = self._advance_text(s, token)
            chunks.append(
                Chunk(s.request.id, token, text, i < verdict.accepted, logprob, s.finish_reason)
            )
            if s.finish_reason:
                break
        return chunks

    def _advance_text(self, s: Sequence, token: int) -> str:
        """The text that `token` releases; sets the reason if the request ends with it."""
        p = s.request.params
        if token in self._eos_of(s.request) or token in p.stop_token_ids:
            s.finish_reason = "stop"
            return s.stream.finish()
        text = s.stream.push(token)
        if s.stream.stopped:
            s.finish_reason = "stop"
        elif s.num_generated == s.max_tokens:
            s.finish_reason = "length"
            text += s.stream.finish()
        return text

    def _count(
        self,
        s: Sequence,
        draft: Draft | None,
        verified: Draft | None,
        predicted: float,
        emitted: list[Chunk],
        times: Times,
    ) -> None:
        if draft is None or verified is None:
            s.stats.prefill_ms += times.total
            return
        round_ = Round(
            s.request.id,
            s.stats.rounds,
            draft.tokens,
            len(verified),
            sum(c.drafted for c in emitted),
            tuple(c.token for c in emitted),
            times.draft,
            times.verify,
            times.other,
            predicted,
            None if draft.confidence is None else tuple(draft.confidence.tolist()),
            draft.ahead,
            s.bet,
        )
        s.stats.add_round(round_)
        if self.on_round is not None:
            self.on_round(round_)

    def _retire(self) -> None:
        """Free the slots of ended requests and keep their outputs."""
        for s in [s for s in self._running if s.finish_reason is not None]:
            assert s.finish_reason is not None
            self._running.remove(s)
            self._slots.give_back(s)
            self._outputs[s.request.id] = s.output(s.finish_reason)

    def _eos_of(self, request: Request) -> tuple[int, ...]:
        return () if request.params.ignore_eos else self._tokenizer.eos_ids
