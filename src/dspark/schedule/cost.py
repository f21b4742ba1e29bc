"""What a round costs: milliseconds by tokens, context, requests and block length (paper, 3.2.2).

The scheduler maximises expected tokens per second, Theta = tau * SPS(B), where SPS(B) is the number
of rounds a second when B tokens share the pass. SPS is a property of model, machine and settings,
so it is measured once and kept as a table. A round has three parts:

    verify(B, C)   the pass over B tokens whose rows look back on C tokens of context in the mean
    draft(R, k)    drafting blocks of k tokens for R requests; paid in full, however few are checked
    other(R)       admission, accepting, emitting, telling the drafter what became permanent

    SPS(B) = 1000 / (verify(B, C) + draft(R, k) + other(R))

The paper writes SPS(B) alone. The other two parts are in the denominator here because a round pays
them: without them every schedule looks too short. Whether to draft at all is another question,
which `gate` answers.

*From measurements to curves.* Medians of each probe (single hiccups vanish); then the closest
non-decreasing curve (isotonic regression, pool adjacent violators), since more tokens never cost
less and an accidental dip would draw every schedule into it. No line is laid through the tokens:
kernels work in tiles, real curves are staircases, and a scheduler that knows where the cliff is
can stop in front of it. Between two probes the curve is linear, so a step stays a step exactly if
both its sides were probed (`token_probes` proposes 8 and 9, 16 and 17 ...). Below the first probe
it is constant; beyond the last it goes on with the slope of its upper half: nothing is free out
there. In the context the pass is linear, with a slope that may grow with the tokens.

*What a table is good for.* It names what it was measured for (a fingerprint: model, dtype, device,
threads, versions, drafter; composed by the caller) and is refused elsewhere. A table that is flat
is refused, too: with verification free of charge every scheduler would check everything and call it
adaptive. Not promised: that the machine still behaves as measured; `monitor` watches that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dspark.errors import CheckpointError, ConfigError
from dspark.schedule.files import cache_dir, canonical, digest, read_json, write_json

Fingerprint = Mapping[str, Any]
"""What a table was measured for: JSON values by name."""
SCHEMA = 2
KIND = "dspark-cost"
FLAT = 1.02
"""The dearest probe must cost more than this times the cheapest; below that it is noise."""

KEPT = 64
"""Curves that are remembered: the same batch asks for the same one round after round."""


@dataclass(frozen=True)
class Curve:
    """A non-decreasing function of a count: `ms[i]` at `at[i]`, linear between."""

    at: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        ok = (
            len(self.at) == len(self.ms) > 0
            and all(isinstance(x, int) and x >= 0 for x in self.at)
            and all(a < b for a, b in pairwise(self.at))
            and all(math.isfinite(y) and y >= 0 for y in self.ms)
            and all(a <= b for a, b in pairwise(self.ms))
        )
        if not ok:
            raise ConfigError(
                f"no cost curve: {len(self.at)} counts with {len(self.ms)} times; expected as many"
                " of both, the counts rising, the times finite, not negative and not falling"
            )

    def __call__(self, x: float) -> float:
        i = bisect_right(self.at, x)
        if i == 0:
            return self.ms[0]
        if i < len(self.at):
            x0, x1, y0, y1 = self.at[i - 1], self.at[i], self.ms[i - 1], self.ms[i]
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        return self.ms[-1] + self._slope * (x - self.at[-1])

    @cached_property
    def _slope(self) -> float:
        """Beyond the last probe: from the middle probe to the last."""
        if len(self.at) == 1:
            return 0.0
        middle = (len(self.at) - 1) // 2
        return (self.ms[-1] - self.ms[middle]) / (self.at[-1] - self.at[middle])

    def scaled(self, factor: float) -> Curve:
        return Curve(self.at, tuple(y * factor for y in self.ms))

    @staticmethod
    def fit(samples: Mapping[int, Sequence[float]]) -> Curve:
        """Through the medians of repeated measurements, made monotone."""
        at = sorted(samples)
        fitted = isotonic([median(samples[x]) for x in at], [len(samples[x]) for x in at])
        return Curve(tuple(at), tuple(fitted))


ZERO = Curve((1,), (0.0,))


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence closest to `values` in weighted squares.

    Pool adjacent violators: whenever a block's mean lies below the block before it, the two merge.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        block = (float(value), float(weight), 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, w, n = blocks.pop()
            both = w + block[1]
            block = ((mean * w + block[0] * block[1]) / both, both, n + block[2])
        blocks.append(block)
    return [mean for mean, _, n in blocks for _ in range(n)]


def token_probes(limit: int) -> tuple[int, ...]:
    """Token counts worth measuring up to `limit`: all small ones, then both sides of each likely
    step (multiples of 8, later of 32)."""
    points = set(range(1, 17))
    for stride, first, last in ((8, 16, 64), (32, 64, 256), (128, 256, limit)):
        for m in range(first, last + 1, stride):
            points |= {m, m + 1}
    return tuple(sorted(p for p in points | {limit} if 1 <= p <= limit))


@dataclass(frozen=True)
class CostTable:
    """The measured costs of one model on one machine.

    verify   by tokens, at a mean context of `context` tokens
    slope    ms for each further token of context, by tokens of the pass
    draft    (block length, curve by requests), the lengths rising; empty for no drafter
    other    by requests
    """

    verify: Curve
    slope: Curve
    context: float
    draft: tuple[tuple[int, Curve], ...]
    other: Curve
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        v = self.verify
        if not v.ms[-1] > FLAT * v.ms[0] or v.ms[0] <= 0:
            raise ConfigError(
                f"the cost table is flat: {v.at[0]} to {v.at[-1]} tokens all take about"
                f" {v.ms[-1]:.3g} ms, so there is nothing to schedule by; measure more tokens, or"
                " verify whole drafts"
            )
        lengths = [k for k, _ in self.draft]
        if lengths != sorted(set(lengths)) or any(k < 1 for k in lengths):
            raise ConfigError(f"block lengths {lengths} are no rising positive numbers")

    # -- lookups -------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """The largest pass that was measured."""
        return self.verify.at[-1]

    def verify_ms(self, tokens: int, context: float = 0.0) -> float:
        """A pass. A context below the shortest measured one costs as much as that one."""
        return self.verify(tokens) + self.slope(tokens) * max(context - self.context, 0.0)

    def draft_ms(self, requests: int, block: int) -> float:
        """Blocks of `block` drafts (0: none); linear between the measured lengths, in proportion
        beyond the longest and at the price of the shortest below it."""
        if block <= 0 or requests <= 0 or not self.draft:
            return 0.0
        below = [(k, c) for k, c in self.draft if k <= block]
        above = [(k, c) for k, c in self.draft if k > block]
        if not below:
            return above[0][1](requests)
        k0, c0 = below[-1]
        if not above:
            return c0(requests) * block / k0
        k1, c1 = above[0]
        return c0(requests) + (c1(requests) - c0(requests)) * (block - k0) / (k1 - k0)

    def other_ms(self, requests: int) -> float:
        return self.other(requests)

    def round_ms(
        self, tokens: int, *, requests: int = 1, context: float = 0.0, block: int = 0
    ) -> float:
        """A whole round; `block` 0 is plain decoding."""
        parts = self.draft_ms(requests, block), self.other_ms(requests)
        return self.verify_ms(tokens, context) + sum(parts)

    def curve(
        self, first: int, last: int, *, requests: int = 1, context: float = 0.0, block: int = 0
    ) -> list[float]:
        """`round_ms` for passes of first, first + 1, ... last tokens; the last few are kept, so
        do not change the list."""
        key = (first, last, requests, context, block)
        kept = self._curves
        if key not in kept:
            if len(kept) >= KEPT:
                kept.clear()
            fixed = self.draft_ms(requests, block) + self.other_ms(requests)
            extra = max(context - self.context, 0.0)
            base, slope = (dense[first : last + 1] for dense in self._dense)
            out = [b + s * extra + fixed for b, s in zip(base, slope, strict=True)]
            beyond = range(max(first, self.max_tokens + 1), last + 1)
            kept[key] = out + [self.verify_ms(t, context) + fixed for t in beyond]
        return kept[key]

    def sps(self, tokens: int, *, requests: int = 1, context: float = 0.0, block: int = 0) -> float:
        """Rounds a second with `tokens` in the pass: the paper's SPS(B)."""
        return 1e3 / self.round_ms(tokens, requests=requests, context=context, block=block)

    @cached_property
    def _curves(self) -> dict[tuple[float, ...], list[float]]:
        return {}

    @cached_property
    def _dense(self) -> tuple[list[float], list[float]]:
        tokens = range(self.max_tokens + 1)
        return [self.verify(t) for t in tokens], [self.slope(t) for t in tokens]

    def scaled(self, verify: float = 1.0, draft: float = 1.0, other: float = 1.0) -> CostTable:
        """The table of a machine that became slower or faster, part by part."""
        return replace(
            self,
            verify=self.verify.scaled(verify),
            slope=self.slope.scaled(verify),
            draft=tuple((k, c.scaled(draft)) for k, c in self.draft),
            other=self.other.scaled(other),
        )

    # -- making and keeping ----------------------------------------------------------------------

    @staticmethod
    def fit(
        fingerprint: Fingerprint,
        verify: Iterable[tuple[int, float, float]],
        draft: Iterable[tuple[int, int, float]] = (),
        other: Iterable[tuple[int, float]] = (),
    ) -> CostTable:
        """From single measurements in any order, each repeated as often as one likes.

        verify   (tokens, mean context, ms); every token count at the shortest context, some of
                 them at longer ones, too
        draft    (requests, block length, ms)
        other    (requests, ms)

        Raises ConfigError if a probe is missing or the result is flat.
        """
        passes: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for tokens, context, ms in verify:
            passes[tokens][context].append(ms)
        if not passes:
            raise ConfigError("no verification pass was measured: nothing to schedule by")
        shortest = min(c for cells in passes.values() for c in cells)
        lacking = sorted(t for t, cells in passes.items() if shortest not in cells)
        if lacking:
            raise ConfigError(
                f"passes of {lacking} tokens were not measured at a context of {shortest:g}, the"
                " shortest one of the table"
            )
        at_shortest = {t: cells[shortest] for t, cells in passes.items()}
        slopes = {t: [_slope(cells)] for t, cells in passes.items() if len(cells) > 1}
        blocks: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for requests, block, ms in draft:
            blocks[block][requests].append(ms)
        rest: dict[int, list[float]] = defaultdict(list)
        for requests, ms in other:
            rest[requests].append(ms)
        curves: list[tuple[int, Curve]] = []
        for block in sorted(blocks):
            curve = Curve.fit(blocks[block])
            if curves:  # a longer block is no cheaper
                shorter = curves[-1][1]
                curve = Curve(
                    curve.at,
                    tuple(max(y, shorter(x)) for x, y in zip(curve.at, curve.ms, strict=True)),
                )
            curves.append((block, curve))
        return CostTable(
            Curve.fit(at_shortest),
            Curve.fit(slopes) if slopes else ZERO,
            shortest,
            tuple(curves),
            Curve.fit(rest) if rest else ZERO,
            dict(fingerprint),
        )

    def save(self, path: Path) -> None:
        """Write the table, at once. Raises CheckpointError if the disk does not take it."""
        curves = {"verify": self.verify, "slope": self.slope, "other": self.other}
        content: dict[str, Any] = {
            "kind": KIND,
            "schema": SCHEMA,
            "fingerprint": dict(self.fingerprint),
            "context": self.context,
            **{name: {"at": c.at, "ms": c.ms} for name, c in curves.items()},
            "draft": [{"block": k, "at": c.at, "ms": c.ms} for k, c in self.draft],
        }
        write_json(path, content)

    @staticmethod
    def load(path: Path, fingerprint: Fingerprint) -> CostTable:
        """The table in `path`, if it was measured for `fingerprint`.

        Raises CheckpointError if it is missing, damaged or of another schema, ConfigError if it is
        of another model or machine (naming what differs) or flat.
        """
        raw = read_json(path)
        again = "delete it to measure again"
        if raw.get("kind") != KIND or raw.get("schema") != SCHEMA:
            raise CheckpointError(
                f"{path} is no cost table of schema {SCHEMA} (kind {raw.get('kind')!r}, schema"
                f" {raw.get('schema')!r}): {again}"
            )
        try:
            verify, slope, other = (_curve(raw[name]) for name in ("verify", "slope", "other"))
            draft = tuple((int(d["block"]), _curve(d)) for d in raw["draft"])
            context, found = float(raw["context"]), dict(raw["fingerprint"])
            if not (math.isfinite(context) and context >= 0):
                raise ValueError(f"context {context}")
        except (ConfigError, KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{path} is damaged ({e!r}): {again}") from e
        wanted = dict(fingerprint)
        if canonical(found) != canonical(wanted):
            names = sorted(n for n in found | wanted if found.get(n) != wanted.get(n))
            differ = ", ".join(f"{n} {found.get(n)!r} not {wanted.get(n)!r}" for n in names)
            raise ConfigError(f"{path} was measured for something else ({differ}): measure again")
        return CostTable(verify, slope, context, draft, other, found)


def table_path(fingerprint: Fingerprint) -> Path:
    """Where the table of a fingerprint is kept between runs."""
    return cache_dir() / f"cost-{digest(dict(fingerprint))[:16]}.json"


def _curve(raw: Mapping[str, Any]) -> Curve:
    return Curve(tuple(raw["at"]), tuple(float(y) for y in raw["ms"]))


def _slope(cells: Mapping[float, Sequence[float]]) -> float:
    """Least squares through the medians of one token count over contexts; never negative."""
    contexts = list(cells)
    times = [median(cells[c]) for c in contexts]
    mean_c, mean_t = fmean(contexts), fmean(times)
    top = sum((c - mean_c) * (t - mean_t) for c, t in zip(contexts, times, strict=True))
    return max(top / sum((c - mean_c) ** 2 for c in contexts), 0.0)
