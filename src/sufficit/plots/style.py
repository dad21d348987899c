"""What all figures share: colours, sizes, axes, and how they become files and SVG elements."""

import html
import re
import warnings
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sufficit.errors import UserError
from sufficit.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2937"  # text
QUIET = "#9ca3af"  # what is not compared, and marks
GRID = "#d1d5db"
# Of what is kept, hidden and left.
SHOW = "#0f766e"
HIDE = "#c2410c"
REST = "#6d5bb3"
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")
"""Okabe and Ito's colours, safe for colour-blind readers, without yellow, which is too faint."""
FORMATS = (".pdf", ".svg", ".eps", ".png")
WIDTHS = {"column": 3.3, "page": 6.9}  # inches
_FONTS: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "sufficit"}
_UNDATED: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
_PAGE_COLOURS = {  # to variables of report/page.css
    **{INK: "ink", QUIET: "soft", GRID: "line", SHOW: "kept", HIDE: "hidden", REST: "rest"},
    **{colour: f"m{k}" for k, colour in enumerate(LINES)},
}


@dataclass(frozen=True)
class Look:
    """How wide a figure is, how large its letters are, and whether it has a legend."""

    width: float | None = None  # inches; None: as wide as its panels need
    font: float = 9  # points, of titles; the rest is smaller
    legend: bool = True


USUAL = Look()
PAPER = Look(width=WIDTHS["page"], font=8)


@cache
def figure_class() -> "type[Figure]":
    """Matplotlib's figure, which a notebook shows without pyplot."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A figure that is its own picture in a notebook."""

        def _repr_png_(self) -> bytes:
            return _bytes(self, "png", "path", dpi=110, bbox_inches="tight", facecolor="white")

    return NotebookFigure


def axes_for(panels: int, look: Look = USUAL) -> tuple["Figure", list["Axes"]]:
    """Return an empty figure and its panels, up to three in a row or as many as fit the width."""
    # A panel of a paper is readable from about 1.65 inches.
    fits = 3 if look.width is None else max(1, min(4, round(look.width / 1.65)))
    columns = min(fits, max(1, panels))
    rows = max(1, -(-panels // columns))
    width = 3.4 * columns if look.width is None else look.width
    each = min(width / columns, 3.4 if look.legend else width)
    figure = figure_class()(figsize=(width, (0.8 * each + 0.1) * rows + 0.2), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in grid[panels:]:
        spare.set_axis_off()
    return figure, grid


def dress(
    axis: "Axes", title: str, across: str, up: str, font: float = 9, *, unit: bool = True
) -> None:
    """Give a panel its title, labels, colours and range; y is in 0..1 where `unit` says so."""
    axis.set_title(title, fontsize=font, color=INK)
    axis.set_xlabel(across, fontsize=font - 1, color=INK)
    axis.set_ylabel(up, fontsize=font - 1, color=INK)
    axis.tick_params(labelsize=font - 2, color=QUIET, labelcolor=INK)
    axis.spines[:].set_color(QUIET)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlim(0, 1)
    if unit:
        axis.set_ylim(0, 1.02)


def check_file(path: Path) -> None:
    """Raise for a path whose suffix is not a format of figures."""
    if path.suffix.lower() not in FORMATS:
        wanted = f"a figure's file must end with {', '.join(FORMATS)}"
        raise UserError(f"{wanted}, got {path.name!r}: use .pdf for LaTeX, .svg for the web")


def width_from(text: str) -> float:
    """Return inches from column, page or a number.

    >>> width_from("column"), width_from("4.5")
    (3.3, 4.5)
    """
    if text in WIDTHS:
        return WIDTHS[text]
    try:
        inches = float(text)
    except ValueError:
        inches = 0.0
    if not 1 <= inches <= 50:
        raise UserError(f"--width must be column, page or inches in 1..50, got {text!r}")
    return inches


def save(figure: "Figure", path: Path, *, dpi: float = 150, tight: bool = True) -> None:
    """Write a figure in the format of the path's suffix: the same bytes each time, fonts inside.

    `tight` crops the figure to what is drawn; otherwise it keeps its width.
    """
    kind = path.suffix.removeprefix(".").lower()
    box = "tight" if tight else None
    content = _bytes(figure, kind, "path", dpi=dpi, bbox_inches=box, facecolor="white")
    if kind == "eps":
        content = re.sub(rb"%%CreationDate:[^\n]*\n", b"", content)
    with writing(path) as part:
        part.write_bytes(content)


def _bytes(figure: "Figure", kind: str, letters: str, **options: Any) -> bytes:
    """Return a figure as the content of a file, with names of users as they are."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if isinstance(text, Text):
            text.set_parse_math(False)  # a dollar in the name of a file or method is a dollar
            text.set_text(text.get_text().encode("utf-8", "replace").decode())
    file = BytesIO()
    with rc_context(_FONTS | {"svg.fonttype": letters}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box is drawn instead
        figure.savefig(file, format=kind, metadata=_UNDATED.get(kind), **options)
    return file.getvalue()


def svg(figure: "Figure", name: str, label: str) -> str:
    """Return a figure as an SVG element of a web page; `name` keeps its ids unique.

    Its colours are the page's variables, its letters the page's font, and every line and point has
    its name as a tooltip.
    """
    for line in (line for axis in figure.axes for line in axis.lines):
        known = str(line.get_label())
        if not known.startswith("_"):  # matplotlib's own names of lines without a label
            line.set_gid(f"named:{known}".encode("utf-8", "replace").decode())
    text = _bytes(figure, "svg", "none", transparent=True).decode()
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    text = text[text.index(">", size.end()) + 1 :]  # without <svg ...>, which is written below
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.S)
    text = re.sub(r'<g id="named:([^"]*)">', r'<g class="named"><title>\1</title>', text)
    # Matplotlib numbers everything: ids that nothing refers to only make the page larger.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))

    def page_colour(found: re.Match[str]) -> str:
        return f"var(--{_PAGE_COLOURS[found[0]]})" if found[0] in _PAGE_COLOURS else found[0]

    def for_the_page(tag: re.Match[str]) -> str:
        """Return a tag without what the page sets itself, and with few decimals."""
        one = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", tag[0])
        # The name of the figure in front of every id: a page has several.
        one = re.sub(r'((?:url\(|href=")#| id=")', rf"\1{name}-", one).replace("xlink:", "")
        one = re.sub(r"#[0-9a-f]{6}", page_colour, one)
        # The page has one font; a rotation by nothing is what matplotlib writes for every label.
        one = re.sub(r" font-family: [^;\"]*;| transform=\"rotate\(-0 [^\"]*\"", "", one)
        return re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), one)

    text = re.sub(r" *\n *", "", re.sub(r"<[^>]*>", for_the_page, text))
    return f'<svg class="chart" {size[0]} role="img" aria-label="{html.escape(label)}">{text}'
