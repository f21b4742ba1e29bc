"""Verification: how much of a draft the target agrees with, and the token it adds (paper, 2).

    anchor   x1  x2  x3        the draft behind the last emitted token
      |      |   |   |
     p_0    p_1 p_2 p_3        one row of target logits each: row i judges draft token i + 1,
                               and the row behind the last accepted token yields the target's own

*Greedy*: the longest prefix that equals the target's argmax; then the argmax that differed, or the
one behind the block.

*Sampling* (Leviathan et al. 2023; Chen et al. 2023): x ~ q is accepted with probability
min(1, p(x) / q(x)), left to right. The first rejection emits a token from the residual
max(p - q, 0), normalised, and drops the rest; a block without rejection ends in a token from the
next row. What is emitted is then distributed as p, whatever q is:

    q(x) min(1, p(x)/q(x))  +  (1 - sum of the former) * residual(x)   =   p(x)

on one condition: q is the distribution that x was really drawn from. A draft without `probs` is a
deterministic guess, so its q is one-hot: x is accepted with probability p(x), and the residual is p
without x. That is the same as drawing y ~ p and accepting x if y is x, else emitting y; so it is
done, and a seeded text then equals plain decoding's. A softmax in place of that one-hot biases the
text.

p is the request's whole law (bias, penalties, `min_tokens`, temperature, filters; `sampling`),
taken row by row. An empty draft makes all of this plain decoding, on the same path.

*Coupled.* A draft may go one token further than the pass: k rows for k tokens. Row k - 1 then
judges token k by the same rule instead of drawing a bonus of its own, so whatever is emitted there
has the same law, but it is the guessed token as often as acceptance allows, and a block that was
prepared behind that token can be used (`engine.pipeline`). The verdict reads as ever: k - 1 drafts
accepted at most, and the token behind them.

Not promised: that a seeded *sampled* text equals the one of plain decoding under the same seed
when the draft carries `probs`. Its law is the same; its random numbers are spent differently. Nor
does `accept` know when a text ends: an end of text inside the block is an ordinary token here, and
the engine cuts behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from dspark.sampling import argmax, distribution, draw, process_logits, token_logprobs
from dspark.types import Draft, SamplingParams, Verdict


def accept(
    draft: Draft,
    logits: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    prompt_len: int,
    eos_ids: Collection[int],
    rng: np.random.Generator,
) -> Verdict:
    """The accepted prefix of `draft` and the target's own token behind it.

    draft       k tokens (0 is plain decoding); `probs` [k, V] fp32 or None for one-hot
    logits      [k + 1, V] fp32 raw target logits; row i predicts the token behind draft[:i];
                [k, V] if the last token is coupled
    history     prompt and emitted tokens, the last one the anchor; the first `prompt_len` prompt
    eos_ids     masked before `min_tokens`
    rng         the request's accepting stream; greedy takes nothing from it, sampling one uniform
                for every token tested or drawn (one-hot drafts: one for every token emitted)

    Returns accepted + 1 tokens, of which a coupled one is always the last, with log-probabilities
    of the raw logits if `params` wants them.
    """
    verified = logits.shape[0] - 1
    assert verified <= len(draft) <= verified + 1, "one row for each draft token, perhaps one more"
    processed = process_logits(logits, params, history, prompt_len, draft.tokens, eos_ids)
    if params.is_greedy:
        accepted, own = _match(draft.tokens, argmax(processed))
    else:
        accepted, own = _reject(draft, processed, params, rng)
    accepted = min(accepted, verified)
    tokens = (*draft.tokens[:accepted], own)
    wanted = params.logprobs
    return Verdict(
        accepted, tokens, None if wanted is None else token_logprobs(logits, tokens, wanted)
    )


def _match(tokens: Sequence[int], choice: Sequence[int]) -> tuple[int, int]:
    """Greedy: p is one-hot at the argmax."""
    accepted = 0
    while accepted < len(choice) - 1 and tokens[accepted] == choice[accepted]:
        accepted += 1
    return accepted, choice[accepted]


def _reject(
    draft: Draft, processed: Tensor, params: SamplingParams, rng: np.random.Generator
) -> tuple[int, int]:
    """Lossless rejection sampling. Rows become distributions only as far as they are reached."""
    for i, x in enumerate(draft.tokens):
        p = distribution(processed[i : i + 1], params)[0]
        if draft.probs is None:
            y = draw(p, rng.random())
            if y == x:
                continue
            return i, y
        q_x = float(draft.probs[i, x])
        # u < p(x)/q(x) without the division: q(x) = 0 accepts what p allows, p(x) = 0 never passes.
        if rng.random() * q_x < float(p[x]):
            continue
        residual = (p - draft.probs[i]).clamp_(min=0.0)
        # p == q up to rounding leaves no residual; then p itself is the limit.
        return i, draw(residual if residual.any() else p, rng.random())
    if len(draft) == len(processed):  # the coupled token passed
        return len(draft), draft.tokens[-1]
    p = distribution(processed[-1:], params)[0]
    return len(draft), draw(p, rng.random())
