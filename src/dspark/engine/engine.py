"""The round.

    admission -> draft -> schedule -> one ragged pass -> accept -> commit -> text

`Engine.step` is that, on one screen, for every drafter; plain decoding is the drafter `none` on the
same path. All requests in flight share the pass: those still reading their prompt contribute a
chunk of it, the others their anchor and the draft behind it, each with its own length, parameters
and accept count.

Exactness. Greedy ids equal plain decoding: in int8 to the bit, because no row of a pass depends on
its neighbours; in fp32 as long as no two logits lie within rounding of each other. Sampled text
follows the target's law exactly; its random numbers differ from plain decoding's. bf16 promises
neither: matrix kernels there round differently for different row counts, and near ties may fall the
other way.

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
from dspark.engine.batch import Sequence, committed_rows
from dspark.engine.stream import TextStream
from dspark.errors import ConfigError, InvalidRequestError
from dspark.models.target import Segment, Target, pack
from dspark.sampling import check_params, streams
from dspark.schedule.prefix import ROW_COST, prefix_length
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
        row_cost: float | None = ROW_COST,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        """Serve requests over `target`.

        prefill_chunk  caps the prompt tokens of one pass, over all requests
        row_cost       what verifying a token costs, as a share of a one-row pass: drafts with a
                       confidence are cut where they stop paying. None verifies whole drafts
        """
        if prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk={prefill_chunk} is out of range: expected 1 or more")
        self.target = target
        self.drafter = drafter
        self.on_round = on_round
        self._tokenizer = tokenizer
        self._prefill_chunk = prefill_chunk
        self._row_cost = row_cost
        self._waiting: deque[Request] = deque()
        self._arrived: dict[str, float] = {}
        self._running: list[Sequence] = []
        self._free_slots = list(range(target.num_slots))[::-1]
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
        clock.append(time.perf_counter())
        proposed = self._propose(decoding)
        clock.append(time.perf_counter())
        kept = [self._schedule(d) for d in proposed]
        sequences, segments, drafts = self._assemble(decoding, kept)
        if not segments:
            return []
        batch = pack(segments, self.target.device)
        clock.append(time.perf_counter())
        output = self.target.forward(batch, self.drafter.feature_layers)
        clock.append(time.perf_counter())
        verdicts = self._verify(sequences, segments, drafts, output.logits)
        chunks = [self._emit(s, v) for s, v in zip(sequences, verdicts, strict=True)]
        clock.append(time.perf_counter())
        rows = committed_rows(segments, batch.cu_lens, drafts, verdicts)
        self.drafter.observe(rows, output.features)
        clock.append(time.perf_counter())
        admit, draft, assemble, verify, emit, observe = ((b - a) * 1e3 for a, b in pairwise(clock))
        times = (draft + observe, verify, admit + assemble + emit)
        whole = [*proposed, *drafts[len(proposed) :]]
        for s, d, cut, emitted in zip(sequences, whole, drafts, chunks, strict=True):
            self._count(s, d, cut, emitted, times)
        self._retire()
        return [c for emitted in chunks for c in emitted]

    def _admit(self) -> None:
        """Requests enter in order of arrival while slots are free."""
        while self._waiting and self._free_slots:
            request = self._waiting.popleft()
            draft_rng, accept_rng = streams(request.params.seed)
            room = self.target.max_context - len(request.prompt_ids)
            self._running.append(
                Sequence(
                    request,
                    self._free_slots.pop(),
                    TextStream(self._tokenizer.id_to_bytes, request.params.stop),
                    draft_rng,
                    accept_rng,
                    max_tokens=min(request.params.max_tokens, room),
                    arrived=self._arrived[request.id],
                    tokens=list(request.prompt_ids),
                )
            )

    def _propose(self, decoding: list[Sequence]) -> list[Draft]:
        """The drafter's guesses; it is not asked where only the target's own token has room."""
        asked = [s for s in decoding if s.draft_room > 0]
        drafts = iter(self.drafter.propose([s.context() for s in asked]) if asked else ())
        return [next(drafts).truncated(s.draft_room) if s.draft_room else Draft() for s in decoding]

    def _schedule(self, draft: Draft) -> Draft:
        """The part of a draft that is worth verifying, as far as its drafter can tell."""
        if self._row_cost is None or draft.confidence is None:
            return draft
        return draft.truncated(prefix_length(draft.confidence.tolist(), self._row_cost))

    def _assemble(
        self, decoding: list[Sequence], kept: list[Draft]
    ) -> tuple[list[Sequence], list[Segment], list[Draft | None]]:
        """Who takes part in this pass, with which tokens. A draft of None marks a prompt chunk."""
        sequences, drafts = list(decoding), list[Draft | None](kept)
        segments = [s.verify_segment(d) for s, d in zip(decoding, kept, strict=True)]
        budget = self._prefill_chunk
        for s in self._running:
            if s.in_prefill and budget > 0:
                segment = s.prompt_segment(budget)
                budget -= len(segment.tokens)
                sequences.append(s)
                segments.append(segment)
                drafts.append(None)
        return sequences, segments, drafts

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
        emitted: list[Chunk],
        times: tuple[float, float, float],
    ) -> None:
        if draft is None or verified is None:
            s.stats.prefill_ms += sum(times)
            return
        round_ = Round(
            s.request.id,
            s.stats.rounds,
            draft.tokens,
            len(verified),
            sum(c.drafted for c in emitted),
            tuple(c.token for c in emitted),
            *times,
        )
        s.stats.add_round(round_)
        if self.on_round is not None:
            self.on_round(round_)

    def _retire(self) -> None:
        """Free the slots of ended requests and keep their outputs."""
        for s in [s for s in self._running if s.finish_reason is not None]:
            assert s.finish_reason is not None
            self._running.remove(s)
            self._free_slots.append(s.slot)
            self.drafter.release(s.slot)
            self._outputs[s.request.id] = s.output(s.finish_reason)

    def _eos_of(self, request: Request) -> tuple[int, ...]:
        return () if request.params.ignore_eos else self._tokenizer.eos_ids
