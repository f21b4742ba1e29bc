"""How an answer looks on the wire: chat and text completions, whole and streamed.

Both kinds have the same life (choices that grow and end), so `Chat` and `Completion` differ in how
they write one choice and one delta, and nothing else. A stream's deltas are what the engine
released: whole characters, never the beginning of a stop string; joined they are the text of the
whole answer.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

from dspark.server.worker import Done, Tokens
from dspark.tokenizer import Tokenizer
from dspark.types import Chunk, TokenLogprob

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""


class Reply(ABC):
    """One response; `name` is its id."""

    object_whole: ClassVar[str]
    object_chunk: ClassVar[str]

    def __init__(
        self,
        name: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        usage: bool,
        rounds: bool = False,
    ) -> None:
        self._head = {"id": name, "created": int(time.time()), "model": model}
        self._tokenizer, self._logprobs, self._wants_usage = tokenizer, logprobs, usage
        self._wants_rounds = rounds
        self._done: dict[int, Done] = {}
        self._started: set[int] = set()

    # -- whole -----------------------------------------------------------------------------------

    def whole(self, done: Sequence[Done], choices: int) -> dict[str, Any]:
        """The body of a response; `choices` texts belong to each prompt."""
        written = [
            self._choice(i, d.output.text, self._entries(i, d.output.logprobs))
            | {"finish_reason": d.output.finish_reason}
            for i, d in enumerate(done)
        ]
        return {
            **self._head,
            "object": self.object_whole,
            "choices": written,
            "usage": usage(done, choices),
            "metrics": done[0].metrics if len(done) == 1 else None,
        }

    # -- streamed --------------------------------------------------------------------------------

    def chunks(self, index: int, event: Tokens | Done) -> list[dict[str, Any]]:
        """The data of the messages that follow from an event."""
        if isinstance(event, Done):
            self._done[index] = event
            reason = event.output.finish_reason
            return [self._chunk([self._last(index) | {"finish_reason": reason}])]
        out = []
        if index not in self._started:
            self._started.add(index)
            out += [self._chunk([c]) for c in self._first(index)]
        text = "".join(c.text for c in event.chunks)
        entries = self._entries(index, _logprobs(event.chunks))
        if text or entries is not None or self._wants_rounds:
            chunk = self._chunk([self._delta(index, text, entries) | {"finish_reason": None}])
            out.append(chunk | (self._rounds(event) if self._wants_rounds else {}))
        return out

    def _rounds(self, event: Tokens) -> dict[str, Any]:
        """Which tokens the delta is made of, and the round they come from. The texts of `tokens`
        joined are the delta; those of `draft` are the guesses as they stood."""
        tokens = [{"id": c.token, "text": c.text, "drafted": c.drafted} for c in event.chunks]
        r = event.round
        found = None if r is None else {
            "index": r.index,
            "draft": [self._text_of(t)[0] for t in r.drafted],
            "verified": r.verified,
            "accepted": r.accepted,
            "draft_ms": r.draft_ms,
            "verify_ms": r.verify_ms,
            "other_ms": r.other_ms,
        }  # fmt: skip
        return {"dspark": {"tokens": tokens, "round": found}}

    def end(self, choices: int) -> list[dict[str, Any]]:
        """The message with the usage, if it was asked for."""
        if not self._wants_usage:
            return []
        done = [self._done[i] for i in sorted(self._done)]
        metrics = done[0].metrics if len(done) == 1 else None
        return [self._chunk([]) | {"usage": usage(done, choices), "metrics": metrics}]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.object_chunk, "choices": choices}
        return chunk | ({"usage": None} if self._wants_usage else {})

    # -- what the two kinds differ in --------------------------------------------------------------

    @abstractmethod
    def _choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _first(self, index: int) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _last(self, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def _entries(self, index: int, found: Sequence[TokenLogprob] | None) -> Any: ...

    def _text_of(self, token: int) -> tuple[str, bytes]:
        """A token for a reader; half a character shows as a replacement, a special token's name."""
        raw = self._tokenizer.id_to_bytes(token)
        if not raw:
            name = self._tokenizer.decode([token], skip_special=False)
            return name, name.encode("utf-8", "replace")
        return raw.decode("utf-8", "replace"), raw


class Chat(Reply):
    """/v1/chat/completions"""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def _choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs}

    def _first(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs}

    def _last(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None}

    def _entries(self, index: int, found: Sequence[TokenLogprob] | None) -> Any:
        if not self._logprobs or not found:
            return None
        content = [
            self._entry(e.token, e.logprob)
            | {"top_logprobs": [self._entry(t, value) for t, value in e.top]}
            for e in found
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._text_of(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


class Completion(Reply):
    """/v1/completions"""

    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._offsets: dict[int, int] = defaultdict(int)

    def _choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs}

    def _first(self, index: int) -> list[dict[str, Any]]:
        return []

    def _delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return self._choice(index, text, logprobs)

    def _last(self, index: int) -> dict[str, Any]:
        return self._choice(index, "", None)

    def _name(self, token: int) -> str:
        """Half a character by its bytes, as OpenAI does: names are keys here and must differ."""
        text, raw = self._text_of(token)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def _entries(self, index: int, found: Sequence[TokenLogprob] | None) -> Any:
        if not self._logprobs or not found:
            return None
        texts = [self._text_of(e.token)[0] for e in found]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": [self._name(e.token) for e in found],
            "token_logprobs": [finite(e.logprob) for e in found],
            "top_logprobs": [{self._name(t): finite(v) for t, v in e.top} for e in found],
            "text_offset": offsets,
        }


def usage(done: Sequence[Done], choices: int) -> dict[str, Any]:
    """Token counts: a prompt counts once, however many texts were asked for behind it."""
    prompt = sum(len(d.output.prompt_ids) for d in done[::choices])
    cached = sum(d.output.stats.cached_tokens for d in done[::choices])
    completion = sum(len(d.output.token_ids) for d in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _logprobs(chunks: Sequence[Chunk]) -> list[TokenLogprob]:
    return [c.logprob for c in chunks if c.logprob is not None]
