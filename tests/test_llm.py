"""`LLM` over the default model: the three verbs agree, drafting changes nothing, errors are clear.

SmolLM2-135M in int8, loaded once. Here the promise of the whole project is checked on real text:
token for token the same with a drafter and without.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dspark
from dspark import LLM, Chunk, Output, SamplingParams
from dspark.bench.prompts import BUILTIN, load_prompts
from dspark.engine.choice import calibration_in
from dspark.engine.profile import Costs
from dspark.errors import (
    CheckpointError,
    ConfigError,
    DSparkError,
    InvalidRequestError,
    ResourceError,
)
from dspark.schedule.calibration import Calibration
from dspark.schedule.cost import CostTable
from dspark.types import Round

CONTEXT = 768
"""The longest built-in prompt has 636 tokens."""
MESSAGES = [{"role": "user", "content": "Repeat three times: the quick brown fox"}]
SHORT = SamplingParams(max_tokens=32)


@pytest.fixture(scope="module")
def loaded() -> LLM:
    return LLM(max_users=4, max_context=CONTEXT)


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    """The shared model with its default drafter, and idle."""
    loaded.set_drafter("auto")
    yield loaded
    loaded.set_drafter("auto")  # raises if a test left a stream open


def same(a: Output, b: Output) -> bool:
    return (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)


# -- the verbs -------------------------------------------------------------------------------------


def test_chat_generate_and_stream_agree(llm: LLM) -> None:
    """B20, B22: one text, one set of numbers, whoever asks."""
    ids = llm.encode_prompt(MESSAGES)
    chat = llm.chat(MESSAGES, SHORT)
    (generated,) = llm.generate([ids], SHORT)
    rounds: list[Round] = []
    chunks: list[Chunk] = list(llm.stream(MESSAGES, SHORT, rounds.append))
    streamed = llm.last_output
    assert streamed is not None
    assert same(chat, generated) and same(chat, streamed)
    assert chat.prompt_ids == generated.prompt_ids == streamed.prompt_ids == ids
    assert "".join(c.text for c in chunks) == chat.text != ""
    assert tuple(c.token for c in chunks) == chat.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == chat.finish_reason
    # The rounds say which tokens were guessed, and so do the chunks.
    drafted = [i < r.accepted for r in rounds for i in range(len(r.emitted))]
    assert [c.drafted for c in chunks] == [False, *drafted]
    assert any(drafted)
    for output in (chat, generated, streamed):
        st = output.stats
        assert st.completion_tokens == len(output.token_ids)
        assert (st.rounds, st.accepted) == (len(rounds), sum(drafted))


def test_the_text_is_what_the_tokenizer_says(llm: LLM) -> None:
    output = llm.chat(MESSAGES, SHORT)
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_raw_text_and_its_ids_are_one_prompt(llm: LLM) -> None:
    text = "The capital of France is"
    by_text, by_ids = llm.generate([text, llm.encode_prompt(text, raw=True)], SHORT)
    assert same(by_text, by_ids)
    assert same(llm.generate(text, SHORT)[0], by_text)
    assert "Paris" in by_text.text


def test_outputs_keep_the_order_of_the_prompts(llm: LLM) -> None:
    """B31: more prompts than slots, each with its own parameters; each as if alone."""
    prompts = [f"Count from {n} to {n + 3}: {n}, {n + 1}," for n in range(6)]
    params = [SamplingParams(max_tokens=4 + 3 * n) for n in range(6)]
    outputs = llm.generate(prompts, params)
    assert [len(o.token_ids) for o in outputs] == [p.max_tokens for p in params]
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert same(llm.generate(prompt, p)[0], output)


def test_nothing_to_generate(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_log_probabilities_come_when_asked_for(llm: LLM) -> None:
    output = llm.chat(MESSAGES, SamplingParams(max_tokens=5, logprobs=2))
    assert output.logprobs is not None
    assert [x.token for x in output.logprobs] == list(output.token_ids)
    assert all(x.top[0] == (x.token, x.logprob) for x in output.logprobs)
    assert llm.chat(MESSAGES, SHORT).logprobs is None


def test_a_stop_string(llm: LLM) -> None:
    """B20 over a real vocabulary, whose tokens are longer than letters."""
    whole = llm.chat(MESSAGES, SHORT).text
    stop = whole[len(whole) // 2 :][:3]
    cut = llm.chat(MESSAGES, SamplingParams(max_tokens=32, stop=(stop,)))
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_completions_read_requests_as_slots_come_free(llm: LLM) -> None:
    """Each text as if alone, by number; never more requests taken than slots were free."""
    prompts = [llm.encode_prompt(f"Name {n} colours.") for n in range(9)]
    params = [SamplingParams(max_tokens=3 + 5 * (n % 4)) for n in range(9)]
    taken: list[int] = []
    finished: dict[int, Output] = {}

    def requests() -> Iterator[tuple[tuple[int, ...], SamplingParams]]:
        for n, pair in enumerate(zip(prompts, params, strict=True)):
            taken.append(n)
            assert len(taken) - len(finished) <= llm.target.num_slots
            yield pair

    for number, output in llm.completions(requests()):
        assert number not in finished
        finished[number] = output
    assert sorted(finished) == taken == list(range(9))
    assert list(finished) != sorted(finished)  # short texts did not wait for long ones
    for n, output in finished.items():
        assert same(llm.generate([prompts[n]], params[n])[0], output)
    assert list(llm.completions([])) == []


def test_completions_closed_early_or_refused_leave_nothing_behind(llm: LLM) -> None:
    stream = llm.completions((MESSAGES, SamplingParams(max_tokens=2 + n)) for n in range(99))
    assert next(stream)[0] == 0
    with pytest.raises(ResourceError, match="still open"):
        llm.generate("x", SHORT)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        list(llm.completions([("good", SHORT), ((), SHORT)]))
    assert len(llm.generate(["a"] * 4, SamplingParams(max_tokens=2))) == 4


# -- the promise -----------------------------------------------------------------------------------


def check_equal(llm: LLM, sources: list[str], limit: int | None, max_tokens: int) -> None:
    """The drafters none and ngram yield the same ids, and ngram has really drafted."""
    prompts = [llm.encode_prompt(p) for p in load_prompts(sources, limit).prompts]
    params = SamplingParams(max_tokens=max_tokens)
    llm.set_drafter("ngram")
    fast = llm.generate(prompts, params)
    llm.set_drafter("none")
    plain = llm.generate(prompts, params)
    assert sum(o.stats.accepted for o in fast) > 0
    assert sum(o.stats.drafted for o in plain) == 0
    for a, b in zip(fast, plain, strict=True):
        assert same(a, b)


def test_prompt_lookup_changes_no_token(llm: LLM) -> None:
    """B01: 128 tokens of one prompt of each kind, four in a batch, against plain decoding."""
    check_equal(llm, [f"builtin:{kind}" for kind in BUILTIN], 1, 128)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILTIN)
def test_prompt_lookup_changes_no_token_of_the_builtin_prompts(llm: LLM, kind: str) -> None:
    """B01: all of them with fewer tokens each; of the long ones two, as reading takes a while."""
    check_equal(llm, [f"builtin:{kind}"], 2 if kind == "summarise" else None, 40)


def test_a_seeded_text_is_that_of_plain_decoding(llm: LLM) -> None:
    """B08, B09: prompt lookup is a deterministic guess and takes no random number."""
    params = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9, seed=7)
    fast = llm.chat(MESSAGES, params)
    assert same(llm.chat(MESSAGES, params), fast)
    llm.set_drafter("none")
    assert same(llm.chat(MESSAGES, params), fast)


# -- errors ----------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[LLM], Any], type[DSparkError], str]] = {
    "long prompt": (
        lambda llm: llm.generate([[1] * CONTEXT]),
        InvalidRequestError,
        f"{CONTEXT} tokens and the context holds {CONTEXT}",
    ),
    "empty text": (lambda llm: llm.generate(""), InvalidRequestError, "prompt is empty"),
    "empty ids": (lambda llm: llm.generate([[]]), InvalidRequestError, "prompt is empty"),
    "empty stream": (lambda llm: list(llm.stream("")), InvalidRequestError, "prompt is empty"),
    "one list of ids": (
        lambda llm: llm.generate((1, 2, 3)),
        InvalidRequestError,
        "one list of token ids",
    ),
    "foreign id": (lambda llm: llm.generate([[10**6]]), InvalidRequestError, "outside 0.."),
    "message without role": (
        lambda llm: llm.chat([{"content": "hello"}]),
        InvalidRequestError,
        "needs role and content",
    ),
    "params count": (
        lambda llm: llm.generate(["a", "b"], [SHORT]),
        InvalidRequestError,
        "2 prompts were given with 1 params",
    ),
    "drafter": (lambda llm: llm.set_drafter("ngrams"), ConfigError, "unknown drafter 'ngrams'"),
    "drafts": (lambda llm: llm.set_drafter("ngram", -1), ConfigError, "num_draft_tokens=-1"),
    "dtype": (lambda llm: LLM(dtype="fp8"), ConfigError, "unknown dtype 'fp8'"),
    "device": (lambda llm: LLM(device="toaster"), ConfigError, "unknown device 'toaster'"),
    "threads": (lambda llm: LLM(threads=0), ConfigError, "threads=0"),
    "users": (lambda llm: LLM(max_users=0), ConfigError, "max_users=0"),
    "context": (lambda llm: LLM(max_context=10**7), ConfigError, "max_context=10000000"),
    "model": (lambda llm: LLM("no-such-model"), CheckpointError, "no model 'no-such-model'"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_one_clear_line_and_leave_the_model_usable(llm: LLM, name: str) -> None:
    act, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        act(llm)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(llm.chat(MESSAGES, SamplingParams(max_tokens=2)).token_ids) == 2


def test_one_bad_prompt_of_many_leaves_no_request_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(["good", ""], SHORT)
    assert len(llm.generate("good", SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_closing_a_stream_early_frees_its_slot(llm: LLM) -> None:
    """B29: more often than there are slots; the output says how far it came."""
    for _ in range(6):
        stream = llm.stream(MESSAGES, SHORT)
        first = next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.last_output is not None
        assert llm.last_output.finish_reason == "cancelled"
        assert llm.last_output.token_ids[0] == first.token
    assert len(llm.generate(["a"] * 4, SamplingParams(max_tokens=2))) == 4


def test_an_open_stream_keeps_its_chunks_to_itself(llm: LLM) -> None:
    """B31: others are refused with a reason instead of swallowing them."""
    expected = llm.chat(MESSAGES, SHORT)
    stream = llm.stream(MESSAGES, SHORT)
    chunks = [next(stream)]
    for act in (
        lambda: llm.generate("x", SHORT),
        lambda: llm.chat(MESSAGES),
        lambda: next(llm.stream("x")),
        lambda: llm.set_drafter("none"),
    ):
        with pytest.raises(ResourceError, match="still open"):
            act()
        chunks.append(next(stream))
    chunks += stream
    assert tuple(c.token for c in chunks) == expected.token_ids
    assert llm.last_output is not None and same(llm.last_output, expected)


def test_another_drafter_can_be_set_and_a_bad_one_changes_nothing(llm: LLM) -> None:
    """B47: what runs has a name and a reason."""
    assert llm.drafter_name == "dspark" and "trained for smollm2" in llm.drafter_reason
    llm.set_drafter("none")
    with pytest.raises(ConfigError):
        llm.set_drafter("nope")
    assert (llm.drafter_name, llm.drafter_reason) == ("none", "as asked")
    assert llm.chat(MESSAGES, SHORT).stats.drafted == 0


@pytest.mark.parametrize(
    ("row_ms", "name", "why"),
    [(0.1, "dspark", "times plain expected here"), (9.0, "ngram", "dspark would reach 0.6")],
)
def test_auto_weighs_acceptance_against_costs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, row_ms: float, name: str, why: str
) -> None:
    """A row that costs nearly a pass lets no drafter pay; prompt lookup then costs nothing."""
    passes = [(rows, 64.0, 10 + row_ms * (rows - 1)) for rows in (1, 2, 4, 8) for _ in range(3)]
    table = CostTable.fit({}, passes, [(1, 5, 1.0)] * 3, [(1, 0.5)] * 3)
    monkeypatch.setattr(llm, "_measured", lambda key: Costs(table, "made up"))
    llm.set_drafter("auto", verify="all")
    assert llm.drafter_name == name and why in llm.drafter_reason


def test_a_calibration_beside_the_weights_is_found(tmp_path: Path) -> None:
    assert calibration_in(None) is None and calibration_in(tmp_path) is None
    Calibration((2.0, 1.5)).save(tmp_path / "calibration.json")
    assert calibration_in(tmp_path) == Calibration((2.0, 1.5))


def test_ways_to_verify(llm: LLM) -> None:
    """Without measured costs nothing claims to adapt, and says why."""
    llm.set_drafter("ngram", verify="lagged")
    assert llm.verify == "lagged" and "DSPARK_NO_PROFILE" in llm.verify_reason
    assert not llm.engine.scheduler.adapts
    llm.set_drafter("ngram", verify="static:1")
    assert max(llm.chat(MESSAGES, SHORT).stats.verified_at) > 0
    assert len(llm.chat(MESSAGES, SHORT).stats.verified_at) == 1
    with pytest.raises(ConfigError, match="unknown way to verify"):
        llm.set_drafter("ngram", verify="sometimes")
    assert llm.verify == "static:1"


# -- the public surface ----------------------------------------------------------------------------


def test_importing_the_package_is_cheap() -> None:
    """The seconds of `import torch` come with the first name that needs it."""
    code = (
        "import sys, dspark; assert 'torch' not in sys.modules; dspark.SamplingParams;"
        "assert 'torch' not in sys.modules; from dspark import LLM; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_resolves() -> None:
    names = dspark.__all__
    # Abbreviations, then classes, then the rest: the order that ruff keeps (RUF022).
    assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(dspark, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        dspark.nope  # noqa: B018


def test_a_drafter_that_sizes_its_drafts_is_not_cut_again() -> None:
    """Prompt lookup weighs lengths itself; a second cut by costs lost most of a repeating text."""
    llm = LLM(max_users=1, max_context=256)
    llm.set_drafter("ngram")
    assert llm.verify == "all"
    llm.set_drafter("ngram", verify="causal")
    assert llm.verify == "causal"
