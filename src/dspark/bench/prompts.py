"""Prompts to measure with: four built-in kinds, or a file of your own.

How much a drafter helps depends on the text. A summary or a corrected copy repeats its input, and
prompt lookup guesses it well; a poem repeats nothing. A speed without its prompts therefore means
little, and every result carries their name and the SHA-256 of their bytes.

A file has one JSON object a line. `{"turns": ["first question", "follow-up"]}` is a conversation,
of which the benchmark asks the first turn; `{"prompt": "..."}` is the same with one turn. Other
keys are kept out of the way, so that files of common benchmarks load as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from dspark.llm import LLM

BUILTIN = ("chat", "code", "math", "summarise")
"""The kinds that ship with the package, written for it: `builtin:chat` and so on."""

PREFIX = "builtin:"


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one or more sources, as user messages."""

    name: str
    """The sources as they were asked for, joined by '+'."""
    sha256: str
    """Of the sources' bytes, one behind the other: `cat A B | sha256sum` gives the same."""
    prompts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(sources: Sequence[str], limit: int | None = None) -> PromptSet:
    """Read `builtin:KIND` or JSONL files, the first `limit` prompts of each."""
    if not sources:
        raise ConfigError(f"no prompts asked for: give a JSONL file or one of {_builtin_names()}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} leaves no prompts: expected 1 or more")
    digest = hashlib.sha256()
    prompts: list[str] = []
    for source in sources:
        raw = _read(source)
        digest.update(raw)
        prompts += _parse(source, raw)[:limit]
    return PromptSet("+".join(sources), digest.hexdigest(), tuple(prompts))


def encode(llm: LLM, prompts: PromptSet) -> list[tuple[int, ...]]:
    """Token ids of each prompt as one user turn. Raises InvalidRequestError if one is too long."""
    many = [llm.encode_prompt(p) for p in prompts.prompts]
    room = llm.target.max_context
    for number, ids in enumerate(many, start=1):
        if len(ids) >= room:
            raise InvalidRequestError(
                f"{prompts.name}: prompt {number} has {len(ids)} tokens and the context holds "
                f"{room}, one of them for the answer: shorten it or raise --max-context"
            )
    return many


def _builtin_names() -> str:
    return ", ".join(PREFIX + kind for kind in BUILTIN)


def _read(source: str) -> bytes:
    if source.startswith(PREFIX):
        kind = source.removeprefix(PREFIX)
        if kind not in BUILTIN:
            raise ConfigError(f"unknown prompts {source!r}: expected one of {_builtin_names()}")
        path = Path(__file__).parent / "prompts" / f"{kind}.jsonl"
    else:
        path = Path(source)
    try:
        return path.read_bytes()
    except OSError as error:
        hint = f"; did you mean {PREFIX}{source}?" if source in BUILTIN else ""
        raise ConfigError(f"cannot read the prompts {source}: {error.strerror}{hint}") from error


def _parse(source: str, raw: bytes) -> list[str]:
    prompts = []
    # split(b"\n"), not splitlines(): a JSON string may hold U+2028 and its like unescaped.
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            try:
                prompts.append(_first_turn(json.loads(line)))
            except ValueError as error:  # JSON and Unicode errors are ValueErrors, too
                raise ConfigError(f"{source}, line {number}: {error}") from error
    if not prompts:
        raise ConfigError(f"{source} holds no prompts: expected one JSON object a line")
    return prompts


def _first_turn(row: object) -> str:
    if not isinstance(row, dict) or not ({"turns", "prompt"} & row.keys()):
        raise ValueError('expected an object with "turns" (a list of strings) or "prompt"')
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise ValueError('"turns" must be a list of one or more strings, "prompt" a string')
    if not turns[0].strip():
        raise ValueError("the first turn is empty")
    return str(turns[0])
