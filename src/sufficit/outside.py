"""Text from outside, such as names of files and classes, made safe for terminals and CSV files."""

import re
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
