"""How an answer looks on the wire: chat and text completions, whole and streamed.

Both kinds have the same life (choices that grow and end), so `Chat` and `Completion` differ in how
they write one choice and one delta, and nothing else. A stream's deltas are what the engine
released: whole characters, never the beginning of a stop string; joined they are the text of the
whole answer. A chat's text is read on the way (`answers.py`): reasoning and calls of tools leave it
for fields of their own, the same whole and streamed. A call's name comes with the beginning of its
arguments, and these as they are written.
"""

from __future__ import annotations

import math
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

from dspark.answers import Answer, Call, Reader
from dspark.server.turns import Turn
from dspark.server.worker import Done, Tokens
from dspark.tokenizer import Tokenizer
from dspark.types import Chunk, Output, TokenLogprob

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
        counted: int | None = None,
    ) -> None:
        """counted: tokens of the prompts, if every message of a stream is to say how many it is."""
        self._head = {"id": name, "created": int(time.time()), "model": model}
        self._tokenizer, self._logprobs, self._wants_usage = tokenizer, logprobs, usage
        self._wants_rounds = rounds
        self._prompt_tokens, self._written = counted, 0
        self._done: dict[int, Done] = {}
        self._started: set[int] = set()

    # -- whole -----------------------------------------------------------------------------------

    def whole(self, done: Sequence[Done], choices: int) -> dict[str, Any]:
        """The body of a response; `choices` texts belong to each prompt."""
        written = [
            self._choice(i, d.output, self._entries(i, d.output.logprobs))
            for i, d in enumerate(done)
        ]
        return {
            **self._head,
            "object": self.object_whole,
            "choices": written,
            "usage": self._usage(done, choices),
            "metrics": done[0].metrics if len(done) == 1 else None,
        }

    # -- streamed --------------------------------------------------------------------------------

    def chunks(self, index: int, event: Tokens | Done) -> list[dict[str, Any]]:
        """The data of the messages that follow from an event."""
        if isinstance(event, Done):
            self._done[index] = event
            return [self._chunk([self._last(index, event.output)])]
        out = []
        self._written += len(event.chunks)
        if index not in self._started:
            self._started.add(index)
            out += [self._chunk([c]) for c in self._first(index)]
        parts = [self._read(index, c.text) for c in event.chunks]
        answer = sum(parts, Answer())
        entries = self._entries(index, _logprobs(event.chunks))
        if answer != Answer() or entries is not None or self._wants_rounds:
            chunk = self._chunk([self._delta(index, answer, entries)])
            out.append(chunk | (self._rounds(event, parts) if self._wants_rounds else {}))
        return out

    def _rounds(self, event: Tokens, parts: Sequence[Answer]) -> dict[str, Any]:
        """Which tokens the delta is made of, and the round they come from. The texts of `tokens`
        joined are the delta, and so is the reasoning in them; those of `draft` are the guesses as
        they stood. `lanes`, where there are two: what they did since the last delta."""
        tokens = [
            {"id": c.token, "text": p.content, "drafted": c.drafted}
            | ({"reasoning": p.reasoning} if p.reasoning else {})
            for c, p in zip(event.chunks, parts, strict=True)
        ]
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
        lanes = [
            {"kind": s.kind, "start_ms": s.start * 1e3, "end_ms": s.end * 1e3} for s in event.spans
        ]
        return {"dspark": {"tokens": tokens, "round": found} | ({"lanes": lanes} if lanes else {})}

    def end(self, choices: int) -> list[dict[str, Any]]:
        """The message with the usage, if it was asked for."""
        if not self._wants_usage:
            return []
        done = [self._done[i] for i in sorted(self._done)]
        metrics = done[0].metrics if len(done) == 1 else None
        return [self._chunk([]) | {"usage": self._usage(done, choices), "metrics": metrics}]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.object_chunk, "choices": choices}
        if not self._wants_usage:
            return chunk
        if self._prompt_tokens is None:
            return chunk | {"usage": None}
        return chunk | {"usage": _counts(self._prompt_tokens, self._written)}

    # -- what the two kinds differ in --------------------------------------------------------------

    @abstractmethod
    def _choice(self, index: int, output: Output, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _first(self, index: int) -> list[dict[str, Any]]: ...

    def _read(self, index: int, text: str) -> Answer:
        """What a piece of text is."""
        return Answer(content=text)

    @abstractmethod
    def _delta(self, index: int, answer: Answer, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _last(self, index: int, output: Output) -> dict[str, Any]: ...

    @abstractmethod
    def _entries(self, index: int, found: Sequence[TokenLogprob] | None) -> Any: ...

    def _usage(self, done: Sequence[Done], choices: int) -> dict[str, Any]:
        return usage(done, choices)

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

    def __init__(self, *args: Any, turn: Turn, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turn = turn
        self._readers: dict[int, Reader] = defaultdict(turn.reader)
        self._calls: dict[int, int] = defaultdict(int)
        """Calls made so far."""

    def _choice(self, index: int, output: Output, logprobs: Any) -> dict[str, Any]:
        reader = self._turn.reader()
        answer = reader.feed(output.text) + reader.finish()
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls and not answer.content:
            message["content"] = None
        if self._turn.thinking:
            message |= _reasoning(answer.reasoning)
        if answer.calls:
            message["tool_calls"] = [_call(c) for c in answer.calls]
        reason = _reason(output, bool(answer.calls))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _first(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _read(self, index: int, text: str) -> Answer:
        return self._readers[index].feed(text)

    def _delta(self, index: int, answer: Answer, logprobs: Any) -> dict[str, Any]:
        delta: dict[str, Any] = _reasoning(answer.reasoning) if answer.reasoning else {}
        if answer.content:
            delta["content"] = answer.content
        if answer.calls:
            delta["tool_calls"] = [self._piece(index, c) for c in answer.calls]
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _piece(self, index: int, call: Call) -> dict[str, Any]:
        """A call with the beginning of its arguments, or more of them."""
        self._calls[index] += bool(call.name)
        found = _call(call) if call.name else {"function": {"arguments": call.arguments}}
        return {"index": self._calls[index] - 1, **found}

    def _last(self, index: int, output: Output) -> dict[str, Any]:
        held = self._delta(index, self._readers[index].finish(), None)
        return held | {"finish_reason": _reason(output, self._calls[index] > 0)}

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

    def _usage(self, done: Sequence[Done], choices: int) -> dict[str, Any]:
        found = usage(done, choices)
        if self._turn.end_think:
            spent = sum(self._reasoning_tokens(d.output.token_ids) for d in done)
            found["completion_tokens_details"] = {"reasoning_tokens": spent}
        return found

    def _reasoning_tokens(self, ids: Sequence[int]) -> int:
        """How many tokens the reasoning took, with the mark at its end."""
        mark, tail = self._turn.end_think.encode(), b""
        for n, token in enumerate(ids, start=1):
            tail += self._tokenizer.id_to_bytes(token)
            if mark in tail:
                return n
            tail = tail[-len(mark) :]
        return len(ids)


class Completion(Reply):
    """/v1/completions"""

    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._offsets: dict[int, int] = defaultdict(int)

    def _choice(self, index: int, output: Output, logprobs: Any) -> dict[str, Any]:
        return _text(index, output.text, logprobs, output.finish_reason)

    def _first(self, index: int) -> list[dict[str, Any]]:
        return []

    def _delta(self, index: int, answer: Answer, logprobs: Any) -> dict[str, Any]:
        return _text(index, answer.content, logprobs, None)

    def _last(self, index: int, output: Output) -> dict[str, Any]:
        return _text(index, "", None, output.finish_reason)

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
    return _counts(prompt, completion) | {"prompt_tokens_details": {"cached_tokens": cached}}


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _text(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients look for: DeepSeek's, and the one of newer servers."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _reason(output: Output, called: bool) -> str:
    """Why a text ended; one that was cut off says so even if it holds calls."""
    return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _logprobs(chunks: Sequence[Chunk]) -> list[TokenLogprob]:
    return [c.logprob for c in chunks if c.logprob is not None]
