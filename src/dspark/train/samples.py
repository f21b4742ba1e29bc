"""Training text: what the target itself wrote, one sample a line of a JSON Lines file.

    {"prompt": "...", "answer": "...", "temperature": 0.7, "finish_reason": "stop", "tokens": 211}

A sample becomes token ids through the serving chat template, so that its prefix is, token by token,
the prompt that the target sees when it serves; `answer` follows, and the end-of-text token behind
it if the target had ended there. Files may be compressed (`.gz`). A row may carry `messages`
instead of `prompt` for a longer conversation, or a `system` text.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError
from dspark.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One conversation as ids; `tokens[start:]` is what the target wrote, at `temperature`."""

    tokens: tuple[int, ...]
    start: int
    temperature: float = 1.0


def read_rows(files: Iterable[Path | str]) -> Iterator[dict[str, Any]]:
    """Every row of JSON Lines files, in order. Raises ConfigError with the file and the line."""
    for name in files:
        path = Path(name)
        try:
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _row(line, f"{path}:{number}")
        except (OSError, EOFError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read training text {path}: {e}") from e


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"{where} is not JSON: {e}") from e
    if not isinstance(row, dict) or not isinstance(row.get("answer"), str):
        raise ConfigError(f"{where}: expected an object with a text `answer`")
    if not isinstance(row.get("prompt"), str) and not isinstance(row.get("messages"), list):
        raise ConfigError(f"{where}: expected a text `prompt` or a list `messages`")
    return row


def messages_of(row: dict[str, Any]) -> list[dict[str, str]]:
    """The conversation in front of the answer."""
    if isinstance(row.get("messages"), list):
        return [dict(m) for m in row["messages"]]
    system = row.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) else []
    return [*first, {"role": "user", "content": row["prompt"]}]


def encode(row: dict[str, Any], tokenizer: Tokenizer, max_tokens: int) -> Sample | None:
    """The ids of one row, cut at `max_tokens`; None if no answer token is left."""
    prompt = tokenizer.encode_chat(messages_of(row))
    answer = tokenizer.encode(row["answer"])
    if row.get("finish_reason", "stop") == "stop" and tokenizer.eos_ids:
        answer.append(tokenizer.eos_ids[0])
    tokens = (*prompt, *answer)[:max_tokens]
    if len(tokens) <= len(prompt):
        return None
    return Sample(tokens, len(prompt), float(row.get("temperature", 1.0)))


def load_samples(
    files: Sequence[Path | str], tokenizer: Tokenizer, max_tokens: int
) -> list[Sample]:
    """All samples of some files. Raises ConfigError if there is none."""
    samples = [encode(row, tokenizer, max_tokens) for row in read_rows(files)]
    kept = [s for s in samples if s is not None]
    if not kept:
        raise ConfigError(f"no training sample in {', '.join(map(str, files)) or 'no files'}")
    return kept
