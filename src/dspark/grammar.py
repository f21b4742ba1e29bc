"""Texts that must be JSON, or calls of tools: from a schema to the tokens that may come next.

`llguidance` reads a schema, or a grammar with schemas in it (`tool_calls.py`), and follows the
text; what it says is a mask over the vocabulary, which `sampling.process_logits` applies to the
target's logits at every row of a block, each with the tokens before it. So speculation stays exact:
the law that drafts are judged by is the masked one, a draft that breaks the grammar has probability
zero there and is rejected, and the token that takes its place is drawn from the masked law, too.
Drafters know nothing of it.

A grammar is a function of the text alone. Matchers, which have a state, are kept beside it for
speed: the one that has read the longest part of a text reads on from there, and takes back what it
read of a draft. One grammar may serve any number of texts, in one thread.

Space between the parts of JSON is limited to SPACES, because small models like to go on with it.
What the library does not support of JSON Schema it refuses by name. A grammar says when a text may
end, not that it will: a text that reaches its token limit first is cut off.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.errors import InvalidRequestError, ResourceError
from dspark.tokenizer import Tokenizer
from dspark.tool_calls import SPACES

log = logging.getLogger(__name__)
MATCHERS = 64
"""Matchers kept for one grammar: texts in progress, more only cost time."""


class _Words:
    """The vocabulary as the library asks for it: each token is the bytes that it adds to a text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], tokenizer.bos_id
        pieces = [tokenizer.id_to_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [i for i, piece in enumerate(pieces) if not piece]
        self.tokens = [piece or f"<|{i}|>".encode() for i, piece in enumerate(pieces)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


class Grammars:
    """Makes grammars over one vocabulary, which it reads once: a second for a large one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises ResourceError without the library, InvalidRequestError for a model whose texts
        have no end."""
        try:
            import llguidance
        except ImportError as e:
            raise ResourceError(
                "llguidance is missing, which structured output needs: pip install 'dspark[serve]'"
            ) from e
        if not tokenizer.eos_ids:
            raise InvalidRequestError("structured output needs a model with an end-of-text token")
        self._matcher = llguidance.LLMatcher
        self._size, self._eos = vocab_size, tokenizer.eos_ids
        self._words = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Words(tokenizer, vocab_size)),
            n_vocab=vocab_size,
            eos_token=list(tokenizer.eos_ids),
        )

    def json_schema(self, schema: Mapping[str, Any]) -> TextGrammar:
        """Raises InvalidRequestError for a schema that is damaged or not supported."""
        try:
            text = self._matcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_pattern": SPACES}
            )
        except (ValueError, TypeError, RecursionError) as e:
            raise _unusable(e) from e
        return self.lark(text)

    def lark(self, text: str) -> TextGrammar:
        """From Lark's notation, with JSON schemas in it. Raises InvalidRequestError if it cannot be
        used."""
        try:
            problem = self._matcher.validate_grammar(text, self._words)
        except ValueError as e:
            raise _unusable(e) from e
        if problem and not problem.startswith("WARNING"):
            raise _unusable(problem)
        return TextGrammar(lambda: self._matcher(self._words, text), self._size, self._eos)


def _unusable(problem: object) -> InvalidRequestError:
    first = " ".join(str(problem).split())[:300]
    return InvalidRequestError(f"the JSON schema cannot be used: {first}")


@dataclass
class _Reader:
    """A matcher and the text it has read."""

    matcher: Any
    text: list[int] = field(default_factory=list)


class TextGrammar:
    """Fulfils `types.Grammar`."""

    def __init__(self, start: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`start` makes a matcher at the beginning."""
        self._start, self._size, self._eos = start, vocab_size, list(eos_ids)
        self._readers: list[_Reader] = []
        """Least recently used first."""

    def allowed(self, text: Sequence[int], draft: Sequence[int]) -> Tensor:
        """See `types.Grammar.allowed`."""
        matcher = self._read(list(text)).matcher
        rows = torch.ones(len(draft) + 1, self._size, dtype=torch.bool)
        taken = 0
        for row, token in zip(rows, [*draft, -1], strict=True):
            self._fill(row, matcher)
            if token < 0 or token in self._eos or not row[token]:
                break
            matcher.consume_token(token)
            taken += 1
        matcher.rollback(taken)
        return rows

    def _read(self, text: list[int]) -> _Reader:
        """The reader of `text`: the one that has read the longest part of it, now all."""
        fits = [r for r in self._readers if text[: len(r.text)] == r.text]
        reader = max(fits, key=lambda r: len(r.text), default=None)
        if reader is None:
            reader = _Reader(self._start())
        else:
            self._readers.remove(reader)
        reader.matcher.consume_tokens(text[len(reader.text) :])
        reader.text = text
        self._readers = [*self._readers[-MATCHERS + 1 :], reader]
        return reader

    def _fill(self, row: Tensor, matcher: Any) -> None:
        """What may come next; where the matcher has given up, only the end."""
        if not matcher.is_error():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, count=self._size, bitorder="little").astype(np.bool_)
            if found.any():
                row.copy_(torch.from_numpy(found))
                return
        log.warning(
            "the grammar ends a text early: %s", matcher.get_error() or "nothing may follow"
        )
        row.fill_(False)
        row[self._eos] = True
