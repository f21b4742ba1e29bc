"""What `dspark calibrate` is told, apart from the work: importing this costs no numpy.

The work is in `dspark.bench.calibrate`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from dspark.errors import ConfigError
from dspark.types import SamplingParams


@dataclass(frozen=True)
class CalibrateConfig:
    """How to collect records, and how to divide them."""

    drafter: str = "auto"
    temperature: float = 1.0
    """Heads are trained on the chance of acceptance at temperature 1."""
    max_tokens: int = 256
    """Of each text."""
    repeat: int = 1
    """Texts of each prompt when sampling. A greedy text is written once: it would be the same."""
    held_out: float = 0.5
    """Share of the prompts that are kept out of the fit, to judge it."""
    seed: int = 0
    """Of the first text (the next one draws with seed + 1) and of the division of the prompts."""

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ConfigError(f"repeat={self.repeat} is out of range: expected 1 or more")
        if not 0 < self.held_out < 1:
            raise ConfigError(
                f"held_out={self.held_out} is out of range: expected a share between 0 and 1, both"
                " excluded"
            )
        self.params(0)  # impossible values are better found before a model loads

    def params(self, text: int) -> SamplingParams:
        """Raises InvalidRequestError."""
        return SamplingParams(self.max_tokens, self.temperature, seed=self.seed + text)

    def texts(self, prompts: int) -> int:
        """How many texts are written for so many prompts."""
        return prompts * (self.repeat if self.temperature > 0 else 1)

    def fitted(self, prompts: int) -> list[bool]:
        """[prompts] whether the fit may see it: all but `held_out`, at least one of each kind.

        Raises ConfigError for fewer than two.
        """
        if prompts < 2:
            raise ConfigError(
                "one prompt cannot be divided into those to fit on and those to judge by: give two"
                " or more"
            )
        kept = min(max(round(prompts * (1 - self.held_out)), 1), prompts - 1)
        chosen = set(random.Random(self.seed).sample(range(prompts), kept))
        return [i in chosen for i in range(prompts)]
