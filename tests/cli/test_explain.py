"""`sufficit explain`: heatmaps drawn from the command line."""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr

from small_models import small_vit
from sufficit import Classifier, explain
from sufficit.classifier.randomization import cascade, copied, randomise
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import list_images, read_image
from sufficit.data.loader import Unit
from sufficit.explainers import recommended
from sufficit.explainers.explanation import draw_all
from sufficit.perturbation.heatmaps import resize
from sufficit.runs import overlays
from sufficit.runs.job import Job
from sufficit.runs.store import MAPS, UNITS
from sufficit.runs.unit_rows import Rows
from sufficit.sources import Fitted

N = 6
METHODS = "layercam,layercam+fit,mine=gradcam,center"


def drawing(digits: Path, *more: object) -> list[object]:
    return [
        "explain",
        digits,
        "--no-fit",
        "--model",
        "sufficit:digits",
        "--out",
        digits.parent / "drawn",
        *more,
    ]


def test_it_draws_what_evaluate_reads(sufficit, digits: Path, tmp_path: Path) -> None:
    run = sufficit(*drawing(digits, "--methods", "gradcam,center"))
    assert run.code == 0, run.err
    names = [image.name for image in list_images(digits)]
    images = torch.stack([read_image(digits / name, None) for name in names])
    labels = torch.tensor([int(name[0]) for name in names])
    expected = explain(Classifier.load("sufficit:digits"), images, labels)
    with np.load(tmp_path / "drawn" / "gradcam.npz") as stored:
        for name, heatmap in zip(names, expected, strict=True):
            assert stored[name] == pytest.approx(heatmap.numpy(), abs=1e-5)
    assert len(list((tmp_path / "drawn" / "overlays").rglob("*.png"))) == 2 * N
    with Image.open(tmp_path / "drawn" / "sheet.png") as sheet:
        assert sheet.height > 6 * sheet.width / 4
    model = ("--model", "sufficit:digits", "--data", digits, "--columns", "msi")
    maps = ("--heatmaps", tmp_path / "drawn" / "gradcam.npz", "--out", tmp_path / "scored")
    assert sufficit("evaluate", *model, *maps, "--value-step", "0.25").code == 0
    listed = ("--methods", "gradcam,center", "--out", tmp_path / "compared", "--checks", "none")
    assert sufficit("compare", *model, *listed, "--value-step", "0.25").code == 0
    both = [
        pandas.read_parquet(tmp_path / place / "scores.parquet")
        for place in ("scored/heatmaps", "compared/gradcam")
    ]
    assert both[0]["msi"].to_numpy() == pytest.approx(both[1]["msi"].to_numpy(), abs=1e-6)


def test_it_counts_heatmaps_that_are_all_zeros(sufficit, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def own(model, images, targets):\n"
        "    return images.mean(1) * (targets > 3)[:, None, None]\n"
    )
    names = [image.name for image in list_images(digits)]
    blank = sum(int(name[0]) <= 3 for name in names)
    assert 0 < blank < N
    words = f"center,own=python:{tmp_path / 'mine.py'}:own"
    run = sufficit(*drawing(digits, "--methods", words))
    assert run.code == 0, run.err
    assert f"All-zero heatmaps, which mark nothing, of {N} images: own {blank}." in run.err
    record = json.loads((tmp_path / "drawn" / "run.json").read_text())
    assert record["empty_heatmaps"] == {"own": blank, "center": 0}


def test_it_takes_functions_adapters_and_heatmap_files(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def own(model, images, targets): return images.mean(1)")
    words = f"a=python:{tmp_path / 'mine.py'}:own,lax=sufficit:digits,b={tmp_path / 'maps.npz'}"
    run = sufficit(*drawing(digits, "--methods", words))
    assert run.code == 0, run.err
    name = list_images(digits)[0].name
    with np.load(tmp_path / "drawn" / "a.npz") as stored:
        expected = read_image(digits / name, None).mean(0).numpy()
        assert stored[name] == pytest.approx(expected, abs=1e-6)
    for other in ("lax.npz", "b.npz"):
        assert (tmp_path / "drawn" / other).exists()


def test_sanity_takes_functions_as_well(sufficit, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def own(model, images, targets): return images.mean(1)")
    words = ["sanity", "--model", "sufficit:digits", "--data", digits, "--steps", "1"]
    words += ["--methods", f"gradcam,python:{tmp_path / 'mine.py'}:own", "--out", tmp_path / "out"]
    run = sufficit(*words)
    assert run.code == 0, run.err
    frame = pandas.read_csv(tmp_path / "out" / "sanity.csv")
    assert set(frame["method"]) == {"gradcam", "own"}


@pytest.mark.parametrize("target", ["7", "Seven"])
def test_one_class_is_given_by_number_or_name(
    sufficit, digits: Path, tmp_path: Path, target: str
) -> None:
    classifier = Classifier.load("sufficit:digits")
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    classifier.classes = tuple(names)
    classifier.save(tmp_path / "named")
    image = next(digits.rglob("*.png"))
    words = ["explain", image, "--no-fit", "--model", tmp_path / "named", "--out", tmp_path / "d"]
    assert sufficit(*words, "--target", target).code == 0
    with np.load(tmp_path / "d" / "gradcam.npz") as stored:
        drawn = stored[image.name]
    expected = explain(classifier, read_image(image, None)[None], torch.tensor([7]))[0]
    assert drawn == pytest.approx(expected.numpy(), abs=1e-5)
    other = sufficit(*words)  # without --target: another run
    assert other.code == 2
    assert "holds a finished run of other settings" in other.err
    wrong = sufficit(*words, "--target", "sevn", "--overwrite")
    assert wrong.code == 2
    assert "Unknown class 'sevn'. Did you mean 'seven'?" in wrong.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "grad-cam"], "Unknown method 'grad-cam'. Did you mean 'gradcam'?"),
        (["--methods", "rollout"], "rollout needs a transformer"),
        (["--layer", "feature"], "Unknown layer 'feature'. Did you mean 'features'?"),
        (["--target", "12"], "targets must lie in 0..9"),
        (["--target=-1"], "a class number must be a whole number, 0 or more, got '-1'"),
        (["--target", "9" * 30], "a class number must be a whole number, 0 or more, got '999"),
        (["--target", "3", "--targets", "label"], "--targets label one per image: give one of"),
    ],
)
def test_wrong_arguments_are_one_error_and_leave_no_folder(
    sufficit, digits: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    run = sufficit(*drawing(digits, *words))
    assert run.code == 2
    assert message in run.err
    assert not (tmp_path / "drawn").exists()


def test_class_folders_are_explained_for_their_class(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    swapped = tmp_path / "swapped" / "7"
    swapped.mkdir(parents=True)
    image = next(path for path in digits.rglob("*.png") if path.parent.name != "7")
    image.rename(swapped / image.name)
    words = [
        "explain",
        swapped.parent,
        "--no-fit",
        "--model",
        "sufficit:digits",
        "--out",
        tmp_path / "d",
    ]
    assert sufficit(*words).code == 0
    record = json.loads((tmp_path / "d" / "run.json").read_text())
    assert record["targets"] == {f"7/{image.name}": 7}
    assert sufficit(*words, "--overwrite", "--targets", "prediction").code == 0
    record = json.loads((tmp_path / "d" / "run.json").read_text())
    assert record["targets"] != {f"7/{image.name}": 7}
    run = sufficit(
        "evaluate", "--model", "sufficit:digits", "--data", swapped.parent, "--heatmaps",
        tmp_path / "d" / "gradcam.npz", "--out", tmp_path / "e", "--columns", "msi",
    )  # fmt: skip
    assert "classifies 0.0% of whole images correctly" in run.words
    assert "misses most labels" in run.err


@pytest.mark.filterwarnings("always:the model has random weights")
def test_random_weights_are_the_same_each_time_and_bring_a_warning(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    words = ["explain", digits, "--no-fit", "--model", "sufficit:digits", "--weights", "none"]
    words += ["--size", "64"]
    drawn = []
    for name in ("a", "b"):
        run = sufficit(*words, "--methods", "kpca-cam", "--out", tmp_path / name)
        assert run.code == 0, run.err
        assert "the model has random weights" in run.err
        with np.load(tmp_path / name / "kpca-cam.npz") as stored:
            drawn.append({key: stored[key] for key in stored.files})
    assert drawn[0].keys() == drawn[1].keys()
    assert all(np.array_equal(drawn[0][key], drawn[1][key]) for key in drawn[0])


def test_it_resumes_after_a_kill_and_draws_nothing_after_its_end(
    sufficit, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = drawing(digits, "--methods", "gradcam,random")
    assert sufficit(*words, "--out", tmp_path / "whole").code == 0
    monkeypatch.setattr("sufficit.runs.overlays.SHEET_ROWS", 2)
    usual, drawn = overlays.explain_unit, []

    def killed(job: Job, unit: Unit, following: Unit | None = None) -> Rows:
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(unit.number)
        return usual(job, unit, following)

    with monkeypatch.context() as patched:
        patched.setattr("sufficit.runs.overlays.explain_unit", killed)
        run = sufficit(*words)
    assert (run.code, drawn) == (130, [0, 1])
    assert "Interrupted: 4 of 6 images are done and kept." in run.err
    told = sufficit("status", tmp_path / "drawn")
    assert told.code == 0
    assert told.words.startswith("2 of 3 units 4 of 6 images ")
    with monkeypatch.context() as patched:
        drawn.pop()
        patched.setattr("sufficit.runs.overlays.explain_unit", killed)
        resumed = sufficit(*words)
    assert (resumed.code, drawn) == (0, [0, 2]), resumed.err
    for name in ("gradcam.npz", "random.npz"):
        with np.load(tmp_path / "whole" / name) as one, np.load(tmp_path / "drawn" / name) as two:
            assert one.files == two.files
            assert all(np.array_equal(one[key], two[key]) for key in one.files)
    folder = tmp_path / "drawn"
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert not any((folder / name).exists() for name in (UNITS, MAPS))
    monkeypatch.setattr("sufficit.runs.overlays.explain_unit", None)  # nothing is drawn again
    again = sufficit(*words)
    assert (again.code, again.out) == (0, resumed.out), again.err
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == files
    assert sufficit(*words, "--seed", "1").code == 2


def fitted(digits: Path, *more: object) -> list[object]:
    return ["explain", digits, "--model", "sufficit:digits", *more]


def test_by_default_it_shows_regions_with_certificates(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    run = sufficit(*fitted(digits, "--out", tmp_path / "drawn"))
    assert run.code == 0, run.err
    names = [image.name for image in list_images(digits)]
    images = torch.stack([read_image(digits / name, None) for name in names])
    labels = torch.tensor([int(name[0]) for name in names])
    expected = explain(Classifier.load("sufficit:digits"), images, labels, fit=True)
    with HeatmapFile(tmp_path / "drawn" / "gradcam+fit.npz") as stored:
        assert [stored.share(name) for name in names] == [one.share for one in expected]
    table = pandas.read_csv(tmp_path / "drawn" / "certificates.csv")
    assert table["image"].tolist() == names
    assert table["method"].unique().tolist() == ["gradcam+fit"]
    frame = expected.frame()
    assert table["sentence"].tolist() == frame["sentence"].tolist()
    assert table["passes"].tolist() == frame["passes"].tolist()
    assert table["mean_rest"].astype(str).tolist() == frame["mean_rest"].astype(str).tolist()
    assert table["blur_region_confidence"].to_numpy() == pytest.approx(
        frame["blur_region_confidence"].to_numpy(), abs=1e-5
    )
    said = " ".join(run.out.split())
    shown = [f"{name}: {one.sentence}" in said for name, one in zip(names, expected, strict=True)]
    assert shown == [True] * 5 + [False]
    assert "1 more: " in said
    uncut = [name for name, one in zip(names, expected, strict=True) if not one.enough]
    record = json.loads((tmp_path / "drawn" / "run.json").read_text())
    assert record["no_region"] == {"gradcam+fit": uncut}
    pictures = sorted((tmp_path / "drawn" / "regions").rglob("*.jpg"))
    assert len(pictures) == N
    with Image.open(pictures[0]) as picture:
        assert picture.width > 2 * 448
    assert not (tmp_path / "drawn" / "overlays").exists()
    with Image.open(tmp_path / "drawn" / "sheet.png") as sheet:
        assert sheet.height > 6 * sheet.width / 4


def test_every_method_is_fitted_once_however_it_is_written(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    words = fitted(digits, "--methods", METHODS, "--out", tmp_path / "o")
    run = sufficit(*words)
    assert run.code == 0, run.err
    files = {path.name for path in (tmp_path / "o").glob("*.npz")}
    assert files == {"layercam+fit.npz", "mine.npz", "center+fit.npz"}
    table = pandas.read_csv(tmp_path / "o" / "certificates.csv")
    assert table["method"].value_counts().to_dict() == dict.fromkeys(
        ["layercam+fit", "mine", "center+fit"], N
    )
    again = sufficit(*words)
    assert (again.code, again.out) == (0, run.out)


def test_regions_are_the_same_after_a_kill(
    sufficit, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sufficit(*fitted(digits, "--out", tmp_path / "whole"))
    assert whole.code == 0, whole.err
    monkeypatch.setattr("sufficit.runs.overlays.SHEET_ROWS", 2)
    usual, drawn = overlays.explain_unit, []

    def killed(job: Job, unit: Unit, following: Unit | None = None) -> Rows:
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(unit.number)
        return usual(job, unit, following)

    words = fitted(digits, "--out", tmp_path / "drawn")
    with monkeypatch.context() as patched:
        patched.setattr("sufficit.runs.overlays.explain_unit", killed)
        assert sufficit(*words).code == 130
    resumed = sufficit(*words)
    assert resumed.code == 0, resumed.err
    tables = [pandas.read_csv(tmp_path / name / "certificates.csv") for name in ("whole", "drawn")]
    # Batches of other sizes round in other places.
    pandas.testing.assert_frame_equal(*tables, atol=1e-5)
    overwritten = sufficit(*words, "--overwrite", "--no-fit")
    assert overwritten.code == 0, overwritten.err
    assert not (tmp_path / "drawn" / "certificates.csv").exists()
    assert not (tmp_path / "drawn" / "regions").exists()


def test_a_vit_is_recommended_an_attribution_and_a_cnn_a_cam() -> None:
    assert recommended(Classifier.load("sufficit:digits"), torch.rand(1, 3, 64, 64)) == "gradcam"
    vit = Classifier(small_vit().eval())
    assert recommended(vit, torch.rand(1, 3, 32, 32)) == "generic-attribution"
    assert vit.layer is None, "nothing that it found stays"


@pytest.mark.filterwarnings("ignore::sufficit.errors.EmptyHeatmapWarning")
def test_sanity_compares_the_order_of_a_fit_and_fits_nothing(
    sufficit, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fitted, "maps", None)
    words = ["sanity", "--model", "sufficit:digits", "--data", digits, "--steps", "1"]
    words += ["--methods", "gradcam,gradcam+fit,center+fit", "--out", tmp_path / "out"]
    run = sufficit(*words)
    assert run.code == 0, run.err
    table = pandas.read_csv(tmp_path / "out" / "sanity.csv").set_index("method")
    assert table.at["center+fit", "rank_correlation"] == pytest.approx(1)
    names = [image.name for image in list_images(digits)]
    images = torch.stack([read_image(digits / name, None) for name in names])
    labels = torch.tensor([int(name[0]) for name in names])
    model = Classifier.load("sufficit:digits")
    copy = copied(model)
    randomise(copy.bare, cascade(copy, images, 1)[0], 0)
    before, after = (
        draw_all(one, images, labels, ["gradcam"])["gradcam"].maps for one in (model, copy)
    )
    values = [
        spearmanr(*(resize(maps[row : row + 1], (64, 64)).flatten() for maps in (before, after)))
        for row in range(N)
    ]
    wanted = sum(float(one.statistic) for one in values) / N
    assert table.at["gradcam+fit", "rank_correlation"] == pytest.approx(wanted, abs=1e-4)
    # The negative part counts in an order alone.
    assert table.at["gradcam", "rank_correlation"] != pytest.approx(wanted, abs=1e-3)
