"""The state of a request in flight, and how requests become one ragged batch.

A sequence owns a cache slot. `tokens` are its prompt and everything emitted; `cached` counts the
tokens whose rows in the target's cache are valid. While the prompt is processed `cached` grows
chunk by chunk; afterwards it is always len(tokens) - 1: the last token, the anchor, is processed
together with the draft behind it. Accepting moves these numbers; nothing else remembers what was
rejected.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from dspark.drafters.base import Committed, DraftContext
from dspark.engine.stream import TextStream
from dspark.models.target import Segment
from dspark.schedule.policy import Load
from dspark.types import Draft, FinishReason, Output, Request, Stats, TokenLogprob, Verdict


@dataclass
class Sequence:
    """One request in flight."""

    request: Request
    slot: int
    stream: TextStream
    draft_rng: np.random.Generator
    accept_rng: np.random.Generator
    max_tokens: int
    """The request's own limit, or what the context leaves if that is less."""
    arrived: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float | None = None
    last_token_at: float = 0.0
    finish_reason: FinishReason | None = None
    bet: bool = False
    """The next draft was made ahead of the last verdict (`Round.bet`)."""
    stats: Stats = field(default_factory=Stats)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def in_prefill(self) -> bool:
        return self.cached < len(self.tokens) - 1 or self.num_generated == 0

    @property
    def draft_room(self) -> int:
        """Drafts that could still be emitted: the bonus always takes the last place."""
        return self.max_tokens - self.num_generated - 1

    @property
    def seeded(self) -> bool:
        """The text must not depend on the company, and does depend on drafts drawn from a law."""
        return self.request.params.seed is not None and not self.request.params.is_greedy

    def output(self, reason: FinishReason) -> Output:
        """The finished text with its statistics filled in."""
        st = self.stats
        st.requests, st.prompt_tokens = 1, self.prompt_len
        st.completion_tokens = self.num_generated
        if self.first_token_at is not None:
            st.ttft_ms = (self.first_token_at - self.arrived) * 1e3
            st.decode_ms = (self.last_token_at - self.first_token_at) * 1e3
        wanted = self.request.params.logprobs is not None
        return Output(
            self.request.id,
            self.request.prompt_ids,
            tuple(self.tokens[self.prompt_len :]),
            self.stream.text,
            reason,
            st,
            tuple(self.logprobs) if wanted else None,
        )

    def context(self, block: int | None = None) -> DraftContext:
        """What the drafter is told, who may draft `block` tokens; whole blocks of seeded texts."""
        block = None if self.seeded else block
        params, room = self.request.params, self.draft_room
        return DraftContext(self.slot, self.tokens, params, room, self.draft_rng, block=block)

    def prompt_segment(self, limit: int) -> Segment:
        """The next at most `limit` tokens of the prompt; the last one wants logits."""
        end = min(self.cached + limit, len(self.tokens))
        return Segment(
            self.slot,
            self.cached,
            tuple(self.tokens[self.cached : end]),
            int(end == len(self.tokens)),
        )

    def verify_segment(self, draft: Draft) -> Segment:
        """The anchor and its draft; every row wants logits."""
        return Segment(self.slot, self.cached, (self.tokens[-1], *draft.tokens), len(draft) + 1)


def prompt_chunks(running: list[Sequence], budget: int) -> list[tuple[Sequence, Segment]]:
    """The next chunks of unread prompts, in order of arrival, of `budget` tokens at most."""
    chunks = []
    for s in running:
        if s.in_prefill and budget > 0:
            segment = s.prompt_segment(budget)
            budget -= len(segment.tokens)
            chunks.append((s, segment))
    return chunks


def load_of(decoding: list[Sequence], prompts: list[tuple[Sequence, Segment]], cap: int) -> Load:
    """What the coming round pays for; of the text so far alone, no draft has been made yet."""
    extra = [(len(g.tokens), g.start + len(g.tokens) / 2) for _, g in prompts]
    rows = [*[(1, float(s.cached)) for s in decoding], *extra]
    total = sum(n for n, _ in rows)
    return Load(
        block=min(cap, max((s.draft_room for s in decoding), default=0)),
        context=sum(n * context for n, context in rows) / total if total else 0.0,
        extra_rows=sum(n for n, _ in extra),
    )


def committed_rows(
    segments: list[Segment],
    first_rows: tuple[int, ...],
    drafts: list[Draft | None],
    verdicts: list[Verdict | None],
) -> list[Committed]:
    """Which rows of the pass became permanent.

    All of a prompt chunk (its draft is None); the anchor and the accepted drafts of a verification.
    """
    out = []
    for segment, first, draft, verdict in zip(segments, first_rows, drafts, verdicts, strict=False):
        if draft is None or verdict is None:
            out.append(Committed(segment.slot, segment.start, segment.tokens, first))
        else:
            kept = segment.tokens[: verdict.accepted + 1]
            out.append(
                Committed(segment.slot, segment.start, kept, first, len(draft), verdict.accepted)
            )
    return out
