"""An `LLM` over a tiny target whose drafter is right whenever a test wants it, and a clock that
only steps move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from dspark.bench.closed_loop import Text
from dspark.bench.prompts import PromptSet
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.errors import ConfigError
from dspark.llm import LLM
from dspark.schedule.scheduler import Scheduler
from tests import tiny
from tests.engine.oracle import ByteTokenizer, OracleDrafter, reference

PROMPTS = ("first", "second one")
LONGEST = 16
BLOCK = 3
TICK = 0.01


class LoadLLM(LLM):
    """Drafters: `none`, `best` (right throughout, blocks of 3) and `mtp1`, if it has one."""

    def __init__(self, *, slots: int = 4, mtp: bool = True) -> None:
        self.target = tiny.target(num_slots=slots)
        self.tokenizer = ByteTokenizer()  # type: ignore[assignment]
        self.model_name, self.dtype, self.device, self.threads = "small", "fp32", "cpu", 1
        self._count, self._mtp, self._schedulers = 0, mtp, {}
        self.believed = {tuple(p.encode()): reference(self.target, p.encode(), LONGEST)
                         for p in PROMPTS}  # fmt: skip
        self.calls: list[tuple[str, int | None, str | None]] = []

    def set_drafter(
        self, name: str, num_draft_tokens: int | None = None, *, verify: str | None = None, **_: Any
    ) -> None:
        name = "best" if name == "auto" else name
        known = ["none", "best", *["mtp1"] * self._mtp]
        block = num_draft_tokens or BLOCK
        if name not in known or block > BLOCK:
            raise ConfigError(f"no drafter {name!r} with blocks of {block}")
        self.calls.append((name, num_draft_tokens, verify))
        self.drafter_name, self.verify, self.verify_reason = name, verify or "auto", "as it is"
        drafter = NoDrafter(self.target) if name == "none" else OracleDrafter(self.believed, block)
        scheduler = Scheduler(self.verify)
        self._engine = Engine(self.target, drafter, self.tokenizer, scheduler=scheduler)

    def _renew_engine(self, always: bool = False) -> None:
        """There is one lane."""

    def encode_prompt(self, prompt: Any, raw: bool = False) -> tuple[int, ...]:
        return tuple(prompt.encode())

    @property
    def texts(self) -> tuple[Text, ...]:
        return tuple(Text(prompt, tuple(plain)) for prompt, plain in self.believed.items())


def prompt_set() -> PromptSet:
    return PromptSet("two", "0" * 64, PROMPTS)


class Ticks:
    """Every look at this clock finds it 10 ms later: the loop looks once a step."""

    def __init__(self) -> None:
        self._at: Iterator[int] = count()

    def __call__(self) -> float:
        return next(self._at) * TICK
