"""The closed loop: figures of known schedules, what counts and what does not, the verdict."""

from __future__ import annotations

from itertools import islice, repeat
from typing import Any

import pytest

from dspark.bench.closed_loop import Loop, Text, questions
from tests.bench.load_llm import TICK, LoadLLM, Ticks


def loop_of(llm: LoadLLM, *asked: tuple[int, int], texts: Any = None) -> Loop:
    """Users who ask (text, length) again and again."""
    return Loop(llm, texts or llm.texts, [repeat(q) for q in asked], Ticks())


@pytest.fixture
def llm() -> LoadLLM:
    made = LoadLLM()
    made.set_drafter("best", verify="all")
    return made


def test_figures_of_one_user_add_up(llm: LoadLLM) -> None:
    """Seven tokens: one of the prefill, three drafts and the bonus, one draft and the bonus."""
    loop = loop_of(llm, (0, 7))
    loop.warm_up(2)  # with the first token's step: one whole answer
    window = loop.measure(21)
    loop.close()
    assert (window.steps, window.tokens, window.texts) == (6, 21, 3)
    assert window.end - window.start == pytest.approx(9 * TICK)
    assert window.seconds == pytest.approx(6 * TICK)  # three steps read the prompt
    s = window.stats
    assert (s.rounds, s.drafted, s.verified, s.accepted, s.round_tokens) == (6, 12, 12, 12, 18)
    assert s.accepted_length == 3
    # What was asked before the window opened counts no time to its first token.
    assert window.ttft_ms == pytest.approx([10, 10])
    assert [n for _, n in window.gaps] == [4, 2] * 3
    assert [ms for ms, _ in window.gaps] == pytest.approx([10] * 6)
    assert loop.speeds() == pytest.approx([18 / (6 * TICK)])
    assert list(loop.differences()) == []


def test_users_share_passes_and_ask_again_at_once(llm: LoadLLM) -> None:
    """Answers of seven tokens take three steps, those of four two: both have ended after six.

    One of them reads its prompt in steps 1, 3, 4 and 5, so 2 and 6 are counted by themselves.
    """
    loop = loop_of(llm, (0, 7), (1, 4))
    loop.warm_up(5)
    window = loop.measure(26)
    loop.close()
    assert (window.steps, window.tokens, window.texts) == (2, 26, 5)
    assert window.stats.rounds == 2 * 2
    assert window.stats.verified == (3 + 2) + (1 + 2)
    assert len(window.gaps) == 4 + 3  # waiting counts whatever the machine did
    assert loop.speeds() == pytest.approx([(4 + 2) / (2 * TICK), (3 + 3) / (2 * TICK)])


def test_plain_rounds_yield_one_token_a_step(llm: LoadLLM) -> None:
    llm.set_drafter("none")
    loop = loop_of(llm, (0, 16), (1, 16))
    loop.warm_up(3)
    window = loop.measure(16)
    loop.close()
    assert (window.steps, window.stats.rounds, window.stats.drafted) == (8, 16, 0)
    assert loop.speeds() == pytest.approx([1 / TICK] * 2)


def test_an_answer_that_runs_when_the_window_opens_counts_from_there(llm: LoadLLM) -> None:
    llm.set_drafter("none")
    loop = loop_of(llm, (0, 16))
    loop.warm_up(3)
    window = loop.measure(1)
    loop.close()
    assert [ms for ms, _ in window.gaps] == pytest.approx([10])


@pytest.mark.parametrize("length", [7, 16], ids=["ended", "in flight"])
def test_a_wrong_text_is_found(llm: LoadLLM, length: int) -> None:
    """Also in a text that is cancelled behind the window, as far as it came."""
    first, second = llm.texts
    wrong = Text(first.prompt, (*first.plain[:4], first.plain[4] ^ 1, *first.plain[5:]))
    loop = loop_of(llm, (0, length), texts=(wrong, second))
    loop.warm_up(0)
    loop.measure(4 if length == 16 else 6)
    loop.close()
    assert set(loop.differences()) == {"prompt 1 was answered differently from token 5 on"}


def test_a_text_that_ends_too_early_is_found(llm: LoadLLM) -> None:
    first, second = llm.texts
    longer = Text(first.prompt, first.plain[:6])
    loop = loop_of(llm, (0, 7), texts=(longer, second))
    loop.warm_up(2)
    loop.close()
    (found,) = loop.differences()
    assert found.endswith("from token 7 on")


def test_whatever_ends_it_leaves_no_request_behind(llm: LoadLLM) -> None:
    loop = loop_of(llm, (0, 16), (1, 16))
    llm.engine.target.forward, step = fail, llm.engine.target.forward  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.warm_up(1)
    loop.close()
    assert not llm.engine.has_work and llm.engine.on_round is None
    llm.engine.target.forward = step  # type: ignore[method-assign]
    assert len(llm.generate("first")[0].token_ids) > 0


def fail(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_questions_are_drawn_from_the_seed() -> None:
    asked = list(islice(questions("a", 5, 40), 50))
    assert asked == list(islice(questions("a", 5, 40), 50))
    assert asked != list(islice(questions("b", 5, 40), 50))
    for at in range(0, 50, 5):  # every text once before any comes again
        assert {text for text, _ in asked[at : at + 5]} == set(range(5))
    lengths = [n for _, n in asked]
    assert all(10 <= n <= 40 for n in lengths[1:]) and len(set(lengths)) > 10
    firsts = [next(questions(str(user), 5, 40))[1] for user in range(200)]
    assert min(firsts) < 5 and all(1 <= n <= 40 for n in firsts)
