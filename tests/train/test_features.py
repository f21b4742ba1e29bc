"""The feature cache holds what the target says, goes on after a stop, and refuses strangers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import CheckpointError, ConfigError, ResourceError
from dspark.models.decoder import Decoder
from dspark.train import features
from dspark.train.features import (
    FILES,
    FeatureCache,
    Features,
    LiveFeatures,
    build_cache,
    hash_of,
    passes,
    plan,
    read_meta,
)  # fmt: skip
from dspark.train.samples import Sample
from tests.tiny import source, target
from tests.train.tiny_runs import samples

LAYERS = (0, 1, 2)
TEXT = samples(7)


class StopError(Exception):
    pass


@pytest.fixture(scope="module")
def model() -> Decoder:
    return target()


def build(directory: Path, model: Decoder, text: list[Sample] = TEXT, **more: Any) -> None:
    values = {"layers": LAYERS, "pass_tokens": 60, "target_name": "tiny fp32", **more}
    build_cache(model, values.pop("target_name"), text, directory, values.pop("layers"), 64,
                **values)  # fmt: skip


def digest(directory: Path) -> dict[str, str]:
    return {n: hashlib.sha256((directory / n).read_bytes()).hexdigest() for n in FILES}


def stop_after(passes: int) -> Callable[[int, int], None]:
    seen = []

    def on_progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == passes:
            raise StopError

    return on_progress


def test_cache_and_live_are_the_same(tmp_path: Path, model: Decoder) -> None:
    build(tmp_path, model)
    cache, live = FeatureCache(tmp_path), LiveFeatures(model, TEXT, LAYERS)
    assert len(cache) == len(live) == len(TEXT)
    for i, s in enumerate(TEXT):
        a, b = cache[i], live[i]
        assert tuple(a.tokens.tolist()) == s.tokens == tuple(b.tokens.tolist())
        assert a.start == b.start == s.start
        torch.testing.assert_close(a.hidden.float(), b.hidden, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(a.log_z, b.log_z, atol=1e-4, rtol=1e-5)


def test_log_z_is_exact_where_the_answer_is_and_zero_before(model: Decoder) -> None:
    """p from the final layer and log Z sums to one over the whole vocabulary."""
    from dspark.train.step import Teacher
    from tests.tiny import oracle

    teacher = Teacher.of(*source(oracle("llama")), None)
    f: Features = LiveFeatures(model, TEXT, LAYERS)[2]
    p = teacher.probabilities(f.hidden[f.start - 1 :, -64:], f.log_z[f.start - 1 :])
    torch.testing.assert_close(p.sum(-1), torch.ones(len(p)), atol=1e-4, rtol=0)
    assert not f.log_z[: f.start - 1].any()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_it_goes_on_where_it_stopped(tmp_path: Path, model: Decoder, after: int) -> None:
    build(tmp_path / "whole", model)
    stopped = tmp_path / "stopped"
    with pytest.raises(StopError):
        build(stopped, model, on_progress=stop_after(after))
    meta = read_meta(stopped)
    assert 0 < meta.complete < len(TEXT)
    with pytest.raises(CheckpointError, match=f"incomplete: {meta.complete} of 7"):
        FeatureCache(stopped)
    for name in FILES:  # a pass that was cut in the middle of a write
        with (stopped / name).open("ab") as file:
            file.write(b"half a row")
    progress: list[int] = []
    build(stopped, model, on_progress=lambda done, total: progress.append(done))
    assert progress[0] > meta.rows and progress[-1] == sum(len(s.tokens) for s in TEXT)
    # Passes fall elsewhere, which may round otherwise: whole numbers are equal, the others near.
    again, whole = FeatureCache(stopped), FeatureCache(tmp_path / "whole")
    for name in ("tokens.i32", "starts.i32", "ends.i64"):
        assert digest(stopped)[name] == digest(tmp_path / "whole")[name]
    for i in range(len(TEXT)):
        torch.testing.assert_close(again[i].hidden, whole[i].hidden, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(again[i].log_z, whole[i].log_z, atol=1e-4, rtol=1e-5)


def test_text_that_grew_keeps_what_was_computed(tmp_path: Path, model: Decoder) -> None:
    build(tmp_path / "grown", model, text=TEXT[:2])
    rows: list[int] = []
    build(tmp_path / "grown", model, on_progress=lambda done, _: rows.append(done))
    assert rows[0] > sum(len(s.tokens) for s in TEXT[:2])
    build(tmp_path / "whole", model)
    assert digest(tmp_path / "grown") == digest(tmp_path / "whole")


def test_a_complete_cache_is_left_alone(tmp_path: Path, model: Decoder) -> None:
    build(tmp_path, model)
    before = digest(tmp_path)
    build(tmp_path, model, on_progress=stop_after(1))
    assert digest(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": TEXT[:-1]}, "another text"),
        ({"text": [replace(TEXT[0], start=TEXT[0].start + 1), *TEXT[1:]]}, "another text"),
        ({"layers": (1, 2)}, r"another layers: \(0, 1, 2\), this run has \(1, 2\)"),
        ({"target_name": "tiny int8"}, "another target: tiny fp32, this run has tiny int8"),
    ],
)
def test_a_cache_of_something_else_is_refused(
    tmp_path: Path, model: Decoder, change: dict[str, Any], words: str
) -> None:
    build(tmp_path, model)
    before = digest(tmp_path)
    with pytest.raises(ConfigError, match=words):
        build(tmp_path, model, **change)
    assert digest(tmp_path) == before


@pytest.mark.parametrize("name", [*FILES, "meta.json"])
def test_damage_is_named(tmp_path: Path, model: Decoder, name: str) -> None:
    build(tmp_path, model)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-5])
    words = f"{name} is damaged" if name in FILES else "not a feature cache"
    for read in (lambda: FeatureCache(tmp_path), lambda: build(tmp_path, model)):
        with pytest.raises(CheckpointError, match=words):
            read()
    path.unlink()
    with pytest.raises(CheckpointError):
        FeatureCache(tmp_path)


def test_what_does_not_fit_into_fp16_is_refused(tmp_path: Path, model: Decoder) -> None:
    class Loud:
        num_slots, device = model.num_slots, model.device

        def forward(self, *arguments: Any) -> Any:
            out = model.forward(*arguments)
            assert out.features is not None
            return replace(out, features=out.features * 1e6)

    with pytest.raises(CheckpointError, match=r"sequence 0: .* not finite in fp16"):
        build(tmp_path, Loud())  # type: ignore[arg-type]
    assert read_meta(tmp_path).complete == 0


def test_a_full_disk_is_told_before_it_is_full(
    tmp_path: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize = 10, 1024

    monkeypatch.setattr(features.os, "statvfs", lambda _: Full())
    with pytest.raises(ResourceError, match=r"needs .* GiB more at"):
        build(tmp_path, model)


def test_the_plan_is_what_is_written(tmp_path: Path, model: Decoder) -> None:
    build(tmp_path, model)
    wanted = plan(TEXT, "tiny fp32", LAYERS, 64).num_bytes
    assert wanted == sum((tmp_path / n).stat().st_size for n in FILES)


def test_passes_and_hash() -> None:
    class Slots:
        num_slots = 3

    groups = passes(TEXT, Slots(), 70)  # type: ignore[arg-type]
    assert [s for g in groups for s in g] == TEXT and len(groups) > 2
    assert all(len(g) <= 3 for g in groups)
    assert all(len(g) == 1 or sum(len(s.tokens) for s in g) <= 70 for g in groups)
    assert hash_of(TEXT) != hash_of(TEXT[::-1]) and len(hash_of(TEXT)) == 16
