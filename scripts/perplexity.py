"""Does int8 damage the model? Perplexity of its own text in int8 and in fp32.

    python scripts/perplexity.py [--tokens 20000] [--seed 0]

The default model answers the built-in prompts, half of them greedily and half at temperature 1;
every token of the answers is then scored by both arithmetics with the same context. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math

import torch

from dspark import LLM, SamplingParams
from dspark.bench.prompts import load_prompts
from dspark.models.target import Segment, pack

CHUNK = 256


def own_text(tokens: int, seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, answer) pairs, at least `tokens` answer tokens in all."""
    llm = LLM(drafter="none", dtype="int8", max_users=8, max_context=2048)
    prompts = [
        p
        for kind in ("chat", "code", "math", "summarise")
        for p in load_prompts([f"builtin:{kind}"]).prompts
    ]
    ids = [llm.encode_prompt(p) for p in prompts]
    out: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    total, batch, rounds = 0, 2 * len(ids), 0
    while total < tokens:
        for temperature in (0.0, 1.0) if rounds == 0 else (1.0,):
            params = [
                SamplingParams(
                    max_tokens=256, temperature=temperature, seed=seed + rounds * batch + i
                )
                for i in range(len(ids))
            ]
            for o in llm.generate(ids, params):
                out.append((o.prompt_ids, o.token_ids))
                total += len(o.token_ids)
        rounds += 1
    return out


def mean_loss(dtype: str, texts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
    """Mean negative log-probability (nats) of the answer tokens."""
    target = LLM(drafter="none", dtype=dtype, max_users=1, max_context=2048).target
    loss, count = 0.0, 0
    for prompt, answer in texts:
        ids = (*prompt, *answer)
        for start in range(0, len(ids) - 1, CHUNK):
            chunk = ids[start : min(start + CHUNK, len(ids) - 1)]
            wanted = min(len(chunk), max(0, start + len(chunk) - len(prompt) + 1))
            logits = target.forward(pack([Segment(0, start, chunk, wanted)])).logits
            if wanted:
                first = start + len(chunk) - wanted + 1
                nexts = torch.tensor(ids[first : first + wanted])
                loss += float(torch.nn.functional.cross_entropy(logits, nexts, reduction="sum"))
                count += wanted
    return loss / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts = own_text(args.tokens, args.seed)
    ppl = {d: math.exp(mean_loss(d, texts)) for d in ("fp32", "int8")}
    result = {
        "tokens": sum(len(a) for _, a in texts), "texts": len(texts), "seed": args.seed,
        "perplexity": {d: round(p, 4) for d, p in ppl.items()},
        "int8_over_fp32": round(ppl["int8"] / ppl["fp32"], 4),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
