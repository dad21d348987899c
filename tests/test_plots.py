"""Figures for papers, from the folder of a finished comparison."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sufficit.compare import compare_folder
from sufficit.comparing import plates
from sufficit.comparing.finished import read_finished
from sufficit.comparing.settings import settings_from

from own_model import SIZED
from sufficit import Classifier, UserError, explain
from sufficit.data.images import read_image
from sufficit.plots import (
    LINES,
    QUIET,
    Look,
    alpha_panel,
    lines_figure,
    overlay,
    save,
    sizes_figure,
)
from sufficit.statistics import Estimate

N = 7


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, a model, and a finished comparison of three methods."""
    place = tmp_path_factory.mktemp("figures")
    (place / "model.py").write_text(SIZED)
    pixels = np.random.default_rng(0).integers(0, 256, (N, 12, 10, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        path = place / "photos" / ("ant", "bee", "cat")[i % 3] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    usual = {"model": f"python:{place / 'model.py'}:make", "data": str(place / "photos")}
    usual |= {"methods": ["gradcam", "layercam"], "alpha_min": "search", "leak": False}
    usual |= {"value_step": 0.25, "percent_step": 0.25, "fill": "mean"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sufficit.comparing.saving._save_sheet", lambda *_: None)  # it takes long
        compare_folder(settings_from(usual), place / "run", progress=False)
        kept = usual | {"alpha_min": 0.5, "alpha_curve": False, "save_heatmaps": True}
        compare_folder(settings_from(kept), place / "kept", progress=False)
    return place


def rows(run: Path, method: str) -> pandas.DataFrame:
    return pandas.read_parquet(run / method / "scores.parquet")


def test_a_sheet_shows_the_images_their_maps_and_the_numbers_of_the_run(place: Path) -> None:
    told: list[str] = []
    figure = plates.sheet(
        place / "run", ["2", "cat/02.png"], ["layercam", "random"], tell=told.append
    )
    assert told == [
        "The run kept no heatmaps, so its model drew these again; the numbers are the run's."
    ]
    axes = np.array(figure.axes).reshape(3, 3)
    assert [axis.get_title() for axis in axes[0]] == ["image", "layercam", "random"]
    names = ["ant/00.png", "ant/03.png", "cat/02.png"]
    assert [axis.get_xlabel() for axis in axes[:, 0]] == ["ant", "ant", "cat"]
    scored = rows(place / "run", "layercam").set_index("image")["msi"]
    assert [axis.get_xlabel() for axis in axes[:, 1]] == [f"MSI {scored[n]:+.2f}" for n in names]
    classifier = Classifier.load(f"python:{place / 'model.py'}:make")
    images = torch.stack([read_image(place / "photos" / name, classifier.view) for name in names])
    maps = explain(classifier, images, torch.tensor([0, 0, 2]), "layercam")
    for i in range(3):
        assert np.asarray(axes[i, 0].images[0].get_array()) == pytest.approx(
            images[i].permute(1, 2, 0).numpy()
        )
        shown = np.asarray(axes[i, 1].images[0].get_array())
        assert shown == pytest.approx(overlay(images[i], maps[i]).numpy(), abs=1e-5)


def test_under_the_maps_stands_what_the_model_saw(place: Path) -> None:
    columns = ["base_score", "msi"]
    figure = plates.sheet(place / "kept", ["1"], ["gradcam"], columns=columns, kept=True, rest=True)
    axes = np.array(figure.axes).reshape(3, 2)
    assert [axis.texts[0].get_text() for axis in axes[1:, 0]] == ["above 0.5", "the rest"]
    row = rows(place / "kept", "gradcam").iloc[0]
    words = f"base {row['base_score']:.2f}\nMSI {row['msi']:+.2f}"
    assert [axis.get_xlabel() for axis in axes[:, 1]] == ["", "", words]
    image = np.asarray(axes[0, 0].images[0].get_array())
    with np.load(place / "kept" / "gradcam" / "heatmaps.npz") as stored:
        mask = (stored["ant/00.png"] > 0.5)[..., None]
    mean = image.mean((0, 1))  # the run's fill
    assert 0 < mask.mean() < 1
    assert np.asarray(axes[1, 1].images[0].get_array()) == pytest.approx(
        np.where(mask, image, mean), abs=1e-5
    )
    assert np.asarray(axes[2, 1].images[0].get_array()) == pytest.approx(
        np.where(mask, mean, image), abs=1e-5
    )


def test_kept_heatmaps_are_read_and_not_drawn_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.comparing.finished.draw", lambda *_: pytest.fail("drawn again"))
    plates.sheet(place / "kept", ["best"], tell=pytest.fail)


def test_best_worst_and_disputed_go_by_the_runs_msi(place: Path) -> None:
    run = read_finished(place / "run")
    msi = np.stack([rows(place / "run", m)["msi"] for m in ("gradcam", "layercam")])
    spread = np.abs(msi[0] - msi[1])
    methods = ["gradcam", "layercam"]
    assert run.chosen(["best"], methods) == [msi.mean(0).argmax()]
    assert run.chosen(["worst"], methods) == [msi.mean(0).argmin()]
    assert spread[run.chosen(["disputed:3"], methods)].tolist() == sorted(spread)[::-1][:3]
    assert run.chosen(["99"], methods) == list(range(N))
    assert run.chosen(["06.png", "1", "ant/00.png"], methods) == [
        run.names.index("ant/06.png"),
        0,
    ]


def test_lines_can_be_told_apart_where_there_are_more_methods_than_colours() -> None:
    lines = {f"method {k}": ([0.0, 1.0], [0.0, k / 30]) for k in range(3 * len(LINES) + 2)}
    figure = lines_figure([alpha_panel(lines, 0.5)], quiet=["method 1", "method 9"])
    drawn = [line for line in figure.axes[0].lines if line.get_label() in lines]
    assert len({(line.get_color(), str(line._dash_pattern)) for line in drawn}) == len(lines)
    assert figure.axes[0].lines[0].get_linestyle() == "-"


def test_curves_are_the_means_of_the_runs_rows(place: Path) -> None:
    methods = ["layercam", "gradcam", "center"]
    figure = plates.curves(place / "run", methods, names=["show", "deletion_percent"])
    assert [axis.get_title() for axis in figure.axes] == ["Show(>\u03b1)", "Deletion (%)"]
    for axis, name in zip(figure.axes, ["show", "deletion_percent"], strict=True):
        assert [line.get_label() for line in axis.lines] == methods
        for line, method in zip(axis.lines, methods, strict=True):
            table = pandas.read_parquet(place / "run" / method / "curves.parquet")
            mean = np.stack(table[f"{name}_accuracy"]).mean(0)
            assert line.get_ydata() == pytest.approx(mean)
    assert list(figure.axes[1].lines[0].get_xdata()) == [0, 0.25, 0.5, 0.75, 1]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours == [LINES[0], LINES[1], QUIET]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == methods


def test_msi_over_alpha_min_is_that_of_the_run(place: Path) -> None:
    record = json.loads((place / "run" / "run.json").read_text())
    (axis,) = plates.alphas(place / "run").axes
    for line, method in zip(axis.lines, record["methods"][:2], strict=False):
        assert list(line.get_xdata()) == record["search"]["alphas"]
        assert list(line.get_ydata()) == record["search"]["mean_msi"][method]
    assert axis.lines[-1].get_xdata()[0] == record["alpha_min"]
    with pytest.raises(
        UserError, match="at one alpha_min only: run compare again without --no-alpha-curve"
    ):
        plates.alphas(place / "kept")


def test_sizes_stand_against_base_scores_among_lines_of_equal_msi(place: Path) -> None:
    (axis,) = plates.sizes(place / "run", ["gradcam", "center"]).axes
    summary = json.loads((place / "run" / "summary.json").read_text())
    points = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
    assert list(points) == ["gradcam", "center"]
    for method, line in points.items():
        found = summary[method]
        point = (line.get_xdata()[0], line.get_ydata()[0])
        assert point == (found["mask_penalty"]["mean"], found["base_score"]["mean"])
    across, up = axis.lines[:2]
    assert list(across.get_xdata()) == [
        summary["gradcam"]["mask_penalty"][k] for k in ("low", "high")
    ]
    assert list(up.get_ydata()) == [summary["gradcam"]["base_score"][k] for k in ("low", "high")]
    assert axis.texts
    for text in axis.texts:
        x, y = text.xy
        assert y - x == pytest.approx(float(text.get_text().removeprefix("MSI ")))


def test_lines_of_equal_msi_are_labelled_where_they_leave_the_picture() -> None:
    def known(mean: float) -> Estimate:
        return Estimate(mean, mean - 0.1, mean + 0.1, 9, 0, None)

    points = {
        "small": {"mask_penalty": known(0.1), "base_score": known(0.9)},
        "large": {"mask_penalty": known(0.5), "base_score": known(0.4)},
    }
    (axis,) = sizes_figure(points).axes
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


@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".eps", ".png"])
def test_a_figure_has_the_same_bytes_each_time_and_its_width(
    place: Path, tmp_path: Path, suffix: str
) -> None:
    for name in ("a", "b"):
        figure = plates.sizes(place / "run", look=Look(3.3, 8))
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


def test_vectors_are_vectors_and_fonts_are_inside(place: Path, tmp_path: Path) -> None:
    lines = plates.curves(place / "run")
    for name in ("lines.pdf", "lines.svg", "lines.eps"):
        save(lines, tmp_path / name, tight=False)
    pdf = (tmp_path / "lines.pdf").read_bytes()
    assert b"/Subtype /Image" not in pdf
    assert b"/FontFile2" in pdf  # TrueType
    assert b"/Type3" not in pdf
    assert b"<image" not in (tmp_path / "lines.svg").read_bytes()
    assert b"<text" not in (tmp_path / "lines.svg").read_bytes()  # letters are outlines
    assert b"/FontType 42" in (tmp_path / "lines.eps").read_bytes()
    save(plates.sheet(place / "kept", ["2"], ["gradcam"]), tmp_path / "s.pdf", tight=False)
    assert (tmp_path / "s.pdf").read_bytes().count(b"/Subtype /Image") == 4


def test_the_command_draws_every_kind(sufficit, place: Path, tmp_path: Path) -> None:
    for show, more in {
        "sheet": ["--images", "best:2,03.png", "--kept", "--width", "column", "--columns", "msi"],
        "curves": ["--curves", "show,hide", "--font", "7"],
        "alpha": ["--methods", "gradcam"],
        "sizes": ["--methods", "gradcam, random", "--width", "4", "--dpi", "100"],
    }.items():
        out = tmp_path / "new" / f"{show}.png"
        run = sufficit("figure", place / "run", "--show", show, "--out", out, *more)
        assert run.code == 0, run.err
        assert run.words.endswith(f"{show}.png")
        with Image.open(out) as picture:
            wide = {"sheet": 990, "sizes": 400}.get(show, 2070)
            assert abs(picture.width - wide) <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "dog/1.png"], "Unknown image in this run 'dog/1.png'"),
        (["--images", "best:x"], "Unknown image in this run 'best:x'. Did you mean 'best'?"),
        (["--images", ","], "a sheet needs at least one image"),
        (
            ["--methods", "grad-cam"],
            "Unknown method in this run 'grad-cam'. Did you mean 'gradcam'?",
        ),
        (["--methods", ","], "at least one method"),
        (["--columns", "mis"], "Unknown column in this run 'mis'. Did you mean 'msi'?"),
        (["--columns", "target"], "Unknown column in this run 'target'"),
        (["--show", "curves", "--curves", "shows"], "Unknown curve in this run 'shows'"),
        (
            ["--out", "sheet.jpg"],
            "a figure's file must end with .pdf, .svg, .eps, .png, got 'sheet.jpg'",
        ),
        (["--width", "wide"], "--width must be column, page or inches in 1..50, got 'wide'"),
        (["--data", "absent"], "no folder of images at absent"),
        (
            ["--show", "curves", "--kept"],
            "--kept is for --show sheet, got --show curves: leave it out",
        ),
        (["--curves", "show"], "--curves is for --show curves, got --show sheet: leave it out"),
        (["--out", "/proc/nowhere/sheet.pdf"], "/proc/nowhere can't be a folder of results"),
    ],
)
def test_wrong_wishes_get_one_clear_line(
    sufficit,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = sufficit("figure", place / "run", *words)
    assert run.code == 2
    assert message in run.err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_finished_run_says_what_it_is(
    sufficit, place: Path, tmp_path: Path
) -> None:
    assert "sufficit compare makes one" in sufficit("figure", tmp_path / "absent").err
    (tmp_path / "begun" / "parts").mkdir(parents=True)
    assert "it was stopped: give its command again" in sufficit("figure", tmp_path / "begun").err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    assert "holds the run of another command" in sufficit("figure", tmp_path / "other").err


@pytest.mark.filterwarnings("always:.*when it was scored")
def test_images_that_are_others_now_bring_a_warning(sufficit, place: Path, tmp_path: Path) -> None:
    for path in (place / "photos").rglob("*.png"):
        turned = tmp_path / "turned" / path.relative_to(place / "photos")
        turned.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            Image.fromarray(255 - np.asarray(picture)).save(turned)
    shutil.copytree(place / "kept", tmp_path / "run")
    for path in (tmp_path / "run").rglob("heatmaps.npz"):
        path.unlink()
    words = ["--data", tmp_path / "turned", "--images", "5", "--out", tmp_path / "s.png"]
    run = sufficit("figure", tmp_path / "run", *words)
    assert run.code == 0, run.err
    assert "the image or the model is another, and the numbers are of the run" in run.err
    (tmp_path / "turned" / "ant" / "00.png").unlink()
    assert "ant/00.png is no longer in" in sufficit("figure", tmp_path / "run", *words).err
    same = sufficit("figure", tmp_path / "run", "--images", "5", "--out", tmp_path / "s.png")
    assert (same.code, same.err) == (0, "")
