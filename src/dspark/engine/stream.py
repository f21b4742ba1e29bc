"""From token ids to text that may be shown: incremental UTF-8 and stop strings.

A token is a run of bytes, not of characters: an emoji may take four tokens. And a stop string may
begin in one token and end in another, or in the next block. So bytes are decoded incrementally,
and text whose tail could still become a stop string is held back until it is decided. What was
released is never taken back; text before a stop string is complete, the stop string itself and
what follows never appear. Where stop strings overlap, the one that is complete first counts, the
longest of those that end together: so the text does not depend on how it was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TextStream:
    """The text of one request, token by token."""

    def __init__(self, token_bytes: Callable[[int], bytes], stop: tuple[str, ...]) -> None:
        """`token_bytes` maps an id to its bytes; special tokens to none."""
        self._token_bytes = token_bytes
        self._stop = stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._released: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._released)

    def push(self, token: int) -> str:
        """The text that became certain with `token`; sets `stopped` at a stop string."""
        return self._decide(self._utf8.decode(self._token_bytes(token)), final=False)

    def finish(self) -> str:
        """The text still held when the request ends for another reason than a stop string."""
        return self._decide(self._utf8.decode(b"", True), final=True)

    def _decide(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        hits = [(at + len(s), at) for s in self._stop if (at := held.find(s)) >= 0]
        if hits:
            self.stopped = True
            out, self._held = held[: min(hits)[1]], ""
        else:
            keep = 0 if final else self._undecided(held)
            out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        if out:
            self._released.append(out)
        return out

    def _undecided(self, held: str) -> int:
        """Length of the longest tail of `held` that is a proper beginning of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(held)), 0, -1):
            if any(len(s) > n and s.startswith(held[-n:]) for s in self._stop):
                return n
        return 0
