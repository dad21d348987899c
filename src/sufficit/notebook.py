"""How results look in a notebook."""

import html
import sys
from collections.abc import Iterable, Sequence


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


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
