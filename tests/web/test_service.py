"""The answers about one image are those of the package."""

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from torch import Tensor, nn

from report_content import decoded
from small_models import small_vit
from sufficit import Classifier, Lax, View, evaluate, explain
from sufficit.errors import UserError
from sufficit.perturbation.fills import FILLS
from sufficit.web import Service, open_service


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"alpha_min": 0.33, "fill": "mean", "score": "confidence", "value_step": 0.1},
        {"target": "3", "fill": "blur"},
    ],
)
def test_scores_equal_those_of_evaluate(
    client: TestClient, service: Service, digit: bytes, images: Tensor, case: dict[str, Any]
) -> None:
    data = {"method": "layercam"} | case
    found = client.post("/api/score", files={"file": digit}, data=data).json()
    target = torch.tensor([int(case.get("target", 5))])
    heatmaps = explain(service.classifier, images, target, method="layercam")
    options = {"value_step": 0.05} | {k: v for k, v in case.items() if k != "target"}
    scores = evaluate(service.classifier, images, heatmaps, target, **options)
    for column in ("msi", "base_score", "mask_penalty", "insertion_pixel", "deletion_pixel"):
        assert found[column] == scores[column].item(), column
    assert found["target"]["number"] == target.item()
    curves, start = scores.curves(), found["start"]
    assert found["grid"][start] == found["alpha_min"] == options.get("alpha_min", 0.5)
    assert found["seconds"] > 0
    for view, name in (("kept", "show"), ("hidden", "hide")):
        expected = curves[name].confidence[0].tolist()
        assert found["curves"][view][start:] == pytest.approx(expected, abs=5e-5)
        hits = "".join(str(int(hit)) for hit in curves[name].accuracy[0])
        assert found["curves"][f"{view}_hits"][start:] == hits


def test_heatmaps_and_prediction_equal_those_of_the_package(
    client: TestClient, service: Service, digit: bytes, images: Tensor
) -> None:
    names = ["gradcam", "center", "random"]
    found = client.post("/api/explain", files={"file": digit}, data={"methods": names}).json()
    probabilities = service.classifier(images).softmax(1)[0]
    for one in found["prediction"]:
        assert one["probability"] == pytest.approx(probabilities[one["number"]].item(), abs=5e-5)
        assert one["name"] == str(one["number"])
    order = [one["number"] for one in found["prediction"]]
    assert order == probabilities.argsort(descending=True)[:5].tolist()
    assert found["target"]["number"] == order[0] == 5
    assert np.array_equal(decoded(found["image"]), np.asarray(Image.open(io.BytesIO(digit))))
    assert [one["method"] for one in found["maps"]] == names
    for one in found["maps"]:
        heatmap = explain(service.classifier, images, method=one["method"])[0]
        coded = decoded(one["map"])
        for step, alpha in enumerate(found["grid"]):
            above = heatmap > torch.tensor(alpha, dtype=torch.float32)
            assert np.array_equal(coded > step, above.numpy())
            assert one["shares"][step] == pytest.approx(above.double().mean().item(), abs=5e-5)
        assert one["mask_penalty"] == (heatmap >= 0.5).double().mean().item()
        assert not one["empty"]


def test_without_methods_a_request_gets_the_usual_ones(client: TestClient, digit: bytes) -> None:
    found = client.post("/api/explain", files={"file": digit}).json()
    usual = [one["name"] for one in client.get("/api/model").json()["methods"] if one["usual"]]
    assert [one["method"] for one in found["maps"]] == usual
    assert usual == ["gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam"]


class Bright(nn.Module):
    """Class 1 if the image is bright, class 0 if it is dark."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 1, 1, bias=False)
        nn.init.ones_(self.features.weight)

    def forward(self, images: Tensor) -> Tensor:
        light = self.features(images).mean((2, 3))
        return torch.cat([-light, light], 1)


def test_an_empty_heatmap_is_marked(client_of: Callable[..., TestClient], digit: bytes) -> None:
    bright = Classifier(Bright(), "features", view=View(crop=(16, 16)))
    client = client_of(open_service(bright, "bright"))
    for target, empty in (("0", True), ("1", False)):
        data = {"target": target, "methods": "gradcam"}
        found = client.post("/api/explain", files={"file": digit}, data=data).json()
        assert [one["empty"] for one in found["maps"]] == [empty]
        assert found["target"]["name"] == f"class {target}"


def test_a_model_that_returns_nan_answers_null(
    client_of: Callable[..., TestClient], digit: bytes
) -> None:
    class Nothing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.mean((2, 3)) * torch.nan

    model = nn.Sequential(nn.Conv2d(3, 3, 1), Nothing())
    client = client_of(open_service(Classifier(model, view=View(crop=(16, 16))), "nan"))
    data = {"methods": "center"}
    found = client.post("/api/explain", files={"file": digit}, data=data).json()
    assert [one["probability"] for one in found["prediction"]] == [None] * 3
    with pytest.warns(RuntimeWarning, match="the model gave NaN"):  # in the log of the server
        scored = client.post("/api/score", files={"file": digit}, data={"method": "center"})
    assert scored.json()["msi"] is None


def saliency(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    """Bright pixels.

    Nobody shows this second paragraph.
    """
    return images.mean(1)


def test_adapters_and_functions_are_methods_too(
    client_of: Callable[..., TestClient], digit: bytes, images: Tensor
) -> None:
    classifier = Classifier.load("sufficit:digits")
    lax = Lax(classifier.features(images)[0].shape[1])
    lax.belong_to(classifier, classifier.layer or "")
    service = open_service(classifier, "digits", {"mine": lax, "own": saliency, "cam": "gradcam"})
    usual = {one["name"]: one["about"] for one in service.facts["methods"] if one["usual"]}
    assert [*usual] == ["mine", "own", "cam"]
    assert usual["own"] == "Bright pixels."
    assert {"layercam", "gradcam", "random"} < {*service.methods}
    client = client_of(service)
    found = client.post("/api/explain", files={"file": digit}).json()["maps"]
    assert [one["method"] for one in found] == ["mine", "own", "cam"]
    grid = client.post("/api/explain", files={"file": digit}).json()["grid"]
    expected = torch.bucketize(images.mean(1)[0], torch.tensor(grid))
    assert np.array_equal(decoded(found[1]["map"]), expected.numpy())
    for name in usual:
        scored = client.post("/api/score", files={"file": digit}, data={"method": name})
        assert scored.is_success


def test_methods_and_maps_say_whether_they_are_class_agnostic(
    client_of: Callable[..., TestClient], digit: bytes, images: Tensor
) -> None:
    def bright(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        return images.mean(1)

    bright.class_agnostic = True  # type: ignore[attr-defined]
    classifier = Classifier.load("sufficit:digits")
    width = classifier.features(images)[0].shape[1]
    blind = Lax(width)
    blind.belong_to(classifier, classifier.layer or "")
    own = {"bright": bright, "own": saliency, "blind": blind, "old": "kpca-cam", "cam": "gradcam"}
    client = client_of(open_service(classifier, "digits", own))
    expected = {"bright": True, "own": False, "blind": True, "old": True, "cam": False}
    listed = client.get("/api/model").json()["methods"]
    assert {one["name"]: one["class_agnostic"] for one in listed}.items() >= expected.items()
    maps = client.post("/api/explain", files={"file": digit}).json()["maps"]
    assert {one["method"]: one["class_agnostic"] for one in maps} == expected


def test_a_method_that_does_not_work_on_the_model_is_refused_at_the_start() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    other = Classifier(model, view=View(crop=(8, 8)))
    assert "rollout" not in open_service(other, "other").methods
    with pytest.raises(UserError):
        open_service(other, "other", ["rollout"])
    lax = Lax(4)
    lax.belong_to(Classifier.load("sufficit:digits"), "features")
    with pytest.raises(UserError, match="another classifier"):
        open_service(other, "other", {"mine": lax})
    with pytest.raises(UserError):
        open_service(other, "other", {"flat": lambda c, images, targets: images})


def test_a_model_without_an_input_size_is_refused() -> None:
    classifier = Classifier(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten()))
    with pytest.raises(UserError, match="--size 224"):
        open_service(classifier, "mine")


def test_the_model_is_left_as_it_was(service: Service, client: TestClient, digit: bytes) -> None:
    before = {name: value.clone() for name, value in service.classifier.model.state_dict().items()}
    client.post("/api/score", files={"file": digit}, data={"method": "gradcam"})
    after = service.classifier.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in service.classifier.model.parameters())


def test_only_fills_that_work_with_the_model_are_offered(
    service: Service, client_of: Callable[..., TestClient]
) -> None:
    usual = ["black", "mean", "blur", "noise", "road"]
    vit = open_service(Classifier(small_vit(32), view=View(crop=(32, 32))), "vit", ["random"])
    for one, fills in ((service, usual), (vit, [*usual, "drop"])):
        assert list(one.fills) == fills
        client = client_of(one)
        page = client.get("/").text.split('<select id="fill"')[1].split("</select>")[0]
        assert re.findall("<option[^>]*>([a-z]+)<", page) == fills
        forms = client.get("/openapi.json").json()["components"]["schemas"]
        for form in ("ExplainForm", "ScoreForm"):
            assert forms[form]["properties"]["fill"]["enum"] == fills


def test_a_vit_whose_tokens_cannot_be_left_out_is_not_offered_drop() -> None:
    class Shifted(type(small_vit(32))):  # type: ignore[misc]  # its class is found at run time
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) + torch.arange(1000.0)

    model = small_vit(32)
    model.__class__ = Shifted
    found = open_service(Classifier(model, view=View(crop=(32, 32))), "vit", ["random"])
    assert "drop" not in found.fills


def test_every_method_that_is_offered_draws(
    service: Service, client: TestClient, digit: bytes
) -> None:
    for name in service.methods:
        answer = client.post("/api/explain", files={"file": digit}, data={"methods": name})
        assert (answer.status_code, answer.json()["maps"][0]["method"]) == (200, name)


def test_a_region_is_that_of_a_fit(
    client: TestClient, service: Service, digit: bytes, images: Tensor
) -> None:
    data = {"method": "gradcam", "target": "5"}
    found = client.post("/api/region", files={"file": digit}, data=data).json()
    target = torch.tensor([5])
    (wanted,) = explain(service.classifier, images, target, method="gradcam", fit=True)
    assert found["share"] == round(1000 * wanted.share)
    assert found["sentence"] == wanted.sentence
    assert found["fills"] == [one.fill for one in wanted.fills]
    shades = decoded(found["order"]).astype(int)
    for thousandths in (5, 100, 330, found["share"], 1000):
        size = thousandths / 1000
        region = explain(service.classifier, images, target, method="gradcam", size=size)[0] >= 0.5
        assert np.array_equal(shades > 255 - thousandths // 5, region.numpy()), size
    (fitted,) = [one for one in found["sizes"] if one[0] == found["share"]]
    for fill, answer in zip(found["fills"], fitted[1], strict=True):
        said = next(one.region for one in wanted.fills if one.fill == fill)
        assert answer == pytest.approx(said.confidence, abs=5e-5)
        assert said.is_target


@pytest.mark.parametrize("size", [0.02, 0.215, 0.8, 1.0])
def test_the_answer_at_a_size_is_that_of_the_masked_images(
    client: TestClient, service: Service, digit: bytes, images: Tensor, size: float
) -> None:
    data = {"method": "layercam", "size": size}
    found = client.post("/api/region", files={"file": digit}, data=data).json()
    region = explain(service.classifier, images, method="layercam", size=size) >= 0.5
    ((share, *parts),) = found["sizes"]
    assert share == round(1000 * size)
    assert found["fills"] == ["black", "blur", "noise"]
    for mask, answers in zip((region, ~region), parts, strict=True):
        for fill, answer in zip(found["fills"], answers, strict=True):
            shown = torch.where(mask[:, None], images, FILLS[fill](images))
            probabilities = service.classifier(shown).softmax(1)[0]
            confidence = answer if isinstance(answer, float) else answer[1]
            assert confidence == pytest.approx(probabilities[5].item(), abs=1e-4)
            named = str(int(probabilities.argmax()))
            assert isinstance(answer, float) if named == "5" else answer[0] == named


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"size": "0"}, "size: Input should be greater than 0, got '0'"),
        ({"size": "1.1"}, "size: Input should be less than or equal to 1"),
        ({"size": "nan"}, "size: Input should be a finite number"),
        ({"fill": "black"}, "fill: Extra inputs are not permitted"),
        ({"method": "gradcm"}, "Did you mean 'gradcam'?"),
        ({"target": "ten"}, "Unknown class 'ten'"),
    ],
)
def test_wrong_fields_of_a_region_are_refused(
    client: TestClient, digit: bytes, fields: dict[str, str], sentence: str
) -> None:
    answer = client.post("/api/region", files={"file": digit}, data={"method": "gradcam"} | fields)
    assert answer.status_code == 422
    assert sentence in answer.json()["error"]
