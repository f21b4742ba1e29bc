"""Compiling the kernels: once, wholly or not at all, and in one line when it fails."""

from __future__ import annotations

import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import ResourceError
from dspark.models.native import library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield tmp_path / "cache" / "dspark"
    library.load.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """A compiler that writes its `-o` file in a moment, whatever the source."""
    return script(
        tmp_path / "fakecc",
        'if [ "$1" = --version ]; then echo fake 1; exit; fi\n'
        'while [ $# -gt 1 ]; do if [ "$1" = -o ]; then echo built > "$2"; fi; shift; done\n',
    )


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.so"))


def test_the_second_load_does_not_compile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load(("-O0",)).dspark_linear
    (built,) = libraries(cache)
    assert [p.name for p in cache.iterdir()] == [built.name]
    before = built.stat().st_mtime_ns
    real, ran = subprocess.run, []

    def spy(command: list[str], **options: Any) -> Any:
        ran.append(command)
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", spy)
    library.load.cache_clear()
    assert library.load(("-O0",)).dspark_linear
    assert built.stat().st_mtime_ns == before and libraries(cache) == [built]
    assert [c[1:] for c in ran] == [["--version"]]


def test_other_flags_and_compilers_have_a_file_each(
    cache: Path, fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", fake)
    first = library._compiled(())
    assert library._compiled(()) == first
    assert library._compiled(("-O1",)) != first
    newer = Path(fake).read_text().replace("fake 1", "fake 2").removeprefix("#!/bin/sh\n")
    monkeypatch.setenv("CC", script(tmp_path / "newer", newer))
    assert library._compiled(()) != first
    assert len(libraries(cache)) == 3


@pytest.mark.parametrize("error", ["kernels.c:1: bad", ""])
def test_a_broken_compiler(
    error: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", f"echo '{error}' >&2\nexit 1\n"))
    with pytest.raises(ResourceError, match=error or "no message") as e:
        library.load()
    assert "take --dtype fp32 or bf16" in str(e.value) and "\n" not in str(e.value)
    assert list(cache.iterdir()) == []


def test_a_compiler_that_only_fails_to_link(
    cache: Path, fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = Path(fake).read_text().removeprefix("#!/bin/sh\n")
    failing = f'if [ "$1" = -shared ]; then echo half > "$4"; exit 1; fi\n{body}'
    monkeypatch.setenv("CC", script(tmp_path / "nolink", failing))
    with pytest.raises(ResourceError, match="failed on the int8 kernels"):
        library.load()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("path", ["/no/such/compiler", "nosuchcompiler"])
def test_no_compiler(path: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", path)
    with pytest.raises(ResourceError, match=rf"no C compiler found \({path}\)"):
        library.load()
    assert not cache.exists()


def test_no_compiler_on_the_path(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/no/such/directory")
    with pytest.raises(ResourceError, match=r"no C compiler found \(cc, gcc\)"):
        library.load()


def test_a_half_written_file_never_has_the_final_name(
    cache: Path, fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linker stops half-way until it is let go; meanwhile the name does not exist."""
    gate, reached = tmp_path / "gate", tmp_path / "reached"
    slow = (
        'if [ "$1" = --version ]; then echo slow; exit; fi\n'
        'if [ "$1" = -shared ]; then\n'
        f'  printf ha > "$4"; touch {reached}\n'
        f"  while [ ! -e {gate} ]; do sleep 0.02; done\n"
        '  printf lf >> "$4"; exit\n'
        "fi\n"
    )
    monkeypatch.setenv("CC", script(tmp_path / "slow", slow))
    done: list[Path] = []
    thread = threading.Thread(target=lambda: done.append(library._compiled(())), daemon=True)
    thread.start()
    try:
        for _ in range(1000):
            if reached.exists():
                break
            thread.join(0.02)
        assert reached.exists() and not done
        assert not list(cache.glob("*.so")), "the final name stands in the directory itself"
    finally:
        gate.touch()
        thread.join(20)
    (built,) = done
    assert built.parent == cache and built.read_text() == "half"
    assert list(cache.iterdir()) == [built]


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert library.cache_dir() == Path("/somewhere/dspark")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert library.cache_dir() == Path("/home/me/.cache/dspark")
