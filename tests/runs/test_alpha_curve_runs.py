"""MSI over alpha_min, on some of the images of a comparison."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sufficit.compare import compare_folder
from sufficit.comparing import plates, sampling
from sufficit.comparing.settings import Settings, read_run, settings_from
from sufficit.report.page import render

from own_model import MODEL
from report_content import make
from sufficit import UserError, evaluate, explain
from sufficit.data.images import read_image
from sufficit.metrics.scores import AlphaCurves, AlphaSearch
from sufficit.report import charts

N, CLASSES = 19, ("ant", "bee", "cat")


class StoppedError(Exception):
    """The run was stopped from outside."""


@pytest.fixture(autouse=True)
def no_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sufficit.comparing.saving._save_sheet", lambda *_: None)  # it takes long


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small pictures in class folders, more than are sampled, and a model of them."""
    place = tmp_path_factory.mktemp("curves")
    (place / "model.py").write_text(MODEL)
    pixels = np.random.default_rng(0).integers(0, 256, (N, 12, 10, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        path = place / "photos" / CLASSES[i % 3] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    return place / "photos"


def wanted(photos: Path, **more: object) -> Settings:
    usual = {"model": f"python:{photos.parent / 'model.py'}:make", "data": str(photos)}
    usual |= {"methods": ["gradcam", "layercam"], "value_step": 0.25, "percent_step": 0.25}
    return settings_from({**usual, "leak": False, "device": "cpu", **more})


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "run.json").read_text())


@pytest.mark.parametrize(
    ("step", "options"), [(0.05, {"value_step": 0.05, "fill": "mean"}), (0.25, {"batch_size": 5})]
)
def test_the_numbers_are_those_of_a_search_on_those_very_images(
    photos: Path, tmp_path: Path, step: float, options: dict[str, Any]
) -> None:
    for score in ("accuracy", "confidence"):
        settings = wanted(photos, seed=3, score=score, **options)
        found = compare_folder(settings, tmp_path / score, group=5)
        saved = record(tmp_path / score)["alpha_curve"]
        rows = [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17]
        assert saved["images"] == [found.names[row] for row in rows]
        assert saved["value_step"] == step
        images = torch.stack(
            [read_image(photos / name, found.classifier.view) for name in saved["images"]]
        )
        labels = torch.tensor([CLASSES.index(name[:3]) for name in saved["images"]])
        classifier = found.classifier
        noise = [np.random.default_rng([3, row]).random((12, 10), np.float32) for row in rows]
        maps = {m: explain(classifier, images, labels, m) for m in ("gradcam", "layercam")}
        maps["random"] = torch.from_numpy(np.stack(noise))
        calls = 0
        for method, heatmaps in maps.items():
            expected = evaluate(
                classifier, images, heatmaps, labels, alpha_min="search", value_step=step,
                fill=settings.fill, columns=["msi"], score=score,
            )  # fmt: skip
            assert saved["alphas"] == list(expected.search.alphas)
            got = found.alpha_curves.searches[method].msi
            torch.testing.assert_close(got, expected.search.msi, rtol=0, atol=1e-6)
            assert saved["mean_msi"][method] == pytest.approx(expected.search.means.tolist())
            calls += int(expected.calls.sum())
        assert list(saved["mean_msi"]) == ["gradcam", "layercam", "random", "center"]
        assert calls < saved["model_calls"] < 2 * calls


def test_the_report_and_the_figure_show_it_unless_it_is_switched_off(
    sufficit, photos: Path, tmp_path: Path
) -> None:
    model = f"python:{photos.parent / 'model.py'}:make"
    words = ["compare", "--model", model, "--data", photos, "--methods", "gradcam"]
    words += ["--no-leak", "--no-controls", "--value-step", 0.25, "--percent-step", 0.25]
    with_it, without = tmp_path / "with", tmp_path / "without"
    assert sufficit(*words, "--out", with_it).code == 0
    assert sufficit(*words, "--out", without, "--no-alpha-curve").code == 0
    page = (with_it / "report.html").read_text()
    assert "<b>MSI over alpha_min</b>" in page
    assert "16 of the 19 images, spread evenly over them, of curves in steps of 0.25" in page
    assert "MSI over alpha_min" not in (without / "report.html").read_text()
    assert "alpha_curve" not in {key for key in record(without) if key != "config"}
    assert read_run(without / "RUN.toml")["alpha_curve"] is False

    saved = record(with_it)["alpha_curve"]
    (axis,) = plates.alphas(with_it).axes
    assert list(axis.lines[0].get_ydata()) == saved["mean_msi"]["gradcam"]
    assert list(axis.lines[0].get_xdata()) == saved["alphas"]
    assert axis.get_title().endswith("compared at 0.5 (16 images)")
    drawn = sufficit("figure", with_it, "--show", "alpha", "--out", tmp_path / "alpha.png")
    assert drawn.code == 0, drawn.err
    refused = sufficit("figure", without, "--show", "alpha", "--out", tmp_path / "none.png")
    assert refused.code == 2
    assert "one alpha_min alone: compare anew" in refused.words + refused.err


def test_a_searched_alpha_min_is_known_of_all_images_and_not_measured_again(
    photos: Path, tmp_path: Path
) -> None:
    settings = wanted(photos, alpha_min="search", methods=["gradcam"], controls=False)
    assert compare_folder(settings, tmp_path / "out").alpha_curves is None
    assert "alpha_curve" not in record(tmp_path / "out")
    assert "the dotted line is the one chosen" in (tmp_path / "out" / "report.html").read_text()
    (axis,) = plates.alphas(tmp_path / "out").axes
    assert "images" not in axis.get_title()


def stop_in_the_second_bar() -> Callable[[float, float], None]:
    before = [0.0, 1]

    def told(done: float, total: float) -> None:
        before[1] += done < before[0]
        before[0] = done
        if before[1] == 2:
            raise StoppedError

    return told


def test_a_run_stopped_while_it_is_measured_goes_on_to_the_same_files(
    photos: Path, tmp_path: Path
) -> None:
    settings = wanted(photos)
    with pytest.raises(StoppedError):
        compare_folder(settings, tmp_path / "out", group=5, progress=stop_in_the_second_bar())
    assert len(list((tmp_path / "out" / "parts").glob("scores-*"))) == 4
    assert not list((tmp_path / "out" / "parts").glob("alpha-*"))
    compare_folder(settings, tmp_path / "out", group=5)
    compare_folder(settings, tmp_path / "whole", group=5)
    once, again = record(tmp_path / "whole"), record(tmp_path / "out")
    assert again["alpha_curve"] == once["alpha_curve"]
    charts_of = [
        re.search(r"<b>MSI over alpha_min</b>.*?</figure>", (out / "report.html").read_text(), re.S)
        for out in (tmp_path / "out", tmp_path / "whole")
    ]
    assert charts_of[0].group() == charts_of[1].group()


def test_what_was_measured_is_kept_where_the_files_could_not_be_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = wanted(photos), tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr("sufficit.compare.save_comparison", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compare_folder(settings, out, group=5)
    with monkeypatch.context() as asked:
        asked.setattr(sampling, "alpha_curves", lambda *_, **__: pytest.fail("asked again"))
        found = compare_folder(settings, out, group=5)
    assert record(out)["alpha_curve"] == found.alpha_curves.as_json(found.names)
    assert not (out / "parts").exists()


def test_a_run_that_was_begun_with_it_goes_on_without(photos: Path, tmp_path: Path) -> None:
    settings, out = wanted(photos), tmp_path / "out"
    with pytest.raises(StoppedError):
        compare_folder(settings, out, group=5, progress=stop_in_the_second_bar())
    found = compare_folder(replace(settings, alpha_curve=False), out, group=5)
    assert found.alpha_curves is None


def test_the_caption_says_on_which_images_and_why_the_table_may_differ() -> None:
    content = make(8, value_step=0.25)
    assert charts.search_panel(content) is None
    some = torch.linspace(-1, 1, 6).reshape(2, 3)
    search = AlphaSearch((0.2, 0.5, 0.8), some)

    def note(step: float, rows: tuple[int, ...]) -> str:
        curves = AlphaCurves(rows, step, {"bright": search}, 9)
        panel = charts.search_panel(replace(content, alpha_curves=curves))
        assert [line.name for line in panel.lines] == ["bright"]
        assert panel.mark == 0.5
        return panel.note

    assert note(0.5, (0, 4)) == (
        "Mean MSI on 2 of the 8 images, spread evenly over them, of curves in steps of 0.5. The"
        " dotted line is the alpha_min of the table; for fewer images and coarser steps its MSI may"
        " differ a little from the table's."
    )
    assert "for fewer images its MSI may" in note(0.25, (0, 4))
    assert "on all 8 images, of" in note(0.5, tuple(range(8)))
    assert "differ" not in note(0.25, tuple(range(8)))
    curves = AlphaCurves((0, 4), 0.5, {"bright": search}, 9)
    page = render(replace(content, alpha_curves=curves))
    assert note(0.5, (0, 4)).replace("'", "&#39;") in page


def test_an_older_run_without_it_is_told_so(photos: Path, tmp_path: Path) -> None:
    settings = wanted(photos, methods=["gradcam"], controls=False, alpha_curve=False)
    compare_folder(settings, tmp_path / "out")
    toml = tmp_path / "out" / "RUN.toml"
    toml.write_text(toml.read_text().replace("alpha_curve = false\n", ""))
    with pytest.raises(UserError, match="with --alpha-curve, which is usual, or with --alpha-min"):
        plates.alphas(tmp_path / "out")
