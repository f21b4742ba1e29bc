"""The command line with `FakeLLM` behind it."""

from __future__ import annotations

import sys
import types

import pytest

from tests.fake_llm import FakeLLM


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = types.ModuleType("dspark.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dspark.llm", module)
    monkeypatch.setattr(FakeLLM, "created", [], raising=False)
    for name in ("NO_COLOR", "FORCE_COLOR", "DSPARK_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return FakeLLM
