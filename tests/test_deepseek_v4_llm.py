"""A DeepSeek-V4 directory through `LLM` and the command line: it says what runs, and what the
checkpoint carries changes no token."""

from __future__ import annotations

from typing import Any

import pytest

from dspark import LLM, SamplingParams
from dspark.cli.main import main
from dspark.errors import ConfigError
from dspark.types import Round
from tests.models.official_v4 import TINY, TINY_DSPARK
from tests.models.test_deepseek_v4_loading import directory

SIZES: dict[str, Any] = {"index_n_heads": 16}  # with few heads exact ties are frequent
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = ["abc", "xyzzy xyzzy", "1", "DeepSeek-V4"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The official layout, fp8 and fp4 included, with each kind of drafter and with none."""
    made = {}
    for name, raw, drafter in (
        ("mtp1", TINY, True),
        ("dspark", TINY_DSPARK, True),
        ("ngram", TINY, False),
    ):
        place = tmp_path_factory.mktemp(name)
        made[name] = str(directory(place, raw, drafter=drafter, **SIZES))
    return made


@pytest.mark.parametrize("kind, block", [("mtp1", 1), ("dspark", 5)])
def test_auto_takes_what_the_checkpoint_carries(
    places: dict[str, str], kind: str, block: int
) -> None:
    llm = LLM(places[kind], dtype="fp32", device="cpu", max_context=128, max_users=4)
    assert (llm.drafter_name, llm.drafter_reason) == (kind, "stored in the model's own checkpoint")
    drafted = llm.generate(PROMPTS, PARAMS)
    assert all(o.stats.drafted for o in drafted)
    rounds: list[Round] = []
    list(llm.stream("abc", PARAMS, rounds.append))
    assert max(len(r.drafted) for r in rounds) == block
    chat = llm.chat([{"role": "user", "content": "hi"}], PARAMS)
    for k in (1, 2):
        llm.set_drafter(kind, k)
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == [
            o.token_ids for o in drafted
        ]
    llm.set_drafter("none")
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == [o.token_ids for o in drafted]
    assert llm.chat([{"role": "user", "content": "hi"}], PARAMS).token_ids == chat.token_ids


def test_without_a_drafter_it_looks_the_prompt_up_and_says_so(places: dict[str, str]) -> None:
    llm = LLM(places["ngram"], dtype="fp32", device="cpu", max_context=128, max_users=1)
    assert llm.drafter_name == "ngram" and "no trained drafter" in llm.drafter_reason
    for name in ("mtp1", "dspark"):
        with pytest.raises(ConfigError, match=f"unknown drafter '{name}'"):
            llm.set_drafter(name)


def test_a_block_longer_than_the_stored_one_is_refused(places: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="0 to 5"):
        LLM(places["dspark"], num_draft_tokens=6, dtype="fp32", max_context=128, max_users=1)


@pytest.mark.parametrize("kind", ["mtp1", "dspark", "ngram"])
def test_on_the_command_line(
    places: dict[str, str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "hi", "--model", places[kind], "--max-tokens", "8", "--device", "cpu"]
    assert main([*argv, "--max-context", "128", "--threads", "1"]) == 0
    err = capsys.readouterr().err
    assert f"drafter {kind} (" in err.splitlines()[0]
