"""What torchrun starts in `test_distributed.py`: one process of some tiny runs, one after another.

torchrun --nproc-per-node 2 -m tests.train.distributed_run JOBS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from dspark.train.config import build
from dspark.train.distributed import Group
from dspark.train.v4.pretrain import PretrainConfig, make_loop
from tests.train.tiny_runs import run, trainer


def main() -> None:
    torch.set_num_threads(1)
    group = Group.join(torch.device("cpu"))
    assert group.world == 2
    tower, *jobs = json.loads(Path(sys.argv[1]).read_text())
    make_loop(build(PretrainConfig, tower), group).run()
    for job in jobs:
        for _ in range(2):
            made = trainer(run(Path(job["out"]), job["form"], **job["train"]), group)
            # Process 1 alone is told to stop at step 4: both have to. Then they go on.
            begin = made.counters.step
            made.train(
                interrupted=lambda made=made, begin=begin: (  # type: ignore[misc]
                    group.rank == 1 and begin == 0 and made.counters.step == 4
                )
            )
            assert made.counters.step == (10 if begin else 4)
    group.leave()


if __name__ == "__main__":
    main()
