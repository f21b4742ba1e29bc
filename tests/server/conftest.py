"""A tiny model served once for all tests, and the same model again for what the library says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark.llm import LLM
from tests.server.served import (
    TOOL_TEMPLATE,
    Running,
    serving,
    tiny_directory,
    tiny_llm,
    v4_tokenizer,
)


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


@pytest.fixture(scope="session", params=["v4", "template"])
def tooled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, LLM]]:
    """A running server and the library, with a model that knows tools, in two ways."""

    def load(path: Path) -> LLM:
        llm = tiny_llm(
            tiny_directory(path, TOOL_TEMPLATE, max_position_embeddings=2560), max_context=2560
        )
        if request.param == "v4":
            llm.tokenizer = v4_tokenizer()
        return llm

    library = load(tmp_path_factory.mktemp("library") / "model")
    path = tmp_path_factory.mktemp("tools") / "model"
    with serving(lambda: load(path)) as running:
        yield running, library
        running.idle()
