"""The page's files and what they may do; what it does in a browser is in test_page.py."""

from __future__ import annotations

import re
import threading

from dspark.server.web import FOLDER, Page
from tests.server.served import Running, Scripted, serving


def test_the_files_are_served(server: Running) -> None:
    paths = Page().paths
    assert "/" in paths
    for path in paths:
        answer = server.http.get(path)
        assert answer.status_code == 200 and answer.content
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        head = server.http.head(path)
        assert head.status_code == 200 and head.content == b""
    kinds = {p.rsplit(".")[-1]: server.http.get(p).headers["content-type"] for p in paths}
    assert kinds["js"].startswith("text/javascript") and kinds["css"].startswith("text/css")
    assert server.http.get("/").headers["content-type"].startswith("text/html")


def test_every_file_that_is_named_exists_and_nothing_comes_from_elsewhere() -> None:
    paths = set(Page().paths)
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, file.name
        assert not re.findall(
            r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.sub(r"\S*w3\.org\S*", "", text)
        )
        for name in re.findall(r"(?:src|href)=\"([^\"#]+)\"", text):
            assert name in paths, f"{file.name} names {name}"
        for name in re.findall(r"from \"\./([^\"]+)\"", text):
            assert f"/page/{name}" in paths, f"{file.name} imports {name}"
        assert " style=" not in text and " onclick=" not in text  # the policy forbids both


def test_the_page_loads_without_the_key_and_its_questions_need_it() -> None:
    with serving(Scripted(b"x"), api_key="secret") as s:
        bare = {"Authorization": ""}
        for path in Page().paths:
            assert s.http.get(path, headers=bare).status_code == 200
        for path in ("/info", "/v1/info", "/models", "/page", "/page/", "/page/nothing.js"):
            assert s.http.get(path, headers=bare).status_code == 401, path
        assert s.http.get("/page/nothing.js").status_code == 404


def test_info() -> None:
    def info(model: Scripted) -> dict[str, object]:
        with serving(model) as s:
            assert s.http.get("/info").json() == s.http.get("/v1/info").json()
            found: dict[str, object] = s.http.get("/info").json()
            return found

    plain = info(Scripted(b"x"))
    assert (plain["drafter"], plain["plain_tokens_per_second"]) == ("none", None)
    drafting = info(Scripted(b"x", right=lambda n, row: 1, slots=3, context=128))
    assert drafting["plain_tokens_per_second"] == 50.0
    assert (drafting["model"], drafting["max_users"], drafting["max_model_len"]) == (
        "scripted",
        3,
        128,
    )


def test_info_of_a_real_model(server: Running) -> None:
    speed = server.http.get("/info").json()["plain_tokens_per_second"]
    assert speed > 0 and server.http.get("/info").json()["plain_tokens_per_second"] == speed


def test_loading() -> None:
    gate = threading.Event()

    def load() -> Scripted:
        gate.wait(10)
        return Scripted(b"x")

    with serving(load, ready=False) as s:
        assert s.http.get("/").status_code == 200
        assert s.http.get("/info").status_code == 503
        gate.set()
        s.wait(lambda: s.worker.model is not None)
