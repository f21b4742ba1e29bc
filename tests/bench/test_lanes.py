"""The picture of two lanes: idle shares, the trace, what cannot be drawn."""

from pathlib import Path
from typing import Any

import pytest

from dspark.bench import lanes
from dspark.bench.compare import BenchConfig
from dspark.bench.prompts import PromptSet
from dspark.errors import ConfigError
from dspark.types import Span
from tests.fake_llm import FakeLLM

BEFORE = [Span("fresh", 1.0, 1.1), Span("verify", 1.1, 1.3), Span("fresh", 1.3, 1.4)]
AFTER = [
    Span("fresh", 5.0, 5.1),
    Span("verify", 5.1, 5.3),
    Span("hit", 5.1, 5.2),
    Span("miss", 5.15, 5.25),
    Span("verify", 5.3, 5.5),
]
FOUND = lanes.Lanes("dspark", "on", None, {"before": BEFORE, "after": AFTER})


def test_idle_shares() -> None:
    """Of the time from the first block to the last; what overlaps in a lane counts once."""
    before, after = FOUND.idle["before"], FOUND.idle["after"]
    assert before == {"verify": pytest.approx(0.5), "draft": pytest.approx(0.5)}
    assert after["verify"] == pytest.approx(0.2)
    assert after["draft"] == pytest.approx(1 - 0.25 / 0.5)


def test_the_trace_has_lanes_kinds_and_times() -> None:
    trace = lanes.chrome(FOUND)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"]) for e in events] == [
        (0, 1, "fresh"), (0, 0, "verify"), (0, 1, "fresh"),
        (1, 1, "fresh"), (1, 0, "verify"), (1, 1, "hit"), (1, 1, "miss"), (1, 0, "verify"),
    ]  # fmt: skip
    assert (events[1]["ts"], events[1]["dur"]) == (pytest.approx(1e5), pytest.approx(2e5))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["before: pipeline off", "verify", "draft", "after: pipeline on", "verify",
                     "draft"]  # fmt: skip
    assert trace["otherData"]["times"] == "measured"
    emulated = lanes.chrome(lanes.Lanes("dspark", "on", "verify 20 ms", FOUND.spans))
    assert emulated["otherData"]["times"] == "emulated: verify 20 ms"


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.json"
    lanes.check(file)
    lanes.write(FOUND, file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.png"]
    with pytest.raises(ConfigError, match="ending in"):
        lanes.check(tmp_path / "x.png")
    with pytest.raises(ConfigError, match="does not exist"):
        lanes.check(tmp_path / "no" / "x.json")


def test_one_lane_gives_no_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "created", [], raising=False)
    llm: Any = FakeLLM()
    config = BenchConfig(drafters=("none", "blind"), pipeline=("auto",))
    with pytest.raises(ConfigError, match="no timeline of two lanes"):
        lanes.record(llm, PromptSet("one", "0" * 64, ("a",)), config)
