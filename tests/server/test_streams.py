"""Streams of scripted text: whole characters, stops, keep-alive, and clients that go away."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.engine.oracle import PATTERNS
from tests.server.served import EOS, Running, Scripted, serving

TEXT = "naïve 😀 façade, stop here: abcabd end".encode()


def messages(text: str) -> list[Any]:
    """What stands in the data lines of a stream."""
    found = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(m) for m in found[:-1]]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stop", [[], ["abd"], ["zzz", "stop here", "here"], ["😀"], ["end "]])
def test_stream_equals_whole(pattern: str, stop: list[str]) -> None:
    """B20: no half character, no beginning of a stop string, nothing lost at the end."""
    asked = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "stop": stop}
    with serving(Scripted([*TEXT, EOS], right=PATTERNS[pattern])) as s:
        whole = s.post("/v1/completions", **asked).json()
        options = {"include_usage": True}
        raw = s.post("/v1/completions", **asked, stream=True, stream_options=options)
        chunks = messages(raw.text)
        s.idle()
    deltas = [c["choices"][0]["text"] for c in chunks if c["choices"]]
    assert "".join(deltas) == whole["choices"][0]["text"]
    assert all("\ufffd" not in d for d in deltas)
    plain = TEXT.decode()
    ends = [plain.find(t) for t in stop if t in plain]
    assert whole["choices"][0]["text"] == plain[: min(ends)] if ends else plain
    assert whole["choices"][0]["finish_reason"] == "stop"
    same = ("usage", "prompt_tokens"), ("usage", "completion_tokens")
    assert all(chunks[-1][a][b] == whole[a][b] for a, b in same)
    spec = [x["metrics"]["speculative_decoding"] for x in (whole, chunks[-1])]
    for figures in spec:  # what was foreseen depends on the texts before
        assert figures.pop("num_predicted_accepted_tokens") >= 0
    assert spec[0] == spec[1]


@pytest.mark.parametrize("limit", [1, 2, 6, 7, 8, 9])
def test_budget(limit: int) -> None:
    """B21: with every draft accepted, exactly as many tokens as asked for, and billed."""
    with serving(Scripted(bytes(range(65, 105)), right=PATTERNS["all"], block=7)) as s:
        got = s.post("/v1/completions", prompt="hello", max_tokens=limit, temperature=0).json()
    assert got["choices"][0]["text"] == bytes(range(65, 65 + limit)).decode()
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == limit


def test_shape_of_a_chat_stream() -> None:
    prompt = b"user: hi\n"
    with serving(Scripted(b"Hello there", prompt)) as s:
        raw = s.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    assert raw.headers["content-type"].startswith("text/event-stream")
    first, *middle, finish, usage = messages(raw.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [m["choices"][0]["delta"] for m in middle] == [{"content": c} for c in "Hello"]
    assert finish["choices"][0] | {"index": 0} == finish["choices"][0]
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "length")
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], len(prompt) + 5)
    assert len({m["id"] for m in (first, *middle, finish, usage)}) == 1
    assert first["usage"] is None and first["object"] == "chat.completion.chunk"


def test_counts_in_every_message() -> None:
    """What guidellm asks for: vLLM's running usage."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with serving(Scripted(b"Hello there", right=PATTERNS["all"])) as s:
        asked = {"prompt": "hello", "max_tokens": 9, "temperature": 0, "stream": True}
        raw = s.post("/v1/completions", **asked, stream_options=options)
        without = s.post("/v1/completions", **asked, stream_options={**options, "include_usage": 0})
    *deltas, last = messages(raw.text)
    text = ""
    for m in deltas:
        text += m["choices"][0]["text"]
        assert m["usage"] == {"prompt_tokens": 5, "completion_tokens": len(text),
                              "total_tokens": 5 + len(text)}  # fmt: skip
    assert len(deltas) < 9 and text == "Hello the"
    assert last["usage"]["completion_tokens"] == 9 and "prompt_tokens_details" in last["usage"]
    assert without.status_code == 400, "no boolean"


def test_keep_alive_during_a_long_prefill() -> None:
    with serving(Scripted(b"abc", seconds=0.5), keep_alive=0.1) as s:
        raw = s.post("/v1/completions", prompt="hello", max_tokens=2, temperature=0, stream=True)
        first = raw.text.index("data: ")
        assert raw.text[:first].count(": keep-alive\n\n") >= 2
        assert "".join(m["choices"][0]["text"] for m in messages(raw.text)) == "ab"
        stream = s.client.completions.create(  # the client of OpenAI reads over comments
            model="scripted", prompt="hello", max_tokens=2, temperature=0, stream=True
        )
        assert "".join(c.choices[0].text for c in stream) == "ab"


def slot_is_free(s: Running) -> bool:
    return s.worker.open_requests == 0 and not s.worker.ready().engine.has_work


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(stream: bool) -> None:
    """Within one round: the pass in progress, and no other."""
    model = Scripted(b"x" * 200, slots=1, seconds=0.1)
    with serving(model) as s:
        asked = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "stream": stream}
        if stream:
            with s.http.stream("POST", "/v1/completions", json=asked) as response:
                lines = response.iter_lines()
                while not next(lines).startswith("data:"):
                    pass
        else:
            with pytest.raises(httpx.ReadTimeout):
                s.http.post("/v1/completions", json=asked, timeout=0.5)
        passes = model.target.passes
        s.wait(lambda: slot_is_free(s))
        assert model.target.passes <= passes + 2
        assert s.series("dspark:request_success_total") == 1
        s.idle()
        again = s.post("/v1/completions", prompt="hello", max_tokens=1, temperature=0)
        assert again.json()["choices"][0]["text"] == "x"


def test_a_client_that_goes_away_while_it_waits() -> None:
    with serving(Scripted(b"x" * 200, slots=1, seconds=0.05)) as s:
        asked: dict[str, Any] = {"prompt": "hello", "max_tokens": 200, "temperature": 0}
        with s.http.stream("POST", "/v1/completions", json={**asked, "stream": True}):
            with pytest.raises(httpx.ReadTimeout):
                s.http.post("/v1/completions", json=asked, timeout=0.3)
            s.wait(lambda: s.worker.open_requests == 1)
        s.idle()
