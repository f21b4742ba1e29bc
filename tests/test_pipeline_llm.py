"""`LLM` and the command line with a second lane: a DeepSeek-V4 that carries its drafter, which a
process of its own loads from the same directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark import LLM, SamplingParams
from dspark.cli.main import main
from dspark.engine.lane_process import ProcessLane
from dspark.engine.pipeline import PipelinedEngine
from dspark.errors import ConfigError, ResourceError
from tests.models.official_v4 import TINY, TINY_DSPARK
from tests.models.test_deepseek_v4_loading import directory

SIZES: dict[str, Any] = {"index_n_heads": 16}  # with few heads exact ties are frequent
OPTIONS: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "max_context": 128, "max_users": 3}
PROMPTS = ["abc", "xyzzy xyzzy", "1", "DeepSeek-V4"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: str(directory(tmp_path_factory.mktemp(name), raw, drafter=True, **SIZES))
        for name, raw in (("mtp1", TINY), ("dspark", TINY_DSPARK))
    }


@pytest.fixture(scope="module", params=["mtp1", "dspark"])
def llm(request: pytest.FixtureRequest, places: dict[str, str]) -> Iterator[LLM]:
    made = LLM(places[request.param], pipeline="on", **OPTIONS)
    yield made
    made.close()


def lane(llm: LLM) -> ProcessLane:
    engine = llm.engine
    assert isinstance(engine, PipelinedEngine) and isinstance(engine.lane, ProcessLane)
    return engine.lane


def test_two_lanes_change_no_text(llm: LLM) -> None:
    """Greedy alone and in company, seeded in company; and the one lane is there again when asked
    for."""
    assert (llm.pipeline, llm.pipeline_reason) == ("on", "as asked")
    seeded = [SamplingParams(temperature=1.0, seed=i, max_tokens=16) for i in range(4)]
    recorded = llm.timeline()
    assert recorded is not None
    found = [llm.generate([p], GREEDY)[0] for p in PROMPTS]
    company = llm.generate(PROMPTS, GREEDY)
    drawn = llm.generate(PROMPTS, seeded)
    kinds = {s.kind for s in recorded.spans}
    assert {"verify", "fresh"} <= kinds and kinds & {"hit", "miss"}
    name = llm.drafter_name
    llm.set_drafter(name, pipeline="off")
    assert llm.pipeline == "off" and llm.timeline() is None
    assert not isinstance(llm.engine, PipelinedEngine)
    plain = llm.generate(PROMPTS, GREEDY)
    for outputs in (found, company):
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [o.token_ids for o in llm.generate(PROMPTS, seeded)] == [o.token_ids for o in drawn]
    assert not any(o.stats.ahead for o in plain)
    llm.set_drafter(name)
    assert llm.pipeline == "on"


def test_a_lane_is_begun_once_and_its_death_is_reported(llm: LLM) -> None:
    first = lane(llm)
    llm.set_drafter("none")
    assert (llm.pipeline, llm.pipeline_reason) == ("off", "none drafts in no time")
    llm.set_drafter("ngram")
    assert llm.pipeline == "off" and "no time" in llm.pipeline_reason
    plain = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    llm.set_drafter("auto")
    assert lane(llm) is first
    assert first.process is not None
    first.process.kill()
    assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == plain
    assert "the drafter's process died and was started again, 1 times" in llm.messages


def test_auto_measures_nothing_where_nothing_may_be_measured(places: dict[str, str]) -> None:
    """The tests' own setting; and one thread has no room for two lanes anyway."""
    llm = LLM(places["mtp1"], threads=1, **OPTIONS)
    assert llm.pipeline == "off" and llm.pipeline_reason
    assert not isinstance(llm.engine, PipelinedEngine)


def test_unknown_modes_and_devices_are_refused_before_anything_is_loaded() -> None:
    for options in ({"pipeline": "perhaps"}, {"emulate": "verify=20"}, {"emulate": ""}):
        with pytest.raises(ConfigError, match=r"pipeline mode 'perhaps'|cannot emulate"):
            LLM("/no/such/model", **options)


def test_a_lane_that_cannot_be_begun(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on` says so; `auto` does without, as tests/engine/test_lanes.py has it."""

    def refuse(*args: object, **options: object) -> None:
        raise ResourceError("no more processes")

    monkeypatch.setattr("dspark.engine.lanes.ProcessLane", refuse)
    with pytest.raises(ResourceError, match="no more processes"):
        LLM(places["mtp1"], pipeline="on", **OPTIONS)


def test_auto_goes_from_one_lane_to_two_and_back_between_texts(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it shows in a text. A drafter that knows nothing never promises a gain, so the
    promise is waived here; the budget is not."""
    monkeypatch.setattr("dspark.engine.lanes.MARGIN", -1.0)
    llm = LLM(places["mtp1"], emulate="verify=2ms,draft=2ms", **OPTIONS)
    assert (llm.pipeline, llm.pipeline_reason[:10]) == ("off", "the first ")
    plain = [o.token_ids for o in (llm.generate([p], GREEDY)[0] for p in PROMPTS)]
    deadline = time.monotonic() + 120
    while llm.pipeline == "off":
        assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == plain[0]
        assert time.monotonic() < deadline, llm.pipeline_reason
    assert isinstance(llm.engine, PipelinedEngine)
    while llm.pipeline == "auto":
        found = [o.token_ids for o in (llm.generate([p], GREEDY)[0] for p in PROMPTS)]
        assert found == plain and time.monotonic() < deadline
    assert "two lanes reached" in llm.pipeline_reason
    assert not isinstance(llm.engine, PipelinedEngine)
    assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == plain
    llm.close()


def test_an_emulated_device_on_the_command_line(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gain is there and near the formula's, every figure is called emulated, and what both
    lanes did is drawn. Ten milliseconds, so that a slow machine can keep up."""
    matplotlib = pytest.importorskip("matplotlib")
    assert matplotlib
    trace = tmp_path / "lanes.json"
    argv = ["bench", "--model", places["mtp1"], "--dtype", "fp32", "--device", "cpu"]
    argv += ["--drafters", "mtp1", "--pipeline", "off,on", "--verify", "all", "--limit", "1"]
    argv += ["--max-tokens", "24", "--max-context", "128", "--threads", "1"]
    argv += ["--emulate-device", "verify=10ms,draft=10ms", "--timeline", str(trace)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report["emulated"] == "verify 10 ms, draft 10 ms"
    rows = {r["drafter"]: r for r in report["results"]}
    assert list(rows) == ["none", "mtp1+off", "mtp1+on"]
    assert [r["pipeline"] for r in rows.values()] == ["off", "off", "on"]
    assert all(r["identical_to_none"] for r in rows.values())
    # A last round that has room for the target's own token alone drafts nothing.
    assert rows["mtp1+off"]["draft_ms"] >= 8 and rows["none"]["verify_ms"] >= 10
    assert rows["mtp1+on"]["gain_vs_off"] > 0 and rows["mtp1+on"]["gain_predicted"] > 0
    assert "emulated: every time is that of another device" in out
    assert "timeline of mtp1, times emulated" in out
    written = json.loads(trace.read_text(encoding="utf-8"))
    assert written["otherData"]["times"] == "emulated: verify 10 ms, draft 10 ms"
    assert {e["name"] for e in written["traceEvents"]} >= {"verify", "fresh", "process_name"}
    assert trace.with_suffix(".png").stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lanes.json", "lanes.png"]
