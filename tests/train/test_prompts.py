"""Prompts: where a template is cut, what is kept, what is read from files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dspark.errors import ConfigError, InvalidRequestError
from dspark.tokenizer import Tokenizer
from dspark.train import prompts as P

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "[/INST]")


def tokenizer(template: str | None = CHATML) -> Tokenizer:
    """Bytes and three special tokens, 256 to 258; <|im_end|> ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return Tokenizer(backend, eos_ids=[257], chat_template=template)


# -- where the user's turn stands ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "prefix", "stop", "stop_ids"),
    [
        (CHATML, "<|im_start|>user\n", ("<|im_end|>",), (256, 257)),
        ("[INST] {{ messages[0].content }} [/INST]", "[INST] ", ("[/INST]",), (258,)),
        (
            "Be good.\nUser: {{ messages[0].content }}\n\nAssistant:",
            "Be good.\nUser: ",
            ("Assistant:",),
            (),
        ),
        ("{{ messages[0].content }}", "", (), ()),
    ],
)
def test_user_turn(
    template: str, prefix: str, stop: tuple[str, ...], stop_ids: tuple[int, ...]
) -> None:
    assert P.user_turn(tokenizer(template)) == P.UserTurn(prefix, stop, stop_ids)


def test_a_continued_turn_is_the_prompt_the_template_makes() -> None:
    """Opening and continuation, token by token, are what a user's message would have been."""
    t = tokenizer()
    own = P.OwnPrompts(t, 0)
    c = own.next_candidate()
    whole = t.encode_chat([{"role": "user", "content": c.opening + " it?"}])
    assert c.ids == tuple(whole[: len(c.ids)])
    assert t.decode(whole[len(c.ids) :]).startswith(" it?")


def test_templates_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*instruction-tuned"):
        P.user_turn(tokenizer(None))
    with pytest.raises(ConfigError, match="drops the user's words"):
        P.user_turn(tokenizer("hello"))
    with pytest.raises(InvalidRequestError, match="refused"):
        P.user_turn(tokenizer("{{ raise_exception('no') }}"))


def test_nothing_is_continued_only_behind_a_prefix() -> None:
    def some(template: str) -> set[str]:
        own = P.OwnPrompts(tokenizer(template), 0)
        return {own.next_candidate().opening for _ in range(400)}

    assert "" in some(CHATML) and len(some(CHATML)) > 100
    assert "" not in some("{{ messages[0].content }}")


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("How do I delete records from a MongoDB database?", None),
        ("Fix this code:\nfor i in range(10):\n\tprint(i)", None),
        ("Translate into Chinese: 你好, world", None),
        ("Solve the equation z^2 + 4z + 1 = 2z^3 - 3z^2 + 2 - z + 3 in complex numbers.", None),
        (" \n", "empty"),
        ("Why?", "short"),
        ("Internationalisation", "short"),
        ("Why " + " ".join(map(str, range(2000))), "long"),
        ("What is \ufffd in a text?", "unprintable"),
        ("What is \x07 in a text?", "unprintable"),
        ("=== ??? !!! ### +++ ---", "signs"),
        ("Say it again and again. " * 8, "repetitive"),
        ("no no no no please", "repetitive"),
        ("yes or no or yes or no or yes or no or yes", "repetitive"),
    ],
)
def test_flaws(text: str, reason: str | None) -> None:
    assert P.flaw(text) == reason


def test_nearly_equal_prompts_are_one() -> None:
    assert P.normalised("What is  AI?\n") == P.normalised("what is ai")
    assert P.normalised("What is AI?") != P.normalised("What was AI?")
    assert P.normalised("🌍?") != P.normalised("🌳?")


def test_own_prompts_are_judged_in_order() -> None:
    """Whoever finishes first, the earlier candidate keeps a text that both wrote."""
    own = P.OwnPrompts(tokenizer(), 7)
    own.deliver(1, "say aloud a word!", True)
    own.deliver(4, "say <|im_end|> now", True)
    own.deliver(3, "say more", False)
    assert own.get(0) is None and not own.dropped
    own.deliver(0, " say aloud a word\n", True)
    assert [own.get(0), own.get(1)] == [{"prompt": "say aloud a word"}, None]
    own.deliver(2, "say less", True)
    assert [own.get(1), own.get(2)] == [{"prompt": "say less"}, None]
    assert own.dropped == {"said before": 1, "cut off": 1, "special token": 1}


def test_the_stream_goes_on_behind_what_was_delivered() -> None:
    """Also where later candidates were faster: only what is missing is asked for."""
    whole, resumed = (P.OwnPrompts(tokenizer(), 3) for _ in range(2))
    cs = [whole.next_candidate() for _ in range(7)]
    assert [c.number for c in cs] == list(range(7)) and len({c.seed for c in cs}) == 7
    for n in (4, 1, 0, 5):
        resumed.deliver(n, f"say aloud the word {n}", True)
    assert [resumed.next_candidate() for _ in range(3)] == [cs[2], cs[3], cs[6]]
    assert len(resumed) == 2


def test_a_model_that_cannot_write_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(P, "MAX_REJECTED", 3)
    own = P.OwnPrompts(tokenizer(), 0)
    for n in range(2):
        own.deliver(n, "", True)
    own.deliver(2, "something good", True)
    for n in (3, 5, 4):
        assert len(own) == 1
        if n != 4:
            own.deliver(n, "Why?", True)
    with pytest.raises(ConfigError, match=r"3 prompts in a row .*3 short.*2 empty.*--prompts"):
        own.deliver(4, "Why?", True)


# -- files -----------------------------------------------------------------------------------------


def test_every_form_of_row(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "b?"}, {"role": "assistant", "content": "b."}
    system = {"role": "system", "content": "Be."}
    rows: list[Any] = [
        {"prompt": "a?", "id": 7},
        {"turns": ["b?", "and?"]},
        {"messages": [{**user, "extra": 1}, answer]},
        {"messages": [system, user, answer, {"role": "user", "content": "c?"}, answer]},
        {"prompt": "a?", "system": "Be."},
        {"prompt": " A? "},
        {"prompt": " "},
        {"messages": [system]},
    ]
    lines = [json.dumps(r, ensure_ascii=False) for r in rows]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text("\n".join(lines[:3]) + "\n\n", encoding="utf-8")
    packed.write_bytes(gzip.compress("\n".join(lines[3:]).encode()))
    found = P.read_prompts([plain, packed])
    assert list(found.conversations) == [
        {"prompt": "a?"},
        {"prompt": "b?"},
        {"messages": [system, user, answer, {"role": "user", "content": "c?"}]},
        {"system": "Be.", "prompt": "a?"},
    ]
    assert found.dropped == {"said before": 2, "empty": 2}
    assert found.sha256 != P.read_prompts([plain]).sha256


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"nonsense", ":1: Expecting value"),
        (b'{"prompt": "x"}\n[1]', ":2: expected an object"),
        (b'{"text": "x"}', "expected an object"),
        (b'{"prompt": 3}', "a string"),
        (b'{"turns": []}', "a list of strings"),
        (b'{"messages": ["x"]}', "a list of objects"),
        (b'{"prompt": "x", "system": 1}', '"system" must be'),
        (b'{"prompt": "\xff"}', "decode"),
        (b'{"prompt": ""}', "no prompts in"),
        (b"", "no prompts in"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as e:
        P.read_prompts([path])
    assert words in str(e.value) and str(path) in str(e.value) and "\n" not in str(e.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(b"no gzip")
    for name, words in (("x.gz", "Not a gzipped file"), ("nowhere.jsonl", "No such file")):
        with pytest.raises(ConfigError, match=f"cannot read the prompts .*{name}: .*{words}"):
            P.read_prompts([tmp_path / name])
