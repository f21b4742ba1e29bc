"""Tiny training runs: random text, live features of a tiny target, no file but the outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dspark.models.loading import Checkpoint
from dspark.tokenizer import Tokenizer
from dspark.train.config import from_raw
from dspark.train.distributed import Group
from dspark.train.samples import Sample
from dspark.train.setup import Run, decide, make_features, make_model, make_teacher
from dspark.train.trainer import Trainer
from tests.tiny import oracle, source

CPU = torch.device("cpu")
DRAFTERS: dict[str, dict[str, Any]] = {
    "mtp": {"kind": "mtp"},
    "dflash": {"kind": "dflash", "num_layers": 1, "block_size": 4},
    "dspark": {"kind": "dspark", "num_layers": 2, "block_size": 4, "markov_rank": 8,
               "draft_vocab_size": 100},
}  # fmt: skip


def samples(count: int = 12, seed: int = 0, vocab_size: int = 257) -> list[Sample]:
    """Random prompts of 4 to 9 tokens and answers of 8 to 24."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        start, length = int(rng.integers(4, 10)), int(rng.integers(8, 25))
        tokens = rng.integers(0, vocab_size - 1, start + length).tolist()
        found.append(Sample(tuple(tokens), start, 1.0 if i % 3 else 0.7))
    return found


def checkpoint() -> Checkpoint:
    config, weights = source(oracle("llama"))
    return Checkpoint("tiny", Path("tiny"), "hf", config, weights, cast(Tokenizer, None))


def raw(out: Path, form: str = "dspark", **train: Any) -> dict[str, dict[str, Any]]:
    return {
        "target": {"dtype": "fp32", "device": "cpu"},
        "text": {"files": ["none.jsonl"], "held_out": 3},
        "drafter": DRAFTERS[form],
        "features": {"mode": "live"},
        "train": {"out": str(out), "steps": 10, "anchors_per_step": 24, "lr": 3e-3, "chunk": 5,
                  "save_every": 5, "eval_every": 5, "log_every": 2, "weight_decay": 0.01} | train,
    }  # fmt: skip


def run(out: Path, form: str = "dspark", text: list[Sample] | None = None, **train: Any) -> Run:
    return decide(from_raw(raw(out, form, **train)), checkpoint(), text or samples(), (256,))


TEMPLATE = "{% for m in messages %}{{ m.content }}:{% endfor %}"


def directory(path: Path, sharpness: float = 4.0) -> Path:
    """A tiny Llama over printable ASCII that knows its mind, as a Hugging Face directory."""
    path.mkdir(parents=True, exist_ok=True)
    letters = sorted(c for c in pre_tokenizers.ByteLevel.alphabet() if c.isascii())
    model = oracle("llama", vocab_size=len(letters) + 3, eos_token_id=len(letters) + 1)
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    model.save_pretrained(path)
    backend = Backend(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True) for t in ("<a>", "<eos>", "<mask>")])
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def toml(path: Path, sections: dict[str, dict[str, Any]]) -> Path:
    """What JSON and TOML write alike, in sections."""
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in values.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def trainer(made: Run, group: Group | None = None) -> Trainer:
    return Trainer(made, make_features(made), make_model(made), make_teacher(made, CPU), CPU, group)
