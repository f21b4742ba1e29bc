"""A long run of the server with everything that clients do to one, good and bad.

    python scripts/soak.py                                    2,000 requests of 16 users
    python scripts/soak.py MODEL --requests 60 --users 4 --seed 3

Chats and completions with mixed parameters, whole and streamed. A tenth hang up at random moments,
a twentieth are malformed, a few read slowly. Meanwhile /health is asked ten times a second. Then:

* nothing answered with a status of 500 or above, and malformed requests with one below;
* every completed text equals the one that the library writes alone, with the same seed;
* slots, queues, tasks, files and (but for `--growth`) memory are what they were;
* /health never took longer than half a second.

Server, engine and clients share this process, so a slow answer of /health may be the clients'
fault, never to the server's advantage. The drafter is prompt lookup unless chosen otherwise:
what it guesses changes no seeded text. A drafter that draws its guesses does where the length of
its drafts follows live costs, so choose a schedule that does not (`--verify all`) with one.

The last line is JSON with a verdict; the exit code is 1 if it is no.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from dspark.answers import AnswerFormat
from dspark.llm import LLM
from dspark.server.app import Settings, create_app
from dspark.server.run import bind
from dspark.server.schema import ChatRequest, CompletionRequest
from dspark.server.turns import Turn, turn_of
from dspark.server.worker import Worker

HEALTH_LIMIT = 0.5  # seconds
WORDS = ("a list of", "red and blue", "words, then", "the same:", "one two", "three.", "ü 😀")
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
          "required": ["ok", "n"], "additionalProperties": False}  # fmt: skip
FUNCTIONS = ({"name": "look", "parameters": SCHEMA}, {"name": "stop"})
TOOLS = [{"type": "function", "function": f} for f in FUNCTIONS]


@dataclass(frozen=True)
class Plan:
    """One request: `kind` is whole, stream, slow, abort or malformed."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class State:
    """What must be the same before and after."""

    free_slots: int
    in_flight: int
    tasks: int
    threads: int
    files: int | None
    memory_mib: float | None

    def busy(self, before: State | None) -> bool:
        files = before is not None and (self.files or 0) > (before.files or 0)
        return bool(self.in_flight) or self.tasks > 3 or files


@dataclass
class Findings:
    completed: int = 0
    aborted: int = 0
    malformed: int = 0
    unexpected: list[str] = field(default_factory=list)
    """Statuses that should not have been, and what broke."""
    differing: list[int] = field(default_factory=list)
    """Numbers of the requests whose text is not that of a solo run."""
    slowest_health: float = 0.0
    before: State | None = None
    after: State | None = None

    def problems(self, growth_mib: float) -> list[str]:
        """What speaks against the server, in words."""
        found = [f"unexpected: {u}" for u in self.unexpected[:10]]
        if self.differing:
            found.append(f"{len(self.differing)} texts differ from their solo runs")
        if self.slowest_health >= HEALTH_LIMIT:
            found.append(f"/health took {self.slowest_health:.2f} s")
        if self.before is None or self.after is None:
            return [*found, "it did not come to an end"]
        for name in ("free_slots", "in_flight", "tasks", "threads", "files"):
            was, now = getattr(self.before, name), getattr(self.after, name)
            # Of the last three the process may have had others, which end; a leak is one more.
            if was is not None and (now > was or (now < was and name == "free_slots")):
                found.append(f"{name} was {was} and is {now}")
        was, now = self.before.memory_mib, self.after.memory_mib
        if was is not None and now is not None and now - was > growth_mib:
            found.append(f"memory grew by {now - was:.0f} MiB")
        return found


# -- what is asked ---------------------------------------------------------------------------------


def plans(count: int, dice: random.Random, llm: LLM, max_tokens: int) -> list[Plan]:
    """A tenth aborts, a twentieth is malformed, the rest completes; in random order."""
    kinds = ["abort"] * round(count / 10) + ["malformed"] * round(count / 20)
    usual = ["whole"] * 4 + ["stream"] * 4 + ["slow"]
    kinds += dice.choices(usual, k=count - len(kinds))
    dice.shuffle(kinds)
    return [_plan(kind, n, dice, llm, max_tokens) for n, kind in enumerate(kinds)]


def _plan(kind: str, seed: int, dice: random.Random, llm: LLM, max_tokens: int) -> Plan:
    text = " ".join(dice.choices(WORDS, k=dice.randint(1, 30)))
    body: dict[str, Any] = {"max_tokens": dice.randint(1, max_tokens), "seed": seed}
    body["temperature"] = dice.choice([0, 0.7, 1.0, 1.5])
    optional: dict[str, Any] = {
        "top_p": 0.8, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "repetition_penalty": 1.1, "stop": ["a", " the"], "n": 2,
        "logit_bias": {"65": 3}, "min_tokens": 3, "stop_token_ids": [66],
    }  # fmt: skip
    body |= {k: optional[k] for k in dice.sample(sorted(optional), dice.randint(0, 3))}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if dice.random() < 0.5:
        path = "/v1/completions"
        body |= {"prompt": text} | ({"logprobs": 2} if dice.random() < 0.1 else {})
        extra: list[dict[str, Any]] = [{"response_format": form}]
    else:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": text}]
        extra = [{"response_format": form}, {"logprobs": True, "top_logprobs": 2}]
        if llm.tokenizer.knows_tools:
            extra += [{"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}]
        if llm.tokenizer.knows_thinking:
            extra.append({"reasoning_effort": "low"})
    if dice.random() < 0.3:
        body |= dice.choice(extra)
    if kind in ("stream", "slow"):
        body["stream"] = True
    if kind == "abort":
        body |= {"max_tokens": 4 * max_tokens, "stream": dice.random() < 0.5}
    if kind == "malformed":
        body |= dice.choice([{"top_p": 7}, {"what": 1}, {"n": "2"}, {"messages": 3, "prompt": 3},
                             {"max_tokens": 0}, {"response_format": {"type": "xml"}}])  # fmt: skip
    return Plan(kind, path, body)


# -- the users -------------------------------------------------------------------------------------


def choices(answer: dict[str, Any]) -> dict[int, str]:
    """What each choice of a whole answer says: text, reasoning and calls."""
    return {c["index"]: _said(c.get("message") or c) for c in answer["choices"]}


def _said(part: dict[str, Any]) -> str:
    calls = [c["function"] for c in part.get("tool_calls") or ()]
    said = (part.get("reasoning_content") or "", part.get("content") or part.get("text") or "")
    return "|".join((*said, *(f"{c['name']}{c['arguments']}" for c in calls)))


async def streamed(http: httpx.AsyncClient, plan: Plan, pause: float) -> dict[int, str]:
    """The same of a streamed answer, put together."""
    parts: dict[int, dict[str, Any]] = {}
    async with http.stream("POST", plan.path, json=plan.body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            message = json.loads(line[6:])
            if "error" in message:
                raise RuntimeError(message["error"]["message"])
            for c in message["choices"]:
                into = parts.setdefault(c["index"], {"tool_calls": []})
                delta = c.get("delta") or c
                for name in ("reasoning_content", "content", "text"):
                    into[name] = into.get(name, "") + (delta.get(name) or "")
                for piece in delta.get("tool_calls") or ():
                    if piece.get("id"):
                        into["tool_calls"].append(piece)
                    else:
                        last = into["tool_calls"][-1]["function"]
                        last["arguments"] += piece["function"]["arguments"]
            await asyncio.sleep(pause)
    return {index: _said(part) for index, part in parts.items()}


async def send(
    http: httpx.AsyncClient, plan: Plan, dice: random.Random, found: Findings
) -> dict[int, str] | None:
    """Do what a plan says; the texts of one that was meant to complete."""
    if plan.kind == "malformed":
        status = (await http.post(plan.path, json=plan.body)).status_code
        found.malformed += 1
        if status != 400:
            found.unexpected.append(f"status {status} for {plan.body}")
        return None
    if plan.kind == "abort":
        stream = plan.body["stream"]
        work = streamed(http, plan, 0) if stream else http.post(plan.path, json=plan.body)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(dice.random() ** 2 * 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        found.aborted += 1
        return None
    if plan.body.get("stream"):
        texts = await streamed(http, plan, 0.03 if plan.kind == "slow" else 0)
    else:
        answer = await http.post(plan.path, json=plan.body)
        answer.raise_for_status()
        texts = choices(answer.json())
    found.completed += 1
    return texts


async def run(
    url: str, work: Sequence[Plan], users: int, seed: int, found: Findings
) -> dict[int, dict[int, str]]:
    """All of them, by so many users at once; the texts by number of the request."""
    dice = random.Random(seed)
    waiting = list(enumerate(work))[::-1]
    texts: dict[int, dict[int, str]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def user() -> None:
            while waiting:
                number, plan = waiting.pop()
                try:
                    said = await send(http, plan, dice, found)
                except Exception as e:
                    found.unexpected.append(f"request {number} ({plan.kind}): {e!r}")
                    continue
                if said is not None:
                    texts[number] = said

        async def health() -> None:
            while True:
                begun = time.perf_counter()
                try:
                    (await http.get("/health")).raise_for_status()
                except httpx.HTTPError as e:
                    found.unexpected.append(f"/health: {e!r}")
                spent = time.perf_counter() - begun
                found.slowest_health = max(found.slowest_health, spent)
                await asyncio.sleep(0.1)

        watch = asyncio.create_task(health())
        await asyncio.gather(*(user() for _ in range(users)))
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return texts


# -- the server ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    url: str
    worker: Worker
    loop: asyncio.AbstractEventLoop

    def state(self, before: State | None = None) -> State:
        """When all is as it was `before`, or after a while; connections have time to close."""
        until = time.monotonic() + 20
        while (now := self._state()).busy(before) and time.monotonic() < until:
            time.sleep(0.1)
        return now

    def _state(self) -> State:
        gc.collect()
        engine, files = self.worker.ready().engine, Path("/proc/self/fd")
        pages = Path("/proc/self/statm")
        size = os.sysconf("SC_PAGE_SIZE") / 2**20
        return State(
            free_slots=len(engine._slots.free),
            in_flight=self.worker.open_requests + engine.has_work,
            tasks=len(asyncio.all_tasks(self.loop)),
            threads=sum(not t.name.startswith("asyncio_") for t in threading.enumerate()),
            files=len(list(files.iterdir())) if files.exists() else None,
            memory_mib=int(pages.read_text().split()[1]) * size if pages.exists() else None,
        )


@contextmanager
def serving(llm: LLM, queue: int) -> Iterator[Served]:
    app = create_app(lambda: llm, Settings(max_queue=queue))
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(server.serve(sockets=[listener])), name="server"
    )
    thread.start()
    worker: Worker = app.state.worker
    try:
        while worker.model is None and thread.is_alive():
            time.sleep(0.05)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", worker, loop)
    finally:
        server.should_exit = True
        thread.join(60)
        loop.close()
        listener.close()


def alone(llm: LLM, plan: Plan) -> dict[int, str]:
    """What each choice of a request is when the library writes it without company."""
    body: ChatRequest | CompletionRequest
    if plan.path.endswith("chat/completions"):
        body = ChatRequest.model_validate(plan.body)
        turn = turn_of(body, llm.tokenizer)
        ids, lark = llm.encode_prompt(turn.messages, **turn.options), turn.grammar
    else:
        body = CompletionRequest.model_validate(plan.body)
        turn = Turn([], {}, AnswerFormat())
        ids, lark = llm.encode_prompt(str(body.prompt), raw=True), None
    grammar = llm.json_grammar(body.answer_schema) if body.answer_schema else None
    grammar = llm.grammars.lark(lark) if lark else grammar
    said = {}
    for index, params in enumerate(body.sampling(llm.target.max_context - len(ids), grammar)):
        reader = turn.reader()
        answer = reader.feed(llm.generate([ids], params)[0].text) + reader.finish()
        calls = [{"function": dataclasses.asdict(c)} for c in answer.calls]
        said[index] = _said({"content": answer.content, "reasoning_content": answer.reasoning,
                             "tool_calls": calls})  # fmt: skip
    return said


def soak(llm: LLM, options: argparse.Namespace) -> Findings:
    """The whole run."""
    dice, found = random.Random(options.seed), Findings()
    work = plans(options.requests, dice, llm, options.max_tokens)
    warm = [p for p in plans(60, random.Random(-1), llm, options.max_tokens) if p.kind != "abort"]
    with serving(llm, queue=4 * options.users) as served:
        # Pools, caches and kernels come to their usual size first.
        asyncio.run(run(served.url, warm[: 2 * options.users], options.users, 0, Findings()))
        found.before = served.state()
        texts = asyncio.run(run(served.url, work, options.users, options.seed, found))
        found.after = served.state(found.before)
        if served.worker.failure is not None:
            found.unexpected.append(f"the engine ended: {served.worker.failure!r}")
    llm.engine.on_round = None  # the server is gone
    found.differing += [n for n, said in sorted(texts.items()) if alone(llm, work[n]) != said]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="default")
    numbers = {"requests": 2000, "users": 16, "seed": 0, "max-tokens": 48, "max-users": 8}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=str(default))
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--verify", default="all")
    parser.add_argument("--growth", type=float, default=64.0, help="MiB that are no leak")
    options = parser.parse_args(argv)
    if min(options.requests, options.users, options.max_tokens, options.max_users) < 1:
        parser.error("--requests, --users, --max-tokens and --max-users are 1 or more")
    # Requests that hang up are cancelled on purpose, and uvicorn logs what that does to a response.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    llm = LLM(
        options.model,
        drafter=options.drafter,
        verify=options.verify,
        max_users=options.max_users,
        max_context=None if options.model != "default" else 1024,
    )
    begun = time.perf_counter()
    found = soak(llm, options)
    problems = found.problems(options.growth)
    sys.stderr.write("".join(f"{line}\n" for line in problems))
    said = {"ok": not problems, **vars(options), "model": llm.model_name,
            "seconds": round(time.perf_counter() - begun, 1), **dataclasses.asdict(found),
            "problems": problems}  # fmt: skip
    print(json.dumps(said))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
