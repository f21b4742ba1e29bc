"""Small JSON files that survive a crash: what was measured or fitted is kept here.

Written at once or not at all: a new file beside the old one, flushed to the disk, then renamed over
it. A reader sees the old content or the new one, never half of either. Reading promises an object
at the top or a CheckpointError; what is in it the caller must check.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from dspark.errors import CheckpointError


def cache_dir() -> Path:
    """Where `dspark` keeps what it can make again: `$XDG_CACHE_HOME/dspark` or `~/.cache/dspark`;
    the folder of the compiled kernels, too."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark"


def canonical(value: Any) -> str:
    """One spelling of a JSON value, whatever the order of its keys: what digests are made of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    return sha256(canonical(value).encode()).hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` by `content`. Raises CheckpointError if the disk does not take it."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {e}") from e


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError if there is none or it is damaged."""
    try:
        content = json.loads(path.read_text())
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    except ValueError as e:  # JSON and UTF-8 alike
        raise CheckpointError(f"{path} is damaged ({e}): delete it to make it again") from e
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged (not an object): delete it to make it again")
    return content
