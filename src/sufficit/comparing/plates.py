"""Figures for papers from the folder of a finished comparison: every number is the run's own."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from sufficit import plots as figures
from sufficit.classifier.classifier import Classifier
from sufficit.comparing.finished import Drawn, Finished, read_drawn, read_finished
from sufficit.errors import UserError, unknown
from sufficit.perturbation.fills import fill_for
from sufficit.plots import Look
from sufficit.tables import HEADINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = {"column": 3.3, "page": 6.9}  # inches
PAPER = Look(width=WIDTHS["page"], font=8)
CURVES = ("show", "hide", "insertion_percent", "deletion_percent")
_SHORT = {
    "show": r"Show(>$\alpha$)",
    "hide": r"Hide(>$\alpha$)",
    "insertion_pixel": "Insertion, pixel value",
    "deletion_pixel": "Deletion, pixel value",
    "insertion_percent": "Insertion, %",
    "deletion_percent": "Deletion, %",
}


def sheet(
    run: Path | Finished,
    images: Sequence[str] = ("best", "disputed", "worst"),
    methods: Sequence[str] | None = None,
    *,
    columns: Sequence[str] = ("msi",),
    kept: bool = False,
    rest: bool = False,
    look: Look = PAPER,
    data: Path | None = None,
    classifier: Classifier | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> "Figure":
    """A row an image, a column a method, and the run's numbers under each.

    `kept` adds the image through the mask at alpha_min, `rest` what the mask leaves out, both with
    the run's fill: what the model saw. `data` is where the images are now, if they were moved.
    """
    run = _run(run)
    chosen = run.known(methods)
    rows = run.chosen(images, chosen)
    captions = {m: _captions(run, m, columns, rows) for m in chosen}  # wrong names are told first
    drawn = read_drawn(run, rows, chosen, data=data, classifier=classifier)
    if drawn.again:
        tell("The run kept no heatmaps, so its model drew these again; the numbers are the run's.")
    further = _masked(drawn, run.alpha_min, kept=kept, rest=rest)
    return figures.sheet_figure(
        drawn.images, drawn.heatmaps, drawn.class_names, captions, under=further, look=look
    )


def curves(
    run: Path | Finished,
    methods: Sequence[str] | None = None,
    *,
    names: Sequence[str] = CURVES,
    look: Look = PAPER,
) -> "Figure":
    """Curves averaged over the images, a line a method."""
    run = _run(run)
    found = {method: run.curves(method) for method in run.known(methods)}
    known = next(iter(found.values()))
    panels = []
    for name in names:
        if name not in known:
            raise unknown("curve in this run", name, known)
        lines = {method: curves[name] for method, curves in found.items()}
        panels.append(figures.curve_panel(name, run.settings.score, lines, _SHORT[name]))
    return figures.lines_figure(panels, run.outside, look)


def alphas(
    run: Path | Finished, methods: Sequence[str] | None = None, *, look: Look = PAPER
) -> "Figure":
    """Mean MSI over alpha_min, a line a method: of all images where it was searched, or of some."""
    run = _run(run)
    found = run.record.get("search") or run.record.get("alpha_curve")
    if found is None:
        raise UserError(
            "this run has MSI at one alpha_min alone: compare anew, with --alpha-curve, which is"
            " usual, or with --alpha-min search"
        )
    lines = {method: (found["alphas"], found["mean_msi"][method]) for method in run.known(methods)}
    images = len(found["images"]) if "images" in found else None
    panel = figures.alpha_panel(lines, run.alpha_min, images)
    return figures.lines_figure([panel], run.outside, look)


def sizes(
    run: Path | Finished, methods: Sequence[str] | None = None, *, look: Look = PAPER
) -> "Figure":
    """Mask penalty against base score, a point a method, with 95 % intervals."""
    run = _run(run)
    points = {
        method: (run.estimate(method, "mask_penalty"), run.estimate(method, "base_score"))
        for method in run.known(methods)
    }
    return figures.sizes_figure(points, [m for m in run.outside if m in points], look)


def check_file(path: Path) -> None:
    """Raise for a figure's file whose kind is not known."""
    if path.suffix.lower() not in figures.FORMATS:
        raise UserError(
            f"a figure's file ends with {', '.join(figures.FORMATS)}, got {path.name!r}: .pdf suits"
            " LaTeX, .svg the web"
        )


def width_from(text: str) -> float:
    """Inches from column, page or a number.

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


def _run(run: Path | Finished) -> Finished:
    return run if isinstance(run, Finished) else read_finished(run)


def _captions(run: Finished, method: str, columns: Sequence[str], rows: Sequence[int]) -> list[str]:
    """The columns of each image, a line each."""
    lines = []
    for column in columns:
        word = HEADINGS.get(column, column.replace("_", " "))
        values = run.values(method, column, rows)
        lines.append([f"{word} {v:+.2f}" if column == "msi" else f"{word} {v:.2f}" for v in values])
    return ["\n".join(row) for row in zip(*lines, strict=True)] or [""] * len(rows)


def _masked(
    drawn: Drawn, alpha: float, *, kept: bool, rest: bool
) -> dict[str, Mapping[str, Tensor]]:
    """The images through the masks and through what they leave out, as the model saw them."""
    fill = fill_for(drawn.images, drawn.fill)
    masks = {m: (maps > alpha).float()[:, None] for m, maps in drawn.heatmaps.items()}
    found: dict[str, Mapping[str, Tensor]] = {}
    if kept:
        found[f"above {alpha:g}"] = {
            m: drawn.images * mask + fill * (1 - mask) for m, mask in masks.items()
        }
    if rest:
        found["the rest"] = {
            m: drawn.images * (1 - mask) + fill * mask for m, mask in masks.items()
        }
    return found
