"""Where the time of drafting goes, beside a pass of the target.

    python scripts/draft_cost.py dspark mtp1 checkpoints/smollm2-135m-instruct/dflash

Milliseconds (median of many calls, one sequence at context 256) of a whole proposal, of its parts
where the drafter has them (parallel stage, output head, sequential stage), of writing two committed
rows, and of passes of 1 to 6 rows. Ends in one JSON line. Wall time: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

from dspark.drafters.base import Committed, DraftContext
from dspark.drafters.block_drafter import BlockDrafter
from dspark.drafters.trained import build
from dspark.llm import LLM
from dspark.models.target import Segment, pack
from dspark.sampling import streams
from dspark.types import SamplingParams

CONTEXT = 256


def median_ms(call: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", help="names or checkpoint directories")
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=40)
    args = parser.parse_args()
    llm = LLM(args.model, drafter="none", dtype=args.dtype, threads=args.threads, max_users=1,
              max_context=1024)  # fmt: skip
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(llm.target.vocab_size - 1, (CONTEXT + 1,), generator=g).tolist()
    prefill = pack([Segment(0, 0, tuple(tokens[:-1]), 1)], llm.target.device)
    result: dict[str, object] = {
        "model": llm.model_name, "dtype": llm.dtype, "threads": llm.threads, "context": CONTEXT,
        "date": datetime.date.today().isoformat(), "machine": platform.machine(),
        "torch": torch.__version__,
    }  # fmt: skip
    for name in args.drafters:
        drafter = build(name, llm.target, None, llm.model_name)
        features = llm.target.forward(prefill, drafter.feature_layers).features
        assert features is not None
        drafter.observe([Committed(0, 0, tuple(tokens[:-1]), 0)], features)
        context = [DraftContext(0, tokens, SamplingParams(), 99, streams(0)[0])]
        last_two = [Committed(0, CONTEXT - 2, tuple(tokens[-3:-1]), CONTEXT - 2)]

        def time_of(call: Callable[[], object]) -> float:
            return median_ms(call, args.repeat)

        found = {
            "propose": time_of(lambda: drafter.propose(context)),  # noqa: B023 (called at once)
            "observe": time_of(lambda: drafter.observe(last_two, features)),  # noqa: B023
        }
        if isinstance(drafter, BlockDrafter):
            with torch.inference_mode():
                k = drafter.cap
                h = drafter._hidden(context, k)
                base = drafter._head(h.flatten(0, 1)).view(1, k, -1).float()
                found |= {
                    "parallel": time_of(lambda: drafter._hidden(context, k)),  # noqa: B023
                    "head": time_of(lambda: drafter._head(h.flatten(0, 1))),  # noqa: B023
                    "sequential": time_of(lambda: drafter._walk(context, h, base)),  # noqa: B023
                }
        result[name] = found
        print(f"{name:24s} " + "  ".join(f"{part} {ms:.2f}" for part, ms in found.items()))
    passes = {}
    for rows in range(1, 7):
        batch = pack([Segment(0, CONTEXT, tuple(tokens[:rows]), rows)], llm.target.device)
        passes[rows] = median_ms(lambda: llm.target.forward(batch), args.repeat)  # noqa: B023
    print("pass by rows             " + "  ".join(f"{r}: {ms:.1f}" for r, ms in passes.items()))
    result["pass_ms_by_rows"] = passes
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
