"""`--trace`: a line for each round, what was guessed and what became of it.

    prefill  → "The"
    round 1 · 2 of 3 accepted · draft 0.1 + verify 9.8 + other 0.6 ms  ✓" sky" ✓" is" ✗" red" → " b"

A tick marks a draft token that was accepted (green), a cross one that was rejected (dim red), the
arrow the target's own token behind them. A draft token in brackets was not judged: the schedule
found it too unlikely to be worth a row, or the text ended before it. The marks say it all, the
colours repeat it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from dspark.cli.ui import Paint
from dspark.types import Round


def _shown(text: str) -> str:
    # JSON's quotes make blanks and line ends visible.
    return json.dumps(text, ensure_ascii=False)


def prefill_line(token: int, text_of: Callable[[int], str], paint: Paint) -> str:
    """The first token comes from the prompt's own pass and belongs to no round."""
    return f"{paint.muted('prefill')}  → {_shown(text_of(token))}"


def trace_line(r: Round, text_of: Callable[[int], str], paint: Paint) -> str:
    def shown(tokens: tuple[int, ...]) -> list[str]:
        return [_shown(text_of(t)) for t in tokens]

    accepted, own = r.emitted[: r.accepted], r.emitted[r.accepted :]
    # Where the text ends among accepted tokens, nothing is said about the drafts behind its end.
    judged = r.verified if own else r.accepted
    tokens = [paint.accepted("✓" + t) for t in shown(accepted)]
    tokens += [paint.rejected("✗" + t) for t in shown(r.drafted[r.accepted : judged])]
    tokens += [paint.muted(f"({t})") for t in shown(r.drafted[judged:])]
    tokens += ["→ " + t for t in shown(own)]
    numbers = (
        f"round {r.index + 1} · {r.accepted} of {r.verified} accepted · "
        f"draft {r.draft_ms:.1f} + verify {r.verify_ms:.1f} + other {r.other_ms:.1f} ms"
    )
    return f"{paint.muted(numbers)}  {' '.join(tokens)}"
