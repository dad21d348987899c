"""A score of the user's in place of classes."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from small_models import Traces, rand, random_images
from small_runs import STEPS, write_photos
from sufficit import (
    Classifier,
    UserError,
    compare,
    evaluate,
    explain,
    leak,
    train_lax,
    train_twin,
)
from sufficit.explainers.gradients import input_x_gradient
from sufficit.explainers.region_search import region_search
from sufficit.perturbation.predict import predict_views
from sufficit.perturbation.predictions import ViewPredictions

QUICK = {"value_step": 0.25, "percent_step": 0.25}


class Brightness(nn.Module):
    """Returns a dict with the weighted sum of the pixels, as a regression model might."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.weights = nn.Parameter(sign * rand(3, 8, 8))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"value": (images * self.weights).sum((1, 2, 3))}


def value(output: dict[str, Tensor]) -> Tensor:
    return output["value"]


def slow_share(model: Brightness, image: Tensor, mask: Tensor) -> float:
    with torch.no_grad():
        whole, masked = (float(model(x[None])["value"]) for x in (image, image * mask))
    return min(max(masked / whole, 0), 1)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kind", ["confidence", "accuracy"])
def test_columns_are_made_of_shares_of_the_whole_images_value(sign: float, kind: str) -> None:
    """Insertion by percentage and MSI, image by image and mask by mask."""
    model, images, heatmaps = Brightness(sign), random_images(3, 8), rand(3, 8, 8, seed=4)
    classifier = Classifier(model).with_score(value)
    traces = Traces(model)
    scores = evaluate(classifier, images, heatmaps, score=kind, **QUICK)
    traces.check()
    for i in range(3):
        judge = lambda mask, i=i: (  # noqa: E731  # of one image
            slow_share(model, images[i], mask)
            if kind == "confidence"
            else float(slow_share(model, images[i], mask) >= 0.5)
        )
        order = heatmaps[i].flatten().argsort(descending=True, stable=True)
        curve = []
        for k in (0, 16, 32, 48, 64):
            mask = torch.zeros(64)
            mask[order[:k]] = 1
            curve.append(judge(mask.view(8, 8)))
        area = sum((a + b) / 8 for a, b in pairwise(curve))
        assert scores.insertion_percent[i].item() == pytest.approx(area, abs=1e-5)
        m = heatmaps[i]
        show = [judge((m > a).float()) for a in (0.5, 0.75, 1.0)]
        hide = [judge(((m > 0.5) & (m <= a)).float()) for a in (0.5, 0.75, 1.0)]
        areas = [0.25 * (c[0] / 2 + c[1] + c[2] / 2) / 0.5 for c in (show, hide)]
        base = 0.5 * (show[0] - judge((m <= 0.5).float()) + areas[0] - areas[1])
        assert scores.base_score[i].item() == pytest.approx(base, abs=1e-5)
    if kind == "confidence":
        same = evaluate(Classifier(model), images, heatmaps, score=value, **QUICK)
        assert torch.equal(same.msi, scores.msi)


def test_a_search_asks_whole_images_once_not_at_every_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, images, asked, views = Brightness(), random_images(3, 8), [], []

    def counted(*given: Any, **options: Any) -> ViewPredictions:
        views.append(len(given[3][0]))
        return predict_views(*given, **options)

    def without_gradients(output: dict[str, Tensor]) -> Tensor:
        assert not torch.is_grad_enabled()
        return output["value"]

    monkeypatch.setattr("sufficit.explainers.region_search.predict_views", counted)
    model.register_forward_pre_hook(lambda _, given: asked.append(len(given[0])))
    classifier = Classifier(model).with_score(without_gradients)
    region_search(classifier, images, torch.zeros(3, dtype=torch.long), calls=300, fills=["black"])
    assert len(views) > 2  # moves
    assert sum(asked) == sum(views) + 3


@pytest.mark.parametrize(
    ("method", "masks"), [("rise:masks=12", 12), ("kernel-shap:grid=2:samples=14", 16)]
)
def test_masks_in_chunks_ask_whole_images_once(
    method: str, masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images, asked = Brightness(), random_images(3, 8), []
    classifier = Classifier(model).with_score(value)
    at_once = explain(classifier, images, method=method, progress=False)
    monkeypatch.setattr("sufficit.explainers.masking._CHUNK_ELEMENTS", 256)  # of 1 and 4 masks
    model.register_forward_pre_hook(lambda _, given: asked.append(len(given[0])))
    goals = torch.zeros(3, dtype=torch.long)
    in_chunks = explain(classifier, images, goals, method=method, progress=False)
    assert len(asked) > 3
    assert sum(asked) == 3 * (masks + 1)
    assert torch.allclose(in_chunks, at_once, atol=1e-6)


def test_known_values_of_whole_images_are_taken() -> None:
    model, images = Brightness(), random_images(3, 8)
    classifier, mask = Classifier(model).with_score(value), torch.ones(1, 8, 8, dtype=torch.bool)
    known = value(model(images)).detach() * torch.tensor([2.0, 1.0, 4.0])
    views = torch.tensor([2, 0]), torch.tensor([0, 0])
    goals = torch.zeros(2, dtype=torch.long)
    found = predict_views(classifier, images, mask, views, targets=goals, whole=known)
    assert found.confidences.tolist() == pytest.approx([0.25, 0.5])
    alone = predict_views(classifier, images, mask, views, targets=goals)
    assert alone.confidences.tolist() == [1.0, 1.0]


def test_training_and_leakage_refuse_a_model_without_classes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    classifier, images = Classifier(model).with_score(lambda logits: logits[:, 1]), rand(8, 3, 8, 8)
    traces = Traces(model)
    for refused in (
        lambda: train_lax(classifier, [images], epochs=1, target="prediction"),
        lambda: train_twin(classifier, [images], epochs=1),
        lambda: leak(classifier, images, rand(8, 8, 8)),
    ):
        with pytest.raises(UserError, match="need classes, .* without with_score"):
            refused()
    traces.check()


def test_methods_explain_the_score() -> None:
    model, images = Brightness(), random_images(2, 8)
    classifier = Classifier(model).with_score(value)
    found = input_x_gradient(
        classifier, images, torch.zeros(2, dtype=torch.long), layer=None, seed=0
    )
    assert torch.allclose(found, (images * model.weights).sum(1).detach(), atol=1e-5)
    for method in ("occlusion:grid=4", "rise:masks=20", "kernel-shap:grid=2:samples=14"):
        assert explain(classifier, images, method=method).amax() == 1, method


def test_a_value_of_zero_has_no_share() -> None:
    images = random_images(2, 8)
    images[1] = 0
    with pytest.warns(RuntimeWarning, match=r"your score gave no share .* in 1 of 2 images"):
        scores = evaluate(Classifier(Brightness()), images, rand(2, 8, 8), score=value, **QUICK)
    assert scores.msi.isnan().tolist() == [False, True]


def test_wrong_scores_are_refused() -> None:
    given = (Classifier(Brightness()), random_images(2, 8), rand(2, 8, 8))
    for wrong in (lambda out: out["value"][:, None], lambda out: 3.0, lambda out: out["value"][:1]):
        with pytest.raises(UserError, match=r"a score must return one number per image, \[N\] ="):
            evaluate(*given, score=wrong, **QUICK)
    for more in ({"targets": torch.tensor([0, 0])}, {"leak_donors": 2}):
        with pytest.raises(
            UserError, match="a score of your own has no classes: leave out targets"
        ):
            evaluate(*given, score=value, **QUICK, **more)
    with pytest.raises(UserError, match=r"a score takes \(what the model returns\)"):
        evaluate(*given, score=lambda images, output: output["value"], **QUICK)
    with pytest.raises(UserError, match=r"the score <lambda> raised KeyError: 'logits' \(.*line"):
        evaluate(*given, score=lambda output: output["logits"], **QUICK)
    with pytest.raises(UserError, match="score must be accuracy, confidence or a function"):
        given[0].with_score("accuracy")
    with pytest.raises(UserError, match="Unknown score 'acuracy'"):
        evaluate(*given, score="acuracy")


def test_compare_in_python_and_on_the_command_line(tmp_path: Path, sufficit) -> None:
    photos = write_photos(tmp_path, 6)
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\nfrom torch import nn\n"
        "def third(logits):\n    return logits.sigmoid()[:, 2]\n"
        "def make():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(),"
        " nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))\n"
    )
    steps = [word for name, step in STEPS.items() for word in (f"--{name.replace('_', '-')}", step)]
    words = ["--model", f"python:{own}:make", "--data", photos, "--size", "12"]
    words += ["--methods", "gradcam,occlusion:grid=4", "--score", f"python:{own}:third"]
    words += [*steps]
    checked = ["--checks", "controls,fill"]
    ran = sufficit("compare", *map(str, words), *checked, "--out", str(tmp_path / "run"))
    assert ran.code == 0, ran.err
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["config"]["score"].endswith("own.py:third")
    assert record["targets"] == "prediction"
    elsewhere = ["--out", str(tmp_path / "other"), "--targets", "label"]
    bad = sufficit("compare", *map(str, words), *elsewhere)
    assert bad.code == 2
    assert "a score of your own has no classes" in bad.err
    images = random_images(4, 12)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.uniform_(model[0].weight, 0.1, 1)  # no map is empty
    options = {**STEPS, "score": first_label, "checks": ("leak", "fill"), "progress": False}
    with pytest.warns(UserWarning, match="leak and clean accuracy need classes"):
        results = compare(Classifier(model), images, ["gradcam"], **options)
    maps = explain(Classifier(model).with_score(first_label), images)
    wanted = evaluate(Classifier(model), images, maps, score=first_label, **STEPS)
    assert results.rows["gradcam"]["msi"].tolist() == pytest.approx(wanted.msi.tolist(), abs=1e-6)


def first_label(logits: Tensor) -> Tensor:
    return logits.sigmoid()[:, 0]


def test_image_masks_and_box_searches_read_shares_too() -> None:
    """The same in any unit: a score a thousand times as large changes nothing."""
    model, images, heatmaps = Brightness(), random_images(3, 8), rand(3, 8, 8, seed=4)
    columns = ["infidelity", "faithfulness_correlation", "single_deletion"]
    found, boxes = [], []
    for factor in (1, 1000):
        classifier = Classifier(model).with_score(lambda out, k=factor: k * out["value"])
        scores = evaluate(classifier, images, heatmaps, columns=columns)
        found.append(torch.stack([scores[name] for name in columns]))
        boxes.append(explain(classifier, images, method="region-search:calls=100"))
    assert torch.allclose(*found, atol=1e-5)
    assert torch.equal(*boxes)
