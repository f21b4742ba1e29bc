"""The routes, each with and without /v1 in front.

A handler does three things: turn the body into token ids and parameters, open an `Answer`, and
write it whole or as a stream. Work that may take long (templates, tokenizing) happens in a thread,
so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from dspark import __version__
from dspark.errors import DSparkError
from dspark.server import errors
from dspark.server.answer import Answer, unless_gone
from dspark.server.errors import ApiError, Json
from dspark.server.guard import Guard
from dspark.server.messages import plain
from dspark.server.metrics import Metrics, Report
from dspark.server.replies import Chat, Completion, Reply
from dspark.server.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from dspark.server.sse import EventStream
from dspark.server.turns import Turn, turn_of
from dspark.server.web import Page
from dspark.server.worker import Done, Model, Worker
from dspark.types import Grammar

log = logging.getLogger("dspark.server")
MAX_CHARACTERS = 32
"""Of a prompt, for each token the context holds. English has four or five; what has more than this
is refused before it is tokenized, which takes a second for a few hundred thousand of them."""
CLIENT_GONE = 499
"""Status of a response that nobody reads (nginx's number)."""


@dataclass(frozen=True)
class Settings:
    """What the operator chooses."""

    api_key: str | None = None
    model_names: tuple[str, ...] = ()
    """Further names by which a request may call the model."""
    max_queue: int = 64
    max_body: int = 4 * 2**20
    metrics_prefix: str = "dspark"
    keep_alive: float = 5.0
    """Seconds of silence before a comment."""
    log_interval: float = 10.0


def create_app(load: Callable[[], Model], settings: Settings) -> FastAPI:
    """An application whose engine thread calls `load` as soon as it starts.

    `app.state.worker` is the thread's `Worker`, `app.state.metrics` what it counts.
    """
    metrics = Metrics(settings.metrics_prefix)
    worker = Worker(load, metrics, max_queue=settings.max_queue)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        reporter = asyncio.create_task(_report(metrics, settings.log_interval))
        yield
        reporter.cancel()
        worker.stop()
        # A round ends soon; a model that still loads cannot be interrupted, and ends with us.
        await asyncio.to_thread(worker.join, 10.0 if worker.model is not None else 0.2)

    app = FastAPI(
        title="dspark", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.worker, app.state.metrics = worker, metrics
    page = Page()
    app.add_middleware(
        Guard,
        api_key=settings.api_key,
        max_body=settings.max_body,
        open_paths=frozenset({"/health", "/v1/health", *page.paths}),
    )
    errors.install(app)
    page.install(app)
    for path, endpoint, method in _Routes(worker, metrics, settings).table():
        for prefix in ("/v1", ""):
            app.add_api_route(
                prefix + path,
                endpoint,
                methods=[method],
                response_model=None,
                include_in_schema=prefix == "/v1",
            )
    return app


async def _report(metrics: Metrics, interval: float) -> None:
    report = Report(metrics, time.perf_counter())
    while True:
        await asyncio.sleep(interval)
        for line in report.lines(time.perf_counter()):
            log.info(line)


class _Routes:
    def __init__(self, worker: Worker, metrics: Metrics, settings: Settings) -> None:
        self._worker, self._metrics, self._settings = worker, metrics, settings
        self._created = int(time.time())

    def table(self) -> list[tuple[str, Callable[..., Any], str]]:
        return [
            ("/chat/completions", self.chat, "POST"),
            ("/completions", self.completion, "POST"),
            ("/models", self.models, "GET"),
            ("/models/{name:path}", self.one_model, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
            ("/health", self.health, "GET"),
            ("/version", self.version, "GET"),
            ("/info", self.info, "GET"),
            ("/metrics", self.metrics, "GET"),
        ]

    # -- generation ------------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        arrived = time.perf_counter()
        model = self._model(body.model)
        turn = turn_of(body, model.tokenizer)
        _check_length(model, "messages", [_characters([turn.messages, turn.options])])
        ids = await asyncio.to_thread(model.encode_prompt, turn.messages, **turn.options)
        grammar = await _grammar(model, body, turn)
        reply = partial(Chat, turn=turn)
        return await self._generate(request, body, [ids], "messages", arrived, reply, grammar)

    async def completion(self, request: Request, body: CompletionRequest) -> Response:
        arrived = time.perf_counter()
        model = self._model(body.model)
        prompts = body.prompts
        if len(prompts) * body.choices > MAX_CHOICES:
            raise ApiError(
                400, f"prompt times n is more than {MAX_CHOICES} texts: split it", param="prompt"
            )
        _check_length(model, "prompt", [len(p) for p in prompts if isinstance(p, str)])
        ids = await asyncio.to_thread(lambda: [_ids(model, p) for p in prompts])
        grammar = await _grammar(model, body)
        return await self._generate(request, body, ids, "prompt", arrived, Completion, grammar)

    async def _generate(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        field: str,
        arrived: float,
        kind: Callable[..., Reply],
        grammar: Grammar | None,
    ) -> Response:
        model = self._worker.ready()
        context = model.engine.target.max_context
        wanted = []
        for ids in prompts:
            if len(ids) >= context:
                raise ApiError(
                    400,
                    f"the prompt has {len(ids)} tokens and this model's context holds {context},"
                    " one of them for the answer: shorten it",
                    param=field,
                    code="context_length_exceeded",
                )
            wanted += [(ids, p) for p in body.sampling(context - len(ids), grammar)]
        if len(wanted) > self._worker.capacity:
            raise ApiError(
                400, f"{len(wanted)} texts at once are more than this server queues", param="n"
            )
        name = ("chatcmpl-" if field == "messages" else "cmpl-") + uuid.uuid4().hex
        logprobs = wanted[0][1].logprobs is not None
        reply = kind(
            name,
            model.model_name,
            model.tokenizer,
            logprobs=logprobs,
            usage=body.wants_usage,
            rounds=body.wants_rounds,
            counted=sum(map(len, prompts)) if body.wants_counts else None,
        )
        answer = Answer(self._worker, name, wanted, arrived, body.wants_rounds)
        if body.stream:
            return await self._stream(request, answer, reply, body.choices)
        return await self._whole(request, answer, reply, body.choices)

    async def _stream(
        self, request: Request, answer: Answer, reply: Reply, choices: int
    ) -> Response:
        try:
            taken = answer.accepted(self._settings.keep_alive)
            if not await unless_gone(request.receive, taken):
                answer.close()
                return Response(status_code=CLIENT_GONE)
        except BaseException:
            answer.close()
            raise
        return EventStream(answer, reply, choices, self._settings.keep_alive)

    async def _whole(
        self, request: Request, answer: Answer, reply: Reply, choices: int
    ) -> Response:
        done: list[Done] = []

        async def collect() -> None:
            done.extend(await answer.outputs())

        try:
            if not await unless_gone(request.receive, collect()):
                return Response(status_code=CLIENT_GONE)
        finally:
            answer.close()
        return Json(reply.whole(done, choices))

    # -- the model -------------------------------------------------------------------------------

    def _model(self, name: str | None) -> Model:
        """The model, if `name` is one of its names. Raises ApiError: 503 or 404."""
        model = self._worker.ready()
        if name is not None and name not in (model.model_name, *self._settings.model_names):
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist: this server has {model.model_name!r}",
                param="model",
                code="model_not_found",
            )
        return model

    def _card(self, name: str) -> dict[str, Any]:
        model = self._worker.ready()
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "dspark",
            "root": model.model_name,
            "max_model_len": model.engine.target.max_context,
        }

    async def models(self) -> Response:
        names = dict.fromkeys((self._worker.ready().model_name, *self._settings.model_names))
        return Json({"object": "list", "data": [self._card(n) for n in names]})

    async def one_model(self, name: str) -> Response:
        self._model(name)
        return Json(self._card(name))

    async def tokenize(self, body: TokenizeRequest) -> Response:
        model = self._model(body.model)
        if body.messages is not None:
            prompt = plain(body.messages)
            _check_length(model, "messages", [_characters(prompt)])
            ids = await asyncio.to_thread(model.encode_prompt, prompt)
        else:
            special = body.add_special_tokens is not False
            _check_length(model, "prompt", [len(body.prompt or "")])
            found = await asyncio.to_thread(
                model.tokenizer.encode, body.prompt or "", add_special=special
            )
            ids = tuple(found)
        limit = model.engine.target.max_context
        return Json({"count": len(ids), "max_model_len": limit, "tokens": list(ids)})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        model = self._model(body.model)
        vocab = model.engine.target.vocab_size
        if any(i >= vocab for i in body.tokens):
            raise ApiError(400, f"tokens holds an id outside 0..{vocab - 1}", param="tokens")
        text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, False)
        return Json({"prompt": text})

    # -- the server ------------------------------------------------------------------------------

    async def health(self) -> Response:
        if self._worker.model is not None:
            return Json({"status": "ok"})
        status = "loading" if self._worker.failure is None else "failed"
        return Json({"status": status}, 503, errors.RETRY_AFTER)

    async def version(self) -> Response:
        return Json({"version": __version__})

    async def info(self) -> Response:
        """What the page tells about the server."""
        model = self._worker.ready()
        return Json(
            {
                "version": __version__,
                "model": model.model_name,
                "drafter": model.drafter_name,
                "reasons": model.tokenizer.knows_thinking,
                "max_model_len": model.engine.target.max_context,
                "max_users": model.engine.target.num_slots,
                "plain_tokens_per_second": self._worker.plain_speed,
            }
        )

    async def metrics(self) -> Response:
        page = self._metrics.page().decode()
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4; charset=utf-8")


def _check_length(model: Model, param: str, lengths: Sequence[int]) -> None:
    """Refuse texts that no context of this size can hold. Raises ApiError."""
    context = model.engine.target.max_context
    longest = max(lengths, default=0)
    if longest > MAX_CHARACTERS * context:
        raise ApiError(
            400,
            f"the prompt has {longest} characters, more than {MAX_CHARACTERS} for each of the"
            f" {context} tokens that this model's context holds: shorten it",
            param=param,
            code="context_length_exceeded",
        )


async def _grammar(
    model: Model, body: ChatRequest | CompletionRequest, turn: Turn | None = None
) -> Grammar | None:
    """What holds an answer to what was asked for. Raises ApiError if it cannot be used."""
    grammar = None
    param = "response_format"
    try:
        if body.answer_schema is not None:
            grammar = await asyncio.to_thread(model.grammars.json_schema, body.answer_schema)
        if turn is not None and turn.grammar is not None:
            param = "tools" if turn.tools else param
            grammar = await asyncio.to_thread(model.grammars.lark, turn.grammar)
    except DSparkError as e:
        raise ApiError(400, f"{param}: {e}", param=param) from e
    return grammar


def _characters(value: Any) -> int:
    """Length of all texts in a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(k) + _characters(v) for k, v in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _ids(model: Model, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return model.encode_prompt(prompt, raw=True)
    return tuple(prompt)
