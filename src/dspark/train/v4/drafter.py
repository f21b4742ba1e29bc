"""A drafter for a DeepSeek-V4: `dspark train` with a V4 for a target.

    [target]    the checkpoint's directory
    [text]      rows that the drafter learns from, encoded as they are served
    [drafter]   dspark or mtp1, and the stages' sizes
    [loss]      factors of the loss terms (`losses.py`)
    [train]     how much, how fast, where to

The tower computes what the drafter reads once, when a run begins: for DSpark the chosen layers, the
mean over the streams; for MTP-1 all streams behind the last layer; for both what the output matrix
reads, which is the teacher. It is kept in memory in fp16, some (F + 1) * 2 * D bytes a token.

OUT/drafter is a directory that serves beside its target (`--drafter`): the target's `config.json`
with the stages' settings, and `mtp.*`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4_config import V4DSpark, config_file, is_v4, read_config
from dspark.models.deepseek_v4_source import DeepseekV4Source
from dspark.models.loading import Checkpoint, load_checkpoint
from dspark.train.anchors import choose, draw_unseen, pack_blocks
from dspark.train.batches import Item, Order, Place, anchor_rng, unseen_rng
from dspark.train.config import (
    TextSection,
    TrainSection,
    check_ranges,
    flat,
    loss_ranges,
    refuse_drop_last,
)
from dspark.train.distributed import Group
from dspark.train.features import Features, hash_of
from dspark.train.losses import TERMS, Blocks, LossWeights, Terms, block_losses
from dspark.train.samples import Sample, load_samples
from dspark.train.setup import split
from dspark.train.state import depends_on
from dspark.train.v4 import checkpoint
from dspark.train.v4.batches import Buckets
from dspark.train.v4.heads import DSparkHeads, Heads, MtpHeads, initialise_heads
from dspark.train.v4.loop import Job, Loop
from dspark.train.v4.tower import Tower
from dspark.train.v4.vocabulary import NOISE

FEATURE_TOKENS = 4096
"""Of one pass of the tower."""
BALANCE_SPEED = 1e-3
"""How far the bias of a scored expert moves in a step."""


@dataclass(frozen=True)
class V4TargetSection:
    model: str = ""


@dataclass(frozen=True)
class V4DrafterSection:
    """None takes what is usual: three stages, blocks of five, the last three layers, rank 64 and a
    confidence head. MTP-1 has none of these. start_from: a drafter of these sizes, for this tower
    or its forerunner, whose weights the run begins with."""

    kind: Literal["dspark", "mtp1"] = "dspark"
    stages: int | None = None
    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    noise_token_id: int | None = None
    markov_rank: int | None = None
    confidence_head: bool | None = None
    start_from: str = ""


@dataclass(frozen=True)
class V4TrainConfig:
    target: V4TargetSection = field(default_factory=V4TargetSection)
    text: TextSection = field(default_factory=TextSection)
    drafter: V4DrafterSection = field(default_factory=V4DrafterSection)
    loss: LossWeights = field(default_factory=LossWeights)
    train: TrainSection = field(default_factory=TrainSection)

    def __post_init__(self) -> None:
        d, t = self.drafter, self.train
        self.text.check()
        check_ranges(*loss_ranges(self.loss), *t.ranges())
        t.check_length()
        for name, value in (("autocast", t.autocast != "none"), ("shard", t.shard)):
            if value:
                raise ConfigError(f"train.{name} is not possible for a DeepSeek-V4: leave it out")
        if d.kind == "mtp1":
            refuse_drop_last(t)
            free = ("kind", "start_from")
            given = [n for n, v in asdict(d).items() if n not in free and v is not None]
            if given:
                raise ConfigError(
                    f"drafter.{given[0]} is not possible with kind mtp1: leave it out"
                )
        check_ranges(
            ("drafter.stages", d.stages or 1, 1, None),
            ("drafter.block_size", d.block_size or 1, 1, None),
            ("drafter.markov_rank", d.markov_rank or 0, 0, None),
        )


def wants_v4(raw: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a run's target is a DeepSeek-V4, told by the checkpoint's configuration."""
    model = raw.get("target", {}).get("model", "")
    path = Path(str(model)).expanduser()
    return path.is_dir() and config_file(path).is_file() and is_v4(read_config(path))


def settings_of(
    section: V4DrafterSection, sizes: V4Config, checkpoint_: Checkpoint
) -> V4DSpark | None:
    """The stages' settings; None for MTP-1. Raises ConfigError for impossible ones."""
    if section.kind == "mtp1":
        return None
    n = sizes.num_layers
    layers = section.target_layer_ids or tuple(range(max(0, n - 3), n))
    if min(layers) < 0 or max(layers) >= n:
        raise ConfigError(f"drafter.target_layer_ids={list(layers)}: the target has {n} layers")
    noise = section.noise_token_id
    if noise is None:
        found = checkpoint_.tokenizer.encode(NOISE)
        if len(found) != 1:
            raise ConfigError(
                f"the target's tokenizer has no {NOISE}: name a token that no text contains as"
                " drafter.noise_token_id"
            )
        noise = found[0]
    if not 0 <= noise < sizes.vocab_size:
        raise ConfigError(f"drafter.noise_token_id={noise} is no token of the target")
    rank = 64 if section.markov_rank is None else section.markov_rank
    return V4DSpark(section.block_size or 5, noise, layers, rank)


@torch.no_grad()
def tower_features(
    tower: Tower,
    samples: Sequence[Sample],
    layers: tuple[int, ...] | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    dtype: torch.dtype = torch.float16,
) -> list[Features]:
    """What a drafter reads of every sample, and behind it what the output matrix reads: hidden
    [L, (F + 1) * D]; `layers` None: all streams, S in place of F."""
    found: dict[int, Features] = {}
    lengths = [len(s.tokens) for s in samples]
    done, total = 0, sum(lengths)
    for batch in Buckets(lengths, range(len(samples)), FEATURE_TOKENS, 0).epoch(0):
        docs = tower.documents([samples[i].tokens for i in batch])
        x_NSD, kept = tower.streams(docs, layers or ())
        read = x_NSD.flatten(1) if layers is None else torch.cat([kept[i] for i in layers], -1)
        rows = torch.cat([read, tower.final(x_NSD)], -1).to(dtype).view(docs.num, docs.length, -1)
        for i, hidden in zip(batch, rows, strict=True):
            s, n = samples[i], lengths[i]
            tokens = torch.tensor(s.tokens)
            found[i] = Features(tokens, s.start, hidden[:n].clone(), torch.zeros(n))
            done += n
        on_progress(done, total)
    return [found[i] for i in range(len(samples))]


class DrafterJob(Job):
    """A drafter's stages on blocks of rows, the tower frozen."""

    module: Heads

    def __init__(self, config: V4TrainConfig, checkpoint_: Checkpoint) -> None:
        """Raises ConfigError for what the target cannot have, and CheckpointError for a drafter
        of other sizes to start from."""
        sizes = checkpoint_.config
        assert isinstance(sizes, V4Config)
        self.config, self.sizes, self._directory = config, sizes, checkpoint_.path
        self.settings = settings_of(config.drafter, sizes, checkpoint_)
        limit = min(config.text.max_tokens, sizes.max_context)
        self.samples = load_samples(config.text.files, checkpoint_.tokenizer, limit)
        self.training, self.validation = split(self.samples, config.text.held_out)
        if not any(len(self.samples[i].tokens) - self.samples[i].start > 1 for i in self.training):
            raise ConfigError(
                "no sample to train on has two answer tokens: take more or longer text"
            )
        self._order = Order(self.samples, self.training, config.train)
        self.total = self._order.total_steps()
        self._tower = tower = Tower(sizes)
        tower.load_state_dict(checkpoint.trained(checkpoint_.weights, tower.state_dict(), sizes))
        tower.requires_grad_(False)
        self._head = tower.head.weight
        self.module = self._heads(tower)
        generator = torch.Generator().manual_seed(config.train.seed)
        initialise_heads(self.module, tower.norm.weight, generator)
        if config.drafter.start_from:
            weights = DeepseekV4Source(Path(config.drafter.start_from).expanduser(), sizes)
            checkpoint.start_from(self.module, sizes, weights)
        self.features: list[Features] = []

    def begin(self, on_progress: Callable[[int, int], None]) -> None:
        layers = None if self.settings is None else self.settings.target_layer_ids
        self.features = tower_features(self._tower, self.samples, layers, on_progress)

    def _heads(self, tower: Tower) -> Heads:
        d = self.config.drafter
        if self.settings is None:
            return MtpHeads(self.sizes, tower.embed.weight)
        return DSparkHeads(
            self.sizes,
            self.settings,
            tower.embed.weight,
            stages=d.stages or 3,
            confidence=d.confidence_head is not False,
        )

    @property
    def slots(self) -> int:
        return 1 if self.settings is None else self.settings.block_size

    def plan(self) -> list[str]:
        size, stages = sum(p.numel() for p in self.module.parameters()), len(self.module.mtp)
        return [
            f"drafter: {self.config.drafter.kind}, {stages} stage{'s' * (stages > 1)},"
            f" {size / 1e6:.1f} million parameters, blocks of {self.slots}",
            f"text: {len(self.training)} rows, {len(self.validation)} for validation",
            f"run: {self.total} steps",
        ]

    def batch(self, place: Place) -> tuple[list[Item], Place]:
        return self._order.batch(place)

    def size(self, items: Sequence[Item]) -> tuple[int, int]:
        tokens = sum(len(self.samples[i.sequence].tokens) for i in items)
        return self._order.anchors_of(items), tokens

    def loss(self, items: Sequence[Item]) -> tuple[Tensor, Tensor, Tensor]:
        return self._losses(items, self.config.train.anchors_per_sequence or None)

    def _losses(self, items: Sequence[Item], limit: int | None) -> tuple[Tensor, Tensor, Tensor]:
        c, d = self.config, self.sizes.hidden_size
        found = [self.features[i.sequence] for i in items]
        anchors = [
            choose(f, limit, anchor_rng(c.train.seed, i)) for f, i in zip(found, items, strict=True)
        ]
        columns = range(found[0].hidden.shape[1] // d - 1)
        # Validation is that of blocks from true features.
        share = 0.0 if items[0].epoch < 0 else c.train.drop_last
        unseen = draw_unseen(share, self.slots, unseen_rng(c.train.seed, items))
        pack = pack_blocks(found, anchors, self.slots, columns, d, unseen)
        x_BKD = self.module(pack)
        e_BKr, w2_Vr = self.module.markov(pack.previous)
        confidence_BK = self.module.confidence(x_BKD, e_BKr)
        slots_K = c.loss.slots(self.slots)
        weight = (slots_K * pack.valid).sum().clamp(min=1e-6)
        factors = torch.tensor([getattr(c.loss, t) for t in TERMS]) / weight

        def teach(chunk: slice) -> tuple[Tensor, Tensor]:
            rows, index = torch.unique(pack.teachers[chunk], return_inverse=True)
            return (pack.final[rows] @ self._head.T).softmax(-1), index

        blocks = Blocks(self._head, teach, pack.labels, pack.valid, slots_K, factors, c.train.chunk)
        final = self.module.exit.norm(x_BKD)
        loss, sums = block_losses(blocks, final, e_BKr, w2_Vr, confidence_BK)
        return loss, weight, sums

    def means(self, sums: Tensor) -> dict[str, Any]:
        terms = Terms.unflat(sums, self.slots)
        means = terms.means()
        loss = sum(getattr(self.config.loss, t) * means[t] for t in TERMS)
        return {"loss": loss, **means, "blocks": int(terms.valid[0])}

    def held_out(self) -> dict[str, Any]:
        limit = self.config.train.eval_anchors_per_sequence
        size = max(1, self.config.train.anchors_per_step // limit)
        total: Tensor | None = None
        with torch.no_grad():
            for first in range(0, len(self.validation), size):
                items = [Item(i, -1) for i in self.validation[first : first + size]]
                flat_ = self._losses(items, limit)[2]
                total = flat_ if total is None else total + flat_
        assert total is not None
        return self.means(total)

    def stepped(self) -> None:
        for stage in self.module.stages:
            stage.ffn.balance(BALANCE_SPEED, self.group)

    def export(self, training: Mapping[str, Any]) -> None:
        directory = Path(self.config.train.out) / "drafter"
        config = read_config(self._directory)
        n = self.sizes.num_layers
        config = {k: v for k, v in config.items() if not k.startswith("dspark_")}
        if "compress_ratios" in config:
            tail = [0] * len(self.module.mtp)
            config["compress_ratios"] = [*config["compress_ratios"][:n], *tail]
        if self.settings is not None:
            config |= {f"dspark_{k}": v for k, v in asdict(self.settings).items()}
        tensors = checkpoint.official(self.module.state_dict())
        checkpoint.write(directory, config, tensors)
        checkpoint.write_json(directory / "training.json", training)


def make_loop(config: V4TrainConfig, group: Group | None = None) -> Loop:
    """A run, from its last state if there is one; `job.begin` computes its features, every process
    all of them."""
    job = DrafterJob(config, load_checkpoint(config.target.model))
    return Loop(job, config.train, depends_on(flat(config), text=hash_of(job.samples)), group)
