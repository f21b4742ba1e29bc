"""GGUF files against the `gguf` library and `transformers`: every type, every damage, every row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.decoder import TorchDecoder
from dspark.models.gguf_source import GgufFile, GgufSource
from dspark.models.loading import Checkpoint, load_checkpoint, resolve
from dspark.models.target import Segment, pack
from tests.tiny import oracle

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
EXACT = ("Q8_0", "Q4_0", "Q4_1")
"""Types whose blocks the integer kernels take as they are."""
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 256, 4, 2, 64, 40
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Array = npt.NDArray[Any]


def stored_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    if name in NAMES:
        return NAMES[name]
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    part, ending = part.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{ending}"


def permuted(w: Array, heads: int) -> Array:
    """The row order of llama.cpp's converter: rotary pairs side by side."""
    halves = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:])
    return halves.swapaxes(1, 2).reshape(w.shape)


def packed(w: Array, kind: str, seed: int = 0) -> Array:
    """Bytes of a type; of K types, which the library does not write, random ones."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in ("Q4_K", "Q6_K", "Q2_K"):
        result: Array = gguf.quants.quantize(w, number)
        return result if kind in EXACT or kind.startswith("Q") else result.view(np.uint8)
    per_block, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*w.shape[:-1], w.shape[-1] // per_block, size), np.uint8)
    scales = {"Q4_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}[kind]
    for at in scales:  # any two bytes might be an infinity
        half = rng.uniform(-0.01, 0.01, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = half[..., None].view(np.uint8)
    return blocks.reshape(*w.shape[:-1], -1)


def write(
    path: Path,
    tensors: dict[str, tuple[Array, str]],
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    arch: str = "llama",
    rope_theta: float = 10_000.0,
    layers: int = 1,
) -> Path:
    """A GGUF file of raw tensors {name in the file: (bytes, type)} and the usual metadata."""
    w = gguf.GGUFWriter(path, arch)
    w.add_vocab_size(VOCAB)
    w.add_context_length(512)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(INNER)
    w.add_block_count(layers)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_rope_freq_base(rope_theta)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_token_list([f"t{i}" for i in range(VOCAB)])
    if change:
        change(w)
    for name, (data, kind) in tensors.items():
        w.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def model(**overrides: Any) -> Any:
    """A tiny Llama whose rows are long enough for K types."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "head_dim": HEAD_DIM,
        "initializer_range": 0.1,
    }
    return oracle("llama", **{**sizes, **overrides})


def from_oracle(
    path: Path, m: Any, kind: str = "F32", change: Callable[[gguf.GGUFWriter], None] | None = None
) -> Path:
    """What llama.cpp's converter would write of an oracle."""
    tensors: dict[str, tuple[Array, str]] = {}
    for name, value in m.state_dict().items():
        if name == "lm_head.weight" and m.config.tie_word_embeddings:
            continue
        w = value.numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                w = permuted(w, heads)
        t = kind if w.ndim == 2 else "F32"
        tensors[stored_name(name)] = (packed(np.ascontiguousarray(w), t), t)
    theta = m.config.rope_parameters["rope_theta"]
    return write(path, tensors, change, layers=m.config.num_hidden_layers, rope_theta=theta)


def opened(path: Path) -> GgufSource:
    file = GgufFile(path)
    return GgufSource(file, file.config())


def logits(path: Path, ids: tuple[int, ...]) -> Tensor:
    """Of our decoder, loaded from a file."""
    file = GgufFile(path)
    config = file.config()
    decoder = TorchDecoder(
        config,
        GgufSource(file, config),
        dtype=torch.float32,
        num_slots=1,
        max_context=64,
        device=torch.device("cpu"),
    )
    return decoder.forward(pack([Segment(0, 0, ids, len(ids))])).logits


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_equal_the_gguf_library(tmp_path: Path, kind: str) -> None:
    """Values as dequantised by `gguf`; rows of q and k in the order of Hugging Face."""
    rng = np.random.default_rng(1)
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    }
    raw = {
        n: packed(rng.standard_normal(s).astype(np.float32), kind, seed=i)
        for i, (n, s) in enumerate(shapes.items())
    }
    source = opened(write(tmp_path / "m.gguf", {n: (r, kind) for n, r in raw.items()}))
    number = gguf.GGMLQuantizationType[kind]
    ours = {stored_name(n): n for n in source.names()}
    assert ours.keys() == shapes.keys()
    for stored, name in ours.items():
        expected = gguf.quants.dequantize(raw[stored], number).reshape(shapes[stored])
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stored.split(".")[-2])
        got = source.tensor(name)
        assert got.dtype == torch.float32 and source.shape(name) == shapes[stored]
        np.testing.assert_array_equal(
            got.numpy() if heads is None else permuted(got.numpy(), heads), expected
        )
        assert np.isfinite(expected).all() and expected.std() > 0
        blocks = source.blocks(name)
        assert (blocks is not None) == (kind in EXACT)
        if blocks is not None:
            values = blocks.values.astype(np.float32).reshape(*blocks.scale.shape, 32)
            product = blocks.scale[..., None] * values
            if blocks.minimum is not None:
                product += blocks.minimum[..., None]
            np.testing.assert_array_equal(product.reshape(got.shape), got.numpy())
            assert blocks.bits == (8 if kind == "Q8_0" else 4)
    assert source.num_bytes() == sum(r.nbytes for r in raw.values())


def test_minus_128_is_left_to_be_rounded_again(tmp_path: Path) -> None:
    """The kernels take magnitudes up to 127; the value itself is still read as it is."""
    raw = packed(np.ones((VOCAB, HIDDEN), np.float32), "Q8_0")
    raw[3, 2] = 128  # the first value of a block, -128 as int8
    source = opened(write(tmp_path / "m.gguf", {"token_embd.weight": (raw, "Q8_0")}))
    assert source.blocks("model.embed_tokens.weight") is None
    got = source.tensor("model.embed_tokens.weight").numpy()
    np.testing.assert_array_equal(
        got, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0).reshape(got.shape)
    )
    assert got[3, 0] < -1


def test_vectors_have_no_blocks(tmp_path: Path) -> None:
    raw = packed(np.ones(HIDDEN, np.float32), "Q8_0")
    source = opened(write(tmp_path / "m.gguf", {"output_norm.weight": (raw, "Q8_0")}))
    assert source.blocks("model.norm.weight") is None
    assert source.tensor("model.norm.weight").shape == (HIDDEN,)


@pytest.mark.parametrize("kind", ["Q5_0", "Q2_K"])
def test_an_unsupported_type(tmp_path: Path, kind: str) -> None:
    raw = packed(np.ones((VOCAB, HIDDEN), np.float32), kind)
    path = write(tmp_path / "m.gguf", {"token_embd.weight": (raw, kind)})
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tensor token_embd\.weight is {kind}, "):
        opened(path)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
def test_logits_equal_transformers(tmp_path: Path, tied: bool, bias: bool) -> None:
    """The row order of the converter, undone; biases and a tied head are seen in the tensors."""
    m = model(tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    path = from_oracle(tmp_path / "m.gguf", m)
    ids = tuple(range(VOCAB))
    with torch.inference_mode():
        expected = m(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(path, ids), expected, atol=1e-4, rtol=1e-4)


def test_rope_freqs_are_llama3_frequencies(tmp_path: Path) -> None:
    """llama.cpp stores the stretching of Llama 3.1 as one divisor a frequency."""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10_000.0,
    }
    m = model(rope_parameters=llama3)
    plain = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = (plain / m.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert divisors.min() == 1 and divisors.max() == pytest.approx(8)

    def change(w: gguf.GGUFWriter) -> None:
        w.add_tensor("rope_freqs.weight", divisors)

    path = from_oracle(tmp_path / "m.gguf", m, change=change)
    assert "rope_freqs.weight" not in opened(path).names()
    ids = tuple(range(VOCAB))
    with torch.inference_mode():
        expected = m(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(path, ids), expected, atol=1e-4, rtol=1e-4)
    without = logits(from_oracle(tmp_path / "plain.gguf", m), ids)
    assert (without - expected).abs().max() > 1e-2


def test_rope_freqs_of_a_wrong_length(tmp_path: Path) -> None:
    freqs = (np.ones(7, np.float32), "F32")
    path = write(tmp_path / "m.gguf", {"rope_freqs.weight": freqs})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has 7 entries, expected 32"):
        GgufFile(path).config()


def test_metadata_becomes_a_config(tmp_path: Path) -> None:
    config = GgufFile(write(tmp_path / "m.gguf", {})).config()
    assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (HIDDEN, HEADS, KV_HEADS)
    assert (config.vocab_size, config.max_context, config.num_layers) == (VOCAB, 512, 1)
    assert config.rms_norm_eps == pytest.approx(1e-6) and config.tie_embeddings
    assert config.rope.theta == 10_000.0 and config.rope.kind == "default"


def test_every_kind_of_metadata_is_read(tmp_path: Path) -> None:
    values: dict[str, tuple[Any, str]] = {
        "x.u8": (200, "uint8"),
        "x.i8": (-3, "int8"),
        "x.u16": (60_000, "uint16"),
        "x.i16": (-5, "int16"),
        "x.u32": (4_000_000_000, "uint32"),
        "x.i32": (-7, "int32"),
        "x.u64": (2**63, "uint64"),
        "x.i64": (-(2**40), "int64"),
        "x.f32": (0.5, "float32"),
        "x.f64": (0.1, "float64"),
        "x.bool": (True, "bool"),
        "x.string": ("naïve 🚀", "string"),
        "x.strings": (["a", "", "ü"], "array"),
        "x.numbers": ([1, -2, 3], "array"),
        "x.flags": ([True, False], "array"),
    }

    def change(w: gguf.GGUFWriter) -> None:
        for key, (value, kind) in values.items():
            getattr(w, f"add_{kind}")(key, value)

    meta = GgufFile(write(tmp_path / "m.gguf", {}, change)).metadata
    assert {k: meta[k] for k in values} == {k: v for k, (v, _) in values.items()}


def test_another_alignment(tmp_path: Path) -> None:
    w = np.arange(VOCAB * HIDDEN, dtype=np.float32).reshape(VOCAB, HIDDEN)
    tensors = {"output_norm.weight": (w[0, :3], "F32"), "token_embd.weight": (w, "F32")}
    path = write(tmp_path / "m.gguf", tensors, lambda w: w.add_custom_alignment(256))
    np.testing.assert_array_equal(opened(path).tensor("model.embed_tokens.weight").numpy(), w)


# -- what is broken ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    w = np.ones((VOCAB, HIDDEN), np.float32)
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", {"token_embd.weight": (w, "F32")})
    assert GgufFile(path).config().tie_embeddings
    return path.read_bytes()


def refused(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=match) as e:
        opened(path)
    assert "bad.gguf" in str(e.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.gguf"):
        GgufFile(tmp_path / "none.gguf")


def test_an_empty_file(tmp_path: Path) -> None:
    refused(tmp_path, b"", "cannot read")


def test_not_a_gguf(tmp_path: Path) -> None:
    refused(tmp_path, b"PK\x03\x04" + bytes(100), "is not a GGUF file")


@pytest.mark.parametrize("version", [1, 4, 3 << 24], ids=["old", "new", "big-endian"])
def test_another_version(tmp_path: Path, good: bytes, version: int) -> None:
    refused(tmp_path, good[:4] + struct.pack("<I", version) + good[8:], f"GGUF version {version}")


@pytest.mark.parametrize("keep", [4, 10, 23, 24, 60, 400, 800])
def test_a_truncated_header(tmp_path: Path, good: bytes, keep: int) -> None:
    refused(tmp_path, good[:keep], "damaged or truncated: its header does not end")


def test_truncated_data(tmp_path: Path, good: bytes) -> None:
    refused(tmp_path, good[:-1000], r"truncated: tensor token_embd\.weight ends at byte")


@pytest.mark.parametrize("at", [8, 16], ids=["tensors", "pairs"])
def test_absurd_counts(tmp_path: Path, good: bytes, at: int) -> None:
    refused(tmp_path, good[:at] + b"\xff" * 8 + good[at + 8 :], "damaged or truncated")


def test_noise_never_escapes_as_another_error(tmp_path: Path, good: bytes) -> None:
    """Any byte of the header may flip: the file opens or is refused in our words."""
    rng = np.random.default_rng(0)
    header, path = good.index(b"token_embd.weight") + 50, tmp_path / "noisy.gguf"
    refusals = 0
    for _ in range(300):
        data = bytearray(good)
        for at in rng.integers(0, header, 2):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            opened(path).names()
        except CheckpointError:
            refusals += 1
    assert refusals > 50


def test_an_unknown_type_number(tmp_path: Path, good: bytes) -> None:
    at = good.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    data = good[:at] + struct.pack("<I", 999) + good[at + 4 :]
    refused(tmp_path, data, r"token_embd\.weight has unknown type 999")


def test_another_architecture(tmp_path: Path) -> None:
    refused(tmp_path, write(tmp_path / "m.gguf", {}, arch="gemma").read_bytes(), "holds 'gemma'")


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {}, lambda w: w.add_expert_count(8))
    refused(tmp_path, path.read_bytes(), "mixture of experts")


def test_a_tensor_that_is_not_there(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(good)
    with pytest.raises(CheckpointError, match=r"m\.gguf has no tensor lm_head\.weight"):
        opened(path).tensor("lm_head.weight")


# -- the default model ---------------------------------------------------------------------------


class FastReader(gguf.GGUFReader):  # type: ignore[misc]
    """The library's reader without the vocabulary, which takes it six seconds twice."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            inner, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count > 1000:
                at, kind = orig_offs + 12, gguf.GGUFValueType(inner)
                if kind == gguf.GGUFValueType.STRING:
                    for _ in range(count):
                        at += 8 + struct.unpack_from("<Q", self.data, at)[0]
                else:
                    at += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
                return at - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)


@pytest.fixture(scope="module")
def default_oracle() -> Iterator[Any]:
    """The default model as `transformers` reads it; it wants `accelerate`, and does without."""
    import transformers
    from transformers import modeling_utils

    path = resolve("default")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", FastReader)
        patch.setattr(modeling_utils, "is_accelerate_available", lambda *_: True)
        yield transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()


@pytest.fixture(scope="module")
def default() -> tuple[Checkpoint, TorchDecoder]:
    checkpoint = load_checkpoint("default")
    decoder = TorchDecoder(
        checkpoint.config,
        checkpoint.weights,
        dtype=torch.float32,
        num_slots=5,
        max_context=256,
        device=torch.device("cpu"),
    )
    return checkpoint, decoder


def test_default_weights_equal_transformers(
    default: tuple[Checkpoint, TorchDecoder], default_oracle: Any
) -> None:
    source, state = default[0].weights, default_oracle.state_dict()
    assert source.names() == state.keys() - {"lm_head.weight"}
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"]
    names = [f"model.layers.{i}.{p}.weight" for i in (0, 29) for p in parts]
    for name in [*names, "model.embed_tokens.weight", "model.layers.7.input_layernorm.weight"]:
        torch.testing.assert_close(source.tensor(name), state[name], atol=0, rtol=0)


def test_default_logits_equal_transformers(
    default: tuple[Checkpoint, TorchDecoder], default_oracle: Any
) -> None:
    checkpoint, decoder = default
    ids = tuple(checkpoint.tokenizer.encode(Path(__file__).read_text())[:200])
    assert len(ids) == 200
    with torch.inference_mode():
        expected = default_oracle(torch.tensor([ids])).logits[0]
    got = decoder.forward(pack([Segment(0, 0, ids, 200)])).logits
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nList three colours.<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4, 5,",
    "Es war einmal ein König, der",
)


def test_default_greedy_text_equals_transformers(
    default: tuple[Checkpoint, TorchDecoder], default_oracle: Any
) -> None:
    """64 tokens of five prompts. Our text, read by the oracle in one pass, must hold its own best
    token at every place; by induction that is the text the oracle itself would write."""
    checkpoint, decoder = default
    texts = [tuple(checkpoint.tokenizer.encode(p)) for p in PROMPTS]
    written: list[tuple[int, ...]] = [()] * len(texts)
    for _ in range(64):
        segments = [
            Segment(i, len(text) + len(w) - 1, w[-1:], 1) if w else Segment(i, 0, text, 1)
            for i, (text, w) in enumerate(zip(texts, written, strict=True))
        ]
        best = decoder.forward(pack(segments)).logits.argmax(-1).tolist()
        written = [(*w, t) for w, t in zip(written, best, strict=True)]
    for text, w in zip(texts, written, strict=True):
        with torch.inference_mode():
            rows = default_oracle(torch.tensor([text + w])).logits[0, len(text) - 1 : -1]
        assert tuple(rows.argmax(-1).tolist()) == w
    assert "Paris" in checkpoint.tokenizer.decode(written[0])
