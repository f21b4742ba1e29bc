"""Text to ids and back, against `transformers`, llama.cpp's recorded answers and first principles.

The default model's tokenizer is read from its GGUF file by both sides. `transformers` ignores how
a GGUF file says that words are cut ("smollm": every digit alone), so its cut is put right first;
what llama.cpp makes of the same file is recorded below.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dspark.errors import CheckpointError, InvalidRequestError
from dspark.models.gguf_source import GgufFile
from dspark.models.loading import resolve
from dspark.tokenizer import Tokenizer

TEXTS = [
    "", "a", " ", "   ", "Hello, world!", "1²³ Ⅷ ½ ٣٤", "a\n\n\nb\t\tc\r\nd",
    "👩‍👩‍👧 🎉🎉 ✨", "e\u0301é\u00a0\u2003x", "日本語のテキスト 한국어", "don't I'll we've IT'S",
    "def f(x):\n    return x**2  # 2024\n", "\x00\x01\x7f", "http://a.b/c?d=e&f=1", "x" * 300,
    "<|im_start|>user\nhi<|im_end|>\n", "<|im_end|><|im_end|> x <|endoftext|>y",
]  # fmt: skip
LLAMA_CPP = [
    ("price 12345.678 €", [17517, 216, 33, 34, 35, 36, 37, 30, 38, 39, 40, 24927]),
    ("  lead and trail  ", [216, 1022, 284, 11231, 256]),
    ("a\n\n\nb\t\tc\r\nd", [81, 1116, 198, 82, 197, 197, 83, 201, 198, 84]),
    ("def f(x):\n    return x**2  # 2024",
     [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 216, 34, 32, 34, 36]),
    ("👩‍👩‍👧 🎉",
     [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 15107, 232, 227]),
    ("naïve façade — “quotes”…", [3546, 46494, 40852, 1841, 619, 385, 2346, 573, 2829]),
    ("日本語 ٣٤ 1²",
     [23274, 115, 40993, 179, 120, 248, 216, 164, 113, 164, 114, 216, 33, 19133]),
    ("don't I'll IT'S", [12420, 982, 339, 3060, 9627, 23, 67]),
    ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
]  # fmt: skip
"""Ids of the default model's file as llama.cpp (llama-cpp-python 0.3.36) cuts these texts."""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi & <b>\n"},
    {"role": "assistant", "content": "Hello 12"},
    {"role": "user", "content": "日本 🎉"},
]


def jumbles(pool: str, count: int) -> list[str]:
    r = random.Random(0)
    return ["".join(r.choice(pool) for _ in range(r.randint(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return GgufFile(resolve("default")).metadata


@pytest.fixture(scope="module")
def smollm(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def theirs() -> Any:
    path = resolve("default")
    oracle = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    return oracle


# -- the default model -----------------------------------------------------------------------------


def test_default_model_equals_transformers(smollm: Tokenizer, theirs: Any) -> None:
    assert smollm.vocab_size == len(theirs) == 49152
    for text in [*TEXTS, *jumbles("abc ABC 019 \n\t.,'\"()<>|é日🎉\u0301½_ 's", 500)]:
        ids = smollm.encode(text)
        assert ids == theirs(text, add_special_tokens=False).input_ids, repr(text)
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert smollm.decode(ids, skip_special=skip) == expected


def test_the_way_that_frees_other_threads_gives_the_same_ids(smollm: Tokenizer) -> None:
    """`encode` of the library, one text at a time, is the reference."""
    for text in [*TEXTS, " ".join(TEXTS) * 50, *jumbles("abc ABC 019 \n\té日🎉\u0301<|>", 100)]:
        for special in (False, True):
            expected = smollm._backend.encode(text, add_special_tokens=special).ids
            assert smollm.encode(text, add_special=special) == expected, repr(text)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        smollm.encode("half \ud800")


@pytest.mark.parametrize(("text", "ids"), LLAMA_CPP)
def test_default_model_equals_llama_cpp(smollm: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm.encode(text) == ids == smollm.encode(text, add_special=True)


def test_default_model_ids_of_special_meaning(smollm: Tokenizer) -> None:
    assert smollm.eos_ids == (2,) and smollm.bos_id == 1
    assert [smollm.id_to_bytes(i) for i in (0, 1, 2)] == [b"", b"", b""]
    assert smollm.decode([1, 4093, 2]) == "user"


def test_bytes_of_tokens_add_up_to_the_text(smollm: Tokenizer) -> None:
    """Whatever is cut inside a character: this is what streaming decodes."""
    for text in [*TEXTS, *jumbles("aé日🎉\u0301 \n9", 300)]:
        if "<|" not in text:
            joined = b"".join(smollm.id_to_bytes(i) for i in smollm.encode(text))
            assert joined == text.encode()
    assert smollm.id_to_bytes(49152) == smollm.id_to_bytes(10**6) == b""


@pytest.mark.parametrize("messages", [CHAT[:1], CHAT, CHAT[1:], []])
@pytest.mark.parametrize("prompt", [True, False])
def test_default_chat_template(
    smollm: Tokenizer, theirs: Any, messages: list[dict[str, str]], prompt: bool
) -> None:
    expected = (
        theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        if messages  # transformers looks into the first one
        else "<|im_start|>assistant\n" * prompt
    )
    assert smollm.apply_chat_template(messages, add_generation_prompt=prompt) == expected
    assert smollm.encode_chat(messages, add_generation_prompt=prompt) == smollm.encode(expected)


def test_the_default_model_knows_no_tools(smollm: Tokenizer) -> None:
    assert smollm.chat_options == frozenset() and not smollm.knows_tools


def test_fingerprint(smollm: Tokenizer, metadata: dict[str, Any]) -> None:
    assert len(smollm.fingerprint) == 64
    assert smollm.fingerprint == Tokenizer.from_gguf(metadata).fingerprint
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], "somethingelse"]
    kept = metadata["tokenizer.ggml.merges"][:1000]
    changed = {**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": kept}
    assert Tokenizer.from_gguf(changed).fingerprint != smollm.fingerprint


# -- other kinds in GGUF ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "name"), [("gpt-2", "GPT2"), ("default", "GPT2"), ("qwen2", "Qwen2")]
)
def test_cuts_of_other_families(metadata: dict[str, Any], pre: str, name: str) -> None:
    """The same vocabulary under another family's cut, as that family's tokenizer class cuts."""
    ours = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": pre})
    oracle = getattr(transformers, f"{name}Tokenizer")(
        vocab={t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])},
        merges=[tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]],
    )
    for text in [*TEXTS, *jumbles("abc ABC 019 \n\r\t.,'é日🎉½_ 's", 300)]:
        if "<|" not in text:
            assert ours.encode(text) == oracle(text).input_ids, repr(text)


def test_cut_of_llama_3(metadata: dict[str, Any]) -> None:
    """Digits by threes, and BOS in front of a text unless the file says otherwise."""
    meta = {k: v for k, v in metadata.items() if k != "tokenizer.ggml.add_bos_token"}
    ours = Tokenizer.from_gguf({**meta, "tokenizer.ggml.pre": "llama-bpe"})
    cut = [t for t, _ in ours._backend.pre_tokenizer.pre_tokenize_str("I'LL pay 12345.\n\n  ok")]
    assert cut == ["I", "'LL", "Ġpay", "Ġ", "123", "45", ".ĊĊ", "Ġ", "Ġok"]
    assert ours.encode("hi", add_special=True) == [1, *ours.encode("hi")]
    assert ours.encode("<|im_start|>hi", add_special=True) == ours.encode("<|im_start|>hi")


SPM_WORDS = [
    "▁", "a", "b", "c", "é", "\n", "▁a", "ab", "▁ab", "abc", "bc", "▁▁", "▁▁▁", "aa", "aaa",
    "▁c", "ca",
]  # fmt: skip
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *SPM_WORDS, "<tool>"
    ],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(SPM_WORDS), 4],
    "tokenizer.ggml.scores": [0.0] * 259
    + [-1e3 if len(w) == 1 else -float(i) for i, w in enumerate(SPM_WORDS)]
    + [0.0],
}  # fmt: skip


def spm_reference(text: str) -> list[int]:
    """SentencePiece as it is defined: again and again join the leftmost pair of the best score."""
    tokens = SPM["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, SPM["tokenizer.ggml.scores"], strict=True))
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in SPM_WORDS
        ]
        if not pairs:
            break
        i = -max(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    ids: list[int] = []
    for p in pieces:
        ids += [tokens.index(p)] if p in SPM_WORDS else [3 + b for b in p.encode()]
    return ids


def test_sentencepiece_in_gguf() -> None:
    ours = Tokenizer.from_gguf(SPM)
    assert ours.bos_id == 1 and ours.eos_ids == (2,)
    for text in [*TEXTS[:12], "abc abc", " a", "aab  c ab🎉", *jumbles("abc  é\n🎉x", 300)]:
        ids = ours.encode(text)
        assert ids == spm_reference(text), repr(text)
        assert ours.encode(text, add_special=True) == [1, *ids]
        assert ours.decode(ids) == text
        assert b"".join(map(ours.id_to_bytes, ids)) == (b" " if text else b"") + text.encode()
    tool = len(SPM["tokenizer.ggml.tokens"]) - 1
    assert ours.encode("</s>a<tool>") == [2, *ours.encode("a"), tool]
    assert ours.decode([2, tool]) == "<tool>" and ours.id_to_bytes(tool) == b"<tool>"


def test_sentencepiece_without_space_prefix() -> None:
    ours = Tokenizer.from_gguf({**SPM, "tokenizer.ggml.add_space_prefix": False})
    assert ours.encode("ab") == [SPM["tokenizer.ggml.tokens"].index("ab")]
    assert ours.decode(ours.encode(" ab")) == " ab"


@pytest.mark.parametrize("name", ["eot", "eom"])
def test_chat_endings_of_the_metadata_end_a_text(metadata: dict[str, Any], name: str) -> None:
    ours = Tokenizer.from_gguf({**metadata, f"tokenizer.ggml.{name}_token_id": 0})
    assert ours.eos_ids == (2, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer is 'bert', supported are gpt2"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "'deepseek-llm', supported are smollm"),
        ({"tokenizer.ggml.tokens": None}, "has 0 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "49152 tokens and 1 token types"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["alone"]}, "merges do not fit"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
    ],
)
def test_refused_gguf_tokenizers(
    metadata: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_gguf({**metadata, **change})


# -- Hugging Face directories ----------------------------------------------------------------------


def directory(path: Path, bos: bool = False, **config: Any) -> Path:
    """A tiny byte-level tokenizer as Hugging Face saves it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<eot>")])
    backend.add_tokens([AddedToken("<think é>", special=False, normalized=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 256)]
        )
    backend.enable_truncation(5)
    backend.enable_padding(length=5)
    backend.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<bos>",
        "eos_token": {"content": "<eos>"},
        "pad_token": None,
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_directory(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(directory(tmp_path))
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (260, 256, (257,))
    ids = ours.encode("a long text é<think é><eos>")
    assert len(ids) == 16, "neither truncated nor padded"
    assert ours.decode(ids) == "a long text é<think é>"
    assert b"".join(map(ours.id_to_bytes, ids)).decode() == "a long text é<think é>"
    assert ours.decode(ids, skip_special=False).endswith("<eos>")


@pytest.mark.parametrize(
    ("bos", "config", "front"),
    [(True, {}, [256]), (False, {"add_bos_token": True}, [256]), (False, {}, []),
     (True, {"add_bos_token": True}, [256])],
)  # fmt: skip
def test_bos_once(tmp_path: Path, bos: bool, config: dict[str, Any], front: list[int]) -> None:
    ours = Tokenizer.from_directory(directory(tmp_path, bos, **config))
    assert ours.encode("a", add_special=True) == [*front, *ours.encode("a")]
    assert ours.encode("<bos>a", add_special=True)[:2] != [256, 256] or bos


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([258, 257], 257, (258, 257)), (None, [258], (258, 257)), (258, None, (258, 257)),
     (None, None, (257,))],
)  # fmt: skip
def test_ends_of_text(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    directory(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == expected


def test_names_of_special_tokens_in_an_older_file(tmp_path: Path) -> None:
    directory(tmp_path, eos_token=None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eot>"}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == (258,)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_damaged_files_are_named(tmp_path: Path, file: str) -> None:
    (directory(tmp_path) / file).write_text("{")
    with pytest.raises(CheckpointError, match=f"/{file} is not") as e:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(e.value)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json$"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is not read: convert it"):
        Tokenizer.from_directory(tmp_path)


def test_text_that_is_not_unicode(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        smollm.encode("a\ud800")
