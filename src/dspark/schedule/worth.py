"""Does a drafter pay on this machine at all, before a single text was written with it?

A fixed draft length k yields, for conditional acceptance c_1, c_2, ... (what training measured),

    tokens(k) = 1 + c_1 + c_1 c_2 + ... + c_1 ... c_k

in a round that costs what the table says for k + 1 rows and its drafting. Schedules that look at
confidences do somewhat better than the best fixed length, never worse, so a gain below 1 is not
quite the last word; it is what can be said beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from dspark.schedule.policy import Cost

CONTEXT = 256.0


def expected_gain(cost: Cost, acceptance: Sequence[float], block: int) -> float:
    """Speed of one request with the best fixed length up to `block`, over plain decoding.

    acceptance  [k] that draft k is accepted, given that all before it were
    """
    tokens: list[float] = list(accumulate(accumulate(acceptance[:block], mul), initial=1.0))
    rows = cost.curve(1, len(tokens), requests=1, context=CONTEXT, block=block)
    plain = cost.curve(1, 1, requests=1, context=CONTEXT, block=0)[0]
    return max(t * plain / ms for t, ms in zip(tokens[1:], rows[1:], strict=True))
