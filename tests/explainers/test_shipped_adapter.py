"""The adapter that ships for the digits' net: whose it is, how good it is, how it is asked for."""

import json
from pathlib import Path

import pandas
import pytest
import torch

from digit_images import write_digits
from small_runs import FLAGS
from sufficit import Classifier, Lax, UserError, evaluate, explain, leak
from sufficit.data.digits import synthetic_digits

NAME = "sufficit:digits"
MODEL = ("--model", NAME)


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_digits(tmp_path / "digits", 12)


@pytest.fixture(scope="module")
def lax() -> Lax:
    return Lax.from_pretrained(NAME)


def test_it_fits_the_digits_net_and_no_other(lax: Lax) -> None:
    classifier = Classifier.load(NAME)
    lax.check(classifier)
    with torch.no_grad():
        next(classifier.model.parameters()).mul_(1.5)
    with pytest.raises(UserError, match="trained on another classifier"):
        lax.check(classifier)


@pytest.mark.slow
def test_on_unseen_digits_it_scores_far_above_gradcam_and_lies_on_them(lax: Lax) -> None:
    classifier, digits = Classifier.load(NAME), synthetic_digits(48, seed=77)
    images, labels = digits.images, digits.labels
    heatmaps = {m: explain(classifier, images, labels, m) for m in (lax, "gradcam")}
    msi = {
        m: evaluate(classifier, images, maps, labels, columns=("msi",), value_step=0.05).mean()
        for m, maps in heatmaps.items()
    }
    assert msi[lax]["msi"] > msi["gradcam"]["msi"] + 0.3
    assert leak(classifier, images, heatmaps[lax], labels, donors=8).ratio < 1.5
    peaks = heatmaps[lax].flatten(1).argmax(1, keepdim=True)
    around = torch.nn.functional.max_pool2d(digits.masks[:, None], 9, 1, 4).flatten(1)
    assert around.gather(1, peaks).mean() > 0.9


def test_it_says_how_it_was_trained(lax: Lax) -> None:
    trained = lax.trained
    assert trained["about"]["data"] == "12000 synthetic digits"
    assert len(trained["history"]) == trained["recipe"]["epochs"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_explain_and_compare_accept_it_by_name(sufficit, digits: Path, tmp_path: Path) -> None:
    run = sufficit("explain", digits, *MODEL, "--methods", NAME, "--out", tmp_path / "maps")
    assert run.code == 0, run.err
    words = ("--methods", f"gradcam,{NAME}", *FLAGS)
    run = sufficit("compare", *MODEL, "--data", digits, *words, "--out", tmp_path / "out")
    assert run.code == 0, run.err
    rows = pandas.read_parquet(tmp_path / "out" / "lax" / "scores.parquet")
    assert len(rows) == len(list(digits.rglob("*.png")))
    assert {"lax", "gradcam"} < set(json.loads((tmp_path / "out" / "summary.json").read_text()))


def test_an_unknown_shipped_adapter_is_refused(sufficit, digits: Path, tmp_path: Path) -> None:
    given = (digits, *MODEL, "--methods", "sufficit:birds", "--out", tmp_path / "x")
    run = sufficit("explain", *given)
    assert run.code == 2
    assert "Unknown adapter 'sufficit:birds'. Did you mean 'sufficit:digits'?" in run.err
    assert not (tmp_path / "x").exists()
