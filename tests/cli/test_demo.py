"""The demo: an adapter that is the same wherever it is trained, and a run like any other."""

import json
from itertools import count
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch import Tensor

from sufficit import Classifier, Lax, UserError, evaluate, explain
from sufficit.cli import demo
from sufficit.cli.demo import run_demo, train
from sufficit.data.digits import synthetic_digits
from sufficit.data.images import PHOTOS
from sufficit.runs.config import RunConfig
from sufficit.runs.job import Job
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
    results = run_demo(tmp_path / "demo", n, 0, trained_on=32)
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
    frame = pandas.read_csv(out / "pairs.csv").query("column == 'msi'")
    assert frame["p_corrected"].tolist() == [pair["p_corrected"] for pair in standing["pairs"]]
    assert set(frame["correction"]) == {"holm"}
    assert standing["best"] in (out / "report.html").read_text()
    for name in ("sheet.png", "curves.png"):
        with Image.open(out / name) as picture:
            assert picture.width > 800
    assert RunResults.read(out).config.model == "sufficit:digits"
    again = sufficit("demo", "--images", "2", "--train-images", "32", "--out", out)
    assert again.code == 0, "the demo replaces its own results"


TINY = """
import torch
from torch import nn
from sufficit import Classifier, View

def make():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(4, 5)).eval()
    return Classifier(model, layer="1", view=View((16, 16)))
"""


def test_the_photographs_are_scored_like_any_folder(sufficit, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TINY)
    out = tmp_path / "photos"
    model = f"python:{tmp_path / 'net.py'}:make"
    run = sufficit("demo", "--photos", "--model", model, "--out", str(out), "--no-open")
    assert run.code == 0, run.err
    results = RunResults.read(out)
    assert sorted(results.names) == ["astronaut.jpg", "cat.jpg", "coffee.jpg", "rocket.jpg"]
    assert results.record.targets == "prediction"
    assert {"gradcam", "random"} <= {*results.methods}
    assert (Path(results.config.data) / "SOURCES.md").is_file()
    assert (out / "report.html").stat().st_size > 20_000


def test_without_a_network_the_photographs_leave_nothing_behind(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    run = sufficit("demo", "--photos", "--out", str(tmp_path / "photos"))
    assert run.code == 2
    assert "cannot get mobilenet_v2" in run.err
    assert "--weights FILE" in " ".join(run.err.split())
    assert not (tmp_path / "photos").exists()


def test_photographs_take_weights_of_ones_own(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models import mobilenet_v2

    torch.manual_seed(5)
    model = mobilenet_v2()
    torch.save(model.state_dict(), tmp_path / "own.pth")
    seen = []

    def stop(job: Job, *_: object, **__: object) -> None:
        seen.append(job.classifier.model.classifier[1].weight)
        raise UserError("enough")

    monkeypatch.setattr("sufficit.runs.engine.run", stop)
    run = sufficit("demo", "--photos", "--weights", str(tmp_path / "own.pth"), "--out", "x")
    assert "enough" in run.err
    assert torch.equal(seen[0].cpu(), model.classifier[1].weight)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--photos", "--images", "8"), "--images is not for --photos"),
        (("--weights", "own.pth"), "--weights needs --photos"),
    ],
)
def test_options_of_the_other_demo_are_refused(sufficit, words, said: str, tmp_path: Path) -> None:
    run = sufficit("demo", *words, "--out", str(tmp_path / "out"))
    assert run.code == 2
    assert said in run.err
    assert not (tmp_path / "out").exists()


def test_every_photograph_has_a_source_and_all_are_small() -> None:
    listed = (PHOTOS / "SOURCES.md").read_text()
    files = sorted(PHOTOS.glob("*.jpg"))
    assert len(files) == 4
    assert all(f"| {file.name} |" in listed for file in files)
    assert sum(file.stat().st_size for file in files) < 150_000
    for file in files:
        with Image.open(file) as photo:
            assert (min(photo.size), photo.mode) == (256, "RGB")
