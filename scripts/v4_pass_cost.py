"""What a pass costs on a small DeepSeek-V4, beside `transformers` on the same weights.

    python scripts/v4_pass_cost.py
    python scripts/v4_pass_cost.py --rows 1 6 --repeat 40 --threads 1

A random model of about 51 million parameters (8 layers of every kind, hidden 384, 16 experts of
which two are taken, four streams), one sequence at context 517. Both run the same tokens on the
same cache, in turn, so that both see the same machine; medians. For `transformers` the cache is
restored between runs by references, which costs it nothing. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.models.deepseek_v4.tiny import CSA, HCA, SWA, oracle, target

from dspark.models.target import Segment, pack

CONTEXT = 517
KINDS = (SWA, SWA, CSA, HCA, CSA, HCA, CSA, HCA)
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 192,
    "o_groups": 2,
    "o_lora_rank": 192,
    "num_experts_per_tok": 2,
    "n_routed_experts": 16,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 64,
    "initializer_range": 0.05,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--topk", type=int, default=SIZES["index_topk"])
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="ours; theirs is fp32")
    parser.add_argument("--profile", action="store_true", help="list our operations by count")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = oracle(KINDS, hca=128, **{**SIZES, "index_topk": args.topk})
    parameters = sum(p.numel() for p in model.parameters())
    ours = target(model, dtype=DTYPES[args.dtype], num_slots=1, max_context=1024, max_block=64)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(SIZES["vocab_size"], (1, CONTEXT + max(args.rows)), generator=g)
    ours.forward(pack([Segment(0, 0, tuple(ids[0, :CONTEXT].tolist()), 1)]))
    with torch.inference_mode():
        cache = model(ids[:, :CONTEXT], use_cache=True).cache

    def theirs(n: int) -> tuple[float, torch.Tensor]:
        # Nothing in this cache is changed in place, so a copy of references restores it.
        mine = copy.copy(cache)
        mine.layers = [_shallow(layer) for layer in cache.layers]
        with torch.inference_mode():
            start = time.perf_counter()
            logits = model(ids[:, CONTEXT : CONTEXT + n], cache=mine, use_cache=True).logits[0]
            return (time.perf_counter() - start) * 1e3, logits

    def our_pass(n: int) -> tuple[float, torch.Tensor]:
        tokens = tuple(ids[0, CONTEXT : CONTEXT + n].tolist())
        start = time.perf_counter()
        logits = ours.forward(pack([Segment(0, CONTEXT, tokens, n)])).logits
        return (time.perf_counter() - start) * 1e3, logits

    by_rows: dict[int, dict[str, float]] = {}
    for n in args.rows:
        a, b, ratios, apart = [], [], [], 0.0
        for i in range(args.repeat + 3):
            t, left = our_pass(n)
            u, right = theirs(n)
            if i < 3:  # warming up
                apart = float((left - right).abs().max())
                continue
            a.append(t)
            b.append(u)
            ratios.append(t / u)
        by_rows[n] = {
            "ours_ms": round(statistics.median(a), 2),
            "transformers_ms": round(statistics.median(b), 2),
            "ratio": round(statistics.median(ratios), 3),
            "max_difference": apart,
        }
        print(f"{n:3d} rows", by_rows[n])
    if args.profile:
        _profile(lambda: our_pass(args.rows[0]))
    result = {
        "parameters": parameters, "context": CONTEXT, "threads": args.threads, "dtype": args.dtype,
        "index_topk": args.topk, "rows": by_rows, "date": datetime.date.today().isoformat(),
        "machine": platform.machine(), "torch": torch.__version__,
    }  # fmt: skip
    print(json.dumps(result))


def _shallow(layer: Any) -> Any:
    out = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(out, name, dict(value))
    return out


def _profile(work: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        work()
    events = sorted(prof.key_averages(), key=lambda e: -e.self_cpu_time_total)
    for e in events[:25]:
        print(f"{e.key:32s} {e.count:5d} times {e.self_cpu_time_total / 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
