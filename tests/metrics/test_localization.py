"""Columns that compare heatmaps with where the object is: by hand, pixel by pixel, and Quantus."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from small_models import Spy
from sufficit import Classifier, UserError, compare, evaluate
from sufficit.data.truth import with_boxes
from sufficit.metrics import COLUMNS, Evaluation
from sufficit.metrics.localization import (
    LOCALIZATION,
    Overlap,
    energy,
    mass_accuracy,
    pointing,
    rank_accuracy,
)

TRUTH = tuple(LOCALIZATION)


def case(n: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Heatmaps without ties, and masks of which none is empty: [N,6,7]."""
    drawn = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(42, generator=drawn) for _ in range(n)])
    masks = torch.rand(n, 6, 7, generator=drawn) > 0.6
    return ((order + 1) / 43).view(n, 6, 7), masks


def slow(heatmap: Tensor, mask: Tensor, alpha_min: float) -> dict[str, float]:
    """Every column of one image, pixel by pixel."""
    pixels = [(y, x) for y in range(mask.shape[0]) for x in range(mask.shape[1])]
    inside = [p for p in pixels if mask[p]]
    rows, columns = [y for y, _ in inside], [x for _, x in inside]
    boxed = [
        (y, x)
        for y, x in pixels
        if min(rows) <= y <= max(rows) and min(columns) <= x <= max(columns)
    ]
    total = sum(heatmap[p].item() for p in pixels)
    best = max(pixels, key=lambda p: heatmap[p].item())
    highest = sorted(pixels, key=lambda p: -heatmap[p].item())[: len(inside)]
    above = {p for p in pixels if heatmap[p] > alpha_min}
    return {
        "pointing": float(best in inside),
        "energy": sum(heatmap[p].item() for p in boxed) / total,
        "mass_accuracy": sum(heatmap[p].item() for p in inside) / total,
        "rank_accuracy": len({*highest} & {*inside}) / len(inside),
        "iou": len(above & {*inside}) / len(above | {*inside}),
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(126, 2))


@pytest.mark.parametrize("alpha_min", [0.5, 0.8])
def test_every_column_equals_pixel_by_pixel(alpha_min: float) -> None:
    maps, masks = case()
    spy, images = Spy(network()), torch.rand(5, 3, 6, 7)
    plain = evaluate(Classifier(network()), images, maps, alpha_min=alpha_min)
    scores = evaluate(Classifier(spy), images, maps, alpha_min=alpha_min, truth=masks)
    assert tuple(scores.columns) == (*COLUMNS, *TRUTH)
    assert torch.equal(scores.calls, plain.calls)  # the model is not asked for it
    for i in range(5):
        for name, value in slow(maps[i], masks[i], alpha_min).items():
            assert scores[name][i].item() == pytest.approx(value, abs=1e-6), name
    assert all(scores.summary()[name].higher_is_better for name in TRUTH)


def test_perfect_and_opposite_maps_by_hand() -> None:
    masks = torch.zeros(1, 4, 4, dtype=torch.bool)
    masks[0, 1:3, 1:3] = True
    truth = with_boxes(masks)
    for maps, value in ((masks.float(), 1.0), (1 - masks.float(), 0.0)):
        for measure in (pointing, energy, mass_accuracy, rank_accuracy, Overlap(0.5)):
            assert measure(maps, truth).tolist() == [value], measure
    empty = torch.zeros(1, 4, 4)
    assert energy(empty, truth).item() == mass_accuracy(empty, truth).item() == 0
    assert Overlap(0.5)(empty, truth).item() == 0
    assert pointing(empty, truth).item() == 0.25  # all pixels are highest


def test_an_image_without_truth_is_nan_and_counted() -> None:
    maps, masks = case()
    masks[1] = False
    scores = evaluate(Classifier(network()), torch.rand(5, 3, 6, 7), maps, truth=masks)
    for name in TRUTH:
        assert scores[name].isnan().tolist() == [False, True, False, False, False]
        assert scores.nan_counts()[name] == 1
    assert scores.nan_counts()["msi"] == 0


def test_iou_is_at_the_alpha_min_that_was_found() -> None:
    maps, masks = case()
    images = torch.rand(5, 3, 6, 7)
    given = (Classifier(network()), images, maps)
    found = evaluate(*given, alpha_min="search", alphas=[0.2, 0.7], truth=masks)
    fixed = evaluate(*given, alpha_min=found.alpha_min, truth=masks)
    assert torch.equal(found.iou, fixed.iou)


def test_columns_can_be_named_and_need_a_truth() -> None:
    maps, masks = case()
    given = (Classifier(network()), torch.rand(5, 3, 6, 7), maps)
    some = evaluate(*given, columns=["msi", "pointing"], truth=masks)
    assert tuple(some.columns) == ("msi", "pointing")
    assert tuple(evaluate(*given, columns="msi", truth=masks).columns) == ("msi", *TRUTH)
    assert not {*evaluate(*given, columns="all").columns} & {*TRUTH}
    assert {*TRUTH} <= {*evaluate(*given, columns="all", truth=masks).columns}
    with pytest.raises(UserError, match="pointing compares heatmaps with where the object is"):
        evaluate(*given, columns=["pointing"])
    with pytest.raises(UserError, match=r"truth must be \[N,H,W\] = \[5, 6, 7\]"):
        evaluate(*given, truth=masks[:2])


def test_a_torchmetrics_class_takes_a_truth() -> None:
    maps, masks = case()
    images = torch.rand(5, 3, 6, 7, generator=torch.Generator().manual_seed(1))
    metric = Evaluation(Classifier(network()), truth=True)
    for rows in (slice(0, 2), slice(2, 5)):
        metric.update(images[rows], maps[rows], truth=masks[rows])
    wanted = evaluate(Classifier(network()), images, maps, truth=masks)
    for name in TRUTH:
        assert torch.equal(metric.scores()[name], wanted[name])
    with pytest.raises(UserError, match=r"give update\(..., truth=masks\)"):
        metric.update(images, maps)


def test_a_run_compares_every_source_with_the_truth_of_each_image() -> None:
    maps, masks = case()
    masks[3] = False
    images = torch.rand(5, 3, 6, 7, generator=torch.Generator().manual_seed(1))
    sources = {"a": maps, "b": maps.flip(1)}
    options: Any = {"checks": "none", "unit_size": 2}
    found = compare(Classifier(network()), images, sources, truth=masks, **options)
    for name, own in sources.items():
        wanted = evaluate(Classifier(network()), images, own, truth=masks)
        for column in TRUTH:
            rows = found.rows[name][column].to_numpy()
            np.testing.assert_allclose(rows, wanted[column].numpy(), err_msg=column)
    assert found.record.truth.n_without == 1
    assert found.summaries["a"]["iou"].n_nan == 1
    assert any("1 of 5 images have no truth" in remark for remark in found.remarks())
    sampled = compare(Classifier(network()), images, sources, truth=masks, calls=20, **options)
    for column in TRUTH:  # they ask the model nothing, so that sampling changes nothing
        assert sampled.summaries["b"][column].mean == found.summaries["b"][column].mean


# The same as Quantus has it; where it does not, the difference is tested.

quantus_warns = pytest.mark.filterwarnings("ignore")


@quantus_warns
@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("PointingGame", pointing),
        ("RelevanceMassAccuracy", mass_accuracy),
        ("RelevanceRankAccuracy", rank_accuracy),
        ("AttributionLocalisation", mass_accuracy),
    ],
)
def test_quantus_gives_the_same(name: str, measure: Any) -> None:
    quantus = pytest.importorskip("quantus")
    maps, masks = case(20)
    metric = getattr(quantus, name)(disable_warnings=True, abs=False, normalise=False)
    given = {"a_batch": maps[:, None].double().numpy(), "s_batch": masks[:, None].numpy()}
    wanted = metric.evaluate_batch(x_batch=given["a_batch"], **given)
    found = measure(maps, with_boxes(masks)).tolist()
    assert found == pytest.approx(np.asarray(wanted, float).tolist(), abs=1e-6)


@quantus_warns
def test_quantus_counts_a_flat_map_as_a_hit() -> None:
    """One of its highest pixels, which are all, is on the object; of ours only that share is."""
    quantus = pytest.importorskip("quantus")
    flat, mask = torch.full((1, 4, 4), 0.5), torch.zeros(1, 4, 4, dtype=torch.bool)
    mask[0, 0, 0] = True
    metric = quantus.PointingGame(disable_warnings=True, abs=False, normalise=False)
    theirs = metric.evaluate_batch(a_batch=flat[:, None].numpy(), s_batch=mask[:, None].numpy())
    assert theirs.tolist() == [True]
    assert pointing(flat, with_boxes(mask)).tolist() == [1 / 16]
