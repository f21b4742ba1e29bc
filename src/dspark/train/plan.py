"""What a run will do and need, before it does it: `--plan`, and the refusal when it does not fit.

Memory is counted, not measured: weights, gradients and Adam's two moments in fp32, the target's
frozen matrices, the feature rows of the largest step, what its blocks keep for the backward pass,
and the logits of one chunk. Real use also has PyTorch itself and rounding of its allocator.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.errors import ResourceError
from dspark.models import build
from dspark.train.batches import Order, Place
from dspark.train.setup import PASS_SLOTS, Run

LOGIT_COPIES = 5
"""Tensors of a chunk's size that the losses and their gradients hold at once."""


@dataclass(frozen=True)
class Need:
    """Bytes of one thing."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Lines for the user, and what is needed against what is free."""

    facts: tuple[tuple[str, str], ...]
    memory: tuple[Need, ...]
    free_memory: int
    disk: int
    free_disk: int
    directory: str

    def check(self) -> None:
        """Raises ResourceError if memory or disk do not suffice."""
        need = sum(n.bytes for n in self.memory)
        if need > self.free_memory:
            largest = max(self.memory, key=lambda n: n.bytes)
            raise ResourceError(
                f"not enough memory: {size(need)} are needed, {size(self.free_memory)} are free;"
                f" most is {largest.name} ({size(largest.bytes)}): lower train.anchors_per_step,"
                " train.chunk, drafter.draft_vocab_size or drafter.num_layers"
            )
        if self.disk > self.free_disk:
            raise ResourceError(
                f"the feature cache needs {size(self.disk)} more at {self.directory}, where"
                f" {size(self.free_disk)} are free: name another features.directory, use less text"
                " or fewer layers, or take features.mode=live"
            )

    def lines(self) -> list[str]:
        rows = [*self.facts]
        rows += [("memory: " + n.name, size(n.bytes)) for n in self.memory]
        need = sum(n.bytes for n in self.memory)
        rows.append(("memory in all", f"{size(need)} of {size(self.free_memory)} free"))
        rows.append(("disk for features", f"{size(self.disk)} more of {size(self.free_disk)} free"))
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {value}" for name, value in rows]


def size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**29 else f"{number / 2**20:.1f} MiB"


def make_plan(run: Run, num_parameters: int, world: int = 1) -> Plan:
    """Count everything of a run on this machine."""
    c, d = run.config.train, run.drafter
    order = Order(run.samples, run.training, c)
    total = order.total_steps()
    tokens = sum(len(s.tokens) for s in run.samples)
    at_one = sum(run.samples[i].temperature == 1.0 for i in run.held_out)
    held = f"{len(run.held_out)}, {at_one} of them at temperature 1"
    if not run.config.text.held_out:
        held = f"none: the estimate is made on {len(run.held_out)} trained samples"
    facts = (
        ("target", f"{run.target_name} on {run.choice.device}"),
        ("samples", f"{len(run.samples)}, {tokens} tokens"),
        ("held out", held),
        ("drafter", f"{run.config.drafter.kind}, {d.num_layers} layers, block of {d.block_size},"
                    f" reads layers {list(d.target_layer_ids)}"),
        ("draft vocabulary", str(d.draft_vocab_size or d.vocab_size)),
        ("trainable parameters", f"{num_parameters / 1e6:.2f} million"),
        ("anchors per epoch", str(order.anchors_per_epoch)),
        ("steps", f"{total}, about {_anchors(order, total)} anchors"),
        ("features", f"{run.config.features.mode}, layers {list(run.layers)}"
                     + (f", {run.directory}" if run.config.features.mode == "cache" else "")),
    )  # fmt: skip
    disk, free_disk = _disk(run)
    memory = _memory(run, order, num_parameters, world)
    return Plan(facts, memory, _free_memory(run), disk, free_disk, str(run.directory))


def _anchors(order: Order, total: int) -> int:
    """Of all steps, from the first ones."""
    some, place = 0, Place()
    tried = min(total, 50)
    for _ in range(tried):
        items, place = order.batch(place)
        some += order.anchors_of(items)
    return round(some * total / tried)


def _memory(run: Run, order: Order, parameters: int, world: int) -> tuple[Need, ...]:
    c, d = run.config.train, run.drafter
    V = d.draft_vocab_size or d.vocab_size
    rows = anchors = 0
    place = Place()
    for _ in range(20):
        items, place = order.batch(place)
        rows = max(rows, sum(len(run.samples[i.sequence].tokens) for i in items) // world)
        anchors = max(anchors, order.anchors_of(items) // world)
    longest = max(len(s.tokens) for s in run.samples)
    one_block = d.num_slots * (10 * d.hidden_size + 5 * d.intermediate_size)
    scores = 3 * d.num_heads * d.num_slots * (longest + d.num_slots)
    sharded = world if c.shard else 1
    needs = [
        Need("weights", 4 * parameters),
        Need("gradients", 4 * parameters),
        Need("Adam", 8 * parameters // sharded),
        Need("target's embedding and head", 4 * d.hidden_size * (d.vocab_size + V)),
        Need("features of a step", rows * d.hidden_size * (2 * len(run.layers)
                                   + 4 * (2 * d.num_features + 6))),
        Need("blocks of a step", 4 * anchors * d.num_layers * (one_block + scores)),
        Need("logits of a chunk", 4 * LOGIT_COPIES * c.chunk * d.block_size * V),
    ]  # fmt: skip
    have = run.cached() if run.config.features.mode == "cache" else None
    if have is None or have.complete < have.num_sequences:
        per_weight = {"fp32": 4.0, "bf16": 2.0, "int8": 1.07}[run.choice.dtype]
        t = run.checkpoint.decoder_config
        cache = 8 * t.num_layers * t.num_kv_heads * t.head_dim * longest * PASS_SLOTS
        needs.append(Need("target", int(per_weight * build.parameters(t)) + cache))
    return tuple(needs)


def _free_memory(run: Run) -> int:
    if run.choice.device.type == "cuda":
        return int(torch.cuda.mem_get_info(run.choice.device)[0])
    return build._available_memory()


def _disk(run: Run) -> tuple[int, int]:
    """Bytes that the feature cache still needs, and that are free where it stands."""
    place = run.directory.absolute()
    while not place.exists():
        place = place.parent
    stat = os.statvfs(Path(place))
    free = stat.f_bavail * stat.f_frsize
    if run.config.features.mode == "live":
        return 0, free
    have, meta = run.cached(), run.cache
    done = 0 if have is None else round(meta.num_bytes * have.rows / max(1, meta.num_tokens))
    return meta.num_bytes - done, free
