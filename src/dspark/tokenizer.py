"""Text to ids and back, and conversations to prompts.

The tokenizer comes from the same place as the weights: `tokenizer.json` of a Hugging Face
directory, or the vocabulary and merges in a GGUF file's metadata, put together with the
`tokenizers` library. The chat template is the model's own Jinja text, run in a sandbox; a model
without one may bring a function instead (`ChatEncoder`).

Beyond encode and decode the engine needs the bytes of one token, because a stream decodes bytes,
not tokens (`engine/stream.py`).

Not promised: the exact cut of text with a SentencePiece vocabulary (Llama 2) from a GGUF file. Such
a file has scores instead of merges; the merges made of them here agree but for rare overlaps of one
repeated character. And whoever may write special tokens into a message may end its turn, as in
other engines.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark import chat_template
from dspark.answers import AnswerFormat
from dspark.errors import CheckpointError, InvalidRequestError
from dspark.tool_calls import HERMES

_SPACE = "\u2581"
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
"""Kinds of token in `tokenizer.ggml.token_type`."""
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS = {
    "llama-bpe": _LLAMA3_WORDS, "llama3": _LLAMA3_WORDS, "qwen2": _QWEN2_WORDS
}  # fmt: skip

ChatEncoder = Callable[..., str]
"""messages, and options by keyword -> the prompt text, ready for the answer where one is due."""


class Tokenizer:
    """A model's tokenizer with its chat template and end-of-text ids."""

    def __init__(
        self,
        backend: Any,
        *,
        eos_ids: Sequence[int],
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat: ChatEncoder | None = None,
        answers: AnswerFormat | None = None,
    ) -> None:
        """`backend`: a `tokenizers.Tokenizer`; `special_tokens`: bos_token, ... for templates;
        `chat`: what writes conversations where there is no template; `answers`: how to read what
        comes back, None: as the template teaches."""
        self._backend = backend
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self._add_bos = add_bos
        self._template, self._chat = chat_template, chat
        self._special = dict(special_tokens or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        teaches = HERMES.openings[0] in (chat_template or "")
        self.answers = answers or AnswerFormat(calls=HERMES if teaches else None)
        visible = self.answers.tokens
        self._special_ids = frozenset(
            i for i, t in added.items() if t.special and t.content not in visible
        )
        self._added_ids = frozenset(added)
        self._byte_level = "ByteLevel" in str(backend.decoder or "")
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised. `add_special` adds what the
        model wants in front of a text (BOS)."""
        try:
            # Not `encode`, which holds the interpreter's lock: a long text would stop all threads.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
            ids: list[int] = batch[0].ids
        except TypeError as e:  # what the library makes of a str that UTF-8 cannot express
            raise InvalidRequestError(
                "the text is not valid Unicode: it holds half of a surrogate pair"
            ) from e
        if add_special and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`, with broken UTF-8 replaced."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def id_to_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none for a special or unknown one.

        A SentencePiece token keeps the space in front of its word, which `decode` strips at the
        very beginning.
        """
        if token not in self._bytes:
            self._bytes[token] = self._to_bytes(token)
        return self._bytes[token]

    def _to_bytes(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token)
        if piece is None or token in self._special_ids:
            return b""
        if token in self._added_ids:
            return bytes(piece.encode())
        if self._byte_level:
            table = _byte_of_char()
            return (
                bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
            )
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return bytes(piece.replace(_SPACE, " ").encode())

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary: equal for equal id-to-text maps."""
        vocab = sorted(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda x: x[1])
        return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()

    # -- conversations -------------------------------------------------------------------------

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer."""
        return self.encode(self.apply_chat_template(messages, **variables))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. Raises InvalidRequestError without a template, or if
        the template refuses the messages."""
        if self._template is None and self._chat is not None:
            try:
                return self._chat(messages, **variables)
            except TypeError as e:
                raise InvalidRequestError(f"the chat format refused an option: {e}") from e
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: pass the prompt as raw text (--raw)"
            )
        for m in messages:
            if not isinstance(m, Mapping) or "role" not in m or "content" not in m:
                given = sorted(m) if isinstance(m, Mapping) else type(m).__name__
                raise InvalidRequestError(f"a message needs role and content, got {given}")
        template = chat_template.compiled(self._template)
        # Templates test these two with `is not none`, which an undefined name passes.
        defaults = {"tools": None, "documents": None}
        try:
            text: str = template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                **{**defaults, **self._special, **variables},
            )
            return text
        except Exception as e:  # a template is a program: it may raise anything
            raise InvalidRequestError(f"the chat template refused the messages: {e}") from e

    @functools.cached_property
    def chat_options(self) -> frozenset[str]:
        """Names that the chat format reads, besides the messages: `tools`, `thinking`, ..."""
        if self._template is None:
            parameters = inspect.signature(self._chat or (lambda: None)).parameters.values()
            return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        own = {"messages", "add_generation_prompt", *self._special}
        return chat_template.variables(self._template) - own

    @property
    def knows_tools(self) -> bool:
        """Whether the chat format offers tools, in a way whose calls can be read."""
        return self.answers.calls is not None and "tools" in self.chat_options

    @property
    def knows_thinking(self) -> bool:
        """Whether the chat format is told to reason or not, by `thinking`, and where that ends."""
        return bool(self.answers.end_think) and "thinking" in self.chat_options

    # -- where it comes from -------------------------------------------------------------------

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        chat: ChatEncoder | None = None,
        answers: AnswerFormat | None = None,
    ) -> Tokenizer:
        """From a Hugging Face directory; `chat` and `answers` as in `Tokenizer`. Raises
        CheckpointError."""
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        if not path.exists():
            hint = ""
            if (directory / "tokenizer.model").exists():
                hint = " (tokenizer.model is not read: convert it with transformers' AutoTokenizer)"
            raise CheckpointError(f"{directory} has no tokenizer.json{hint}")
        try:
            backend = Backend.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise CheckpointError(f"{path} is not a tokenizer: {e}") from e
        backend.no_truncation()
        backend.no_padding()
        settings = _json(directory / "tokenizer_config.json")
        special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in {**_json(directory / "special_tokens_map.json"), **settings}.items()
            if key.endswith("_token")
            and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        ids: list[int] = []
        for config in ("generation_config.json", "config.json"):
            value = _json(directory / config).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
        if (eos := backend.token_to_id(special.get("eos_token", ""))) is not None:
            ids.append(eos)
        template = settings.get("chat_template")
        if isinstance(template, list):
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        if (directory / "chat_template.jinja").exists():
            template = (directory / "chat_template.jinja").read_text()
        bos = backend.token_to_id(special.get("bos_token", ""))
        return cls(
            backend,
            eos_ids=ids,
            bos_id=bos,
            add_bos=bool(settings.get("add_bos_token", False)),
            chat_template=template,
            special_tokens=special,
            chat=chat,
            answers=answers,
        )

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file. Raises CheckpointError for an unsupported kind."""
        prefix = "tokenizer.ggml."
        kind, pre = meta.get(prefix + "model"), meta.get(prefix + "pre", "default")
        if kind not in ("gpt2", "llama"):
            raise CheckpointError(
                f"the GGUF file's tokenizer is {kind!r}, supported are gpt2 (byte-level BPE) and"
                " llama (SentencePiece): use the Hugging Face directory of the model"
            )
        tokens = meta.get(prefix + "tokens")
        types = meta.get(prefix + "token_type") or [_NORMAL] * len(tokens or ())
        if not tokens or len(types) != len(tokens):
            raise CheckpointError(
                f"the GGUF file has {len(tokens or ())} tokens and {len(types)} token types"
            )
        spm = kind == "llama"
        backend = _sentencepiece(meta, tokens, types) if spm else _byte_level(meta, tokens, pre)
        from tokenizers import AddedToken

        added = [(i, t) for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)]
        backend.add_tokens(
            [AddedToken(tokens[i], special=t == _CONTROL, normalized=False) for i, t in added]
        )
        usual = {"bos": 1, "eos": 2} if spm else {}
        named = {
            name: i
            for name in ("bos", "eos", "eot", "eom", "padding", "unknown")
            if (i := meta.get(f"{prefix}{name}_token_id", usual.get(name))) is not None
            and 0 <= i < len(tokens)
        }
        short = {"padding": "pad", "unknown": "unk"}
        return cls(
            backend,
            eos_ids=[named[n] for n in ("eos", "eot", "eom") if n in named],
            bos_id=named.get("bos"),
            # llama.cpp's own defaults where the file is silent
            add_bos=bool(meta.get(prefix + "add_bos_token", spm or pre in ("llama-bpe", "llama3"))),
            chat_template=meta.get("tokenizer.chat_template"),
            special_tokens={short.get(n, n) + "_token": tokens[i] for n, i in named.items()},
        )


def _byte_level(meta: Mapping[str, Any], tokens: list[str], pre: str) -> Any:
    """The backend of GPT-2's kind; `pre` names how text is cut into words before merging."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if pre in _WORDS:
        steps = [
            pre_tokenizers.Split(Regex(_WORDS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    elif pre in ("smollm", "gpt-2", "default"):
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        raise CheckpointError(
            f"the GGUF file splits words in the way {pre!r}, supported are smollm, gpt-2, default,"
            f" {', '.join(_WORDS)}: use the Hugging Face directory of the model"
        )
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", [])]
    try:
        whole_first = _WORDS.get(pre) == _LLAMA3_WORDS
        model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=whole_first)
    except Exception as e:  # the library raises bare Exception
        raise CheckpointError(f"the GGUF file's merges do not fit its tokens: {e}") from e
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str], types: list[int]) -> Any:
    """The backend of Llama 2's kind: any two pieces merge if the result is a token, and the token
    with the highest score goes first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError("the GGUF file's SentencePiece tokenizer has no scores")
    ids = {t: i for i, t in enumerate(tokens)}
    parts = {t for t, i in ids.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(parts, key=lambda t: (-scores[ids[t]], ids[t]))
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
    unknown = meta.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(
            ids, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=_BYTE in types
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    back: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(back)
    return backend


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, backwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    pairs = [(chr(b), b) for b in printable] + [(chr(256 + n), b) for n, b in enumerate(others)]
    return dict(pairs)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    return value if isinstance(value, dict) else {}
