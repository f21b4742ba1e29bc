"""What the target is asked: conversations from files, or user turns that it writes itself.

A drafter learns to guess how one target writes, so the questions need variety more than truth. A
chat model has seen many users and can go on in their place: the chat template is cut where the
user's words would stand, a few opening words follow ("How do I", "Write a Python function", ""),
and the model continues until it ends the turn. The openings steer what a model alone would seldom
ask for. Turns that are cut off, empty, too short or long, repetitive, full of signs or said before
are dropped.

Everything depends on the seed and the number of the candidate only, and candidates are judged in
order of their numbers: the same stream of prompts comes out whatever the batch, and after a stop.

Not promised: that a prompt makes sense (a small model's turns often make little), or that its
topics are those of your users. Take prompts from files where you have them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError, InvalidRequestError
from dspark.tokenizer import Tokenizer

OPENINGS: Mapping[str, str] = {
    "free": "|||||||I|I'm|My|The|A|In|We|There is|Hi|Hello,|Please|Can you|Could you|I want to|"
    "I need|I have a|Imagine|Let's|Suppose|As a|You are|Is it true that|Tell me|Help me",
    "questions": "What is|What are|What does|What was|What would happen if|What should I|Why do|"
    "Why is|Why did|How do I|How does|How can I|How many|How long|How would you|When did|When was|"
    "Where is|Where can I|Who was|Who wrote|Which|Should I|Is there|Are there|Does|Did|Can I",
    "explain": "Explain|Explain in simple terms|Describe|Define|Compare|Discuss|Tell me about|"
    "What is the difference between|Give an example of|Analyze|Outline|Teach me",
    "code": "Write a Python function|Write a function that|Write a program|Write a SQL query|"
    "Write a JavaScript|Write a regular expression|Implement|Fix this code:\n|Debug|"
    "Explain this code:\n|What does this code do?\n|Write a shell script|Write a class|"
    "How do I use|Convert this code|Write a unit test|Write HTML|In Python, how|def ",
    "maths": "Solve|Calculate|What is the sum of|What is the value of|If a|A train|A store sells|"
    "Find the|Prove that|Simplify|There are|Convert|What percentage of|How much is|"
    "Solve the equation|A rectangle|The probability of",
    "summarise": "Summarize|Summarize the following text:\n|Summarise in one sentence:\n|"
    "What are the main points of|Give a short summary of|Extract the key points from this text:\n|"
    "Read the following paragraph and|Give this text a title:\n",
    "lists": "List|List five|List the steps to|Give me ten|Give me a list of|Name three|"
    "What are some|Suggest|Recommend|Make a table of|Create a list of|Give me ideas for|"
    "What are the advantages of|Provide three examples of",
    "rewriting": "Rewrite|Rewrite this sentence:|Rephrase|Correct the grammar:|Translate|"
    "Translate into Spanish:|Translate to French:|Make this more formal:\n|Shorten|Simplify this:|"
    "Turn the following into|Proofread|Change this sentence to|Complete the sentence:",
    "writing": "Write|Write a poem about|Write a short story about|Write an essay on|"
    "Write a letter to|Write an email to|Dear|Write a dialogue between|Write a product|"
    "Write a speech|Write a review of|Write a blog post about|Compose|Draft a message to|"
    "Write a haiku about|Tell me a joke about|Once upon a time|Create a story",
    "facts": "Who invented|What is the capital of|What year|What causes|Name the|How big is|"
    "How old is|What is the largest|What is the history of|Who is|What language|What do we call|"
    "Which country|What happened in",
    "plans": "Plan|Create a plan for|Design|Develop|Create a recipe for|How should I prepare for|"
    "What steps|Make a schedule for|Give me advice on|I feel|My friend|I am planning",
    "classify": "Classify|Is this sentence positive or negative?|Identify the|Choose the|"
    "Sort these|Categorize|Extract|Answer the following question:|True or false:|"
    "Fill in the blank:",
}
"""Beginnings of a user's turn, by kind, separated by "|"; the empty one lets the model choose."""

MIN_CHARACTERS, MAX_CHARACTERS = 8, 4000
MIN_LETTERS = 0.5
"""Share of letters, digits and white space that a written prompt needs."""
MAX_REPETITION = 3.0
"""How many times smaller than itself a written prompt may become by zlib (plain English of this
length: about 1.5; one sentence said four times: 3)."""
MAX_REJECTED = 512
"""Candidates dropped in a row after which the model is taken to be unable to write prompts."""
SENTINEL = "DSPARKUSERTURN"

Conversation = dict[str, Any]
"""The keys of a row in front of its answer: `prompt`, `system` and `prompt`, or `messages`."""


def seed_of(seed: int, what: str, number: int) -> int:
    """An own seed, 0 to 2**32 - 1, for each prompt or answer; nearby numbers are unrelated."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{what}/{number}".encode()).digest()[:4])


def openings() -> list[str]:
    return [o for kind in OPENINGS.values() for o in kind.split("|")]


def openings_sha256() -> str:
    """Names this list of openings: another list is another stream of prompts."""
    return hashlib.sha256("|".join(OPENINGS.values()).encode()).hexdigest()


# -- where the user's turn stands ------------------------------------------------------------------


@dataclass(frozen=True)
class UserTurn:
    """A chat template cut where the user's words stand."""

    prefix: str
    """All in front of them: the begin of text, the template's system message, the user's mark."""
    stop: tuple[str, ...]
    """Text that ends the turn."""
    stop_ids: tuple[int, ...]
    """The template's special tokens: whichever comes, the turn is over."""


def user_turn(tokenizer: Tokenizer) -> UserTurn:
    """Cut the template around one user message. Raises ConfigError if that cannot be done."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": SENTINEL}])
    except InvalidRequestError as e:
        if "no chat template" in str(e):
            raise ConfigError(
                "this model has no chat template, which training text is written through:"
                " take an instruction-tuned model"
            ) from e
        raise
    prefix, found, suffix = text.rpartition(SENTINEL)
    if not found:
        raise ConfigError("the model's chat template drops the user's words: it cannot be used")
    ids = tokenizer.encode(prefix) + tokenizer.encode(suffix)
    stop = suffix.strip().split("\n", 1)[0].strip()
    return UserTurn(
        prefix,
        (stop,) if stop else (),
        tuple(sorted({i for i in ids if not tokenizer.id_to_bytes(i)})),
    )


# -- what is a good prompt -------------------------------------------------------------------------


def normalised(text: str) -> str:
    """Equal for prompts that differ in case, punctuation or white space only."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded)) or text.strip()


def flaw(text: str) -> str | None:
    """Why a written prompt is of no use, in a word; None if nothing is wrong with it."""
    text = text.strip()
    if not text:
        return "empty"
    if len(text) < MIN_CHARACTERS or len(text.split()) < 2:
        return "short"
    if len(text) > MAX_CHARACTERS:
        return "long"
    if any(c == "\ufffd" or (not c.isprintable() and not c.isspace()) for c in text):
        return "unprintable"
    if sum(c.isalnum() or c.isspace() for c in text) < MIN_LETTERS * len(text):
        return "signs"
    words = text.lower().split()
    raw = text.encode()
    if (
        len(raw) > MAX_REPETITION * len(zlib.compress(raw, 9))
        or (len(words) >= 8 and len(set(words)) * 3 < len(words))
        or re.search(r"(\S+)(\s+\1){3}", text)
    ):
        return "repetitive"
    return None


# -- prompts of the target's own -------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A user's turn to be continued."""

    number: int
    opening: str
    ids: tuple[int, ...]
    seed: int


class OwnPrompts:
    """Prompts that the target writes, in the order of their candidates.

    `next_candidate` says what to continue next, `deliver` takes continuations in any order, `get`
    has prompt k as soon as all candidates up to it were delivered.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.turn = user_turn(tokenizer)
        self.dropped: Counter[str] = Counter()
        """Candidates that came to nothing, by reason."""
        self._tokenizer, self._seed = tokenizer, seed
        # Without a prefix there must be an opening: nothing cannot be continued.
        self._openings = [o for o in openings() if o or self.turn.prefix]
        self._prompts: list[str] = []
        self._seen: set[str] = set()
        self._asked = self._judged = self._in_a_row = 0
        self._waiting: dict[int, tuple[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, k: int) -> Conversation | None:
        return {"prompt": self._prompts[k]} if k < len(self._prompts) else None

    def next_candidate(self) -> Candidate:
        while self._asked < self._judged or self._asked in self._waiting:
            self._asked += 1  # an earlier run delivered it
        number, self._asked = self._asked, self._asked + 1
        seed = seed_of(self._seed, "prompt", number)
        opening = random.Random(seed).choice(self._openings)
        ids = tuple(self._tokenizer.encode(self.turn.prefix + opening))
        return Candidate(number, opening, ids, seed)

    def deliver(self, candidate: int, prompt: str, ended: bool) -> None:
        """Opening and continuation of a candidate, and whether the target ended the turn itself.

        Raises ConfigError when MAX_REJECTED candidates in a row came to nothing.
        """
        self._waiting[candidate] = (prompt, ended)
        while self._judged in self._waiting:
            prompt, ended = self._waiting.pop(self._judged)
            self._judged += 1
            self._judge(prompt, None if ended else "cut off")

    def _judge(self, prompt: str, reason: str | None) -> None:
        prompt = prompt.strip()
        reason = reason or flaw(prompt)
        key = normalised(prompt)
        if reason is None and key in self._seen:
            reason = "said before"
        ids = self._tokenizer.encode(prompt)
        if reason is None and not all(map(self._tokenizer.id_to_bytes, ids)):
            reason = "special token"
        if reason is None:
            self._prompts.append(prompt)
            self._seen.add(key)
            self._in_a_row = 0
            return
        self.dropped[reason] += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_REJECTED:
            raise ConfigError(
                f"{MAX_REJECTED} prompts in a row that the model wrote were of no use"
                f" ({most_common(self.dropped)}): give prompts with --prompts"
            )


def most_common(reasons: Mapping[str, int]) -> str:
    """`12 cut off, 3 said before`"""
    return ", ".join(f"{n} {reason}" for reason, n in Counter(reasons).most_common())


# -- prompts from files ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FilePrompts:
    """Conversations of some files, each once, in the order of the files."""

    conversations: tuple[Conversation, ...]
    sha256: str
    """Of the files' bytes as stored, one behind the other."""
    dropped: Counter[str]

    def __len__(self) -> int:
        return len(self.conversations)

    def get(self, k: int) -> Conversation | None:
        return self.conversations[k] if k < len(self.conversations) else None


def read_prompts(files: Sequence[Path | str]) -> FilePrompts:
    """Read JSON Lines, also `.gz`: `prompt` (with `system`), `turns` (the first), or `messages`.

    Assistant turns at the end of `messages` are left out, as the target shall answer. Empty prompts
    and repeated ones are dropped. Raises ConfigError with the file and the line.
    """
    digest = hashlib.sha256()
    found: list[Conversation] = []
    seen: set[str] = set()
    dropped: Counter[str] = Counter()
    for name in files:
        try:
            raw = Path(name).read_bytes()
            digest.update(raw)
            lines = (gzip.decompress(raw) if str(name).endswith(".gz") else raw).split(b"\n")
        except (OSError, EOFError, zlib.error) as e:
            reason = getattr(e, "strerror", None) or e
            raise ConfigError(f"cannot read the prompts {name}: {reason}") from e
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                conversation = _conversation(json.loads(line))
            except ValueError as e:  # JSON and Unicode errors are ValueErrors, too
                raise ConfigError(f"{name}:{number}: {e}") from e
            key = normalised(json.dumps(conversation, sort_keys=True, ensure_ascii=False))
            said = conversation.get("prompt") or conversation.get("messages")
            reason = "empty" if not said else "said before" if key in seen else None
            if reason is None:
                seen.add(key)
                found.append(conversation)
            else:
                dropped[reason] += 1
    if not found:
        raise ConfigError(f"no prompts in {', '.join(map(str, files)) or 'no files'}")
    return FilePrompts(tuple(found), digest.hexdigest(), dropped)


def _conversation(row: object) -> Conversation:
    if not isinstance(row, dict) or not ({"prompt", "turns", "messages"} & row.keys()):
        raise ValueError('expected an object with "prompt", "turns" or "messages"')
    if "messages" in row:
        return _messages(row["messages"])
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ValueError('"turns" must be a list of strings, "prompt" a string')
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError('"system" must be a string')
    prompt = turns[0] if turns[0].strip() else ""
    return {"prompt": prompt} if system is None else {"system": system, "prompt": prompt}


def _messages(messages: object) -> Conversation:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    kept = [{"role": m["role"], "content": m["content"]} for m in messages]
    while kept and (kept[-1]["role"] != "user" or not kept[-1]["content"].strip()):
        kept.pop()
    if len(kept) == 1:
        return {"prompt": kept[0]["content"]}
    return {"messages": kept}
