"""Where the drafters of an `LLM` draft (`--draft-device`).

    not said, CPU target    in this process; a second lane is a process of its own
    not said, GPU target    on that GPU; a second lane is a thread, with a stream of its own
    a device                there; a second lane is a thread

A drafter on another device than its target's is in a thread whether or not the lanes overlap: it is
the same bridge for features and laws. What it shares with its target is copied there once
(`models.elsewhere`), and its own weights once for one lane and once for two.

Nothing but CPU to CPU was ever run: this project has had no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.drafters.base import Drafter, build
from dspark.engine.lane_thread import ThreadLane
from dspark.models.decoder import Decoder
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.deepseek_v4_names import CarriedDrafter
from dspark.models.elsewhere import lend, numbered


class Placement:
    """Builds drafters where they belong, and keeps them."""

    def __init__(
        self,
        target: Decoder | DeepseekV4,
        device: torch.device | None,
        model: str = "",
        carried: Sequence[CarriedDrafter] = (),
    ) -> None:
        """`device` as `find_device` gives it, None if none was asked for; `model` and `carried` as
        `drafters.base.build` takes them."""
        self._target, self._model, self._carried = target, model, carried
        self._theirs = numbered(target.device)
        self.device = self._theirs if device is None else device
        self.threads = device is not None or self.device.type != "cpu"
        """Second lanes are threads and not processes."""
        self.elsewhere = None if self.device == self._theirs else str(self.device)
        """The device, if it is not the target's."""
        self._shared = lend(target, self.device)
        self._drafters: dict[tuple[str, int | None], Drafter] = {}

    def drafter(self, name: str, num_draft_tokens: int | None) -> Drafter:
        """For rounds in one lane; loaded when it is first asked for. Raises as
        `drafters.base.build` does."""
        key = name, num_draft_tokens
        if key not in self._drafters:
            made = self._build(*key)
            bridged = self.elsewhere is not None and bool(made.feature_layers)
            self._drafters[key] = ThreadLane(made, self._theirs, self.device) if bridged else made
        return self._drafters[key]

    def lane(self, name: str, num_draft_tokens: int | None, pad_ms: float) -> ThreadLane:
        """A second lane, where those are threads."""
        drafter = self._build(name, num_draft_tokens)
        return ThreadLane(drafter, self._theirs, self.device, pad_ms)

    def _build(self, name: str, num_draft_tokens: int | None) -> Drafter:
        model, carried = self._model, self._carried
        return build(name, self._shared, num_draft_tokens, model=model, carried=carried)
