"""Making confidences honest: Sequential Temperature Scaling (paper, 3.2.1 and appendix).

The scheduler multiplies confidences into survivals, a_k = c_1 c_2 ... c_k, and spends time on them,
so their size matters and not only their order. Trained heads are mostly too sure, and more so
further back. From left to right each position gets one temperature,

    c_k = sigmoid(logit_k / T_k),

the one that minimises the expected calibration error (ECE) of the *cumulative* product with all
earlier temperatures fixed: position k then also makes up for what the positions before it left
over. A temperature keeps the order of scores at its position, whatever it is.

ECE: predictions in 15 equal bins; in each, |mean prediction - share that came true|; weighted by
the bin's share of all. It is not smooth in T, hence a grid (41 points from 0.1 to 10, then a finer
one around the best), and it is biased upwards by chance: perfectly calibrated scores show about
`ece_noise(n)`, 1.24 / sqrt(n). With fewer than MIN_SAMPLES records, or hardly any record of one
of the two outcomes, a position keeps T = 1: a fit would follow the noise.

*Records.* One row for each draft that was verified *to its end*: logits [n, gamma] and survived
[n, gamma], 1 where this draft and all before it were accepted, so rows never rise. Drafts cut by a
scheduler would show the confident ones only; where cutting cannot be avoided, `known` masks what
was not verified, at the price of that selection.

Not promised: that the law of tomorrow's prompts is that of the records (`monitor.Drift` watches),
nor that one number can bend every curve straight: look at ECE on prompts not used for fitting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.errors import CheckpointError, ConfigError
from dspark.schedule.admission import Array, tempered
from dspark.schedule.files import read_json, write_json

FILE = "calibration.json"
"""Its name beside a drafter's weights."""
BINS = 15
GRID = np.logspace(-1, 1, 41)
MIN_SAMPLES = 1000
"""Records below which nothing is fitted."""
MIN_OUTCOMES = 50
"""Records of either outcome below which a position is not fitted."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Calibration:
    """One temperature a position, and how well they did on the records they come from."""

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures or not all(math.isfinite(t) and t > 0 for t in self.temperatures):
            raise ConfigError(
                f"temperatures {list(self.temperatures)} are no calibration: expected one positive"
                " number for each draft position"
            )
        for name in ("ece_before", "ece_after"):
            values = getattr(self, name)
            if len(values) not in (0, len(self.temperatures)) or not all(
                0 <= v <= 1 for v in values
            ):
                raise ConfigError(
                    f"{name} {list(values)} does not fit {len(self.temperatures)} temperatures"
                )

    @staticmethod
    def identity(length: int) -> Calibration:
        return Calibration((1.0,) * length)

    @property
    def is_identity(self) -> bool:
        return all(t == 1 for t in self.temperatures)

    def apply(self, logits: Array) -> Array:
        """[n, k] logits of the confidence head to conditional confidences, k at most gamma."""
        return sigmoid(np.asarray(logits) / np.array(self._upto(np.shape(logits)[1])))

    def apply_probabilities(self, confidence: Array) -> Array:
        """[n, k] the same for a head whose sigmoid was already taken."""
        confidence = np.asarray(confidence, np.float64)
        return tempered(confidence, self._upto(confidence.shape[1]))

    def _upto(self, length: int) -> tuple[float, ...]:
        if length > len(self.temperatures):
            raise ConfigError(
                f"the calibration has {len(self.temperatures)} positions and the drafts {length}:"
                " calibrate this drafter at its block length"
            )
        return self.temperatures[:length]

    def save(self, path: Path) -> None:
        """Write the JSON that SGLang and TensorRT-LLM read, too. Raises CheckpointError."""
        content: dict[str, Any] = {
            "temperatures": list(self.temperatures),
            "dataset": self.dataset,
            "num_samples": self.num_samples,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
        }
        write_json(path, content)

    @staticmethod
    def load(path: Path, length: int | None = None) -> Calibration:
        """Read a calibration, ours or another engine's, for drafts of `length` tokens.

        Raises CheckpointError if the file is missing or damaged, ConfigError if it has another
        number of positions.
        """
        raw = read_json(path)
        try:
            found = Calibration(
                _floats(raw["temperatures"]),
                str(raw.get("dataset", "")),
                int(raw.get("num_samples", 0)),
                _floats(raw.get("ece_before", ())),
                _floats(raw.get("ece_after", ())),
            )
        except (ConfigError, KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{path} is no calibration ({e!r}): calibrate again") from e
        if length is not None and len(found.temperatures) != length:
            raise ConfigError(
                f"{path} has {len(found.temperatures)} temperatures and the drafter's block"
                f" {length} positions: calibrate this drafter"
            )
        return found


@dataclass(frozen=True)
class Bin:
    """One column of a reliability diagram: predictions between `low` and `high`."""

    low: float
    high: float
    count: int
    predicted: float
    """Mean prediction; 0 in an empty bin."""
    realised: float
    """Share that came true; 0 in an empty bin."""


@dataclass(frozen=True)
class Quality:
    """How good the survivals at one position are; `position` counts from 1."""

    position: int
    samples: int
    predicted: float
    realised: float
    ece: float
    auc: float | None
    """Chance that a draft that survived was ranked above one that did not; None without both."""
    brier: float


@dataclass(frozen=True)
class Fit:
    """A calibration, and every position before and after it on the same records."""

    calibration: Calibration
    before: tuple[Quality, ...]
    after: tuple[Quality, ...]


def fit(logits: Array, survived: Array, known: Bools | None = None, *, dataset: str = "") -> Fit:
    """Temperatures for records [n, gamma]; the identity where there is too little data.

    Raises ConfigError if the records are no such thing.
    """
    logits, outcomes, mask = _checked(logits, survived, known)
    n, gamma = logits.shape
    front, temperatures = np.ones(n), []
    for k in range(gamma):
        rows = mask[:, k]
        t = _fit_one(logits[rows, k], front[rows], outcomes[rows, k]) if n >= MIN_SAMPLES else 1.0
        temperatures.append(t)
        front = front * sigmoid(logits[:, k] / t)
    before = evaluate(Calibration.identity(gamma), logits, survived, known)
    after = evaluate(Calibration(tuple(temperatures)), logits, survived, known)
    calibration = Calibration(
        tuple(temperatures),
        dataset,
        n,
        tuple(q.ece for q in before),
        tuple(q.ece for q in after),
    )
    return Fit(calibration, before, after)


def evaluate(
    calibration: Calibration, logits: Array, survived: Array, known: Bools | None = None
) -> tuple[Quality, ...]:
    """Every position on records that need not be those of the fit."""
    logits, outcomes, mask = _checked(logits, survived, known)
    survival = np.cumprod(calibration.apply(logits), axis=1)
    out = []
    for k in range(logits.shape[1]):
        a, y = survival[mask[:, k], k], outcomes[mask[:, k], k]
        n = len(a)
        out.append(
            Quality(
                k + 1,
                n,
                float(a.mean()) if n else 0.0,
                float(y.mean()) if n else 0.0,
                ece(a, y),
                auc(a, y),
                float(((a - y) ** 2).mean()) if n else 0.0,
            )
        )
    return tuple(out)


def reliability(
    calibration: Calibration,
    logits: Array,
    survived: Array,
    position: int,
    known: Bools | None = None,
    bins: int = BINS,
) -> tuple[Bin, ...]:
    """The reliability diagram of the survival at `position` (from 1), as numbers."""
    logits, outcomes, mask = _checked(logits, survived, known)
    rows = mask[:, position - 1]
    a = np.cumprod(calibration.apply(logits), axis=1)[rows, position - 1]
    count, predicted, realised = _binned(a, outcomes[rows, position - 1], bins)
    some = np.maximum(count, 1)
    return tuple(
        Bin(b / bins, (b + 1) / bins, int(count[b]), predicted[b] / some[b], realised[b] / some[b])
        for b in range(bins)
    )


# -- measures ------------------------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    """Without overflow on either side."""
    e = np.exp(-np.abs(x))
    out: Array = np.where(x >= 0, 1, e) / (1 + e)
    return out


def ece(predicted: Array, outcome: Array, bins: int = BINS) -> float:
    """Expected calibration error; 0 for no data."""
    if not len(predicted):
        return 0.0
    _, p, y = _binned(predicted, outcome, bins)
    return float(np.abs(p - y).sum() / len(predicted))


def ece_noise(samples: int, bins: int = BINS) -> float:
    """About the ECE that perfectly calibrated scores show by chance.

    A bin of n/15 records is off by sqrt(2/pi) * sd / sqrt(n/15) in the mean, with an sd of 0.4
    between that of a coin and that of a near certainty.
    """
    return math.sqrt(2 / math.pi) * 0.4 * math.sqrt(bins / samples)


def auc(score: Array, outcome: Array) -> float | None:
    """Area under the ROC curve; tied scores count half."""
    positives = int(outcome.sum())
    negatives = len(outcome) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    above = float(ranks[outcome > 0].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def _binned(predicted: Array, outcome: Array, bins: int) -> tuple[NDArray[np.intp], Array, Array]:
    """Of each bin: how many, sum of predictions, sum of outcomes."""
    where = np.minimum((predicted * bins).astype(np.intp), bins - 1)
    count = np.bincount(where, minlength=bins)
    sums = [np.bincount(where, w, bins).astype(np.float64) for w in (predicted, outcome)]
    return count, sums[0], sums[1]


def _fit_one(logits: Array, front: Array, outcome: Array) -> float:
    """The temperature of one position behind survivals `front`; 1 unless another is better."""
    hits = int(outcome.sum())
    if min(hits, len(outcome) - hits) < MIN_OUTCOMES:
        return 1.0

    def loss(t: float) -> float:
        return ece(front * sigmoid(logits / t), outcome)

    def better(best: tuple[float, float], grid: Array) -> tuple[float, float]:
        # Of equals the one nearest to 1, so that nothing is bent for nothing.
        near = sorted(grid.tolist(), key=lambda t: abs(math.log(t)))
        return min([best, *((loss(t), t) for t in near)], key=lambda pair: pair[0])

    best = better((loss(1.0), 1.0), GRID)
    step = GRID[1] / GRID[0]
    return better(best, best[1] * np.logspace(-1, 1, 21, base=step))[1]


def _checked(logits: Array, survived: Array, known: Bools | None) -> tuple[Array, Array, Bools]:
    logits, outcomes = np.asarray(logits, np.float64), np.asarray(survived, np.float64)
    mask = np.ones(logits.shape, np.bool_) if known is None else np.asarray(known, np.bool_)
    if logits.ndim != 2 or not logits.shape == outcomes.shape == mask.shape:
        raise ConfigError(
            f"no calibration records: logits {logits.shape}, outcomes {outcomes.shape}, known"
            f" {mask.shape}; expected [n, positions] three times"
        )
    if not np.isfinite(logits[mask]).all() or not np.isin(outcomes[mask], (0, 1)).all():
        raise ConfigError("calibration records need finite logits and outcomes of 0 or 1")
    if (mask[:, 1:] > mask[:, :-1]).any():
        raise ConfigError(
            "`known` must mask the ends of drafts, not positions in front of known ones"
        )
    if ((outcomes[:, 1:] > outcomes[:, :-1]) & mask[:, 1:]).any():
        raise ConfigError(
            "a calibration record has a draft that survived behind one that did not: outcomes are"
            " those of the whole prefix"
        )
    return np.where(mask, logits, 0.0), np.where(mask, outcomes, 0.0), mask


def _floats(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or any(isinstance(v, bool | str) for v in values):
        raise ValueError(f"{values!r} is no list of numbers")
    return tuple(float(v) for v in values)
