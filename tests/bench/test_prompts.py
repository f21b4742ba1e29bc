"""Prompt sets: the built-in ones, files, and what is said about a bad line."""

import hashlib
from pathlib import Path

import pytest

from dspark.bench.prompts import BUILTIN, load_prompts
from dspark.errors import ConfigError


@pytest.mark.parametrize("kind", BUILTIN)
def test_builtin_prompts_are_many_and_different(kind: str) -> None:
    found = load_prompts([f"builtin:{kind}"])
    assert found.name == f"builtin:{kind}"
    assert len(found) >= 12
    assert len(set(found.prompts)) == len(found)


def test_summaries_have_long_inputs() -> None:
    for prompt in load_prompts(["builtin:summarise"]).prompts:
        assert 300 <= len(prompt.split()) <= 700


def test_file_with_turns_prompts_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"turns": ["one", "two"], "id": 7}\n\n{"prompt": "zwölf\u2028x"}\r\n', encoding="utf-8"
    )
    found = load_prompts([str(file)])
    assert found.prompts == ("one", "zwölf\u2028x")
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_limit_holds_for_each_source() -> None:
    found = load_prompts(["builtin:chat", "builtin:math"], limit=2)
    assert found.name == "builtin:chat+builtin:math"
    chat, math = (load_prompts([f"builtin:{kind}"]).prompts for kind in ("chat", "math"))
    assert found.prompts == chat[:2] + math[:2]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        '{"question": "x"}',
        '{"turns": []}',
        '{"turns": "x"}',
        '{"turns": [1]}',
        '{"prompt": 3}',
        '{"prompt": " "}',
    ],
)
def test_bad_line_names_file_and_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2: "):
        load_prompts([str(file)])


def test_bad_bytes_name_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 1: "):
        load_prompts([str(file)])


def test_empty_missing_and_unknown(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_prompts([str(empty)])
    with pytest.raises(ConfigError, match="builtin:chat, builtin:code"):
        load_prompts(["builtin:poems"])
    with pytest.raises(ConfigError, match="did you mean builtin:chat"):
        load_prompts(["chat"])
    with pytest.raises(ConfigError, match="no prompts asked for"):
        load_prompts([])
    with pytest.raises(ConfigError, match="limit=0"):
        load_prompts(["builtin:chat"], limit=0)
