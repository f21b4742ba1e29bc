"""From a DeepSeek-V4 directory to a model that runs: what is recognised, built and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dspark import deepseek_v4_chat
from dspark.errors import CheckpointError, ConfigError, InvalidRequestError, ResourceError
from dspark.models import build
from dspark.models.build import build_target, choose
from dspark.models.config import DecoderConfig
from dspark.models.deepseek_v4.config import V4Config
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_source import DeepseekV4Source
from dspark.models.loading import load_checkpoint
from dspark.models.target import Segment, pack
from tests.models.official_v4 import TINY, TINY_DSPARK, carried, tensors, write

SPECIAL = (
    deepseek_v4_chat.BOS,
    deepseek_v4_chat.EOS,
    deepseek_v4_chat.USER,
    deepseek_v4_chat.ASSISTANT,
    deepseek_v4_chat.THINK,
    deepseek_v4_chat.END_THINK,
)
INT8 = {"hidden_size": 128, "o_lora_rank": 32, "moe_intermediate_size": 64}
IDS = tuple((7 * i) % 96 for i in range(40))


def write_tokenizer(directory: Path) -> None:
    """Special tokens 0..5 as in V4, then one token for each printable character."""
    words = [chr(c) for c in range(33, 123)]
    backend = Backend(
        models.BPE(
            {**{t: i for i, t in enumerate(SPECIAL)}, **{w: i + 6 for i, w in enumerate(words)}}, []
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.save(str(directory / "tokenizer.json"))


def tame(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same layout with values of a usual size, so that a pass through the model is finite."""
    out = {}
    for name, t in stored.items():
        if name.endswith(".scale"):
            fp4 = ".experts." in name
            out[name] = torch.full(t.shape, 2.0 ** (-5 if fp4 else -11)).to(t.dtype)
        elif t.dtype in (torch.bfloat16, torch.float32):
            noise = 0.1 * t.float()
            out[name] = (1 + noise if name.endswith("norm.weight") else noise).to(t.dtype)
        else:
            out[name] = t
    return out


def directory(tmp_path: Path, raw: dict[str, Any], *, drafter: bool = False, **sizes: Any) -> Path:
    raw = raw | sizes
    stored, _ = tensors(raw, carried(raw) if drafter else None)
    write(tmp_path, raw, tame(stored), num_shards=2)
    write_tokenizer(tmp_path)
    return tmp_path


def logits(path: Path, dtype: str) -> torch.Tensor:
    checkpoint = load_checkpoint(str(path))
    target = build_target(checkpoint, choose(checkpoint.config, dtype, "cpu"), num_slots=1)
    return target.forward(pack([Segment(0, 0, IDS, len(IDS))])).logits


def test_a_directory_is_recognised_and_runs_in_every_dtype(tmp_path: Path) -> None:
    path = directory(tmp_path, TINY, **INT8)
    checkpoint = load_checkpoint(str(path))
    assert isinstance(checkpoint.config, V4Config)
    assert isinstance(checkpoint.weights, DeepseekV4Source)
    assert checkpoint.carried == ()
    exact = logits(path, "fp32")
    for dtype in ("bf16", "int8"):
        close = torch.nn.functional.cosine_similarity(logits(path, dtype), exact, dim=-1)
        assert close.min() > 0.5 and close.mean() > 0.8
    target = build_target(checkpoint, choose(checkpoint.config, "fp32", "cpu"), num_slots=1)
    assert isinstance(target, DeepseekV4)


def test_the_reference_spelling_alone_is_enough(tmp_path: Path) -> None:
    path = directory(tmp_path, TINY)
    plain = logits(path, "fp32")
    raw = json.loads((path / "config.json").read_text())
    names = {
        "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "qk_rope_head_dim": "rope_head_dim", "moe_intermediate_size": "moe_inter_dim",
        "num_experts_per_tok": "n_activated_experts", "num_hash_layers": "n_hash_layers",
        "scoring_func": "score_func", "routed_scaling_factor": "route_scale",
        "rms_norm_eps": "norm_eps", "sliding_window": "window_size",
    }  # fmt: skip
    scaling = raw.pop("rope_scaling")
    for key in ("model_type", "quantization_config"):
        raw.pop(key)
    other = {names.get(k, k): v for k, v in raw.items()}
    other |= {"original_seq_len": scaling["original_max_position_embeddings"], "rope_factor": 16}
    (path / "config.json").unlink()
    (path / "inference").mkdir()
    (path / "inference" / "config.json").write_text(json.dumps(other))
    torch.testing.assert_close(logits(path, "fp32"), plain)
    assert load_checkpoint(str(path)).tokenizer.eos_ids == (1,)


@pytest.mark.parametrize("raw, kind", [(TINY, "mtp1"), (TINY_DSPARK, "dspark")])
def test_carried_drafters_are_found(tmp_path: Path, raw: dict[str, Any], kind: str) -> None:
    path = directory(tmp_path, raw, drafter=True)
    assert [d.kind for d in load_checkpoint(str(path)).carried] == [kind]


def test_int8_where_it_fits_and_fp32_where_not(tmp_path: Path) -> None:
    small = load_checkpoint(str(directory(tmp_path / "a", TINY))).config
    fits = load_checkpoint(str(directory(tmp_path / "b", TINY, **INT8))).config
    choice = choose(small, "auto", "cpu")
    assert choice.dtype == "fp32" and "48" in choice.reason
    assert choose(fits, "auto", "cpu").dtype == "int8"
    checkpoint = load_checkpoint(str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="int8"):
        build_target(checkpoint, choose(small, "int8", "cpu"), num_slots=1)


def test_too_little_memory_is_said_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(str(directory(tmp_path, TINY)))
    monkeypatch.setattr(build, "_available_memory", lambda: 100_000)
    with pytest.raises(ResourceError, match="not enough memory"):
        build_target(checkpoint, choose(checkpoint.config, "fp32", "cpu"), num_slots=1)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    stored, _ = tensors(TINY)
    del stored["layers.2.attn.attn_sink"]
    write(tmp_path, TINY, stored)
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks layers\.2\.attn\.attn_sink"):
        load_checkpoint(str(tmp_path))


def test_a_dense_decoder_is_asked_for_by_name(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(directory(tmp_path, TINY)))
    with pytest.raises(ConfigError, match="dense decoders only"):
        config: DecoderConfig = checkpoint.decoder_config
        assert config


def test_conversations_are_written_without_a_template(tmp_path: Path) -> None:
    tokenizer = load_checkpoint(str(directory(tmp_path, TINY))).tokenizer
    messages = [{"role": "user", "content": "hi"}]
    bos, _, user, assistant, think, no_think = range(6)
    hi = tokenizer.encode("hi")
    assert tokenizer.encode_chat(messages) == [bos, user, *hi, assistant, no_think]
    assert tokenizer.encode_chat(messages, thinking=True) == [bos, user, *hi, assistant, think]
    assert tokenizer.eos_ids == (1,)
    with pytest.raises(InvalidRequestError, match="refused an option"):
        tokenizer.encode_chat(messages, colour="red")
    options = {"tools", "thinking", "reasoning_effort", "drop_thinking"}
    assert tokenizer.chat_options == options and tokenizer.knows_tools
    assert tokenizer.knows_thinking


def test_the_marks_of_answers_are_text(tmp_path: Path) -> None:
    """The file calls them special; the parts of an answer are told by them all the same."""
    tokenizer = load_checkpoint(str(directory(tmp_path, TINY))).tokenizer
    answer = tokenizer.encode("Hm</think>hi")
    assert b"".join(tokenizer.id_to_bytes(i) for i in answer) == b"Hm</think>hi"
    assert tokenizer.id_to_bytes(tokenizer.encode(deepseek_v4_chat.EOS)[0]) == b""
    assert tokenizer.answers is deepseek_v4_chat.FORMAT


def test_a_template_that_is_there_counts(tmp_path: Path) -> None:
    path = directory(tmp_path, TINY)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_checkpoint(str(path)).tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"
    assert not tokenizer.knows_thinking and not tokenizer.knows_tools
