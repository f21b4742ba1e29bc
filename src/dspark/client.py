"""A client of OpenAI's protocol: one address, and answers as streams of JSON messages.

For what this project asks of any such server (`dspark bench serve`, `dspark chat --url`), where a
library of one vendor would hide when which bytes arrived. Messages are passed on as they came;
what they hold is the caller's business. No retries, and no torch.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from dspark.errors import ConfigError, DSparkError, ResourceError

END = "[DONE]"


class RefusedError(ConfigError):
    """The server answered, and what it said is an error; `status` is None inside a stream."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """Where a server is."""

    url: str
    """`http://host:8000`, with or without the `/v1` behind it."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    timeout: float = 600.0
    """Seconds without a byte from the server after which a request has failed."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what is no address."""
        try:
            parts = urllib.parse.urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            good = good and not parts.query and not parts.fragment
        except ValueError:  # a port that is no number, half an IPv6 address
            good = False
        if not good:
            raise ConfigError(
                f"{self.url!r} is no address of a server: expected http://host:port or"
                " http://host:port/v1"
            )
        if not (self.api_key or "").isascii():
            raise ConfigError("the API key holds what no HTTP header can: expected ASCII")
        if not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout} is out of range: expected more than 0")

    @property
    def api(self) -> str:
        """In front of `/chat/completions`: a given path stays, no path means `/v1`."""
        url = self.url.rstrip("/").removesuffix("/chat/completions")
        return url if urllib.parse.urlsplit(url).path else url + "/v1"

    @property
    def root(self) -> str:
        """In front of `/metrics`."""
        return self.api.removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def open(self) -> httpx.Client:
        return httpx.Client(headers=self.headers, timeout=self.timeout)

    def open_async(self) -> httpx.AsyncClient:
        """Without a limit of connections, which would queue where only the server should."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(headers=self.headers, timeout=self.timeout, limits=limits)


@contextmanager
def explained(endpoint: Endpoint) -> Iterator[None]:
    """What goes wrong on the way, in words. Raises ResourceError."""
    try:
        yield
    except httpx.HTTPError as e:
        hint = "; is the server running?" if isinstance(e, httpx.ConnectError) else ""
        said = str(e) or type(e).__name__
        raise ResourceError(f"cannot reach {endpoint.url}: {said}{hint}") from e


def only_model(endpoint: Endpoint, http: httpx.Client) -> str:
    """The first model that the server lists. Raises RefusedError, ConfigError, ResourceError."""
    with explained(endpoint):
        answer = http.get(f"{endpoint.api}/models")
    _check(endpoint, answer)
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise ConfigError(f"{endpoint.api}/models lists no model: name one") from e


def stream(
    endpoint: Endpoint, http: httpx.Client, body: Mapping[str, Any]
) -> Generator[dict[str, Any]]:
    """The messages of one streamed chat completion. Closing the iterator hangs up.

    Raises RefusedError for an answer that is an error, ResourceError if the connection fails or
    ends before the stream does.
    """
    url, asked = f"{endpoint.api}/chat/completions", {**body, "stream": True}
    with explained(endpoint), http.stream("POST", url, json=asked) as answer:
        if answer.status_code != 200:
            answer.read()
        _check(endpoint, answer)
        for line in answer.iter_lines():
            if (data := _data(line)) == END:
                return
            if data is not None:
                yield _message(endpoint, data)
    raise _cut_off(endpoint)


async def stream_async(
    endpoint: Endpoint, http: httpx.AsyncClient, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """`stream` for an event loop."""
    url, asked = f"{endpoint.api}/chat/completions", {**body, "stream": True}
    with explained(endpoint):
        async with http.stream("POST", url, json=asked) as answer:
            if answer.status_code != 200:
                await answer.aread()
            _check(endpoint, answer)
            async for line in answer.aiter_lines():
                if (data := _data(line)) == END:
                    return
                if data is not None:
                    yield _message(endpoint, data)
    raise _cut_off(endpoint)


def _data(line: str) -> str | None:
    """What a line of server-sent events carries; None for comments and the blanks between."""
    return line[5:].strip() if line.startswith("data:") else None


def _message(endpoint: Endpoint, data: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ResourceError(f"{endpoint.url} sent what is no JSON object: {data[:80]!r}")
    if found.get("error"):
        raise RefusedError(f"{endpoint.url} ended a stream with: {_said(found)}", None)
    return found


def _check(endpoint: Endpoint, answer: httpx.Response) -> None:
    if answer.status_code == 200:
        return
    try:
        said = _said(answer.json())
    except ValueError:
        said = answer.text
    words = " ".join(said.split())[:300] or "(no text)"
    raise RefusedError(f"{endpoint.url} answered {answer.status_code}: {words}", answer.status_code)


def _said(body: Any) -> str:
    """The message of an error body, whose forms differ from server to server."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


def _cut_off(endpoint: Endpoint) -> DSparkError:
    return ResourceError(f"{endpoint.url} closed the connection before its stream had ended")
