"""An `LLM` whose true confidences are known, and a drafter that says them too surely.

Target and drafter are Markov chains. A draft behind token t is accepted with probability
sum min(p_t, q_t), whatever it is, so that is what an honest head would say; `Boaster` multiplies
its logit by `SURE`, one factor a position. A right calibration has about these temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.bench.prompts import PromptSet
from dspark.drafters.base import DraftContext, Drafter
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.errors import ConfigError
from dspark.llm import LLM
from dspark.schedule.scheduler import Scheduler
from dspark.types import Draft
from tests.engine.oracle import ByteTokenizer, SampledDrafter, TableTarget

V = 24
SURE = (3.0, 4.0, 3.0)


def logits(seed: int, spread: float) -> torch.Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * spread


TARGET = logits(0, 1.5)
DRAFTED = torch.softmax(TARGET + logits(1, 1.0) * torch.linspace(0, 3, V)[:, None], 1)
HONEST = torch.minimum(torch.softmax(TARGET, 1), DRAFTED).sum(1).clamp(1e-6, 1 - 1e-6)
"""[V] behind which token a draft is accepted how often."""


class Boaster(SampledDrafter):
    def __init__(self) -> None:
        super().__init__(DRAFTED, len(SURE))

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [
            Draft(d.tokens, d.probs, self._says([c.tokens[-1], *d.tokens[:-1]]) if d else None)
            for c, d in zip(contexts, super().propose(contexts), strict=True)
        ]

    def _says(self, before: list[int]) -> torch.Tensor:
        return torch.sigmoid(torch.logit(HONEST[before]) * torch.tensor(SURE[: len(before)]))


class ConfidentLLM(LLM):
    """`boaster` (also as a folder), `mute` without confidences, `sizing`, and `none`."""

    def __init__(self, *_: Any, **options: Any) -> None:
        self.options = options
        self.target = TableTarget(TARGET, max_context=160)  # type: ignore[assignment]
        self.tokenizer = ByteTokenizer()  # type: ignore[assignment]
        self.model_name, self.dtype, self.device, self._count = "chain", "fp32", "cpu", 0
        self.dtype_reason, self.threads, self.asked = "", 1, {}
        self.draft_device = None
        self.set_drafter("none")

    def set_drafter(self, name: str, num_draft_tokens: int | None = None, **asked: Any) -> None:
        folder = Path(name)
        makers: dict[str, Any] = {
            "boaster": Boaster,
            "mute": lambda: SampledDrafter(DRAFTED, 3),
            "sizing": Boaster,
            "none": lambda: NoDrafter(self.target),
        }
        if folder.name not in makers:
            raise ConfigError(f"unknown drafter {name!r}")
        drafter: Drafter = makers[folder.name]()
        drafter.sizes_drafts = folder.name == "sizing"
        self.drafter_name, self.drafter_reason, self.asked = name, "as asked", asked
        self.verify, self.verify_reason = asked.get("verify", "auto"), ""
        self.pipeline, self.pipeline_reason = "off", ""
        self._engine = Engine(self.target, drafter, self.tokenizer, scheduler=Scheduler("all"))

    def _renew_engine(self, always: bool = False) -> None:
        """There is one lane."""

    @property
    def drafter_folder(self) -> Path | None:
        return Path(self.drafter_name) if Path(self.drafter_name).is_dir() else None

    def encode_prompt(self, prompt: Any, raw: bool = False) -> tuple[int, ...]:
        return tuple(ord(c) % V for c in prompt)


def prompt_set(count: int) -> PromptSet:
    return PromptSet("set", "0" * 64, tuple(chr(97 + i % 26) * (1 + i // 26) for i in range(count)))
