"""What is refused, how it is said, and that everything is bounded."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from tests.server.served import Running, Scripted, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def refused(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) <= 500
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
        ("temperature", -0.1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.01), ("top_k", -2),
        ("min_p", 2), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("repetition_penalty", 0), ("n", 0), ("n", 33), ("stop", ""), ("stop", ["a"] * 17),
        ("stop", 3), ("stop", ["a" * 513]), ("stop_token_ids", [-1]), ("stop_token_ids", [999]),
        ("stop_token_ids", ["a"]), ("seed", 2**64), ("seed", "x"), ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}), ("logit_bias", {"999": 1}), ("logit_bias", [1]),
        ("min_tokens", -1), ("stream", "yes"), ("stream_options", {"include_usage": True}),
        ("response_format", "json"), ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object", "more": 1}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}),
        ("response_format",
         {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}),
        ("tools", []), ("tool_choice", "auto"),
        ("bogus", 1), ("bogus", None), ("store", True), ("ignore_eos", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_bad_field_is_named(server: Running, path: str, field: str, value: Any) -> None:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    error = refused(server, path, {**prompt, field: value})
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).split(".")[0] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "logprobs": 1}, "logprobs"),
        ({"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": HI, "prompt": "x"}, "prompt"),
    ],
)
def test_a_bad_chat_is_named(server: Running, body: Any, param: str) -> None:
    assert str(refused(server, CHAT, body)["param"]).split(".")[0] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, None), ({"prompt": ""}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": [257]}, None), ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a"] * 33}, "prompt"), ({"prompt": ["a"] * 5, "n": 7}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"), ({"prompt": "a", "echo": True}, "echo"),
    ],
)  # fmt: skip
def test_a_bad_completion_is_named(server: Running, body: Any, param: str | None) -> None:
    assert refused(server, TEXT, body)["param"] == param


def test_context_overflow(server: Running) -> None:
    error = refused(server, TEXT, {"prompt": "a" * 256})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    long = [{"role": "user", "content": "a" * 300}]
    assert refused(server, CHAT, {"messages": long})["code"] == "context_length_exceeded"
    # Far too long a text is not even tokenized.
    huge = "a" * (32 * 256 + 1)
    for path in (TEXT, "/v1/tokenize"):
        error = refused(server, path, {"prompt": huge})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "characters" in error["message"]
    for path in (CHAT, "/v1/tokenize"):
        error = refused(server, path, {"messages": [{"role": "user", "content": huge}]})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="context"):
        server.client.completions.create(model="tiny", prompt="a" * 256)
    full = server.post(TEXT, prompt="a" * 250, max_tokens=50, ignore_eos=True).json()
    assert full["usage"]["total_tokens"] == 256
    assert full["choices"][0]["finish_reason"] == "length"


def test_unknown_model_and_path(server: Running) -> None:
    error = refused(server, CHAT, {"model": "gpt-9", "messages": HI}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-9")
    for method, path, status in (("GET", "/nope", 404), ("GET", CHAT, 405), ("PUT", "/x", 404)):
        answer = server.http.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"3",
        b'"x"',
        b"\xff\xfe",
        b"{}" * 9,
        b"null",
        b"[" * 10**5,
        b"9" * 5000,
        b'{"prompt": "a", "top_p": 1e999}',
    ],
)
def test_a_body_that_is_no_object(server: Running, body: bytes) -> None:
    for headers in ({"content-type": "application/json"}, {}):
        answer = server.http.post(TEXT, content=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_size_of_a_body(server: Running) -> None:
    limit = 4 * 2**20
    answer = server.http.post(TEXT, content=b" " * (limit + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    def parts() -> Any:
        for _ in range(6):
            yield b" " * 2**20

    headers = {"content-type": "application/json"}
    assert server.http.post(TEXT, content=parts(), headers=headers).status_code == 413
    many = server.http.post(TEXT, json={"prompt": [[0.5]] * 100_000})
    assert many.status_code == 400 and len(many.content) < 1000
    names = server.http.post(TEXT, json={f"field{i}": 1 for i in range(50_000)})
    assert names.status_code == 400 and len(names.content) < 1000


def test_without_the_key_only_health_answers() -> None:
    with serving(Scripted(b"ab"), api_key="sesame") as s:
        assert s.http.get("/v1/models").status_code == 200
        for key in ("", "Bearer", "Bearer wrong", "Basic sesame", "sesame", "Bearer sesame2"):
            headers = {"Authorization": key.encode()} if key else {}
            for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nope"):
                request = s.http.build_request("GET", path)
                del request.headers["Authorization"]
                request.headers.update(headers)  # type: ignore[arg-type]
                answer = s.http.send(request)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
        request = s.http.build_request("GET", "/health")
        del request.headers["Authorization"]
        assert s.http.send(request).status_code == 200
        with (
            openai.OpenAI(base_url=f"{s.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_a_full_queue() -> None:
    """Two texts run or wait here; the third is turned away at once, and later served."""
    asked: dict[str, Any] = {"prompt": "hello", "max_tokens": 6, "temperature": 0}
    with serving(Scripted(b"abcdef", slots=1, seconds=0.2), max_queue=1) as s:
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(s.post(TEXT, **asked))) for _ in range(2)
        ]
        for t in threads:
            t.start()
        s.wait(lambda: s.worker.open_requests == 2)
        full = s.post(TEXT, **asked)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        assert s.post(TEXT, **asked, stream=True).status_code == 429
        with pytest.raises(openai.RateLimitError):
            s.client.completions.create(model="scripted", prompt="hello")
        s.wait(lambda: s.series("dspark:num_requests_waiting") == 1)
        assert s.series("dspark:num_requests_running") == 1
        for t in threads:
            t.join()
        assert [a.json()["choices"][0]["text"] for a in answers] == ["abcdef"] * 2
        # More texts than would ever fit are a mistake of the request.
        assert s.post(TEXT, **asked, n=3).status_code == 400
        assert s.post(TEXT, **asked, n=2).status_code == 200
        s.idle()
