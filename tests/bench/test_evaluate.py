"""The counting of `dspark eval`, on drafters whose every acceptance was chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.bench.evaluate import (
    DEFINITIONS,
    Agreement,
    Estimate,
    EvalConfig,
    Report,
    Result,
    Step,
    read_estimate,
    run,
)
from dspark.bench.prompts import PromptSet
from dspark.drafters.base import Drafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.errors import CheckpointError, ConfigError, InvalidRequestError
from dspark.llm import LLM
from dspark.types import Output, SamplingParams
from tests import tiny
from tests.engine.oracle import (
    PATTERNS,
    ByteTokenizer,
    OracleDrafter,
    SampledDrafter,
    ScriptedTarget,
    TableTarget,
    reference,
)

Maker = Callable[[Any], Drafter]
PROMPTS = ("first", "second one")
TOKENS = 13
"""Of a text: one of the prefill and twelve of rounds."""


class SmallLLM(LLM):
    """An `LLM` over any target, whose drafters are those of a dict."""

    def __init__(self, target: Any, drafters: Mapping[str, Maker], eos: int | None = None) -> None:
        self.target = target
        self.tokenizer = ByteTokenizer(() if eos is None else (eos,))  # type: ignore[assignment]
        self.model_name, self.dtype, self.device, self._count = "small", "fp32", "cpu", 0
        self._makers = drafters
        self.given: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.batches: list[tuple[str, int]] = []

    def set_drafter(self, name: str, num_draft_tokens: int | None = None, **_: Any) -> None:
        name = "best" if name == "auto" else name
        if name not in self._makers:
            raise ConfigError(f"unknown drafter {name!r}")
        self.drafter_name, self.asked = name, num_draft_tokens
        self._engine = Engine(self.target, self._makers[name](self.target), self.tokenizer)

    def _renew_engine(self, always: bool = False) -> None:
        """There is one lane."""

    def encode_prompt(self, prompt: Any, raw: bool = False) -> tuple[int, ...]:
        return tuple(prompt.encode())

    def generate(self, prompts: Any, params: Any = None) -> list[Output]:
        self.given += zip(prompts, params, strict=True)
        self.batches.append((self.drafter_name, len(prompts)))
        return super().generate(prompts, params)


def prompt_set(*prompts: str, name: str = "set") -> PromptSet:
    return PromptSet(name, "0" * 64, prompts)


def oracle(right: Callable[[int, int], int], block: int = 3) -> Maker:
    """Drafts the target's own greedy text, spoilt where `right(round, row)` says."""

    def make(target: Any) -> Drafter:
        texts = {tuple(p.encode()): reference(target, p.encode(), TOKENS) for p in PROMPTS}
        return OracleDrafter(texts, block, right)

    return make


def greedy(llm: LLM, *sets: PromptSet, **options: Any) -> Report:
    given = {"drafters": ("d",), "temperatures": (0.0,), "max_tokens": TOKENS, **options}
    return run(llm, sets, EvalConfig(**given))


def test_shares_by_position_are_those_that_were_chosen() -> None:
    """Rounds accept 0, 1, 2, 0, 1, 2 of 3; the last draft is cut to the two that have room."""
    llm = SmallLLM(tiny.target(), {"d": oracle(lambda n, row: n % 3)})
    (result,) = greedy(llm, prompt_set(PROMPTS[0])).results
    assert (result.texts, result.rounds, result.tokens) == (1, 6, 12)
    assert result.verified_at == [6, 6, 5]
    assert result.tried_at == [6, 4, 1]
    assert result.accepted_at == [4, 2, 0]
    assert result.conditional == [4 / 6, 2 / 4, 0]
    assert result.cumulative == [4 / 6, 2 / 6, 0]
    assert result.accepted_length == 2 == pytest.approx(result.full_block_length)
    assert result.drafted_per_round == pytest.approx(17 / 6)
    assert result.acceptance_rate == pytest.approx(6 / 17)
    assert result.texts_ended_in_draft == 0
    assert result.standard_error is None


def test_a_full_block_is_longer_than_a_mean_round_of_short_drafts() -> None:
    """All right: rounds of 4 and 4, then 4 of which the token limit leaves the draft two."""
    llm = SmallLLM(tiny.target(), {"d": oracle(PATTERNS["all"])})
    (result,) = greedy(llm, prompt_set(PROMPTS[0]), max_tokens=TOKENS - 1).results
    assert (result.rounds, result.verified_at) == (3, [3, 3, 2])
    assert result.accepted_length == pytest.approx(11 / 3)
    assert result.full_block_length == 4


def test_a_text_that_ends_inside_a_block_counts_as_documented() -> None:
    eos = 200
    text = [*b"abcde", eos, *b"fghijk"]
    prompt = "first"
    target = ScriptedTarget(text, len(prompt))
    believed = OracleDrafter({tuple(prompt.encode()): text}, 3)
    llm = SmallLLM(target, {"d": lambda _: believed}, eos)
    (result,) = greedy(llm, prompt_set(prompt)).results
    # a | bcd e | EOS f g: the last round emits one token, and f counts as not accepted.
    assert (result.rounds, result.tokens, result.texts_ended_in_draft) == (2, 5, 1)
    assert result.accepted_at == [2, 1, 1] and result.tried_at == [2, 2, 1]
    assert result.conditional == [1, 0.5, 1]


def test_means_weigh_sets_not_rounds() -> None:
    llm = SmallLLM(tiny.target(), {"d": oracle(lambda n, row: 99 * row)})
    sets = [prompt_set(PROMPTS[0], name="bad"), prompt_set(PROMPTS[1], name="good")]
    report = greedy(llm, *sets)
    bad, good = report.results
    (mean,) = report.means
    assert (bad.rounds, bad.accepted_length, bad.conditional) == (12, 1, [0])
    assert (good.rounds, good.accepted_length, good.conditional) == (3, 4, [1, 1, 1])
    assert mean.accepted_length == 2.5
    assert mean.conditional == [0.5, 1, 1]  # `bad` never tried the later ones
    assert mean.cumulative == [0.5, 0.5, 0.5]
    assert mean.tried_at == [14, 3, 3]  # the last round of `bad` had room for its own token only
    assert (mean.prompts, mean.texts, mean.rounds) == ("mean", 2, 15)
    assert greedy(llm, sets[0]).means == ()


def test_standard_error_is_that_of_a_ratio() -> None:
    """12 tokens in 12 rounds and in 3: residuals of -7.2 and 7.2 around 1.6 tokens a round."""
    llm = SmallLLM(tiny.target(), {"d": oracle(lambda n, row: 99 * row)})
    (result,) = greedy(llm, prompt_set(*PROMPTS)).results
    assert result.accepted_length == pytest.approx(24 / 15)
    assert result.standard_error == pytest.approx((2 * 2 * 7.2**2) ** 0.5 / 15)


def test_no_drafter_is_one_token_a_round() -> None:
    llm = SmallLLM(tiny.target(), {"d": NoDrafter})
    (result,) = greedy(llm, prompt_set(*PROMPTS)).results
    assert result.accepted_length == result.full_block_length == 1
    assert result.conditional == result.cumulative == []
    assert result.acceptance_rate is None and result.standard_error == 0


def test_a_text_of_one_token_has_no_round() -> None:
    llm = SmallLLM(tiny.target(), {"d": NoDrafter})
    config = EvalConfig(drafters=("d",), max_tokens=1)
    sets = [prompt_set(*PROMPTS, name=n) for n in ("a", "b")]
    report = run(llm, sets, config, {"d": Estimate(2.0)})
    for result in (*report.results, *report.means):
        assert result.accepted_length is result.full_block_length is result.standard_error is None
    assert report.agreements == ()


# -- what is written -------------------------------------------------------------------------------


def test_texts_are_seeded_by_prompt_and_greedy_ones_are_not_repeated() -> None:
    llm = SmallLLM(tiny.target(), {"a": NoDrafter, "b": NoDrafter})
    prompts = prompt_set("x", "y", "z")
    config = EvalConfig(("a", "b"), 5, (0.0, 1.0), max_tokens=2, seed=7, repeat=2, batch=2)
    steps: list[Step] = []
    run(llm, [prompts], config, on_step=steps.append)
    assert llm.asked == 5
    each = [(0.0, c, 7 + i) for i, c in enumerate("xyz")]
    each += [(1.0, c, 7 + i) for i, c in enumerate("xyzxyz")]
    found = [(p.temperature, bytes(ids).decode(), p.seed) for ids, p in llm.given]
    assert found == each * 2
    assert llm.batches == [(d, n) for d in "ab" for n in (2, 1, 2, 2, 2)]
    assert [(s.drafter, len(s.outputs)) for s in steps] == llm.batches
    assert sum(n for _, n in llm.batches) == 2 * sum(config.texts(t, 3) for t in (0.0, 1.0))


def test_the_batch_changes_nothing() -> None:
    def rows(batch: int) -> tuple[Result, ...]:
        llm = SmallLLM(tiny.target(), {"d": oracle(PATTERNS["some"], block=5)})
        return greedy(llm, prompt_set(*PROMPTS), batch=batch).results

    assert rows(1) == rows(2)


@pytest.mark.parametrize(
    ("drafters", "prompt", "error"),
    [(("d", "psychic"), "x", ConfigError), (("d",), "x" * 256, InvalidRequestError)],
)
def test_bad_input_is_found_before_anything_is_written(
    drafters: tuple[str, ...], prompt: str, error: type[Exception]
) -> None:
    llm = SmallLLM(tiny.target(), {"d": NoDrafter})
    sets = [prompt_set("x", name="a"), prompt_set("y", prompt, name="b")]
    with pytest.raises(
        error, match=r"psychic|b: prompt 2 has 256 tokens and the context holds 256"
    ):
        run(llm, sets, EvalConfig(drafters))
    assert llm.given == []


@pytest.mark.parametrize(
    "options",
    [
        {"drafters": ()},
        {"temperatures": ()},
        {"temperatures": (-1.0,)},
        {"temperatures": (float("nan"),)},
        {"max_tokens": 0},
        {"repeat": 0},
        {"batch": 0},
    ],
)
def test_impossible_configs(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, InvalidRequestError), match=next(iter(options))[:-1]):
        EvalConfig(**options)


def test_repetitions_are_dropped() -> None:
    config = EvalConfig(drafters=("a", "b", "a"), temperatures=(1.0, 0.0, 1.0))
    assert config.drafters == ("a", "b") and config.temperatures == (1.0, 0.0)


# -- the estimate ----------------------------------------------------------------------------------


def sampled(p: Sequence[float], q: Sequence[float], block: int) -> SmallLLM:
    """A target whose every token has law p, and a drafter that draws from q."""
    size = len(p)
    target = TableTarget(torch.tensor(p).log().expand(size, size), max_context=512)
    q_V_V = torch.tensor(q).expand(size, size)
    return SmallLLM(target, {"d": lambda _: SampledDrafter(q_V_V, block)})


def test_served_length_is_what_the_acceptances_say() -> None:
    """1 - TV of the two laws is 0.7 at every position: 1 + 0.7 + 0.49 + 0.343 tokens a round."""
    llm = sampled((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), block=3)
    expected = 1 + 0.7 + 0.7**2 + 0.7**3
    # A prompt's ids must lie in a vocabulary of three.
    sets = [prompt_set("\0\1", "\2", name=name) for name in "ab"]
    config = EvalConfig(("d",), temperatures=(1.0,), max_tokens=240, repeat=4)
    report = run(llm, sets, config, {"d": Estimate(expected, source="by hand")})
    (mean,), (agreement,) = report.means, report.agreements
    assert mean.standard_error is not None and 0.01 < mean.standard_error < 0.06
    assert agreement.served == mean.accepted_length
    assert abs(agreement.served - expected) < 4 * mean.standard_error
    assert agreement.within and abs(agreement.difference) < 0.05
    assert mean.conditional == pytest.approx([0.7] * 3, abs=0.06)
    assert (agreement.estimated, agreement.source) == (expected, "by hand")
    # The same run against a claim that is 15 % too high.
    high = run(llm, sets, config, {"d": Estimate(expected * 1.15)}).agreements[0]
    assert not high.within and high.difference == pytest.approx(
        agreement.served / expected / 1.15 - 1
    )


def test_an_estimate_is_compared_at_its_own_temperature_only() -> None:
    llm = SmallLLM(tiny.target(), {"d": NoDrafter, "e": NoDrafter})
    config = EvalConfig(("d", "e"), temperatures=(0.0, 0.5), max_tokens=4)
    estimates = {"d": Estimate(1.0, 0.5), "e": Estimate(2.0, 1.0)}
    (found,) = run(llm, [prompt_set("x", "y")], config, estimates).agreements
    assert (found.drafter, found.temperature) == ("d", 0.5)
    assert (found.difference, found.within, found.certain) == (0, True, True)


@pytest.mark.parametrize(
    ("served", "error", "within", "certain"),
    [
        (3.0, 0.01, True, True),
        (3.1, 0.01, True, True),
        (3.14, 0.01, True, False),
        (3.16, 0.01, False, False),
        (3.2, 0.01, False, True),
        (2.8, 0.01, False, True),
        (2.8, 0.03, False, False),
        (3.0, None, True, False),
    ],
)
def test_doubt(served: float, error: float | None, within: bool, certain: bool) -> None:
    difference = served / 3 - 1
    a = Agreement("d", 1.0, 3.0, "", served, error, served, difference, abs(difference) <= 0.05)
    assert (a.within, a.certain) == (within, certain)


def test_estimate_of_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "config.json"

    def read(config: Any) -> Estimate | None:
        file.write_text(json.dumps(config), encoding="utf-8")
        return read_estimate(str(tmp_path))

    assert read_estimate("ngram") is None
    assert read_estimate(str(tmp_path / "nowhere")) is None
    for config in ({}, {"training": None}, {"training": {"steps": 3}}, []):
        assert read(config) is None
    assert read({"training": {"accepted_length": 2.5}}) == Estimate(2.5, 1.0, str(file))
    found = read({"training": {"accepted_length": 3, "temperature": 0.7, "steps": 9}})
    assert found == Estimate(3.0, 0.7, str(file))
    for length in ("long", None, 0.5, float("nan"), [1]):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read({"training": {"accepted_length": length}})
    file.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot read the training estimate"):
        read_estimate(str(tmp_path))


def test_report_explains_itself() -> None:
    llm = SmallLLM(tiny.target(), {"d": oracle(PATTERNS["some"])})
    sets = [prompt_set(PROMPTS[0], name="a"), prompt_set(PROMPTS[1], name="b")]
    found = greedy(llm, *sets).as_json()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, allow_nan=False))
    assert found["prompts"][1] == {"name": "b", "sha256": "0" * 64, "count": 1}
    assert found["config"]["temperatures"] == (0.0,)
    explained = {name for names in DEFINITIONS for name in names.split(", ")}
    assert found["results"][0].keys() - {"drafter", "temperature", "prompts"} == explained - {
        "means"
    }
    assert found["means"][0].keys() == found["results"][0].keys()
    assert found["versions"].keys() == {"python", "dspark", "torch"}


def test_auto_is_named_by_what_it_came_to() -> None:
    llm = SmallLLM(tiny.target(), {"best": NoDrafter})
    (result,) = greedy(llm, prompt_set("x"), drafters=("auto",)).results
    assert result.drafter == "best (auto)"
