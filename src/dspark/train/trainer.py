"""The loop: batches in, a drafter out; every stop leaves something to go on from.

    batch -> pack -> losses (chunked) -> backward -> mean over processes -> clip -> AdamW

A step reads nothing but the configuration, the counters and the weights, so ten steps are, to the
bit on a CPU, five, a new process, and five more. What is not finite stops the run before the
weights are touched, naming the step and the sequences, and the last good state stays.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.drafters import checkpoint
from dspark.drafters.block import BlockModel
from dspark.drafters.mtp import MtpModel
from dspark.errors import ConfigError, DSparkError
from dspark.train import distributed, state
from dspark.train.anchors import Pack, choose, draw_unseen, pack_blocks
from dspark.train.batches import Item, Order, Place, anchor_rng, unseen_rng
from dspark.train.config import Steps
from dspark.train.distributed import Group
from dspark.train.estimate import accepted_length, chances
from dspark.train.features import FeatureCache, LiveFeatures
from dspark.train.losses import TERMS, Terms
from dspark.train.metrics import Metrics
from dspark.train.setup import Run, feature_scale, standardise
from dspark.train.state import Counters, State
from dspark.train.step import Teacher, TrainStep


class Outcome(Enum):
    finished = "finished"
    out_of_time = "out of time"
    interrupted = "interrupted"


@dataclass(frozen=True)
class Report:
    """What to show: `kind` is begun, step, log (numbers were written), held_out or saved."""

    kind: str
    step: int
    total: int
    values: dict[str, Any]


def learning_rate(step: int, total: int, c: Steps) -> float:
    """Of step 0 .. total - 1: a straight line up to `lr`, then half a cosine down; never above."""
    warm = round(c.warmup * total)
    if step < warm:
        return c.lr * (step + 1) / warm
    if c.schedule == "constant":
        return c.lr
    done = min(1.0, (step - warm) / max(1, total - 1 - warm))
    return c.lr * (c.min_lr + (1 - c.min_lr) * min(1.0, (1 + math.cos(math.pi * done)) / 2))


def decays(name: str, p: Tensor) -> bool:
    """Matrices; not norms and biases, nor the taps of a convolution, which rest at one and zero."""
    return p.dim() >= 2 and not name.endswith(".base")


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C only sets a flag; the second one interrupts."""
    seen = False

    def note(number: int, frame: Any) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: nobody presses Ctrl-C here
        yield lambda: False
        return
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


class Trainer:
    """One run, from its last state if there is one."""

    def __init__(
        self,
        run: Run,
        features: FeatureCache | LiveFeatures,
        model: BlockModel | MtpModel,
        teacher: Teacher,
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        """Raises ConfigError if OUT holds a run that this one cannot go on with."""
        self.run, self.features, self.device = run, features, device
        self.config = c = run.config.train
        self.out = Path(c.out)
        self.group = group or Group()
        self.order = Order(run.samples, run.training, c)
        self.total = self.order.total_steps()
        self.model = model.to(device)
        found = state.load(self.out)
        self.scale = self._standardise(found is None)
        self.step = TrainStep(self.model, teacher, run.config.loss, c.chunk, self.scale)
        if c.shard:
            if self.group.world == 1:
                raise ConfigError("train.shard needs several processes: start them with torchrun")
            distributed.shard(self.step, self.group, device)
        self.names = {p: n for n, p in self.model.named_parameters()}
        parameters = list(self.names)
        groups = [
            {"params": [p for p in parameters if decays(self.names[p], p) == yes],
             "weight_decay": c.weight_decay if yes else 0.0}
            for yes in (True, False)
        ]  # fmt: skip
        self.adam = torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, fused=True)
        self.depends = state.depends_on(
            run.config.flat(), text=run.text, target=run.target_name, total_steps=self.total
        )
        self.counters = Counters()
        self.estimate: dict[str, Any] = {}
        self._flat: Tensor | None = None
        self._steps, self._norms, self._seconds = 0, 0.0, 0.0
        if found is not None:
            state.check_same(self.depends, found.depends, self.out)
            self._restore(found)

    def _standardise(self, fresh: bool) -> Tensor | None:
        """The factors on a block drafter's features, and the start that goes with them."""
        section = self.run.config.drafter
        if not section.standardise:
            return None
        scale = feature_scale(self.run, self.features).to(self.device)
        if isinstance(self.model, BlockModel):
            if section.start_from and fresh:
                with torch.no_grad():
                    self.model.fc.weight.div_(scale.clamp(min=1e-12))
            return scale
        if fresh and not section.start_from:
            standardise(self.model, scale)
        return None

    # One step.

    def make_pack(self, items: Sequence[Item], limit: int | None) -> Pack:
        """This process's share of a batch; a block that weighs nothing if that is empty."""
        mine = self.group.share(items)
        found = [self.features[i.sequence] for i in mine or items[:1]]
        if mine:
            anchors = [
                choose(f, limit, anchor_rng(self.config.seed, i))
                for f, i in zip(found, mine, strict=True)
            ]
        else:
            anchors = [torch.tensor([len(found[0].tokens) - 1])]
        c = self.run.drafter
        # Validation is that of blocks from true features.
        share = 0.0 if items[0].epoch < 0 else self.config.drop_last
        unseen = draw_unseen(share, c.block_size, unseen_rng(self.config.seed, items))
        pack = pack_blocks(found, anchors, c.block_size, self.run.columns, c.hidden_size, unseen)
        return to_device(pack, self.device)

    def _losses(self, pack: Pack) -> tuple[Tensor, Tensor]:
        slots = self.run.config.loss.slots(self.run.drafter.block_size).to(self.device)
        weight = self.group.sum((slots * pack.valid).sum()) / self.group.world
        bf16 = self.config.autocast == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            loss, flat = self.step(pack, weight)
        return loss, flat

    def train_step(self, items: Sequence[Item]) -> None:
        """Forward, backward, update. Raises DSparkError if something is not finite."""
        pack = self.make_pack(items, self.config.anchors_per_sequence or None)
        rate = learning_rate(self.counters.step, self.total, self.config)
        for settings in self.adam.param_groups:
            settings["lr"] = rate
        self.adam.zero_grad(set_to_none=True)
        loss, flat = self._losses(pack)
        loss.backward()  # type: ignore[no-untyped-call]
        if not self.config.shard:
            self.group.mean_gradients(list(self.names))
        norm = distributed.whole(
            nn.utils.clip_grad_norm_(list(self.names), self.config.clip, foreach=True)
        )
        flat = self.group.sum(torch.cat([flat, loss.detach().reshape(1)]))
        both = [float(flat[-1]), float(norm)]
        if not all(map(math.isfinite, both)):
            what = "loss" if not math.isfinite(both[0]) else "gradient"
            raise DSparkError(
                f"the {what} is not finite at step {self.counters.step + 1}, batch of sequences"
                f" {', '.join(str(i.sequence) for i in items)}: the last state in"
                f" {self.out / 'state'} is untouched; lower train.lr or look at that text"
            )
        self.adam.step()
        flat = flat[:-1].cpu()
        self._flat = flat if self._flat is None else self._flat + flat
        self._steps += 1
        self._norms += both[1]
        self.counters.step += 1
        self.counters.anchors += self.order.anchors_of(items)
        self.counters.tokens += sum(len(self.run.samples[i.sequence].tokens) for i in items)

    # All steps.

    def train(
        self,
        on_report: Callable[[Report], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Run to the end, or until it is interrupted or out of time."""
        c, n = self.config, self.counters
        begun = last = time.perf_counter()
        metrics = Metrics(self.out, n.step) if self.group.first else None

        def report(kind: str, values: dict[str, Any]) -> None:
            if metrics is not None and kind in ("log", "held_out"):
                metrics.write("train" if kind == "log" else kind, n.step, values)
            on_report(Report(kind, n.step, self.total, values))

        try:
            report("begun", {"tensorboard": metrics is not None and metrics.has_board})
            while n.step < self.total:
                items, place = self.order.batch(Place(n.epoch, n.offset))
                anchors = n.anchors
                self.train_step(items)
                n.epoch, n.offset = place.epoch, place.offset
                now = time.perf_counter()
                speed = (n.anchors - anchors) / (now - last)
                self._seconds += now - last
                n.seconds += now - last
                last = now
                report("step", {"anchors_per_second": speed})
                finished = n.step == self.total
                if n.step % c.log_every == 0 or finished:
                    report("log", self._logged())
                if n.step % c.eval_every == 0 or finished:
                    self.estimate = self.evaluate()
                    if finished and not c.shard:  # sharded weights are whole inside a step alone
                        self.estimate |= self.served()
                    report("held_out", self.estimate)
                    n.seconds += time.perf_counter() - last
                    last = time.perf_counter()
                over = c.max_minutes and now - begun > 60 * c.max_minutes
                stop = self.group.sum(torch.tensor([interrupted(), bool(over)], dtype=torch.int64,
                                                   device=self.device)).tolist()  # fmt: skip
                if n.step % c.save_every == 0 or finished or any(stop):
                    self.save()
                    report("saved", {"out": str(self.out)})
                    last = time.perf_counter()
                if stop[0] and not finished:
                    return Outcome.interrupted
                if stop[1] and not finished:
                    return Outcome.out_of_time
            return Outcome.finished
        finally:
            if metrics is not None:
                metrics.close()

    def evaluate(self) -> dict[str, Any]:
        """The terms over the held-out samples, weights as they are."""
        limit = self.config.eval_anchors_per_sequence
        items = [Item(i, -1) for i in self.run.held_out]
        size = max(1, self.config.anchors_per_step // limit)
        total: Tensor | None = None
        with torch.no_grad():
            for first in range(0, len(items), size):
                _, flat = self._losses(self.make_pack(items[first : first + size], limit))
                total = flat if total is None else total + flat
        assert total is not None
        return self._means(self.group.sum(total).cpu())

    def served(self) -> dict[str, Any]:
        """The accepted length to be expected when it serves (`estimate.py`), on the held-out text
        at temperature 1, or on the greedy one where there is no other."""
        held = self.run.held_out
        for temperature in (1.0, 0.0):
            mine = [i for i in held if self.run.samples[i].temperature == temperature]
            if mine:
                length = accepted_length(
                    chances(self.step, self.make_pack([Item(i, -1)], None), temperature == 0)
                    for i in mine
                )
                return {"served_length": length, "temperature": temperature}
        return {}

    def _means(self, flat: Tensor) -> dict[str, Any]:
        terms = Terms.unflat(flat, self.run.drafter.block_size)
        means = terms.means()
        loss = sum(getattr(self.run.config.loss, t) * means[t] for t in TERMS)
        return {"loss": loss, **means, "blocks": int(terms.valid[0])}

    def _logged(self) -> dict[str, Any]:
        """Means since the last time, and begin anew."""
        assert self._flat is not None
        means, n = self._means(self._flat), self.counters
        values = {
            **means,
            "lr": learning_rate(n.step - 1, self.total, self.config),
            "grad_norm": self._norms / self._steps,
            "anchors": n.anchors,
            "tokens": n.tokens,
            "anchors_per_second": means["blocks"] / max(self._seconds, 1e-9),
        }
        self._clear()
        return values

    def _clear(self) -> None:
        self._flat, self._steps, self._norms, self._seconds = None, 0, 0.0, 0.0

    # States.

    def weights(self) -> dict[str, Tensor]:
        """All trained tensors, whole and on the CPU; every process has to ask."""
        return {n: distributed.whole(p.detach()).cpu() for p, n in self.names.items()}

    def save(self) -> None:
        """Write a state and the drafter's checkpoint."""
        model = self.weights()
        adam = {
            name: {k: distributed.whole(v).cpu() for k, v in self.adam.state[p].items()}
            for p, name in self.names.items()
        }
        if self.group.first:
            since = {"flat": self._flat, "steps": self._steps, "norms": self._norms,
                     "seconds": self._seconds}  # fmt: skip
            state.save(
                State(model, adam, self.counters, self.depends, torch.get_rng_state(), since,
                      self.estimate),
                self.out,
            )  # fmt: skip
            self._export(model)
        self.group.barrier()

    def _export(self, model: dict[str, Tensor]) -> None:
        n, estimate = self.counters, self.estimate
        training = {
            "accepted_length": estimate.get("served_length", estimate.get("accepted_length")),
            "accept": estimate.get("accept"),
            "temperature": estimate.get("temperature"),
            "held_out": self.run.config.text.held_out > 0,
            "anchors": n.anchors,
            "steps": n.step,
            "total_steps": self.total,
            "tokens": n.tokens,
            "seconds": round(n.seconds, 1),
            "text": self.run.text,
            "seed": self.config.seed,
            "config": self.run.config.flat(),
        }
        if self.scale is not None:
            model = {**model, "fc.weight": model["fc.weight"] * self.scale.cpu()}
        checkpoint.save(self.out / "drafter", self.run.drafter, model,
                        draft_ids=self.run.draft_ids, training=training)  # fmt: skip

    def _restore(self, found: State) -> None:
        self.counters = replace(found.counters)
        self.estimate = dict(found.estimate)
        since = found.since
        self._flat, self._steps = since["flat"], since["steps"]
        self._norms, self._seconds = since["norms"], since["seconds"]
        torch.set_rng_state(found.rng)
        with torch.no_grad():
            for p, name in self.names.items():
                distributed.copy_whole(p, found.model[name])
                moments = found.adam[name]
                kept = {"step": moments["step"].to(self.device)}
                for key in ("exp_avg", "exp_avg_sq"):
                    kept[key] = torch.zeros_like(p)
                    distributed.copy_whole(kept[key], moments[key])
                self.adam.state[p] = kept


def to_device(pack: Pack, device: torch.device) -> Pack:
    """A pack with its tensors on a device."""
    if device.type == "cpu":
        return pack
    values = {f.name: getattr(pack, f.name) for f in fields(pack)}
    moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
    return replace(pack, **moved)
