"""`dspark pretrain`, and `dspark train` with a DeepSeek-V4 for a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.cli.main import main
from tests.train.tiny_runs import toml
from tests.train.v4.test_drafter import raw as drafter_raw
from tests.train.v4.tiny_towers import raw


def test_a_tower_and_its_drafter_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = toml(tmp_path / "tower.toml", raw(tmp_path, epochs=1))
    assert main(["pretrain", str(file), "--plan"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("model: 3 layers, ") and "rows held out" in out and not err
    assert not (tmp_path / "run" / "state").exists()
    assert main(["pretrain", str(file)]) == 0
    out, err = capsys.readouterr()
    assert not out and "held out: loss" in err and "finished at step" in err
    model = tmp_path / "run" / "model"
    file = toml(tmp_path / "mtp1.toml", drafter_raw(model, tmp_path / "drafter", "mtp1", steps=3))
    file.write_text(file.read_text().replace("epochs = 2\n", ""))
    assert main(["train", str(file), "--plan"]) == 0
    assert "drafter: mtp1, 1 stage, " in capsys.readouterr().out
    assert main(["train", str(file)]) == 0
    assert "accepted length" in capsys.readouterr().err
    assert (tmp_path / "drafter" / "drafter" / "model.safetensors").is_file()


def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = toml(tmp_path / "tower.toml", raw(tmp_path))
    assert main(["pretrain", str(file), "model.streams=2"]) == 2
    assert "unknown key model.streams" in capsys.readouterr().err
    assert main(["pretrain", str(tmp_path / "none.toml")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["pretrain", str(file), 'text.files=["none.jsonl"]']) == 2
    assert "cannot read training text none.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
