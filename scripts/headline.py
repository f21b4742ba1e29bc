"""The comparison that the project is about: DSpark against MTP-1 and plain decoding, one user.

    python scripts/headline.py --prompts builtin:chat builtin:code set1.jsonl set2.jsonl
    python scripts/headline.py --prompts ... --llama-bench "LD_LIBRARY_PATH=/opt/llama llama-bench"

Same model, engine and process: on every prompt the drafters take turns (`bench/compare.py`),
at temperature 0, and every text must be that of plain decoding. Sets count alike: the mean over
sets is the mean of their tokens a second, a ratio is formed of those means. With `--llama-bench`,
llama.cpp decodes the same GGUF file plainly on as many threads, once after every set.

Prints a Markdown table for every set and one for the mean (see docs/results.md), and ends in one
JSON line. Exit code 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from pass_cost import llama_cpp

from dspark.bench.compare import BASELINE, BenchConfig, Report, run
from dspark.bench.prompts import load_prompts
from dspark.llm import LLM

RIVAL = "mtp1"
COLUMNS = "| drafter | tok/s | over plain | over mtp1 | accepted length | draft share | same text |"


def rows(speeds: dict[str, float], lengths: dict[str, float], shares: dict[str, float],
         same: dict[str, bool]) -> list[dict[str, Any]]:  # fmt: skip
    return [
        {
            "drafter": d,
            "tokens_per_second": speeds[d],
            "over_plain": speeds[d] / speeds[BASELINE],
            "over_mtp1": speeds[d] / speeds[RIVAL] if RIVAL in speeds else None,
            "accepted_length": lengths[d],
            "draft_share": shares[d],
            "identical": same[d],
        }
        for d in speeds
    ]


def of(report: Report) -> list[dict[str, Any]]:
    found = report.results
    shares = {}
    for r in found:
        round_ms = (r.draft_ms or 0) + (r.verify_ms or 0) + (r.other_ms or 0)
        shares[r.drafter] = (r.draft_ms or 0) / round_ms if round_ms else 0.0
    return rows(
        {r.drafter: r.tokens_per_second or 0.0 for r in found},
        {r.drafter: r.accepted_length or 1.0 for r in found},
        shares,
        {r.drafter: bool(r.identical_to_none) for r in found},
    )


def mean(sets: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    def over(key: str) -> dict[str, float]:
        return {
            r["drafter"]: statistics.mean(s[i][key] for s in sets) for i, r in enumerate(sets[0])
        }

    same = {r["drafter"]: all(s[i]["identical"] for s in sets) for i, r in enumerate(sets[0])}
    return rows(over("tokens_per_second"), over("accepted_length"), over("draft_share"), same)


def show(title: str, table: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n\n{COLUMNS}\n|{'---|' * 7}")
    for r in table:
        rival = "" if r["over_mtp1"] is None else f"{r['over_mtp1']:.2f}"
        print(
            f"| {r['drafter']} | {r['tokens_per_second']:.1f} | {r['over_plain']:.2f} | {rival} |"
            f" {r['accepted_length']:.2f} | {r['draft_share']:.0%} |"
            f" {'yes' if r['identical'] else 'NO'} |",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", nargs="+", required=True, help="one set each")
    parser.add_argument("--drafters", default="none,mtp1,dflash,dspark,ngram")
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--llama-bench", help="command that runs llama.cpp's llama-bench")
    args = parser.parse_args()
    config = BenchConfig(drafters=tuple(args.drafters.split(",")), max_tokens=args.max_tokens)
    sets = [load_prompts([p], args.limit) for p in args.prompts]
    llm = LLM(args.model, drafter=BASELINE, dtype=args.dtype, threads=args.threads, max_users=1)
    tables, theirs, last = [], [], None
    for prompts in sets:
        last = run(llm, prompts, config)
        tables.append(of(last))
        show(f"{prompts.name}, {len(prompts)} prompts", tables[-1])
        for sentence in (*last.differences, *last.doubts):
            print(sentence)
        if args.llama_bench:
            theirs.append(llama_cpp(args.llama_bench, llm.threads, args.max_tokens))
    overall = mean(tables)
    show(f"mean over {len(sets)} sets", overall)
    assert last is not None
    result = {
        **{k: v for k, v in last.as_json().items() if k not in ("prompts", "results", "doubts")},
        "sets": {p.name: t for p, t in zip(sets, tables, strict=True)},
        "mean": overall,
    }
    if theirs:
        result["llama_cpp_tokens_per_second"] = statistics.median(theirs)
        print(f"\nllama.cpp, plain, same file and threads: {statistics.median(theirs):.1f} tok/s")
    print(json.dumps(result))
    return 0 if all(r["identical"] for r in overall) else 1


if __name__ == "__main__":
    sys.exit(main())
