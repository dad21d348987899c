"""Text from outside, such as names of files and classes, made safe for terminals, CSV and HTML."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame

# What a spreadsheet computes, or may: signs that begin a formula, in full width too.
_FORMULA = re.compile(r"[\s\0]*[=+\-@|%\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", re.IGNORECASE)


def literal(text: object) -> Text:
    r"""One line that a terminal shows as it is: no markup, no links, no control characters.

    >>> print(literal("a[b]\x1b[2J\n"))
    a[b]\x1b[2J\n
    """
    shown = (c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
    return Text("".join(shown))


def csv_cell(text: str) -> str:
    r"""Text that no spreadsheet takes for a formula: one that might be gets an apostrophe.

    Characters that some readers take for the end of a row are spelled out, as \r.

    >>> csv_cell("=1+1"), csv_cell("cat.png"), csv_cell("-0.5")
    ("'=1+1", 'cat.png', '-0.5')
    """
    safe = not _FORMULA.match(text) or _NUMBER.fullmatch(text)
    spelled = re.sub("[\0\r]", lambda found: ascii(found[0])[1:-1], text)
    return spelled if safe else f"'{spelled}"


def as_csv(frame: "DataFrame") -> str:
    """A table as CSV whose text, headings too, holds no formula; raw bytes are escaped."""
    safe = frame.rename(columns=lambda name: csv_cell(str(name)))
    for column in safe.columns:
        if safe[column].dtype.kind not in "biuf":
            cells = [csv_cell(one) if isinstance(one, str) else one for one in safe[column]]
            safe[column] = cells
    text = str(safe.to_csv(index=False, lineterminator="\n"))
    return text.encode("utf-8", "backslashreplace").decode()


def html_table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """A table as HTML, the first column to the left and all others to the right, then notes.

    >>> html_table("one image", ["column", "mean"], [["msi", "<1"]]).count("&lt;1")
    1
    """
    sides = ["left", *["right"] * (len(heads) - 1)]

    def line(kind: str, cells: Sequence[str]) -> str:
        shown = zip(sides, cells, strict=True)
        styled = (f'<{kind} style="text-align:{s}">{html.escape(c)}</{kind}>' for s, c in shown)
        return f"<tr>{''.join(styled)}</tr>"

    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>'
    head = f"<thead>{line('th', heads)}</thead>" if any(heads) else ""
    body = "".join(line("td", row) for row in rows)
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table>{title}{head}<tbody>{body}</tbody></table>{said}"
