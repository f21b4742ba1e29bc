"""A first guess for the Markov head: the target's own law of a token given only the one before it.

A Markov head learns which token follows which. Most pairs are rare, and a run of a few million
anchors sees most of them never. But the target can be asked: behind the last tokens of a prompt,
put one token, and read the distribution of the next. That is one short row for every token, and
the matrix M of log-probabilities, [tokens, draft vocabulary], is nearly of low rank. Its best
approximation W1 W2 is where the head starts, so that the drafter begins at the target's bigram law
instead of at nothing (docs/training-log.md has the measured difference).

Rows and columns are weighted by the frequency of their tokens, so that the rank is spent where text
is. Tokens that the text never holds get the mean row.

Shape suffixes: N tokens that were asked for, V draft vocabulary, r rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeGuard

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters.block import BlockModel
from dspark.drafters.mtp import MtpModel
from dspark.models.build import build_target
from dspark.models.target import Segment, Target, pack
from dspark.train import state
from dspark.train.setup import Run

OVERSAMPLING, ITERATIONS = 16, 3
"""Of the randomised singular value decomposition (Halko et al. 2011)."""
PREFIX, SLOTS = 3, 128
"""Last tokens of a prompt in front of the asked-for token; tokens asked for in one pass."""
QUIET = 0.1
"""Of the last norm beside a started head: the base logits whisper until they know better."""
MAX_ROW_WEIGHT, COLUMN_POWER, MIN_COLUMN_WEIGHT = 20.0, 0.25, 1e-3


@torch.inference_mode()
def bigram_law(
    target: Target,
    prefix: Sequence[int],
    tokens: Tensor,
    columns: Tensor | None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Log-probabilities [N, V] fp16 of what follows prefix + one token, for each of `tokens` [N].

    columns   [V] the ids wanted; None: the whole vocabulary
    Uses all slots of the target: nothing else may be in flight.
    """
    slots, at = target.num_slots, len(prefix)
    target.forward(pack([Segment(s, 0, tuple(prefix), 1) for s in range(slots)], target.device))
    rows = []
    for part in torch.split(tokens, slots):
        segments = [Segment(s, at, (t,), 1) for s, t in enumerate(part.tolist())]
        logits = target.forward(pack(segments, target.device)).logits
        law = torch.log_softmax(logits.float(), -1)
        rows.append((law if columns is None else law[:, columns]).half().cpu())
        if on_progress is not None:
            on_progress(min(len(rows) * slots, len(tokens)), len(tokens))
    return torch.cat(rows)


def low_rank(law_NV: Tensor, counts_N: Tensor, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """W1 [N, r] with entries of unit size and W2 [V, r]: softmax(W1 W2^T) is nearly exp(law).

    counts_N   how often each token stands in the text
    A constant of each row is free, as the softmax does not see it.
    """
    x = law_NV.float()
    mass_N = counts_N.float() + 1
    row_N = (mass_N / mass_N.mean()).sqrt().clamp(max=MAX_ROW_WEIGHT).sqrt()
    mean_V = (mass_N @ x.exp()) / mass_N.sum()
    column_V = (mean_V / mean_V.mean()).clamp(min=MIN_COLUMN_WEIGHT) ** COLUMN_POWER
    x = (x - x.mean(1, keepdim=True)) * column_V
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)  # svd_lowrank takes no generator
    q = min(rank + OVERSAMPLING, *x.shape)
    _, s, v = torch.svd_lowrank(x * row_N[:, None], q=q, niter=ITERATIONS)
    torch.random.set_rng_state(state)
    r = min(rank, q)
    w2 = torch.zeros(x.shape[1], rank)
    w2[:, :r] = v[:, :r] * s[:r].sqrt()
    # Rows by least squares on their own, whatever their weight was in the decomposition.
    w1 = torch.zeros(x.shape[0], rank)
    w1[:, :r] = torch.linalg.lstsq(w2[:, :r], x.T).solution.T
    size = w1.std().clamp(min=1e-6)
    return w1 / size, w2 * size / column_V[:, None]


def needs_start(model: BlockModel | MtpModel, run: Run) -> TypeGuard[BlockModel]:
    """Whether this run begins with the target's law: it has a head, wants it, and is at step 0."""
    section = run.config.drafter
    wanted = section.markov_init == "target" and not section.start_from
    return (
        model.markov_head is not None and wanted and state.load(Path(run.config.train.out)) is None
    )


def start_markov_head(
    run: Run, model: BlockModel, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Put the target's bigram law into the Markov head.

    The law is asked for once and kept beside the features, for the next drafter of the same text.
    """
    head, ids = model.markov_head, run.draft_ids
    assert head is not None
    trained = torch.tensor([t for i in run.training for t in run.samples[i].tokens])
    counts = torch.bincount(trained, minlength=run.drafter.vocab_size)
    tokens = counts.nonzero()[:, 0]
    first = run.samples[run.training[0]]
    prefix = first.tokens[max(0, first.start - PREFIX) : first.start]
    digest = hashlib.sha256(f"{run.target_name} {prefix} {head.rank}".encode())
    for part in (counts, ids):
        if part is not None:
            digest.update(part.numpy().tobytes())
    file = run.directory / f"bigram-{digest.hexdigest()[:12]}.safetensors"
    if not file.exists():
        target = build_target(
            run.checkpoint, run.choice, num_slots=SLOTS, max_context=len(prefix) + 1
        )
        w1, w2 = low_rank(
            bigram_law(target, prefix, tokens, ids, on_progress), counts[tokens], head.rank
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"w1": w1, "w2": w2}, f"{file}.part")
        file.with_name(f"{file.name}.part").replace(file)
    found = load_file(file)
    with torch.no_grad():
        head.markov_w1.weight.copy_(found["w1"].mean(0, keepdim=True))
        head.markov_w1.weight[tokens] = found["w1"]
        head.markov_w2.weight[slice(None) if ids is None else ids] = found["w2"]
        model.norm.weight.mul_(QUIET)
