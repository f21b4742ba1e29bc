"""Rules of the tree that no type checker holds: who may import whom, sizes, docstrings.

The table is the drawing of the architecture: a package may import from what its line names and from
itself. A new package needs a new line, which is a decision and not an accident.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "dspark"
MODULES = {
    p.relative_to(SRC).with_suffix("").as_posix().replace("/", ".").removesuffix("__init__"): p
    for p in sorted(SRC.rglob("*.py"))
}
"""Dotted name below dspark -> file; packages end in a dot, dspark itself is empty."""

MAY_IMPORT: dict[str, str] = {
    # nouns and mathematics
    "errors": "",
    "client": "errors",
    "types": "errors",
    "sampling": "errors types",
    "verify": "errors types sampling",
    "answers": "errors",
    "tool_calls": "errors answers",
    "deepseek_v4_tools": "errors answers tool_calls",
    "deepseek_v4_chat": "errors answers deepseek_v4_tools",
    "chat_template": "errors",
    "tokenizer": "errors types answers chat_template tool_calls",
    "grammar": "errors tool_calls tokenizer",
    "schedule": "errors types",
    # machinery: models < drafters < engine < llm
    "models": "errors types deepseek_v4_chat tokenizer",
    "drafters": "errors types sampling models",
    "engine": "errors types sampling verify schedule models drafters",
    "llm": "errors types sampling tokenizer grammar schedule models drafters engine",
    # above the public face
    "train": "errors types sampling deepseek_v4_chat tokenizer schedule models drafters llm",
    "bench": "errors client types schedule llm",
    "interop": "errors types tokenizer models drafters llm",
    "server": "errors types answers tool_calls tokenizer grammar engine llm",
    "cli": "errors client types answers tokenizer schedule models drafters llm train bench interop"
    " server",
    "__main__": "cli",
    "": "errors types llm",
}
WITHOUT_TORCH = (
    "", "errors", "types", "client", "schedule.prefix", "schedule.cost", "bench.serve",
    "bench.serve_figures", "cli.main", "cli.ui",
)  # fmt: skip
"""Modules that must not cost the seconds of `import torch`."""
MAX_LINES = 400
README_LINES = 200


def top(module: str) -> str:
    """The line of the table that a module belongs to."""
    return module.split(".")[0]


def imports(source: str, *, run_time: bool = False) -> Iterator[str]:
    """Every dotted name that a source imports; with `run_time` not those for type checkers, and
    not those inside functions."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{a.name}" for a in node.names)
        elif not run_time:
            nodes += ast.iter_child_nodes(node)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


def own(names: Iterator[str]) -> set[str]:
    """The packages of dspark among dotted names: `dspark.engine.batch.Sequence` is `engine`."""
    found = {n.split(".")[1] for n in names if n.startswith("dspark.")}
    return {n if n in {top(m) for m in MODULES} else "" for n in found}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    package = top(module)
    assert package in MAY_IMPORT, f"{package} is new: give it a line in MAY_IMPORT"
    allowed = {package, "", *MAY_IMPORT[package].split()}
    used = own(imports(MODULES[module].read_text()))
    assert used <= allowed, f"{module} must not import {sorted(used - allowed)}"


def test_the_table_has_no_circles() -> None:
    """Read from the top, every line names only lines above it ("" and __main__ stand apart)."""
    seen: set[str] = set()
    for package, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= seen, package
        seen.add(package)


def test_nothing_imports_the_command_line() -> None:
    for package, allowed in MAY_IMPORT.items():
        assert "cli" not in allowed.split() or package == "__main__"


def test_training_and_benchmarks_use_the_engine_through_llm_only() -> None:
    for package in ("train", "bench"):
        allowed = MAY_IMPORT[package].split()
        assert "llm" in allowed and not {"engine", "verify", "server", "cli"} & set(allowed)


@pytest.mark.parametrize("module", [m for m in MODULES if m in WITHOUT_TORCH])
def test_light_modules_stay_light(module: str) -> None:
    names = {top(n) for n in imports(MODULES[module].read_text(), run_time=True)}
    assert not names & {"torch", "numpy", "transformers"}


@pytest.mark.parametrize("module", MODULES)
def test_transformers_stays_out_of_the_run_time(module: str) -> None:
    """It is the oracle of the tests; importing it costs seconds."""
    assert "transformers" not in {top(n) for n in imports(MODULES[module].read_text())}


@pytest.mark.parametrize("module", MODULES)
def test_files_are_short_and_say_what_they_are(module: str) -> None:
    source = MODULES[module].read_text()
    assert len(source.splitlines()) <= MAX_LINES
    assert not source.strip() or ast.get_docstring(ast.parse(source))


def test_other_sources_are_short() -> None:
    for path in SRC.rglob("*"):
        if path.suffix in {".c", ".h"}:
            assert len(path.read_text().splitlines()) <= MAX_LINES, path.name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < README_LINES


def test_the_rules_see_what_they_look_for() -> None:
    """The reader of imports on samples, so that none of the above passes for want of eyes."""
    source = (
        "from typing import TYPE_CHECKING\nimport dspark.engine.batch\n"
        "if TYPE_CHECKING:\n    from dspark.llm import LLM\n"
        "def f():\n    import torch\n    from dspark import cli, __version__\n"
        "class C:\n    from dspark.errors import DSparkError\n"
    )
    assert own(imports(source)) == {"engine", "llm", "cli", "", "errors"}
    assert own(imports(source, run_time=True)) == {"engine", "errors"}
    assert "torch" in imports(source) and "torch" not in imports(source, run_time=True)
    assert len(MODULES) > 20 and "engine.batch" in MODULES and "engine." in MODULES
