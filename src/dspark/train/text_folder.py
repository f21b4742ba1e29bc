"""The folder of a training text: rows that are appended, cut, sorted, and never half there.

    DIR/text.jsonl      the rows, in the order of finishing until the text is complete, then sorted
    DIR/prompts.jsonl   all that the target wrote as prompts, also what was dropped, in that order
    DIR/meta.json       options and counts

A row is flushed as it is added: a killed process loses what it had not finished, and the half line
it may leave is cut off when the folder is opened again. Whole files are replaced at once. Not
promised: that the last rows outlive a power failure.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dspark.errors import ConfigError, ResourceError

ROWS, PROMPTS, META = "text.jsonl", "prompts.jsonl", "meta.json"


class Folder:
    """DIR, open for one writer: what it holds, and how it grows.

    Lines are flushed one by one; a half-written last line is cut off when the folder is opened.
    """

    def __init__(self, path: Path, options: Mapping[str, Any], tokens: int) -> None:
        """Begin or continue. Raises ConfigError if it was begun with other options, if another run
        writes to it, or if it cannot be written."""
        self.path, self._options, self._goal = path, dict(options), tokens
        self.done: dict[int, int] = {}
        """Tokens by index of the rows that are there."""
        self.tokens = 0
        """Their sum."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise ConfigError(f"cannot write to {path}: {e.strerror}") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check()
            self.prompts = [
                (r["candidate"], r["prompt"], r["ended"])
                for r in _lines(path / PROMPTS, candidate=int, prompt=str, ended=bool)
            ]
            """(candidate, text, whether the target ended it) of prompts that it wrote."""
            self._count(_lines(path / ROWS, index=int, tokens=int))
            self.write_meta(complete=False)  # first: rows without it could not be continued
            self._rows = (path / ROWS).open("a", encoding="utf-8")
            self._prompts = (path / PROMPTS).open("a", encoding="utf-8")
        except BlockingIOError as e:
            os.close(self._lock)
            raise ConfigError(f"another run is writing to {path}: wait, or choose another") from e
        except OSError as e:
            os.close(self._lock)
            raise ConfigError(f"cannot write to {path}: {e.strerror}") from e
        except BaseException:
            os.close(self._lock)
            raise

    def _count(self, rows: list[dict[str, Any]]) -> None:
        self.done = {r["index"]: r["tokens"] for r in rows}
        self.tokens = sum(self.done.values())

    def _check(self) -> None:
        """Refuse to go on with what was begun differently."""
        meta = self.path / META
        if not meta.exists():
            if (self.path / ROWS).exists():
                raise ConfigError(f"{self.path} holds {ROWS} but no {META}: choose another folder")
            return
        try:
            begun = json.loads(meta.read_text(encoding="utf-8"))
            options, tokens = begun["options"], begun["tokens_asked"]
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"{meta} is damaged: choose another folder") from e
        for key in {**options, **self._options}:
            old, new = options.get(key), self._options.get(key)
            if old != new:
                raise ConfigError(
                    f"{self.path} was begun with {key}={old} and is now asked for {new}: give the"
                    " same options, or another folder"
                )
        if tokens > self._goal:
            raise ConfigError(
                f"{self.path} was begun for {tokens} tokens and is now asked for {self._goal}:"
                " the number may be raised, not lowered"
            )

    def add_prompt(self, candidate: int, prompt: str, ended: bool) -> None:
        row = {"candidate": candidate, "prompt": prompt, "ended": ended}
        _write_line(self._prompts, row)

    def add_row(self, row: dict[str, Any]) -> None:
        _write_line(self._rows, row)
        self.done[row["index"]] = row["tokens"]
        self.tokens += row["tokens"]

    def finish(self, rows: int, complete: bool) -> None:
        """Sort the rows and keep the first `rows` indices, at once or not at all."""
        found = _lines(self.path / ROWS, index=int, tokens=int)
        kept = sorted((r for r in found if r["index"] < rows), key=lambda r: int(r["index"]))
        _replace(self.path / ROWS, "".join(map(_line, kept)))
        self._count(kept)
        self.write_meta(complete)

    def write_meta(self, complete: bool) -> None:
        meta = {
            "options": self._options,
            "tokens_asked": self._goal,
            "complete": complete,
            "rows": len(self.done),
            "tokens": self.tokens,
        }
        _replace(self.path / META, json.dumps(meta, indent=1, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._rows.close()
        self._prompts.close()
        os.close(self._lock)  # and so the lock


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _write_line(file: TextIO, row: Mapping[str, Any]) -> None:
    try:
        file.write(_line(row))
        file.flush()
    except OSError as e:
        raise ResourceError(f"cannot write {file.name}: {e.strerror}") from e


def _lines(path: Path, **needed: type) -> list[dict[str, Any]]:
    """The rows of a file, whose half-written last line is cut off, with the keys `needed`."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(path, whole)
    rows = []
    for number, line in enumerate(raw[:whole].split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{path}:{number} is damaged: {e}") from e
        for key, kind in needed.items():
            if not isinstance(row, dict) or not isinstance(row.get(key), kind):
                raise ConfigError(f"{path}:{number} is damaged: it has no {key}")
        rows.append(row)
    return rows


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)  # os.replace: at once, or not at all
    except OSError as e:
        raise ResourceError(f"cannot write {path}: {e.strerror}") from e
    finally:
        temporary.unlink(missing_ok=True)
