"""Answers written by a server that speaks OpenAI's protocol, such as vLLM or SGLang.

A large target answers faster on the server that already holds it. Each conversation is one POST to
`/v1/chat/completions`, `parallel` of them at a time, so that the server's batch stays full. The
server applies its own chat template: it must be the target's, as it is when the same model serves.

A request that fails for a passing reason (429, 5xx, a broken connection) is repeated with growing
pauses. One that the server refuses by itself (400, 413, 422: too long, mostly) is left out; when
more are refused than answered, that is an error with the server's words.

Not promised: the same text after a stop. A server need not honour `seed`, and its sums depend on
what else is in its batch; rows that are there are kept as they are. And a server that cuts thinking
out of its answers gives text that the target never wrote so: turn that off.
"""

from __future__ import annotations

import json
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from dspark.errors import ConfigError, ResourceError
from dspark.train.text import Ask, Writing, Written
from dspark.types import SamplingParams

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes after which the same request may succeed."""
REFUSED = frozenset({400, 413, 422})
"""Status codes that speak of this request, not of all."""
MAX_PAUSE = 30.0
"""Seconds between two tries at most."""
FEW = 3
"""Refusals that are bearable before anything was answered."""


class _RefusedError(Exception):
    """The server does not take this one request."""


@dataclass(frozen=True)
class EndpointConfig:
    """Where the server is and how it is asked."""

    url: str
    """`http://host:8000`, or with the path in front of `/chat/completions`."""
    model: str
    """The name that the server knows its model by."""
    parallel: int = 64
    """Requests in flight."""
    api_key: str | None = None
    """Sent as a bearer token."""
    timeout: float = 600.0
    """Seconds without a byte from the server after which a try has failed."""
    retries: int = 6
    """Further tries after a passing failure."""
    pause: float = 1.0
    """Seconds before the first further try; doubled each time, MAX_PAUSE at most."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of range."""
        parts = urllib.parse.urlsplit(self.url)
        try:
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        if not good:
            raise ConfigError(f"endpoint {self.url!r} is no address: expected http://host:port")
        if self.parallel < 1:
            raise ConfigError(f"parallel={self.parallel} is out of range: expected 1 or more")

    @property
    def address(self) -> str:
        """What is posted to."""
        url = self.url.rstrip("/")
        if url.endswith("/chat/completions"):
            return url
        path = urllib.parse.urlsplit(url).path
        return url + ("/chat/completions" if path else "/v1/chat/completions")


class EndpointWriter:
    """A `dspark.train.text.Writer` that asks a server; it answers conversations only."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self._answered = False

    def fits(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> bool:
        """The server knows; it refuses what does not fit."""
        return True

    def completions(self, asks: Iterable[Ask]) -> Writing:
        """Raises ResourceError if the server cannot be reached or fails for good, ConfigError if it
        refuses (a wrong model name or key, more conversations than it answers)."""
        todo: queue.SimpleQueue[tuple[int, Ask] | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Written | Exception]] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            while (item := todo.get()) is not None:
                number, (messages, params) = item
                try:
                    done.put((number, self._ask(messages, params, stop)))
                except Exception as e:  # raised again in the thread that reads
                    done.put((number, e))

        # Daemons: Ctrl-C shall not wait for answers that may take minutes.
        for _ in range(self.config.parallel):
            threading.Thread(target=work, daemon=True).start()
        waiting = enumerate(asks)
        flying = answered = refused = 0
        try:
            while True:
                while flying < self.config.parallel and (item := next(waiting, None)) is not None:
                    todo.put(item)
                    flying += 1
                if not flying:
                    return
                number, result = done.get()
                flying -= 1
                if isinstance(result, _RefusedError):
                    refused += 1
                    if refused > answered + FEW:
                        raise ConfigError(str(result))
                    yield number, None
                elif isinstance(result, Exception):
                    raise result
                else:
                    answered += 1
                    yield number, result
        finally:
            stop.set()
            for _ in range(self.config.parallel):
                todo.put(None)

    def _ask(self, messages: Any, params: SamplingParams, stop: threading.Event) -> Written:
        """One answer, tried again while that may help."""
        c = self.config
        body = {
            "model": c.model,
            "messages": [dict(m) for m in messages],
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
        }
        pause = c.pause
        for tries_left in range(c.retries, -1, -1):
            try:
                return self._answer(_post(c, body))
            except urllib.error.HTTPError as e:
                said = f"{c.address} answered {e.code} {e.reason}: {_first_words(e)}"
                if e.code in REFUSED:
                    raise _RefusedError(said) from e
                if e.code not in PASSING:
                    raise ConfigError(said) from e
                failure = said
            except (OSError, HTTPException, ValueError) as e:  # ValueError: half of a JSON object
                reason = e.reason if isinstance(e, urllib.error.URLError) else e
                failure = f"cannot reach {c.address}: {reason or type(e).__name__}"
                if not self._answered and isinstance(reason, ConnectionRefusedError):
                    raise ResourceError(f"{failure}; is the server running?") from e
            if not tries_left or stop.wait(pause):
                break
            pause = min(2 * pause, MAX_PAUSE)
        raise ResourceError(f"{failure} (tried {c.retries + 1} times)")

    def _answer(self, found: Any) -> Written:
        """What a server's JSON says. Raises ConfigError if it is of another kind."""
        try:
            choice = found["choices"][0]
            text = choice["message"]["content"]
            tokens = found["usage"]["completion_tokens"]
            reason = choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as e:
            raise ConfigError(
                f"{self.config.address} answered without {e}: expected the protocol of"
                " OpenAI's chat completions, with usage"
            ) from e
        self._answered = True
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise _RefusedError(
                f"{self.config.address} ended an answer for the reason {reason!r}: expected text"
            )
        return Written(text, int(tokens), reason)


def _post(config: EndpointConfig, body: Mapping[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    if config.api_key:
        headers["Authorization"] = f"Bearer {config.api_key}"
    request = urllib.request.Request(config.address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=config.timeout) as answer:
        return json.loads(answer.read())


def _first_words(error: urllib.error.HTTPError) -> str:
    """The body of an error, in one line that fits a terminal."""
    try:
        with error:
            text = error.read(4096).decode(errors="replace")
    except (OSError, HTTPException):
        return "(no text)"
    return " ".join(text.split())[:300] or "(no text)"
