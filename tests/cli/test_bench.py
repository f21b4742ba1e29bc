"""`dspark bench`: the table, the last line, the verdict."""

import json
from pathlib import Path
from shlex import split
from typing import Any

import pytest

from dspark.cli.main import main
from tests.fake_llm import FakeLLM

Capture = pytest.CaptureFixture[str]
QUICK = ["bench", "--limit", "2"]


def last_line(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_last_line_is_the_json(capsys: Capture) -> None:
    assert main([*QUICK, "--drafters", "ngram"]) == 0
    out = capsys.readouterr().out
    found = last_line(out)
    assert {"model", "dtype", "threads", "prompts", "results"} <= found.keys()
    assert found["prompts"]["name"] == "builtin:chat" and found["prompts"]["count"] == 2
    assert [list(r) for r in found["results"]] == [
        [
            "drafter", "tokens", "seconds", "tokens_per_second", "speedup_vs_none",
            "drafted", "scheduled", "predicted", "accepted", "accepted_length",
            "acceptance_rate", "acceptance_by_position", "draft_ms", "verify_ms", "other_ms",
            "ttft_ms", "identical_to_none", "pipeline", "hit_rate",
            "accepted_length_ahead", "accepted_length_fresh", "delta", "gain_vs_off",
            "gain_predicted",
        ]
    ] * 2  # fmt: skip
    assert [r["drafter"] for r in found["results"]] == ["none", "ngram"]
    assert sum(line.startswith("{") for line in out.splitlines()) == 1


def test_table_and_definitions_come_first(capsys: Capture) -> None:
    assert main(QUICK) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.strip().startswith("ngram"))
    # Two texts of ten tokens: one of the prefill, then five rounds of two guesses, one right.
    assert row.split()[:7] == ["ngram", "150.0", "1.50x", "20", "0.0", "10", "1.80"]
    assert row.split()[-1] == "yes"
    assert "acceptance by position, ngram: 1.00 0.00" in out
    assert "speedup_vs_none: tokens_per_second / that of none" in out
    assert "\x1b" not in out


def test_json_file_is_the_last_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "result.json"
    assert main([*QUICK, "--json", str(file)]) == 0
    assert file.read_text(encoding="utf-8").strip() == capsys.readouterr().out.splitlines()[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_changed_text_is_exit_code_1(capsys: Capture) -> None:
    assert main([*QUICK, "--drafters", "none,ngram,liar"]) == 1
    out, err = capsys.readouterr()
    assert [r["identical_to_none"] for r in last_line(out)["results"]] == [True, True, False]
    assert "error: the text of drafter liar differs" in err
    assert "on prompt 1, from token 3 on" in err
    assert "NO" in out


def test_a_doubtful_speed_up_is_a_warning(capsys: Capture) -> None:
    assert main([*QUICK, "--drafters", "lucky"]) == 0
    assert "warning: the speed-up of lucky" in capsys.readouterr().err


def test_sampled_texts_get_no_verdict(capsys: Capture) -> None:
    assert main([*QUICK, "--drafters", "liar", "--temperature", "1"]) == 0
    results = last_line(capsys.readouterr().out)["results"]
    assert [r["identical_to_none"] for r in results] == [None, None]


def test_prompts_by_comma_and_again(fake: type[FakeLLM], capsys: Capture) -> None:
    argv = ["--prompts", "builtin:code, builtin:math", "--prompts", "builtin:chat"]
    assert main([*QUICK, *argv]) == 0
    prompts = last_line(capsys.readouterr().out)["prompts"]
    assert prompts["name"] == "builtin:code+builtin:math+builtin:chat"
    assert prompts["count"] == 6


def test_options_reach_the_model(fake: type[FakeLLM]) -> None:
    argv = split("-m x --dtype fp32 --threads 1 --max-context 99 --num-draft-tokens 4")
    argv += split("--max-tokens 3 --seed 5 --emulate-device verify=1ms")
    assert main([*QUICK, *argv]) == 0
    llm = fake.created[0]
    assert llm.options == {
        "model": "x",
        "drafter": "none",
        "num_draft_tokens": None,
        "verify": "auto",
        "dtype": "fp32",
        "device": "auto",
        "threads": 1,
        "max_context": 99,
        "prefix_reuse": False,
        "pipeline": "off",
        "draft_device": None,
        "emulate": "verify=1ms",
    }
    assert set(llm.calls[1:]) == {("none", None), ("ngram", 4)}
    measured = [params for _, params in llm.seen[2:]]
    assert {p.max_tokens for p in measured} == {3}
    assert [p.seed for p in measured] == [5, 5, 6, 6]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "cannot read the prompts nowhere.jsonl"),
        (["--prompts", "builtin:poems"], "unknown prompts 'builtin:poems'"),
        (["--drafters", "psychic"], "unknown drafter 'psychic'"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--json", "no/such/folder/x.json"], "its folder does not exist"),
    ],
)
def test_bad_requests(argv: list[str], message: str, capsys: Capture) -> None:
    assert main([*QUICK, *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")
    assert out == ""


def test_an_unwritable_file_still_prints_nothing_half(tmp_path: Path, capsys: Capture) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    assert main([*QUICK, "--json", str(taken)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [taken]


def test_pipeline_modes_take_part_beside_drafters(capsys: Capture) -> None:
    assert main([*QUICK, "--drafters", "ngram", "--pipeline", "off,on"]) == 0
    out = capsys.readouterr().out
    rows = last_line(out)["results"]
    assert [(r["drafter"], r["pipeline"]) for r in rows] == [
        ("none", "off"),
        ("ngram+off", "off"),
        ("ngram+on", "on"),
    ]
    assert "two lanes, ngram+on: hits 0%, gain 1.00x, by the formula 1.00x" in out
    assert last_line(out)["emulated"] is None and "emulated:" not in out


def test_an_unknown_mode_loads_no_model(capsys: Capture) -> None:
    assert main([*QUICK, "--pipeline", "off,maybe"]) != 0
    assert "unknown pipeline mode 'maybe'" in capsys.readouterr().err
    assert not FakeLLM.created


def test_a_timeline_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: Capture
) -> None:
    for name, why in (("lanes.png", "ending in .json"), ("none/lanes.json", "does not exist")):
        assert main([*QUICK, "--timeline", str(tmp_path / name)]) != 0
        assert why in capsys.readouterr().err
    assert not FakeLLM.created
