"""Answers from a server: what is posted, what is tried again, what is said when it fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dspark.errors import ConfigError, DSparkError, ResourceError
from dspark.train.endpoint import EndpointConfig, EndpointWriter
from dspark.train.text import Ask, Written
from dspark.types import SamplingParams

Reply = tuple[int, Any]


def good(text: str, tokens: int = 3, reason: str | None = "stop") -> Reply:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": tokens}}


class Server:
    """Answers as `reply` says for (number of the request, its body)."""

    def __init__(self) -> None:
        self.reply: Callable[[int, dict[str, Any]], Reply] = lambda n, body: good(
            f"to {body['messages'][-1]['content']}"
        )
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.flying = self.most = 0
        self.delay = 0.0
        lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    n = len(owner.bodies)
                    owner.bodies.append(body)
                    owner.paths.append(self.path)
                    owner.keys.append(self.headers.get("Authorization"))
                    owner.flying += 1
                    owner.most = max(owner.most, owner.flying)
                time.sleep(owner.delay)
                code, found = owner.reply(n, body)
                with lock:
                    owner.flying -= 1
                raw = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def ask(text: str, **params: Any) -> Ask:
    return [{"role": "user", "content": text}], SamplingParams(**params)


def writer(server: Server, **options: Any) -> EndpointWriter:
    config = EndpointConfig(server.url, "big-model", parallel=4, pause=0.01)
    return EndpointWriter(replace(config, **options))


def failure(server: Server, kind: type[DSparkError], **options: Any) -> str:
    with pytest.raises(kind) as e:
        list(writer(server, **options).completions([ask("a")] * 20))
    assert "\n" not in str(e.value)
    return str(e.value)


def test_what_is_posted(server: Server) -> None:
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "é?"}]
    params = SamplingParams(max_tokens=9, temperature=0.7, seed=11)
    server.reply = lambda n, body: good("ja", 2, "length")
    found = list(writer(server, api_key="secret").completions([(messages, params)]))
    assert found == [(0, Written("ja", 2, "length"))]
    assert server.bodies == [
        {
            "model": "big-model",
            "messages": messages,
            "max_tokens": 9,
            "temperature": 0.7,
            "seed": 11,
        }
    ]
    assert server.keys == ["Bearer secret"] and server.paths == ["/v1/chat/completions"]
    list(writer(server).completions([ask("a")]))
    assert server.keys[1] is None


@pytest.mark.parametrize(
    ("tail", "path"),
    [("", "/v1/chat/completions"), ("/", "/v1/chat/completions"), ("/v1", "/v1/chat/completions"),
     ("/v1/", "/v1/chat/completions"), ("/api/v3", "/api/v3/chat/completions"),
     ("/v1/chat/completions", "/v1/chat/completions")],
)  # fmt: skip
def test_addresses(tail: str, path: str) -> None:
    assert EndpointConfig(f"http://host:8000{tail}", "m").address == f"http://host:8000{path}"


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://", "http://h:x"])
def test_no_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address: expected http://host:port"):
        EndpointConfig(url, "m")


def test_requests_fly_together_and_are_read_as_others_end(server: Server) -> None:
    server.delay = 0.05
    taken: list[int] = []
    found: dict[int, Written | None] = {}

    def asks() -> Iterator[Ask]:
        for n in range(12):
            taken.append(n)
            assert len(taken) - len(found) <= 4
            yield ask(str(n))

    for number, written in writer(server).completions(asks()):
        assert number not in found
        found[number] = written
    assert found == {n: Written(f"to {n}", 3, "stop") for n in range(12)}
    assert 2 <= server.most <= 4


def test_closing_early_leaves_the_rest_unasked(server: Server) -> None:
    stream = writer(server).completions(ask(str(n)) for n in range(100))
    next(stream)
    stream.close()
    assert len(server.bodies) <= 9


@pytest.mark.parametrize(
    "passing", [(503, b"busy"), (429, b"slow down"), (500, b""), (200, b'{"choices": [')]
)
def test_passing_failures_are_tried_again(server: Server, passing: Reply) -> None:
    server.reply = lambda n, body: passing if n < 2 else good("at last")
    assert list(writer(server).completions([ask("a")])) == [(0, Written("at last", 3, "stop"))]
    assert len(server.bodies) == 3 and server.bodies[0] == server.bodies[2]


def test_a_failure_that_stays(server: Server) -> None:
    server.reply = lambda n, body: (503, b"still\nbusy")
    said = failure(server, ResourceError, retries=2, parallel=1)
    assert said == (
        f"{server.url}/v1/chat/completions answered 503 Service Unavailable: still busy"
        " (tried 3 times)"
    )
    assert len(server.bodies) == 3


@pytest.mark.parametrize("code", [401, 404])
def test_wrong_keys_and_names_end_at_once(server: Server, code: int) -> None:
    server.reply = lambda n, body: (code, {"error": {"message": "no such\nmodel"}})
    assert "no such\\nmodel" in failure(server, ConfigError, parallel=1)
    assert len(server.bodies) == 1


def test_single_refusals_are_left_out(server: Server) -> None:
    server.reply = lambda n, body: (
        (400, b"too long") if body["messages"][0]["content"] in "02468" else good("x")
    )
    found = dict(writer(server).completions(ask(str(n)) for n in range(10)))
    assert {n for n, written in found.items() if written is None} == {0, 2, 4, 6, 8}


def test_refusing_all_is_an_error(server: Server) -> None:
    server.reply = lambda n, body: (422, b"no temperature here")
    assert "answered 422 Unprocessable Entity: no temperature here" in failure(server, ConfigError)
    assert len(server.bodies) <= 8


def test_other_ends_are_refusals(server: Server) -> None:
    server.reply = lambda n, body: good("", 0, "content_filter") if n == 1 else good("x")
    found = [w for _, w in writer(server, parallel=1).completions([ask("a")] * 3)]
    assert found == [Written("x", 3, "stop"), None, Written("x", 3, "stop")]


@pytest.mark.parametrize("found", [{"choices": []}, [1], {"choices": good("x")[1]["choices"]}])
def test_another_protocol(server: Server, found: Any) -> None:
    server.reply = lambda n, body: (200, found)
    said = failure(server, ConfigError, retries=0)
    assert "expected the protocol of OpenAI's chat completions" in said


def test_nobody_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: waiting does not start a server."""
    gone = Server()
    gone.http.server_close()
    began = time.perf_counter()
    assert "Connection refused; is the server running?" in failure(gone, ResourceError, pause=9.0)
    assert time.perf_counter() - began < 5
