"""What a pass costs by its number of rows, and plain decoding beside llama.cpp's.

    python scripts/pass_cost.py
    python scripts/pass_cost.py --llama-bench "LD_LIBRARY_PATH=... /path/to/llama-bench"

One sequence of the default model at context 256, int8: median milliseconds of a pass of 1 to 16
rows, and tokens a second of plain greedy decoding through `LLM`. With `--llama-bench`, llama.cpp
decodes the same file with the same threads in turn with us, so that both see the same machine. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import time

import torch

from dspark import LLM, SamplingParams
from dspark.models.loading import resolve
from dspark.models.target import Segment, pack

CONTEXT = 256
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def pass_ms(llm: LLM, rows: int, repeats: int = 9) -> float:
    ids = tuple(torch.randint(40_000, (rows,), generator=torch.Generator().manual_seed(1)).tolist())
    batch = pack([Segment(0, CONTEXT, ids, rows)])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        llm.target.forward(batch)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def ours(llm: LLM, ids: tuple[int, ...], tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return llm.generate([ids], params)[0].stats.tokens_per_second or 0.0


def llama_cpp(command: str, threads: int, tokens: int) -> float:
    words = shlex.split(command)
    env = dict(w.split("=", 1) for w in words if "=" in w and not w.startswith("-"))
    run = [w for w in words if "=" not in w or w.startswith("-")]
    run += ["-m", str(resolve("default")), "-t", str(threads), "-p", "0", "-n", str(tokens)]
    run += ["-d", str(CONTEXT), "-r", "1", "-o", "json"]
    done = subprocess.run(
        run, env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout)[0]["avg_ts"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--llama-bench", help="command that runs llama.cpp's llama-bench")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", default="int8")
    args = parser.parse_args()
    llm = LLM(drafter="none", dtype=args.dtype, max_users=1, max_context=1024)
    g = torch.Generator().manual_seed(0)
    prompt = tuple(torch.randint(40_000, (CONTEXT,), generator=g).tolist())
    ours(llm, prompt, 8)  # fills the cache rows and warms up
    by_rows: dict[int, list[float]] = {}
    speeds: list[float] = []
    theirs: list[float] = []
    for _ in range(args.repeat):
        for rows in ROWS:
            by_rows.setdefault(rows, []).append(pass_ms(llm, rows))
        speeds.append(ours(llm, prompt, args.tokens))
        if args.llama_bench:
            theirs.append(llama_cpp(args.llama_bench, llm.threads, args.tokens))
    ms = {rows: round(statistics.median(t), 2) for rows, t in by_rows.items()}
    for rows, t in ms.items():
        print(f"{rows:3d} rows {t:7.2f} ms   {t / ms[1]:5.2f} times one row")
    result = {
        "model": llm.model_name, "dtype": llm.dtype, "threads": llm.threads, "context": CONTEXT,
        "pass_ms_by_rows": ms, "rows_8_over_1": round(ms[8] / ms[1], 2),
        "plain_tokens_per_second": round(statistics.median(speeds), 1),
        "date": datetime.date.today().isoformat(), "machine": platform.machine(),
        "torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip
    if theirs:
        ratios = [a / b for a, b in zip(speeds, theirs, strict=True)]
        result["llama_cpp_tokens_per_second"] = round(statistics.median(theirs), 1)
        result["ours_over_llama_cpp"] = round(statistics.median(ratios), 2)
        print(f"plain decoding is {result['ours_over_llama_cpp']} times llama.cpp's, pair by pair")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
