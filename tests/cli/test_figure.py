"""`sufficit figure`: figures for papers from a finished run; their numbers are the run's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from own_model import SIZED
from small_runs import config_for, rows, run_small, write_photos
from sufficit import Classifier, RunResults, explain
from sufficit.data.images import read_image
from sufficit.metrics.columns import ZERO_LABEL
from sufficit.plots import LINES, QUIET, blend

N = 7


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a model, and two finished comparisons."""
    place = tmp_path_factory.mktemp("figures")
    photos = write_photos(place, N, model=SIZED)
    options: dict[str, Any] = {"fills": ["mean"], "checks": ["controls", "alpha-curve"]}
    run_small(config_for(photos, alpha_min="search", **options), place / "run")
    run_small(config_for(photos, **options | {"checks": ["controls"]}), place / "one-alpha")
    run_small(config_for(photos, **options), place / "sampled")
    return place


@pytest.fixture
def draw(sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The figure that the command draws."""
    drawn: list[Figure] = []
    monkeypatch.setattr("sufficit.plots.save", lambda figure, *_, **__: drawn.append(figure))

    def run(*words: object) -> Figure:
        ended = sufficit("figure", *words, "--out", tmp_path / "figure.png")
        assert ended.code == 0, ended.err
        return drawn[-1]

    return run


def test_a_sheet_shows_the_images_their_maps_and_the_numbers_of_the_run(draw, place: Path) -> None:
    figure = draw(place / "run", "--images", "2,cat/02.png", "--methods", "layercam,random")
    axes = np.array(figure.axes).reshape(3, 3)
    assert [axis.get_title() for axis in axes[0]] == ["image", "layercam", "random\n(control)"]
    names = ["ant/00.png", "ant/03.png", "cat/02.png"]
    assert [axis.get_xlabel() for axis in axes[:, 0]] == ["ant", "ant", "cat"]
    scored = rows(place / "run", "layercam").set_index("image")["msi"]
    assert [axis.get_xlabel() for axis in axes[:, 1]] == [f"MSI {scored[n]:+.2f}" for n in names]
    classifier = Classifier.load(f"python:{place / 'model.py'}:make")
    images = torch.stack([read_image(place / "photos" / name, classifier.view) for name in names])
    maps = explain(classifier, images, torch.tensor([0, 0, 2]), "layercam")
    for i in range(3):
        shown = np.asarray(axes[i, 0].images[0].get_array())
        assert shown == pytest.approx(images[i].permute(1, 2, 0).numpy())
        shown = np.asarray(axes[i, 1].images[0].get_array())
        assert shown == pytest.approx(blend(images[i], maps[i]).numpy(), abs=1e-5)


def test_under_the_maps_is_what_the_model_saw(draw, place: Path) -> None:
    words = ("--images", "1", "--methods", "gradcam", "--columns", "base_score,msi")
    figure = draw(place / "one-alpha", *words, "--kept", "--rest")
    axes = np.array(figure.axes).reshape(3, 2)
    assert [axis.texts[0].get_text() for axis in axes[1:, 0]] == ["above 0.5", "the rest"]
    row = rows(place / "one-alpha", "gradcam").iloc[0]
    caption = f"base {row['base_score']:.2f}\nMSI {row['msi']:+.2f}"
    assert [axis.get_xlabel() for axis in axes[:, 1]] == ["", "", caption]
    image = np.asarray(axes[0, 0].images[0].get_array())
    classifier = Classifier.load(f"python:{place / 'model.py'}:make")
    pixels = read_image(place / "photos" / "ant/00.png", classifier.view)[None]
    heatmap = explain(classifier, pixels, torch.tensor([0]))[0].numpy()
    mask, mean = (heatmap > 0.5)[..., None], image.mean((0, 1))  # the run's fill
    assert 0 < mask.mean() < 1
    for axis, shown in ((axes[1, 1], mask), (axes[2, 1], ~mask)):
        found = np.asarray(axis.images[0].get_array())
        assert found == pytest.approx(np.where(shown, image, mean), abs=1e-5)


def test_curves_are_the_means_of_the_runs_rows(draw, place: Path) -> None:
    methods, names = ["layercam", "gradcam", "center"], ["show", "deletion_percent"]
    labels = ["layercam", "gradcam", "center (control)"]
    figure = draw(
        place / "run", "--show", "curves", "--methods", ",".join(methods), "--curves",
        ",".join(names),
    )  # fmt: skip
    assert [axis.get_title() for axis in figure.axes] == ["Show(>\u03b1)", "Deletion (%)"]
    for axis, name in zip(figure.axes, names, strict=True):
        assert [line.get_label() for line in axis.lines] == labels
        for line, method in zip(axis.lines, methods, strict=True):
            table = pandas.read_parquet(place / "run" / method / "curves.parquet")
            assert line.get_ydata() == pytest.approx(np.stack(table[f"{name}_accuracy"]).mean(0))
    assert list(figure.axes[1].lines[0].get_xdata()) == [0, 0.25, 0.5, 0.75, 1]
    assert [line.get_color() for line in figure.axes[0].lines] == [LINES[0], LINES[1], QUIET]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels


@pytest.mark.parametrize(("run", "key"), [("run", "search"), ("sampled", "alpha_curve")])
def test_msi_over_alpha_min_is_that_of_the_run(draw, place: Path, run: str, key: str) -> None:
    record = json.loads((place / run / "run.json").read_text())
    (axis,) = draw(place / run, "--show", "alpha").axes
    for line, method in zip(axis.lines, record["methods"][:2], strict=False):
        assert list(line.get_xdata()) == record[key]["alphas"]
        assert list(line.get_ydata()) == pytest.approx(record[key]["mean_msi"][method])
    assert axis.lines[-1].get_xdata()[0] == record["alpha_min"]
    assert ("image" in axis.get_title()) == (run == "sampled")


def test_methods_that_ignore_the_class_are_marked_in_every_legend(place: Path) -> None:
    results = RunResults.read(place / "sampled")
    known = results.record.sources.items()
    sources = {name: replace(facts, class_agnostic=True) for name, facts in known}
    marked = replace(results, record=replace(results.record, sources=sources))
    for found, end in ((results, ""), (marked, " (class-agnostic)")):
        methods = [m for m in found.methods if m not in found.unranked]
        wanted = [f"{method}{end}" for method in methods]
        for show, more in (("curves", []), ("alpha", [ZERO_LABEL]), ("sizes", [ZERO_LABEL])):
            (legend,) = found.plot(show).legends
            assert [text.get_text() for text in legend.get_texts()] == wanted + more, show
        titles = [axis.get_title() for axis in found.plot("sheet").axes[: 1 + len(methods)]]
        assert titles[1:] == [word.replace(" (", "\n(") for word in wanted]
    assert "(class-agnostic)" not in str(results.record.alpha_curve), "the record is left alone"


def test_sizes_are_drawn_against_base_scores(draw, place: Path) -> None:
    (axis,) = draw(place / "run", "--show", "sizes", "--methods", "gradcam,center").axes
    summary = json.loads((place / "run" / "summary.json").read_text())
    points = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
    assert list(points) == ["gradcam", "center (control)"]
    for label, line in points.items():
        found = summary[label.split()[0]]
        point = (line.get_xdata()[0], line.get_ydata()[0])
        assert point == (found["mask_penalty"]["mean"], found["base_score"]["mean"])
    across, up = axis.lines[:2]
    sizes, bases = (summary["gradcam"][column] for column in ("mask_penalty", "base_score"))
    assert list(across.get_xdata()) == [sizes["low"], sizes["high"]]
    assert list(up.get_ydata()) == [bases["low"], bases["high"]]


def test_every_kind_is_drawn_at_its_width(sufficit, place: Path, tmp_path: Path) -> None:
    for show, more in {
        "sheet": ["--images", "best:2,03.png", "--kept", "--width", "column", "--columns", "msi"],
        "curves": ["--curves", "show,hide", "--font", "7"],
        "alpha": ["--methods", "gradcam"],
        "sizes": ["--methods", "gradcam, random", "--width", "4", "--dpi", "100"],
    }.items():
        out = tmp_path / "new" / f"{show}.png"
        run = sufficit("figure", place / "run", "--show", show, "--out", out, *more)
        assert run.code == 0, run.err
        drawn, _, following = run.words.partition(" Next: ")
        assert drawn.endswith(f"{show}.png")
        assert following.startswith("sufficit figure ")
        with Image.open(out) as picture:
            wide = {"sheet": 990, "sizes": 400}.get(show, 2070)
            assert abs(picture.width - wide) <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "dog/1.png"], "Unknown image in this run 'dog/1.png'"),
        (["--images", "best:x"], "Unknown image in this run 'best:x'. Did you mean 'best'?"),
        (["--images", ","], "a sheet needs at least one image"),
        (["--methods", "grad-cam"], "Unknown method in this run 'grad-cam'. Did you mean"),
        (["--methods", ","], "at least one method"),
        (["--columns", "mis"], "Unknown column in this run 'mis'. Did you mean 'msi'?"),
        (["--columns", "target"], "Unknown column in this run 'target'"),
        (["--show", "curves", "--curves", "shows"], "Unknown curve in this run 'shows'"),
        (["--out", "sheet.jpg"], "must end with .pdf, .svg, .eps, .png, got 'sheet.jpg'"),
        (["--width", "wide"], "--width must be column, page or inches in 1..50, got 'wide'"),
        (["--show", "curves", "--kept"], "--kept is for --show sheet, got --show curves"),
        (["--curves", "show"], "--curves is for --show curves, got --show sheet"),
        (["--out", "/proc/nowhere/sheet.pdf"], "/proc/nowhere can't be a folder of results"),
    ],
)
def test_wrong_arguments_are_one_error(
    sufficit, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = sufficit("figure", place / "run", *words)
    assert run.code == 2
    assert message in run.err
    assert not list(tmp_path.iterdir())


def test_a_run_at_one_alpha_min_has_no_curve_over_it(sufficit, place: Path, tmp_path: Path) -> None:
    run = sufficit("figure", place / "one-alpha", "--show", "alpha", "--out", tmp_path / "a.png")
    assert run.code == 2
    assert "at one alpha_min only: run compare again with --checks default" in run.err


def test_a_folder_that_is_no_finished_run_says_what_it_is(sufficit, tmp_path: Path) -> None:
    assert "sufficit compare makes one" in sufficit("figure", tmp_path / "absent").err
    (tmp_path / "started" / "units").mkdir(parents=True)
    assert "run the same command again to resume" in sufficit("figure", tmp_path / "started").err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    assert "a run of another kind or version" in sufficit("figure", tmp_path / "other").err
