"""A measured cost table in the files that other engines schedule by.

Other engines measure their own passes; a table from here is of use to them where they run the same
kernels, as a starting point, or to look at their schedulers with known costs. Their files hold less
than ours (none has the context length), so each function takes the context to fix.

    sglang_a   steps a second by tokens of the pass, at one number of requests; floor lookup
    sglang_b   T = bias + alpha(requests) + theta(tokens), in seconds; clamped linear lookup
    trtllm     the same sum in milliseconds, as step times and overheads ("legacy")
    trtllm_2   schema 2: a few cells for each number of requests G, G <= V <= G (K + 1) tokens in
               the pass, 0 standing for the full block; with a fingerprint and its digest

The layouts were read from the sources of both engines (two of the TensorRT-LLM ones from branches)
and hold their rules; neither was loaded by the real engine here. Where they leave something open
(`measurements`, the spelling under the digest) the choice is ours and said below.

A refusal is a ConfigError: a table without a second probe reads as "not initialised" there, which
silently verifies everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any, Protocol

from dspark.errors import ConfigError

MINIMUM_GAIN = 0.01
CELLS_PER_GROUP = 4
CELLS = 32


class Costs(Protocol):
    """What is needed of a table; `dspark.schedule.cost.CostTable` has it."""

    @property
    def fingerprint(self) -> Mapping[str, Any]: ...

    @property
    def max_tokens(self) -> int: ...

    def verify_ms(self, tokens: int, context: float = 0.0) -> float: ...

    def draft_ms(self, requests: int, block: int) -> float: ...

    def other_ms(self, requests: int) -> float: ...


def sglang_a(
    table: Costs,
    *,
    block: int,
    requests: int = 1,
    context: float = 0.0,
    probes: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Steps a second with `requests` drafting blocks of `block` tokens each.

    probes   tokens of the pass; None takes every count the requests can reach
    """
    last = min(table.max_tokens, requests * (block + 1))
    tokens = list(range(requests, last + 1)) if probes is None else list(probes)
    _need_probes(tokens, "sample_batch_tokens")
    fixed = table.draft_ms(requests, block) + table.other_ms(requests)
    times = [table.verify_ms(t, context) + fixed for t in tokens]
    _need_slope(times)
    return {
        "sample_batch_tokens": tokens,
        "sample_steps_per_sec": [1e3 / ms for ms in times],
        "max_batch_tokens": max(tokens[-1], requests * (block + 1)),
    }


def sglang_b(
    table: Costs,
    *,
    block: int,
    requests: Sequence[int],
    tokens: Sequence[int],
    context: float = 0.0,
) -> dict[str, Any]:
    """The additive form: bias is the cheapest round, alpha what requests add, theta what tokens do.

    tokens   of the pass, anchors included (M = requests + drafts)
    """
    bias, alpha, theta = _additive(table, block, requests, tokens, context)
    return {
        "bias_seconds": bias / 1e3,
        "bs_probes": list(requests),
        "alpha_seconds": [ms / 1e3 for ms in alpha],
        "m_probes": list(tokens),
        "theta_seconds": [ms / 1e3 for ms in theta],
    }


def trtllm(
    table: Costs,
    *,
    block: int,
    requests: Sequence[int],
    tokens: Sequence[int],
    context: float = 0.0,
) -> dict[str, Any]:
    """Legacy: `step_time_ms` by tokens holds bias and theta, `batch_overhead_ms` alpha."""
    bias, alpha, theta = _additive(table, block, requests, tokens, context)
    return {
        "token_counts": list(tokens),
        "step_time_ms": [bias + ms for ms in theta],
        "fixed_overhead_ms": 0.0,
        "batch_sizes": list(requests),
        "batch_overhead_ms": alpha,
        "minimum_predicted_gain": MINIMUM_GAIN,
    }


def trtllm_2(
    table: Costs, *, block: int, groups: Sequence[int], context: float = 0.0
) -> dict[str, Any]:
    """Schema 2: for each number of requests the full block and up to three shorter passes.

    `measurements` repeats the cells one by one. The digest is SHA-256 of the fingerprint as JSON
    with sorted keys and no spaces. The engine wants a file with its live fingerprint beside this
    one; that is `engine_fingerprint` as it stands.
    """
    _need_rising(groups, "groups")
    if block < 1:
        raise ConfigError(f"block={block} is out of range: expected 1 or more")
    tables: dict[str, Any] = {}
    measurements: list[dict[str, Any]] = []
    for g in groups:
        full = g * (block + 1)
        shorter = sorted({g + g * block * i // (CELLS_PER_GROUP - 1) for i in range(3)} - {full})
        cells = [(0, full), *((v, v) for v in shorter)]
        fixed = table.draft_ms(g, block) + table.other_ms(g)
        times = [table.verify_ms(v, context) + fixed for _, v in cells]
        _need_slope(times)
        counts = [name for name, _ in cells]
        tables[str(g)] = {"token_counts": counts, "step_time_ms": times}
        measurements += [
            {"batch_size": g, "token_count": name, "step_time_ms": ms}
            for name, ms in zip(counts, times, strict=True)
        ]
    if len(measurements) > CELLS:
        raise ConfigError(
            f"{len(groups)} groups make {len(measurements)} cells and schema 2 holds {CELLS}: name"
            f" at most {CELLS // CELLS_PER_GROUP} numbers of requests"
        )
    fingerprint = dict(table.fingerprint)
    spelled = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
    return {
        "schema_version": 2,
        "cost_tables": tables,
        "measurements": measurements,
        "engine_fingerprint": fingerprint,
        "engine_fingerprint_sha256": sha256(spelled.encode()).hexdigest(),
        "minimum_predicted_gain": MINIMUM_GAIN,
    }


def _additive(
    table: Costs, block: int, requests: Sequence[int], tokens: Sequence[int], context: float
) -> tuple[float, list[float], list[float]]:
    """bias, alpha by requests, theta by tokens, in milliseconds; both start at 0.

    Exact for our tables at one context: their parts depend on requests or on tokens, never on both.
    """
    _need_rising(requests, "requests")
    _need_probes(tokens, "tokens")

    def batch(r: int) -> float:
        return table.draft_ms(r, block) + table.other_ms(r)

    alpha = [batch(r) - batch(requests[0]) for r in requests]
    theta = [table.verify_ms(t, context) - table.verify_ms(tokens[0], context) for t in tokens]
    _need_slope(theta)
    return batch(requests[0]) + table.verify_ms(tokens[0], context), alpha, theta


def _need_probes(tokens: Sequence[int], name: str) -> None:
    _need_rising(tokens, name)
    if len(tokens) < 2:
        raise ConfigError(f"{name} {list(tokens)} is too short: expected two probes or more")


def _need_rising(values: Sequence[int], name: str) -> None:
    rising = all(a < b for a, b in pairwise(values))
    if not values or values[0] < 1 or not rising:
        raise ConfigError(f"{name} {list(values)}: expected positive numbers, strictly rising")


def _need_slope(times: Sequence[float]) -> None:
    if not max(times) > min(times):
        raise ConfigError("these passes all cost the same, which other engines take for no table")
