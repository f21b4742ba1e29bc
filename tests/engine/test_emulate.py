"""Emulated times: how they are written, and that only they change."""

from __future__ import annotations

import time

import pytest
import torch

from dspark.engine.emulate import EmulatedTarget, Emulation
from dspark.errors import ConfigError
from dspark.models.target import Segment, pack
from tests.engine import lanes


def test_parsing() -> None:
    assert Emulation.parse("verify=20ms,draft=5ms") == Emulation(20, 5)
    assert Emulation.parse(" draft=2.5ms ") == Emulation(0, 2.5)
    assert str(Emulation.parse("verify=20ms")) == "verify 20 ms, draft 0 ms"


@pytest.mark.parametrize(
    "text", ["", "verify=20", "verify=20ms,", "verify=1ms,verify=2ms", "sleep=1ms", "verify=-1ms"]
)
def test_what_is_not_a_time(text: str) -> None:
    with pytest.raises(ConfigError, match="as in verify=20ms,draft=5ms"):
        Emulation.parse(text)


def test_a_pass_computes_what_it_computed() -> None:
    target = lanes.table_target()
    slow = EmulatedTarget(target, 5.0)
    batch = pack([Segment(0, 0, (1, 2, 3), 2)])
    start = time.perf_counter()
    found = slow.forward(batch, (0, 1))
    assert time.perf_counter() - start >= 0.005
    wanted = target.forward(batch, (0, 1))
    assert torch.equal(found.logits, wanted.logits)
    assert found.features is not None and wanted.features is not None
    assert torch.equal(found.features, wanted.features)
    ids = torch.tensor([1, 2])
    assert torch.equal(slow.embed(ids), target.embed(ids))
    x = torch.ones(1, target.hidden_size)
    assert torch.equal(slow.output_head(ids)(x), target.output_head(ids)(x))
    assert torch.equal(slow.linear(torch.eye(32))(x), x)
