"""The engine in a thread of its own, and how requests get in and tokens get out.

One thread owns the engine: it loads the model, then alternates between what lies in its inbox
(new requests, cancellations) and one round. Nobody else touches the engine, so nothing in it needs
a lock; and a pass, which releases the interpreter, never keeps the event loop from answering.

    submit / cancel  ->  inbox  ->  [ engine.step() ]  ->  job.deliver(event)  ->  event loop

A cancellation is read between two rounds, so a client that goes away frees its slot within one.
A round that raises ends the requests in flight with an error and leaves the engine usable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from dspark.errors import InvalidRequestError
from dspark.server.errors import ApiError, loading, queue_full
from dspark.server.figures import Figures
from dspark.server.metrics import Metrics
from dspark.types import Chunk, Output, Request, Round, Span

if TYPE_CHECKING:
    from dspark.engine.engine import Engine
    from dspark.engine.pipeline import PipelinedEngine
    from dspark.grammar import Grammars
    from dspark.tokenizer import Tokenizer

log = logging.getLogger(__name__)
MAX_SPANS = 256
"""That wait for one text: those of the rounds that it does without tokens."""


class Model(Protocol):
    """What is served: an `LLM`, or a test's stand-in for one."""

    model_name: str
    drafter_name: str
    tokenizer: Tokenizer

    @property
    def engine(self) -> Engine: ...

    @property
    def grammars(self) -> Grammars: ...

    def encode_prompt(self, prompt: Any, raw: bool = False, **options: Any) -> tuple[int, ...]: ...

    def plain_speed(self) -> float:
        """Tokens a second of one text without a drafter, measured now."""
        ...


@dataclass(frozen=True)
class Accepted:
    """The engine took the request: it will be served."""


@dataclass(frozen=True)
class Tokens:
    """What one round emitted; the first token of a text is the prompt's and has no round."""

    chunks: tuple[Chunk, ...]
    round: Round | None = None
    spans: tuple[Span, ...] = ()
    """What both lanes did since the last ones, for who watches."""


@dataclass(frozen=True)
class Done:
    output: Output
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    error: BaseException


Event = Accepted | Tokens | Done | Failed


@dataclass(eq=False)
class Job:
    """A request on its way through the engine; `deliver` is called in the engine's thread."""

    request: Request
    deliver: Callable[[Event], None]
    figures: Figures
    watches: bool = False
    """It wants to know what both lanes do while it has a slot."""
    emitted: int = 0
    round: Round | None = None
    """The one that has just been counted, until its tokens are handed out."""
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    """Of both lanes, until then."""


class Worker:
    """Owns the thread. `model` is None until it is loaded; `failure` says why it never will be."""

    def __init__(
        self,
        load: Callable[[], Model],
        metrics: Metrics,
        *,
        max_queue: int,
        on_ready: Callable[[Model], None] = lambda model: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.model: Model | None = None
        self.failure: BaseException | None = None
        self.plain_speed: float | None = None
        """Tokens a second without the drafter, measured once in front of the first request."""
        self._load, self._metrics, self._max_queue = load, metrics, max_queue
        self.on_ready, self.on_failure = on_ready, on_failure
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._live: dict[str, Job] = {}
        """In order of arrival, in which the engine gives out its slots."""
        self._lock = threading.Lock()
        self._open = 0
        self._budget = 0
        """Draft tokens verified in the round in progress."""
        self._lanes: PipelinedEngine | None = None
        """The engine, if it has two."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- from any thread -----------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the round in progress; requests in flight get an error. May be repeated."""
        self._stopping = True
        self._inbox.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; False if it still loads or computes."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def ready(self) -> Model:
        """The model. Raises ApiError (503) while it loads."""
        if self.model is None:
            raise loading(self.failure is not None)
        return self.model

    @property
    def open_requests(self) -> int:
        """Running and waiting."""
        return self._open

    @property
    def capacity(self) -> int:
        return self.ready().engine.target.num_slots + self._max_queue

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of `jobs` or none. Raises ApiError: 429 without room, 503 at the end."""
        capacity = self.capacity
        with self._lock:
            if self._stopping:
                raise _shutting_down()
            if self._open + len(jobs) > capacity:
                raise queue_full(self._open)
            self._open += len(jobs)
            for job in jobs:
                self._inbox.put(lambda job=job: self._enter(job))  # type: ignore[misc]

    def cancel(self, request_id: str) -> None:
        """End a request before the next round; unknown and ended ones are ignored."""
        self._inbox.put(lambda: self._cancel(request_id))

    # -- in the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            model = self._load()
            from dspark.engine.pipeline import PipelinedEngine  # costs no more time now

            self._metrics.start(model.model_name)
            self._engine = model.engine
            if isinstance(model.engine, PipelinedEngine):
                self._lanes = model.engine
            self._engine.on_round = self._on_round
            self._speculates = model.drafter_name != "none"
            self.plain_speed = model.plain_speed() if self._speculates else None
            self.model = model
            self.on_ready(model)
        except BaseException as e:  # whoever started us raises it
            self.model, self.failure = None, e
            self.on_failure()
            return
        while self._take_inbox():
            if self._engine.has_work:
                self._round()
            self._show_load()
        with self._lock:  # whoever submits now has either put its jobs or will be refused
            self._stopping = True
        while not self._inbox.empty():
            if (command := self._inbox.get()) is not None:
                command()
        self._end_all(_shutting_down())
        self._show_load()

    def _take_inbox(self) -> bool:
        """Do what lies in the inbox; waits for something when there is nothing else to do."""
        wait = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(block=wait)
            except Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _enter(self, job: Job) -> None:
        try:
            self._engine.submit(job.request)
        except Exception as e:
            if not isinstance(e, InvalidRequestError):
                log.exception("a request could not be submitted")
            self._leave(job, Failed(e))
            return
        self._live[job.request.id] = job
        job.deliver(Accepted())

    def _leave(self, job: Job, last: Event) -> None:
        self._live.pop(job.request.id, None)
        with self._lock:
            self._open -= 1
        self._show_load()  # before its client can ask: an ended request is in no figure
        job.deliver(last)

    def _cancel(self, request_id: str) -> None:
        job = self._live.get(request_id)
        if job is not None:
            self._drop(job, ApiError(499, "cancelled"))

    def _drop(self, job: Job, error: BaseException) -> None:
        self._engine.cancel(job.request.id)
        self._engine.take_output(job.request.id)
        self._metrics.ended("abort")
        self._leave(job, Failed(error))

    def _end_all(self, error: BaseException) -> None:
        for job in list(self._live.values()):
            with suppress(Exception):  # of an engine that is broken already
                self._drop(job, error)

    def _round(self) -> None:
        now = time.perf_counter()
        for job in islice(self._live.values(), self._engine.target.num_slots):
            if job.figures.started is None:
                job.figures.started = now
                waited = now - job.figures.arrived
                self._metrics.observe("request_queue_time_seconds", waited)
        self._budget = 0
        watching = self._watching()
        try:
            chunks = self._engine.step()
        except Exception as e:
            log.exception("a round failed; the requests in flight end with an error")
            self._end_all(e)
            return
        errors = [p.gap for p in self._engine.scheduler.drift.totals]
        self._metrics.schedule(self._budget, errors)
        if self._lanes is not None and self._lanes.timeline is not None:
            spans = self._lanes.timeline.take()
            for job in watching:
                begun = job.figures.started
                job.spans += [s for s in spans if begun is not None and s.start >= begun]
        for name, emitted in groupby(chunks, key=lambda c: c.request_id):
            self._hand_out(self._live[name], tuple(emitted))

    def _watching(self) -> list[Job]:
        """Who wants to see both lanes; they are recorded as long as somebody does."""
        if self._lanes is None:
            return []
        watching = [job for job in self._live.values() if job.watches]
        if not watching:
            self._lanes.timeline = None
        elif self._lanes.timeline is None:
            self._lanes.record()
        return watching

    def _on_round(self, r: Round) -> None:
        self._metrics.round(r)
        self._budget += r.verified
        job = self._live[r.request_id]
        job.figures.add(r)
        job.round = r

    def _hand_out(self, job: Job, chunks: tuple[Chunk, ...]) -> None:
        now, m, f = time.perf_counter(), self._metrics, job.figures
        if f.first is None or f.last is None:
            f.first = now
            m.observe("time_to_first_token_seconds", now - f.arrived)
            m.tokens(prompt=len(job.request.prompt_ids))
        else:
            m.observe("inter_token_latency_seconds", now - f.last)
        f.last = now
        m.tokens(generated=len(chunks))
        job.emitted += len(chunks)
        job.deliver(Tokens(chunks, job.round, tuple(job.spans)))
        job.round = None
        job.spans.clear()
        if chunks[-1].finish_reason is None:
            return
        output = self._engine.take_output(job.request.id)
        assert output is not None
        m.ended(output.finish_reason)
        m.observe("e2e_request_latency_seconds", now - f.arrived)
        if output.stats.round_tokens:
            mean = (now - f.first) / output.stats.round_tokens
            m.observe("request_time_per_output_token_seconds", mean)
        self._leave(job, Done(output, f.metrics(output.stats, self._speculates)))

    def _show_load(self) -> None:
        target = self._engine.target
        slots = target.num_slots
        running = list(islice(self._live.values(), slots))
        rows = sum(len(j.request.prompt_ids) + j.emitted for j in running)
        self._metrics.load(
            len(running), len(self._live) - len(running), rows / (slots * target.max_context)
        )


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", kind="service_unavailable")
