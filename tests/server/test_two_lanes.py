"""A server whose drafter has a lane of its own says what one without says, and clients that go away
leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dspark import LLM, SamplingParams
from dspark.engine.pipeline import PipelinedEngine
from tests.models.official_v4 import TINY
from tests.models.test_deepseek_v4_loading import directory
from tests.server.served import Running, serving

PROMPTS = ["abc", "xyzzy xyzzy", "DeepSeek-V4"]
LONG = 110
OPTIONS: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "max_context": 128, "max_users": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(directory(tmp_path_factory.mktemp("v4"), TINY, drafter=True, index_n_heads=16))


@pytest.fixture(scope="module")
def texts(place: str) -> dict[str, str]:
    plain = LLM(place, drafter="none", **OPTIONS)
    outputs = plain.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    return dict(zip(PROMPTS, (o.text for o in outputs), strict=True))


@pytest.fixture(scope="module", params=["process", "thread"])
def server(request: pytest.FixtureRequest, place: str) -> Iterator[Running]:
    made: list[LLM] = []
    device = "cpu" if request.param == "thread" else None

    def load() -> LLM:
        made.append(LLM(place, drafter="mtp1", pipeline="on", draft_device=device, **OPTIONS))
        return made[0]

    with serving(load) as running:
        yield running
        running.idle()
    made[0].close()


def ask(server: Running, prompt: str, **more: Any) -> str:
    body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    answer = server.post("/v1/completions", prompt=prompt, **body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_two_users_and_those_who_go_away(server: Running, texts: dict[str, str]) -> None:
    engine = server.worker.ready().engine
    assert isinstance(engine, PipelinedEngine)
    assert ask(server, PROMPTS[0]) == texts[PROMPTS[0]]
    found: dict[str, str] = {}
    users = [
        threading.Thread(target=lambda p=p: found.update({p: ask(server, p)})) for p in PROMPTS
    ]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert found == texts
    for company in (False, True):
        body = {"prompt": "abc", "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as gone:
            lines = gone.iter_lines()
            while not next(lines).startswith("data:"):
                pass
            if company:  # the other half goes on when this one ends
                assert ask(server, PROMPTS[1]) == texts[PROMPTS[1]]
        server.idle()
        assert ask(server, PROMPTS[2]) == texts[PROMPTS[2]]
    server.idle()
    assert not engine._blocks.names and not engine.drafter.failures
    assert server.series("dspark:request_success_total") >= 9
