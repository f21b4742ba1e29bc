"""The client of OpenAI's protocol against a server, and against what is none."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dspark import client
from dspark.client import Endpoint, RefusedError
from dspark.errors import ConfigError, ResourceError
from tests.server.served import Scripted, serving

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@contextmanager
def saying(status: int, body: bytes) -> Iterator[str]:
    """A server that answers everything with the same."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", "0")))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    Handler.do_GET = Handler.do_POST = Handler._answer  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def read(endpoint: Endpoint, asynchronous: bool) -> list[dict[str, Any]]:
    async def read_async() -> list[dict[str, Any]]:
        async with endpoint.open_async() as http:
            return [m async for m in client.stream_async(endpoint, http, BODY)]

    if asynchronous:
        return asyncio.run(read_async())
    with endpoint.open() as http:
        return list(client.stream(endpoint, http, BODY))


BOTH = pytest.mark.parametrize("asynchronous", [False, True])


@pytest.mark.parametrize(
    ("url", "api", "root"),
    [
        ("http://a:1", "http://a:1/v1", "http://a:1"),
        ("http://a:1/v1/", "http://a:1/v1", "http://a:1"),
        ("https://a/llm/v1", "https://a/llm/v1", "https://a/llm"),
        ("http://a/v1/chat/completions", "http://a/v1", "http://a"),
    ],
)
def test_addresses(url: str, api: str, root: str) -> None:
    endpoint = Endpoint(url)
    assert (endpoint.api, endpoint.root) == (api, root)


@pytest.mark.parametrize(
    "url", ["a:1", "ftp://a", "http://", "http://a:x", "http://[::", "h://a?b"]
)
def test_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="no address of a server"):
        Endpoint(url)


def test_other_mistakes_and_no_secret_in_a_repr() -> None:
    with pytest.raises(ConfigError, match="timeout=0"):
        Endpoint("http://a", timeout=0)
    with pytest.raises(ConfigError, match="ASCII"):
        Endpoint("http://a", "schlüssel")
    assert "secret" not in repr(Endpoint("http://a", "secret"))


@BOTH
def test_a_stream(asynchronous: bool) -> None:
    with serving(Scripted(b"Hello", b"user: hi\n"), api_key="k") as s:
        endpoint = Endpoint(s.url, "k")
        with endpoint.open() as http:
            assert client.only_model(endpoint, http) == "scripted"
        found = read(endpoint, asynchronous)
    text = "".join(m["choices"][0]["delta"].get("content", "") for m in found)
    assert text.startswith("Hello") and found[-1]["choices"][0]["finish_reason"] == "length"


@BOTH
def test_a_refusal_has_the_servers_words(asynchronous: bool) -> None:
    with serving(Scripted(b"Hello"), api_key="k") as s:
        with pytest.raises(RefusedError, match=r"answered 401: the API key is missing") as caught:
            read(Endpoint(s.url), asynchronous)
        with Endpoint(s.url).open() as http, pytest.raises(RefusedError):
            client.only_model(Endpoint(s.url), http)
    assert caught.value.status == 401


@BOTH
@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (500, b"<html>\nno</html>", RefusedError, "answered 500: <html> no</html>"),
        (503, b"", RefusedError, r"answered 503: \(no text\)"),
        (404, b'{"detail": "Not Found"}', RefusedError, "Not Found"),
        (200, b'data: {"error": {"message": "full"}}\n\n', RefusedError, "stream with: full"),
        (200, b"data: {}\n\n", ResourceError, "closed the connection"),
        (200, b"data: 7\n\ndata: [DONE]\n\n", ResourceError, "no JSON object"),
        (200, b"data: {\n\ndata: [DONE]\n\n", ResourceError, "no JSON object"),
    ],
)  # fmt: skip
def test_servers_that_fail(
    asynchronous: bool, status: int, body: bytes, error: type[Exception], words: str
) -> None:
    with saying(status, body) as url, pytest.raises(error, match=words):
        read(Endpoint(url), asynchronous)


@BOTH
def test_nobody_there(asynchronous: bool) -> None:
    with pytest.raises(ResourceError, match="is the server running"):
        read(Endpoint("http://127.0.0.1:9"), asynchronous)


@pytest.mark.parametrize("body", [b"[]", b'{"data": []}', b"no"])
def test_no_model_listed(body: bytes) -> None:
    with saying(200, body) as url, Endpoint(url).open() as http, pytest.raises(ConfigError) as e:
        client.only_model(Endpoint(url), http)
    assert "lists no model: name one" in str(e.value)
