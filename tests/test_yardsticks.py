"""The yardsticks, on a tree that is counted by hand."""

from pathlib import Path

import pytest
import yardsticks
from yardsticks import by_package, listed, table, walk_table, walked

SHAPES = '''"""Shapes."""

from dataclasses import dataclass
from typing import Any, NamedTuple


# A comment that says why.
@dataclass(frozen=True)
class Square:
    """A square."""

    side: int = 1  # no line of its own

    def drawn(self, a, b, c, d, e, f):
        """Six parameters besides self."""
        how: Any = {"a": a, "b": b}
        given = (c, d)
        kept = {"c": c}
        size = (a, b)
        return draw(*given, **how), kept, draw(*size), len(size)


class Pair(NamedTuple):
    """A pair."""

    first: int


def draw(a, b, *, c=0, d=0, e=0, f=0, g=0, **more):
    """Seven parameters."""
    return [one for one in (a, b)]


def inner(a, b, c, d, e, f, g, h):
    """Eight parameters."""
    both = (a, b)

    def nested():
        return draw(*both)

    return nested
'''
COMMAND = '''"""A command."""


@app.command()
def show(a, b, c, d, e, f, g):
    """Seven options."""
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of three modules and a test."""
    texts = {
        "src/sufficit/__init__.py": 'from sufficit.shapes.shapes import draw\n__all__ = ["draw"]\n',
        "src/sufficit/shapes/shapes.py": SHAPES,
        "src/sufficit/cli/show.py": COMMAND,
        "tests/test_shapes.py": "def test_nothing():\n    pass\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_what_can_be_read_is_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardsticks, "measured", lambda _: {"functions": 3})
    found = yardsticks.yardsticks(root)
    lines = len(SHAPES.splitlines())
    assert found == {
        "functions": 3,
        "dataclasses and NamedTuples": 2,
        "public functions with more than 6 parameters": 2,  # draw and the command
        "inner functions with more than 6 parameters": 1,
        "packs of arguments, as in how: Any = {...} and f(**how)": 3,  # how, given, both
        "comment lines, in percent": round(100 / (lines + 2 + 6), 1),
        "lines with a comment, in percent": round(200 / (lines + 2 + 6), 1),
        "lines of src": lines + 2 + 6,
        "lines of src by package": {".": 2, "cli": 6, "shapes": lines},
        "lines of tests": 2,
    }
    assert by_package(root / "src/sufficit") == found["lines of src by package"]


def test_functions_that_are_called_are_counted_once_in_any_thread(root: Path) -> None:
    from threading import Thread

    path = root / "src/sufficit/shapes/shapes.py"
    made: dict[str, object] = {"__name__": __name__}  # dataclass looks its module up
    code = compile(path.read_text(), path, "exec")

    def run() -> None:
        exec(code, made)
        for _ in range(2):
            made["draw"](1, 2)
        thread = Thread(target=made["inner"], args=range(8))
        thread.start()
        thread.join()

    source = (root / "src/sufficit").resolve()
    passed, of_inner = walked(run, source, within="inner")
    assert {one.co_name for one in passed} == {"draw", "inner"}
    assert {one.co_name for one in of_inner} == {"inner"}, "draw is called before and not inside"
    assert listed(passed, source) == {"shapes": {"shapes/shapes.py": ["draw", "inner"]}}
    assert walked(run, root / "elsewhere") == (set(), set())


def test_the_table_has_numbers_and_packages() -> None:
    lines = table({"lines": 12345, "share": 0.5, "by package": {".": 1, "cli": 2000}}).splitlines()
    assert lines[2:] == ["| lines | 12,345 |", "| share | 0.5 |", "| by package | . 1, cli 2,000 |"]


def test_the_walk_lists_functions_by_package_and_file() -> None:
    walk = {".": {"files.py": ["place"]}, "data": {"data/batch.py": ["Batch.rows", "ahead"]}}
    assert walk_table(walk).splitlines() == [
        ".: 1 functions in 1 files",
        "  files.py (1): place",
        "",
        "data: 2 functions in 1 files",
        "  data/batch.py (2): Batch.rows, ahead",
    ]
