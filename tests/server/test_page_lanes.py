"""The page's timeline of two lanes, in a real browser: there with a pipeline, and only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.server.served import EOS, Scripted, serving
from tests.server.test_page import (
    COLOURS,
    PROMPT,
    TEXT,
    ask,
    browser,
    contrast,
    ended,
    model,
    pytestmark,
    visiting,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser", "pytestmark"]


def two_lanes(seconds: float = 0.002) -> Scripted:
    def right(n: int, row: int) -> int:
        return 99 if n % 5 else 2

    ids = [*TEXT.encode(), EOS]
    return Scripted(ids, PROMPT, right=right, lanes=True, seconds=seconds, context=2048)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_two_rows_with_their_idle_time(browser: Browser, width: int, scheme: Any) -> None:
    size: Any = {"width": width, "height": 740}
    with (
        serving(two_lanes()) as s,
        visiting(browser, s.url, viewport=size, color_scheme=scheme) as page,
    ):
        assert page.is_hidden("#lanes")
        ask(page)
        ended(page)
        page.wait_for_selector("#lanes", state="visible")
        bars = page.locator("#timeline rect")
        rounds = int(page.inner_text("#rounds"))
        page.wait_for_selector(f"#timeline .verify >> nth={rounds - 1}", state="attached")
        kinds = set(bars.evaluate_all("all => all.map(e => e.getAttribute('class'))"))
        assert kinds == {"verify", "fresh", "hit", "miss"}
        assert page.locator("#timeline .verify").count() == rounds
        rows = bars.evaluate_all(
            "all => all.map(e => [e.getAttribute('class') === 'verify', e.getBBox().y < 18])"
        )
        assert all(is_pass == above for is_pass, above in rows)
        looks = bars.evaluate_all(
            "all => all.map(e => getComputedStyle(e).fill + getComputedStyle(e).stroke)"
        )
        assert len(set(looks)) == 4
        idle = [page.inner_text(f"#{lane}-idle") for lane in ("model", "drafter")]
        assert all(0 <= int(share.removesuffix(" %")) <= 100 for share in idle)
        label = page.get_attribute("#timeline", "aria-label") or ""
        assert f"model is idle for {idle[0]}" in label and f"drafter for {idle[1]}" in label
        for region in ("html", "#panel", "#lanes"):
            wide = page.locator(region).evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert wide[0] <= wide[1] + 1, region
        for selector in ("#model-idle", "#lanes .figures dt", ".kinds li"):
            assert contrast(*page.locator(selector).first.evaluate(COLOURS)) >= 4.5
        page.click("#reset")
        page.wait_for_selector("#lanes", state="hidden")


def test_another_answer_has_its_own_lanes(browser: Browser) -> None:
    with serving(two_lanes()) as s, visiting(browser, s.url) as page:
        ask(page)
        ended(page)
        page.wait_for_selector("#lanes", state="visible")
        label = page.get_attribute("#timeline", "aria-label")
        ask(page, "x " * 40_000)  # refused: an answer without rounds
        page.wait_for_selector(".answer .error")
        page.wait_for_selector("#lanes", state="hidden")
        page.focus("#question")
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Shift+Tab")  # past the answer that was refused
        page.wait_for_selector("#lanes", state="visible")
        assert page.get_attribute("#timeline", "aria-label") == label


def test_old_spans_are_forgotten(browser: Browser) -> None:
    """Ten seconds, and no more than 400 spans, however fast the rounds."""
    with serving(model()) as s, visiting(browser, s.url) as page:
        kept = page.evaluate(
            """async () => {
              const { newest } = await import('/page/lanes.js');
              const span = (start) => ({ kind: 'verify', start_ms: start, end_ms: start + 1 });
              let slow = [], fast = [];
              for (let i = 0; i < 50; i += 1) slow = newest(slow, [span(i * 1000)]);
              for (let i = 0; i < 1000; i += 1) fast = newest(fast, [span(i * 2), span(i * 2 + 1)]);
              return [slow.length, slow[0].start_ms, fast.length, fast.at(-1).start_ms];
            }"""
        )
        assert kept == [10, 40_000, 400, 1999]
        ask(page)
        ended(page)
        assert page.is_hidden("#lanes")
