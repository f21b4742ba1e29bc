"""Drafters draft where they were put, and texts do not show it. The CPU with a number stands in for
another device: it is not equal to the one without, so all that is shared is copied."""

from __future__ import annotations

import pytest
import torch

from dspark.engine.lane_thread import ThreadLane
from dspark.engine.lanes import DrafterSpec, Lanes
from dspark.engine.pipeline import PipelinedEngine
from dspark.engine.placement import Placement
from dspark.schedule.scheduler import Scheduler
from tests.engine import lanes
from tests.engine.oracle import ByteTokenizer, play, reference, request

OTHER = torch.device("cpu:0")
REQUESTS = [request(p, str(i), max_tokens=20) for i, p in enumerate(((1, 2, 3), (9,) * 5))]


@pytest.mark.parametrize("kind", lanes.V4_KINDS)
@pytest.mark.parametrize("device", [OTHER, torch.device("cpu"), None])
def test_one_lane_and_two(kind: str, device: torch.device | None) -> None:
    model, carried = lanes.v4_target(kind), lanes.V4_KINDS[kind]
    placement = Placement(model, device, carried=(carried,))
    assert placement.elsewhere == ("cpu:0" if device is OTHER else None)
    assert placement.threads == (device is not None)
    drafter = placement.drafter(carried.kind, None)
    assert isinstance(drafter, ThreadLane) == (device is OTHER)
    assert placement.drafter(carried.kind, None) is drafter
    assert placement.drafter("ngram", None).cap  # it needs nothing of the target: no bridge
    spec = DrafterSpec("m", "fp32", "cpu", 8, 256, carried.kind, None)
    made = Lanes(model, torch.get_num_threads(), placement=placement)
    verdicts = [made.decide("off", drafter, spec, "all")]
    if device is not None:
        verdicts.append(made.decide("on", drafter, spec, "all"))
        waiting = made.decide("auto", drafter, spec, "all")
        assert not waiting.two and "not foreseen" in waiting.reason
    for verdict in verdicts:
        engine = made.engine(verdict, drafter, spec, ByteTokenizer(), Scheduler("all"), False)
        assert isinstance(engine, PipelinedEngine) == verdict.two
        if isinstance(engine, PipelinedEngine):
            assert isinstance(engine.lane, ThreadLane) and engine.lane is not drafter
            assert engine.lane.cap == drafter.cap + drafter.grows
        for requests in (REQUESTS, REQUESTS[:1]):
            played = play(engine, requests)
            assert any(r.drafted for rounds in played.rounds.values() for r in rounds)
            for r in requests:
                assert played.ids(r.id) == reference(model, r.prompt_ids, 20)
        assert not engine.drafter.failures
    made.close()
