"""A tokenizer for a small V4: byte-level BPE over its own text, with DeepSeek-V4's marks.

The marks of the chat format (`deepseek_v4_chat.py`) come first, with BOS 0 and EOS 1 as in the
published models; then the bytes, then merges learned from prompts and answers. `NOISE` is what the
slots behind an anchor hold in a DSpark block; no text contains it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark.deepseek_v4_chat import ASSISTANT, BOS, END_THINK, EOS, REMINDER, THINK, USER
from dspark.errors import ConfigError
from dspark.train.v4.checkpoint import write_json

PAD, NOISE = "<｜▁pad▁｜>", "<｜noise｜>"
MARKS = (BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK, REMINDER, NOISE)
"""In the order of their ids."""
LEAST = len(MARKS) + 256


def learn(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer of `size` ids. Raises ConfigError if the texts do not yield as many, or if it
    has no room for the bytes."""
    if size < LEAST:
        raise ConfigError(f"model.vocab_size={size} has no room for the {LEAST} marks and bytes")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=[AddedToken(m, special=True) for m in MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size(with_added_tokens=True)
    if found != size:
        raise ConfigError(
            f"the text yields a vocabulary of {found} tokens, model.vocab_size={size}: take more"
            " text, or a smaller one"
        )
    return backend


def copy(source: Path, directory: Path) -> None:
    """The tokenizer of an earlier tower. Raises ConfigError if there is none."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        temporary = directory / f".{name}.part"
        try:
            shutil.copyfile(source / name, temporary)
        except OSError as e:
            temporary.unlink(missing_ok=True)
            raise ConfigError(f"train.start_from={source} has no {name} to take over: {e}") from e
        temporary.replace(directory / name)


def write(backend: Any, directory: Path) -> None:
    """`tokenizer.json`, its settings and the end of a text, where the loader looks for them."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / ".tokenizer.json.part"
    backend.save(str(temporary))
    temporary.replace(directory / "tokenizer.json")
    settings = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "add_bos_token": False}
    write_json(directory / "tokenizer_config.json", settings)
    ids = {"bos_token_id": MARKS.index(BOS), "eos_token_id": MARKS.index(EOS)}
    write_json(directory / "generation_config.json", ids)
