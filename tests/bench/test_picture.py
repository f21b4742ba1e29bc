"""The picture of `dspark eval`: what is on it, and that nothing half-written stays behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dspark.bench import picture
from dspark.bench.evaluate import EvalConfig, Report, Result
from dspark.bench.prompts import PromptSet
from dspark.errors import ConfigError, ResourceError

SHARES = {"runs/one": ([80, 60, 30], [100, 80, 60]), "ngram": ([9], [30])}
"""Drafter -> accepted_at, tried_at."""


def result(drafter: str, temperature: float, prompts: str) -> Result:
    accepted, tried = SHARES.get(drafter, ([], []))
    return Result(
        drafter=drafter,
        temperature=temperature,
        prompts=prompts,
        texts=4,
        rounds=100,
        tokens=270,
        drafted_per_round=3.0,
        accepted_length=2.71 if accepted else None,
        standard_error=0.1,
        full_block_length=2.8,
        acceptance_rate=0.5,
        conditional=[a / t for a, t in zip(accepted, tried, strict=True)],
        cumulative=[a / 100 for a in accepted],
        verified_at=tried,
        tried_at=tried,
        accepted_at=accepted,
        texts_ended_in_draft=0,
    )


def report(
    drafters: tuple[str, ...] = tuple(SHARES),
    sets: tuple[str, ...] = ("builtin:chat", "mine/quiz.jsonl"),
    temperatures: tuple[float, ...] = (0.0, 1.0),
) -> Report:
    return Report(
        model="tiny-7M",
        dtype="fp32",
        device="cpu",
        config=EvalConfig(drafters, temperatures=temperatures, max_tokens=77),
        prompts=tuple(PromptSet(s, "0" * 64, ("x",) * (n + 1)) for n, s in enumerate(sets)),
        results=tuple(result(d, t, s) for d in drafters for t in temperatures for s in sets),
        means=(),
        agreements=(),
    )


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


def test_a_panel_for_each_set_and_temperature_a_line_for_each_drafter(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    file = tmp_path / "a.png"
    picture.draw(report(), file)
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000
    (figure,) = drawn
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        f"{name} · temperature {t} · {many}"
        for t in (0, 1)
        for name, many in (("chat", "1 prompt"), ("quiz", "2 prompts"))
    ]
    for axes in figure.axes:
        lines = [(list(x.get_xdata()), list(x.get_ydata())) for x in axes.get_lines()]
        assert lines == [([1, 2, 3], [0.8, 0.75, 0.5]), ([1], [0.3])]
        assert len({x.get_color() for x in axes.get_lines()}) == 2
        assert axes.get_xlabel() == "draft position"
        assert list(axes.get_xticks()) == [1, 2, 3]
        low, high = axes.get_ylim()
        assert low == 0 and 1 <= high < 1.1
        assert [t.get_text() for t in axes.texts] == ["accepted length", "2.71", "2.71"]
    assert figure.axes[0].get_ylabel() == "accepted / tried"
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["one", "ngram"]
    assert "tiny-7M, fp32" in figure.get_suptitle() and "at most 77" in figure.get_suptitle()


def test_svg_says_the_same_and_is_the_same_again(tmp_path: Path) -> None:
    files = [tmp_path / "a.svg", tmp_path / "b.SVG"]
    for file in files:
        picture.draw(report(), file)
    text = files[0].read_text(encoding="utf-8")
    assert text == files[1].read_text(encoding="utf-8")
    for part in ("<svg", "draft position", "chat · temperature 0", "tiny-7M"):
        assert part in text
    assert "<dc:date>" not in text


def test_many_sets_break_into_rows(tmp_path: Path, drawn: list[Figure]) -> None:
    sets = tuple(f"builtin:{n}" for n in "abcde")
    picture.draw(report(("ngram",), sets), tmp_path / "a.png")
    where = [axes.get_subplotspec() for axes in drawn[0].axes]
    cells = [(s.rowspan.start, s.colspan.start) for s in where if s is not None]
    one = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert cells == [*one, *((row + 2, column) for row, column in one)]


def test_nothing_drafted_is_said(tmp_path: Path, drawn: list[Figure]) -> None:
    picture.draw(report(("none",), ("builtin:chat",), (0.0,)), tmp_path / "a.png")
    texts = [t.get_text() for t in drawn[0].axes[0].texts]
    assert texts == ["accepted length", "-", "nothing was drafted"]


def test_long_names_keep_their_ends(tmp_path: Path, drawn: list[Figure]) -> None:
    picture.draw(report(("x" * 60 + "-v2",)), tmp_path / "a.png")
    (name,) = [t.get_text() for t in drawn[0].legends[0].get_texts()]
    assert name.startswith("…x") and name.endswith("-v2") and len(name) == 36


def test_programs_with_pyplot_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    for name in ("a.svg", "a.png"):
        picture.draw(report(), tmp_path / name)
    assert dict(mpl.rcParams) == before


# -- what cannot be written ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.png.txt"])
def test_other_formats_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a name ending in \.png or \.svg"):
        picture.check_picture(tmp_path / name)


def test_unwritable_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        picture.check_picture(tmp_path / "taken.png")
    with pytest.raises(ConfigError, match="its folder does not exist"):
        picture.check_picture(tmp_path / "no" / "a.png")
    picture.check_picture(tmp_path / "a.png")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match="may not be written to"):
        picture.check_picture(tmp_path / "a.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for check in (picture.check_picture, lambda file: picture.draw(report(), file)):
        with pytest.raises(ResourceError, match=r"pip install 'dspark\[bench\]'"):
            check(tmp_path / "a.png")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.png"
    file.write_text("old")

    def fail(self: Figure, name: Path, **options: Any) -> None:
        assert name.parent == tmp_path and name != file and name.suffix == ".png"
        name.write_text("half")
        raise error

    monkeypatch.setattr(Figure, "savefig", fail)
    expected = ConfigError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match=r"cannot write .*No space|^$"):
        picture.draw(report(), file)
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"] and file.read_text() == "old"


# -- small parts -----------------------------------------------------------------------------------


def test_wilson_interval() -> None:
    low, high = picture.wilson(50, 100)
    assert (low, high) == pytest.approx((0.40383, 0.59617), abs=1e-4)
    low, high = picture.wilson(0, 10)
    assert low == 0 and high == pytest.approx(0.27753, abs=1e-4)
    low, high = picture.wilson(10, 10)
    assert high == 1 and low == pytest.approx(0.72247, abs=1e-4)


def test_labels_are_short_while_they_are_unique() -> None:
    names = ["builtin:chat", "data/mine.jsonl", "runs/dspark", "ngram", "runs/slash/"]
    assert list(picture.labels(names).values()) == ["chat", "mine", "dspark", "ngram", "slash"]
    twins = ["a/dspark", "b/dspark", "ngram"]
    assert picture.labels(twins) == {n: n for n in twins}
