"""The ragged decoder against `transformers`, and against itself in other shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.models.decoder import Decoder
from dspark.models.target import Segment, pack
from tests.tiny import oracle, target

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}}),
    "yarn rope": ("llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "mistral window": ("mistral", {"sliding_window": 8}),
    "mistral tied": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(257, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def run(model: Decoder, ids: tuple[int, ...], start: int = 0, slot: int = 0) -> Tensor:
    return model.forward(pack([Segment(slot, start, ids, len(ids))])).logits


@pytest.fixture(params=MODELS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Decoder, tuple[int, ...], Tensor]:
    """Our decoder, 60 tokens, and the oracle's logits for them."""
    kind, overrides = MODELS[request.param]
    model = oracle(kind, **overrides)
    ids = tokens(60)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    return target(model), ids, logits


def test_full_pass_equals_transformers(pair: tuple[Decoder, tuple[int, ...], Tensor]) -> None:
    model, ids, expected = pair
    torch.testing.assert_close(run(model, ids), expected, atol=1e-4, rtol=1e-4)


def test_token_by_token_equals_transformers(
    pair: tuple[Decoder, tuple[int, ...], Tensor],
) -> None:
    model, ids, expected = pair
    got = torch.cat([run(model, ids[i : i + 1], i, slot=1) for i in range(len(ids))])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_blocks_at_every_offset_equal_transformers(
    pair: tuple[Decoder, tuple[int, ...], Tensor],
) -> None:
    """B01, B25, B26: a block of 1-9 at any offset, after junk was written there and rejected."""
    model, ids, expected = pair
    run(model, ids, slot=2)
    junk = tokens(9, seed=1)
    for offset in range(1, 51):
        size = 1 + offset % 9
        run(model, junk[: 1 + offset % 7], offset, slot=2)  # rejected: simply never read again
        got = run(model, ids[offset : offset + size], offset, slot=2)
        torch.testing.assert_close(got, expected[offset : offset + size], atol=1e-4, rtol=1e-4)
        run(model, ids[offset:], offset, slot=2)


def test_every_block_size_equals_transformers(
    pair: tuple[Decoder, tuple[int, ...], Tensor],
) -> None:
    model, ids, expected = pair
    for size in range(1, 10):
        blocks = [run(model, ids[i : i + size], i, slot=3) for i in range(0, len(ids), size)]
        torch.testing.assert_close(torch.cat(blocks), expected, atol=1e-4, rtol=1e-4)


def test_ragged_batch_equals_solo_runs(pair: tuple[Decoder, tuple[int, ...], Tensor]) -> None:
    """B31: four sequences of different lengths and stages share a pass."""
    model, ids, expected = pair
    starts, sizes = (0, 7, 20, 41), (30, 1, 5, 9)
    for slot, start in enumerate(starts):
        if start:
            run(model, ids[:start], 0, slot)
    segments = [
        Segment(slot, start, ids[start : start + size], size)
        for slot, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    got = model.forward(pack(segments)).logits
    wanted = torch.cat([expected[a : a + n] for a, n in zip(starts, sizes, strict=True)])
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_features_are_those_of_the_named_layers(dtype: str) -> None:
    """B40: feature i is the output of layer i before the final norm, -1 the embedding."""
    model = oracle("llama")
    ids = tokens(12)
    with torch.inference_mode():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    ours = target(model, dtype=dtype)
    got = ours.forward(pack([Segment(0, 0, ids, 1)]), (-1, 0, 1)).features
    assert got is not None and got.shape == (12, 3 * 64)
    wanted = torch.cat([hidden[i][0] for i in (0, 1, 2)], -1)
    if dtype == "fp32":
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    else:
        for mine, theirs in zip(got.split(64, -1), wanted.split(64, -1), strict=True):
            assert torch.cosine_similarity(mine, theirs, -1).min() > 0.99


def test_logits_only_for_the_rows_asked_for() -> None:
    model, ids = target(), tokens(20)
    whole = run(model, ids)
    last = model.forward(pack([Segment(1, 0, ids, 2)])).logits
    assert last.shape == (2, 257)
    torch.testing.assert_close(last, whole[-2:])


def test_bf16_follows_fp32() -> None:
    model, ids = oracle("qwen3"), tokens(40)
    fp32, bf16 = run(target(model), ids), run(target(model, dtype="bf16"), ids)
    assert bf16.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(fp32, bf16, dim=-1).min() > 0.98
