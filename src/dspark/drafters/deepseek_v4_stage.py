"""What the drafters in a DeepSeek-V4 checkpoint are made of: blocks of the tower, under `mtp.*`.

A stage is the same block as a layer of the tower with sliding attention only: residual streams
mixed around attention and around scored experts, the plain rotation, a sink for each head. So the
tower's own `Layer` runs it, in the target's arithmetic, over a ring of keys of the drafter's own.

The ring is addressed by absolute position, as everything is (`models/deepseek_v4/passes.py`): rows
are written when their positions are committed, nothing is rolled back, and what a draft leaves
behind is overwritten before it is read. Only the last `window` rows in front of a position are ever
read, so of a longer prefill chunk only its last `window` rows are computed at all.

Source: the weights' names and shapes and the reference code beside DeepSeek's checkpoints.

Shape suffixes: N rows, B sequences, S streams, D hidden size, E head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.base import DraftContext
from dspark.errors import CheckpointError
from dspark.models.deepseek_v4.hyper import HyperHead
from dspark.models.deepseek_v4.model import DeepseekV4, Layer
from dspark.models.deepseek_v4.passes import Layout, Pass
from dspark.models.deepseek_v4_names import CarriedDrafter, stage_shapes
from dspark.models.target import Linear, Segment, pack
from dspark.models.weights import BLOCK, WeightSource


class Stages:
    """The blocks of a carried drafter with their rings, and the way out to logits."""

    def __init__(
        self,
        target: DeepseekV4,
        drafter: CarriedDrafter,
        max_block: int,
        weights: WeightSource | None = None,
    ) -> None:
        """`max_block`: tokens that one draft runs at once. `weights`: where `mtp.*` are; None: in
        the target's own checkpoint.

        Raises CheckpointError if a tensor is missing or of a foreign shape.
        """
        c, self._target = target.config, target
        maths = target.maths if weights is None else target.maths.reading(weights)
        self._weights = maths.weights
        self._check(drafter)
        self.layout = Layout(c.window, target.num_slots, target.max_context, max(max_block, 1))
        self.prefixes = [f"mtp.{i}." for i in range(drafter.stages)]
        self.layers = [
            Layer(c, maths, self.layout, prefix, ratio=0, hashed=False) for prefix in self.prefixes
        ]
        self.exit = HyperHead(c, maths, drafter.last)
        # Committed rows need keys alone, of all stages in one product.
        self._keys = self.linear(*(p + "attn.wkv.weight" for p in self.prefixes))
        self.lengths = [0] * target.num_slots
        """Committed rows of each slot."""

    def linear(self, *names: str) -> Linear:
        """Matrices one above the other as one map in the target's arithmetic; one whose columns
        the integer kernels cannot take (a narrow Markov table) stays in fp32."""
        whole = torch.cat([self._weights.tensor(n) for n in names])
        if self._target.maths.integer and whole.shape[1] % BLOCK:
            exact = whole.float()
            return lambda x: F.linear(x, exact)
        return self._target.linear(whole)

    def vector(self, name: str) -> Tensor:
        """A small tensor in fp32."""
        return self._weights.tensor(name).to(self._target.device, torch.float32)

    def begin(self, segments: list[Segment], *, blocks: bool) -> Pass:
        """The addresses of a draft's rows; `blocks`: each sees all of its own segment."""
        batch = pack(segments, self._target.device)
        t = self._target
        return Pass(t.config, self.layout, t.rotations, batch, blocks=blocks)

    def run(self, x_NSD: Tensor, p: Pass) -> Tensor:
        """Streams [N, S, D] through all stages."""
        for layer in self.layers:
            x_NSD = layer(x_NSD, p)
        return x_NSD

    def write(self, x_ND: Tensor, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Put the keys of committed rows into the rings; x is what the stages' `wkv` reads.

        No two rows of a slot may lie a ring apart: `recent` sees to it.
        """
        t = self._target
        device = x_ND.device
        at = torch.tensor(positions, device=device)
        rows = torch.tensor(slots, device=device) * self.layout.stride(0) + at % self.layout.ring
        turns = t.rotations.at(0, at)
        keys = self._keys(x_ND).chunk(len(self.layers), -1)
        for layer, kv_NE in zip(self.layers, keys, strict=True):
            a = layer.attention
            kv_NE = t.maths.norm_rotate(kv_NE, a.kv_norm, turns)
            a.keys.index_copy_(0, rows, kv_NE.to(a.keys.dtype))

    def recent(self, rows: int) -> int:
        """How many of a run of committed rows can still be read behind it: the last ones."""
        return min(rows, self._target.config.window)

    def check(self, contexts: Sequence[DraftContext], behind: int) -> None:
        """The rings must end `behind` tokens before the ends of the sequences, and before what is
        unseen."""
        for c in contexts:
            known = len(c.tokens) - behind - c.unseen
            assert self.lengths[c.slot] == known, "context ends at the first unseen token"

    def _check(self, drafter: CarriedDrafter) -> None:
        """All tensors are there and of the right shape."""
        weights, what = self._weights, f"the {drafter.kind} drafter"
        names, shapes = weights.names(), stage_shapes(self._target.config, drafter)
        missing = [n for n in shapes if n not in names]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise CheckpointError(f"{what} lacks {', '.join(missing[:5])}{more}")
        for name, shape in shapes.items():
            if weights.shape(name) != shape:
                raise CheckpointError(
                    f"{what}: tensor {name} has shape {list(weights.shape(name))}, the"
                    f" configuration wants {list(shape)}"
                )
