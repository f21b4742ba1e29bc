"""An `LLM` without a model: the same words after every prompt, drafted as its drafter's name says.

none     one token a round
ngram    drafts two tokens a round, of which the first is right
liar     like ngram, but its text differs from the third token on
blind    drafts nothing, but is slower than none
lucky    drafts nothing, but is faster than none, which only a disturbed machine makes so
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dspark.answers import AnswerFormat
from dspark.errors import ConfigError
from dspark.schedule.cost import CostTable
from dspark.types import Chunk, FinishReason, Output, Round, SamplingParams, Stats, TokenLogprob

WORDS = ("The", " sky", " is", " blue", ",", " the", " sea", "\n", "too", ".")
WRONG = len(WORDS)


class FakeTokenizer:
    answers = AnswerFormat()
    knows_thinking = False

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join((*WORDS, " WRONG")[i] for i in ids)


class FakeLLM:
    created: list[FakeLLM]
    """Every one that was made, for tests that look at how; a fixture sets it."""

    def __init__(self, model: str = "default", **options: Any) -> None:
        self.options = {"model": model, **options}
        self.model_name, self.dtype, self.device, self.threads = "fake-7M", "int8", "cpu", 2
        self.dtype_reason = "fastest that fits"
        self.tokenizer = FakeTokenizer()
        self.messages: list[str] = []
        self.emulation = self.options.get("emulate")
        self.draft_device = self.options.get("draft_device")
        self.last_output: Output | None = None
        self.calls: list[tuple[str, int | None]] = []
        self.seen: list[tuple[Any, SamplingParams]] = []
        self.interrupt_after: int | None = None
        drafter = options.get("drafter", "auto")
        self.set_drafter("ngram" if drafter == "auto" else drafter)
        self.drafter_reason = "needs no weights" if drafter == "auto" else "as asked"
        FakeLLM.created.append(self)

    def set_drafter(
        self,
        name: str,
        num_draft_tokens: int | None = None,
        *,
        whole_drafts: bool = False,
        verify: str | None = None,
        calibrated: bool = True,
        pipeline: str | None = None,
    ) -> None:
        if name not in ("none", "ngram", "liar", "blind", "lucky"):
            raise ConfigError(f"unknown drafter {name!r}: expected one of none, ngram")
        self.drafter_name = name
        self.verify = verify or self.options.get("verify", "auto")
        self.verify_reason = ""
        asked = pipeline or self.options.get("pipeline", "off")
        self.pipeline = asked if name == "ngram" and asked == "on" else "off"
        self.pipeline_reason = ""
        self.calls.append((name, num_draft_tokens))

    def measure_costs(self, seconds: float) -> CostTable:
        passes = [(n, 64.0, 10.0 + n) for n in (1, 2, 4)]
        return CostTable.fit({"model": self.model_name}, passes, [(1, 2, 3.0)], [(1, 0.5)])

    def json_grammar(self, schema: Any) -> Any:
        return "grammar", schema

    def chat(self, messages: Any, params: SamplingParams | None = None) -> Output:
        list(self.stream(messages, params))
        assert self.last_output is not None
        return self.last_output

    def stream(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> Iterator[Chunk]:
        params = params or SamplingParams()
        self.seen.append((prompt, params))
        ids = list(range(min(params.max_tokens, len(WORDS))))
        if self.drafter_name == "liar":
            ids[2:] = [WRONG] * len(ids[2:])
        step_ms = {"none": 10.0, "blind": 20.0, "lucky": 5.0}.get(self.drafter_name, 12.0)
        stats = Stats(requests=1, prompt_tokens=5, completion_tokens=len(ids), ttft_ms=40.0)
        logprobs = [
            TokenLogprob(i, -0.5, ((i, -0.5), (WRONG, -math.inf))[: params.logprobs]) for i in ids
        ]
        drafted = {0: False}
        at = 1
        while at < len(ids):
            if self.drafter_name in ("ngram", "liar"):
                emitted = tuple(ids[at : at + 2])
                round_ = Round("r", stats.rounds, (ids[at], WRONG), 2, 1, emitted, 1.0, 10.0, 1.0)
            else:
                round_ = Round("r", stats.rounds, (), 0, 0, (ids[at],), 0.0, step_ms, 0.0)
            stats.add_round(round_)
            stats.decode_ms += step_ms
            for k in range(len(round_.emitted)):
                drafted[at + k] = k < round_.accepted
            at += len(round_.emitted)
            if on_round is not None:
                on_round(round_)
        last: FinishReason = "length" if params.max_tokens <= len(WORDS) else "stop"
        for n, token in enumerate(ids):
            if n == self.interrupt_after:
                raise KeyboardInterrupt
            chunk = Chunk("r", token, self.tokenizer.decode([token]), drafted[n])
            yield replace(chunk, finish_reason=last if n == len(ids) - 1 else None)
        self.last_output = Output(
            request_id="r",
            prompt_ids=(1, 2, 3, 4, 5),
            token_ids=tuple(ids),
            text=self.tokenizer.decode(ids),
            finish_reason=last,
            stats=stats,
            logprobs=tuple(logprobs) if params.logprobs is not None else None,
        )
