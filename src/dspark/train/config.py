"""A training run as frozen dataclasses, read from a TOML file and overrides `section.key=value`.

    [target]    which model, in which arithmetic
    [text]      what it wrote (`samples.py`), and how much of that is held out
    [drafter]   what is trained
    [features]  hidden states from a cache or from live passes (`features.py`)
    [loss]      factors of the loss terms (`losses.py`)
    [train]     how much, how fast, where to

The dataclasses are the reference: every key, its type and its default stand here. Paths are
relative to the working directory. An unknown key is refused with the nearest known one, because a
misspelt option that silently keeps its default costs hours.
"""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dspark.drafters.config import HeadType
from dspark.errors import ConfigError
from dspark.train.losses import LossWeights

DrafterKind = Literal["dspark", "dflash", "mtp", "block"]
Range = tuple[str, float, float, float | None]
"""Name, value, least and largest one allowed (None: no limit)."""
C = TypeVar("C")


@dataclass(frozen=True)
class TargetSection:
    model: str = "default"
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class TextSection:
    """held_out: samples kept for validation, a number, or below 1 a share of all. They are chosen
    by a hash, temperature 1 first, because the estimate of the accepted length is unbiased only
    there; no other sample of the same prompt is trained on. 0 estimates on trained text."""

    files: tuple[str, ...] = ()
    max_tokens: int = 512
    held_out: int | float = 0.02

    def check(self) -> None:
        """Raises ConfigError without files or for a number out of range."""
        if not self.files:
            raise ConfigError("text.files is empty: name the JSON Lines files to train on")
        check_ranges(
            ("text.max_tokens", self.max_tokens, 3, None),
            ("text.held_out", self.held_out, 0, None),
        )


@dataclass(frozen=True)
class DrafterSection:
    """None takes what `kind` usually has (`PRESETS`), or what suits the target."""

    kind: DrafterKind = "dspark"
    num_layers: int | None = None
    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    markov_rank: int | None = None
    markov_head_type: HeadType = "vanilla"
    confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    sample_from_anchor: bool | None = None
    inject: bool = False
    conv: bool = False
    layer_fusion: bool = False
    qk_norm: bool = True
    draft_vocab_size: int = 0
    markov_init: Literal["target", "none"] = "target"
    """Start the Markov head at the target's own bigram law (`prior.py`), or at no bias."""
    init_layers: tuple[int, ...] = ()
    """Target layers whose weights the draft layers start from; empty: random, std 0.02."""
    candidates: int = 0
    standardise: bool = True
    """Learn from target features of equal size: channels are divided by their spread, and nearly
    constant ones fade. A block drafter's `fc` takes the factors in when it is saved."""
    start_from: str = ""
    """A drafter's checkpoint whose weights the run begins with: a second stage with other losses
    or other text. Sizes and options must be the same."""


PRESETS: dict[str, dict[str, Any]] = {
    "dspark": {"num_layers": 3, "block_size": 7, "markov_rank": 128, "confidence_head": True,
               "sample_from_anchor": True},
    "dflash": {"num_layers": 3, "block_size": 7, "markov_rank": 0, "confidence_head": False,
               "sample_from_anchor": False},
    "block": {"num_layers": 1, "block_size": 1, "markov_rank": 0, "confidence_head": False,
              "sample_from_anchor": True},
    "mtp": {"num_layers": 1, "block_size": 1, "markov_rank": 0, "confidence_head": False,
            "sample_from_anchor": True},
}  # fmt: skip


@dataclass(frozen=True)
class FeaturesSection:
    """directory: empty is OUT/features. layers: which are stored, the final one last; None takes
    those of a cache that is there, or else those that the drafter reads. A superset lets several
    drafters share one cache."""

    mode: Literal["cache", "live"] = "cache"
    directory: str = ""
    layers: tuple[int, ...] | None = None
    pass_tokens: int = 512


@dataclass(frozen=True)
class Steps:
    """What every run says of its steps, whatever it trains."""

    out: str = "runs/drafter"
    lr: float = 6e-4
    warmup: float = 0.04
    """Share of all steps."""
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr: float = 0.1
    """Where the cosine ends, as a share of lr."""
    weight_decay: float = 0.0
    """Of matrices; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    save_every: int = 200
    eval_every: int = 200
    log_every: int = 10
    max_minutes: float = 0.0
    """Stop after so long with a state to go on from; 0: no limit."""
    threads: int = 0
    """CPU threads; 0: PyTorch's choice."""

    def ranges(self) -> list[Range]:
        """What the numbers may be."""
        return [
            *((f"train.{n}", getattr(self, n), 0, None) for n in (
                "lr", "weight_decay", "seed", "max_minutes", "threads")),
            *((f"train.{n}", getattr(self, n), 1, None) for n in (
                "save_every", "eval_every", "log_every")),
            ("train.warmup", self.warmup, 0, 1),
            ("train.min_lr", self.min_lr, 0, 1),
            ("train.betas[0]", self.betas[0], 0, 0.9999),
            ("train.betas[1]", self.betas[1], 0, 0.999999),
            ("train.clip", self.clip, 1e-6, None),
        ]  # fmt: skip


@dataclass(frozen=True)
class TrainSection(Steps):
    """Of `steps`, `epochs` and `anchors` one is given; none of them is one epoch. Of
    `anchors_per_step` and `sequences_per_step` likewise."""

    steps: int = 0
    epochs: float = 0.0
    anchors: int = 0
    anchors_per_sequence: int = 0
    """Drawn anew in every epoch; 0 takes all."""
    anchors_per_step: int = 512
    """A step takes whole sequences until it has as many."""
    sequences_per_step: int = 0
    drop_last: float = 0.0
    """Share of the steps whose blocks lack the features of the last tokens in front of the anchor,
    1 to block_size of them, as a block that is drafted ahead does."""
    chunk: int = 64
    """Blocks whose logits exist at a time."""
    autocast: Literal["none", "bf16"] = "none"
    eval_anchors_per_sequence: int = 32
    shard: bool = False
    """Shard weights, gradients and Adam's state over the processes of torchrun (FSDP2)."""

    def ranges(self) -> list[Range]:
        return [
            *super().ranges(),
            *((f"train.{n}", getattr(self, n), 0, None) for n in (
                "steps", "epochs", "anchors", "anchors_per_sequence", "sequences_per_step")),
            *((f"train.{n}", getattr(self, n), 1, None) for n in (
                "anchors_per_step", "chunk", "eval_anchors_per_sequence")),
            ("train.drop_last", self.drop_last, 0, 1),
        ]  # fmt: skip

    def check_length(self) -> None:
        """Raises ConfigError if the length of the run is told twice."""
        given = [n for n in ("steps", "epochs", "anchors") if getattr(self, n)]
        if len(given) > 1:
            raise ConfigError(f"train.{given[0]} and train.{given[1]} are both given: take one")


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on."""

    target: TargetSection = field(default_factory=TargetSection)
    text: TextSection = field(default_factory=TextSection)
    drafter: DrafterSection = field(default_factory=DrafterSection)
    features: FeaturesSection = field(default_factory=FeaturesSection)
    loss: LossWeights = field(default_factory=LossWeights)
    train: TrainSection = field(default_factory=TrainSection)

    def __post_init__(self) -> None:
        self.text.check()
        check_ranges(
            ("features.pass_tokens", self.features.pass_tokens, 1, None),
            *loss_ranges(self.loss),
            *self.train.ranges(),
        )
        self.train.check_length()
        if self.drafter.kind == "mtp":
            refuse_drop_last(self.train)

    def flat(self) -> dict[str, Any]:
        return flat(self)


def refuse_drop_last(train: TrainSection) -> None:
    """Raises ConfigError where features are left out that an MTP drafter would have to make up."""
    if train.drop_last:
        raise ConfigError(
            "train.drop_last is for drafters of blocks: an MTP drafter puts its own states in the"
            " place of missing ones, which a single step does not teach; leave it out"
        )


def check_ranges(*ranges: Range) -> None:
    """Raises ConfigError for the first value outside of its range."""
    for name, value, low, high in ranges:
        if value < low or (high is not None and value > high):
            upper = "up" if high is None else f"to {high}"
            raise ConfigError(f"{name}={value} is out of range: expected {low} {upper}")


def loss_ranges(loss: LossWeights) -> list[Range]:
    terms = [(f"loss.{n}", getattr(loss, n), 0, None) for n in ("ce", "kl", "tv", "conf")]
    return [("loss.decay", loss.decay, 1e-3, None), *terms]


def flat(config: Any) -> dict[str, Any]:
    """`section.key` -> value of a configuration of sections, as JSON has it."""
    return {
        f"{section}.{key}": list(value) if isinstance(value, tuple) else value
        for section, values in asdict(config).items()
        for key, value in values.items()
    }


def load(path: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a file and apply overrides. Raises ConfigError in one line for whatever is wrong."""
    return from_raw(read(path, overrides))


def read(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Sections of keys as they stand in a file, with overrides. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            raw = tomllib.load(file)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {path}: {e}") from e
    for section, values in raw.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} stands outside of a [section]")
    for text in overrides:
        name, equals, value = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(f"override {text!r}: expected section.key=value")
        raw.setdefault(section, {})[key] = _parse(value.strip())
    return raw


def _parse(value: str) -> Any:
    """A TOML value; what is none is a bare string."""
    try:
        return tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return value


def from_raw(raw: Mapping[str, Mapping[str, Any]]) -> TrainConfig:
    """Dictionaries of sections to a configuration. Raises ConfigError."""
    return build(TrainConfig, raw)


def build(form: type[C], raw: Mapping[str, Mapping[str, Any]]) -> C:
    """The same for any dataclass whose fields are sections."""
    sections = get_type_hints(form)
    built = {}
    for section, values in raw.items():
        if section not in sections:
            raise ConfigError(f"unknown section [{section}]{_nearest(section, sections)}")
        hints = get_type_hints(sections[section])
        known = {f.name: hints[f.name] for f in fields(sections[section])}
        for key in values:
            if key not in known:
                everywhere = [f"{s}.{f.name}" for s, c in sections.items() for f in fields(c)]
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {section}.{near[0]}?" if near else _nearest(
                    f"{section}.{key}", [n for n in everywhere if n.endswith(f".{key}")] or
                    everywhere)  # fmt: skip
                raise ConfigError(f"unknown key {section}.{key}{hint}")
        built[section] = sections[section](
            **{k: _convert(v, known[k], f"{section}.{k}") for k, v in values.items()}
        )
    return form(**built)


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), 1, 0.4)
    return f"; did you mean {near[0]}?" if near else f": expected one of {', '.join(known)}"


def _convert(value: Any, hint: Any, where: str) -> Any:
    for option in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        found = _as(value, option)
        if found is not _NO:
            return found
    raise ConfigError(f"{where}={value!r} is not possible: expected {_words(hint)}")


_NO = object()


def _as(value: Any, hint: Any) -> Any:
    """`value` as one plain type, or _NO."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value if value in arguments else _NO
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        if arguments[-1] is not Ellipsis and len(items) != len(arguments):
            return _NO
        found = tuple(_as(item, arguments[0]) for item in items)
        return _NO if _NO in found else found
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        return _NO
    return value if isinstance(value, hint) else _NO


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(a) for a in arguments if a is not type(None))
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        many = "a list of" if arguments[-1] is Ellipsis else f"{len(arguments)} of"
        return f"{many} {_words(arguments[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]
