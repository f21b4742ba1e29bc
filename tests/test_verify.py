"""accept(): constant logits, the maths by enumeration, and the law of what is emitted.

The law is checked three ways: analytically (`accept` is asked for its acceptance and residual, and
the emitted law is added up), by chi-square against a reference written here from the definitions in
float64, and by showing that the same chi-square catches two verifiers that are wrong on purpose.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dspark import verify
from dspark.sampling import argmax, distribution, draw, process_logits, streams
from dspark.types import Draft, SamplingParams, Verdict
from dspark.verify import accept

torch.set_num_threads(1)

V = 8
EOS = 7
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0)


class Scripted:
    """A stream of given uniforms that counts what was taken."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.taken = 0

    def random(self) -> float:
        self.taken += 1
        return self.values.pop(0) if self.values else 0.5


def ask(
    draft: Draft,
    logits: torch.Tensor,
    params: SamplingParams = GREEDY,
    rng: object = None,
    history: Sequence[int] = (0,),
    prompt_len: int = 1,
) -> Verdict:
    rng = streams(0)[1] if rng is None else rng
    return accept(draft, logits, params, history, prompt_len, (EOS,), rng)  # type: ignore[arg-type]


def peaks(*ids: int, size: int = V, height: float = 40.0) -> torch.Tensor:
    """Logits whose rows are all but one-hot at `ids`."""
    out = torch.zeros(len(ids), size)
    out[range(len(ids)), ids] = height
    return out


def logits_of(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).log()


# --- greedy: always, never, sometimes ---------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("right", range(6))
def test_longest_prefix_that_the_target_agrees_with(
    params: SamplingParams, k: int, right: int
) -> None:
    """Always, never and sometimes accepted; greedy is the case of one-hot p."""
    target = [1, 2, 3, 4, 5, 6][: k + 1]
    right = min(right, k)
    tokens = [*target[:right], *[(t + 1) % V for t in target[right:k]]]
    verdict = ask(Draft(tuple(tokens)), peaks(*target), params)
    assert verdict.accepted == right
    assert verdict.tokens == (*target[:right], target[right])
    assert verdict.bonus == target[right]
    assert verdict.logprobs is None


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_first_draft_token_is_checked(params: SamplingParams) -> None:
    """B03: a wrong first token is rejected, in a block of one and of five."""
    assert ask(Draft((4,)), peaks(1, 2), params).tokens == (1,)
    verdict = ask(Draft((4, 2, 3, 4, 5)), peaks(1, 2, 3, 4, 5, 6), params)
    assert (verdict.accepted, verdict.tokens) == (0, (1,))


def test_greedy_ties_go_to_the_lowest_id() -> None:
    """Facts 5."""
    tied = torch.zeros(3, V)
    tied[:, [2, 5]] = 1.0
    assert ask(Draft((2, 2)), tied).tokens == (2, 2, 2)
    assert ask(Draft((2, 5)), tied).tokens == (2, 2)


def test_greedy_ignores_q_and_takes_no_randomness() -> None:
    """Greedy decoding is the same text for every seed and every drafter."""
    rng = Scripted()
    draft = Draft((1, 3), torch.full((2, V), 1 / V))
    assert ask(draft, peaks(1, 2, 3), rng=rng).tokens == (1, 2)
    assert rng.taken == 0


# --- randomness spent -------------------------------------------------------------------------


def test_uniforms_spent() -> None:
    """B09: nothing is drawn and thrown away; an empty draft takes one, like plain decoding.

    With q: one for each tested token and one for the target's own. Without: one an emitted token.
    """
    target = peaks(1, 2, 3, 4)
    for tokens, tested in (((1, 2, 3), 3), ((1, 5, 3), 2), ((6, 2, 3), 1), ((), 0)):
        q = torch.full((len(tokens), V), 1 / V)
        rng = Scripted()
        ask(Draft(tokens, q), target[: len(tokens) + 1], SAMPLED, rng)
        assert rng.taken == tested + 1
        rng = Scripted()
        verdict = ask(Draft(tokens), target[: len(tokens) + 1], SAMPLED, rng)
        assert rng.taken == len(verdict.tokens)


def test_seeded_text_of_certain_guesses_is_plain_decodings() -> None:
    """Whatever is guessed and however much of it: the same seed gives the same tokens."""
    rows = torch.randn(200, V, generator=torch.Generator().manual_seed(1))

    def text(lengths: Sequence[int]) -> list[int]:
        rng, out, i = np.random.default_rng(5), [0], 0
        while len(out) < 150:
            k = lengths[i % len(lengths)]
            draft = Draft(tuple(int(t) for t in rows[len(out) : len(out) + k].argmax(-1)))
            out += ask(draft, rows[len(out) : len(out) + k + 1], SAMPLED, rng).tokens
            i += 1
        return out[:150]

    plain = text([0])
    assert text([3]) == plain
    assert text([7, 0, 1]) == plain


def test_same_seed_same_verdict() -> None:
    """B08: eight seeds give different texts, each of them every time."""
    logits = torch.zeros(4, 64)
    draft = Draft((1, 2, 3), torch.full((3, 64), 1 / 64))

    def text(seed: int) -> tuple[int, ...]:
        _, rng = streams(seed)
        return tuple(t for _ in range(3) for t in ask(draft, logits, SAMPLED, rng).tokens)

    texts = [text(s) for s in range(8)]
    assert texts == [text(s) for s in range(8)]
    assert len(set(texts)) >= 6


# --- the corners ------------------------------------------------------------------------------


def test_p_equal_q_accepts_always() -> None:
    """B06: even the largest uniform below 1."""
    p = torch.softmax(torch.randn(1, V, generator=torch.Generator().manual_seed(3)), -1)
    logits = torch.cat([p.log(), peaks(4)])
    q = distribution(logits[:1], SAMPLED)
    for x in range(V):
        verdict = ask(Draft((x,), q), logits, SAMPLED, Scripted(math.nextafter(1, 0)))
        assert verdict.tokens == (x, 4)


def test_no_residual_left_by_rounding_falls_back_to_p() -> None:
    """B06: q exceeds p at x by an ulp and equals it elsewhere; the residual is all zero."""
    logits = torch.cat([logits_of([0.5, 0.5, 0, 0, 0, 0, 0, 0]), peaks(4)])
    q = distribution(logits[:1], SAMPLED).clone()
    q[0, 0] = q[0, 0] * (1 + 1e-6)
    verdict = ask(Draft((0,), q), logits, SAMPLED, Scripted(math.nextafter(1, 0), 0.9))
    assert verdict.tokens == (1,)


def test_zero_in_q_and_zero_in_p() -> None:
    """B06: q(x) = 0 accepts what p allows; p(x) = 0 never passes, whatever q says."""
    p = [0.5, 0.5, 0, 0, 0, 0, 0, 0]
    logits = torch.cat([logits_of(p), peaks(4)])
    q = torch.tensor([[0.0, 0.5, 0.5, 0, 0, 0, 0, 0]])
    assert ask(Draft((0,), q), logits, SAMPLED, Scripted(0.999)).accepted == 1
    assert ask(Draft((2,), q), logits, SAMPLED, Scripted(0.0, 0.999)).tokens == (0,)
    assert ask(Draft((3,), q), logits, SAMPLED, Scripted(0.0, 0.0)).tokens == (0,)
    for u in (0.0, 0.999):
        assert ask(Draft((2,)), logits, SAMPLED, Scripted(0.0, u)).tokens[0] in (0, 1)


def test_one_hot_p_and_a_vocabulary_of_one() -> None:
    """B06."""
    one_hot = torch.full((2, V), -math.inf)
    one_hot[:, 3] = 0.0
    for u in (0.0, 0.5, math.nextafter(1, 0)):
        assert ask(Draft((3,)), one_hot, SAMPLED, Scripted(u, u)).tokens == (3, 3)
        assert ask(Draft((2,)), one_hot, SAMPLED, Scripted(u, u)).tokens == (3,)
        for q in (None, torch.ones(1, 1)):
            for params in (GREEDY, SAMPLED):
                verdict = ask(Draft((0,), q), torch.zeros(2, 1), params, Scripted(u, u))
                assert verdict.tokens == (0, 0)


def test_inputs_are_left_alone() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    q = torch.softmax(torch.randn(2, V, generator=torch.Generator().manual_seed(1)), -1)
    before = logits.clone(), q.clone()
    params = SamplingParams(
        temperature=0.5, top_k=4, presence_penalty=1, logit_bias={1: 2.0}, min_tokens=5, logprobs=2
    )
    for seed in range(20):
        ask(Draft((1, 2), q), logits, params, streams(seed)[1], [1, 2], 1)
    assert torch.equal(logits, before[0]) and torch.equal(q, before[1])


# --- bias, minimum, log-probabilities ---------------------------------------------------------


def test_ban_and_force_reach_every_position() -> None:
    """B12: the plain choice is banned, another one forced, at each place of the block."""
    target = peaks(1, 1, 1, height=5.0)
    for params in (SamplingParams(logit_bias={1: -100.0}), SamplingParams(logit_bias={0: 100.0})):
        assert ask(Draft((1, 1)), target, params).tokens == (0,)
        assert ask(Draft((0, 1)), target, params).tokens == (0, 0)
        assert ask(Draft((0, 0)), target, params).tokens == (0, 0, 0)


def test_end_of_text_waits_for_the_minimum_inside_a_block() -> None:
    """B14: it would be the choice at 3 and 9; with a minimum of 6 the text ends at 9."""
    table = torch.stack([peaks(EOS if i in (3, 9) else i % 5)[0] for i in range(20)])
    table[3, 6] = 20.0  # the second choice
    params = SamplingParams(min_tokens=6)

    def run(k: int, guess: Callable[[int], int]) -> list[int]:
        text: list[int] = []
        while EOS not in text:
            at = len(text)
            draft = Draft(tuple(guess(at + i) for i in range(k)))
            text += ask(draft, table[at : at + k + 1], params, None, [0, *text], 1).tokens
        return text[: text.index(EOS) + 1]

    plain = run(0, lambda i: 0)
    assert plain == [0, 1, 2, 6, 4, 0, 1, 2, 3, EOS]
    assert run(5, lambda i: plain[i] if i < len(plain) else 0) == plain
    assert run(5, lambda i: EOS if i == 3 else i % 5) == plain


def test_logprobs_belong_to_the_emitted_tokens_and_the_raw_logits() -> None:
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(5))
    raw = torch.log_softmax(logits, -1)
    params = SamplingParams(logit_bias={2: 100.0}, logprobs=3)
    verdict = ask(Draft((2, 2, 1)), logits, params)
    assert verdict.tokens == (2, 2, 2) and verdict.logprobs is not None
    assert len(verdict.logprobs) == 3
    for i, entry in enumerate(verdict.logprobs):
        assert entry.token == 2
        assert entry.logprob == pytest.approx(float(raw[i, 2]))
        assert [t for t, _ in entry.top] == torch.topk(raw[i], 3).indices.tolist()


# --- the maths, without chance ----------------------------------------------------------------

WEIGHTS = st.lists(st.sampled_from([0.0, 1e-6, 0.01, 0.3, 1.0, 2.0]), min_size=6, max_size=6)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, WEIGHTS)
def test_acceptance_and_residual_add_up_to_p(
    p_weights: list[float], q_weights: list[float]
) -> None:
    """q(x) min(1, p/q) + (1 - sum) residual(x) == p(x), with both factors as `accept` has them."""
    p_weights[2] += 0.5
    q_weights[4] += 0.5
    logits = torch.cat([logits_of(p_weights), torch.zeros(1, 6)])
    p = distribution(logits[:1], SAMPLED)[0]
    q = torch.tensor([q_weights]) / sum(q_weights)
    emitted = torch.zeros(6, dtype=torch.float64)
    residuals = []
    for x in range(6):
        if q[0, x] == 0:
            continue
        a = min(1.0, float(p[x]) / float(q[0, x]))
        emitted[x] += float(q[0, x]) * a
        if a > 0:
            assert ask(Draft((x,), q), logits, SAMPLED, Scripted(a * (1 - 1e-9))).accepted == 1
        if a < 1:
            with mock.patch.object(verify, "draw", wraps=draw) as spy:
                rng = Scripted(a * (1 + 1e-9))
                assert ask(Draft((x,), q), logits, SAMPLED, rng).accepted == 0
            residuals.append(spy.call_args.args[0].double())
    missing = 1 - emitted.sum()
    for residual in residuals:
        assert torch.isfinite(residual).all() and not residual[p == 0].any()
        total = emitted + missing * residual / residual.sum()
        assert torch.allclose(total, p.double(), atol=2e-6)


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(0, 5))
def test_a_certain_guess_is_accepted_with_its_own_probability(weights: list[float], x: int) -> None:
    """B04: over all uniforms a guess x is accepted on a share p(x); what is emitted follows p."""
    weights[2] += 0.5
    logits = torch.cat([logits_of(weights), torch.zeros(1, 6)])
    p = distribution(logits[:1], SAMPLED)[0]
    grid = [(i + 0.5) / 400 for i in range(400)]
    verdicts = [ask(Draft((x,)), logits, SAMPLED, Scripted(u)) for u in grid]
    assert sum(v.accepted for v in verdicts) / 400 == pytest.approx(float(p[x]), abs=0.004)
    emitted = Counter(v.tokens[0] for v in verdicts)
    for token in range(6):
        assert emitted[token] / 400 == pytest.approx(float(p[token]), abs=0.004)


# --- texts of a toy model ---------------------------------------------------------------------

PROMPT = (1, 2, 1)
START = (3, 4, 3)
"""Tokens already emitted: with an empty text presence and frequency would change nothing."""


def table(seed: int, spread: float) -> torch.Tensor:
    """[V, V]: next-token logits given the last token."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * spread


TARGET = table(1, 1.2)
NOISE = table(2, 1.0)
DRAFT_Q = torch.softmax(0.5 * TARGET + NOISE, -1)
"""The drafter's own opinion: related to the target's, and not the same."""
DRAFT_BEST = argmax(DRAFT_Q)
DRAFT_CUMULATIVE = DRAFT_Q.double().cumsum(1).numpy()


@cache
def target_rows(*path: int) -> torch.Tensor:
    """[len(path), V]: the target's logits behind each token of the path."""
    return TARGET[list(path)]


@cache
def drafted(last: int, tokens: tuple[int, ...], certain: bool) -> Draft:
    return Draft(tokens, None if certain else DRAFT_Q[[last, *tokens[:-1]]])


def sampled_draft(last: int, k: int, rng: np.random.Generator) -> Draft:
    tokens: tuple[int, ...] = ()
    for u in rng.random(k):
        row = DRAFT_CUMULATIVE[tokens[-1] if tokens else last]
        tokens += (min(int(row.searchsorted(u, side="right")), V - 1),)
    return drafted(last, tokens, False)


def argmax_draft(last: int, k: int, rng: np.random.Generator) -> Draft:
    tokens: tuple[int, ...] = ()
    for _ in range(k):
        tokens += (DRAFT_BEST[tokens[-1] if tokens else last],)
    return drafted(last, tokens, True)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        SamplingParams,
        presence_penalty=st.sampled_from([0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.6]),
        repetition_penalty=st.sampled_from([1.0, 1.4]),
        min_tokens=st.integers(0, 12),
        logit_bias=st.sampled_from([{}, {3: -100.0}, {5: 2.0}]),
    ),
    st.integers(0, 1000),
)
def test_greedy_text_is_the_plain_one_under_every_processor(
    params: SamplingParams, seed: int
) -> None:
    """B12, B14: blocks of random lengths and random guesses change nothing."""
    rng = np.random.default_rng(seed)
    logits = table(seed, 2.0)

    def run(lengths: Callable[[], int]) -> list[int]:
        text: list[int] = []
        while len(text) < 24:
            history = [*PROMPT, *text]
            guess, last = [], history[-1]
            for _ in range(lengths()):
                last = int(logits[last].argmax()) if rng.random() < 0.7 else int(rng.integers(V))
                guess.append(last)
            rows = logits[[history[-1], *guess]]
            text += ask(Draft(tuple(guess)), rows, params, None, history, len(PROMPT)).tokens
        return text[:24]

    plain = run(lambda: 0)
    for _ in range(3):
        assert run(lambda: int(rng.integers(6))) == plain


# --- the law ----------------------------------------------------------------------------------


def reference(row: Sequence[float], params: SamplingParams, text: Sequence[int]) -> np.ndarray:
    """The law of the next token, word by word from `SamplingParams`, in float64."""
    z = np.array(row, dtype=np.float64)
    for i, bias in params.logit_bias.items():
        z[i] = -np.inf if bias <= -100 else z[i] + bias
    for i in {*PROMPT, *text}:
        r = params.repetition_penalty
        z[i] = z[i] / r if z[i] > 0 else z[i] * r
    for i, n in Counter(text).items():
        z[i] -= params.frequency_penalty * n + params.presence_penalty
    if len(text) < params.min_tokens:
        z[[EOS, *params.stop_token_ids]] = -np.inf
    w = np.exp((z - z.max()) / params.temperature)
    p = w / w.sum()
    order = sorted(range(V), key=lambda i: (-z[i], i))
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    reached = 0.0
    for i in order:
        if reached >= params.top_p:
            p[i] = 0
        reached += p[i]
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def joint_law(params: SamplingParams, n: int) -> np.ndarray:
    """[V ** n]: the probability of the next n tokens behind START under plain decoding."""
    law = np.ones(1)
    for i in range(n):
        rows = [
            reference(TARGET[(*START, *text)[-1]].tolist(), params, (*START, *text))
            for text in itertools.product(range(V), repeat=i)
        ]
        law = (law[:, None] * np.stack(rows)).ravel()
    return law


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """(statistic, 0.1 % critical value); cells that expect fewer than 5 are one cell."""
    expected = law / law.sum() * counts.sum()
    assert not counts[law < 1e-12].any(), "a token of probability zero was emitted"
    big = expected >= 5
    seen = np.append(counts[big], counts[~big].sum())
    due = np.append(expected[big], expected[~big].sum())
    seen, due = seen[due > 0.5], due[due > 0.5]
    return float(((seen - due) ** 2 / due).sum()), float(stats.chi2.isf(1e-3, max(len(due) - 1, 1)))


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`accept` remembers laws it has computed: the toy model asks for the same few again and again.

    One fixture, one SamplingParams. Both stages are pure functions of what the keys hold, so
    nothing but time changes.
    """
    stage_one: dict[object, torch.Tensor] = {}
    stage_two: dict[int, torch.Tensor] = {}

    def process(
        logits: torch.Tensor,
        params: SamplingParams,
        history: Sequence[int],
        prompt_len: int,
        draft: Sequence[int],
        eos_ids: Sequence[int],
    ) -> torch.Tensor:
        key = (tuple(history), tuple(draft))
        if key not in stage_one:
            stage_one[key] = process_logits(logits, params, history, prompt_len, draft, eos_ids)
        return stage_one[key]

    def law(processed: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        key = processed.data_ptr()  # a view of what stage one keeps alive, or of TARGET's rows
        if key not in stage_two:
            stage_two[key] = distribution(processed, params)
        return stage_two[key]

    monkeypatch.setattr(verify, "process_logits", process)
    monkeypatch.setattr(verify, "distribution", law)
    with torch.inference_mode():
        yield


DRAWS = 20_000
JOINT_DRAWS = 6_000
LAWS = {
    "temperature": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(temperature=1, top_k=3),
    "top-p": SamplingParams(temperature=1, top_p=0.7),
    "min-p": SamplingParams(temperature=1, min_p=0.3),
    "filters": SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05),
    "presence": SamplingParams(temperature=1, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=1, frequency_penalty=0.8),
    "repetition": SamplingParams(temperature=1, repetition_penalty=1.8),
    "penalties": SamplingParams(
        temperature=0.9, presence_penalty=0.6, frequency_penalty=-0.4, repetition_penalty=1.3
    ),
    "bias": SamplingParams(temperature=1, logit_bias={2: -100.0, 4: 1.5, 0: -1.0}),
    "min-tokens": SamplingParams(temperature=1, min_tokens=5, stop_token_ids=(3,)),
    "everything": SamplingParams(
        temperature=1.2, top_k=6, top_p=0.95, min_p=0.02, presence_penalty=0.5,
        frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={4: 1.0, 6: -100.0}, min_tokens=5,
    ),
}  # fmt: skip
DRAFTERS = {"sampled": sampled_draft, "argmax": argmax_draft}


def emitted(
    params: SamplingParams, drafter: Callable[..., Draft], n: int, draws: int, k: int
) -> np.ndarray:
    """[V ** n] counts of the first n tokens of `draws` texts made by rounds of k drafts."""
    drafting, accepting = streams(20260)
    counts = np.zeros(V**n, dtype=np.int64)
    begin = PROMPT + START
    for _ in range(draws):
        history = begin
        while len(history) < len(begin) + n:
            draft = drafter(history[-1], k, drafting)
            rows = target_rows(history[-1], *draft.tokens)
            history += accept(draft, rows, params, history, len(PROMPT), (EOS,), accepting).tokens
        index = 0
        for token in history[len(begin) : len(begin) + n]:
            index = index * V + token
        counts[index] += 1
    return counts


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", LAWS)
def test_first_token_follows_the_plain_law(name: str, drafter: str) -> None:
    """B04, B06, B12: every filter and penalty, sampled and certain proposals, 20,000 draws."""
    params = LAWS[name]
    counts = emitted(params, DRAFTERS[drafter], 1, DRAWS, k=1)
    statistic, critical = chi_square(counts, joint_law(params, 1))
    assert statistic < critical


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("temperature", "sampled"),
        ("penalties", "argmax"),
        ("min-tokens", "sampled"),
        ("everything", "argmax"),
        ("everything", "sampled"),
    ],
)
def test_three_tokens_follow_the_plain_joint_law(name: str, drafter: str) -> None:
    """B04, B12, B14: processors that look back are right at every position of a block."""
    params = LAWS[name]
    counts = emitted(params, DRAFTERS[drafter], 3, JOINT_DRAWS, k=2)
    statistic, critical = chi_square(counts, joint_law(params, 3))
    assert statistic < critical


def softmax_draft(last: int, k: int, rng: np.random.Generator) -> Draft:
    """The lie of B04: the argmax, said to have been drawn from a softmax."""
    honest = argmax_draft(last, k, rng)
    return drafted(last, honest.tokens, False)


@pytest.mark.usefixtures("remembered")
def test_the_chi_square_catches_an_argmax_scored_with_its_softmax() -> None:
    """B04: a test that cannot fail proves nothing."""
    params = LAWS["temperature"]
    statistic, critical = chi_square(
        emitted(params, softmax_draft, 1, DRAWS // 4, k=1), joint_law(params, 1)
    )
    assert statistic > 3 * critical


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_chi_square_catches_a_residual_replaced_by_p(drafter: str) -> None:
    """B06: redrawing from p after a rejection."""
    params = LAWS["temperature"]

    def reject_wrongly(
        draft: Draft, processed: torch.Tensor, params: SamplingParams, rng: np.random.Generator
    ) -> tuple[int, int]:
        p = verify.distribution(processed[:1], params)[0]
        x = draft.tokens[0]
        q_x = 1.0 if draft.probs is None else float(draft.probs[0, x])
        if rng.random() * q_x < float(p[x]):
            return 1, draw(verify.distribution(processed[1:], params)[0], rng.random())
        return 0, draw(p, rng.random())

    with mock.patch.object(verify, "_reject", reject_wrongly):
        counts = emitted(params, DRAFTERS[drafter], 1, DRAWS // 4, k=1)
    statistic, critical = chi_square(counts, joint_law(params, 1))
    assert statistic > 3 * critical


def test_expected_acceptance_is_one_minus_total_variation() -> None:
    """Paper, section 2: 1 - ||p - q||_1 / 2, and p(argmax q) for a certain guess."""
    last = 4
    logits = TARGET[[last, last]]
    p = distribution(logits[:1], SAMPLED)[0]
    drafting, accepting = streams(4)
    for drafter, rate in (
        (sampled_draft, float(1 - (p - DRAFT_Q[last]).abs().sum() / 2)),
        (argmax_draft, float(p[argmax(DRAFT_Q[last : last + 1])[0]])),
    ):
        n = 4000
        hits = sum(
            ask(drafter(last, 1, drafting), logits, SAMPLED, accepting).accepted for _ in range(n)
        )
        assert abs(hits / n - rate) < 4 * math.sqrt(rate * (1 - rate) / n)
