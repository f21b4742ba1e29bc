"""The reliability diagram: what is on it, and that equal numbers give an equal file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.bench import reliability
from dspark.bench.calibrate import Position, Report
from dspark.bench.calibrate_config import CalibrateConfig
from dspark.errors import ConfigError
from dspark.schedule.calibration import Bin, Calibration, Quality
from tests.bench.confident import prompt_set


def report(positions: int) -> Report:
    def quality(k: int, ece: float) -> Quality:
        return Quality(k, 300, 0.6, 0.5, ece, 0.8, 0.2)

    bins = tuple(Bin(b / 5, (b + 1) / 5, 60 * (b != 2), b / 5 + 0.1, b / 5) for b in range(5))
    made = [
        Position(1.5, quality(k, 0.071), quality(k, 0.012), bins, bins[::-1])
        for k in range(1, positions + 1)
    ]
    return Report(
        model="tiny-7M",
        dtype="int8",
        drafter="somewhere/drafter",
        config=CalibrateConfig(),
        prompts=prompt_set(10),
        fitted_prompts=6,
        records=1500,
        held_out_records=300,
        calibration=Calibration((1.5,) * positions),
        positions=tuple(made),
    )


@pytest.mark.parametrize("positions", [1, 5])
def test_a_panel_for_each_position(tmp_path: Path, positions: int) -> None:
    file = tmp_path / "a.svg"
    reliability.draw(report(positions), file)
    drawn = file.read_text()
    for text in (
        f"draft {positions} · ECE 7.1 → 1.2 % · T 1.50",
        "Reliability of drafter by draft position",
        "300 drafts of 4 prompts not used for fitting",
    ):
        assert text in drawn
    assert drawn.count("predicted survival") == min(positions, 4)
    other = tmp_path / "b.svg"
    reliability.draw(report(positions), other)
    assert other.read_text() == drawn
    assert {f.name for f in tmp_path.iterdir()} == {"a.svg", "b.svg"}


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        reliability.draw(report(1), tmp_path / "a.pdf")
