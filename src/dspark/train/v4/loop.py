"""Steps, states, validation: the loop for all that is trained of V4, a tower or its drafters.

What differs is a `Job`: its batches, its loss, its numbers, what it exports. As in the trainer for
dense targets a step reads nothing but configuration, counters and weights, so a run that was
stopped goes on to the bit; what is not finite stops it before any weight is touched.

Matrices between hidden states are Muon's, everything else AdamW's (`muon.py`), at one learning
rate.

Started by torchrun, each process takes its share of every batch, and gradients are averaged by the
weight of the shares (`distributed.py`). Two processes of one thread use two cores far better than
one of two threads: most operations of a small model are too short to be divided.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.errors import DSparkError
from dspark.train import state
from dspark.train.batches import Item, Place
from dspark.train.config import Steps
from dspark.train.distributed import Group
from dspark.train.metrics import Metrics
from dspark.train.state import Counters, State
from dspark.train.trainer import Outcome, Report, decays, learning_rate
from dspark.train.v4.muon import Muon, takes


class Job(ABC):
    """What is trained, and on what."""

    module: nn.Module
    total: int
    """Steps."""
    group: Group = Group()
    """The processes that share a batch."""

    @abstractmethod
    def plan(self) -> list[str]:
        """What the run will do, for people."""

    @abstractmethod
    def batch(self, place: Place) -> tuple[list[Item], Place]:
        """The batch at a place, and where the next one is."""

    @abstractmethod
    def loss(self, items: Sequence[Item]) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss of a batch, the weight of that mean beside other batches', and a vector of
        sums that may be added over batches."""

    @abstractmethod
    def means(self, sums: Tensor) -> dict[str, Any]:
        """Those sums as numbers to log; `loss` is one of them."""

    @abstractmethod
    def size(self, items: Sequence[Item]) -> tuple[int, int]:
        """Anchors and tokens of a batch."""

    @abstractmethod
    def held_out(self) -> dict[str, Any]:
        """Numbers on text that is not trained on; every process has to ask."""

    @abstractmethod
    def export(self, training: Mapping[str, Any]) -> None:
        """Write a checkpoint that serves; `training` says how it came about."""

    def begin(self, on_progress: Callable[[int, int], None]) -> None:
        """What has to be computed before the first step; (done, total) as it goes."""

    def stepped(self) -> None:
        """The weights have moved."""


class Loop:
    """One run, from its last state if there is one."""

    def __init__(
        self, job: Job, steps: Steps, depends: Mapping[str, Any], group: Group | None = None
    ) -> None:
        """`depends`: what must not change when the run goes on; `group`: None: this process alone.
        Raises ConfigError if OUT holds another run."""
        self.job, self.steps, self.out = job, steps, Path(steps.out)
        self.group = job.group = group or Group()
        self.depends = {**depends, "total_steps": job.total}
        self.names = {p: n for n, p in job.module.named_parameters()}
        self.optimizers = self._optimizers()
        self.counters, self.estimate = Counters(), dict[str, Any]()
        self._sums: Tensor | None = None
        self._count, self._norms, self._seconds = 0, 0.0, 0.0
        found = state.load(self.out)
        if found is not None:
            state.check_same(self.depends, found.depends, self.out)
            self._restore(found)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        s, parameters = self.steps, list(self.names)
        muon = [p for p in parameters if takes(self.names[p], p)]
        rest = [p for p in parameters if not takes(self.names[p], p)]
        groups = [
            {"params": [p for p in rest if decays(self.names[p], p) == yes],
             "weight_decay": s.weight_decay if yes else 0.0}
            for yes in (True, False)
        ]  # fmt: skip
        return [
            Muon(muon, s.lr, s.weight_decay),
            torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, fused=True),
        ]

    def train_step(self, items: Sequence[Item]) -> None:
        """Forward, backward, update. Raises DSparkError if something is not finite."""
        rate = learning_rate(self.counters.step, self.job.total, self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        loss, sums = self._shared_loss(items)
        loss.backward()  # type: ignore[no-untyped-call]
        self.group.mean_gradients(list(self.names))
        norm = float(nn.utils.clip_grad_norm_(list(self.names), self.steps.clip, foreach=True))
        total = float(self.group.sum(loss.detach().clone()))
        if not (math.isfinite(total) and math.isfinite(norm)):
            what = "gradient" if math.isfinite(total) else "loss"
            raise DSparkError(
                f"the {what} is not finite at step {self.counters.step + 1}, batch of sequences"
                f" {', '.join(str(i.sequence) for i in items)}: the last state in"
                f" {self.out / 'state'} is untouched; lower train.lr or look at that text"
            )
        for optimizer in self.optimizers:
            optimizer.step()
        self.job.stepped()
        anchors, tokens = self.job.size(items)
        self._sums = sums if self._sums is None else self._sums + sums
        self._count += 1
        self._norms += norm
        self.counters.step += 1
        self.counters.anchors += anchors
        self.counters.tokens += tokens

    def _shared_loss(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """The loss of this process's share, whose mean over processes is that of the batch, and
        the sums of the whole batch. A process without a share computes something that weighs
        nothing."""
        mine = self.group.share(items)
        loss, weight, sums = self.job.loss(mine or items[:1])
        weight, sums = weight.detach() * bool(mine), sums.detach() * bool(mine)
        whole = self.group.sum(weight.clone())
        return loss * (weight * self.group.world / whole), self.group.sum(sums)

    def run(
        self,
        on_report: Callable[[Report], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """To the end, or until it is interrupted or out of time."""
        s, n = self.steps, self.counters
        begun = last = time.perf_counter()
        metrics = Metrics(self.out, n.step) if self.group.first else None

        def report(kind: str, values: dict[str, Any]) -> None:
            if metrics is not None and kind in ("log", "held_out"):
                metrics.write("train" if kind == "log" else kind, n.step, values)
            on_report(Report(kind, n.step, self.job.total, values))

        try:
            report("begun", {"tensorboard": metrics is not None and metrics.has_board})
            while n.step < self.job.total:
                items, place = self.job.batch(Place(n.epoch, n.offset))
                tokens = n.tokens
                self.train_step(items)
                n.epoch, n.offset = place.epoch, place.offset
                now = time.perf_counter()
                self._seconds += now - last
                n.seconds += now - last
                report("step", {"tokens_per_second": (n.tokens - tokens) / (now - last)})
                last = now
                finished = n.step == self.job.total
                if n.step % s.log_every == 0 or finished:
                    report("log", self._logged())
                if n.step % s.eval_every == 0 or finished:
                    self.estimate = self.job.held_out()
                    report("held_out", self.estimate)
                    n.seconds += time.perf_counter() - last
                ends = [interrupted(), bool(s.max_minutes and now - begun > 60 * s.max_minutes)]
                stop, over = self.group.sum(torch.tensor(ends, dtype=torch.int64)).tolist()
                if n.step % s.save_every == 0 or finished or stop or over:
                    self.save()
                    report("saved", {"out": str(self.out)})
                if not finished and (stop or over):
                    return Outcome.interrupted if stop else Outcome.out_of_time
                last = time.perf_counter()
            return Outcome.finished
        finally:
            if metrics is not None:
                metrics.close()

    def _logged(self) -> dict[str, Any]:
        """Means since the last time, and begin anew."""
        assert self._sums is not None
        n = self.counters
        values = {
            **self.job.means(self._sums),
            "lr": learning_rate(n.step - 1, self.job.total, self.steps),
            "grad_norm": self._norms / self._count,
            "anchors": n.anchors,
            "tokens": n.tokens,
            "seconds_per_step": self._seconds / self._count,
        }
        self._sums, self._count, self._norms, self._seconds = None, 0, 0.0, 0.0
        return values

    def save(self) -> None:
        """Write a state, and what serves; the first process does, the others wait."""
        if self.group.first:
            self._write()
        self.group.barrier()

    def _write(self) -> None:
        kept = {
            name: dict(o.state[p])
            for o in self.optimizers
            for p, name in self.names.items()
            if p in o.state
        }
        since = {"sums": self._sums, "count": self._count, "norms": self._norms,
                 "seconds": self._seconds}  # fmt: skip
        model = dict(self.job.module.state_dict())
        state.save(
            State(model, kept, self.counters, self.depends, torch.get_rng_state(), since,
                  self.estimate),
            self.out,
        )  # fmt: skip
        self.job.export(
            {
                **asdict(self.counters),
                "total_steps": self.job.total,
                "held_out": self.estimate,
                "config": self.depends,
            }
        )

    def _restore(self, found: State) -> None:
        self.counters, self.estimate = replace(found.counters), dict(found.estimate)
        since = found.since
        self._sums, self._count = since["sums"], since["count"]
        self._norms, self._seconds = since["norms"], since["seconds"]
        torch.set_rng_state(found.rng)
        self.job.module.load_state_dict(found.model)
        for o in self.optimizers:
            for group in o.param_groups:
                for p in group["params"]:
                    # A parameter that never had a gradient has no state.
                    o.state[p] = dict(found.adam.get(self.names[p], {}))
