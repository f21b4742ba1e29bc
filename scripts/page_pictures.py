"""The pictures of the page in docs/serving.md, made anew.

    python scripts/page_pictures.py                   all of them, into docs/pictures
    python scripts/page_pictures.py --only page-lanes --out elsewhere

Each group of pictures has a server of its own, begun here and ended here, and a browser that asks
it as a person would. Needs playwright, Chromium and Pillow. Figures on the pictures are those of
the machine at that moment and say nothing; look at the pictures before they are committed.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
GUESSING = ("--drafter", "dspark", "--verify", "all")
"""Whatever the machine is busy with: a picture without guesses shows nothing."""
NANO = (str(ROOT / "checkpoints" / "deepseek-v4-nano"), "--served-model-name", "deepseek-v4-nano")
PATIENCE_MS = 600_000
"""A busy machine is no failure."""
COLOURS = 200
"""Of a picture: enough for the page, and half of the bytes."""
DESKTOP: dict[str, Any] = {"viewport": {"width": 1200, "height": 760}}
TALL: dict[str, Any] = {"viewport": {"width": 1200, "height": 960}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 780},
    "device_scale_factor": 2,
    "has_touch": True,
}


@dataclass(frozen=True)
class Shot:
    """One picture: what is asked in which window, and what is done before it is taken."""

    name: str
    question: str
    then: Callable[[Page], None]
    window: dict[str, Any]
    settings: dict[str, str] = field(default_factory=dict)
    rejected: bool = False


def ended(page: Page) -> None:
    """The answer is complete."""
    page.wait_for_selector(".answer:last-child .note:not(:empty)", timeout=PATIENCE_MS)


def streaming(page: Page) -> None:
    """In the middle of an answer, some rounds of which have guessed in vain."""
    for what in ("g", ".rejected"):
        page.wait_for_selector(f"#strip {what} >> nth=19", state="attached", timeout=PATIENCE_MS)


def reasoned(page: Page) -> None:
    """The reasoning is folded away when the answer begins; here it shall be seen."""
    ended(page)
    fold = page.locator(".thought")
    if fold.get_attribute("open") is None:
        fold.locator("summary").click()


def pointed(page: Page) -> None:
    """A finished answer, with one of its rounds chosen by the keyboard."""
    ended(page)
    page.focus("#strip")
    for _ in range(4):
        page.keyboard.press("ArrowLeft")


LIST = "List the seven days of the week, then list them again in reverse order."
GROUPS: dict[tuple[str, ...], list[Shot]] = {
    (*NANO, *GUESSING): [
        Shot("page-light", "Why is the sky blue?", pointed, DESKTOP, {"max-tokens": "120"}, True),
        Shot("page-dark", LIST, ended, {**DESKTOP, "color_scheme": "dark"}, {"max-tokens": "110"}),
        Shot("page-phone", "Why do cats purr?", ended, PHONE, {"max-tokens": "70"}),
        Shot("page-stream", "Write a short story about a lighthouse keeper.", streaming, DESKTOP,
             {"max-tokens": "300", "temperature": "0.6"}, True),
    ],
    (*NANO, *GUESSING, "--pipeline", "on"): [
        Shot("page-reasoning", "What is a good way to learn a language?", reasoned, TALL,
             {"max-tokens": "120", "effort": "low"}),
        Shot("page-lanes", "What is a good way to learn a language?", ended, TALL,
             {"max-tokens": "110"}, True),
    ],
}  # fmt: skip


@contextmanager
def server(arguments: Sequence[str]) -> Iterator[str]:
    """Its address, once it is ready."""
    command = [sys.executable, "-m", "dspark", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url, said = "", []
            for line in process.stderr:
                said.append(line)
                if found := re.match(r"serving at (\S+)/v1", line):
                    url = found[1]
                if line.startswith("ready"):
                    break
            else:
                raise SystemExit(f"{' '.join(command)} did not start:\n{''.join(said)}")
            yield url
        finally:
            process.terminate()


def taken(browser: Browser, url: str, shot: Shot) -> bytes:
    """The picture, as PNG."""
    tab = browser.new_context(**shot.window)
    page = tab.new_page()
    page.goto(url)
    page.wait_for_selector("[data-state=ready]", timeout=PATIENCE_MS)
    page.click("#open-settings")
    for name, value in shot.settings.items():
        control = page.locator(f"#{name}")
        if control.evaluate("e => e.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
    page.click("#settings button[type=submit]")
    page.set_checked("#show-rejected", shot.rejected)
    page.fill("#question", shot.question)
    page.press("#question", "Enter")
    shot.then(page)
    page.wait_for_timeout(300)  # the bars have come to rest
    image = Image.open(io.BytesIO(page.screenshot()))
    tab.close()
    out = io.BytesIO()
    image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    names = [shot.name for shots in GROUPS.values() for shot in shots]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    chosen = parser.parse_args(argv)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    chosen.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for arguments, shots in GROUPS.items():
            wanted = [shot for shot in shots if shot.name in chosen.only]
            if not wanted:
                continue
            with server(arguments) as url:
                for shot in wanted:
                    picture = taken(browser, url, shot)
                    file = chosen.out / f"{shot.name}.png"
                    temporary = file.with_suffix(".tmp")
                    temporary.write_bytes(picture)
                    temporary.replace(file)
                    print(f"{file}: {len(picture) / 1e3:.0f} kB", flush=True)
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
