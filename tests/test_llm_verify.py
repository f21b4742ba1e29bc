"""What `LLM` makes of `verify`, costs and drafters: a default run loses no token to its schedule.

A tiny model in int8. The drafter is an oracle with confidences that depend on its tokens, the cost
table is given: so all that is left is the choice of lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark.drafters.base import Drafter
from dspark.engine import profile
from dspark.llm import LLM
from dspark.schedule.cost import CostTable
from dspark.schedule.monitor import LiveCost
from dspark.types import SamplingParams, Stats
from tests.engine.oracle import PATTERNS, OracleDrafter, reference
from tests.engine.test_schedules import Doubter
from tests.server.served import tiny_directory

PROMPTS = [(5, 9, 200), (1,), (30, 31, 32, 33, 34), (77, 2)]
BLOCK, TOKENS = 5, 40


def costs(rise: float) -> CostTable:
    """10 ms for one row and `rise` times that for 64, in a straight line."""
    passes = [(t, 0.0, 10 * (1 + (rise - 1) * (t - 1) / 63)) for t in range(1, 65)]
    return CostTable.fit({}, passes, [(r, BLOCK, 0.01) for r in (1, 4)], [(1, 0.01), (4, 0.01)])


FLAT, STEEP = costs(1.03), costs(30.0)
"""A table without any slope is refused; 3 % over 63 rows is as good as none."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("tiny") / "model")


Maker = Callable[..., LLM]


@pytest.fixture
def llm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Makes an `LLM` on a machine of given costs, with the oracle under every drafter's name."""

    def make(table: CostTable | None, *, sizes: bool = False, **options: Any) -> LLM:
        def build(name: str, target: Any, *_: Any, **__: Any) -> Drafter:
            texts = {p: reference(target, p, TOKENS) for p in PROMPTS}
            drafter = Doubter(OracleDrafter(texts, BLOCK, PATTERNS["some"]))
            drafter.sizes_drafts = sizes
            return drafter

        monkeypatch.setattr("dspark.engine.placement.build", build)
        if table is not None:
            found = profile.Costs(table, "as given")
            monkeypatch.setattr(profile, "obtain", lambda *_: found)
        return LLM(str(directory), dtype="int8", max_context=128, max_users=4, **options)

    return make


def written(llm: LLM, users: int) -> Stats:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:users], params)
    assert [len(o.token_ids) for o in outputs] == [TOKENS] * users
    return Stats.total([o.stats for o in outputs])


@pytest.mark.parametrize("users", [1, 4])
def test_where_rows_are_free_the_default_accepts_what_whole_drafts_do(
    llm: Maker, users: int
) -> None:
    default, whole = llm(FLAT), llm(FLAT, verify="all")
    assert (default.verify, whole.verify) == ("auto", "all")
    assert default.engine.scheduler.adapts
    got, best = written(default, users), written(whole, users)
    assert best.accepted_length is not None and best.accepted_length > 2
    assert got.accepted_length == pytest.approx(best.accepted_length, rel=0.01)


@pytest.mark.parametrize("users", [1, 4])
def test_a_drafter_that_weighs_its_lengths_is_not_cut_again(llm: Maker, users: int) -> None:
    cut = written(llm(STEEP), users)
    assert cut.verified < cut.drafted / 2  # the table does ask for it
    own = llm(STEEP, sizes=True)
    assert own.verify == "all"
    kept = written(own, users)
    assert kept.verified == kept.drafted > 0


def rounds(cost: LiveCost, slower: float, n: int = 80) -> None:
    """What a simulated clock says of n rounds: passes take `slower` times what the table says."""
    for _ in range(n):
        foreseen = cost.foreseen(3, 1, 0.0, BLOCK)
        cost.observe(replace(foreseen, verify=foreseen.verify * slower), 3, 1, 0.0, BLOCK)


def test_a_stale_table_is_scaled_and_measured_again_when_idle(
    llm: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(profile.OFF)
    truth = [costs(5.0), costs(7.0)]
    measured: list[CostTable] = []

    def measure(target: Any, drafter: Any, fingerprint: Any, *_: Any) -> CostTable:
        measured.append(replace(truth[len(measured)], fingerprint=dict(fingerprint)))
        return measured[-1]

    monkeypatch.setattr(profile, "measure", measure)
    model = llm(None)
    cost = model.engine.scheduler.cost
    assert cost is not None and cost.table == measured[0]
    rounds(cost, 1.2)
    model.set_drafter("auto")
    assert model.engine.scheduler.cost is cost  # a fifth is within a third: all is kept
    rounds(cost, 2.0)
    assert cost.current.verify_ms(3) == pytest.approx(2 * truth[0].verify_ms(3))
    assert any("measured again when the drafter is next chosen" in m for m in model.messages)
    assert len(list(tmp_path.rglob("cost-*.json"))) == 1
    model.generate(PROMPTS[:1], SamplingParams(max_tokens=3))
    # No request waited for a measurement, and a later run will not find the table.
    assert len(measured) == 1 and not list(tmp_path.rglob("cost-*.json"))
    model.set_drafter("auto")
    model.set_drafter("auto")
    assert len(measured) == 2 and len(list(tmp_path.rglob("cost-*.json"))) == 1
    renewed = model.engine.scheduler.cost
    assert renewed is not None and renewed.table == measured[1] and not renewed.stale
