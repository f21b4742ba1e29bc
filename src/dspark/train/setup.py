"""From a configuration to everything a run needs: samples, split, vocabulary, drafter, features.

`prepare` reads the text and decides (which samples are held out, which tokens can be drafted, which
layers are read and stored) and `assemble` builds: frozen matrices of the target, the drafter with
its initial weights, and the features, computing what is missing of their cache.

Initial weights: matrices normal with std 0.02 (or the target layers named by `init_layers`), heads
as `heads.py` makes them, and the last norm copied from the target's, because the head behind it is
the target's and expects that scale.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dspark.drafters.block import BlockModel
from dspark.drafters.checkpoint import load
from dspark.drafters.config import DrafterConfig, like_target
from dspark.drafters.mtp import MtpModel
from dspark.errors import ConfigError
from dspark.models.build import Choice, build_target, choose
from dspark.models.config import DecoderConfig
from dspark.models.loading import Checkpoint, load_checkpoint
from dspark.models.weights import WeightSource
from dspark.train import features as feats
from dspark.train.config import PRESETS, DrafterSection, TrainConfig
from dspark.train.features import FeatureCache, LiveFeatures
from dspark.train.samples import Sample, load_samples
from dspark.train.step import Teacher

Progress = Callable[[int, int], None]
PASS_SLOTS = 16
"""Sequences of one pass of the target at most."""
ESTIMATE_WITHOUT_HELD_OUT = 64
"""Trained samples that the estimate is made on if none is held out."""


@dataclass(frozen=True)
class Run:
    """What was decided before anything large is loaded.

    training, held_out   indices of samples;  layers: stored ones;  columns: of those, the drafter's
    """

    config: TrainConfig
    checkpoint: Checkpoint
    choice: Choice
    samples: list[Sample]
    text: str
    training: tuple[int, ...]
    held_out: tuple[int, ...]
    drafter: DrafterConfig
    draft_ids: Tensor | None
    layers: tuple[int, ...]
    columns: tuple[int, ...]
    directory: Path
    """Of the feature cache."""

    @property
    def target_name(self) -> str:
        return f"{self.checkpoint.name} {self.choice.dtype}"

    @property
    def cache(self) -> feats.CacheMeta:
        """What the feature cache will hold when complete."""
        hidden_size = self.checkpoint.config.hidden_size
        return feats.plan(self.samples, self.target_name, self.layers, hidden_size)

    def cached(self) -> feats.CacheMeta | None:
        """What it holds now. Raises ConfigError if it is of something else."""
        if not (self.directory / "meta.json").exists():
            return None
        have = feats.read_meta(self.directory)
        return feats.carry_on(self.cache, have, self.directory, self.samples)


def prepare(config: TrainConfig) -> Run:
    """Read the text and decide. Raises DSparkError in one line."""
    checkpoint = load_checkpoint(config.target.model)
    limit = min(config.text.max_tokens, checkpoint.config.max_context)
    samples = load_samples(config.text.files, checkpoint.tokenizer, limit)
    return decide(config, checkpoint, samples, checkpoint.tokenizer.eos_ids)


def decide(
    config: TrainConfig, checkpoint: Checkpoint, samples: list[Sample], eos_ids: Sequence[int]
) -> Run:
    """Everything that follows from the configuration and the text."""
    choice = choose(checkpoint.config, config.target.dtype, config.target.device)
    training, held_out = split(samples, config.text.held_out)
    trained = [samples[i] for i in training]
    if not any(len(s.tokens) - s.start > 1 for s in trained):
        raise ConfigError("no sample to train on has two answer tokens: take more or longer text")
    drafter = drafter_config(config.drafter, checkpoint.decoder_config, checkpoint.name, samples)
    draft_ids = None
    if size := config.drafter.draft_vocab_size:
        draft_ids = draft_vocabulary(trained, size, checkpoint.config.vocab_size, eos_ids)
    directory = Path(config.features.directory or Path(config.train.out) / "features")
    layers = stored_layers(config, drafter, directory)
    columns = tuple(layers.index(i) for i in drafter.target_layer_ids)
    return Run(config, checkpoint, choice, samples, feats.hash_of(samples), training, held_out,
               drafter, draft_ids, layers, columns, directory)  # fmt: skip


def split(
    samples: Sequence[Sample], held_out: int | float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices to train on and to validate on.

    By a hash of the prompt, so that more text of the same kind moves few samples across; those at
    temperature 1 first. A prompt that is held out is not trained on at any temperature.
    """
    wanted = int(held_out) if held_out >= 1 else round(held_out * len(samples))
    prompts = [
        hashlib.sha256(np.asarray(s.tokens[: s.start], np.int64).tobytes()).digest()
        for s in samples
    ]
    usable = [i for i, s in enumerate(samples) if len(s.tokens) - s.start > 1]
    by_hash = sorted(usable, key=lambda i: (samples[i].temperature != 1.0, prompts[i], i))
    if not wanted:
        return tuple(range(len(samples))), tuple(by_hash[:ESTIMATE_WITHOUT_HELD_OUT])
    chosen = by_hash[:wanted]
    gone = {prompts[i] for i in chosen}
    training = tuple(i for i in range(len(samples)) if prompts[i] not in gone)
    if not training:
        raise ConfigError(f"text.held_out={held_out} leaves no sample of {len(samples)} to train")
    return training, tuple(sorted(chosen))


def draft_vocabulary(
    samples: Sequence[Sample], size: int, vocab_size: int, eos_ids: Sequence[int]
) -> Tensor:
    """[size] rising ids: end of text, and the tokens that answers use most."""
    if not len(eos_ids) < size <= vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size={size} is out of range: the target has {vocab_size} tokens,"
            f" {len(eos_ids)} of them end a text"
        )
    counts = Counter(t for s in samples for t in s.tokens[s.start :])
    wanted = [i for i in eos_ids if i < vocab_size]
    rest = sorted(set(range(vocab_size)) - set(wanted), key=lambda i: (-counts[i], i))
    return torch.tensor(sorted(wanted + rest[: size - len(wanted)]))


def drafter_config(
    section: DrafterSection, target: DecoderConfig, name: str, samples: Sequence[Sample]
) -> DrafterConfig:
    """Fill in what the section leaves open: the preset of its kind, then what suits the target."""
    s, preset = section, PRESETS[section.kind]

    def given(key: str) -> Any:
        value = getattr(s, key)
        return preset[key] if value is None else value

    kind = "mtp" if s.kind == "mtp" else "block"
    last = target.num_layers - 1
    spread = sorted({max(0, (last - 2) * i // 3) for i in (1, 2, 3)})
    layers = s.target_layer_ids or ((last,) if kind == "mtp" else tuple(spread))
    rank = given("markov_rank")
    with_markov = s.confidence_head_with_markov
    mask = s.mask_token_id
    if mask is None and kind == "block":
        mask = unused_token(samples, target.vocab_size)
    fields = like_target(target, kind, layers, given("num_layers"))  # type: ignore[arg-type]
    fields |= {
        "block_size": given("block_size"),
        "mask_token_id": mask,
        "qk_norm": s.qk_norm,
        "sample_from_anchor": given("sample_from_anchor"),
        "markov_rank": rank,
        "markov_head_type": s.markov_head_type,
        "confidence_head": given("confidence_head"),
        "confidence_head_with_markov": bool(rank) if with_markov is None else with_markov,
        "inject": s.inject,
        "conv": s.conv,
        "layer_fusion": s.layer_fusion,
        "draft_vocab_size": s.draft_vocab_size,
        "candidates": s.candidates,
        "target": name,
    }
    config = DrafterConfig(**fields)  # type: ignore[arg-type]
    if kind == "mtp" and (config.block_size != 1 or rank or config.confidence_head):
        raise ConfigError("an mtp drafter has block_size 1, no Markov and no confidence head")
    if s.init_layers and len(s.init_layers) != config.num_layers:
        raise ConfigError(
            f"drafter.init_layers names {len(s.init_layers)} target layers, the drafter has"
            f" {config.num_layers}"
        )
    for layer in s.init_layers:
        if not 0 <= layer <= last:
            raise ConfigError(f"drafter.init_layers: {layer} is out of range: 0 to {last}")
    return config


def unused_token(samples: Sequence[Sample], vocab_size: int) -> int:
    """The last id that the text never uses: its embedding serves as the mask."""
    used = {t for s in samples for t in s.tokens}
    return next((i for i in reversed(range(vocab_size)) if i not in used), vocab_size - 1)


def stored_layers(config: TrainConfig, drafter: DrafterConfig, directory: Path) -> tuple[int, ...]:
    """The layers whose outputs are stored: what the drafter reads, and the final one last."""
    last = drafter.num_target_layers - 1
    need = (*sorted(set(drafter.target_layer_ids) - {last}), last)
    layers = config.features.layers
    if layers is None and config.features.mode == "cache" and (directory / "meta.json").exists():
        layers = feats.read_meta(directory).layers
    if layers is None:
        return need
    missing = sorted(set(need) - set(layers))
    if missing or layers[-1] != last or len(set(layers)) != len(layers):
        raise ConfigError(
            f"features.layers={list(layers)} does not do: this drafter needs {list(need)}, the"
            " final layer last (a superset may be stored)"
        )
    return layers


def make_model(run: Run) -> BlockModel | MtpModel:
    """The drafter with its initial weights, from `train.seed` and the target's checkpoint."""
    torch.manual_seed(run.config.train.seed)
    model = MtpModel(run.drafter) if run.drafter.kind == "mtp" else BlockModel(run.drafter)
    initialise(model, run.checkpoint.weights, run.config.drafter.init_layers)
    if run.config.drafter.start_from:
        start_from(model, run, Path(run.config.drafter.start_from))
    return model


def start_from(model: BlockModel | MtpModel, run: Run, directory: Path) -> None:
    """Take over the weights of another run's drafter. Raises ConfigError if it is another one."""
    found = load(directory)
    # The layout keeps neither the run's name of the target nor how its rotation was spelt.
    free = ("target", "rope")
    differ = [
        f"{f.name} {getattr(found.config, f.name)} and {getattr(run.drafter, f.name)}"
        for f in fields(DrafterConfig)
        if f.name not in free and getattr(found.config, f.name) != getattr(run.drafter, f.name)
    ]
    if differ:
        raise ConfigError(f"{directory} is another drafter than this run's: {', '.join(differ)}")
    ids, mine = found.draft_ids, run.draft_ids
    if ids is not mine and (ids is None or mine is None or not torch.equal(ids, mine)):
        raise ConfigError(f"{directory} has another draft vocabulary than this run's text gives")
    model.load_state_dict(found.model.state_dict())
    # Its `fc` reads features as they are; `Trainer` divides by the factors it multiplies with.


def initialise(
    model: BlockModel | MtpModel, weights: WeightSource, init_layers: Sequence[int]
) -> None:
    special = ("markov_head.markov_w", "confidence_head.", "inject.", "_conv.")
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and not any(s in f"{name}." for s in special):
                module.weight.normal_(std=0.02)
                if module.bias is not None and not name.endswith("hidden_proj"):
                    module.bias.zero_()
        model.norm.weight.copy_(weights.tensor("model.norm.weight"))
        names = weights.names()
        for i, layer in enumerate(init_layers):
            for name, p in model.layers[i].named_parameters():
                source = f"model.layers.{layer}.{name}"
                if source in names and weights.shape(source) == tuple(p.shape):
                    p.copy_(weights.tensor(source))


def make_features(run: Run, on_progress: Progress | None = None) -> FeatureCache | LiveFeatures:
    """The features of all samples; what the cache lacks is computed first."""
    live = run.config.features.mode == "live"
    if not live:
        have = run.cached()
        if have is not None and have.complete == have.num_sequences:
            return FeatureCache(run.directory)
    longest = max(len(s.tokens) for s in run.samples)
    target = build_target(
        run.checkpoint, run.choice, num_slots=1 if live else PASS_SLOTS, max_context=longest
    )
    if live:
        return LiveFeatures(target, run.samples, run.layers)
    feats.build_cache(
        target,
        run.target_name,
        run.samples,
        run.directory,
        run.layers,
        target.hidden_size,
        pass_tokens=run.config.features.pass_tokens,
        on_progress=on_progress,
    )
    return FeatureCache(run.directory)


SCALE_SAMPLES = 64
"""Sequences whose features tell the size of a channel."""


def feature_scale(run: Run, features: FeatureCache | LiveFeatures) -> Tensor:
    """[m * D] factors that give the channels of the drafter's features equal weight.

    Of channel j with mean m and spread s over answers, s / (s^2 + m^2): 1 / s where it varies
    around zero, and near 0 where it is nearly constant. The residual stream of many models has
    a few huge constant channels, which would fill every sum and norm behind them.
    """
    chosen = run.training[:: max(1, len(run.training) // SCALE_SAMPLES)]
    rows = torch.cat([f.hidden[f.start :].float() for f in map(features.__getitem__, chosen)])
    rows = rows.view(len(rows), -1, run.drafter.hidden_size)[:, list(run.columns)].flatten(1)
    mean, spread = rows.mean(0), rows.std(0, correction=0)
    return spread / (spread.square() + mean.square()).clamp(min=1e-12)


def standardise(model: BlockModel | MtpModel, scale: Tensor) -> None:
    """Begin with equal channels where a norm comes first: in the weight of the MTP module's."""
    if isinstance(model, MtpModel):
        with torch.no_grad():
            model.hnorm.weight.copy_(scale / scale.square().mean().sqrt())


def make_teacher(run: Run, device: torch.device) -> Teacher:
    """The target's embedding, last norm and head on a device."""
    teacher = Teacher.of(run.checkpoint.decoder_config, run.checkpoint.weights, run.draft_ids)
    ids = None if teacher.draft_ids is None else teacher.draft_ids.to(device)
    return replace(
        teacher,
        embedding=teacher.embedding.to(device),
        norm=teacher.norm.to(device),
        head=teacher.head.to(device),
        draft_ids=ids,
    )
