"""Figures of scores and heatmaps, drawn by matplotlib."""

# fmt: off
# isort: off
from sufficit.plots.charts import (
    PAPER_CURVES, Panel, alpha_figure, alpha_panel, curve_panel,
    curves_figure, lines_figure, methods_figure, parts_panel, sanity_figure, sizes_figure,
    training_figure,
)
from sufficit.plots.regions import gallery, region_on, region_picture
from sufficit.plots.sheets import blend, masked_images, overlay, score_captions, sheet_figure
from sufficit.plots.style import (
    FORMATS, HIDE, INK, LINES, PAPER, QUIET, SHOW, Look, axes_for, check_file, save, svg,
    width_from,
)

__all__ = [
    "FORMATS", "HIDE", "INK", "LINES", "PAPER", "PAPER_CURVES", "QUIET", "SHOW", "Look", "Panel",
    "alpha_figure", "alpha_panel", "axes_for", "blend", "check_file",
    "curve_panel", "curves_figure", "gallery", "lines_figure", "masked_images", "methods_figure",
    "overlay", "parts_panel", "region_on", "region_picture", "sanity_figure", "save",
    "score_captions", "sheet_figure", "sizes_figure", "svg", "training_figure", "width_from",
]
# fmt: on
