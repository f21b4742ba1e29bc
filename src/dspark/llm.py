"""`LLM`: a model, a drafter and an engine behind three verbs.

    llm = LLM()                                  # the default model, the drafter it ships with
    out = llm.chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(out.text, out.stats.accepted_length)

`generate` and `chat` return finished `Output`s; `stream` yields a `Chunk` a token, each of which
says whether the drafter had guessed it. Requests given together share their passes. An `LLM`
belongs to one thread; a server puts it into one of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from dspark.engine import lanes, profile
from dspark.engine.choice import calibration_in, choose_drafter, folder_of
from dspark.engine.emulate import Emulation
from dspark.engine.engine import Engine
from dspark.engine.pipeline import PipelinedEngine
from dspark.engine.placement import Placement
from dspark.engine.timeline import Timeline
from dspark.errors import ConfigError, InvalidRequestError, ResourceError
from dspark.grammar import Grammars
from dspark.models.build import build_target, choose
from dspark.models.elsewhere import find_device
from dspark.models.loading import load_checkpoint
from dspark.schedule.cost import CostTable
from dspark.schedule.overlap import check_mode
from dspark.schedule.policy import DEFAULT as VERIFY
from dspark.schedule.policy import parse
from dspark.schedule.scheduler import Scheduler
from dspark.types import Chunk, Grammar, Output, Request, Round, SamplingParams

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": text}; more where the model knows it."""
Prompt = str | Sequence[int]
"""Raw text (no chat template), or token ids."""
Key = tuple[str, int | None]
"""Name and block length of a drafter."""


class LLM:
    """A target with its drafter, ready to answer."""

    def __init__(
        self,
        model: str = "default",
        *,
        drafter: str = "auto",
        num_draft_tokens: int | None = None,
        verify: str = VERIFY,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        max_context: int | None = None,
        max_users: int = 8,
        prefix_reuse: bool = True,
        pipeline: str = "auto",
        draft_device: str | None = None,
        emulate: str | None = None,
    ) -> None:
        """Load `model`: `default`, a Hugging Face directory or name, or a GGUF file.

        verify       how much of each draft to check: all, static:K, threshold:P, causal, lagged or
                     auto. The last three weigh costs, which are measured once, in a few seconds,
                     for a drafter that drafts; DSPARK_NO_PROFILE=1 does without
        dtype        auto, fp32, bf16 or int8;  device  auto, cpu, cuda[:N]
        threads      CPU threads, of the whole process (PyTorch has one setting); None leaves it
        max_context  tokens of prompt and text together; None takes the model's, at most 8192
        max_users    requests in flight at once; others wait
        prefix_reuse a prompt starts from the cache of an earlier text that began alike
        pipeline     draft in a second process while the target verifies: off, on, auto (`lanes`)
        draft_device cpu or cuda[:N], where drafters draft (`placement`); None: where the target is
        emulate      another device's times, as in verify=20ms,draft=5ms (`engine.emulate`)

        Raises CheckpointError, ConfigError or ResourceError.
        """
        parse(verify)  # better refused before anything is loaded
        check_mode(pipeline)
        apart = None if draft_device is None else find_device(draft_device)
        self.emulation = None if emulate is None else Emulation.parse(emulate)
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads={threads} is out of range: expected 1 or more")
            torch.set_num_threads(threads)
        checkpoint = load_checkpoint(model)
        choice = choose(checkpoint.config, dtype, device)
        self.tokenizer = checkpoint.tokenizer
        self.model_name = checkpoint.name
        self.dtype, self.dtype_reason = choice.dtype, choice.reason
        self.device = str(choice.device)
        self.threads = torch.get_num_threads()
        self.target = build_target(checkpoint, choice, num_slots=max_users, max_context=max_context)
        self.last_output: Output | None = None
        self._count = 0
        self._carried = checkpoint.carried
        self._verify, self._prefix_reuse, self._pipeline = verify, prefix_reuse, pipeline
        self._placement = Placement(self.target, apart, self.model_name, self._carried)
        self.draft_device = self._placement.elsewhere
        self._lanes = lanes.Lanes(self.target, self.threads, self.emulation, self._placement)
        self._spec = lanes.DrafterSpec(
            model, self.dtype, self.device, max_users, self.target.max_context, "", None
        )
        self._costs: dict[Key, profile.Costs] = {}
        self._schedulers: dict[tuple[str, int | None, str, bool, bool], Scheduler] = {}
        self.set_drafter(drafter, num_draft_tokens)

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
        """Go on with another drafter over the same loaded target.

        name          `auto`, a registered or shipped drafter, or a directory with a checkpoint
        verify, pipeline  as for `LLM`; None takes the one that was given there
        whole_drafts  short for verify="all"
        calibrated    apply the `calibration.json` beside the drafter's weights, if there is one

        Drafters and what their schedulers learned are kept, unless live rounds refuted the costs:
        these are measured again. Raises ConfigError for an unknown name, an unknown way to verify
        or a block length the drafter cannot honour, CheckpointError for one that was made for
        another target, ResourceError while a stream is open.
        """
        self._refuse_if_busy()
        self._forget_stale_costs()
        reason = "as asked"
        if name == "auto":
            name, reason = choose_drafter(self.model_name, self._carried, self._measured)
        mode = "all" if whole_drafts else verify or self._verify
        parse(mode)  # better refused before weights are read
        check_mode(pipeline := pipeline or self._pipeline)
        key = (name, num_draft_tokens)
        drafter = self._placement.drafter(*key)
        if mode == "auto" and drafter.sizes_drafts:
            mode = "all"  # it has weighed the lengths already: a second cut only loses tokens
        costs = profile.Costs(None, "")
        if self.emulation is not None:
            costs = profile.Costs(None, "emulated times: a fixed guess instead of measured costs")
        elif drafter.cap and not parse(mode).own_draft_only:
            costs = self._measured(key)
        self._key, self._table, self._calibrated = key, costs.table, calibrated
        self._spec = replace(self._spec, drafter=name, num_draft_tokens=num_draft_tokens)
        self._lanes_asked = pipeline
        self.drafter_name, self.drafter_reason = name, reason
        self.verify, self.verify_reason = mode, costs.reason
        self._renew_engine(always=True)

    def _renew_engine(self, always: bool = False) -> None:
        """Between texts: an engine with as many lanes as are due now."""
        drafter, before = self._placement.drafter(*self._key), self._lanes.measurements
        verdict = self._lanes.decide(self._lanes_asked, drafter, self._spec, self.verify)
        self.pipeline, self.pipeline_reason = verdict.mode(self._lanes_asked), verdict.reason
        if not always and verdict.two == isinstance(self._engine, PipelinedEngine):
            if self._lanes.measurements > before:
                self._engine.forget()
            return
        kind = (*self._key, self.verify, self._calibrated, verdict.two)
        if kind not in self._schedulers:
            self._schedulers[kind] = Scheduler(
                self.verify,
                table=verdict.scaled(self._table),
                calibration=calibration_in(self.drafter_folder) if self._calibrated else None,
                plain=None if verdict.two else self._lanes.plain(self._spec, self.verify),
            )
        self._engine: Engine = self._lanes.engine(
            verdict, drafter, self._spec, self.tokenizer, self._schedulers[kind],
            self._prefix_reuse,
        )  # fmt: skip

    def _measured(self, key: Key) -> profile.Costs:
        """What rounds of this drafter cost."""
        if key not in self._costs:
            name = self._fingerprint(*key)
            self._costs[key] = profile.obtain(
                self.target, lambda: self._placement.drafter(*key), name
            )
        return self._costs[key]

    @property
    def drafter_folder(self) -> Path | None:
        """The directory of the current drafter's weights, if it has one of its own."""
        return folder_of(self.drafter_name, self.model_name, self._carried)

    def _forget_stale_costs(self) -> None:
        """Drop a table that live rounds refuted, from the cache, too: whoever chooses the drafter
        next measures anew; until then the old one is scaled (`schedule.monitor`)."""
        engine: Engine | None = getattr(self, "_engine", None)
        if engine is None or engine.scheduler.cost is None or not engine.scheduler.cost.stale:
            return
        profile.forget(self._fingerprint(*self._key))
        self._costs.pop(self._key, None)
        self._schedulers = {at: s for at, s in self._schedulers.items() if at[:2] != self._key}

    def measure_costs(self, seconds: float = profile.SECONDS) -> CostTable:
        """Measure what rounds of the current drafter cost, now. Raises ConfigError if a pass of
        many tokens takes as long as one of a single token."""
        self._refuse_if_busy()
        self._engine.forget()
        name = self._fingerprint(*self._key)
        return profile.measure(self.target, self._placement.drafter(*self._key), name, seconds)

    def plain_speed(self) -> float:
        """Tokens a second of one text without a drafter, measured now, in about a second."""
        self._refuse_if_busy()
        self._engine.forget()
        return profile.plain_speed(self.target)

    def _fingerprint(self, drafter: str, num_draft_tokens: int | None) -> dict[str, object]:
        """What measured costs belong to."""
        drafter += "" if self.draft_device is None else f" on {self.draft_device}"
        who = (self.model_name, self.dtype, self.device, self.threads, drafter, num_draft_tokens)
        return profile.fingerprint(self.target, *who)

    @property
    def messages(self) -> list[str]:
        """What whoever runs this should know now, one line each."""
        return self._engine.messages

    def timeline(self) -> Timeline | None:
        """From now on what both lanes do is recorded here; None with one lane."""
        return lanes.record(self._engine)

    def close(self) -> None:
        """End the processes of drafters, if there are any. Without it they end with this one."""
        self._refuse_if_busy()
        self._lanes.close()

    @property
    def engine(self) -> Engine:
        """The engine itself, for a server that steps it in its own thread.

        It is the one of the current drafter. While it has work, the verbs of this LLM raise
        ResourceError; `target` and `tokenizer` may be read meanwhile.
        """
        return self._engine

    # -- prompts -------------------------------------------------------------------------------

    def encode_prompt(
        self, prompt: str | Sequence[Message], raw: bool = False, **options: Any
    ) -> tuple[int, ...]:
        """Ids of a conversation or one user turn, written with `options`, or of `raw` text."""
        if isinstance(prompt, str):
            if raw:
                return tuple(self.tokenizer.encode(prompt, add_special=True))
            prompt = [{"role": "user", "content": prompt}]
        return tuple(self.tokenizer.encode_chat([dict(m) for m in prompt], **options))

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Makes what `SamplingParams.grammar` holds a text to. May be used in any thread. Raises
        ResourceError without the package llguidance."""
        return Grammars(self.tokenizer, self.target.vocab_size)

    def json_grammar(self, schema: Mapping[str, Any] | None = None) -> Grammar:
        """Texts that fit a JSON schema, by `grammars`; None: any JSON object."""
        return self.grammars.json_schema({"type": "object"} if schema is None else schema)

    def _ids(self, prompt: Prompt | Sequence[Message]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.encode_prompt(prompt, raw=True)
        if prompt and isinstance(prompt[0], Mapping):
            return self.encode_prompt(cast(Sequence[Message], prompt))
        return tuple(cast(Sequence[int], prompt))

    # -- generation ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Continue each prompt (raw text or ids, no chat template); outputs in the same order.

        `params` holds for all prompts, or is one for each. Raises InvalidRequestError.
        """
        self._begin_texts()
        many = [prompts] if isinstance(prompts, str) else list(prompts)
        if any(isinstance(p, int) for p in many):
            raise InvalidRequestError(
                "generate got one list of token ids: expected a list of prompts, so put it into one"
            )
        if isinstance(params, Sequence):
            each = list(params)
        else:
            each = [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"{len(many)} prompts were given with {len(each)} params")
        requests = [self._request(self._ids(p), q) for p, q in zip(many, each, strict=True)]
        for _ in self._run(requests):
            pass
        return [self._outputs[r.id] for r in requests]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Output:
        """Answer a conversation through the model's chat template. Raises InvalidRequestError."""
        return self.generate([self.encode_prompt(messages)], params)[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> Iterator[Chunk]:
        """Yield the answer token by token; `last_output` holds it whole afterwards.

        Messages go through the chat template, text and ids do not. Closing the iterator early
        cancels the request; until it ended or was closed, other requests raise ResourceError.
        `on_round` sees every round before its tokens are yielded.
        """
        self._begin_texts()
        request = self._request(self._ids(prompt), params or SamplingParams())
        self._engine.on_round = on_round
        try:
            yield from self._run([request])
        finally:
            self._engine.on_round = None
            self.last_output = self._outputs.get(request.id)

    def completions(
        self, requests: Iterable[tuple[Prompt | Sequence[Message], SamplingParams]]
    ) -> Iterator[tuple[int, Output]]:
        """Yield (number of the request, output) as texts finish, which is in any order.

        `requests` is read only as slots come free: it may be endless, and may depend on outputs
        yielded before, and no slot waits for the longest text of a batch. Closing the iterator
        cancels what is in flight. Raises InvalidRequestError at a bad request, which cancels too.
        """
        self._begin_texts()
        waiting = enumerate(requests)
        running: dict[str, int] = {}
        try:
            while True:
                while len(running) < self.target.num_slots:
                    number, (prompt, params) = next(waiting, (-1, ((), None)))
                    if params is None:
                        break
                    self._count += 1
                    request = Request(f"request-{self._count}", self._ids(prompt), params)
                    self._engine.submit(request)
                    running[request.id] = number
                if not running:
                    return
                for chunk in self._engine.step():
                    if chunk.finish_reason is not None:
                        output = self._engine.take_output(chunk.request_id)
                        assert output is not None
                        yield running.pop(chunk.request_id), output
        finally:
            for name in running:
                self._engine.cancel(name)
                self._engine.take_output(name)
            self._forget_stale_costs()

    def _refuse_if_busy(self) -> None:
        """Two callers must not step one engine: each would swallow the other's chunks."""
        engine: Engine | None = getattr(self, "_engine", None)
        if engine is not None and engine.has_work:
            raise ResourceError(
                "a stream of this LLM is still open: read it to its end or close() it first"
            )

    def _begin_texts(self) -> None:
        self._refuse_if_busy()
        self._renew_engine()

    def _request(self, ids: tuple[int, ...], params: SamplingParams) -> Request:
        self._count += 1
        return Request(f"request-{self._count}", ids, params)

    def _run(self, requests: list[Request]) -> Iterator[Chunk]:
        """Step until all are done; whatever ends this early leaves no request behind."""
        self._outputs: dict[str, Output] = {}
        try:
            for r in requests:
                self._engine.submit(r)
            while self._engine.has_work:
                yield from self._engine.step()
        finally:
            for r in requests:
                self._engine.cancel(r.id)
                output = self._engine.take_output(r.id)
                if output is not None:
                    self._outputs[r.id] = output
            self._forget_stale_costs()
