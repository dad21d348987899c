"""A page opens if there is a browser, and nothing happens if there is none."""

import time
import webbrowser
from pathlib import Path
from types import SimpleNamespace

import pytest

from sufficit.cli.console import show_page


class Window:
    """A browser that only records the addresses it opens."""

    def __init__(self, answer: object = True) -> None:
        self.answer, self.shown = answer, []

    def open(self, address: str) -> object:
        self.shown.append(address)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def machine(terminal: bool) -> SimpleNamespace:
    return SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: terminal), platform="linux")


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Window:
    """A terminal on a screen, with a browser."""
    window = Window()
    monkeypatch.setattr("webbrowser.get", lambda: window)
    monkeypatch.setattr("sufficit.cli.console.sys", machine(terminal=True))
    for name in ("SSH_CONNECTION", "CI", "BROWSER", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    return window


def test_a_terminal_on_a_screen_opens_the_page(desk: Window, tmp_path: Path) -> None:
    assert show_page(tmp_path / "a b.html") is True
    assert desk.shown == [f"file://{tmp_path}/a%20b.html"]


@pytest.mark.parametrize("without", ["a terminal", "a screen", "a local screen", "a user"])
def test_no_browser_opens_by_default_without(
    desk: Window, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without == "a terminal":
        monkeypatch.setattr("sufficit.cli.console.sys", machine(terminal=False))
    elif without == "a screen":
        monkeypatch.delenv("DISPLAY")
    else:
        monkeypatch.setenv({"a local screen": "SSH_CONNECTION", "a user": "CI"}[without], "1")
    assert show_page(Path("report.html")) is False
    assert desk.shown == []
    assert show_page(Path("report.html"), wanted=True) is True


def test_no_browser_opens_if_it_is_not_wanted(desk: Window) -> None:
    assert show_page(Path("report.html"), wanted=False) is False
    assert desk.shown == []


@pytest.mark.parametrize("answer", [False, OSError("no such program"), webbrowser.Error("none")])
def test_a_failing_browser_is_not_an_error(desk: Window, answer: object) -> None:
    desk.answer = answer
    assert show_page(Path("report.html"), wanted=True) is False


def test_a_missing_browser_is_not_an_error(desk: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr("webbrowser.get", none)
    assert show_page(Path("report.html"), wanted=True) is False


def test_a_browser_inside_the_terminal_is_not_used(
    desk: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    lynx = webbrowser.GenericBrowser("lynx")
    lynx.open = lambda _: pytest.fail("lynx took the terminal over")
    monkeypatch.setattr("webbrowser.get", lambda: lynx)
    assert show_page(Path("report.html"), wanted=True) is False


def test_a_browser_that_hangs_is_not_waited_for(
    desk: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.cli.console.PATIENCE", 0.05)
    desk.open = lambda _: time.sleep(1)
    started = time.monotonic()
    assert show_page(Path("report.html"), wanted=True) is False
    assert time.monotonic() - started < 0.8


def test_the_demo_opens_its_report_when_asked_and_says_so(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window()
    monkeypatch.setattr("webbrowser.get", lambda: window)
    for name in ("run_digits", "print_results", "write_pictures"):
        monkeypatch.setattr(f"sufficit.cli.demo.{name}", lambda *_: None)
    words = ("demo", "--train", "--out", tmp_path / "d")
    assert "report.html opens in any browser" in sufficit(*words).words
    assert window.shown == []
    shown = sufficit(*words, "--open")
    assert "report.html is open in your browser" in shown.words
    assert window.shown == [(tmp_path / "d" / "report.html").as_uri()]
