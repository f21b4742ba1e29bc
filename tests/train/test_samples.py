"""Training text becomes ids as serving makes them, or is refused with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import ConfigError
from dspark.tokenizer import Tokenizer
from dspark.train.samples import encode, load_samples, messages_of, read_rows
from tests.test_tokenizer import directory

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
ROW = {"prompt": "hi", "answer": "abc", "temperature": 0.7, "finish_reason": "stop"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory(tmp_path, chat_template=TEMPLATE))


def write(path: Path, *rows: Any) -> Path:
    text = "".join(json.dumps(r) + "\n" for r in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_a_row_is_the_served_prompt_the_answer_and_the_end(tokenizer: Tokenizer) -> None:
    s = encode(ROW, tokenizer, 100)
    assert s is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert list(s.tokens[: s.start]) == prompt and s.temperature == 0.7
    assert list(s.tokens[s.start :]) == [*tokenizer.encode("abc"), tokenizer.eos_ids[0]]


def test_a_text_that_was_cut_off_has_no_end(tokenizer: Tokenizer) -> None:
    s = encode({**ROW, "finish_reason": "length"}, tokenizer, 100)
    assert s is not None and s.tokens[-1] == tokenizer.encode("abc")[-1]


def test_max_tokens_cuts_and_drops(tokenizer: Tokenizer) -> None:
    whole = encode(ROW, tokenizer, 100)
    assert whole is not None
    for limit in range(1, len(whole.tokens) + 2):
        s = encode(ROW, tokenizer, limit)
        if limit <= whole.start:
            assert s is None
        else:
            assert s is not None and s.tokens == whole.tokens[:limit]


def test_messages_and_system() -> None:
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages_of({"messages": long, "answer": ""}) == long
    both = messages_of({"prompt": "p", "system": "s"})
    assert [m["role"] for m in both] == ["system", "user"] and both[0]["content"] == "s"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_files_plain_and_compressed(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    file = write(tmp_path / name, ROW, {**ROW, "answer": "de"})
    found = load_samples([file, file], tokenizer, 100)
    assert [len(s.tokens) - s.start for s in found] == [4, 3, 4, 3]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "x"}, "2: expected an object with a text `answer`"),
        ({"answer": "x"}, "2: expected a text `prompt`"),
        ([1], "2: expected an object"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, words: str) -> None:
    file = write(tmp_path / "a.jsonl", ROW, row)
    with pytest.raises(ConfigError, match=words):
        list(read_rows([file]))


def test_bad_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="cannot read training text"):
        list(read_rows([tmp_path / "none.jsonl"]))
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"prompt": "a", "answer": "b"}\n' * 50)[:-12])
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz"):
        list(read_rows([broken]))
    (tmp_path / "c.jsonl").write_text("{not json}\n")
    with pytest.raises(ConfigError, match=r"c\.jsonl:1 is not JSON"):
        list(read_rows([tmp_path / "c.jsonl"]))
    with pytest.raises(ConfigError, match="no training sample in"):
        load_samples([write(tmp_path / "d.jsonl", ROW)], tokenizer, 2)
