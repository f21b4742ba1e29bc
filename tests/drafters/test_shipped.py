"""The drafters that ship for the default model: found, chosen, exact, and better than chance."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from dspark.bench.prompts import load_prompts
from dspark.drafters.trained import shipped
from dspark.engine.choice import calibration_in
from dspark.llm import LLM
from dspark.types import Output, SamplingParams

NAMES = ("dspark", "dflash", "mtp1")
MODEL = "smollm2-135m-instruct"
GREEDY = SamplingParams(max_tokens=48)
SETS = ("builtin:chat", "builtin:code", "builtin:math", "builtin:summarise")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_users=4, max_context=1024)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[tuple[int, ...]]:
    return [llm.encode_prompt(p) for p in load_prompts(SETS, 2).prompts]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[tuple[int, ...]]) -> list[Output]:
    llm.set_drafter("none")
    return llm.generate(prompts, GREEDY)


@pytest.fixture(scope="module", params=NAMES)
def drafted(
    llm: LLM, prompts: list[tuple[int, ...]], request: pytest.FixtureRequest
) -> Iterator[tuple[str, list[Output]]]:
    llm.set_drafter(request.param, whole_drafts=True)
    yield request.param, llm.generate(prompts, GREEDY)


def test_the_best_is_the_default(llm: LLM) -> None:
    assert tuple(shipped(MODEL)) == NAMES
    llm.set_drafter("auto")
    assert llm.drafter_name == "dspark" and MODEL in llm.drafter_reason
    assert calibration_in(llm.drafter_folder) is not None


def test_the_text_is_the_models(plain: list[Output], drafted: tuple[str, list[Output]]) -> None:
    name, outputs = drafted
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain], name


def test_guesses_are_right_often(drafted: tuple[str, list[Output]]) -> None:
    """Far above what a wrong file, a wrong feature layer or a shifted position would give."""
    name, outputs = drafted
    verified = sum(o.stats.verified for o in outputs)
    accepted = sum(o.stats.accepted for o in outputs)
    rounds = sum(o.stats.rounds for o in outputs)
    assert verified > 100
    assert 1 + accepted / rounds > {"dspark": 1.25, "dflash": 1.2, "mtp1": 1.15}[name]


def test_a_sampled_text_keeps_its_seed_in_company(llm: LLM, prompts: list[tuple[int, ...]]) -> None:
    llm.set_drafter("dspark")
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    together = llm.generate(prompts[:3], params)
    alone = [llm.generate([p], params)[0] for p in prompts[:3]]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert all(a.token_ids != b.token_ids for a, b in pairwise(alone))
