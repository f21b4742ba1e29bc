"""The server answers: while it loads, while a pass runs, when a round fails, at the end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from dspark.errors import CheckpointError
from dspark.server.app import Settings
from dspark.server.run import bind, serve
from dspark.server.worker import Model
from tests.server.served import Scripted, serving

ASKED: dict[str, Any] = {"prompt": "hello", "temperature": 0}


def test_health_answers_while_a_pass_runs() -> None:
    """B29: under half a second, with passes of two."""
    with serving(Scripted(b"ab", seconds=2.0)) as s:
        done: list[Any] = []
        thread = threading.Thread(
            target=lambda: done.append(s.post("/v1/completions", **ASKED, max_tokens=1))
        )
        thread.start()
        s.wait(lambda: s.worker.open_requests == 1)
        times = []
        while not done:
            begun = time.perf_counter()
            assert s.http.get("/health").status_code == 200
            times.append(time.perf_counter() - begun)
            time.sleep(0.05)
        thread.join()
        assert done[0].json()["choices"][0]["text"] == "a"
        assert len(times) > 5 and max(times) < 0.5


def test_it_listens_while_the_model_loads() -> None:
    go = threading.Event()

    def load() -> Model:
        assert go.wait(20)
        return Scripted(b"ab")

    with serving(load, ready=False) as s:
        health = s.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for answer in (s.post("/v1/completions", **ASKED), s.http.get("/v1/models")):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_loading"
            assert int(answer.headers["retry-after"]) >= 1
        assert s.http.get("/metrics").status_code == 200
        go.set()
        s.wait(lambda: s.http.get("/health").status_code == 200)
        assert s.post("/v1/completions", **ASKED, max_tokens=1).status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> Model:
        raise CheckpointError("no such model")

    with serving(load, ready=False) as s:
        s.wait(lambda: s.worker.failure is not None)
        assert s.http.get("/health").json() == {"status": "failed"}
        assert s.post("/v1/completions", **ASKED).json()["error"]["code"] == "model_failed"
    with pytest.raises(CheckpointError, match="no such model"):
        serve(load, Settings(), bind("127.0.0.1", 0))


def test_a_round_that_fails_ends_its_requests_and_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Scripted(b"abcdef")
    with serving(model) as s:
        forward, model.target.forward = model.target.forward, lambda *a: 1 / 0  # type: ignore
        answer = s.post("/v1/completions", **ASKED, max_tokens=3)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        streamed = s.post("/v1/completions", **ASKED, max_tokens=3, stream=True)
        assert '"error":' in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        assert "ZeroDivisionError" in caplog.text
        model.target.forward = forward  # type: ignore
        s.idle()
        assert (
            s.post("/v1/completions", **ASKED, max_tokens=3).json()["choices"][0]["text"] == "abc"
        )


def test_the_end_does_not_wait_for_long_answers() -> None:
    """What is in flight gets an error, and the engine's thread is gone (`serving` checks)."""
    answers: list[Any] = []
    with serving(Scripted(b"x" * 250, seconds=0.05)) as s:
        thread = threading.Thread(
            target=lambda: answers.append(s.post("/v1/completions", **ASKED, max_tokens=240))
        )
        thread.start()
        s.wait(lambda: s.worker.open_requests == 1)
        begun = time.perf_counter()
        s.worker.stop()
        thread.join()
        assert time.perf_counter() - begun < 2
        assert answers[0].status_code == 503
        assert s.post("/v1/completions", **ASKED).status_code == 503
