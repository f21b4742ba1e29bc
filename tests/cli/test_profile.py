"""`dspark profile`: the table on standard output and in a file."""

from pathlib import Path

import pytest

from dspark.cli.main import main
from dspark.schedule.cost import CostTable, table_path
from tests.fake_llm import FakeLLM

Capture = pytest.CaptureFixture[str]


def test_the_table_is_printed_and_written(
    fake: type[FakeLLM], tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "cost.json"
    assert main(["profile", "x", "--drafter", "ngram", "--users", "3", "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert "     4:    14.000" in printed and "drafting 2 tokens" in printed
    assert str(out) in err
    assert CostTable.load(out, {"model": "fake-7M"}).max_tokens == 4
    assert fake.created[0].options["max_users"] == 3
    assert fake.created[0].options["verify"] == "all"  # loading measures nothing


def test_the_cache_is_where_later_runs_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["profile"]) == 0
    assert table_path({"model": "fake-7M"}).is_relative_to(tmp_path)
    assert table_path({"model": "fake-7M"}).is_file()
