"""How a text ends: every stop condition, at every offset of a block."""

from __future__ import annotations

from typing import Any

import pytest

from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.errors import ConfigError, InvalidRequestError
from dspark.types import Output, SamplingParams
from tests.engine.oracle import (
    PATTERNS,
    ByteTokenizer,
    Ids,
    OracleDrafter,
    Played,
    ScriptedTarget,
    play,
    reference,
    request,
)
from tests.tiny import target

EOS, OTHER_EOS = 256, 257
PROMPT = (1, 2, 3)
BLOCKS = range(9)


def say(
    text: Any,
    block: int,
    *,
    believed: Any = None,
    pattern: str = "all",
    prompt: Ids = PROMPT,
    max_context: int = 256,
    **params: Any,
) -> Played:
    """A target that says `text` to a drafter that believes in `believed` (the same by default)."""
    model = ScriptedTarget(text, len(prompt), vocab_size=258, max_context=max_context)
    texts = {prompt: text if believed is None else believed}
    drafter = OracleDrafter(texts, block, PATTERNS[pattern], 258)
    engine = Engine(model, drafter, ByteTokenizer((EOS, OTHER_EOS)))
    played = play(engine, [request(prompt, **params)])
    last = max(int(b.positions.max()) for b in model.batches)
    assert last < max_context
    return played


def end(played: Played) -> Output:
    return played.outputs["r"]


# -- end of text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("at", range(10))
@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_the_end_of_text_at_every_offset(block: int, at: int, eos: int) -> None:
    """B17: nothing follows either of two ids, as a draft, as the bonus or as the first token."""
    text = [*b"abcdefghij"[:at], eos, *b"after the end"]
    played = say(text, block)
    assert end(played).token_ids == tuple(text[: at + 1])
    assert end(played).text == "abcdefghij"[:at]
    assert end(played).finish_reason == "stop"
    assert end(played).stats.completion_tokens == at + 1


@pytest.mark.parametrize("block", BLOCKS)
def test_the_end_of_text_is_ignored_when_asked(block: int) -> None:
    """B17: under `ignore_eos` it is a token like others, and adds nothing to the text."""
    text = [*b"ab", EOS, *b"cd", OTHER_EOS, *b"efgh"]
    played = say(text, block, ignore_eos=True, max_tokens=9)
    assert end(played).token_ids == tuple(text[:9])
    assert (end(played).text, end(played).finish_reason) == ("abcdefg", "length")


@pytest.mark.parametrize("slot", range(5))
@pytest.mark.parametrize("pattern", ["some", "all"])
def test_a_rejected_end_of_text_ends_nothing(slot: int, pattern: str) -> None:
    """B18: the drafter proposes it, the target disagrees, the text goes on."""
    text = list(b"abcdefghijkl")
    believed = [*text[: 1 + slot], EOS, *text[2 + slot :]]
    played = say(text, 5, believed=believed, pattern=pattern, max_tokens=12)
    assert end(played).token_ids == tuple(text)
    assert end(played).finish_reason == "length"
    first = played.rounds["r"][0]
    assert EOS in first.drafted or pattern == "some"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("at", range(8))
def test_stop_tokens(block: int, at: int) -> None:
    """B17: the stop token is emitted, its bytes are not part of the text; `ignore_eos` is no
    matter."""
    text = b"abcdefgh"[:at] + b"#" + b"after"
    for ignore_eos in (False, True):
        played = say(text, block, stop_token_ids=(ord("#"), 7), ignore_eos=ignore_eos)
        assert end(played).token_ids == tuple(text[: at + 1])
        assert (end(played).text, end(played).finish_reason) == ("abcdefgh"[:at], "stop")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block", [1, 3, 5, 8])
def test_an_end_of_text_that_a_real_model_says(pattern: str, block: int) -> None:
    """B17: every third of its first 20 tokens in turn is declared the end of text."""
    model, prompt = target(dtype="int8", num_slots=2), (7, 8, 9)
    text = reference(model, prompt, 40)
    for i in range(0, 20, 3):
        drafter = OracleDrafter({prompt: text}, block, PATTERNS[pattern])
        engine = Engine(model, drafter, ByteTokenizer((999, text[i])))
        got = end(play(engine, [request(prompt, max_tokens=40)]))
        first = text.index(text[i])
        assert (got.token_ids, got.finish_reason) == (text[: first + 1], "stop")


# -- min_tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("how", ["eos", "stop token", "ignored eos"])
def test_no_end_before_min_tokens(block: int, pattern: str, how: str) -> None:
    """B14: the end would come at 3 and at 9, min_tokens is 6: masked at 3 alone, per position."""
    ends = ord("#") if how == "stop token" else EOS
    text = [*b"abc", ends, *b"efghi", ends, *b"klm"]
    plain = [*b"abc-efghi", ends]
    params: dict[str, Any] = {"min_tokens": 6, "max_tokens": 10}
    if how == "stop token":
        params["stop_token_ids"] = (ends,)
    params["ignore_eos"] = how == "ignored eos"
    for believed in (text, plain):
        played = say(text, block, believed=believed, pattern=pattern, **params)
        assert end(played).token_ids == tuple(plain)
        assert end(played).finish_reason == ("length" if how == "ignored eos" else "stop")


# -- stop strings ----------------------------------------------------------------------------------

STOPS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "over three tokens": ("xxabcyy", ("abc",), "xx", "stop"),
    "near miss first": ("xxabdabcyy", ("abc",), "xxabd", "stop"),
    "near miss only": ("xxabdxxab", ("abc",), "xxabdxxab", "length"),
    "earliest wins": ("one two three", ("three", "two"), "one ", "stop"),
    "at once": ("abc", ("a",), "", "stop"),
    "restart in a near miss": ("ababcx", ("abc",), "ab", "stop"),
    "accents": ("un café 漢字", ("é 漢",), "un caf", "stop"),
    "with the last token": ("xyzab", ("ab",), "xyz", "stop"),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", STOPS)
def test_stop_strings(name: str, block: int) -> None:
    """B20: over token and block borders; `play` compares the stream with the output."""
    text, stop, expected, reason = STOPS[name]
    for pattern in PATTERNS:
        raw = text.encode()
        played = say(raw, block, pattern=pattern, stop=stop, max_tokens=len(raw))
        assert (end(played).text, end(played).finish_reason) == (expected, reason)
        shown = ""
        for chunk in played.chunks["r"]:
            shown += chunk.text
            assert expected.startswith(shown)


def test_a_stop_string_in_the_prompt_is_no_stop() -> None:
    """B20: neither whole in the prompt, nor begun there."""
    assert end(say(b"cdef", 3, prompt=tuple(b"abc ab"), stop=("abc",), max_tokens=4)).text == "cdef"


def test_a_stop_string_ends_the_ids_with_the_token_that_completed_it() -> None:
    got = end(say(b"xxabcyy", 6, stop=("abc",)))
    assert got.token_ids == tuple(b"xxabc")
    assert got.stats.completion_tokens == 5 and got.stats.accepted == 4


def test_held_text_is_delivered_at_an_end_of_text() -> None:
    """B20: "ab" might have become "abc", then the text ended."""
    assert end(say([*b"xab", EOS, ord("c")], 7, stop=("abc",))).text == "xab"


# -- characters over several tokens ----------------------------------------------------------------

SIGNS = "é😀漢字👩‍👩‍👧 end"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_chunk_holds_a_broken_character(block: int, pattern: str) -> None:
    """B37's cousin: an emoji is four tokens and comes with the last of them."""
    raw = SIGNS.encode()
    played = say(raw, block, pattern=pattern, max_tokens=len(raw))
    assert end(played).text == SIGNS
    assert not any("\ufffd" in c.text for c in played.chunks["r"])


def test_a_text_cut_inside_a_character_says_so_at_its_end() -> None:
    played = say("a😀".encode(), 5, max_tokens=3)
    assert [c.text for c in played.chunks["r"]] == ["a", "", "\ufffd"]


# -- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 6, 7, 8, 9, 10])
def test_max_tokens_is_exact(n: int) -> None:
    """B21: all drafts of seven right, the budget ends anywhere; the books say what was given."""
    text = b"abcdefghijklmnopqrstuvwxyz"
    model = ScriptedTarget(text, 1)
    drafter = OracleDrafter({(0,): text}, 7)
    played = play(Engine(model, drafter, ByteTokenizer()), [request((0,), max_tokens=n)])
    got = end(played)
    assert got.token_ids == tuple(text[:n])
    assert got.text == text[:n].decode()
    assert got.finish_reason == "length"
    assert got.stats.completion_tokens == n
    # One slot left is the target's: the drafter is not asked (rounds of 8 behind the first token).
    assert drafter.asked == {1: [], 2: [], 10: [8]}.get(n, [n - 2])
    assert sum(b.num_tokens for b in model.batches) <= n + len(model.batches)


def test_no_tokens_at_all_are_refused() -> None:
    """B21: a clear error, not an empty or a full answer."""
    with pytest.raises(InvalidRequestError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("length", [1, 20, 30, 31])
def test_the_context_is_filled_exactly(block: int, length: int) -> None:
    """B21: prompt and text are as long as the context, and no pass writes behind it."""
    prompt = tuple(range(length))
    got = end(say(bytes(range(65, 126)), block, prompt=prompt, max_context=32, max_tokens=100))
    assert len(got.prompt_ids) + len(got.token_ids) == 32
    assert got.finish_reason == "length"


@pytest.mark.parametrize("block", BLOCKS)
def test_company_with_other_limits(block: int) -> None:
    """B21, B31: each request ends at its own limit."""
    text = b"abcdefghijklmnopqrstuvwxyz"
    model = ScriptedTarget(text, 1, num_slots=3)
    texts = {(n,): text for n in range(9)}
    engine = Engine(model, OracleDrafter(texts, block, PATTERNS["some"]), ByteTokenizer())
    played = play(engine, [request((n,), str(n), max_tokens=n + 1) for n in range(9)])
    assert [len(played.ids(str(n))) for n in range(9)] == list(range(1, 10))


# -- cancellation ----------------------------------------------------------------------------------


def test_cancelling_frees_slots_and_leaves_the_others_alone() -> None:
    """B29: running and waiting ones; what was emitted is the output."""
    text = b"abcdefghijkl"
    model = ScriptedTarget(text, 1, num_slots=2)
    engine = Engine(model, OracleDrafter({(n,): text for n in range(4)}, 2), ByteTokenizer())
    for n in range(4):
        engine.submit(request((n,), str(n), max_tokens=10))
    engine.step()
    engine.step()
    engine.cancel("0")  # runs
    engine.cancel("3")  # waits
    engine.cancel("unknown")
    running, waiting = engine.take_output("0"), engine.take_output("3")
    assert running is not None and waiting is not None
    assert (running.finish_reason, running.text) == ("cancelled", "abcd")
    assert running.stats.completion_tokens == 4
    assert (waiting.finish_reason, waiting.token_ids, waiting.text) == ("cancelled", (), "")
    engine.cancel("0")
    assert engine.take_output("0") is None
    while engine.has_work:
        engine.step()
    for n in "12":
        output = engine.take_output(n)
        assert output is not None
        assert (output.text, output.finish_reason) == ("abcdefghij", "length")


def test_every_slot_is_free_again_after_cancelling() -> None:
    model = ScriptedTarget(b"abcdef", 1, num_slots=2)
    engine = Engine(model, NoDrafter(model), ByteTokenizer())
    for n in range(6):
        for m in range(2):
            engine.submit(request((0,), f"{n}.{m}"))
        engine.step()
        slots = set(model.batches[-1].slots.tolist())
        assert slots == {0, 1}
        for m in range(2):
            engine.cancel(f"{n}.{m}")
    assert not engine.has_work


def test_cancelling_delivers_held_text_once() -> None:
    """B20: a beginning of a stop string belongs to the text of a cancelled request."""
    model = ScriptedTarget(b"xabcd", 1)
    engine = Engine(model, NoDrafter(model), ByteTokenizer())
    engine.submit(request((0,), stop=("abd",)))
    chunks = [c.text for _ in range(3) for c in engine.step()]
    engine.cancel("r")
    output = engine.take_output("r")
    assert chunks == ["x", "", ""]
    assert output is not None and output.text == "xab"


def test_a_chunk_size_that_never_progresses_is_refused() -> None:
    model = target()
    with pytest.raises(ConfigError, match="prefill_chunk=0"):
        Engine(model, NoDrafter(model), ByteTokenizer((EOS,)), prefill_chunk=0)
