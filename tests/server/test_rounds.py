"""The stream's own field: which tokens were guessed, round by round, and only for who asks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.oracle import PATTERNS
from tests.server.served import EOS, Running, Scripted, serving
from tests.server.test_streams import TEXT, messages

ASK: dict[str, Any] = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "stream": True}
ROUNDS = {"dspark": {"rounds": True}}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stop", [[], ["stop here"]])
def test_rounds_of_a_stream(pattern: str, stop: list[str]) -> None:
    """Every token of the text, in order; joined they are the deltas; the sums are the figures'."""
    with serving(Scripted([*TEXT, EOS], right=PATTERNS[pattern])) as s:
        options = {"include_usage": True}
        asked = {**ASK, "stop": stop, "stream_options": options}
        plain = messages(s.post("/v1/completions", **asked).text)
        found = messages(s.post("/v1/completions", **asked, **ROUNDS).text)
    *chunks, finish, usage = found
    assert not any("dspark" in c for c in (*plain, finish, usage))
    events = [c["dspark"] for c in chunks]
    for chunk, event in zip(chunks, events, strict=True):
        joined = "".join(t["text"] for t in event["tokens"])
        assert joined == chunk["choices"][0]["text"]
    text = "".join(c["choices"][0]["text"] for c in plain if c["choices"])
    assert "".join(t["text"] for e in events for t in e["tokens"]) == text
    ids = [t["id"] for e in events for t in e["tokens"]]
    assert len(ids) == usage["usage"]["completion_tokens"]
    assert ids == [*TEXT, EOS][: len(ids)]
    first, *rounds = events
    assert first["round"] is None and [t["drafted"] for t in first["tokens"]] == [False]
    assert [e["round"]["index"] for e in rounds] == list(range(len(rounds)))
    for e in rounds:
        r, drafted = e["round"], [t["drafted"] for t in e["tokens"]]
        assert drafted == [True] * r["accepted"] + [False] * (len(drafted) - r["accepted"])
        assert len(drafted) - r["accepted"] in (0, 1) and r["accepted"] <= r["verified"]
        assert r["verified"] <= len(r["draft"]) <= 5
        assert min(r["draft_ms"], r["verify_ms"], r["other_ms"]) >= 0
    spec = usage["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] == sum(e["round"]["accepted"] for e in rounds)
    assert spec["num_draft_tokens"] == sum(e["round"]["verified"] for e in rounds)


def test_rejected_guesses_are_shown_as_text() -> None:
    """The oracle spoils a byte by adding one: 'a' is guessed as 'b'."""
    with serving(Scripted(b"aaaaaaaa", right=PATTERNS["none"])) as s:
        found = messages(s.post("/v1/completions", **{**ASK, "max_tokens": 3}, **ROUNDS).text)
    # Two tokens are missing behind the first one, so there is room for one guess.
    assert [c["dspark"]["round"]["draft"] for c in found[1:-1]] == [["b"], []]


def test_half_characters_and_choices() -> None:
    emoji = "😀".encode()
    with serving(Scripted(emoji, right=PATTERNS["all"])) as s:
        asked = {**ASK, "max_tokens": 4, "n": 2, **ROUNDS}
        found = messages(s.post("/v1/completions", **asked).text)
    for choice in (0, 1):
        events = [
            c["dspark"] for c in found if c["choices"][0]["index"] == choice and "dspark" in c
        ]
        tokens = [t for e in events for t in e["tokens"]]
        assert [t["text"] for t in tokens] == ["", "", "", "😀"]
        assert [t["id"] for t in tokens] == list(emoji)
        assert events[1]["round"]["draft"] == ["\ufffd"] * 2


def test_a_chat_by_the_official_client(server: Running) -> None:
    """Its models keep what they do not know; the role comes first, without the field."""
    stream = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "abc abc abc abc"}],
        max_tokens=20,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, **ROUNDS},
    )
    chunks: list[Any] = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not hasattr(chunks[0], "dspark") and not hasattr(chunks[-1], "dspark")
    tokens = [t for c in chunks[1:-1] for t in c.dspark["tokens"]]
    assert len(tokens) == 20
    assert "".join(t["text"] for t in tokens) == "".join(
        c.choices[0].delta.content or "" for c in chunks
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"dspark": {"rounds": True}, "stream": False}, "dspark"),
        ({"dspark": {"rounds": 1}}, "dspark.rounds"),
        ({"dspark": {"round": True}}, "round"),
        ({"dspark": True}, "dspark"),
        ({"stream_options": 5}, "stream_options"),
    ],
)
def test_what_it_may_not_be(server: Running, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", **{**ASK, **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("value", [None, {}, {"rounds": None}, {"rounds": False}])
def test_not_asked_for(server: Running, value: Any) -> None:
    found = messages(server.post("/v1/completions", **{**ASK, "dspark": value}).text)
    assert not any("dspark" in c for c in found)
