"""The pictures of `dspark bench load`: which curves and points are on them, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dspark.bench import load_picture
from dspark.bench.load import LoadConfig, Setup
from dspark.errors import ConfigError
from tests.bench.test_load import SETUPS, SPEEDS, known, report_of, run


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def points(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The curves of a panel by name."""
    return {
        str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.get_lines()
    }


def test_curves_and_their_points(tmp_path: Path, drawn: list[Figure]) -> None:
    files = load_picture.draw(known(SPEEDS), tmp_path)
    assert [f.name for f in files] == ["speed.png", "budget.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000
    assert {p.name for p in tmp_path.iterdir()} == {"speed.png", "budget.png"}
    speed, budget = drawn
    (axes,) = speed.axes
    assert list(points(axes)) == [s.name for s in SETUPS]
    assert points(axes)["d auto"] == [(143, 143), (52.5, 420)]
    assert [t.get_text() for t in axes.texts] == ["1 user", "8 users"]
    left, right = budget.axes
    assert points(left)["plain"] == [(1, 100), (8, 400)]
    assert points(right)["d auto"] == [(1, 1.5), (8, 1.5)]
    assert list(left.get_xticks()) == [1, 8]
    for figure in drawn:
        assert "small, fp32, cpu, 1 thread" in figure.get_suptitle()
        (legend,) = figure.legends
        assert [t.get_text() for t in legend.get_texts()] == [s.name for s in SETUPS]


def test_looks_tell_configurations_apart(tmp_path: Path, drawn: list[Figure]) -> None:
    setups = (
        SETUPS[0],
        Setup("mtp1", "mtp1", "mtp1", 1, "all"),
        *(Setup(f"{d} K={k}", "fixed", d, k, "all") for d in "de" for k in range(1, 8)),
        *(Setup(f"{d} {m}", "scheduled", d, None, m) for d in "de" for m in ("auto", "causal")),
    )
    made = [run(s.name, n, 0, 90.0 + n) for s in setups for n in (1, 2)]
    load_picture.draw(report_of(setups, made, LoadConfig(users=(1, 2), repeats=1)), tmp_path)
    lines = drawn[0].axes[0].get_lines()
    assert len({line.get_color() for line in lines}) == len(setups)
    wide = {str(line.get_label()) for line in lines if line.get_linewidth() > 2}
    assert wide == {s.name for s in setups if s.kind == "scheduled"}


def test_loads_without_a_figure_are_left_out(tmp_path: Path, drawn: list[Figure]) -> None:
    load_picture.draw(known({"plain": [[100.0]]}, seconds=0.0, speeds=()), tmp_path)
    assert points(drawn[0].axes[0]) == {s.name: [] for s in SETUPS}
    assert len(drawn[0].axes[0].texts) == 0
    assert points(drawn[1].axes[1])["plain"] == [(1, 1.5)]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its folder does not exist"):
        load_picture.draw(known(SPEEDS), tmp_path / "no")
