"""A tiny model served once for all tests, and the same model again for what the library says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dspark.llm import LLM
from tests.server.served import Running, serving, tiny_directory, tiny_llm


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tiny_directory(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def shared(library: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tiny_directory(tmp_path_factory.mktemp("served") / "model")
    with serving(lambda: tiny_llm(directory), max_queue=64) as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The shared server; idle again when the test ends."""
    yield shared
    shared.idle()
