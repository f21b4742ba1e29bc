"""From nothing to a drafter, as a user does it: the target writes, `dspark train` learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.cli.main import main
from dspark.drafters import checkpoint
from dspark.llm import LLM
from dspark.types import SamplingParams, Stats
from tests.train.tiny_runs import directory, toml

PROMPTS = [f"Tell me about {word}" for word in ("the sea", "glass", "tin", "owls", "ink", "rye")]


def write_text(model: Path, file: Path) -> list[str]:
    """Greedy answers, those that come back from text as the same ids; returns their prompts."""
    kept = []
    llm = LLM(str(model), dtype="fp32", drafter="none", device="cpu")
    with file.open("w") as rows:
        for prompt in PROMPTS:
            out = llm.chat([{"role": "user", "content": prompt}],
                           SamplingParams(max_tokens=60, temperature=0))  # fmt: skip
            ids = [t for t in out.token_ids if t not in llm.tokenizer.eos_ids]
            if llm.tokenizer.encode(out.text) != ids:
                continue
            kept.append(prompt)
            row = {"prompt": prompt, "answer": out.text, "temperature": 0.0,
                   "finish_reason": out.finish_reason}  # fmt: skip
            rows.write(json.dumps(row) + "\n")
    return kept


def serve(model: Path, drafter: Path, asked: list[str]) -> tuple[float, bool]:
    """Accepted length on training prompts, and whether the texts are those of plain decoding."""
    llm = LLM(str(model), dtype="fp32", drafter="none", device="cpu")
    params = SamplingParams(max_tokens=60, temperature=0)
    prompts = [llm.encode_prompt(p) for p in asked]
    plain = [o.token_ids for o in llm.generate(prompts, params)]
    llm.set_drafter(str(drafter), whole_drafts=True)
    outputs = llm.generate(prompts, params)
    length = Stats.total([o.stats for o in outputs]).accepted_length
    assert length is not None
    return length, [o.token_ids for o in outputs] == plain


@pytest.mark.slow
def test_from_nothing_to_a_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = directory(tmp_path / "model")
    text = tmp_path / "text.jsonl"
    asked = write_text(model, text)
    assert len(asked) > 3
    config = toml(tmp_path / "drafter.toml", {
        "target": {"model": str(model), "dtype": "fp32", "device": "cpu"},
        "text": {"files": [str(text)], "held_out": 0},
        "drafter": {"kind": "dspark", "num_layers": 2, "block_size": 4, "markov_rank": 16,
                    "target_layer_ids": [0, 1]},
        "loss": {"ce": 0.3},
        "train": {"out": str(tmp_path / "run"), "steps": 240, "anchors_per_step": 128,
                  "lr": 4e-3, "eval_every": 120, "save_every": 120, "threads": 1},
    })  # fmt: skip
    assert main(["train", str(config)]) == 0
    err = capsys.readouterr().err
    assert "finished at step 240 of 240, accepted length" in err
    drafter = checkpoint.load(tmp_path / "run" / "drafter")
    assert drafter.training["accepted_length"] > 2, err
    assert drafter.training["temperature"] == 0
    served, same = serve(model, tmp_path / "run" / "drafter", asked)
    assert same
    assert served > 2
    assert served == pytest.approx(drafter.training["accepted_length"], rel=0.05)
    rows = [json.loads(r) for r in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (next(r for r in x if r["split"] == "train") for x in (rows, rows[::-1]))
    assert first["accepted_length"] < 1.3 and last["loss"] < first["loss"] / 2
