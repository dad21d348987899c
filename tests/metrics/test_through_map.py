"""Average Drop, Increase in Confidence, ADCC, ARCC: one image at a time, and as peers have them."""

from functools import partial

import numpy as np
import pandas
import pytest
import torch
from pytorch_grad_cam.metrics import arcc as peer_arcc
from pytorch_grad_cam.metrics import cam_mult_image, road
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget
from scipy.stats import pearsonr
from torch import Tensor, nn
from torchcam.metrics import ClassificationMetric

from given_maps import Given
from reference import heatmaps_like
from small_models import rand
from sufficit import Classifier, UserError, compare, evaluate, explain
from sufficit.metrics import Evaluation, SeenMetric
from sufficit.metrics.columns import METRICS, metrics_named
from sufficit.metrics.through_map import (
    ROAD_SHARES,
    THROUGH_MAP,
    adcc,
    arcc,
    average_drop,
    coherency,
    increase_in_confidence,
)
from sufficit.perturbation import fills
from sufficit.probes.seen import through

N, SIDE = 4, 20
ASKED = ("average_drop", "increase_in_confidence")
PARTS = (*ASKED, "coherency", "mean_value", "road_score", "adcc", "arcc")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(200, 4),
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    return net.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(N, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(4))


def imputed(image: Tensor, known: Tensor) -> Tensor:
    """Solve the paper's system for the hidden pixels with a dense matrix: [3,H,W], [H,W]."""
    places = (~known).nonzero().tolist()
    number = {tuple(place): i for i, place in enumerate(places)}
    matrix, right = np.zeros((len(places), len(places))), np.zeros((len(places), 3))
    for i, (y, x) in enumerate(places):
        for down in (-1, 0, 1):
            for across in (-1, 0, 1):
                there = (y + down, x + across)
                inside = 0 <= there[0] < SIDE and 0 <= there[1] < SIDE
                if there == (y, x) or not inside:
                    continue
                weight = 1 / 6 if 0 in (down, across) else 1 / 12
                matrix[i, i] += weight
                if there in number:
                    matrix[i, number[there]] -= weight
                else:
                    right[i] += weight * image[:, there[0], there[1]].double().numpy()
    found = image.double().clone()
    values = torch.from_numpy(np.linalg.solve(matrix, right))
    for (y, x), value in zip(places, values, strict=True):
        found[:, y, x] = value
    grey = fills.grey_noise(image[None])[0].double()
    return (found + (grey - grey.mean((1, 2), keepdim=True)) * ~known).float()


def probability(net, image: Tensor, target: int) -> float:
    with torch.no_grad():
        return net(image[None].float()).double().softmax(1)[0, target].item()


def colour_of(fill, image: Tensor) -> Tensor:
    """The fill of one image, written again."""
    if isinstance(fill, Tensor):
        return fill[:, None, None].expand_as(image)
    colour = {"black": 0.0, "mean": image.mean((1, 2))[:, None, None]}[fill]
    return torch.zeros_like(image) + colour


@pytest.mark.parametrize("fill", ["black", "mean", torch.tensor([0.4, 0.5, 0.6])])
@pytest.mark.parametrize("kind", ["random", "zeros", "two_valued"])
def test_both_columns_equal_one_image_at_a_time(model, images, fill, kind) -> None:
    heatmaps, targets = heatmaps_like(kind, N, (SIDE, SIDE)), torch.tensor([0, 1, 2, 3])
    scores = evaluate(Classifier(model), images, heatmaps, targets, columns=ASKED, fill=fill)
    rose = []
    for i in range(N):
        target, hidden = int(targets[i]), colour_of(fill, images[i])
        weights = heatmaps[i].double()
        seen = images[i] * weights + hidden * (1 - weights)
        p, q = (probability(model, one, target) for one in (images[i], seen))
        assert scores.average_drop[i].item() == pytest.approx(max(0, p - q) / p, abs=2e-6)
        assert scores.increase_in_confidence[i].item() == float(q > p)
        rose.append(q > p)
    assert scores.calls.tolist() == [1] * N, "whole images are asked to score anything"


def test_torchcam_has_the_same_average_drop_and_increase(model, images) -> None:
    heatmaps = heatmaps_like("random", N, (SIDE, SIDE))
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.25])
    inputs = (images - mean[:, None, None]) / std[:, None, None]
    targets = model(inputs).argmax(1)
    theirs = ClassificationMetric(Given(model, heatmaps), partial(torch.softmax, dim=-1))
    theirs.update(inputs, targets.tolist())
    # They multiply what the model gets, where 0 is the mean colour.
    classifier = Classifier(model, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    found = evaluate(classifier, images, heatmaps, targets, columns=ASKED, fill=mean).mean()
    assert found["average_drop"] == pytest.approx(theirs.summary()["avg_drop"], abs=1e-6)
    assert found["increase_in_confidence"] == theirs.summary()["conf_increase"]
    assert found["average_drop"] > 0.01


def test_grad_cam_has_the_same_drop_and_increase(model, images) -> None:
    heatmaps = heatmaps_like("random", N, (SIDE, SIDE))
    targets = model(images).argmax(1)
    goals = [ClassifierOutputSoftmaxTarget(int(one)) for one in targets]
    theirs = cam_mult_image.DropInConfidence()(images, heatmaps.numpy(), goals, model)
    rises = cam_mult_image.IncreaseInConfidence()(images, heatmaps.numpy(), goals, model)
    scores = evaluate(Classifier(model), images, heatmaps, targets, columns=[*ASKED])
    whole = torch.stack([model(images).softmax(1)[i, c] for i, c in enumerate(targets)]).detach()
    np.testing.assert_allclose(scores.average_drop * whole, theirs, atol=1e-6)  # theirs: absolute
    np.testing.assert_array_equal(scores.increase_in_confidence, rises)


def drawn_again(net, images: Tensor, targets: Tensor, heatmaps: Tensor) -> Tensor:
    """Grad-CAM for each image through its map, one image at a time."""
    classifier = Classifier(net, layer="3")
    found = [
        explain(classifier, (images[i] * heatmaps[i])[None], targets[i : i + 1], method="gradcam")
        for i in range(len(images))
    ]
    return torch.cat(found)


@pytest.fixture
def rows(model, images, tmp_path):
    """The rows of every source of a run."""
    found = compare(
        Classifier(model, layer="3"),
        images,
        {"gradcam": "gradcam", "given": rand(N, SIDE, SIDE)},
        model(images).argmax(1),
        columns=[*PARTS, "msi"],
        checks="controls",
        percent_step=0.1,
        value_step=0.1,
        progress=False,
        out=tmp_path / "run",
    )
    folder = tmp_path / "run"
    return {name: pandas.read_parquet(folder / name / "scores.parquet") for name in found.methods}


def test_compare_has_the_columns_that_draw_again(rows, model, images) -> None:
    targets = model(images).argmax(1)
    maps = explain(Classifier(model, layer="3"), images, targets, method="gradcam")
    again = drawn_again(model, images, targets, maps)
    found = rows["gradcam"]
    for i in range(N):
        rho = pearsonr(maps[i].flatten().double(), again[i].flatten().double())[0]
        target = int(targets[i])
        p, q = (probability(model, one, target) for one in (images[i], images[i] * maps[i]))
        order = maps[i].flatten().argsort(descending=True, stable=True)
        roads = []
        for share in ROAD_SHARES:
            count = round(share * SIDE * SIDE)
            kept = []
            for some in (order[:count], order[-count:]):
                known = torch.zeros(SIDE * SIDE, dtype=torch.bool)
                known[some] = True
                known = known.view(SIDE, SIDE)
                kept.append(probability(model, imputed(images[i], known), target))
            roads.append((kept[0] - kept[1]) / 2)
        wanted = {
            "average_drop": max(0, p - q) / p,
            "increase_in_confidence": float(q > p),
            "coherency": (rho + 1) / 2,
            "mean_value": maps[i].double().mean().item(),
            "road_score": sum(roads) / len(roads),
        }
        coherent, size = wanted["coherency"], wanted["mean_value"]
        drop, road_part = wanted["average_drop"], min(max(2 * wanted["road_score"], 0), 1)
        wanted["adcc"] = 3 / (1 / coherent + 1 / (1 - drop) + 1 / (1 - size))
        wanted["arcc"] = (
            3 / (1 / coherent + 1 / road_part + 1 / (1 - size)) if road_part > 0 else 0.0
        )
        for name, value in wanted.items():
            loose = name in ("road_score", "arcc")  # the system is solved to a tolerance
            assert found[name].iloc[i] == pytest.approx(value, abs=2e-3 if loose else 5e-6), name


def test_what_does_not_draw_has_no_coherency(rows) -> None:
    for name in ("given", "random", "everything"):
        found = rows[name]
        assert found[["coherency", "adcc", "arcc"]].isna().all().all()
        assert found["average_drop"].notna().all()
    assert (rows["everything"]["average_drop"] == 0).all()


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept")  # of grad-cam's ROAD
def test_arcc_is_that_of_grad_cam_without_noise(model, images, monkeypatch) -> None:
    """With the same second map: theirs draws it by a method of its own."""
    monkeypatch.setattr(fills, "NOISE", 0.0)
    monkeypatch.setattr(road.NoisyLinearImputer.__init__, "__defaults__", (0.0, None))
    targets = model(images).argmax(1)
    heatmaps = heatmaps_like("random", N, (SIDE, SIDE))
    again = rand(N, SIDE, SIDE, seed=5)
    goals = [ClassifierOutputSoftmaxTarget(int(one)) for one in targets]
    theirs = peer_arcc.ARCC(base_method=lambda **_: again.numpy())
    wanted = theirs(images, heatmaps.numpy(), goals, model)
    roads = theirs.road(images, heatmaps.numpy(), goals, model)
    columns = ["road_score", "mean_value"]
    scores = evaluate(Classifier(model), images, heatmaps, targets, columns=columns)
    assert scores.calls.tolist() == [2 * len(ROAD_SHARES)] * N
    np.testing.assert_allclose(scores.road_score, roads, atol=1e-3)
    assert np.abs(roads).max() > 5e-3
    similar = coherency(heatmaps, again)
    np.testing.assert_allclose(
        similar, (peer_arcc.batch_pearson_coherency(again.numpy(), heatmaps.numpy()) + 1) / 2,
        atol=1e-6,
    )  # fmt: skip
    exact = torch.stack([torch.from_numpy(roads), similar, scores.mean_value], dim=1)
    np.testing.assert_allclose(arcc(exact), wanted, atol=1e-4)


def test_answers_known_by_hand() -> None:
    parts = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.2, 0.9, 0.3]])
    assert adcc(parts)[:2].tolist() == [1.0, 0.0]
    assert adcc(parts)[2].item() == pytest.approx(3 / (1 / 0.8 + 1 / 0.9 + 1 / 0.7))
    assert arcc(torch.tensor([[0.5, 1.0, 0.0], [-0.1, 1.0, 0.0]])).tolist() == [1.0, 0.0]
    nan = torch.tensor([torch.nan])
    for formula in (average_drop, increase_in_confidence):
        assert formula(torch.tensor([0.5]), nan).isnan()
        assert formula(nan, torch.tensor([0.5])).isnan()
    flat = torch.ones(1, 2, 2)
    assert coherency(flat, rand(1, 2, 2)).isnan()
    assert coherency(rand(1, 2, 2), torch.full((1, 2, 2), torch.nan)).isnan()


def test_what_is_seen_through_a_map_is_its_product_or_imputed() -> None:
    images, maps = rand(2, 3, 8, 8), rand(2, 8, 8, seed=1)
    torch.testing.assert_close(through(images, maps, "black"), images * maps[:, None])
    same = through(images, torch.ones(2, 8, 8), "road")
    torch.testing.assert_close(same, images)


def test_they_are_in_no_group_and_bring_their_parts() -> None:
    found = metrics_named(["all"], {}, truth=False, sampled=False)
    assert not {*found} & {*THROUGH_MAP} or {*found} >= {"msi"}
    assert not {*THROUGH_MAP} & {*found}
    assert {*THROUGH_MAP} <= {*METRICS}
    named = metrics_named(["msi", "adcc"], {}, truth=False, sampled=False)
    assert [*named] == ["msi", "average_drop", "coherency", "mean_value", "adcc"]


def test_finished_heatmaps_cannot_be_drawn_again(model, images) -> None:
    given = Classifier(model), images, rand(N, SIDE, SIDE)
    with pytest.raises(UserError, match="coherency draws every heatmap again"):
        evaluate(*given, columns=["adcc"])
    with pytest.raises(UserError, match="average_drop is no column of the torchmetrics classes"):
        Evaluation(given[0], columns=["average_drop"])


def test_a_metric_of_ones_own_sees_the_image_through_the_map(model, images) -> None:
    heatmaps, targets = rand(N, SIDE, SIDE), torch.tensor([0, 1, 2, 3])
    ratio = SeenMetric(higher_is_better=True, formula=lambda whole, seen: seen / whole)
    found = evaluate(Classifier(model), images, heatmaps, targets, metrics={"share_kept": ratio})
    for i in range(N):
        seen = probability(model, images[i] * heatmaps[i], i)
        assert found["share_kept"][i].item() == pytest.approx(
            seen / probability(model, images[i], i), rel=1e-4
        )
