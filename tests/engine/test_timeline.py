"""What both lanes did: kinds by their verdicts, taken piece by piece without growing."""

from __future__ import annotations

from dspark.engine.pipeline import PipelinedEngine
from dspark.engine.timeline import Timeline
from dspark.types import Span
from tests.engine.lanes import table_target
from tests.engine.oracle import ByteTokenizer, OracleDrafter, play, reference, request
from tests.engine.test_pipeline import Tight


def test_taken_in_pieces_is_the_whole() -> None:
    """Work on what was dropped is reported behind its verdict, even behind a `take`."""
    whole, pieces = Timeline(), Timeline()
    found: list[Span] = []

    def both(name: str, *what: object) -> None:
        for timeline in (whole, pieces):
            getattr(timeline, name)(*what)

    for n in range(50):
        a, b = 3 * n, 3 * n + 1
        both("verified", n, n + 0.5)
        both("drafted", a, n + 0.1, n + 0.2)
        both("name", a, "hit")
        both("name", b, "miss")
        found += pieces.take()
        assert pieces.take() == [] and len(pieces._kinds) <= 1
        both("drafted", b, n + 0.6, n + 0.7)
        both("name", b + 1, "miss")  # the lane had no time for it, and says nothing
    found += pieces.take()
    assert sorted(found, key=lambda s: s.start) == whole.spans
    assert {s.kind for s in found} == {"verify", "hit", "miss"}


def test_plain_rounds_are_recorded_and_prompts_are_not() -> None:
    """A text that samples under a seed is drafted for in turn with its passes."""
    model = table_target()
    prompt = (1, 2, 3)
    text = reference(model, prompt, 20)
    engine = PipelinedEngine(model, Tight(OracleDrafter({prompt: text}, 3)), ByteTokenizer())
    timeline = engine.record()
    played = play(engine, [request(prompt, max_tokens=12, seed=1, temperature=1.0)])
    verified = [s for s in timeline.spans if s.kind == "verify"]
    assert len(verified) == len(played.rounds["r"])
    engine.timeline = None
    play(engine, [request(prompt, max_tokens=12)])
    assert [s for s in timeline.spans if s.kind == "verify"] == verified
