"""Cost tables: what measurements become, what is refused, what the disk may do."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.errors import CheckpointError, ConfigError
from dspark.schedule.cost import CostTable, Curve, isotonic, table_path, token_probes

PRINT = {"model": "m", "dtype": "int8", "threads": 2}
Passes = list[tuple[int, float, float]]


def simple(fingerprint: dict[str, Any] | None = None) -> CostTable:
    """10 ms and 2 a token; context adds 1 % a token and 1000; drafts 3 + R/2, other 0.5."""
    verify = [(t, c, (10 + 2 * t) + 0.02 * t * c / 10) for t in range(1, 9) for c in (100, 600)]
    draft = [(r, 4, 3 + 0.5 * r) for r in (1, 2, 4)]
    return CostTable.fit(fingerprint or PRINT, verify, draft, [(1, 0.5), (4, 0.5)])


# -- curves --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(1, 3)), min_size=1, max_size=5))
def test_isotonic_is_the_closest_rising_sequence(pairs: list[tuple[int, int]]) -> None:
    """Against all rising sequences over the block means that a solution can consist of."""
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]

    def distance(fit: list[float] | tuple[float, ...]) -> float:
        return sum(w * (v - f) ** 2 for v, w, f in zip(values, weights, fit, strict=True))

    found = isotonic(values, weights)
    n = len(values)
    assert all(a <= b for a, b in itertools.pairwise(found))
    best = math.inf
    for cuts in itertools.product((False, True), repeat=n - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        fit: list[float] = []
        for a, b in itertools.pairwise(edges):
            mean = sum(v * w for v, w in pairs[a:b]) / sum(weights[a:b])
            fit += [mean] * (b - a)
        if all(x <= y for x, y in itertools.pairwise(fit)):
            best = min(best, distance(fit))
    assert distance(found) == pytest.approx(best, abs=1e-9)


def test_steps_stay_steps_and_hiccups_vanish() -> None:
    stairs = {t: 10.0 if t <= 4 else 16.0 for t in range(1, 9)}
    samples = {t: [ms, ms + 0.1, ms - 0.1, 500.0, ms] for t, ms in stairs.items()}
    curve = Curve.fit(samples)
    assert [curve(t) for t in range(1, 9)] == [10.0] * 4 + [16.0] * 4


def test_between_and_beyond_probes() -> None:
    curve = Curve((2, 4, 8), (10.0, 12.0, 20.0))
    assert (curve(0), curve(1), curve(2)) == (10.0, 10.0, 10.0)
    assert curve(3) == 11.0 and curve(6) == 16.0
    assert curve(10) == 24.0  # the upper half rises by 2 a token
    assert Curve((3,), (5.0,))(100) == 5.0


@pytest.mark.parametrize(
    ("at", "ms"),
    [((), ()), ((1, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)), ((1,), (math.nan,)), ((1, 2), (1.0,))],
)
def test_what_is_no_curve(at: tuple[int, ...], ms: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="no cost curve"):
        Curve(at, ms)


def test_probes_hold_both_sides_of_steps() -> None:
    probes = token_probes(200)
    assert probes[:16] == tuple(range(1, 17)) and probes[-1] == 200
    assert {24, 25, 64, 65, 128, 129} <= set(probes) and len(probes) < 50
    assert token_probes(5) == (1, 2, 3, 4, 5)


# -- the table -----------------------------------------------------------------------------------


def test_lookups_give_back_what_was_measured() -> None:
    table = simple()
    for t, c in itertools.product(range(1, 9), (100, 300, 600, 1000)):
        assert table.verify_ms(t, c) == pytest.approx(10 + 2 * t + 0.002 * t * c)
    assert table.verify_ms(3, 0) == table.verify_ms(3, 100)
    assert table.draft_ms(2, 4) == 4.0 and table.draft_ms(3, 4) == 4.5
    assert table.draft_ms(2, 0) == 0 and table.draft_ms(2, 8) == 8.0 and table.draft_ms(2, 1) == 4.0
    assert table.round_ms(5, requests=2, context=100, block=4) == pytest.approx(21 + 4 + 0.5)
    assert table.sps(5, requests=2, context=100, block=4) == pytest.approx(1e3 / 25.5)


def test_the_curve_is_the_lookups_in_one() -> None:
    table = simple()
    for first, last, context in ((1, 8, 0.0), (3, 14, 450.0), (10, 12, 100.0)):
        one = [
            table.round_ms(t, requests=3, context=context, block=4) for t in range(first, last + 1)
        ]
        again = table.curve(first, last, requests=3, context=context, block=4)
        assert again == pytest.approx(one)
        assert table.curve(first, last, requests=3, context=context, block=4) is again


def test_longer_blocks_are_no_cheaper() -> None:
    draft = [(1, 2, 5.0), (4, 2, 6.0), (1, 6, 4.0), (4, 6, 9.0)]
    table = CostTable.fit(PRINT, [(1, 0, 1.0), (2, 0, 2.0)], draft)
    assert table.draft_ms(1, 6) == table.draft_ms(1, 4) == 5.0
    assert table.draft_ms(4, 4) == 7.5


def test_scaling_a_part() -> None:
    slow = simple().scaled(verify=2, draft=3)
    assert slow.verify_ms(4, 600) == pytest.approx(2 * simple().verify_ms(4, 600))
    assert slow.draft_ms(2, 4) == 12 and slow.other_ms(1) == 0.5


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from([0.0, 100.0, 500.0]), st.floats(1, 50)),
        min_size=1,
        max_size=30,
    )
)
def test_any_table_is_monotone(passes: Passes) -> None:
    full = passes + [(t, 0.0, 20.0) for t, _, _ in passes] + [(1, 0.0, 1.0), (13, 0.0, 90.0)]
    table = CostTable.fit(PRINT, full)
    for c in (0, 250, 2000):
        times = [table.verify_ms(t, c) for t in range(1, 20)]
        assert all(a <= b + 1e-9 for a, b in itertools.pairwise(times))
    for t in (1, 7, 19):
        assert table.verify_ms(t, 0) <= table.verify_ms(t, 300) <= table.verify_ms(t, 900)


@pytest.mark.parametrize(
    ("verify", "words"),
    [
        ([(t, 0, 10 + 0.01 * t) for t in range(1, 9)], "flat"),
        ([(4, 0, 10.0)], "flat"),
        ([], "no verification pass"),
        ([(1, 0, 1.0), (2, 50, 9.0)], "were not measured at a context of 0"),
    ],
)
def test_measurements_that_are_no_table(verify: Passes, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as e:
        CostTable.fit(PRINT, verify)
    assert "\n" not in str(e.value)


# -- the file ------------------------------------------------------------------------------------


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    simple().save(tmp_path / "deep" / "t.json")
    again = CostTable.load(tmp_path / "deep" / "t.json", dict(reversed(PRINT.items())))
    assert again == simple()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["t.json"]


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 1},
        {"kind": "other"},
        {"verify": {"at": [1, 2], "ms": [3.0]}},
        {"verify": {"at": [1, 2], "ms": [3.0, math.nan]}},
        {"verify": {"at": [1.5, 2], "ms": [3.0, 4.0]}},
        {"slope": None},
        {"context": "far"},
        {"draft": [{"at": [1], "ms": [1.0]}]},
    ],
)
def test_damaged_tables_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    simple().save(path)
    edited(path, **changes)
    with pytest.raises(CheckpointError, match="delete it") as e:
        CostTable.load(path, PRINT)
    assert "\n" not in str(e.value)


def test_half_a_file_no_file_and_no_object(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(CheckpointError, match="cannot read"):
        CostTable.load(path, PRINT)
    simple().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        CostTable.load(path, PRINT)
    path.write_text("[1]")
    with pytest.raises(CheckpointError, match="not an object"):
        CostTable.load(path, PRINT)


def test_foreign_and_flat_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    simple().save(path)
    with pytest.raises(ConfigError, match="dtype 'int8' not 'bf16'"):
        CostTable.load(path, PRINT | {"dtype": "bf16"})
    with pytest.raises(ConfigError, match="drafter None not 'ngram'"):
        CostTable.load(path, PRINT | {"drafter": "ngram"})
    edited(path, verify={"at": [1, 2], "ms": [3.0, 3.0]})
    with pytest.raises(ConfigError, match="flat"):
        CostTable.load(path, PRINT)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "t.json"
    simple().save(path)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CheckpointError, match="No space left"):
        simple().scaled(verify=2).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_tables_of_different_machines_have_different_names(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a, b = table_path(PRINT), table_path(PRINT | {"threads": 4})
    assert a != b and a.parent == tmp_path / "dspark"
    assert table_path(dict(reversed(PRINT.items()))) == a
