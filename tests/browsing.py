"""A page in Chromium, for the tests of the report and of `sufficit serve`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from report_content import decoded

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
in_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")


@contextmanager
def launched() -> Iterator[Any]:
    """A browser."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Tab:
    """A page in a browser, its console messages and its requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]")

    def drawn_words(self) -> list[str]:
        """What the viewer shows, once it is drawn: it removes the mark while it draws."""
        # A function, not an expression: the page's security policy forbids to evaluate strings.
        script = "() => document.getElementById('viewer').dataset.drawn?.split(' ')"
        words: list[str] = self.page.wait_for_function(script).json_value()
        return words

    def pixels(self, view: str) -> np.ndarray:
        script = "view => document.querySelector(`[data-view=${view}] canvas`).toDataURL()"
        return decoded(self.page.evaluate(script, view)).reshape(-1, 4)[:, :3]


def shot(tab: Tab, name: str, folder: Path) -> None:
    """Save a screenshot of the whole page, in the folder SHOTS if that is set."""
    path = Path(os.environ.get("SHOTS", folder)) / f"{name}.png"
    tab.page.screenshot(path=path, full_page=True)
    with Image.open(path) as image:
        assert image.width == tab.page.viewport_size["width"]
        assert len(image.convert("RGB").getcolors(2**24)) > 100, "the page is nearly blank"


@contextmanager
def opened(browser: Any, address: str, kind: type[Tab] = Tab, **options: Any) -> Iterator[Any]:
    """A tab of a size and colour scheme, closed at the end."""
    usual = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}
    context = browser.new_context(**{"reduced_motion": "reduce"} | usual | options)
    context.set_default_timeout(20_000)
    found = kind(context.new_page())
    found.open(address)
    yield found
    context.close()
