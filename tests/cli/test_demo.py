"""The demo: an adapter that is the same wherever it is trained, and what its report shows."""

import inspect
import json
import re
from itertools import count
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from rich.console import Console
from sufficit.demo import TRAINED_ON, run_demo, train
from torch import Tensor

from sufficit import Classifier, Lax, demo, evaluate, explain
from sufficit.cli.demo import demo as command
from sufficit.data.digits import synthetic_digits
from sufficit.training.validation import ValidationScores, ValidationSet

PICTURES = 32


def judged(monkeypatch: pytest.MonkeyPatch, step: int) -> Lax:
    """The demo's adapter where each epoch is found better (+1) or worse (-1) than the last."""
    worth = count(0, step)
    monkeypatch.setattr(
        ValidationSet, "score", lambda *_: ValidationScores(next(worth), 0.0, 0.0, 0.0, 0.0)
    )
    return train(Classifier.load("sufficit:digits"), PICTURES, seed=0)


def weights(lax: Lax) -> Tensor:
    return torch.cat([part.flatten() for part in lax.state_dict().values()])


def test_what_few_pictures_say_of_the_epochs_does_not_choose_the_demos_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rising, falling = judged(monkeypatch, 1), judged(monkeypatch, -1)
    assert torch.equal(weights(rising), weights(falling))
    torch.manual_seed(0)
    untrained = Lax(rising.channels, upsample=rising.upsample)
    assert not torch.equal(weights(rising), weights(untrained))


def test_the_number_of_threads_does_not_change_the_demos_adapter() -> None:
    classifier, found = Classifier.load("sufficit:digits"), {}
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found[threads] = weights(train(classifier, PICTURES, seed=0))
            assert torch.get_num_threads() == threads  # the caller's own again
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[1], found[2])


def test_the_command_trains_on_as_many_pictures_as_the_demo_and_its_picture() -> None:
    assert inspect.signature(command).parameters["train_images"].default == TRAINED_ON
    assert inspect.signature(run_demo).parameters["trained_on"].default == TRAINED_ON


def test_the_demos_report_shows_picked_pictures_and_msi_over_alpha_min(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, out = 30, tmp_path / "demo"
    monkeypatch.setattr(demo, "STEPS", {"value_step": 0.25, "percent_step": 0.5})
    monkeypatch.setattr(demo, "DONORS", 1)
    monkeypatch.setattr("sufficit.plots.save", lambda *_, **__: None)  # pictures take long
    run_demo(out, n, 0, Console(quiet=True), trained_on=32)

    page = (out / "report.html").read_text()
    shown = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    names = [image["name"] for image in json.loads(shown.group(1))["images"]]
    contest = json.loads((out / "summary.json").read_text())["standing"]["ranking"]
    msi = np.stack([pandas.read_parquet(out / m / "scores.parquet")["msi"] for m in contest])
    for order in (msi.mean(0), -msi.mean(0), np.ptp(msi, axis=0)):
        six = np.argsort(-order, kind="stable")[:6]
        assert {f"digit-{row:04d}" for row in six} <= {*names}
    assert len(names) == 24
    assert names != [f"digit-{row:04d}" for row in range(24)]
    assert "24 of 30 images: the best, the worst, the most disputed, and some drawn" in page

    saved = json.loads((out / "run.json").read_text())["alpha_curve"]
    rows = [0, 3, 7, 11, 15, 18, 22, 26]
    assert saved["images"] == [f"digit-{row:04d}" for row in rows]
    assert "Mean MSI on 8 of the 30 images" in page
    digits, classifier = synthetic_digits(n, seed=0), Classifier.load("sufficit:digits")
    images, labels = digits.images[rows], digits.labels[rows]
    maps = explain(classifier, images, labels, "gradcam")
    wanted = evaluate(classifier, images, maps, labels, alpha_min="search", value_step=0.25)
    assert saved["mean_msi"]["gradcam"] == pytest.approx(wanted.search.means.tolist())
    assert [*saved["mean_msi"]][:2] == ["lax", "gradcam"]
    assert "true digit" in saved["mean_msi"]
