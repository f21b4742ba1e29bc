"""`dspark export`: where it writes, what it says, how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.cli.main import main
from dspark.drafters import trained
from dspark.drafters.checkpoint import load
from tests.drafters.test_checkpoint import written

Capture = pytest.CaptureFixture[str]


def test_a_copy_in_each_layout(tmp_path: Path, capsys: Capture) -> None:
    written(tmp_path / "a", "vanilla", draft_vocab_size=100)
    assert main(["export", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'b'}\n"
    assert said.err.startswith("note: draft_vocab_size=100 is dropped")
    arguments = ["export", str(tmp_path / "a"), "--out", str(tmp_path / "c")]
    assert main([*arguments, "--layout", "speculators"]) == 0
    assert load(tmp_path / "b").draft_ids is None
    assert load(tmp_path / "c").draft_ids is not None
    assert main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert load(tmp_path / "c").draft_ids is None


def test_a_shipped_drafter_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a")
    monkeypatch.setattr(trained, "shipped", lambda model: {"mine": tmp_path / "a"} if model else {})
    assert main(["export", "mine", "--out", str(tmp_path / "b")]) == 0
    load(tmp_path / "b")


def test_bad_calls_say_why_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    written(tmp_path / "a", "everything")
    for arguments, message in (
        ([str(tmp_path / "a")], "no word for inject, conv, layer_fusion"),
        ([str(tmp_path / "nowhere")], "holds no drafter"),
        ([str(tmp_path / "a"), "--layout", "gguf"], "gguf"),
        ([str(tmp_path / "a"), "--with-embeddings", "no-such-model"], "no word for"),
    ):
        assert main(["export", *arguments, "--out", str(tmp_path / "b")]) == 2
        said = capsys.readouterr()
        assert message in said.err and not said.out and "Traceback" not in said.err
        assert not (tmp_path / "b").exists()
