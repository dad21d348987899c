"""Progress bars: when they are drawn, and what they count."""

import math
import sys

import pytest

from sufficit.progress import bar, counted, counting_bar, passed


def test_a_bar_without_a_total_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("images", wanted=True) as tick:
        assert tick is not None
        tick(7, math.inf)
    assert "images: 7it" in capsys.readouterr().err


def test_a_bar_counts_whole_images_and_shows_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("images", wanted=True) as tick:
        assert tick is not None
        tick(3.7, 8, "loss 0.5")
    last = capsys.readouterr().err.split("\r")[-1]
    assert "3/8" in last
    assert "loss 0.5" in last


def test_a_bar_that_nobody_wants_is_not_drawn(capsys) -> None:
    with bar("images", wanted=False) as tick:
        assert tick is None
    assert capsys.readouterr().err == ""


def test_without_a_terminal_a_line_comes_from_time_to_time(capsys, monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with bar("images") as tick:
        tick(100, 400)  # done by an earlier run
        now += 10
        tick(110, 400)
        assert capsys.readouterr().err == ""
        now += 50
        tick(160, 400, "two workers")  # 60 images in 60 seconds
        now += 29
        tick(190, 400)
        now += 31
        tick(340, 400)  # 240 images in 120 seconds
        now += 30
        tick(350, math.inf)
    assert capsys.readouterr().err.splitlines() == [
        "images: 160 of 400, 4 minutes left, two workers",
        "images: 340 of 400, 30 s left",
        "images: 350",
    ]


def test_in_a_terminal_a_bar_appears_only_when_it_takes_long(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bar("short") as tick:
        assert tick is not None
        tick(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sufficit.progress.DELAY", 1e-9)
    with bar("long") as tick:
        tick(1, 2)
    assert "long" in capsys.readouterr().err


def test_a_function_of_the_caller_is_called_instead() -> None:
    told = []
    with bar("images", lambda done, total: told.append((done, total))) as tick:
        assert tick is not None
        tick(1.5, 4, "a note")
    assert told == [(1.5, 4)]


def test_images_are_counted_where_they_pass_the_model() -> None:
    told: list[tuple[float, float]] = []
    with counting_bar("images", 10, lambda done, total: told.append((done, total))):
        passed(4)
        passed(3)
    assert told == [(4, 10), (7, 10), (10, 10)]  # fewer were needed than foreseen
    passed(3)
    assert len(told) == 3


def test_more_images_than_foreseen_do_not_pass_the_end() -> None:
    told: list[float] = []
    with counting_bar("images", 5, lambda done, total: told.append(done)):
        passed(4)
        passed(4)
    assert told == [4, 5, 5]


def test_an_inner_count_takes_the_place_of_the_outer_one() -> None:
    outer: list[int] = []
    inner: list[int] = []
    with counted(outer.append):
        passed(1)
        with counted(inner.append):
            passed(2)
        with counted(None):
            passed(3)
        passed(4)
    assert (outer, inner) == ([1, 4], [2])


def test_a_count_ends_with_its_block_after_an_error_too() -> None:
    outer: list[int] = []
    with pytest.raises(KeyError), counted(outer.append):
        raise KeyError
    passed(1)
    assert outer == []
