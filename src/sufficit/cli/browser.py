"""Open a page in a browser, if there is a screen."""

import os
import sys
import webbrowser
from pathlib import Path
from threading import Thread

from sufficit.files import is_remote

PATIENCE = 5.0  # seconds for a browser to start


def show_page(page: Path | str, wanted: bool | None = None) -> bool:
    """Open a file or URL if wanted, or (None) in a terminal with a screen; return whether it opens.

    Never raises and never takes long, whatever the browser does.
    """
    if wanted is None:
        wanted = sys.stdout.isatty() and not {"SSH_CONNECTION", "CI"} & {*os.environ}
        if sys.platform.startswith(("linux", "freebsd")):
            screens = (os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
            wanted = wanted and any(screens)
    if not wanted or (not isinstance(page, str) and is_remote(page)):
        return False
    opened: list[bool] = []
    opening = Thread(target=lambda: opened.append(_open(page)), daemon=True)
    opening.start()
    opening.join(PATIENCE)
    return opened == [True]


def _open(page: Path | str) -> bool:
    address = page if isinstance(page, str) else page.resolve().as_uri()
    try:
        browser = webbrowser.get()
        # A browser that runs inside the terminal, such as lynx, would take it over.
        if type(browser) is webbrowser.GenericBrowser and "BROWSER" not in os.environ:
            return False
        return bool(browser.open(address))
    except Exception:
        return False
