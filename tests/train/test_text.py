"""Writing training text: the same rows whatever the order, the batch, and however often stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from dspark import LLM, Output
from dspark.errors import ConfigError, ResourceError
from dspark.tokenizer import Tokenizer
from dspark.train import prompts as P
from dspark.train import text as T
from dspark.train.samples import encode, load_samples, messages_of, read_rows
from dspark.train.text_folder import META, PROMPTS, ROWS
from tests.tiny import oracle
from tests.train.test_prompts import CHATML, tokenizer

CONFIG = T.TextConfig(tokens=700, max_tokens=40, seed=5)
WHO = {"model": "fake"}
WORDS = ("sea", "sky", "sun", "rain", "wind", "snow", "stone", "tree", "bird", "fish")


class FakeWriter:
    """Says what hangs on the ask alone; finishes in an order of its own, `slots` at a time."""

    def __init__(self, slots: int = 4, order: int = 0, stop_after: int | None = None) -> None:
        self.slots, self.stop_after = slots, stop_after
        self._order = random.Random(order)
        self.asks: list[T.Ask] = []
        self.closed = 0
        self.refuses: set[str] = set()

    def fits(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> bool:
        return len(messages[-1]["content"]) < 400

    def completions(self, asks: Iterable[T.Ask]) -> T.Writing:
        waiting, flying = enumerate(asks), dict[int, T.Ask]()
        try:
            while True:
                while len(flying) < self.slots and (item := next(waiting, None)) is not None:
                    flying[item[0]] = item[1]
                    self.asks.append(item[1])
                if not flying:
                    return
                if self.stop_after is not None:
                    if self.stop_after == 0:
                        raise KeyboardInterrupt
                    self.stop_after -= 1
                number = self._order.choice(list(flying))
                yield number, self._write(*flying.pop(number))
        finally:
            self.closed += 1

    def _write(self, prompt: Any, params: Any) -> T.Written | None:
        if isinstance(prompt[0], Mapping) and prompt[-1]["content"] in self.refuses:
            return None
        key = f"{prompt}{params.temperature}{params.seed * (params.temperature > 0)}"
        rng = random.Random(hashlib.sha256(key.encode()).digest())
        n = rng.randint(1, params.max_tokens)
        reason = "length" if n == params.max_tokens or rng.random() < 0.2 else "stop"
        return T.Written("".join(" " + rng.choice(WORDS) for _ in range(1 + n // 9)), n, reason)

    @property
    def answered(self) -> list[str]:
        """The prompts of the answers that were asked for."""
        return [a[0][-1]["content"] for a in self.asks if isinstance(a[0][-1], Mapping)]


def write(out: Path, writer: FakeWriter | None = None, **options: Any) -> T.Summary:
    config = replace(CONFIG, **options)
    own = P.OwnPrompts(tokenizer(), config.seed)
    return T.write_text(writer or FakeWriter(), own, config, out, WHO)


def rows(out: Path) -> list[dict[str, Any]]:
    return list(read_rows([out / ROWS]))


def files(*prompts: str) -> P.FilePrompts:
    return P.FilePrompts(tuple({"prompt": p} for p in prompts), "abc", Counter())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text of CONFIG, written in one go."""
    out = tmp_path_factory.mktemp("whole")
    write(out)
    return out


# -- what is written -------------------------------------------------------------------------------


def test_rows_are_the_shortest_beginning_that_holds_the_tokens(whole: Path) -> None:
    found = rows(whole)
    counts = [r["tokens"] for r in found]
    assert sum(counts) >= CONFIG.tokens > sum(counts[:-1])
    assert [r["index"] for r in found] == list(range(len(found)))
    assert len({P.normalised(r["prompt"]) for r in found}) == len(found) > 20
    assert not any(P.flaw(r["prompt"]) for r in found)
    assert {r["temperature"] for r in found} == set(CONFIG.temperatures)
    assert {r["finish_reason"] for r in found} == {"stop", "length"}
    written = [json.loads(line) for line in (whole / PROMPTS).read_text().splitlines()]
    written.sort(key=lambda p: int(p["candidate"]))
    assert len({p["candidate"] for p in written}) == len(written) > len(found)
    ended = [p["prompt"].strip() for p in written if p["ended"]]
    assert len(ended) < len(written)  # some were cut off, and are not among the rows
    assert [p for p in ended if p in {r["prompt"] for r in found}] == [r["prompt"] for r in found]


def test_rows_are_training_samples(whole: Path) -> None:
    samples = load_samples([whole / ROWS], tokenizer(), 10_000)
    for row, sample in zip(rows(whole), samples, strict=True):
        end = "<|im_end|>" if row["finish_reason"] == "stop" else ""
        assert tokenizer().decode(sample.tokens, skip_special=False) == (
            f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n{row['answer']}{end}"
        )


def test_meta_says_what_is_there(whole: Path) -> None:
    meta = json.loads((whole / META).read_text())
    found = rows(whole)
    assert meta["complete"] is True and meta["tokens_asked"] == CONFIG.tokens
    assert (meta["rows"], meta["tokens"]) == (len(found), sum(r["tokens"] for r in found))
    assert meta["options"]["model"] == "fake" and meta["options"]["temperatures"] == [0, 0.7, 1]
    assert sorted(p.name for p in whole.iterdir()) == [META, PROMPTS, ROWS]


@pytest.mark.parametrize(("slots", "order"), [(1, 0), (3, 1), (4, 2), (64, 3)])
def test_neither_batch_nor_order_shows(whole: Path, tmp_path: Path, slots: int, order: int) -> None:
    writer = FakeWriter(slots, order)
    write(tmp_path, writer)
    assert (tmp_path / ROWS).read_bytes() == (whole / ROWS).read_bytes()
    assert len(writer.answered) == len(set(writer.answered))


def test_another_seed_is_another_text(whole: Path, tmp_path: Path) -> None:
    write(tmp_path, seed=6)
    ours, theirs = ({r["prompt"] for r in rows(p)} for p in (tmp_path, whole))
    assert len(ours & theirs) < 3


def test_little_is_begun_that_is_not_kept(tmp_path: Path) -> None:
    """A large batch for a small text must not write the batch."""
    writer = FakeWriter(slots=500)
    done = write(tmp_path, writer, tokens=200)
    assert len(writer.answered) <= done.rows + 8
    assert len(writer.asks) < 60


def test_progress_only_grows(tmp_path: Path) -> None:
    seen: list[T.Progress] = []
    own = P.OwnPrompts(tokenizer(), 5)
    done = T.write_text(FakeWriter(), own, CONFIG, tmp_path, WHO, seen.append)
    for name in ("rows", "tokens", "new_tokens", "prompts"):
        values = [getattr(p, name) for p in seen]
        assert values == sorted(values) and values[0] == 0 and values[-1] > 0
    assert done.new_tokens == seen[-1].new_tokens >= done.tokens >= CONFIG.tokens
    assert done.dropped.keys() >= {"cut off"} and done.tokens_per_second > 0


# -- stopped and continued -------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [[0], [1], [7, 2, 0, 30], [60], [70, 3], [5] * 12])
def test_a_stopped_run_goes_on_to_the_same_text(
    whole: Path, tmp_path: Path, stops: list[int]
) -> None:
    for n, after in enumerate(stops):
        before = set()
        if (tmp_path / ROWS).exists():
            before = {r["prompt"] for r in rows(tmp_path)}
        writer = FakeWriter(3 + n, order=n, stop_after=after)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, writer)
        assert writer.closed == 1
        assert not before & set(writer.answered)  # nothing is written twice
        meta = json.loads((tmp_path / META).read_text())
        assert not meta["complete"] and meta["rows"] == len(rows(tmp_path)) >= len(before)
    had = len(rows(tmp_path))
    writer = FakeWriter(6, order=99)
    write(tmp_path, writer)
    assert (tmp_path / ROWS).read_bytes() == (whole / ROWS).read_bytes()
    assert len(writer.answered) <= len(rows(whole)) - had + 16


def test_half_a_line_is_cut_off(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, FakeWriter(stop_after=50))
    had = len(rows(tmp_path))
    assert had > 2
    for name in (ROWS, PROMPTS):  # as a kill in the middle of a write leaves them
        raw = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(raw[: -len(raw.splitlines()[-1]) // 2])
    writer = FakeWriter(stop_after=0)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, writer)
    assert len(rows(tmp_path)) == had - 1
    write(tmp_path)
    assert (tmp_path / ROWS).read_bytes() == (whole / ROWS).read_bytes()


def test_the_tokens_may_be_raised_not_lowered(whole: Path, tmp_path: Path) -> None:
    write(tmp_path, tokens=150)
    short = (tmp_path / ROWS).read_bytes()
    assert write(tmp_path, FakeWriter(stop_after=0), tokens=150).new_tokens == 0
    assert (tmp_path / ROWS).read_bytes() == short
    write(tmp_path)
    long = (tmp_path / ROWS).read_bytes()
    assert long == (whole / ROWS).read_bytes() and long.startswith(short) and long != short
    with pytest.raises(ConfigError, match="begun for 700 tokens and is now asked for 699"):
        write(tmp_path, tokens=699)
    assert (tmp_path / ROWS).read_bytes() == long


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 41}, {"temperatures": (0.0, 0.7)}, {"seed": 6}, {"prompt_tokens": 9},
     {"prompt_temperature": 1.0}],
)  # fmt: skip
def test_other_options_are_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, tokens=100)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ConfigError) as e:
        write(tmp_path, **change)
    assert f"was begun with {next(iter(change))}=" in str(e.value) and "\n" not in str(e.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_another_model_and_other_prompts_are_refused(tmp_path: Path) -> None:
    write(tmp_path, tokens=100)
    own = P.OwnPrompts(tokenizer(), 5)
    with pytest.raises(ConfigError, match="begun with model=fake and is now asked for other"):
        T.write_text(FakeWriter(), own, CONFIG, tmp_path, {"model": "other"})
    with pytest.raises(ConfigError, match="begun with prompts=own and is now asked for files"):
        T.write_text(FakeWriter(), files("a b"), CONFIG, tmp_path, WHO)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot write to .*file: File exists"):
        write(tmp_path / "file")
    (tmp_path / ROWS).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds text.jsonl but no meta.json"):
        write(tmp_path)
    (tmp_path / ROWS).unlink()
    write(tmp_path, tokens=50)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another run is writing"):
        write(tmp_path)
    os.close(held)
    (tmp_path / ROWS).write_text('{"index": 0, "tokens": 9}\n{"index": 1}\n')
    with pytest.raises(ConfigError, match=r"text.jsonl:2 is damaged: it has no tokens"):
        write(tmp_path)
    (tmp_path / META).write_text("{")
    with pytest.raises(ConfigError, match=r"meta.json is damaged"):
        write(tmp_path)


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ResourceError, match=r"cannot write .*meta.json: No space left"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [{"tokens": 0}, {"max_tokens": 0}, {"prompt_tokens": 0}, {"temperatures": ()},
     {"temperatures": (-1.0,)}, {"temperatures": (float("nan"),)}, {"prompt_temperature": -0.1},
     {"seed": -1}],
)  # fmt: skip
def test_options_out_of_range(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))}=.* is out of range"):
        replace(CONFIG, **change)


# -- prompts from files ----------------------------------------------------------------------------


def test_prompts_from_files_in_their_order_until_they_run_out(tmp_path: Path) -> None:
    prompts = files("one?", "x" * 400, "no!", "two?", "three?")
    writer = FakeWriter()
    writer.refuses = {"no!"}
    done = T.write_text(writer, prompts, CONFIG, tmp_path, WHO)
    assert not done.complete and done.dropped == {"refused or too long": 2}
    assert [(r["index"], r["prompt"]) for r in rows(tmp_path)] == [
        (0, "one?"),
        (3, "two?"),
        (4, "three?"),
    ]
    assert json.loads((tmp_path / META).read_text())["complete"] is False
    few = T.write_text(FakeWriter(), files("a b", "c d"), replace(CONFIG, tokens=1), tmp_path / "2",
                       WHO)  # fmt: skip
    assert few.complete and few.rows == 1


def test_conversations_keep_their_form(tmp_path: Path) -> None:
    talk = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    given: tuple[P.Conversation, ...] = ({"system": "Be.", "prompt": "p"}, {"messages": talk})
    writer = FakeWriter()
    T.write_text(writer, P.FilePrompts(given, "", Counter()), CONFIG, tmp_path, WHO)
    system = [{"role": "system", "content": "Be."}, {"role": "user", "content": "p"}]
    assert [a[0] for a in writer.asks] == [system, talk]
    assert [messages_of(r) for r in rows(tmp_path)] == [system, talk]


# -- the engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the tokenizer of these tests, as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("model")
    model = oracle("llama", vocab_size=259, eos_token_id=257)
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    save_file(dict(model.state_dict()), path / "model.safetensors")
    tokenizer()._backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def engine(
    directory: Path, max_users: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[LLM, list[Output]]:
    """An engine in exact arithmetic, and what it finishes."""
    llm = LLM(str(directory), dtype="int8", drafter="none", max_users=max_users, max_context=256)
    outputs: list[Output] = []
    real = llm.completions

    def noted(requests: Any) -> Any:
        for number, output in real(requests):
            outputs.append(output)
            yield number, output

    monkeypatch.setattr(llm, "completions", noted)
    return llm, outputs


def test_a_sample_begins_with_the_prompt_the_engine_ran_on(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, outputs = engine(directory, 4, monkeypatch)
    prompts = files(*(f"Where is number {n}?" for n in range(8)))
    config = replace(CONFIG, tokens=10_000, max_tokens=24)
    T.write_text(T.EngineWriter(llm), prompts, config, tmp_path, WHO)
    found = rows(tmp_path)
    assert len(found) == len(outputs) == 8
    for row in found:
        sample = encode(row, Tokenizer.from_directory(directory), 10_000)
        assert sample is not None
        prompt = sample.tokens[: sample.start]
        assert prompt == llm.encode_prompt(messages_of(row))
        (output,) = [o for o in outputs if o.prompt_ids == prompt]
        assert (row["tokens"], row["finish_reason"]) == (
            len(output.token_ids),
            output.finish_reason,
        )
        said = llm.tokenizer.decode(output.token_ids)
        assert row["answer"] == (
            said.rstrip("\ufffd") if row["finish_reason"] == "length" else said
        )
    assert {r["finish_reason"] for r in found} == {"stop", "length"}
    greedy = next(r for r in found if r["temperature"] == 0)
    again = llm.chat(messages_of(greedy), T.SamplingParams(max_tokens=24))
    assert again.text.rstrip("\ufffd") == greedy["answer"].rstrip("\ufffd") != ""


def test_the_engine_writes_the_same_in_any_batch_and_after_a_stop(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of its own, too; a random model's are bytes, so any that ends is taken."""
    monkeypatch.setattr(P, "flaw", lambda text: None if text.strip() else "empty")
    config = replace(CONFIG, tokens=200, max_tokens=16, prompt_tokens=64)

    def run(name: str, max_users: int, stop_after: int | None = None) -> Path:
        llm, _ = engine(directory, max_users, monkeypatch)

        def count(progress: T.Progress) -> None:
            if progress.rows == stop_after:
                raise KeyboardInterrupt

        own = P.OwnPrompts(llm.tokenizer, config.seed)
        T.write_text(T.EngineWriter(llm), own, config, tmp_path / name, WHO, count)
        assert not llm._engine.has_work
        return tmp_path / name / ROWS

    one, many = run("one", 1), run("many", 8)
    assert one.read_bytes() == many.read_bytes()
    assert len(rows(tmp_path / "one")) > 10
    with pytest.raises(KeyboardInterrupt):
        run("stopped", 4, stop_after=6)
    assert 0 < len(rows(tmp_path / "stopped")) < len(rows(tmp_path / "one"))
    assert run("stopped", 3).read_bytes() == one.read_bytes()


def test_what_does_not_fit_the_context_is_left_out(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, outputs = engine(directory, 2, monkeypatch)
    room = 256 - 40 - len(llm.encode_prompt(""))
    done = T.write_text(
        T.EngineWriter(llm), files("a" * room, "b" * (room + 1)), CONFIG, tmp_path, WHO
    )
    assert [r["index"] for r in rows(tmp_path)] == [0] and len(outputs) == 1
    assert done.dropped == {"refused or too long": 1}
