"""From logits to a distribution, from a distribution to a token, from a seed to randomness.

The law of a token is made in two stages, and everybody who draws goes through the same two:

    raw logits --process_logits--> processed logits --distribution--> probabilities --draw--> token
               bias, penalties,                     temperature,
               min_tokens, grammar                  top-k, top-p, min-p

*Stage one depends on the tokens before*, so in a block every row has its own history: row i is
judged with `history + draft[:i]`, exactly as plain decoding would have judged it had the draft been
emitted. Checking once a round instead is the classic way to lose losslessness (an end of text
before `min_tokens`, a penalty that lags a block behind).

*Stage two depends on its row only.* The target's rows and a drafter's rows use it alike: a drafter
that draws with the request's own temperature and filters is accepted more often, and correctness
does not care (see `verify`).

Randomness: a request owns two independent streams, one to draft and one to accept. With one stream,
a drafter that draws more or less would change what the target emits.

Not promised: the order of filters is this project's (`SamplingParams`); engines that apply min-p
before top-p give another law. Rows are assumed free of NaN and to hold one finite logit at least;
`check_params` refuses requests that would mask a whole row.

Shapes: K rows of a block, V vocabulary. Logits and probabilities are fp32 tensors, randomness comes
from NumPy. Nothing here changes the tensors it is given.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.errors import InvalidRequestError
from dspark.types import Draft, SamplingParams, TokenLogprob

BAN = -100.0
"""A logit bias of this or less makes the token impossible, not only unlikely (OpenAI)."""
MAX_BIAS = 1e6
"""Above, fp32 would drown the logits in the bias."""
HEADS = (256, 4096, sys.maxsize)
"""Candidates that top-p tries one after the other; sorting the whole vocabulary is the slow way."""


def check_params(params: SamplingParams, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
    """Refuse what only the vocabulary can tell to be wrong; the rest is `SamplingParams`' own.

    Raises InvalidRequestError for ids outside 0..vocab_size - 1 in `logit_bias` or
    `stop_token_ids`, for a bias above MAX_BIAS, and for a request that leaves no token to choose.
    """
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for i in ids:
            if not 0 <= i < vocab_size:
                raise InvalidRequestError(
                    f"{name} names token {i}: expected an id of this model, 0 to {vocab_size - 1}"
                )
    for i, bias in params.logit_bias.items():
        if bias > MAX_BIAS:
            raise InvalidRequestError(
                f"logit_bias of token {i} is {bias}: expected {MAX_BIAS:g} or less"
                " (100 all but forces a token)"
            )
    masked = {i for i, bias in params.logit_bias.items() if bias <= BAN}
    if params.min_tokens:
        masked |= {*eos_ids, *params.stop_token_ids}
    if len(masked) >= vocab_size:
        raise InvalidRequestError(
            f"logit_bias and min_tokens ban all {vocab_size} tokens: leave one to choose"
        )


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    prompt_len: int,
    draft: Sequence[int] = (),
    eos_ids: Collection[int] = (),
) -> Tensor:
    """Logit bias, penalties, `min_tokens` and grammar, each row with the history it would have had.

    logits      [K, V] fp32; row i predicts the token behind `history + draft[:i]`
    history     prompt and emitted tokens, the first `prompt_len` of them prompt
    draft       K - 1 tokens or more: what stands between row 0 and row i
    eos_ids     masked, with `stop_token_ids`, in rows before `min_tokens` (also under `ignore_eos`)

    Returns [K, V] fp32: `logits` itself when nothing applies (the usual case, free of any copy),
    a new tensor otherwise. Repetition is that of CTRL (Keskar et al. 2019, section 4.1) over prompt
    and text; presence and frequency are OpenAI's and count generated tokens only.
    """
    missing = params.min_tokens - (len(history) - prompt_len)  # tokens still due before row 0
    ends = sorted({*eos_ids, *params.stop_token_ids}) if missing > 0 else []
    if not (params.logit_bias or params.needs_history or ends or params.grammar is not None):
        return logits
    out = logits.clone()
    if params.logit_bias:
        ids = list(params.logit_bias)
        bias = [b if b > BAN else -math.inf for b in params.logit_bias.values()]
        out[:, ids] += torch.tensor(bias, dtype=out.dtype, device=out.device)
    if params.needs_history:
        _penalise(out, params, history, prompt_len, draft)
    if ends:
        out[:missing, ends] = -math.inf
    if params.grammar is not None:
        wrong = ~params.grammar.allowed(history[prompt_len:], draft[: len(out) - 1]).to(out.device)
        out.masked_fill_(wrong, -math.inf)
        nothing = out.isneginf().all(1)
        out[nothing] = logits[nothing].masked_fill(wrong[nothing], -math.inf)
    return out


def _penalise(
    out: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    prompt_len: int,
    draft: Sequence[int],
) -> None:
    """Penalties, in place. Only the U distinct ids that occur are gathered and written back."""
    rows = out.shape[0]
    start = 0 if params.repetition_penalty != 1 else prompt_len  # the prompt matters to CTRL only
    tokens = np.array([*history[start:], *draft[: rows - 1]], dtype=np.int64)
    if not tokens.size:
        return
    ids, where = np.unique(tokens, return_inverse=True)
    generated, now = prompt_len - start, len(history) - start

    def counts(first: int) -> Tensor:  # [K, U]: occurrences in tokens[first:] as row i knows them
        table = [np.bincount(where[first : now + i], minlength=len(ids)) for i in range(rows)]
        return torch.from_numpy(np.stack(table)).to(out.device)

    index = torch.from_numpy(ids).to(out.device)
    picked = out[:, index]
    if params.repetition_penalty != 1:
        r = params.repetition_penalty
        picked = torch.where(counts(0) > 0, torch.where(picked > 0, picked / r, picked * r), picked)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        n = counts(generated)
        picked = picked - params.frequency_penalty * n - params.presence_penalty * (n > 0)
    out[:, index] = picked


def argmax(logits: Tensor) -> list[int]:
    """The highest logit of each row of [K, V], the lowest id on a tie.

    NumPy promises the first of equals and is vectorised: 0.1 ms for 8 rows of 49152 on one core,
    where torch.argmax takes 0.7 ms.
    """
    if logits.device.type == "cpu":
        ids: list[int] = logits.numpy().argmax(axis=1).tolist()
        return ids
    return [int(i) for i in torch.argmax(logits, dim=1).tolist()]


def distribution(processed: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, top-p and min-p: processed logits [K, V] -> probabilities [K, V].

    Returns fp32 rows that sum to 1. Temperature 0 gives one-hot rows at `argmax`. Top-k and top-p
    rank by logit, the lower id first among equals, so a boundary that falls on a tie cuts it in the
    same place every time. Top-p sees the mass that top-k left, renormalised, and keeps the token
    that crosses p. Min-p compares with the most probable token, which no filter removes; filtering
    and renormalising leave that ratio as it is, so it does not matter against which it is taken.
    """
    if params.is_greedy:
        one_hot = torch.zeros_like(processed)
        one_hot[range(len(one_hot)), argmax(processed)] = 1.0
        return one_hot
    scaled = processed
    if params.temperature != 1:
        # Subtracting first keeps tiny temperatures finite; the clamp keeps them in fp32's range.
        top = processed.amax(dim=1, keepdim=True)
        scaled = (processed - top) / min(max(params.temperature, 1e-30), 1e30)
    probs = torch.softmax(scaled, dim=1)
    if 0 < params.top_k < probs.shape[1] or params.top_p < 1:
        kept = torch.zeros_like(probs)
        for out, logits, p in zip(kept, processed, probs, strict=True):
            ids = _nucleus(logits, p, params)
            out[ids] = p[ids] / p[ids].sum()
        probs = kept
    if params.min_p > 0:
        floor = params.min_p * probs.amax(dim=1, keepdim=True)
        probs = torch.where(probs >= floor, probs, 0.0)
        probs /= probs.sum(dim=1, keepdim=True)
    return probs


def _nucleus(logits: Tensor, probs: Tensor, params: SamplingParams) -> Tensor:
    """The ids that top-k and then top-p keep of one row [V], best first."""
    size = logits.shape[0]
    if 0 < params.top_k < size:
        ids = _best(logits, params.top_k)
        mass = probs[ids].cumsum(0, dtype=torch.float64)
        needed = params.top_p * float(mass[-1])
    else:
        needed = params.top_p * float(probs.sum(dtype=torch.float64))
        for head in HEADS:
            ids = _best(logits, min(head, size))
            mass = probs[ids].cumsum(0, dtype=torch.float64)
            if float(mass[-1]) >= needed:
                break
    if params.top_p == 1:
        return ids
    return ids[: 1 + int((mass[:-1] < needed).sum())]  # the one that crosses p stays


def _best(logits: Tensor, n: int) -> Tensor:
    """The ids of the n highest of [V], highest first, the lower id first among equals.

    torch.topk leaves the order of equals open; a threshold and a stable sort do not.
    """
    row = logits.cpu().numpy()
    ids = np.arange(len(row))
    if n < len(row):
        ids = np.flatnonzero(row >= np.partition(row, len(row) - n)[len(row) - n])
    order = np.argsort(-row[ids], kind="stable")[:n]
    return torch.from_numpy(ids[order]).to(logits.device)


def draw(probs: Tensor, u: float) -> int:
    """The token at quantile `u` in [0, 1] of weights [V]: the inverse of the cumulative sum.

    The weights need not sum to 1, so a residual can be drawn from as it is. Sums run in float64. A
    token of weight zero is never returned, not even when rounding carries u * total to the end.
    """
    cumulative = probs.cumsum(0, dtype=torch.float64).cpu().numpy()
    total = cumulative[-1]
    assert total > 0, "nothing to draw from"
    # right: the first sum above the quantile; a zero weight repeats the sum before it.
    token = int(cumulative.searchsorted(u * total, side="right"))
    return token if token < len(cumulative) else int(cumulative.searchsorted(total, side="left"))


def draft_from(logits: Tensor, params: SamplingParams, rng: np.random.Generator) -> Draft:
    """A draft from a drafter's logits [k, V], rows independent of one another.

    Greedy requests get the argmax and `probs=None`; others one uniform a token, drawn from the very
    tensor that travels as `Draft.probs`. A drafter whose rows depend on the tokens drawn before
    (a Markov head) calls `distribution` and `draw` row by row itself.
    """
    if params.is_greedy:
        return Draft(tuple(argmax(logits)))
    probs = distribution(logits, params)
    return Draft(tuple(draw(q, rng.random()) for q in probs), probs)


def streams(seed: int | None) -> tuple[np.random.Generator, np.random.Generator]:
    """(drafting, accepting): two independent Philox generators for one request.

    They depend on the seed alone, not on the request's id, its slot or its company. None takes
    fresh entropy from the system, so unseeded requests differ.
    """
    drafting, accepting = np.random.SeedSequence(seed).spawn(2)
    return (
        np.random.Generator(np.random.Philox(drafting)),
        np.random.Generator(np.random.Philox(accepting)),
    )


def token_logprobs(logits: Tensor, tokens: Sequence[int], n: int) -> tuple[TokenLogprob, ...]:
    """Natural log-probabilities of `tokens` under the raw target logits, and of the n best ids.

    logits [K, V] fp32 before any processing, K >= len(tokens); row i is that of token i. Equal
    logits rank by lower id. Temperature, filters and penalties do not show in these numbers.
    """
    logprobs = torch.log_softmax(logits[: len(tokens)], dim=1)
    out = []
    for token, raw, row in zip(tokens, logits, logprobs, strict=False):
        top: tuple[tuple[int, float], ...] = ()
        if n > 0:
            ids = _best(raw, min(n, len(raw)))
            top = tuple(zip(ids.tolist(), row[ids].tolist(), strict=True))
        out.append(TokenLogprob(token, float(row[token]), top))
    return tuple(out)
