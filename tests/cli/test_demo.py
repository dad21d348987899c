"""The demo: an adapter that is the same wherever it is trained, and a run like any other."""

import json
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
from sufficit.cli.demo import run_demo, train
from sufficit.data.digits import synthetic_digits
from sufficit.runs.config import RunConfig
from sufficit.runs.results import RunResults
from sufficit.training.validation import ValidationScores, ValidationSet

IMAGES = 32


def judged(monkeypatch: pytest.MonkeyPatch, step: int) -> Lax:
    """The demo's adapter where each epoch is found better (+1) or worse (-1) than the last."""
    worth = count(0, step)
    means = lambda: {"msi": next(worth), "leak": 0.0, "leak_chance": 0.0}  # noqa: E731
    monkeypatch.setattr(ValidationSet, "score", lambda *_: ValidationScores(means()))
    return train(Classifier.load("sufficit:digits"), IMAGES, seed=0)


def weights(lax: Lax) -> Tensor:
    return torch.cat([part.flatten() for part in lax.state_dict().values()])


def test_scores_of_few_images_do_not_choose_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    rising, falling = judged(monkeypatch, 1), judged(monkeypatch, -1)
    assert torch.equal(weights(rising), weights(falling))
    torch.manual_seed(0)
    untrained = Lax(rising.channels, upsample=rising.upsample)
    assert not torch.equal(weights(rising), weights(untrained))


def test_the_number_of_threads_does_not_change_the_adapter() -> None:
    classifier, found = Classifier.load("sufficit:digits"), {}
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found[threads] = weights(train(classifier, IMAGES, seed=0))
            assert torch.get_num_threads() == threads, "the caller's number is back"
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[1], found[2])


@pytest.mark.slow
def test_its_report_shows_chosen_images_and_msi_over_alpha_min(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, coarse = 30, {"value_step": 0.25, "percent_step": 0.5, "donors": 1}
    monkeypatch.setattr("sufficit.explainers.CAMS", ("gradcam", "layercam"))
    monkeypatch.setattr(demo, "RunConfig", lambda **options: RunConfig(**options | coarse))
    results = run_demo(tmp_path / "demo", n, 0, trained_on=32)
    assert results.standing is not None
    assert results.shown is not None
    ranking = results.standing.ranking
    assert set(ranking) == {"lax", "gradcam", "layercam"}
    assert set(results.unranked) == {"random", "center", "true-digit"}
    msi = np.stack([results.rows[m]["msi"] for m in ranking])
    for order in (msi.mean(0), -msi.mean(0), np.ptp(msi, axis=0)):
        assert {*np.argsort(-order, kind="stable")[:6].tolist()} <= {*results.shown.rows}
    assert len(results.shown.rows) == 24

    saved = results.record["alpha_curve"]
    rows = [i * n // 16 for i in range(16)]
    assert saved["images"] == [f"digit-{row:04d}" for row in rows]
    digits, classifier = synthetic_digits(n, seed=0), Classifier.load("sufficit:digits")
    images, labels = digits.images[rows], digits.labels[rows]
    maps = explain(classifier, images, labels, "gradcam")
    step = saved["value_step"]
    wanted = evaluate(classifier, images, maps, labels, alpha_min="search", value_step=step)
    assert wanted.search is not None
    means = wanted.search.means.tolist()
    assert saved["mean_msi"]["gradcam"] == pytest.approx(means, abs=1e-6)
    page = results.report(tmp_path / "report.html").read_text()
    assert "16 of the 30 images" in page
    assert "true-digit" in page


@pytest.mark.slow
def test_the_command_prints_the_table_and_leaves_its_figures(sufficit, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    run = sufficit("demo", "--images", "2", "--train-images", "32", "--out", out)
    assert run.code == 0, run.err
    assert "true-digit" in run.out
    assert "MSI is near +1" in run.words
    summary = json.loads((out / "summary.json").read_text())
    assert summary["true-digit"]["msi"]["mean"] > summary["random"]["msi"]["mean"]
    standing = summary["standing"]
    assert "center" not in standing["ranking"]
    ranked = [standing["means"][method] for method in standing["ranking"]]
    assert ranked == sorted(ranked, reverse=True)
    assert len(standing["not_different"]) == 5, "two images make no difference significant"
    frame = pandas.read_csv(out / "pairs.csv")
    assert frame["p_corrected"].tolist() == [pair["p_corrected"] for pair in standing["pairs"]]
    assert set(frame["correction"]) == {"holm"}
    assert standing["best"] in (out / "report.html").read_text()
    for name in ("sheet.png", "curves.png"):
        with Image.open(out / name) as picture:
            assert picture.width > 800
    assert RunResults.read(out).config.model == "sufficit:digits"
    again = sufficit("demo", "--images", "2", "--train-images", "32", "--out", out)
    assert again.code == 0, "the demo replaces its own results"
