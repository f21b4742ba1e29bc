"""One text with one lane and with two, drawn on a time axis: what ran when, and what stood idle.

    Chrome trace   a JSON file for chrome://tracing or Perfetto: two processes, `before` (pipeline
                   off) and `after`, each with a lane that verifies and one that drafts
    picture        the same as a PNG beside it, of the first WINDOW_MS

Blocks of the drafting lane are `hit` (drafted ahead and used), `miss` (drafted ahead and not) and
`fresh` (drafted from true features, because nothing was ready: the repair behind a miss). Idle is
the share of the time from the first to the last block in which a lane did nothing; drafts that were
not used count as work. Before, both lanes are one thread that takes turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.bench.compare import BASELINE, BenchConfig
from dspark.bench.picture import check_picture, replacing
from dspark.errors import ConfigError
from dspark.types import Round, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dspark.bench.prompts import PromptSet
    from dspark.llm import LLM

LANES = ("verify", "draft")
COLOURS = {"verify": "#56B4E9", "hit": "#009E73", "miss": "#D55E00", "fresh": "#E69F00"}
"""Of Okabe and Ito's palette: told apart by colour-blind readers, too."""
MEANING = {
    "verify": "pass of the target",
    "hit": "drafted ahead, used",
    "miss": "drafted ahead, not used",
    "fresh": "drafted from true features",
}
WINDOW_MS = 600.0


@dataclass(frozen=True)
class Lanes:
    """Spans of one text by `before` and `after`, and what they are of."""

    drafter: str
    mode: str
    emulated: str | None
    spans: Mapping[str, Sequence[Span]]

    @property
    def idle(self) -> dict[str, dict[str, float]]:
        """Share of idle time of each lane, before and after."""
        return {when: idle_shares(spans) for when, spans in self.spans.items()}


def lane_of(span: Span) -> str:
    return "verify" if span.kind == "verify" else "draft"


def idle_shares(spans: Sequence[Span]) -> dict[str, float]:
    """Of the time from the first to the last block; blocks of a lane that overlap count once."""
    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    shares = {}
    for lane in LANES:
        busy, reached = 0.0, begin
        for s in sorted((s for s in spans if lane_of(s) == lane), key=lambda s: s.start):
            busy += max(s.end - max(s.start, reached), 0.0)
            reached = max(reached, s.end)
        shares[lane] = 1 - busy / (end - begin) if end > begin else 0.0
    return shares


def check(file: Path) -> None:
    """Raise ConfigError or ResourceError if `write` could not write `file` and its picture."""
    if file.suffix != ".json":
        raise ConfigError(f"cannot write the timeline {file}: expected a name ending in .json")
    check_picture(file.with_suffix(".png"))


def record(llm: LLM, prompts: PromptSet, config: BenchConfig) -> Lanes:
    """The first prompt with the first drafter that can have two lanes, without and with them.

    Raises ConfigError if there is none.
    """
    modes = [m for m in config.pipeline if m != "off"] or ["on"]
    for drafter in config.drafters:
        if drafter == BASELINE:
            continue
        llm.set_drafter(drafter, config.num_draft_tokens, verify=config.verify, pipeline=modes[0])
        if llm.pipeline != "off":
            _play(llm, prompts, config, [])  # the first rounds after a start are slow
            timeline = llm.timeline()
            assert timeline is not None
            _play(llm, prompts, config, [])
            after = timeline.spans
            llm.set_drafter(drafter, config.num_draft_tokens, verify=config.verify, pipeline="off")
            before: list[Span] = []
            _play(llm, prompts, config, before)
            spans = {"before": before, "after": after}
            emulated = None if llm.emulation is None else str(llm.emulation)
            return Lanes(drafter, modes[0], emulated, spans)
    raise ConfigError(
        "there is no timeline of two lanes: none of the drafters got a second one (--pipeline on"
        " asks for it; drafters without weights have none)"
    )


def _play(llm: LLM, prompts: PromptSet, config: BenchConfig, spans: list[Span]) -> None:
    """One text; `spans` are filled from the times of its rounds, as one lane spends them."""

    def on_round(r: Round) -> None:
        end = time.perf_counter() - r.other_ms / 2e3  # half of the rest lies behind the pass
        middle = end - r.verify_ms / 1e3
        spans.append(Span("fresh", middle - r.draft_ms / 1e3, middle))
        spans.append(Span("verify", middle, end))

    message = [{"role": "user", "content": prompts.prompts[0]}]
    for _ in llm.stream(message, config.params(0), on_round):
        pass


def write(lanes: Lanes, file: Path) -> None:
    """The trace to `file` and the picture beside it; neither is left half-written."""
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(chrome(lanes)) + "\n", encoding="utf-8")
    with replacing(file.with_suffix(".png")) as temporary:
        _draw(lanes, temporary)


def chrome(lanes: Lanes) -> dict[str, Any]:
    """Complete events ("ph": "X") in microseconds, and names of their processes and threads."""
    events: list[dict[str, Any]] = []
    for process, (when, spans) in enumerate(lanes.spans.items()):
        name = {"name": f"{when}: pipeline {'off' if when == 'before' else lanes.mode}"}
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": name})
        for thread, lane in enumerate(LANES):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": thread,
                 "args": {"name": lane}}
            )  # fmt: skip
        begin = min(s.start for s in spans)
        events += [
            {
                "ph": "X",
                "name": s.kind,
                "cat": MEANING[s.kind],
                "pid": process,
                "tid": LANES.index(lane_of(s)),
                "ts": round((s.start - begin) * 1e6, 1),
                "dur": round((s.end - s.start) * 1e6, 1),
            }
            for s in spans
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "drafter": lanes.drafter,
            "times": f"emulated: {lanes.emulated}" if lanes.emulated else "measured",
            "idle": lanes.idle,
        },
    }


def _draw(lanes: Lanes, file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    title = f"Two lanes: {lanes.drafter}, pipeline off and {lanes.mode}"
    if lanes.emulated is not None:
        title += f" (emulated device: {lanes.emulated})"
    figure.suptitle(title)
    for row, (when, spans) in enumerate(lanes.spans.items()):
        axes = figure.add_subplot(2, 1, row + 1)
        _panel(axes, when, spans, lanes.idle[when])
    axes.set_xlabel("milliseconds")
    handles = [Patch(color=c, label=MEANING[k]) for k, c in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=150)


def _panel(axes: Axes, when: str, spans: Sequence[Span], idle: Mapping[str, float]) -> None:
    begin = min(s.start for s in spans)
    for s in spans:
        start, width = (s.start - begin) * 1e3, (s.end - s.start) * 1e3
        if start < WINDOW_MS:
            height = len(LANES) - 1 - LANES.index(lane_of(s))
            axes.barh(height, width, 0.8, start, color=COLOURS[s.kind], edgecolor="white",
                      linewidth=0.4)  # fmt: skip
    names = [f"{lane}\nidle {idle[lane]:.0%}" for lane in LANES]
    axes.set_yticks(range(len(LANES)), names[::-1])
    axes.set_xlim(0, WINDOW_MS)
    axes.set_title(when, loc="left", fontsize=10)
