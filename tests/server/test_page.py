"""The page in a real browser: what a person does, and what they see.

Needs Chromium (`apt install chromium`) and the package playwright; without them it is skipped. The
model is scripted: every second block of drafts is wrong from its third token on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.chats import v4
from tests.server.served import EOS, Running, Scripted, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: apt install chromium"
)

PROMPT = b"user: Hello\n"
TEXT = "Once upon a time <b>a lighthouse</b> & its keeper 😀 saw a ship.\nThe end."


def model(seconds: float = 0.0, text: str = TEXT, slots: int = 2) -> Scripted:
    def right(n: int, row: int) -> int:
        return 99 if n % 2 else 2

    ids = [*text.encode(), EOS]
    return Scripted(ids, PROMPT, right=right, slots=slots, seconds=seconds, context=2048)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def visiting(browser: Browser, url: str, *, ready: bool = True, **context: Any) -> Iterator[Page]:
    """The page at `url`; nothing may be left on its console."""
    complaints: list[str] = []
    asked: list[str] = []
    tab = browser.new_context(**context)
    tab.set_default_timeout(120_000)  # milliseconds; a busy machine is no failure
    page = tab.new_page()
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("request", lambda r: asked.append(r.url))
    page.goto(url)
    if ready:
        page.wait_for_selector("[data-state=ready]")
    yield page
    tab.close()
    assert all(u.startswith(url) for u in asked), "a request to elsewhere"
    # The browser reports every status above 399 by itself.
    assert [c for c in complaints if "Failed to load resource" not in c] == []


def ask(page: Page, text: str = "Hello") -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def ended(page: Page) -> None:
    page.wait_for_selector(".answer:last-child .note:not(:empty)")
    page.wait_for_selector("#send", state="visible")


def asked_of(s: Running) -> list[Any]:
    """Every request's parameters, as they reach the engine."""
    seen: list[Any] = []
    engine = s.worker.ready().engine
    real = engine.submit

    def submit(request: Any) -> None:
        seen.append(request)
        real(request)

    engine.submit = submit  # type: ignore[method-assign]
    return seen


def test_an_answer_streams_in_colours(browser: Browser) -> None:
    with serving(model()) as s, visiting(browser, s.url) as page:
        assert "scripted · drafter oracle" in page.inner_text("#served")
        assert page.inner_text("#plain") == "50.0"
        page.check("#show-rejected")
        ask(page)
        ended(page)
        text = page.locator(".answer .text")
        spans = text.locator(".t")
        shown = "".join(spans.all_text_contents())
        assert shown == TEXT  # as it is: neither markup nor half a character
        accepted, own = text.locator(".t.a").count(), text.locator(".t.o").count()
        rejected = text.locator(".rejected")
        assert accepted > own > 0 and rejected.count() > 0 and rejected.first.is_visible()
        colours = {
            name: page.locator(f".answer {name}").first.evaluate(
                "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).textDecorationLine]"
            )
            for name in (".t.a", ".t.o", ".rejected")
        }
        assert len({tuple(c) for c in colours.values()}) == 3
        assert colours[".rejected"][1] == "line-through"
        page.uncheck("#show-rejected")
        assert not rejected.first.is_visible()
        page.uncheck("#show-colours")
        assert (
            text.locator(".t.a").first.evaluate("e => getComputedStyle(e).backgroundColor")
            == "rgba(0, 0, 0, 0)"
        )
        s.idle()


def test_the_figures_are_the_servers(browser: Browser) -> None:
    with serving(model()) as s, visiting(browser, s.url) as page:
        assert page.inner_text("#length") == "–"
        ask(page)
        ended(page)
        rounds = int(page.inner_text("#rounds"))
        assert page.locator("#strip g").count() == rounds
        drafts = s.series("dspark:spec_decode_num_drafts_total")
        accepted = s.series("dspark:spec_decode_num_accepted_tokens_total")
        checked = s.series("dspark:spec_decode_num_draft_tokens_total")
        assert drafts <= rounds <= drafts + 1
        assert page.locator("#strip .accepted").count() == accepted
        assert page.inner_text("#acceptance") == f"{round(accepted / checked * 100)} %"
        tokens = len(TEXT.encode()) + 1
        assert page.inner_text("#length") == f"{(tokens - 1) / rounds:.2f}"
        assert page.inner_text(".answer .note").startswith(f"{tokens} tokens · ")
        rate, times = float(page.inner_text("#rate")), page.inner_text("#times")
        assert float(times.removesuffix("×")) == pytest.approx(rate / 50, rel=0.01, abs=0.01)
        assert "measured when the server started" in (page.text_content("#speed-note") or "")
        assert f"{rounds} rounds" in (page.get_attribute("#strip", "aria-label") or "")
        assert page.text_content("#announce") == TEXT


def test_rounds_and_their_tokens_point_at_each_other(browser: Browser) -> None:
    with serving(model()) as s, visiting(browser, s.url) as page:
        ask(page)
        ended(page)
        page.focus("#strip")
        page.keyboard.press("Home")
        assert page.inner_text("#readout").startswith("Round 1: 5 guessed, 5 checked, 2 accepted")
        # Two accepted, the model's own, and three rejected, which are there but not shown.
        assert page.locator(".answer .lit").count() == 6
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#readout").startswith("Round 2: 5 guessed, 5 checked, 5 accepted")
        assert page.locator(".answer .lit").count() == 6
        page.locator('.answer [data-round="2"]').first.hover()
        assert page.locator("#strip g.lit").count() == 1
        assert page.inner_text("#readout").startswith("Round 3")


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_frees_the_slot_and_keeps_the_text(browser: Browser, how: str) -> None:
    slow = model(seconds=0.05, text="word " * 200, slots=1)
    with serving(slow) as s, visiting(browser, s.url) as page:
        seen = asked_of(s)
        ask(page)
        page.wait_for_selector("#strip g:nth-child(3)", state="attached")
        assert page.is_hidden("#send")
        if how == "button":
            page.click("#stop")
        else:
            page.keyboard.press("Escape")
        ended(page)
        assert page.inner_text(".note").endswith("stopped")
        s.wait(lambda: s.worker.open_requests == 0)
        s.idle()
        kept = page.locator(".answer .t").all_text_contents()
        assert 3 < len(kept) < 900
        # The next turn carries the conversation, the stopped answer included.
        page.fill("#question", "More")
        page.press("#question", "Enter")
        s.wait(lambda: len(seen) == 2)
        ids = bytes(seen[1].prompt_ids).decode()
        assert ids == f"user: Hello\nassistant: {''.join(kept)}\nuser: More\n"


def test_settings_reach_the_server_and_are_kept(browser: Browser) -> None:
    with serving(model()) as s, visiting(browser, s.url) as page:
        seen = asked_of(s)
        page.click("#open-settings")
        for field, value in {"temperature": "0.7", "max-tokens": "9", "seed": "42"}.items():
            page.fill(f"#{field}", value)
        page.keyboard.press("Escape")
        ask(page)
        ended(page)
        assert page.inner_text(".note").endswith("longest answer reached")
        p = seen[0].params
        assert (p.temperature, p.max_tokens, p.seed) == (0.7, 9, 42)
        page.reload()
        page.wait_for_selector("[data-state=ready]")
        assert page.input_value("#seed") == "42"


def test_reasoning_is_folded_away(browser: Browser) -> None:
    """Open while the model thinks, closed when it answers, and no part of the conversation."""
    hello: Any = [{"role": "user", "content": "Hello"}]
    thought, said = "A greeting? <b>Yes.</b>", "Good evening."
    options: Any = {"thinking": True, "reasoning_effort": "low"}
    scripted = v4(f"{thought}</think>{said}", hello, right="some", **options)
    with serving(scripted) as s, visiting(browser, s.url) as page:
        seen = asked_of(s)
        page.click("#open-settings")
        page.select_option("#effort", "low")
        page.click("#settings button[type=submit]")
        scripted.target.seconds = 0.3
        ask(page)
        page.wait_for_selector(".thought[open] .t")
        scripted.target.seconds = 0.0
        ended(page)
        fold = page.locator(".answer .thought")
        assert fold.get_attribute("open") is None
        assert "".join(fold.locator(".t").all_text_contents()) == thought
        answer = page.locator(".answer > .text")
        assert "".join(answer.locator(".t").all_text_contents()) == said
        assert not fold.locator(".text").is_visible() and answer.is_visible()
        fold.locator("summary").press("Enter")
        assert fold.locator(".text").is_visible()
        assert "</think>" not in page.locator(".answer").inner_text()
        ask(page, "Again")
        ended(page)
    text = bytes(seen[1].prompt_ids).decode()
    assert said in text and "greeting" not in text


def test_only_a_model_that_reasons_is_asked_to(browser: Browser) -> None:
    with serving(model()) as s, visiting(browser, s.url) as page:
        page.click("#open-settings")
        assert not page.locator("#effort-row").is_visible()


def test_an_error_is_said_and_its_turn_is_taken_back(browser: Browser) -> None:
    with serving(model()) as s, visiting(browser, s.url) as page:
        seen = asked_of(s)
        ask(page, "x " * 40_000)
        assert "shorten it" in page.inner_text(".answer .error[role=alert]")
        ask(page)
        ended(page)
        assert bytes(seen[0].prompt_ids) == PROMPT


def test_the_key(browser: Browser) -> None:
    with serving(model(), api_key="secret") as s, visiting(browser, s.url, ready=False) as page:
        page.wait_for_selector("#key", state="visible")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.get_by_text("The server does not know this key.").wait_for()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("[data-state=ready]")
        ask(page)
        ended(page)
        assert "".join(page.locator(".answer .t").all_text_contents()) == TEXT


def test_keys_and_a_new_chat(browser: Browser) -> None:
    with serving(model()) as s, visiting(browser, s.url) as page:
        page.fill("#question", "one")
        page.press("#question", "Shift+Enter")
        assert page.input_value("#question") == "one\n"
        assert page.locator(".question").count() == 0
        ask(page)
        ended(page)
        page.click("#reset")
        assert page.locator(".answer").count() == 0 and page.is_visible("#empty")
        assert page.inner_text("#rounds") == "–"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1400])
def test_it_fits_and_can_be_read(browser: Browser, width: int, scheme: Any) -> None:
    """No sideways scrolling; text has a contrast of 4.5 at least (WCAG 2.2, 1.4.3)."""
    size: Any = {"width": width, "height": 740}
    with (
        serving(model()) as s,
        visiting(browser, s.url, viewport=size, color_scheme=scheme) as page,
    ):
        ask(page)
        ended(page)
        page.evaluate("document.body.classList.add('with-rejected')")
        for region in ("html", "header", "#conversation", "#panel", "#composer"):
            wide = page.locator(region).evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert wide[0] <= wide[1] + 1, region
        assert page.is_visible("#times") and page.is_visible("#strip") and page.is_visible("#send")
        for selector in (".t.a", ".t.o", ".rejected", ".note", "#model", "#length", ".figures dt"):
            pair = page.locator(f"{selector}:visible").first.evaluate(COLOURS)
            assert contrast(*pair) >= 4.5, (selector, pair)


COLOURS = """e => {
  const ink = getComputedStyle(e).color;
  const paper = () => getComputedStyle(e).backgroundColor;
  while (paper() === 'rgba(0, 0, 0, 0)' && e.parentElement) e = e.parentElement;
  return [ink, paper()];
}"""


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        def linear(c: float) -> float:
            return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4

        r, g, b = (linear(int(c) / 255) for c in colour[4:-1].split(", "))
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_motion_is_reduced_where_that_is_wanted(browser: Browser) -> None:
    with (
        serving(model(seconds=0.5)) as s,
        visiting(browser, s.url, reduced_motion="reduce") as page,
    ):
        ask(page)
        waiting = page.locator(".text.waiting")
        waiting.wait_for(state="attached")
        assert waiting.evaluate("e => getComputedStyle(e, '::after').animationName") == "none"
        page.click("#stop")
