"""Any text from outside is one line without orders in a terminal, and no formula in a CSV file."""

import csv
import io
from pathlib import Path

import pandas
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

import sufficit
from sufficit.outside import as_csv, csv_cell, literal

NASTY = st.text(st.sampled_from("\\[]/@#=+-:;|%abz\n\r\t\0\x1b\x07\x9b\u202e\u2028\ud800 '\","))
TEXTS = st.text() | NASTY
FUZZ = settings(max_examples=300, derandomize=True, deadline=None, database=None)


def shown(*parts: object) -> str:
    """What a terminal that knows everything is sent."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=10**4)
    console.print(*parts, highlight=False)
    return file.getvalue()


@FUZZ
@given(TEXTS)
def test_a_terminal_is_sent_one_line_that_tells_all(text: str) -> None:
    found = shown(literal(text))
    assert found.count("\n") == 1
    assert all(c.isprintable() for c in found[:-1])
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    assert found[:-1].rstrip() == plain.rstrip()


@FUZZ
@given(TEXTS)
def test_no_text_changes_what_stands_around_it(text: str) -> None:
    before = shown("[yellow]Warning:[/]", "and").partition("and")[0]
    found = shown("[yellow]Warning:[/]", literal(text), "[bold]end[/]")
    assert found.startswith(before)
    assert found.endswith("\x1b[1mend\x1b[0m\n")
    table = Table("[bold]name[/]", box=None)
    table.add_row(literal(text), style="dim")
    assert "\x1b]8" not in shown(table)  # a link


@FUZZ
@given(st.lists(TEXTS.map(lambda text: text.replace("\ud800", "")), min_size=1, max_size=4))
def test_no_cell_of_a_csv_is_a_formula(texts: list[str]) -> None:
    frame = pandas.DataFrame({"name": texts, texts[0] + "=": range(len(texts))})
    rows = list(csv.reader(io.StringIO(as_csv(frame), newline="")))
    told = [text.replace("\r", "\\r").replace("\0", "\\x00") for text in texts]
    assert [row[0].removeprefix("'") for row in rows[1:]] == [t.removeprefix("'") for t in told]
    for cell in (cell for row in rows for cell in row):
        first = cell.lstrip("\0 \t\r\n\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u2028")[:1]
        assert first not in tuple("=+-@|%\uff1d\uff0b\uff0d\uff20")


@FUZZ
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_stay_numbers(value: float) -> None:
    assert csv_cell(repr(value)) == repr(value)
    assert float(as_csv(pandas.DataFrame({"x": [value]})).split()[1]) == value


def test_safe_text_is_never_put_into_markup() -> None:
    """Inside an f-string it would be parsed again."""
    for path in Path(sufficit.__file__).parent.rglob("*.py"):
        assert "{literal(" not in path.read_text(), path
