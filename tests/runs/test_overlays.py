"""`sufficit explain` is a run without scoring: overlays, sheets and heatmap files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from small_models import Traces
from small_runs import config_for, interrupted
from sufficit import Classifier, UserError, explain
from sufficit.classifier.checkpoint import View
from sufficit.data.heatmap_files import HeatmapFile, heatmap_writer, write_heatmaps
from sufficit.data.images import ImageSource, list_images, open_images, read_image
from sufficit.plots import blend
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job
from sufficit.runs.overlays import class_number, explain_run, images_in, row_title
from sufficit.runs.region_files import photograph
from sufficit.sources import kinds


def job_for(photos: Path, unit: int = 4, **more: Any) -> Job:
    options = {"checks": "none", **more}
    return make_job(config_for(photos, **options), unit=unit)


def test_it_writes_what_explain_returns(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def own(model, images, targets): return images.mean(1)")
    names = [image.name for image in list_images(photos)]
    write_heatmaps(tmp_path / "file.npz", {name: torch.rand(12, 10) for name in names})
    words = ["gradcam", f"python:{tmp_path / 'mine.py'}:own", str(tmp_path / "file.npz")]
    job, out = job_for(photos, methods=words), tmp_path / "out"
    traces = Traces(job.classifier.model)
    record = explain_run(job, out, progress=False)
    traces.check()
    assert record["methods"] == ["gradcam", "own", "file"]
    assert record["n"] == 11
    images = torch.stack([read_image(photos / name, None) for name in names])
    labels = torch.tensor([("ant", "bee", "cat").index(name[:3]) for name in names])
    assert list(record["targets"].values()) == labels.tolist()
    with HeatmapFile(tmp_path / "file.npz") as given:
        file = torch.stack([given.read(name) for name in names])
    drawn = {
        "gradcam": explain(job.classifier, images, labels),
        "own": images.mean(1),
        "file": file,
    }
    for method, expected in drawn.items():
        with HeatmapFile(out / f"{method}.npz") as stored:
            assert stored.keys == names
            for name, heatmap, image in zip(names, expected, images, strict=True):
                assert stored.read(name) == pytest.approx(heatmap, abs=1e-5)
                with Image.open(out / "overlays" / f"{name}.{method}.png") as shown:
                    wanted = (blend(image, heatmap) * 255).numpy()
                    assert np.asarray(shown) == pytest.approx(wanted, abs=1.5)
    left = {path.name for path in out.iterdir()}
    sheets = {"sheet.png", "sheet-2.png", "sheet-3.png"}
    assert left == sheets | {"gradcam.npz", "own.npz", "file.npz", "overlays", "run.json"}


def test_a_file_of_cut_maps_scores_as_the_fit_itself(photos: Path, tmp_path: Path) -> None:
    explain_run(job_for(photos, methods=["gradcam+fit"]), tmp_path / "out", progress=False)
    file = tmp_path / "out" / "gradcam+fit.npz"
    with HeatmapFile(file) as stored:
        assert stored.is_cut
        assert len(stored.keys) == 11
        assert all(0 < stored.share(key) <= 1 for key in stored.keys)
    words = ["gradcam+fit", f"stored={file}", f"again={file}+fit"]
    results = run(job_for(photos, methods=words, columns="all"), tmp_path / "run", progress=False)
    rows = {name: results.rows[name] for name in ("gradcam+fit", "stored", "again")}
    own = [name for name in rows["stored"] if name not in ("calls", "image")]
    assert "insertion_percent" in own
    for other in ("stored", "again"):
        assert rows[other][own].equals(rows["gradcam+fit"][own])
    assert rows["again"]["fit_share"].equals(rows["gradcam+fit"]["fit_share"])
    # alpha_min 0.5 marks exactly the region.
    pixels = 10 * 12
    counts = (rows["gradcam+fit"]["fit_share"] * pixels).round()
    assert (rows["stored"]["mask_penalty"] * pixels).round().equals(counts)


def test_a_file_in_which_one_share_is_missing_skips_that_image(
    photos: Path, tmp_path: Path
) -> None:
    names = [image.name for image in list_images(photos)]
    with heatmap_writer(tmp_path / "maps.npz") as write:
        for name in names[1:]:
            write(name, torch.randn(12, 10), 0.25)
        write(names[0], torch.randn(12, 10))
    words = [f"maps={tmp_path / 'maps.npz'}"]
    results = run(job_for(photos, methods=words), tmp_path / "run", progress=False)
    assert [*results.skipped] == [names[0]]
    assert "is missing, and other heatmaps of the file have one" in results.skipped[names[0]]


@pytest.mark.slow
def test_an_interrupted_run_draws_only_what_is_missing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain_run(job_for(photos), tmp_path / "whole", progress=False)
    out = tmp_path / "out"
    interrupted(lambda: explain_run(job_for(photos), out, progress=False), 2)
    assert not (out / "run.json").exists()
    drawn: list[int] = []
    usual = kinds.draw_all

    def counted(classifier: Classifier, images: torch.Tensor, *rest: Any, **more: Any) -> Any:
        drawn.append(len(images))
        return usual(classifier, images, *rest, **more)

    monkeypatch.setattr(kinds, "draw_all", counted)
    explain_run(job_for(photos), out, progress=False)
    assert drawn == [3], "the last unit"
    for method in ("gradcam", "layercam"):
        with (
            np.load(tmp_path / "whole" / f"{method}.npz") as one,
            np.load(out / f"{method}.npz") as two,
        ):
            assert one.files == two.files
            assert all(np.array_equal(one[name], two[name]) for name in one.files)
    other = tmp_path / "other"
    interrupted(lambda: explain_run(job_for(photos), other, progress=False))
    with pytest.raises(UserError, match="Cannot resume"):
        explain_run(job_for(photos, methods=["gradcam"]), other, progress=False)


def test_a_finished_run_draws_nothing_when_it_is_started_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    record = explain_run(job_for(photos), out, progress=False)
    written = (out / "gradcam.npz").stat().st_mtime_ns
    monkeypatch.setattr(kinds, "draw_all", None)
    again = explain_run(job_for(photos), out, progress=False)
    assert again["targets"] == record["targets"]
    assert (out / "gradcam.npz").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="choose another --out, or --overwrite"):
        explain_run(job_for(photos, methods=["gradcam"]), out, progress=False)


def test_overwriting_leaves_no_file_of_the_earlier_run(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    explain_run(job_for(photos), out, progress=False)
    mine = {"notes.txt", "sheet-of-mine.png", "maps-of-mine.npz"}
    for name in mine:
        (out / name).write_text("mine")
    for path in list(photos.rglob("*.png"))[1:]:
        path.unlink()
    explain_run(job_for(photos, methods=["gradcam"]), out, overwrite=True, progress=False)
    left = {path.name for path in out.iterdir()}
    assert left >= mine | {"gradcam.npz", "overlays", "run.json"}
    assert "layercam.npz" not in left
    assert "sheet-2.png" not in left
    assert len(list((out / "overlays").rglob("*.png"))) == 1


def test_unreadable_images_are_skipped_or_fatal(photos: Path, tmp_path: Path) -> None:
    (photos / "bee" / "empty.png").write_bytes(b"")
    record = explain_run(job_for(photos), tmp_path / "out", progress=False)
    assert record["skipped"] == {"bee/empty.png": "the file is empty"}
    assert record["n"] == 11
    with pytest.raises(UserError, match=r"bee/empty\.png: the file is empty"):
        explain_run(job_for(photos, unit=32, on_error="stop"), tmp_path / "b", progress=False)
    assert not (tmp_path / "b").exists()
    for path in photos.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="all 12 images were skipped"):
        explain_run(job_for(photos), tmp_path / "c", progress=False)
    assert not list(tmp_path.glob("c/*"))  # the same command works once the images are repaired


def test_an_error_of_the_model_before_the_first_unit_leaves_nothing(
    photos: Path, tmp_path: Path
) -> None:
    def broken(images: Tensor) -> Tensor:
        raise KeyError("a table of the model")

    job = job_for(photos)
    job.classifier.model.forward = broken  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="a table of the model"):
        explain_run(job, tmp_path / "out", progress=False)
    assert not list(tmp_path.glob("out/*"))


def test_one_class_can_be_explained_in_all_images(photos: Path, tmp_path: Path) -> None:
    job = job_for(photos, methods=["gradcam"], targets="prediction")
    job = replace(job, entries=job.entries.labelled(target=2), targets="label")
    record = explain_run(job, tmp_path / "out", progress=False)
    assert set(record["targets"].values()) == {2}
    name = "ant/00.png"
    image = read_image(photos / name, None)[None]
    expected = explain(job.classifier, image, torch.tensor([2]))[0]
    with HeatmapFile(tmp_path / "out" / "gradcam.npz") as stored:
        assert stored.read(name) == pytest.approx(expected, abs=1e-5)
    saved = json.loads((tmp_path / "out" / "run.json").read_text())
    assert saved["targets"] == record["targets"]


def test_files_and_folders_are_found_each_under_its_name(photos: Path, tmp_path: Path) -> None:
    one = photos / "ant" / "00.png"
    assert [image.name for image in images_in([one, photos / "bee"])] == [
        "00.png", "01.png", "04.png", "07.png", "10.png"
    ]  # fmt: skip
    assert [i.name for i in images_in([photos])] == [i.name for i in open_images(photos)]
    with pytest.raises(UserError, match=r"two images are called 00\.png: give the folder above"):
        images_in([one, photos / "ant"])
    with pytest.raises(UserError, match="no image file or folder at"):
        images_in([tmp_path / "absent"])
    (tmp_path / "a.tar").touch()
    with pytest.raises(UserError, match="is a shard: give the folder it is in"):
        images_in([tmp_path / "a.tar"])


def test_a_class_is_a_number_or_a_name() -> None:
    names = ["tabby cat", "7", "dog"]
    assert class_number("dog", names) == 2
    assert class_number("7", names) == 1, "a name comes first"
    assert class_number("5", names) == 5
    assert class_number("Tabby_Cat", names) == 0
    with pytest.raises(UserError, match=r"Unknown class 'dg'\. Did you mean 'dog'"):
        class_number("dg", names)
    with pytest.raises(UserError, match="the model has no class names: give --target a number"):
        class_number("dog", None)


def test_a_row_names_the_likeliest_classes_and_the_one_explained() -> None:
    probabilities = torch.tensor([0.1, 0.6, 0.05, 0.25])
    assert row_title("a.png", probabilities, 1, None) == (
        "a.png\nclass 1 0.60\nclass 3 0.25\nclass 0 0.10"
    )
    names = ["ant", "bee", "cat", "dog"]
    long = f"{'x' * 30}.png"
    title = row_title(long, probabilities, 2, names).splitlines()
    assert title[0] == f"...{long[-25:]}"
    assert title[-1] == "explained: cat 0.05"


def test_the_model_may_be_anything_that_classifies(photos: Path, tmp_path: Path) -> None:
    config = config_for(photos, methods=["center"], checks="none")
    nameless = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(360, 3)))
    job = make_job(config, classifier=nameless, unit=24)
    assert explain_run(job, tmp_path / "out", progress=False)["n"] == 11


@pytest.mark.parametrize(("side", "factor"), [(300, 2), (720, 3), (3000, 4)])
def test_a_region_is_shown_in_the_resolution_of_its_photograph(
    tmp_path: Path, side: int, factor: int
) -> None:
    across = np.linspace(0, 255, side, dtype=np.uint8)
    pixels = np.stack([np.broadcast_to(across, (side, side)), np.full((side, side), 90)], 2)
    pixels = np.concatenate([pixels, pixels[..., :1].swapaxes(0, 1)], 2).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (file,) = list_images(tmp_path)
    view = View(crop=(224, 224), resize=240)
    image = file.read(view)
    photo = photograph(file, view, image)
    assert photo.shape == (3, 224 * factor, 224 * factor)
    shrunk = torch.nn.functional.avg_pool2d(photo, factor)
    torch.testing.assert_close(shrunk, image, atol=0.02, rtol=0)
    assert photograph(ImageSource.from_tensors(image[None]).images[0], view, image) is image
