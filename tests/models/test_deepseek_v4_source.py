"""Official DeepSeek-V4 files: every value exact, only what is needed opened, damage named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models import safetensors_header
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_config import (
    dspark_from_hf,
    is_v4,
    read_v4_config,
    v4_from_hf,
)
from dspark.models.deepseek_v4_names import (
    MARKOV,
    CarriedDrafter,
    canonical,
    carried_drafters,
    stage_shapes,
    tower_shapes,
)
from dspark.models.deepseek_v4_source import DeepseekV4Source, check_shapes
from dspark.models.target import Segment, pack
from tests.models import official_v4 as official
from tests.models.official_v4 import FLASH, FLASH_DSPARK, TINY, TINY_DSPARK

WQ_A = "layers.1.attn.wq_a"
EXPERT = "layers.2.ffn.experts.1.w2"


def source(directory: Path, dtype: torch.dtype | None = None) -> DeepseekV4Source:
    return DeepseekV4Source(directory, read_v4_config(directory)[0], dtype)


# -- the configuration ------------------------------------------------------------------------


def reference_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """The same model as the reference implementation writes it."""
    names = {
        "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "qk_rope_head_dim": "rope_head_dim", "moe_intermediate_size": "moe_inter_dim",
        "num_experts_per_tok": "n_activated_experts", "num_hash_layers": "n_hash_layers",
        "scoring_func": "score_func", "routed_scaling_factor": "route_scale",
        "rms_norm_eps": "norm_eps", "sliding_window": "window_size",
    }  # fmt: skip
    gone = {"model_type", "rope_scaling", "max_position_embeddings", "quantization_config",
            "num_nextn_predict_layers", "topk_method", "num_key_value_heads"}  # fmt: skip
    out = {names.get(k, k): v for k, v in raw.items() if k not in gone}
    return out | {
        "n_mtp_layers": 3, "original_seq_len": 65536, "rope_factor": 16, "beta_fast": 32,
        "beta_slow": 1, "dtype": "fp8", "scale_fmt": "ue8m0",
    }  # fmt: skip


def test_the_published_configuration() -> None:
    c = v4_from_hf(FLASH_DSPARK)
    assert (c.num_layers, c.hidden_size, c.q_rank, c.o_rank, c.window) == (
        43,
        4096,
        1024,
        1024,
        128,
    )
    assert Counter(c.ratios) == {0: 2, 4: 21, 128: 20}
    assert c.ratios[:3] == (0, 0, 4) and c.ratios[-1] == 4
    assert (c.rope.kind, c.rope.theta) == ("default", 10_000)
    assert (c.compress_rope.kind, c.compress_rope.theta) == ("yarn", 160_000)
    assert c.compress_rope.attention_factor == 1.0 and c.compress_rope.factor == 16
    assert c.max_context == 1_048_576
    settings = dspark_from_hf(FLASH_DSPARK)
    assert settings is not None and settings.target_layer_ids == (40, 41, 42)
    assert (settings.block_size, settings.noise_token_id, settings.markov_rank) == (5, 128799, 256)
    assert dspark_from_hf(FLASH) is None


@pytest.mark.parametrize("raw", [FLASH_DSPARK, TINY_DSPARK], ids=["flash", "tiny"])
def test_both_spellings_are_the_same_model(raw: dict[str, Any]) -> None:
    other = reference_spelling(raw)
    assert "hidden_size" not in other and is_v4(other)
    assert v4_from_hf(other) == v4_from_hf(raw)
    assert dspark_from_hf(other) == dspark_from_hf(raw)


def test_the_reference_spelling_knows_other_rates() -> None:
    raw = reference_spelling(TINY) | {"compress_ratios": [0, 4, 16, 4, 0]}
    assert v4_from_hf(raw).ratios == (0, 4, 16, 4)
    assert v4_from_hf(TINY | {"compress_rate_hca": 16}).ratios == (0, 4, 16, 4)


def test_as_transformers_writes_it() -> None:
    from transformers import DeepseekV4Config

    theirs = json.loads(DeepseekV4Config(**TINY).to_json_string())
    assert "compress_ratios" not in theirs and "rope_scaling" not in theirs
    assert v4_from_hf(theirs) == v4_from_hf(TINY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'deepseek_v4'"),
        ({"model_type": "deepseek_v41", "engram_layer_ids": [1]}, "V4.1 is another"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"head_dim": None}, "head_dim is None"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({"compress_ratios": [0, 4]}, "2 layers have a kind, the model has 4"),
        ({"compress_ratios": None}, "neither compress_ratios nor layer_types"),
        ({"layer_types": ["full_attention"] * 4}, "kind 'full_attention' is not known"),
        ({"compress_rate_csa": 8}, "sparse layers compress 8 tokens"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "hash_moe layers come first"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn needs factor"),
        ({"rope_scaling": 7}, "wrong kind"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], message: str) -> None:
    v4_from_hf(TINY)
    with pytest.raises(CheckpointError, match=message):
        v4_from_hf(TINY | change)


@pytest.mark.parametrize(
    "change",
    [
        {"dspark_block_size": 0},
        {"dspark_noise_token_id": None},
        {"dspark_noise_token_id": 96},
        {"dspark_target_layer_ids": [1, 2, 4]},
        {"dspark_target_layer_ids": []},
        {"dspark_markov_rank": -1},
    ],
)
def test_impossible_settings_of_dspark_are_refused(change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(CheckpointError, match=key):
        dspark_from_hf(TINY_DSPARK | change)


def test_the_directory_with_the_reference_file_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_v4_config(tmp_path)
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "config.json").write_text(json.dumps(reference_spelling(TINY)))
    assert read_v4_config(tmp_path)[0] == v4_from_hf(TINY)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        read_v4_config(tmp_path)


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("raw", [TINY, TINY_DSPARK], ids=["mtp1", "dspark"])
def test_every_value_of_official_files(
    tmp_path: Path, raw: dict[str, Any], num_shards: int, dtype: torch.dtype
) -> None:
    stored, values = official.tensors(raw, official.carried(raw))
    assert Counter(t.dtype for t in stored.values()).keys() == {
        torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.bfloat16, torch.float32,
        torch.int64,
    }  # fmt: skip
    weights = source(official.write(tmp_path, raw, stored, num_shards), dtype)
    assert weights.names() == values.keys()
    for name, value in values.items():
        got = weights.tensor(name)
        assert weights.shape(name) == tuple(got.shape) == tuple(value.shape), name
        assert torch.equal(got.to(value.dtype), value), name
        quantised = official.kind(name) in ("FP8", "FP4")
        assert got.dtype == (dtype if quantised else stored[name].dtype), name


def test_fp4_experts_as_integer_blocks(tmp_path: Path) -> None:
    stored, values = official.tensors(TINY | {"moe_intermediate_size": 64})
    weights = source(official.write(tmp_path, TINY | {"moe_intermediate_size": 64}, stored))
    blocks = weights.blocks(EXPERT + ".weight")
    assert blocks is not None
    whole = torch.from_numpy(blocks.values * blocks.scale.repeat(32, 1))
    assert torch.equal(whole.double(), values[EXPERT + ".weight"])
    assert weights.blocks(WQ_A + ".weight") is None
    assert weights.blocks("norm.weight") is None


def transformers_model(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**TINY | changes)
    model: Any = transformers.DeepseekV4ForCausalLM(config)
    return model.eval()


def oracle() -> Any:
    model = transformers_model()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
        for name, b in model.named_buffers():
            if name.endswith("tid2eid"):
                b.copy_(torch.randint_like(b, 0, 3))
    return model


def in_official_order(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model of `transformers` holds, renamed by hand, layer by layer."""
    out = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
    out |= {f"hc_head_{p}": f"hc_head.hc_{p}" for p in ("fn", "base", "scale")}
    for i, ratio in enumerate((0, 4, 128, 4)):
        p, a = f"layers.{i}.", f"layers.{i}.self_attn."
        pairs = {"wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv": "kv_proj", "wo_a": "o_a_proj",
                 "wo_b": "o_b_proj", "q_norm": "q_a_norm", "kv_norm": "kv_norm"}  # fmt: skip
        out |= {f"{p}attn.{k}.weight": f"{a}{v}.weight" for k, v in pairs.items()}
        out[p + "attn.attn_sink"] = a + "sinks"
        homes = {}
        if ratio:
            homes["compressor."] = "compressor."
        if ratio == 4:
            homes["indexer.compressor."] = "compressor.indexer."
            out[p + "attn.indexer.wq_b.weight"] = a + "compressor.indexer.q_b_proj.weight"
            scorer = "compressor.indexer.scorer.weights_proj.weight"
            out[p + "attn.indexer.weights_proj.weight"] = a + scorer
        for ours, theirs in homes.items():
            pairs = {"wkv.weight": "kv_proj.weight", "wgate.weight": "gate_proj.weight",
                     "norm.weight": "kv_norm.weight", "ape": "position_bias"}  # fmt: skip
            out |= {f"{p}attn.{ours}{k}": f"{a}{theirs}{v}" for k, v in pairs.items()}
        for hc in ("attn", "ffn"):
            out |= {f"{p}hc_{hc}_{k}": f"{p}{hc}_hc.{k}" for k in ("fn", "base", "scale")}
        out[p + "attn_norm.weight"] = p + "input_layernorm.weight"
        out[p + "ffn_norm.weight"] = p + "post_attention_layernorm.weight"
        out[p + "ffn.gate.weight"] = p + "mlp.gate.weight"
        table = ("tid2eid", "tid2eid") if i == 0 else ("bias", "e_score_correction_bias")
        out[f"{p}ffn.gate.{table[0]}"] = f"{p}mlp.gate.{table[1]}"
        for w, proj in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            out[f"{p}ffn.shared_experts.{w}.weight"] = f"{p}mlp.shared_experts.{proj}.weight"
    result = {ours: state["model." + theirs] for ours, theirs in out.items()}
    result["head.weight"] = state["lm_head.weight"]
    for i in range(4):
        both = state[f"model.layers.{i}.mlp.experts.gate_up_proj"]
        down = state[f"model.layers.{i}.mlp.experts.down_proj"]
        for e in range(3):
            p = f"layers.{i}.ffn.experts.{e}."
            result[p + "w1.weight"], result[p + "w3.weight"] = both[e].chunk(2)
            result[p + "w2.weight"] = down[e]
    return result


@pytest.mark.parametrize("spelling", ["modules", "saved"])
def test_the_spellings_of_transformers(tmp_path: Path, spelling: str) -> None:
    """The names of its modules, and what `save_pretrained` writes: two mixtures of old and new."""
    model = oracle()
    if spelling == "saved":
        model.save_pretrained(tmp_path)
    else:
        official.write(tmp_path, TINY, {n: t.clone() for n, t in model.state_dict().items()})
    stored = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.attn_norm.weight" in stored or spelling == "modules"
    assert "model.layers.0.mlp.experts.down_proj" in stored or spelling == "saved"
    weights = source(tmp_path)
    expected = in_official_order(dict(model.state_dict()))
    assert weights.names() == expected.keys() == tower_shapes(v4_from_hf(TINY)).keys()
    check_shapes(weights, tower_shapes(v4_from_hf(TINY)), "x")
    for name, value in expected.items():
        assert weights.shape(name) == tuple(value.shape)
        assert torch.equal(weights.tensor(name), value), name


def test_files_of_transformers_run_as_they_do(tmp_path: Path) -> None:
    """From the saved files through the source to logits: no name or slice is swapped."""
    model: Any = transformers_model(initializer_range=0.1)
    model.save_pretrained(tmp_path)
    ids = tuple(range(5, 90, 3))
    config = read_v4_config(tmp_path)[0]
    tower = DeepseekV4(
        config, source(tmp_path), dtype=torch.float32, num_slots=1, max_context=64,
        device=torch.device("cpu"),
    )  # fmt: skip
    got = tower.forward(pack([Segment(0, 0, ids, len(ids))])).logits
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_official_names_stay() -> None:
    for name in official.shapes(TINY_DSPARK, official.carried(TINY_DSPARK)):
        assert canonical(name) == name == canonical("model." + name)
    assert canonical("layers.0.attn.wkv.weight_scale_inv") == "layers.0.attn.wkv.scale"


def test_experts_of_a_foreign_shape_in_one_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    official.write(tmp_path, TINY, {name: torch.zeros(2, 160, 48)})
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[2, 160, 48\], expected \[3"):
        source(tmp_path)


# -- only what is needed ----------------------------------------------------------------------


def test_only_the_shards_of_wanted_tensors_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, values = official.tensors(TINY_DSPARK, official.carried(TINY_DSPARK))
    official.write(tmp_path, TINY_DSPARK, stored, 6)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    opened: list[str] = []
    real = safetensors_header.read_header

    def spy(path: Path) -> dict[str, safetensors_header.Entry]:
        opened.append(path.name)
        return real(path)

    monkeypatch.setattr(safetensors_header, "read_header", spy)
    weights = source(tmp_path)
    assert not opened and len(weights.names()) == len(values)
    tower = tower_shapes(v4_from_hf(TINY_DSPARK))
    check_shapes(weights, tower, "x")
    for name in tower:
        weights.tensor(name)
    needed = {index[n] for n in tower}
    assert set(opened) == needed and len(opened) == len(needed) < 6
    assert weights.num_bytes() == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))


# -- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        (WQ_A + ".scale", None, f"{WQ_A}.weight is quantised, but its scale {WQ_A}.scale is miss"),
        (EXPERT + ".scale", None, f"{EXPERT}.weight is quantised, but its scale {EXPERT}.scale"),
        (WQ_A + ".scale", torch.zeros(2, 2), rf"{WQ_A}.scale has shape \[2, 2\], expected \[1, 2"),
        (EXPERT + ".scale", torch.ones(160, 1), rf"{EXPERT}.scale has shape .* \[160, 2\]"),
        (WQ_A + ".scale", torch.ones(1, 2).half(), f"{WQ_A}.scale is F16, expected F8_E8M0, F32"),
        (WQ_A + ".scale", torch.tensor([[1, torch.nan]]), f"{WQ_A}.weight holds NaN"),
        (WQ_A + ".weight", torch.ones(32, 160).to(torch.float8_e5m2), f"{WQ_A}.weight is F8_E5M2"),
        (WQ_A + ".weight", torch.ones(32, 160, dtype=torch.int32), f"{WQ_A}.weight is I32"),
        (WQ_A + ".weight", torch.full((32, 160), 127).to(torch.uint8).view(torch.float8_e4m3fn),
         f"{WQ_A}.weight holds NaN"),
        (EXPERT + ".weight", torch.ones(160, 48, dtype=torch.uint8), f"{EXPERT}.weight is U8"),
        ("layers.1.attn_norm.weight", torch.tensor([torch.inf] * 160), "1.attn_norm.weight holds"),
        ("layers.0.ffn.gate.tid2eid", torch.ones(96, 2), "tid2eid is F32, expected I64"),
        ("layers.0.ffn.gate.tid2eid", torch.full((96, 2), 3), "tid2eid is damaged: it names exp"),
        ("layers.1.attn_norm.weight", None, "lacks layers.1.attn_norm.weight"),
        ("layers.1.attn_norm.weight", torch.ones(159), r"1.attn_norm.weight has shape \[159\]"),
        (EXPERT + ".weight", torch.ones(160, 23, dtype=torch.int8), rf"{EXPERT}.weight has shape"),
    ],
)  # fmt: skip
def test_damage_is_refused_by_the_tensors_name(
    tmp_path: Path, name: str, replacement: Tensor | None, message: str
) -> None:
    stored, _ = official.tensors(TINY)
    assert name in stored
    stored.pop(name)
    if replacement is not None:
        stored[name] = replacement
    official.write(tmp_path, TINY, stored)
    with pytest.raises(CheckpointError, match=message):
        weights = source(tmp_path)
        check_shapes(weights, tower_shapes(v4_from_hf(TINY)), "it")
        for n in sorted(weights.names()):
            weights.tensor(n)


def test_a_quantised_tensor_is_a_matrix(tmp_path: Path) -> None:
    stored = {WQ_A + ".weight": torch.ones(2, 4, 40).to(torch.float8_e4m3fn)}
    weights = source(official.write(tmp_path, TINY, stored))
    with pytest.raises(
        CheckpointError, match=rf"{WQ_A}\.weight is .* \[2, 4, 40\]: expected a mat"
    ):
        weights.tensor(WQ_A + ".weight")


def test_damage_of_blocks(tmp_path: Path) -> None:
    stored, _ = official.tensors(TINY)
    stored[EXPERT + ".scale"].view(torch.uint8)[3, 1] = 255
    weights = source(official.write(tmp_path, TINY, stored))
    with pytest.raises(CheckpointError, match=f"{EXPERT}.weight holds NaN"):
        weights.blocks(EXPERT + ".weight")


def test_two_spellings_of_one_tensor(tmp_path: Path) -> None:
    both = {"embed.weight": torch.zeros(2), "model.embed_tokens.weight": torch.zeros(2)}
    official.write(tmp_path, TINY, both)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight are the same tensor"):
        source(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        safetensors_header.Shards(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.zeros(4), "norm.weight": torch.ones(100)}, path)
    whole = path.read_bytes()
    entry = safetensors_header.Shards(tmp_path).entry("norm.weight")
    assert (entry.dtype, entry.shape, entry.num_bytes) == ("F32", (100,), 400)
    start = int.from_bytes(whole[:8], "little") + 8
    for content, message in (
        (whole[:-1], "cut short: tensor norm.weight ends at byte"),
        (whole[:20], "no safetensors file, or cut short"),
        (b"", "no safetensors file, or cut short"),
        (whole[:8] + b"#" + whole[9:], "header is not JSON"),
        (whole.replace(b"[100]", b"[101]"), "tensor norm.weight is damaged: F32 of shape"),
        (whole.replace(b'"F32","shape":[100]', b'"F99","shape":[100]'), "header of tensor norm."),
        (bytes([2]) + bytes(7) + b"[]" + whole[start:], "no JSON object"),
    ):
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            safetensors_header.Shards(tmp_path)


def test_damaged_indexes(tmp_path: Path) -> None:
    stored, _ = official.tensors(TINY)
    official.write(tmp_path, TINY, stored, 3)
    index = tmp_path / "model.safetensors.index.json"
    weights = source(tmp_path)
    raw = json.loads(index.read_text())
    last = raw["weight_map"]["layers.3.ffn_norm.weight"]
    (tmp_path / last).unlink()
    with pytest.raises(CheckpointError, match=f"{last} is missing"):
        weights.tensor("layers.3.ffn_norm.weight")
    with pytest.raises(CheckpointError, match=f"{last} is missing"):
        weights.num_bytes()
    first = raw["weight_map"]["embed.weight"]
    raw["weight_map"]["layers.9.x.weight"] = first
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"{first} has no tensor layers.9.x.weight, though"):
        source(tmp_path).tensor("layers.9.x.weight")
    with pytest.raises(CheckpointError, match=r"has no tensor nothing\.weight"):
        source(tmp_path).tensor("nothing.weight")
    index.write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        source(tmp_path)


# -- drafters ---------------------------------------------------------------------------------


def test_published_numbers_of_tensors() -> None:
    """69 187 in the preview of Flash with its MTP-1 head, 72 317 with DSpark, scales included."""
    for raw, total, stages in ((FLASH, 69_187, 1_575), (FLASH_DSPARK, 72_317, 4_705)):
        config, drafter = v4_from_hf(raw), official.carried(raw)
        counts = [
            sum(1 + (official.kind(n) in ("FP8", "FP4")) for n in shapes)
            for shapes in (tower_shapes(config), stage_shapes(config, drafter))
        ]
        assert counts == [total - stages, stages]


@pytest.mark.parametrize("raw", [TINY, TINY_DSPARK], ids=["mtp1", "dspark"])
def test_drafters_are_told_by_their_names(raw: dict[str, Any]) -> None:
    config, drafter = v4_from_hf(raw), official.carried(raw)
    tower, stages = tower_shapes(config), stage_shapes(config, drafter)
    settings = dspark_from_hf(raw)
    assert not tower.keys() & stages.keys()
    assert carried_drafters(tower, settings) == ()
    assert carried_drafters([*tower, *stages], settings) == (drafter,)


def test_v41_names_of_the_markov_head_and_no_heads() -> None:
    settings, drafter = dspark_from_hf(TINY_DSPARK), official.carried(TINY_DSPARK)
    names = stage_shapes(v4_from_hf(TINY_DSPARK), drafter)
    new = {n.replace("markov_w1", "embed").replace("markov_w2", "head") for n in names}
    (found,) = carried_drafters(new, settings)
    assert found.markov == tuple("mtp.2." + n for n in MARKOV[1])
    shapes = stage_shapes(v4_from_hf(TINY_DSPARK), found)
    assert shapes["mtp.2.markov_head.head.weight"] == (96, 12) and shapes.keys() == new
    bare = {n for n in names if "_head.markov" not in n and "confidence" not in n}
    (found,) = carried_drafters(bare, settings)
    assert found.markov is None and not found.confidence and found.last == "mtp.2."


def test_dspark_by_configuration_or_by_name_alone() -> None:
    settings = dspark_from_hf(TINY_DSPARK)
    assert carried_drafters(["mtp.0.attn_norm.weight"], settings)[0].kind == "dspark"
    (found,) = carried_drafters(["mtp.0.main_proj.weight"], None)
    assert found == CarriedDrafter("dspark", 1)
    with pytest.raises(CheckpointError, match="no dspark_block_size"):
        stage_shapes(v4_from_hf(TINY), found)
    assert carried_drafters(["mtp.0.e_proj.weight"], settings)[0].kind == "mtp1"
    with pytest.raises(CheckpointError, match="no drafter that is known"):
        carried_drafters(["mtp.0.attn_norm.weight"], None)
    with pytest.raises(CheckpointError, match=r"tensors of mtp\.2 and none of mtp\.1"):
        carried_drafters(["mtp.0.main_proj.weight", "mtp.2.norm.weight"], settings)
