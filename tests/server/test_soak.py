"""Many users at once, some of whom hang up or talk nonsense: `scripts/soak.py`, for a moment."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.served import TOOL_TEMPLATE, tiny_directory

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("soak") / "model"
    return str(tiny_directory(path, TOOL_TEMPLATE, max_position_embeddings=1024))


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_soak(script: dict[str, Any], directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [directory, "--requests", "60", "--users", "8", "--max-tokens", "24"]
    status = script["main"](argv)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status, said["ok"]) == (0, True), said["problems"]
    assert (said["completed"], said["aborted"], said["malformed"]) == (51, 6, 3)
    assert said["before"]["free_slots"] == 8


def test_a_text_that_differs_is_found(
    script: dict[str, Any], directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    real = script["alone"]

    def otherwise(llm: Any, plan: Any) -> Any:
        return real(llm, replace(plan, body={**plan.body, "max_tokens": 1}))

    script["main"].__globals__["alone"] = otherwise
    argv = [directory, "--requests", "10", "--users", "2", "--max-tokens", "9"]
    assert script["main"](argv) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not said["ok"] and said["differing"]
    assert any("differ from their solo runs" in p for p in said["problems"])


def test_what_is_a_problem(script: dict[str, Any]) -> None:
    state = script["State"](8, 0, 3, 3, 10, 100.0)
    good = script["Findings"](before=state, after=replace(state, memory_mib=150.0))
    assert good.problems(64) == []
    for change, word in [
        ({"after": None}, "did not come to an end"),
        ({"unexpected": ["status 500"]}, "status 500"),
        ({"slowest_health": 0.5}, "/health took 0.50 s"),
        *(({"after": replace(state, **{n: 99})}, f"{n} was") for n in
          ("free_slots", "in_flight", "tasks", "threads", "files")),
        ({"after": replace(state, free_slots=7)}, "free_slots was 8 and is 7"),
        ({"after": replace(state, memory_mib=165.0)}, "memory grew by 65 MiB"),
    ]:  # fmt: skip
        (problem,) = replace(good, **change).problems(64)
        assert word in problem
