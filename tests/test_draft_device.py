"""`LLM` and the command line with a drafter in a thread of this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark import LLM, SamplingParams
from dspark.cli.main import main
from dspark.engine.lane_thread import ThreadLane
from dspark.engine.pipeline import PipelinedEngine
from dspark.errors import ConfigError
from tests.models.official_v4 import TINY_DSPARK
from tests.models.test_deepseek_v4_loading import directory
from tests.test_pipeline_llm import GREEDY, OPTIONS, PROMPTS, SIZES


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory(tmp_path_factory.mktemp("dspark"), TINY_DSPARK, drafter=True, **SIZES)


def test_a_thread_changes_no_text(place: Path) -> None:
    llm = LLM(str(place), pipeline="on", draft_device="cpu", **OPTIONS)
    engine = llm.engine
    assert isinstance(engine, PipelinedEngine) and isinstance(engine.lane, ThreadLane)
    assert llm.draft_device is None, "it is the target's own"
    seeded = [SamplingParams(temperature=1.0, seed=i, max_tokens=16) for i in range(4)]
    alone = [llm.generate([p], GREEDY)[0].token_ids for p in PROMPTS]
    company = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    drawn = [o.token_ids for o in llm.generate(PROMPTS, seeded)]
    assert not llm.messages
    llm.set_drafter(llm.drafter_name, pipeline="off")
    assert not isinstance(llm.engine, PipelinedEngine)
    plain = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert alone == company == plain
    assert drawn == [o.token_ids for o in llm.generate(PROMPTS, seeded)]
    llm.close()


@pytest.mark.parametrize(
    ("device", "message"),
    [("toaster", "unknown draft device 'toaster'"), ("cuda:99", "PyTorch sees cpu")],
)
def test_devices_are_refused_before_anything_is_loaded(
    device: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("/no/such/model", draft_device=device)
    assert main(["generate", "hi", "-m", "/no/such/model", "--draft-device", device]) == 2
    assert message in capsys.readouterr().err
