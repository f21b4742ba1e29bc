"""Measuring what a round costs on this machine, for the scheduler (`schedule.cost`).

A few seconds, once: the table is kept in the cache under the fingerprint of what was measured.

*Passes* are timed on the target alone, their tokens spread over slots in blocks as the drafter
makes them, without a context and a few with a long one. What the caches hold does not matter for
the time. *Drafting* and *the rest of a round* are taken from an engine that really runs requests:
live rounds are timed by the very same clock readings, so the two can be compared. Half as long
blocks are timed, too: `blocks` weighs them.

Passes are measured in turns and not one count after the other, so that a neighbour's burst or a
clock that changes its speed spreads over the whole curve; medians then drop single hiccups.

*Coarse to fine.* Passes double from a single row until one is long, or as large as a pass can get.
Beyond the last one the curve goes on with its slope, so it is not stopped before a pass takes twice
as long as a single row: then rows cost what they cost, and larger passes would only take time.
Behind that, in turns, come the long context, the smallest passes, the powers of two and, where a
turn is short, both sides of every likely step.

*The deadline.* Half of the seconds are for passes, the rest for rounds, and the clock is read
before each of either. So a slow model gets a coarser table in the same time. What was begun is
ended, and beyond the deadline there is only what no table can do without: the doubling passes, and
for one request and for the most a prompt and two rounds.

It needs an idle target and drafter, and leaves them idle. On a GPU, passes are timed as the engine
times them: without waiting for the device.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from dspark.drafters.base import Drafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.errors import CheckpointError, ConfigError
from dspark.models.target import Batch, Segment, Target, pack
from dspark.schedule.cost import CostTable, Fingerprint, table_path, token_probes
from dspark.schedule.overlap import LaneTimes
from dspark.schedule.scheduler import Scheduler
from dspark.types import Request, Round, SamplingParams

log = logging.getLogger(__name__)
OFF = "DSPARK_NO_PROFILE"
"""Set it to anything but 0 and no costs are measured or read."""
SECONDS = 3.0
LONG, LEAST = 1024, 128
"""Context of the long passes, as far as the slots hold it; shorter than LEAST tells only noise."""
PROMPT = 2
"""Tokens in front of live rounds."""
LARGEST = 512
"""Rows beyond which nothing is measured; the curve goes on with its slope there."""
STOP = 1 / 16
"""Share of the time for passes that one may take before they are not doubled any more."""
TURNS = 7
ROUNDS = 5
PLAIN_ROUNDS, PLAIN_SECONDS = 20, 1.0


Clock = Callable[[], float]
"""Seconds since whenever."""


@dataclass(frozen=True)
class Costs:
    """A table, or None, and in a few words where it comes from or why there is none."""

    table: CostTable | None
    reason: str


def obtain(target: Target, drafter: Callable[[], Drafter], fingerprint: Fingerprint) -> Costs:
    """The table of an earlier run, or a new one that is kept for later runs; only that one needs
    the drafter, which may take seconds to load."""
    if is_off():
        return Costs(None, f"no cost table, {OFF} is set: a fixed guess instead")
    path = table_path(fingerprint)
    again = ""
    try:
        return Costs(CostTable.load(path, fingerprint), "by the costs measured earlier")
    except (CheckpointError, ConfigError):
        again = " again, the table was not usable" if path.exists() else ""
    made = drafter()
    log.info("measuring what a round costs (about %g s, once)", SECONDS)
    start = time.perf_counter()
    try:
        table = measure(target, made, fingerprint, SECONDS)
    except ConfigError as e:
        return Costs(None, f"{e}: a fixed guess instead")
    reason = f"costs measured{again} in {time.perf_counter() - start:.1f} s"
    try:
        table.save(path)
    except CheckpointError as e:
        reason += f", not kept: {e}"
    return Costs(table, reason)


def fingerprint(
    target: Target,
    model: str,
    dtype: str,
    device: str,
    threads: int,
    drafter: str,
    num_draft_tokens: int | None,
) -> dict[str, object]:
    """What measured costs belong to."""
    t = target
    return {
        "model": model,
        "shape": [t.num_layers, t.hidden_size, t.vocab_size, t.num_slots],
        "dtype": dtype,
        "device": f"{device} {machine(t.device)}",
        "threads": threads,
        "drafter": drafter,
        "num_draft_tokens": num_draft_tokens,
        "versions": {name: importlib.metadata.version(name) for name in ("dspark", "torch")},
    }


def is_off() -> bool:
    """Nothing is to be measured, or read from an earlier measurement."""
    return os.environ.get(OFF, "0") not in ("", "0")


def forget(fingerprint: Fingerprint) -> None:
    """Drop what an earlier run kept; the next `obtain` measures."""
    with suppress(OSError):  # a cache that cannot be written holds nothing new either
        table_path(fingerprint).unlink(missing_ok=True)


def machine(device: torch.device) -> str:
    """What computes, by its own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform's own words have to do
    return platform.processor() or platform.machine()


def measure(
    target: Target,
    drafter: Drafter,
    fingerprint: Fingerprint,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
) -> CostTable:
    """`seconds` of measuring by `clock`. Raises ConfigError if nothing can be told."""
    start = clock()
    verify = _passes(target, drafter, start + seconds / 2, clock)
    draft, other = _rounds(target, drafter, start + seconds, clock)
    return CostTable.fit(fingerprint, verify, draft, other)


def plain_speed(target: Target) -> float:
    """Tokens a second that one text gets without a drafter, on the path of all texts: the median
    round behind a short prompt, of about a second's."""
    rounds: list[Round] = []
    rng, start = np.random.default_rng(0), time.perf_counter()
    while len(rounds) < PLAIN_ROUNDS:
        rounds += _live(target, NoDrafter(target), 1, rng)
        if time.perf_counter() - start > PLAIN_SECONDS:
            break
    return 1e3 / median(r.draft_ms + r.verify_ms + r.other_ms for r in rounds)


def lane_times(target: Target, drafter: Drafter, threads: int, apart: tuple[int, int]) -> LaneTimes:
    """Rounds of one request on all `threads`, and on those that the target and the drafter would
    have `apart`: medians of a few rounds each. Leaves `threads` set."""
    rng = np.random.default_rng(0)
    found: dict[int, list[Round]] = {}
    for count in (*{*apart}, threads):
        torch.set_num_threads(count)
        found[count] = _live(target, drafter, 1, rng)

    def middle(count: int, part: str) -> float:
        return float(median(getattr(r, part) for r in found[count]))

    return LaneTimes(
        middle(threads, "verify_ms"),
        middle(threads, "draft_ms"),
        middle(apart[0], "verify_ms"),
        middle(apart[1], "draft_ms"),
    )


# -- passes --------------------------------------------------------------------------------------


def _passes(
    target: Target, drafter: Drafter, deadline: float, clock: Clock
) -> list[tuple[int, float, float]]:
    """(tokens, context, ms) of single passes."""
    block = min(drafter.cap + 1, max(target.max_context // 2, 1))
    limit = min(target.num_slots * block, LARGEST)
    long = min(LONG, target.max_context - block)

    def probe(tokens: int, context: int) -> tuple[int, float, float]:
        batch = _spread(target, tokens, block, context)
        start = clock()
        target.forward(batch, drafter.feature_layers)
        return tokens, float(context), (clock() - start) * 1e3

    longest = (deadline - clock()) * 1e3 * STOP
    probe(1, 0)  # first uses pay for memory and kernels
    out = [probe(1, 0)]
    tokens, longest = 1, max(longest, 2 * out[0][2])
    while tokens < limit:
        tokens = min(2 * tokens, limit)
        for _ in range(2):  # one long pass may be a hiccup
            out.append(probe(tokens, 0))
            if out[-1][2] <= longest or tokens == limit:
                break
        else:
            limit = tokens
    between = [p for p in token_probes(limit) if 1 < p < limit]
    coarse = [p for p in between if p < 8 or p & (p - 1) == 0]
    cells = []
    if long >= LEAST:
        cells += [(p, long) for p in (1, limit, *coarse[len(coarse) // 2 :][:1])]
    cells += [(p, 0) for p in (*coarse, 1, limit)]
    others = [(p, 0) for p in between if p not in coarse]
    # Single measurements of many counts would be worth less than two of some.
    turn_seconds = out[-1][2] / 1e3 * (len(cells) + len(others)) / 2
    if clock() + 2 * turn_seconds < deadline:
        cells += others
    for cell in cells * TURNS:
        if clock() > deadline:
            break
        out.append(probe(*cell))
    return out


def _spread(target: Target, tokens: int, block: int, context: int) -> Batch:
    """A pass of `tokens` rows, every row with logits, in blocks behind `context` tokens."""
    segments = []
    for slot in range(-(-tokens // block)):
        ids = tuple(range(min(block, tokens - slot * block)))
        ids = tuple(i % target.vocab_size for i in ids)
        segments.append(Segment(slot, context, ids, len(ids)))
    return pack(segments, target.device)


# -- drafting and the rest -------------------------------------------------------------------------


class _NoText:
    """A tokenizer for texts that nobody reads."""

    eos_ids: tuple[int, ...] = ()

    def id_to_bytes(self, token: int) -> bytes:
        return b""


def _rounds(
    target: Target, drafter: Drafter, deadline: float, clock: Clock
) -> tuple[list[tuple[int, int, float]], list[tuple[int, float]]]:
    """(requests, block, ms) of drafting and (requests, ms) of the rest, in rounds of an engine."""
    draft: list[tuple[int, int, float]] = []
    other: list[tuple[int, float]] = []
    rng = np.random.default_rng(0)
    most = target.num_slots
    levels = {1, most} | {2**i for i in range(1, most.bit_length()) if 2**i < most}
    for users in sorted(levels, key=lambda n: (n not in (1, most), n)):  # the ends first
        now = clock()
        if users not in (1, most) and now > deadline:
            break
        late = _after(now + (deadline - now) / 3, clock)
        for r in _live(target, drafter, users, rng, late):
            other.append((users, r.other_ms))
            draft.append((users, drafter.cap, r.draft_ms))
        short = drafter.cap // 2
        if short and clock() < deadline:
            rounds = _live(target, drafter, users, rng, late, short)
            draft += [(users, short, r.draft_ms) for r in rounds]
    return (draft if drafter.cap else []), other


def _after(moment: float, clock: Clock) -> Callable[[], bool]:
    return lambda: clock() > moment


def _live(
    target: Target,
    drafter: Drafter,
    users: int,
    rng: np.random.Generator,
    late: Callable[[], bool] = lambda: False,
    longest: int | None = None,
) -> list[Round]:
    """A few rounds of `users` requests, one if it is late, with blocks of `longest` at most; one
    Round stands for each, the first is left out."""
    length = max(min(PROMPT, target.max_context // 4), 1)
    rounds: list[Round] = []
    engine = Engine(
        target,
        drafter,
        _NoText(),
        prefill_chunk=users * length,  # all at once: every round behind it has all requests
        # Drafts are timed, passes have been.
        scheduler=Scheduler("static:0", longest=longest),
        on_round=lambda r: rounds.append(r) if r.request_id == "0" and r.index else None,
    )
    params = SamplingParams(max_tokens=target.max_context, ignore_eos=True)
    for n in range(users):
        prompt = rng.integers(target.vocab_size, size=length // 2).tolist() * 2
        engine.submit(Request(str(n), tuple(prompt) or (0,), params))
    while engine.has_work and len(rounds) < (1 if late() else ROUNDS):
        engine.step()
    for n in range(users):
        engine.cancel(str(n))
    return rounds
