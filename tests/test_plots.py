"""Figures: lines that differ, lines of equal MSI, and files that are the same each time."""

import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from sufficit.errors import UserError
from sufficit.plots import (
    LINES,
    Look,
    Panel,
    lines_figure,
    save,
    sheet_figure,
    sizes_figure,
    training_figure,
)
from sufficit.plots.regions import DIMMED, GREY, mask_at, region_picture
from sufficit.sources import cut_at
from sufficit.statistics import Estimate


def known(mean: float) -> Estimate:
    return Estimate(mean, mean - 0.1, mean + 0.1, 9, 0, None)


POINTS = {
    "small": {"mask_penalty": known(0.1), "base_score": known(0.9)},
    "large": {"mask_penalty": known(0.5), "base_score": known(0.4)},
}


def test_lines_can_be_told_apart_where_there_are_more_methods_than_colours() -> None:
    lines = {f"method {k}": ([0.0, 1.0], [0.0, k / 30]) for k in range(3 * len(LINES) + 2)}
    figure = lines_figure([Panel("", "x", "y", lines)], quiet=["method 1", "method 9"])
    drawn = [line for line in figure.axes[0].lines if line.get_label() in lines]
    assert len({(line.get_color(), str(line._dash_pattern)) for line in drawn}) == len(lines)
    assert figure.axes[0].lines[0].get_linestyle() == "-"


def test_lines_of_equal_msi_are_labelled_where_they_leave_the_picture() -> None:
    (axis,) = sizes_figure(POINTS).axes
    (left, right), (_, high) = axis.get_xlim(), axis.get_ylim()
    labels = {text.get_text(): text.xy for text in axis.texts}
    assert labels["MSI +0.8"] == pytest.approx((high - 0.8, high))
    assert labels["MSI 0"] == pytest.approx((right, right))
    assert len(labels) == 7  # -0.2, 0, ..., +1
    drawn = [line for line in axis.lines if line.get_zorder() == 0]
    assert len(drawn) == len(labels)
    for line in drawn:
        x, y = line.get_data()
        assert y[1] - x[1] == pytest.approx(y[0] - x[0])
        assert x[0] == left


def test_no_line_of_equal_msi_is_a_speck_in_a_corner() -> None:
    for k in range(20):
        base = known(0.4 + 0.01 * k)
        (axis,) = sizes_figure({"a": {"mask_penalty": known(0.15), "base_score": base}}).axes
        left, right = axis.get_xlim()
        for line in (line for line in axis.lines if line.get_zorder() == 0):
            assert line.get_xdata()[1] - left > 0.04 * (right - left)  # type: ignore[index]


def test_the_legend_of_a_training_hides_none_of_its_lines() -> None:
    columns = ("base_score", "mask_penalty", "msi", "leak", "leak_chance", "loss", "accuracy")
    history = pandas.DataFrame({"epoch": [1, 2], **{name: [0.5, 1.0] for name in columns}})
    figure = training_figure(history, 2, 12)
    figure.draw_without_rendering()
    for axis in figure.axes[:2]:
        legend = axis.get_legend()
        assert legend is not None
        assert not legend.get_window_extent().overlaps(axis.get_window_extent())


def test_sizes_of_a_run_without_their_columns_are_an_error() -> None:
    lacking = {m: {c: e for c, e in s.items() if c != "base_score"} for m, s in POINTS.items()}
    with pytest.raises(UserError, match="column base_score, which was not scored"):
        sizes_figure(lacking)


@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".eps", ".png"])
def test_a_figure_has_the_same_bytes_each_time_and_its_width(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        figure = sizes_figure(POINTS, look=Look(3.3, 8))
        save(figure, tmp_path / f"{name}{suffix}", dpi=100, tight=False)
    written = (tmp_path / f"a{suffix}").read_bytes()
    assert written == (tmp_path / f"b{suffix}").read_bytes()
    assert b"Date" not in written
    width = {
        ".pdf": rb"/MediaBox \[ ?0 0 237\.6 ",
        ".svg": rb'width="237\.6pt"',
        ".eps": rb"%%HiResBoundingBox: [\d.]+ [\d.]+ ",
        ".png": (330).to_bytes(4, "big"),
    }[suffix]
    assert re.search(width, written)


def test_vectors_are_vectors_and_fonts_are_inside(tmp_path: Path) -> None:
    lines = lines_figure([Panel("t", "x", "y", {"gradcam": ([0.0, 1.0], [0.0, 0.5])})])
    for name in ("lines.pdf", "lines.svg", "lines.eps"):
        save(lines, tmp_path / name, tight=False)
    pdf = (tmp_path / "lines.pdf").read_bytes()
    assert b"/Subtype /Image" not in pdf
    assert b"/FontFile2" in pdf  # TrueType
    assert b"/Type3" not in pdf
    assert b"<image" not in (tmp_path / "lines.svg").read_bytes()
    assert b"<text" not in (tmp_path / "lines.svg").read_bytes()  # letters are outlines
    assert b"/FontType 42" in (tmp_path / "lines.eps").read_bytes()
    images = torch.rand(2, 3, 6, 6)
    sheet = sheet_figure(images, {"gradcam": images[:, 0]}, ["a", "b"])
    save(sheet, tmp_path / "s.pdf", tight=False)
    assert (tmp_path / "s.pdf").read_bytes().count(b"/Subtype /Image") == 4


def quarter() -> torch.Tensor:
    """A heatmap whose region is the upper left quarter of 8 x 8 pixels."""
    across = torch.arange(8.0)
    order = -torch.maximum(across[:, None], across[None])
    return cut_at(order[None], torch.tensor([0.25]))[0]


def test_a_region_has_the_same_edge_in_any_resolution() -> None:
    heatmap = quarter()
    assert torch.equal(mask_at(heatmap, (8, 8)), heatmap >= 0.5)
    larger = mask_at(heatmap, (80, 80))
    # The edge is at 40, give or take one of the eight.
    assert larger[:30, :30].all()
    assert not larger[50:].any()
    assert not larger[:, 50:].any()
    assert larger.double().mean() == pytest.approx(0.25, abs=0.05)
    assert mask_at(torch.ones(4, 4), (9, 9)).all()
    assert not mask_at(torch.zeros(4, 4), (9, 9)).any()


def test_a_region_is_shown_outlined_and_alone_on_grey() -> None:
    photo = torch.zeros(3, 500, 600)
    photo[0] = 1.0  # red
    drawn = np.asarray(region_picture(photo, quarter()))
    height, width, gap = 500, 600, round(500 / 40)
    assert drawn.shape == (height, 2 * width + gap, 3)
    left, right = drawn[:, :width], drawn[:, width + gap :]
    assert left[100, 100].tolist() == [255, 0, 0]
    assert left[450, 550].tolist() == [round(255 * DIMMED), 0, 0]
    assert left[100, 225:375].min(axis=1).max() == 255, "a white line"
    assert left[1, 100].tolist() == [255, 0, 0], "the border of the picture is no edge"
    assert right[100, 100].tolist() == [255, 0, 0]
    assert right[450, 550].tolist() == [round(255 * GREY)] * 3
    grey = torch.rand(1, 20, 20)
    small = region_picture(grey, quarter(), "a title", ["a line " * 60])
    assert small.width > 2 * 448
    assert small.height > 448 + 30, "words are below"


@pytest.mark.parametrize(
    ("photo", "heatmap", "words"),
    [
        (torch.rand(1, 3, 8, 8), torch.rand(8, 8), "needs one image"),
        (torch.rand(3, 8, 8), torch.rand(1, 8, 8), "needs one heatmap"),
        (torch.rand(3, 8, 8), 2 * torch.ones(8, 8), "must lie in 0..1"),
    ],
)
def test_a_region_needs_one_image_and_one_heatmap(photo, heatmap, words) -> None:
    with pytest.raises(UserError, match=words):
        region_picture(photo, heatmap)
