"""A small DeepSeek-V4 from nothing: its tokenizer, its tower, its checkpoint.

    [model]   sizes, by their names in the official `config.json`
    [text]    rows of prompt and answer (`train/samples.py`), and how much of that is held out
    [train]   how much, how fast, where to

Every row is encoded as it would be served, chat format and all, and the loss is over the whole row,
prompts included: a model of ten million parameters can use every word. OUT/model is a checkpoint in
the official layout from the first state on; the tokenizer is learned first, from all rows, and
belongs to the run. No drafter is in it: `dspark train` makes one.

Not promised: a good model. Text and time of a laptop make a toy that writes simple sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark import deepseek_v4_chat
from dspark.errors import ConfigError
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4_config import v4_from_hf
from dspark.models.loading import load_checkpoint
from dspark.tokenizer import Tokenizer
from dspark.train.batches import Item, Place
from dspark.train.config import Steps, TextSection, check_ranges, flat
from dspark.train.distributed import Group
from dspark.train.features import hash_of
from dspark.train.samples import Sample, encode, messages_of, read_rows
from dspark.train.setup import split
from dspark.train.state import depends_on
from dspark.train.v4 import checkpoint, vocabulary
from dspark.train.v4.batches import Buckets
from dspark.train.v4.layers import Block
from dspark.train.v4.loop import Job, Loop
from dspark.train.v4.tower import Tower, initialise


@dataclass(frozen=True)
class ModelSection:
    """As in `config.json`; compress_ratios has one number for each layer (`V4Config`)."""

    vocab_size: int = 4096
    hidden_size: int = 96
    compress_ratios: tuple[int, ...] = (0, 0, *(4, 32) * 15)
    num_attention_heads: int = 4
    head_dim: int = 32
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 32
    o_groups: int = 2
    o_lora_rank: int = 32
    sliding_window: int = 64
    index_n_heads: int = 4
    index_head_dim: int = 16
    index_topk: int = 32
    n_routed_experts: int = 32
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 32
    num_hash_layers: int = 3
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    routed_scaling_factor: float = 1.5
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    max_position_embeddings: int = 4096


@dataclass(frozen=True)
class PretrainSection(Steps):
    """balance_speed: how far the bias of a scored expert moves in a step. index_loss: factor of the
    loss that teaches the indexers. start_from: a checkpoint of these sizes whose weights and
    tokenizer the run begins with: a second stage, on other text."""

    out: str = "runs/tower"
    start_from: str = ""
    lr: float = 5e-3
    epochs: int = 1
    tokens_per_step: int = 2048
    """Padding included."""
    balance_speed: float = 1e-3
    index_loss: float = 0.1


@dataclass(frozen=True)
class PretrainConfig:
    model: ModelSection = field(default_factory=ModelSection)
    text: TextSection = field(default_factory=TextSection)
    train: PretrainSection = field(default_factory=PretrainSection)

    def __post_init__(self) -> None:
        t = self.train
        self.text.check()
        check_ranges(
            ("train.epochs", t.epochs, 1, None),
            ("train.tokens_per_step", t.tokens_per_step, 1, None),
            ("train.balance_speed", t.balance_speed, 0, None),
            ("train.index_loss", t.index_loss, 0, None),
            *t.ranges(),
        )

    def official(self) -> dict[str, Any]:
        """`config.json` of the tower."""
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **asdict(self.model),
            "num_hidden_layers": len(self.model.compress_ratios),
            "num_key_value_heads": 1,
            "n_shared_experts": 1,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "swiglu_limit": 10.0,
            "hidden_act": "silu",
            "hc_eps": 1e-6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": vocabulary.MARKS.index(deepseek_v4_chat.BOS),
            "eos_token_id": vocabulary.MARKS.index(deepseek_v4_chat.EOS),
        }


@dataclass(frozen=True)
class Corpus:
    """Encoded rows, and which of them are trained on."""

    tokenizer: Tokenizer
    samples: list[Sample]
    training: tuple[int, ...]
    held_out: tuple[int, ...]


def model_directory(config: PretrainConfig) -> Path:
    return Path(config.train.out) / "model"


def prepare(config: PretrainConfig) -> Corpus:
    """Read the text, and learn the tokenizer if the run has none yet. Raises ConfigError."""
    rows = list(read_rows(config.text.files))
    directory = model_directory(config)
    if (directory / "tokenizer.json").exists():
        pass  # an earlier start of this run
    elif config.train.start_from:
        vocabulary.copy(Path(config.train.start_from).expanduser(), directory)
    else:
        texts = [t for r in rows for t in (*(m["content"] for m in messages_of(r)), r["answer"])]
        vocabulary.write(vocabulary.learn(texts, config.model.vocab_size), directory)
    chat = partial(deepseek_v4_chat.encode, thinking=False)
    tokenizer = Tokenizer.from_directory(directory, chat=chat)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"{directory} holds a tokenizer of {tokenizer.vocab_size} tokens,"
            f" model.vocab_size={config.model.vocab_size}: take another train.out"
        )
    samples = [s for row in rows if (s := encode(row, tokenizer, config.text.max_tokens))]
    if not samples:
        raise ConfigError(f"no training sample in {', '.join(config.text.files)}")
    training, held_out = split(samples, config.text.held_out)
    return Corpus(tokenizer, samples, training, held_out)


class TowerJob(Job):
    """The tower on whole rows."""

    def __init__(self, config: PretrainConfig, corpus: Corpus) -> None:
        """Raises CheckpointError for impossible sizes, or other ones than `start_from` has."""
        self.config, self.corpus = config, corpus
        self.sizes: V4Config = v4_from_hf(config.official())
        self.module: Tower = Tower(self.sizes)
        initialise(self.module, self.sizes, torch.Generator().manual_seed(config.train.seed))
        if config.train.start_from:
            checkpoint.start_from(
                self.module, self.sizes, load_checkpoint(config.train.start_from).weights
            )
        lengths = [len(s.tokens) for s in corpus.samples]
        t = config.train
        self._order = Buckets(lengths, corpus.training, t.tokens_per_step, t.seed)
        self._held_out = Buckets(lengths, corpus.held_out, t.tokens_per_step, t.seed)
        self.total = self._order.total_steps(t.epochs)

    def plan(self) -> list[str]:
        c, corpus, epochs = self.sizes, self.corpus, self.config.train.epochs
        whole = sum(p.numel() for p in self.module.parameters())
        idle = c.num_experts - c.experts_per_token
        unused = c.num_layers * idle * 3 * c.hidden_size * c.expert_size
        active = whole - unused - c.vocab_size * c.hidden_size  # the embedding is looked up
        tokens = sum(len(corpus.samples[i].tokens) for i in corpus.training)
        return [
            f"model: {c.num_layers} layers, {whole / 1e6:.1f} million parameters,"
            f" {active / 1e6:.1f} million multiplied for a token",
            f"text: {len(corpus.training)} rows of {tokens} tokens, {len(corpus.held_out)} rows"
            " held out",
            f"run: {epochs} epochs, {self.total} steps, about"
            f" {6 * active * tokens * epochs / 1e12:.0f} TFLOP beside attention",
        ]

    def batch(self, place: Place) -> tuple[list[Item], Place]:
        return self._order.batch(place)

    def loss(self, items: Sequence[Item]) -> tuple[Tensor, Tensor, Tensor]:
        docs = self.module.documents([self.corpus.samples[i.sequence].tokens for i in items])
        loss, count = self.module.loss(docs)
        index = sum(docs.index_losses, torch.zeros(()))
        mean = loss / count + self.config.train.index_loss * index
        # Every share of a batch has an index loss; the means of all steps are what is logged.
        return mean, count, torch.stack([loss, count, index, torch.ones(())])

    def means(self, sums: Tensor) -> dict[str, Any]:
        """`loss` in nats a token; `index_loss` of all indexers together, cross-entropy in nats."""
        loss, count, index, steps = sums.tolist()
        return {"loss": loss / count, "index_loss": index / steps}

    def size(self, items: Sequence[Item]) -> tuple[int, int]:
        tokens = sum(len(self.corpus.samples[i.sequence].tokens) for i in items)
        return 0, tokens

    def stepped(self) -> None:
        for layer in self.module.layers:
            assert isinstance(layer, Block)
            layer.ffn.balance(self.config.train.balance_speed, self.group)

    def held_out(self) -> dict[str, Any]:
        """`loss` in nats a token, over whole rows."""
        with torch.no_grad():
            batches = self.group.share(self._held_out.epoch(0))
            found = [self.loss([Item(i, 0) for i in batch])[2] for batch in batches]
        sums = torch.stack(found or [torch.zeros(4)]).sum(0)
        return {"loss": self.means(self.group.sum(sums))["loss"]}

    def export(self, training: Mapping[str, Any]) -> None:
        tensors = checkpoint.official(self.module.state_dict())
        directory = model_directory(self.config)
        checkpoint.write(directory, self.config.official(), tensors)
        checkpoint.write_json(directory / "training.json", training)


def make_loop(config: PretrainConfig, group: Group | None = None) -> Loop:
    """A run, from its last state if there is one."""
    group = group or Group()
    if group.first:
        corpus = prepare(config)
    group.barrier()  # the others then find the tokenizer
    if not group.first:
        corpus = prepare(config)
    depends = depends_on(flat(config), text=hash_of(corpus.samples))
    return Loop(TowerJob(config, corpus), config.train, depends, group)
