"""A tower from nothing: it learns, resumes to the bit, and what it writes is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import CheckpointError, ConfigError, DSparkError
from dspark.llm import LLM
from dspark.models.loading import load_checkpoint
from dspark.train.config import build
from dspark.train.trainer import Outcome
from dspark.train.v4.loop import Loop
from dspark.train.v4.pretrain import PretrainConfig, TowerJob, make_loop, model_directory
from dspark.types import SamplingParams
from tests.train.v4.tiny_towers import config, raw

TIMES = ("seconds_per_step",)


def logged(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in TIMES} for r in rows]


def run(loop: Loop, steps: int = 10**6) -> Outcome:
    last = loop.counters.step + steps
    return loop.run(interrupted=lambda: loop.counters.step >= last)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def moments(loop: Loop) -> dict[str, Any]:
    return {n: dict(o.state[p]) for o in loop.optimizers for p, n in loop.names.items()
            if p in o.state}  # fmt: skip


def test_stopping_and_going_on_changes_no_bit(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = make_loop(config(tmp_path / "a"))
    assert run(whole) is Outcome.finished
    assert whole.counters.step == whole.job.total >= 10
    for steps in (3, 4, 10**6):
        torch.manual_seed(steps)  # a new process has another state
        part = make_loop(config(tmp_path / "b"))
        outcome = run(part, steps)
    assert outcome is Outcome.finished
    assert same(part.job.module.state_dict(), whole.job.module.state_dict())
    assert same(moments(part), moments(whole))
    assert logged(tmp_path / "a" / "run") == logged(tmp_path / "b" / "run")
    assert whole.counters.epoch == 2


def test_it_learns_and_what_it_writes_serves_as_it_was_trained(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=8, lr=1e-2)
    loop = make_loop(settings)
    job = loop.job
    assert isinstance(job, TowerJob)
    before = job.held_out()["loss"]
    run(loop)
    after = logged(tmp_path / "run")[-1]
    assert after["split"] == "held_out" and after["loss"] < 0.6 * before
    gate = job.module.layers[1].ffn.gate
    assert gate.bias.abs().max() > 0, "the load was balanced"
    directory = model_directory(settings)
    found = load_checkpoint(str(directory))
    assert found.carried == ()
    sample = job.corpus.samples[0]
    assert (
        tuple(found.tokenizer.encode_chat(_messages(settings, 0))) == sample.tokens[: sample.start]
    )
    llm = LLM(str(directory), dtype="fp32", drafter="none", max_users=1)
    text = found.tokenizer.decode(sample.tokens[sample.start :])
    answer = llm.chat(_messages(settings, 0), SamplingParams(max_tokens=8, temperature=0)).text
    assert answer.split()[1:2] == text.split()[1:2] == ["and"]
    training = json.loads((directory / "training.json").read_text())
    assert training["step"] == training["total_steps"] == job.total


def _messages(settings: PretrainConfig, row: int) -> list[dict[str, str]]:
    lines = Path(settings.text.files[0]).read_text().splitlines()
    return [{"role": "user", "content": json.loads(lines[row])["prompt"]}]


def test_another_configuration_does_not_go_on(tmp_path: Path) -> None:
    run(make_loop(config(tmp_path)), 2)
    with pytest.raises(ConfigError, match=r"train\.lr=0\.005, this one has 0\.01"):
        make_loop(config(tmp_path, lr=1e-2))
    assert make_loop(config(tmp_path, save_every=7)).counters.step == 2


def test_what_is_not_finite_stops_before_the_weights_move(tmp_path: Path) -> None:
    loop = make_loop(config(tmp_path))
    run(loop, 2)
    with torch.no_grad():
        loop.job.module.embed.weight[0] = torch.nan  # BOS, in every row
    before = {k: v.clone() for k, v in loop.job.module.state_dict().items()}
    with pytest.raises(DSparkError, match=r"not finite at step \d+, batch of sequences"):
        run(loop)
    after = loop.job.module.state_dict()
    assert all(torch.equal(before[k].nan_to_num(), after[k].nan_to_num()) for k in before)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("model", "vocab_size", 100, "has no room for the 265 marks and bytes"),
        ("model", "vocab_size", 9000, "yields a vocabulary of"),
        ("text", "files", [], "text.files is empty"),
        ("train", "epochs", 0, "train.epochs=0 is out of range: expected 1 up"),
        ("train", "balance_speed", -1.0, "train.balance_speed=-1.0 is out of range"),
        ("model", "hidden", 3, "unknown key model.hidden; did you mean model.hidden_size"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, section: str, key: str, value: Any, message: str
) -> None:
    sections = raw(tmp_path)
    sections[section][key] = value
    with pytest.raises(ConfigError, match=message):
        make_loop(build(PretrainConfig, sections))


def test_a_second_stage_begins_where_the_first_one_ended(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    first = make_loop(config(tmp_path, epochs=4))
    run(first)
    before = model_directory(config(tmp_path))
    second = config(tmp_path / "two", start_from=str(before))
    job = make_loop(second).job
    assert isinstance(job, TowerJob)
    for name, tensor in job.module.state_dict().items():
        served = first.job.module.state_dict()[name].float()
        torch.testing.assert_close(tensor.float(), served, atol=0, rtol=0.01, msg=name)  # bf16
    kept = (model_directory(second) / "tokenizer.json").read_bytes()
    assert kept == (before / "tokenizer.json").read_bytes()


def test_a_second_stage_of_other_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    run(make_loop(config(tmp_path)), 1)
    sections = raw(tmp_path / "two", start_from=str(model_directory(config(tmp_path))))
    sections["model"]["moe_intermediate_size"] = 8
    with pytest.raises(CheckpointError, match=r"has shape .* the configuration wants"):
        make_loop(build(PretrainConfig, sections))
    (tmp_path / "three").mkdir()
    with pytest.raises(ConfigError, match=r"has no tokenizer_config.json to take over"):
        make_loop(config(tmp_path / "three", start_from=str(tmp_path)))
