"""The round: whatever is guessed, the text is the one of plain decoding, and the books agree."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dspark.drafters.base import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.errors import InvalidRequestError
from dspark.models.decoder import Decoder
from dspark.models.target import Segment, Target, pack
from dspark.types import Request, Stats
from tests.engine.oracle import (
    PATTERNS,
    ByteTokenizer,
    Ids,
    OracleDrafter,
    Recorder,
    ScriptedTarget,
    Spy,
    play,
    reference,
    request,
)
from tests.tiny import oracle, target

LENGTHS = (5, 1, 30, 12, 3, 41, 2, 19)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "fp32", {}),
    "qwen3": ("qwen3", "fp32", {}),
    "mistral": ("mistral", "fp32", {"sliding_window": 8}),
    "int8": ("llama", "int8", {}),
}


def prompt_of(n: int, seed: int) -> Ids:
    rng = random.Random(seed)
    return tuple(rng.randrange(257) for _ in range(n))


PROMPTS = tuple(prompt_of(n, seed) for seed, n in enumerate(LENGTHS))


@dataclass(frozen=True)
class Subject:
    """A tiny model and its plain continuation of every prompt: 200 tokens of the first, else 60."""

    target: Decoder
    texts: dict[Ids, Ids]


@pytest.fixture(params=MODELS, scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    kind, dtype, overrides = MODELS[request.param]
    model = target(oracle(kind, **overrides), dtype=dtype, num_slots=5)
    return Subject(model, {p: reference(model, p, 60 if r else 200) for r, p in enumerate(PROMPTS)})


@pytest.fixture(scope="module")
def int8() -> Subject:
    model = target(dtype="int8", num_slots=8)
    return Subject(model, {p: reference(model, p, 60) for p in PROMPTS})


def engine(model: Target, drafter: Drafter, **options: Any) -> Engine:
    return Engine(model, drafter, ByteTokenizer(), **options)


def expect_plain(subject: Subject, drafter: Drafter, rows: dict[int, int], **how: Any) -> None:
    """Requests for `rows` (prompt -> tokens wanted) yield the plain text, and all of it."""
    every = how.pop("every", 0)
    requests = [request(PROMPTS[r], str(r), max_tokens=n) for r, n in rows.items()]
    played = play(engine(subject.target, drafter, **how), requests, every)
    for r, n in rows.items():
        assert played.ids(str(r)) == subject.texts[PROMPTS[r]][:n]
        assert played.outputs[str(r)].finish_reason == "length"


# -- equality --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(1, 10))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_text_is_the_plain_one(subject: Subject, block: int, pattern: str) -> None:
    """B01, B03, B46: each block length, with none, some and all guesses right, five in a batch."""
    drafter = OracleDrafter(subject.texts, block, PATTERNS[pattern])
    expect_plain(subject, drafter, {0: 24, 1: 17, 2: 9, 3: 1, 4: 30})


def test_plain_decoding_is_the_reference(subject: Subject) -> None:
    """The drafter `none` runs the same path, with empty blocks."""
    expect_plain(subject, NoDrafter(subject.target), dict.fromkeys(range(8), 40))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_200_tokens(subject: Subject, pattern: str) -> None:
    """B01: drift needs time; alone, so that nothing else hides it. B26: far across the window."""
    for block in (5, 7):
        expect_plain(subject, OracleDrafter(subject.texts, block, PATTERNS[pattern]), {0: 200})


@pytest.mark.parametrize("batch", range(1, 6))
@pytest.mark.parametrize("every", [0, 1, 3])
def test_staggered_arrivals(subject: Subject, batch: int, every: int) -> None:
    """B31: requests join and leave rounds of others at all stages."""
    drafter = OracleDrafter(subject.texts, 4, PATTERNS["some"])
    wanted = {r: 12 + 5 * (r % 3) for r in range(batch)}
    expect_plain(subject, drafter, wanted, every=every, prefill_chunk=7)


@pytest.mark.parametrize("seed", range(4))
def test_random_accepts_with_more_requests_than_slots(subject: Subject, seed: int) -> None:
    """B01, B26, B31: eight requests over five slots, each slot used again, accepts at random."""
    rng = random.Random(seed)
    table = [[rng.randrange(7) for _ in range(60)] for _ in PROMPTS]
    drafter = OracleDrafter(subject.texts, 5, lambda n, row: table[row][n])
    wanted = {r: rng.randrange(1, 41) for r in range(8)}
    expect_plain(subject, drafter, wanted, every=seed % 3)


def test_window_is_crossed_in_mid_block() -> None:
    """B26: window 8, prompt 5: each block offset against the crossing, with rejects and without."""
    model = target(oracle("mistral", sliding_window=8))
    subject = Subject(model, {PROMPTS[0]: reference(model, PROMPTS[0], 40)})
    for block, right in itertools.product(range(1, 8), range(4)):
        drafter = OracleDrafter(subject.texts, block, lambda n, row, right=right: right)
        expect_plain(subject, drafter, {0: 40})


@pytest.mark.parametrize("block", [1, 5])
def test_a_wrong_first_guess_is_never_taken(subject: Subject, block: int) -> None:
    """B03: only slot 0 is wrong; the verifier must look at the logits before it."""
    text = subject.texts[PROMPTS[0]]
    drafter = OracleDrafter(subject.texts, block, PATTERNS["none"])
    played = play(engine(subject.target, drafter), [request(PROMPTS[0], max_tokens=10)])
    assert played.ids("r") == text[:10]
    assert all(r.accepted == 0 and len(r.emitted) == 1 for r in played.rounds["r"])
    assert not any(c.drafted for c in played.chunks["r"])


def test_every_right_guess_is_taken(subject: Subject) -> None:
    """B27: a drafter that knows the text is accepted in full, to the last token."""
    drafter = OracleDrafter(subject.texts, 6)
    played = play(engine(subject.target, drafter), [request(PROMPTS[2], max_tokens=50)])
    assert all(r.accepted == r.verified for r in played.rounds["r"])
    assert [len(r.emitted) for r in played.rounds["r"]] == [7] * 7
    drafted = [c.drafted for c in played.chunks["r"]]
    assert drafted == [False, *([True] * 6 + [False]) * 7]


# -- isolation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("name", ["oracle", "ngram"])
def test_company_changes_neither_text_nor_acceptance(int8: Subject, every: int, name: str) -> None:
    """B31: eight prompts at once, one of them long: text and rounds of each are those alone."""
    long = prompt_of(20, 99) * 6
    texts = {**int8.texts, long: reference(int8.target, long, 60)}

    def drafter() -> Drafter:
        if name == "ngram":
            return NgramDrafter(int8.target)
        return OracleDrafter(texts, 5, PATTERNS["some"])

    requests = [
        request(p, str(r), max_tokens=40) for r, p in enumerate([long, *PROMPTS[:3], *PROMPTS[4:]])
    ]
    together = play(engine(int8.target, drafter(), prefill_chunk=16), requests, every)
    for r in requests:
        alone = play(engine(int8.target, drafter()), [r])
        assert together.ids(r.id) == alone.ids(r.id) == texts[r.prompt_ids][:40]
        assert together.shares(r.id) == alone.shares(r.id)


def test_requests_enter_in_order_of_arrival() -> None:
    model = ScriptedTarget(b"abcdefgh", 1, num_slots=1)
    played = engine(model, NoDrafter(model))
    for n in range(3):
        played.submit(request([n], str(n), max_tokens=3))
    order = [c.request_id for _ in range(20) for c in played.step()]
    assert order == ["0"] * 3 + ["1"] * 3 + ["2"] * 3


# -- what a pass holds -----------------------------------------------------------------------------


def test_a_pass_holds_anchors_drafts_and_prompt_chunk_only(int8: Subject) -> None:
    """B50: no padding and no row that nobody asked for; logits only where a token is judged."""
    spy = Spy(int8.target)
    recorder = Recorder(OracleDrafter(int8.texts, 5, PATTERNS["some"]))
    requests = [request(p, str(r), max_tokens=20) for r, p in enumerate(PROMPTS)]
    play(engine(spy, recorder, prefill_chunk=10), requests, 2)
    assert len(spy.batches) == len(recorder.passes)
    for batch, committed in zip(spy.batches, recorder.passes, strict=True):
        prompt_rows = [len(c.tokens) for c in committed if c.verified is None]
        verify_rows = [c.verified + 1 for c in committed if c.verified is not None]
        assert batch.num_tokens == sum(prompt_rows) + sum(verify_rows)
        assert batch.num_sequences == len(committed)
        assert sum(prompt_rows) <= 10
        # An anchor is always one token: at most one logit row for each prompt that ended.
        assert 0 <= len(batch.logit_rows) - sum(verify_rows) <= len(prompt_rows)


@pytest.mark.parametrize("chunk", [100, 32, 1])
def test_prompt_chunks_change_nothing(int8: Subject, chunk: int) -> None:
    """B34: the drafter sees every position of a long prompt, and the same features."""
    prompt = prompt_of(100, 5)
    text = reference(int8.target, prompt, 12)
    recorder = Recorder(OracleDrafter({prompt: text}, 3, PATTERNS["some"]), (-1, 1))
    spy = Spy(int8.target)
    played = play(engine(spy, recorder, prefill_chunk=chunk), [request(prompt, max_tokens=12)])
    assert played.ids("r") == text
    assert [b.num_tokens for b in spy.batches[:-1]][: 100 // chunk] == [chunk] * (100 // chunk)
    heard = recorder.of(prompt)
    whole = (*prompt, *text)[: len(heard.tokens)]
    fresh = int8.target.forward(pack([Segment(7, 0, whole, 1)]), (-1, 1)).features
    assert torch.equal(torch.cat(heard.features), fresh)


@pytest.mark.parametrize("length", [1, 5, 50, 230])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_drafter_hears_of_every_position_once(int8: Subject, length: int, pattern: str) -> None:
    """B27, B39: committed rows are contiguous, also behind rejects, and carry the right features.

    `Recorder` checks starts and anchors; here the features are compared with one fresh pass.
    """
    prompt = prompt_of(length, length)
    text = reference(int8.target, prompt, 20)
    recorder = Recorder(OracleDrafter({prompt: text}, 4, PATTERNS[pattern]), (0, 2))
    play(engine(int8.target, recorder, prefill_chunk=64), [request(prompt, max_tokens=20)])
    heard = recorder.of(prompt)
    assert heard.tokens == [*prompt, *text[:-1]]
    fresh = int8.target.forward(pack([Segment(7, 0, tuple(heard.tokens), 1)]), (0, 2)).features
    assert torch.equal(torch.cat(heard.features), fresh)


def test_features_behind_rejects_in_fp32(subject: Subject) -> None:
    """B27: the same in a full batch; fp32 to rounding."""
    recorder = Recorder(OracleDrafter(subject.texts, 4, PATTERNS["some"]), (-1, 2))
    requests = [request(p, str(r), max_tokens=16) for r, p in enumerate(PROMPTS)]
    play(engine(subject.target, recorder, prefill_chunk=9), requests, 1)
    for prompt in PROMPTS:
        heard = recorder.of(prompt)
        fresh = subject.target.forward(pack([Segment(4, 0, tuple(heard.tokens), 1)]), (-1, 2))
        torch.testing.assert_close(torch.cat(heard.features), fresh.features, atol=2e-4, rtol=1e-3)


# -- books -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block", [0, 1, 7])
def test_emitted_tokens_add_up(int8: Subject, pattern: str, block: int) -> None:
    """B22, B23: the first token and the rounds' tokens are the text; no rate leaves 0..1."""
    drafter = OracleDrafter(int8.texts, block, PATTERNS[pattern])
    requests = [request(p, str(r), max_tokens=10 + r) for r, p in enumerate(PROMPTS)]
    played = play(engine(int8.target, drafter), requests)
    for r in requests:
        out, rounds = played.outputs[r.id], played.rounds[r.id]
        st = out.stats
        assert st.requests == 1
        assert st.prompt_tokens == len(r.prompt_ids)
        assert st.completion_tokens == len(out.token_ids) == r.params.max_tokens
        assert 1 + sum(len(x.emitted) for x in rounds) == st.completion_tokens
        assert out.token_ids[1:] == tuple(t for x in rounds for t in x.emitted)
        assert st.round_tokens == st.completion_tokens - 1 and st.rounds == len(rounds)
        assert [x.index for x in rounds] == list(range(len(rounds)))
        for x in rounds:
            assert x.accepted <= x.verified <= len(x.drafted)
            assert x.emitted[: x.accepted] == x.drafted[: x.accepted]
        assert st.accepted == sum(c.drafted for c in played.chunks[r.id])
        if block:
            assert st.acceptance_rate is not None and 0 <= st.acceptance_rate <= 1
        else:
            assert st.acceptance_rate is None and st.accepted_length == 1
    total = Stats.total([o.stats for o in played.outputs.values()])
    assert total.completion_tokens == sum(len(o.token_ids) for o in played.outputs.values())


def test_acceptance_by_position(int8: Subject) -> None:
    """B23: position 0 counts, and each position has its own denominator."""
    prompt = PROMPTS[0]
    accepts = [0, 1, 2, 3, 3, 2, 3]  # of blocks of 3; each round emits one more
    drafter = OracleDrafter(int8.texts, 3, lambda n, row: accepts[n])
    wanted = 1 + sum(accepts) + len(accepts)
    st = play(engine(int8.target, drafter), [request(prompt, max_tokens=wanted)]).outputs["r"].stats
    assert st.rounds == 7
    assert st.verified_at == [7, 7, 7]
    assert st.accepted_at == [6, 5, 3]
    assert st.acceptance_by_position == [6 / 7, 5 / 6, 3 / 5]
    assert st.acceptance_rate == 14 / 21
    assert st.accepted_length == (14 + 7) / 7


def test_acceptance_with_the_end_of_text_in_a_block() -> None:
    """B22, B23: what was accepted behind an end of text was never emitted and is not counted."""
    text = [*b"abcd", 256, *b"efgh"]
    model = ScriptedTarget(text, 1)
    engine_ = Engine(model, OracleDrafter({(0,): text}, 7), ByteTokenizer((256,)))
    out = play(engine_, [request([0])]).outputs["r"]
    assert out.token_ids == tuple(text[:5])
    st = out.stats
    assert (st.rounds, st.verified, st.accepted, st.round_tokens) == (1, 7, 4, 4)
    assert st.completion_tokens == 5
    assert st.accepted_length == 4


def test_times_are_of_this_request(int8: Subject) -> None:
    """B23: the parts of a round are not negative and add up over the rounds."""
    played = play(
        engine(int8.target, OracleDrafter(int8.texts, 3, PATTERNS["some"])),
        [request(PROMPTS[5], max_tokens=20)],
    )
    st = played.outputs["r"].stats
    parts = [(r.draft_ms, r.verify_ms, r.other_ms) for r in played.rounds["r"]]
    assert min(min(p) for p in parts) >= 0
    assert sum(p[1] for p in parts) == pytest.approx(st.verify_ms)
    assert min(st.prefill_ms, st.ttft_ms, st.decode_ms) > 0
    assert st.tokens_per_second == pytest.approx(19 / st.decode_ms * 1e3)


def test_a_request_of_one_token_has_no_rounds(int8: Subject) -> None:
    """B23: no division by nothing."""
    drafter = OracleDrafter(int8.texts, 5)
    st = play(engine(int8.target, drafter), [request(PROMPTS[0], max_tokens=1)]).outputs["r"].stats
    assert (st.rounds, st.completion_tokens, st.decode_ms) == (0, 1, 0.0)
    assert st.acceptance_rate is st.accepted_length is st.tokens_per_second is st.itl_ms is None
    assert st.acceptance_by_position == []


# -- refusals --------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Request], str]] = {
    "empty prompt": (lambda: request([]), "empty"),
    "too long": (lambda: request([1] * 32), "32 tokens and the context holds 32"),
    "id too large": (lambda: request([257]), "outside 0..256"),
    "negative id": (lambda: request([-1]), "outside 0..256"),
    "stop token": (lambda: request([1], stop_token_ids=(300,)), "stop_token_ids"),
    "bias": (lambda: request([1], logit_bias={300: 1.0}), "logit_bias"),
}


@pytest.mark.parametrize("name", BAD)
def test_requests_that_cannot_be_served_are_refused_at_once(name: str) -> None:
    make, message = BAD[name]
    model = ScriptedTarget(b"abc", 1, max_context=32)
    e = engine(model, NoDrafter(model))
    with pytest.raises(InvalidRequestError, match=message):
        e.submit(make())
    assert not e.has_work and e.step() == []


def test_an_id_is_free_again_once_its_output_is_taken() -> None:
    model = ScriptedTarget(b"abc", 1)
    e = engine(model, NoDrafter(model))
    e.submit(request([1], max_tokens=2))
    with pytest.raises(InvalidRequestError, match="already here"):
        e.submit(request([1]))
    while e.has_work:
        assert e.take_output("r") is None
        e.step()
    assert e.take_output("r") is not None
    e.submit(request([1]))


# -- bf16 ------------------------------------------------------------------------------------------


def bf16_ulp(x: float) -> float:
    """Distance between neighbouring bf16 numbers at |x|: eight significant bits."""
    return float(2.0 ** (torch.tensor(abs(x)).log2().floor().item() - 7))


def test_bf16_differs_at_near_ties_only() -> None:
    """B02, T6: the first divergence, replayed one token a pass, lies within 2 ulp of the top."""
    model = target(oracle("qwen3", vocab_size=8192), dtype="bf16", num_slots=2)
    flips, n = [], 48
    for seed in range(2, 6):
        prompt = prompt_of(8, seed)
        plain = reference(model, prompt, n)
        for name, pattern in PATTERNS.items():
            drafter = OracleDrafter({prompt: plain}, 7, pattern, 8192)
            got = play(engine(model, drafter), [request(prompt, max_tokens=n)]).ids("r")
            differ = [i for i in range(n) if got[i] != plain[i]]
            if differ:
                top, gap = replayed_gap(model, prompt, plain[: differ[0]], got[differ[0]])
                flips.append((seed, name, differ[0], gap))
                assert gap <= 2 * bf16_ulp(top), flips[-1]
    print(f"bf16 flips (seed, accepted, token, gap): {flips}")


def replayed_gap(model: Decoder, prompt: Ids, text: Ids, token: int) -> tuple[float, float]:
    """The highest logit behind prompt and text, one token a pass, and how far `token` is below."""
    slot, ids = model.num_slots - 1, (*prompt, *text)
    logits = model.forward(pack([Segment(slot, 0, prompt, 1)])).logits[0]
    for at in range(len(prompt), len(ids)):
        logits = model.forward(pack([Segment(slot, at, ids[at : at + 1], 1)])).logits[0]
    return float(logits.max()), float(logits.max() - logits[token])
