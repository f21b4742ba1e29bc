"""Stand-ins around the engine whose every move a test can choose (T2, T3, T4 of field-failures).

`OracleDrafter` (T2) believes in one continuation for each prompt and spoils it at a chosen place:
so a test decides how many drafts are accepted in every round of every request. `ScriptedTarget`
(T3) says a given text, `TableTarget` has a law that can be computed by hand (T5), `ByteTokenizer`
(T4) makes every byte a token. `Recorder` wraps a drafter and checks the contract of `observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.drafters.base import Committed, DraftContext, Drafter
from dspark.engine.engine import Engine
from dspark.models.target import Batch, Segment, Target, TargetOutput, pack
from dspark.sampling import draw
from dspark.types import Chunk, Draft, Output, Request, Round, SamplingParams

Ids = tuple[int, ...]
Pattern = Callable[[int, int], int]
"""(round, row) -> how many drafts are right; row is the number of the prompt in the oracle."""
PATTERNS: Mapping[str, Pattern] = {
    "none": lambda n, row: 0,
    "some": lambda n, row: (3 * n + 5 * row) % 7,
    "all": lambda n, row: 99,
}


class ByteTokenizer:
    """T4: ids 0..255 are bytes, what lies above is special and adds nothing to a text."""

    def __init__(self, eos_ids: Ids = ()) -> None:
        self.eos_ids = eos_ids

    def id_to_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class OracleDrafter(Drafter):
    """T2: proposes `block` tokens of a believed text, of which the token at `right` is spoilt.

    The tokens behind the spoilt one are those of the text again, as they are when a verifier is one
    row off. Behind the end of the believed text it proposes zeros. It ignores the room it is given.
    """

    def __init__(
        self,
        texts: Mapping[Ids, Sequence[int]],
        block: int,
        right: Pattern = PATTERNS["all"],
        vocab_size: int = 257,
    ) -> None:
        self._texts = {tuple(prompt): tuple(text) for prompt, text in texts.items()}
        self._rows = {prompt: row for row, prompt in enumerate(self._texts)}
        self._block, self._right, self._vocab_size = block, right, vocab_size
        self.cap = block
        self._prompts: dict[int, Ids] = {}
        self._rounds: dict[int, int] = {}
        self.asked: list[int] = []
        """`max_tokens` of every context it was asked about."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._propose(c) for c in contexts]

    def _propose(self, c: DraftContext) -> Draft:
        self.asked.append(c.max_tokens)
        if c.slot not in self._prompts:
            # The longest prompt that fits: one may begin like another.
            fits = [p for p in self._texts if tuple(c.tokens[: len(p)]) == p]
            self._prompts[c.slot] = max(fits, key=len)
        prompt = self._prompts[c.slot]
        done = len(c.tokens) - len(prompt)
        guess = [*self._texts[prompt][done : done + self._block]]
        guess += [0] * (self._block - len(guess))
        n = self._rounds[c.slot] = self._rounds.get(c.slot, -1) + 1
        spoilt = self._right(n, self._rows[prompt])
        if spoilt < len(guess):
            guess[spoilt] = (guess[spoilt] + 1) % self._vocab_size
        return Draft(tuple(guess[: c.length(self._block)]))

    def release(self, slot: int) -> None:
        self._prompts.pop(slot, None)
        self._rounds.pop(slot, None)


class SampledDrafter(Drafter):
    """Draws `block` tokens from a table: token t is followed by `drawn_V_V[t]`.

    It says that it drew from `said_V_V`, which is the same unless a test makes it lie.
    """

    def __init__(self, drawn_V_V: Tensor, block: int, said_V_V: Tensor | None = None) -> None:
        self._drawn = drawn_V_V
        self._said = drawn_V_V if said_V_V is None else said_V_V
        self._block = self.cap = block

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        out = []
        for c in contexts:
            walk = [c.tokens[-1]]
            for _ in range(min(c.length(self._block), c.max_tokens)):
                walk.append(draw(self._drawn[walk[-1]], c.rng.random()))
            out.append(Draft(tuple(walk[1:]), self._said[walk[:-1]]))
        return out


@dataclass
class Heard:
    """All that a drafter was told of one sequence: tokens by position, and their features."""

    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


class Recorder(Drafter):
    """Passes everything on to another drafter and checks what the engine promises to one.

    Committed rows come in order, without gap and without repetition (B27); the anchor that is asked
    about stands at the first position not yet committed (B39).
    """

    def __init__(self, inner: Drafter, feature_layers: tuple[int, ...] = ()) -> None:
        self._inner, self.feature_layers, self.cap = inner, feature_layers, inner.cap
        self._open: dict[int, Heard] = {}
        self.heard: list[Heard] = []
        """Of ended sequences, in the order in which they ended."""
        self.passes: list[list[Committed]] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        for c in contexts:
            assert c.max_tokens >= 1
            assert list(c.tokens[:-1]) == self._open[c.slot].tokens
        return self._inner.propose(contexts)

    def observe(self, committed: Sequence[Committed], features: Tensor | None) -> None:
        self.passes.append(list(committed))
        for c in committed:
            heard = self._open.setdefault(c.slot, Heard())
            assert c.start == len(heard.tokens)
            heard.tokens += c.tokens
            if features is not None:
                heard.features.append(features[c.first_row : c.first_row + len(c.tokens)].clone())
        self._inner.observe(committed, features)

    def release(self, slot: int) -> None:
        if slot in self._open:
            self.heard.append(self._open.pop(slot))
        self._inner.release(slot)

    def of(self, prompt: Ids) -> Heard:
        """What was heard of the request with this prompt."""
        (heard,) = [h for h in self.heard if tuple(h.tokens[: len(prompt)]) == prompt]
        return heard


class ScriptedTarget:
    """T3: behind a prompt of `prompt_len` tokens it says `text`, whatever it is fed.

    Logits are 10 at the scripted token, 5 at `second` (what remains when that is masked), else 0.
    Behind the end of the text it says `second`. Features are (position, token) once a layer.
    """

    def __init__(
        self,
        text: Sequence[int],
        prompt_len: int,
        *,
        second: int = ord("-"),
        vocab_size: int = 257,
        num_slots: int = 4,
        max_context: int = 256,
    ) -> None:
        self.vocab_size, self.num_slots, self.max_context = vocab_size, num_slots, max_context
        self.device = torch.device("cpu")
        self._text, self._prompt_len, self._second = tuple(text), prompt_len, second
        self.batches: list[Batch] = []

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        self.batches.append(batch)
        assert int(batch.positions.max()) < self.max_context
        logits_MV = torch.zeros(len(batch.logit_rows), self.vocab_size)
        logits_MV[:, self._second] = 5.0
        for row, position in zip(logits_MV, batch.positions[batch.logit_rows], strict=True):
            i = int(position) + 1 - self._prompt_len
            row[self._text[i] if i < len(self._text) else self._second] = 10.0
        pair = torch.stack([batch.positions, batch.tokens], dim=1).float()
        features = pair.repeat(1, len(feature_layers)) if feature_layers else None
        return TargetOutput(logits_MV, features)


class TableTarget:
    """A Markov chain (T5): the law behind a token depends on that token alone."""

    def __init__(self, logits_V_V: Tensor, num_slots: int = 64, max_context: int = 16) -> None:
        self.vocab_size, self.num_slots, self.max_context = len(logits_V_V), num_slots, max_context
        self.device = torch.device("cpu")
        self._logits = logits_V_V

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        return TargetOutput(self._logits[batch.tokens[batch.logit_rows]], None)


class Spy:
    """A target that keeps every batch it was given."""

    def __init__(self, inner: Target) -> None:
        self._inner = inner
        self.vocab_size, self.num_slots = inner.vocab_size, inner.num_slots
        self.max_context, self.device = inner.max_context, inner.device
        self.batches: list[Batch] = []

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        self.batches.append(batch)
        return self._inner.forward(batch, feature_layers)


@dataclass
class Played:
    """What came out of an engine: outputs, chunks and rounds by request id."""

    outputs: dict[str, Output]
    chunks: dict[str, list[Chunk]]
    rounds: dict[str, list[Round]]

    def ids(self, request_id: str) -> Ids:
        return self.outputs[request_id].token_ids

    def shares(self, request_id: str) -> list[tuple[Ids, int, int, Ids]]:
        """The rounds of a request without their times."""
        return [(r.drafted, r.verified, r.accepted, r.emitted) for r in self.rounds[request_id]]


def play(engine: Engine, requests: Iterable[Request], every: int = 0) -> Played:
    """Run requests to their ends; one enters each `every` steps, all at once without.

    Checks on the way what holds for every request: the chunks are the output.
    """
    waiting = list(requests)
    names = [r.id for r in waiting]
    played = Played({}, {n: [] for n in names}, {n: [] for n in names})
    engine.on_round = lambda r: played.rounds[r.request_id].append(r)
    steps = 0
    while waiting or engine.has_work:
        while waiting and steps >= every * (len(names) - len(waiting)):
            engine.submit(waiting.pop(0))
        for chunk in engine.step():
            played.chunks[chunk.request_id].append(chunk)
        steps += 1
    engine.on_round = None
    for name in names:
        output = engine.take_output(name)
        assert output is not None
        assert engine.take_output(name) is None
        check_chunks(output, played.chunks[name])
        played.outputs[name] = output
    return played


def check_chunks(output: Output, chunks: Sequence[Chunk]) -> None:
    """B20: a stream says token for token and letter for letter what the output says."""
    assert tuple(c.token for c in chunks) == output.token_ids
    assert "".join(c.text for c in chunks) == output.text
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == output.finish_reason


def request(prompt: Sequence[int], name: str = "r", **params: object) -> Request:
    """A request with sampling parameters by keyword."""
    return Request(name, tuple(prompt), SamplingParams(**params))  # type: ignore[arg-type]


def reference(target: Target, prompt: Sequence[int], n: int) -> Ids:
    """Plain greedy decoding without the engine: one token a pass, in the last slot."""
    ids = list(prompt)
    slot, start = target.num_slots - 1, 0
    for _ in range(n):
        segment = Segment(slot, start, tuple(ids[start:]), 1)
        start = len(ids)
        ids.append(int(target.forward(pack([segment])).logits[0].argmax()))
    return tuple(ids[len(prompt) :])
