"""`checkpoints/deepseek-v4-nano`: the trained V4 loads, drafts well and never changes its text."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from scipy.stats import chisquare

from dspark.bench.prompts import load_prompts
from dspark.llm import LLM
from dspark.models.target import Segment, pack
from dspark.types import Output, SamplingParams

NANO = Path(__file__).parents[1] / "checkpoints" / "deepseek-v4-nano"
GREEDY = SamplingParams(max_tokens=200, ignore_eos=True)
DRAFTERS = [("mtp1", 1), ("mtp1", 2), *(("dspark", k) for k in (1, 2, 3, 4, 5, 7))]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(NANO), drafter="none", max_users=4, max_context=512, pipeline="off")


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[tuple[int, ...]]:
    return [llm.encode_prompt(p) for p in load_prompts(("builtin:chat",), 4).prompts]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[tuple[int, ...]]) -> list[Output]:
    llm.set_drafter("none")
    return llm.generate(prompts, GREEDY)


def test_the_default_is_the_dspark_it_carries(llm: LLM) -> None:
    llm.set_drafter("auto")
    assert llm.drafter_name == "dspark" and "own checkpoint" in llm.drafter_reason


@pytest.mark.parametrize(("drafter", "length"), DRAFTERS)
def test_greedy_text_is_the_models(
    llm: LLM, prompts: list[tuple[int, ...]], plain: list[Output], drafter: str, length: int
) -> None:
    llm.set_drafter(drafter, length, whole_drafts=True)
    users = 1 + length % 4  # every batch from one to four
    outputs = llm.generate(prompts[:users], GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain[:users]]
    assert all(len(o.token_ids) == 200 for o in outputs)


def test_drafts_are_right_far_more_often_than_by_chance(
    llm: LLM, prompts: list[tuple[int, ...]]
) -> None:
    lengths = {}
    for drafter in ("mtp1", "dspark"):
        llm.set_drafter(drafter, whole_drafts=True)
        stats = [o.stats for o in llm.generate(prompts, GREEDY)]
        lengths[drafter] = 1 + sum(s.accepted for s in stats) / sum(s.rounds for s in stats)
    assert lengths["mtp1"] > 1.5 and lengths["dspark"] > 2.5, lengths


def test_a_sampled_text_keeps_its_seed_in_company(llm: LLM, prompts: list[tuple[int, ...]]) -> None:
    llm.set_drafter("dspark")
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    together = llm.generate(prompts[:3], params)
    alone = [llm.generate([p], params)[0] for p in prompts[:3]]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


@pytest.mark.parametrize("drafter", ["mtp1", "dspark"])
def test_sampled_tokens_follow_the_models_law(
    llm: LLM, prompts: list[tuple[int, ...]], drafter: str
) -> None:
    """Chi-square of the first three tokens at temperature 1, each one of the model's best two."""
    n, prompt = 300, prompts[0]
    likely = two_best(llm, prompt)
    llm.set_drafter(drafter, whole_drafts=True)
    params = [
        SamplingParams(max_tokens=4, temperature=1.0, top_k=2, ignore_eos=True, seed=s)
        for s in range(n)
    ]
    outputs = llm.generate([prompt] * n, params)
    assert sum(o.stats.accepted for o in outputs) > n / 2, "drafts decided over tokens"
    counts = Counter(o.token_ids[:3] for o in outputs)
    assert counts.keys() <= likely.keys()
    likeliest = max(likely, key=lambda path: likely[path])
    wanted: defaultdict[tuple[int, ...], float] = defaultdict(float)
    seen: Counter[tuple[int, ...]] = Counter()
    for path, p in likely.items():
        cell = path if n * p >= 5 else likeliest  # the test wants no small cells
        wanted[cell] += n * p
        seen[cell] += counts[path]
    assert len(wanted) >= 4
    assert chisquare([seen[c] for c in wanted], list(wanted.values())).pvalue > 1e-4


def two_best(llm: LLM, prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Every path of three tokens among the two best, and its probability."""
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for path, p in paths.items():
            batch = pack([Segment(0, 0, (*prompt, *path), 1)])
            best = llm.target.forward(batch).logits[0].topk(2)
            for token, q in zip(
                best.indices.tolist(), best.values.double().softmax(0).tolist(), strict=True
            ):
                longer[*path, token] = p * q
        paths = longer
    return paths
