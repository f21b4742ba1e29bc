"""TextStream: what a user may see of a text that arrives in pieces of bytes (B20)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.engine.stream import TextStream

QUICK = settings(deadline=None)  # a busy machine is no failure
REPLACEMENT = "\ufffd"
FEW = st.text("abcé漢😀", max_size=12)
"""Few letters, so that stop strings, their beginnings and their near misses really occur."""
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
STOPS = st.lists(st.text("abcé漢😀", min_size=1, max_size=4), max_size=3).map(tuple)


def run(pieces: Sequence[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Push pieces as tokens until a stop string, then finish; returns what each step released."""
    stream = TextStream(dict(enumerate(pieces)).__getitem__, stop)
    chunks = []
    for token in range(len(pieces)):
        chunks.append(stream.push(token))
        if stream.stopped:
            break
    chunks.append(stream.finish())
    return chunks, stream


def expected(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first, letter by letter."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[bytes]]:
    """A text, and its bytes cut anywhere, also inside a character and into nothing."""
    text = draw(texts)
    raw = text.encode()
    at = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    return text, [raw[a:b] for a, b in zip([0, *at], [*at, len(raw)], strict=True)]


@QUICK
@given(cut(FEW | ANY), STOPS)
def test_chunks_are_the_text_before_the_first_stop_string(
    case: tuple[str, list[bytes]], stop: tuple[str, ...]
) -> None:
    text, pieces = case
    chunks, stream = run(pieces, stop)
    assert "".join(chunks) == expected(text, stop) == stream.text
    assert stream.stopped == any(s in text for s in stop)


@QUICK
@given(cut(FEW), STOPS)
def test_nothing_released_may_still_become_a_stop_string(
    case: tuple[str, list[bytes]], stop: tuple[str, ...]
) -> None:
    """While the text goes on, no stop string may begin in what was released: neither whole in
    what was seen so far, nor as a beginning that reaches to its end."""
    _, pieces = case
    stream, raw = TextStream(dict(enumerate(pieces)).__getitem__, stop), b""
    for token, piece in enumerate(pieces):
        stream.push(token)
        raw += piece
        if stream.stopped:
            return
        seen = raw.decode(errors="ignore")
        for at in range(len(stream.text)):
            assert not any(s.startswith(seen[at:]) or seen.startswith(s, at) for s in stop)


@QUICK
@given(cut(FEW), STOPS)
def test_what_is_certain_is_released_at_once(
    case: tuple[str, list[bytes]], stop: tuple[str, ...]
) -> None:
    """Held back is only an incomplete character, or a tail that begins a stop string."""
    _, pieces = case
    stream, raw = TextStream(dict(enumerate(pieces)).__getitem__, stop), b""
    for token, piece in enumerate(pieces):
        stream.push(token)
        raw += piece
        if stream.stopped:
            return
        held = raw.decode(errors="ignore")[len(stream.text) :]
        assert not held or any(s.startswith(held) for s in stop)


@QUICK
@given(cut(FEW | ANY))
def test_no_broken_characters(case: tuple[str, list[bytes]]) -> None:
    text, pieces = case
    chunks, _ = run(pieces)
    assert "".join(chunks) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in c for c in chunks)


@QUICK
@given(cut(FEW | ANY), st.sampled_from("é漢😀"), st.data())
def test_an_incomplete_character_shows_at_the_end_only(
    case: tuple[str, list[bytes]], last: str, data: st.DataObject
) -> None:
    text, pieces = case
    raw = last.encode()
    beginning = raw[: data.draw(st.integers(1, len(raw) - 1))]
    chunks, stream = run([*pieces, *(bytes([b]) for b in beginning)])
    assert chunks[-1] == REPLACEMENT
    assert "".join(chunks[:-1]) == text
    assert stream.text == text + REPLACEMENT


@QUICK
@given(st.binary(max_size=24), st.lists(st.integers(0, 24), max_size=8))
def test_bytes_that_are_no_text_decode_as_in_one_piece(raw: bytes, at: list[int]) -> None:
    cuts = sorted(min(a, len(raw)) for a in at)
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert "".join(run(pieces)[0]) == raw.decode(errors="replace")


def test_a_stop_string_over_three_tokens_and_a_near_miss() -> None:
    """B20: nothing of "abc" leaks, all of "abd" arrives."""
    assert run([b"x", b"a", b"b", b"c", b"y"], ("abc",))[0] == ["x", "", "", "", ""]
    assert run([b"x", b"a", b"b", b"d", b"y"], ("abc",))[0] == ["x", "", "", "abd", "y", ""]


def test_text_held_at_the_end_is_delivered() -> None:
    assert run([b"x", b"ab"], ("abc",))[0] == ["x", "", "ab"]


def test_overlapping_stop_strings_do_not_depend_on_the_cut() -> None:
    """ "bc" is complete before "abcd", whether or not the d comes in the same token."""
    for pieces in ([b"abcd"], [b"abc", b"d"], [b"a", b"bcd"], [b"a", b"b", b"c", b"d"]):
        assert run(pieces, ("abcd", "bc"))[1].text == "a"


def test_the_longest_of_stop_strings_that_end_together() -> None:
    assert run([b"xab", b"c"], ("c", "abc", "bc"))[1].text == "x"


def test_a_stopped_stream_says_nothing_more() -> None:
    stream = TextStream({0: b"ab", 1: b"cd"}.__getitem__, ("b",))
    assert (stream.push(0), stream.push(1), stream.finish()) == ("a", "", "")
    assert stream.text == "a"
