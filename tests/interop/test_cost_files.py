"""Cost tables in the layouts of other engines: their rules, and that the sums still add up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from dspark.errors import ConfigError
from dspark.interop.cost_files import sglang_a, sglang_b, trtllm, trtllm_2
from dspark.schedule.cost import CostTable

K = 5
PRINT = {"model": "m", "dtype": "int8"}


def table() -> CostTable:
    verify = [(t, c, 10 + t // 4 + 0.001 * t * c) for t in range(1, 65) for c in (0, 500)]
    draft = [(r, K, 2 + 0.5 * r) for r in (1, 8)]
    return CostTable.fit(PRINT, verify, draft, [(1, 0.5), (8, 1.2)])


def rising(values: list[int]) -> bool:
    return all(isinstance(v, int) for v in values) and all(
        a < b for a, b in itertools.pairwise(values)
    )


@pytest.mark.parametrize("requests", [1, 4, 20])
def test_sglang_a(requests: int) -> None:
    out = json.loads(json.dumps(sglang_a(table(), block=K, requests=requests, context=500)))
    assert set(out) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    tokens, sps = out["sample_batch_tokens"], out["sample_steps_per_sec"]
    assert rising(tokens) and len(tokens) == len(sps) > 1
    assert out["max_batch_tokens"] >= tokens[-1] and out["max_batch_tokens"] == requests * (K + 1)
    for t, s in zip(tokens, sps, strict=True):
        assert s == pytest.approx(table().sps(t, requests=requests, context=500, block=K))


@pytest.mark.parametrize("probes", [[5], [], [3, 3], [4, 2], [0, 4], [1, 2, 3]])
def test_sglang_a_refuses_what_reads_as_uninitialised(probes: list[int]) -> None:
    """The last one is on one step of the stairs: all the same cost."""
    with pytest.raises(ConfigError):
        sglang_a(table(), block=K, probes=probes)


def test_the_additive_forms_add_up() -> None:
    requests, tokens = [1, 2, 8], [8, 9, 24, 48]
    b = json.loads(json.dumps(sglang_b(table(), block=K, requests=requests, tokens=tokens)))
    t = json.loads(json.dumps(trtllm(table(), block=K, requests=requests, tokens=tokens)))
    assert set(b) == {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}
    assert b["bs_probes"] == t["batch_sizes"] == requests
    assert b["m_probes"] == t["token_counts"] == tokens
    assert t["fixed_overhead_ms"] == 0 and t["minimum_predicted_gain"] == 0.01
    for (i, r), (j, m) in itertools.product(enumerate(requests), enumerate(tokens)):
        ms = table().round_ms(m, requests=r, block=K)
        seconds = b["bias_seconds"] + b["alpha_seconds"][i] + b["theta_seconds"][j]
        assert seconds * 1e3 == pytest.approx(ms)
        assert t["step_time_ms"][j] + t["batch_overhead_ms"][i] == pytest.approx(ms)
    assert min(b["alpha_seconds"]) == min(b["theta_seconds"]) == 0


@pytest.mark.parametrize("make", [sglang_b, trtllm])
@pytest.mark.parametrize(
    ("requests", "tokens"),
    [([1, 2], [4]), ([1, 2], [4, 4]), ([2, 1], [4, 8]), ([], [4, 8]), ([1], [1, 2, 3])],
)
def test_the_additive_forms_refuse(
    make: Callable[..., dict[str, Any]], requests: list[int], tokens: list[int]
) -> None:
    with pytest.raises(ConfigError):
        make(table(), block=K, requests=requests, tokens=tokens)


@pytest.mark.parametrize("block", [1, 2, K])
@pytest.mark.parametrize("groups", [[1], [1, 2, 4, 8, 16], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_schema_2_keeps_its_rules(groups: list[int], block: int) -> None:
    out = json.loads(json.dumps(trtllm_2(table(), block=block, groups=groups, context=500)))
    assert out["schema_version"] == 2 and out["minimum_predicted_gain"] == 0.01
    assert list(out["cost_tables"]) == [str(g) for g in groups]
    total = 0
    for g in groups:
        cells = out["cost_tables"][str(g)]
        counts, times = cells["token_counts"], cells["step_time_ms"]
        assert rising(counts) and counts[0] == 0 and 2 <= len(counts) == len(times) <= 4
        assert all(g <= v <= g * (block + 1) for v in counts[1:])
        for v, ms in zip(counts, times, strict=True):
            rows = v or g * (block + 1)
            full = table().round_ms(rows, requests=g, context=500, block=block)
            assert ms == pytest.approx(full)
        total += len(counts)
    assert len(out["measurements"]) == total <= 32
    assert out["engine_fingerprint"] == PRINT
    spelled = '{"dtype":"int8","model":"m"}'
    assert out["engine_fingerprint_sha256"] == sha256(spelled.encode()).hexdigest()


def test_schema_2_refuses() -> None:
    for groups, block in (([], K), ([2, 1], K), ([0, 1], K), (list(range(1, 10)), K), ([1], 0)):
        with pytest.raises(ConfigError):
            trtllm_2(table(), block=block, groups=groups)
