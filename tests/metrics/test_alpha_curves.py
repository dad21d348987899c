"""MSI over alpha_min: candidates of one column, whose bands are merged and asked once."""

import numpy as np
import pytest
import torch

from reference import heatmaps_like, small_net
from sufficit import Classifier, compare, evaluate
from sufficit.evaluation import batch_of
from sufficit.metrics.column import Column, Heading, candidate
from sufficit.metrics.columns import ALPHA_GRID, METRICS
from sufficit.metrics.metric import Schedule
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.probes.band import BandProbe
from sufficit.runs.probes_of import CURVE_IMAGES, coarse_step

SIZE = (8, 6)


def test_the_step_of_the_curves_is_never_finer_than_that_of_the_run() -> None:
    assert coarse_step(0.01) == 0.05
    assert coarse_step(0.25) == 0.25


@pytest.mark.parametrize("score", ["accuracy", "confidence"])
def test_the_curves_are_those_of_a_search_per_method(score: str) -> None:
    images = torch.rand(5, 3, *SIZE, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(5) % 3
    maps = {kind: heatmaps_like(kind, 5, SIZE) for kind in ("random", "tied", "saturated")}
    classifier = Classifier(small_net(seed=2))
    schedules = tuple(Schedule(alpha, score, 0.1) for alpha in ALPHA_GRID)
    column = Column("msi_alpha", METRICS["msi"], schedules, Heading("MSI", "MSI over alpha_min"))
    probe = BandProbe(MaskedModel(classifier, "mean", 7), (column,))
    rows = probe(batch_of(classifier, images, targets), maps)
    for method, heatmaps in maps.items():
        wanted = evaluate(
            classifier, images, heatmaps, targets, alpha_min="search", value_step=0.1,
            columns=["msi"], score=score, fill="mean",
        )  # fmt: skip
        assert wanted.search.alphas == ALPHA_GRID
        names = [candidate("msi_alpha", alpha) for alpha in ALPHA_GRID]
        found = torch.stack([rows[method][name] for name in names], dim=1)
        torch.testing.assert_close(found, wanted.search.msi, rtol=0, atol=1e-6)
        # The bands of all alphas are asked once: as many calls as one search makes.
        scored = evaluate(
            classifier, images, heatmaps, targets, alpha_min=wanted.alpha_min, value_step=0.1,
            columns=["msi"], score=score, fill="mean",
        )  # fmt: skip
        assert torch.equal(rows[method]["calls@"] + scored.calls, wanted.calls)


def test_a_comparison_has_the_curve_of_a_few_images() -> None:
    """Evenly spaced images, so many that they cost half of the scores at most."""
    images = torch.rand(60, 3, *SIZE, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(60) % 3
    maps = {"one": heatmaps_like("random", 60, SIZE), "two": heatmaps_like("tied", 60, SIZE)}
    classifier = Classifier(small_net(seed=2))
    found = compare(classifier, images, maps, targets, checks=("alpha-curve",), calls="exact")
    curve = found.record.alpha_curve
    assert curve["alphas"] == [*ALPHA_GRID]
    assert curve["images"] == CURVE_IMAGES
    rows = [i * 60 // curve["images"] for i in range(curve["images"])]
    for name, heatmaps in maps.items():
        wanted = evaluate(
            classifier, images[rows], heatmaps[rows], targets[rows], alpha_min="search",
            value_step=0.05, columns=["msi"],
        )  # fmt: skip
        np.testing.assert_allclose(curve["mean_msi"][name], wanted.search.means, atol=1e-6)
        # Rows have the calls of the scores alone.
        exact = evaluate(classifier, images, heatmaps, targets).calls
        assert found.rows[name]["calls"].tolist() == exact.tolist()
    few = compare(
        classifier, images[:2], {"one": maps["one"][:2]}, targets[:2], checks=("alpha-curve",)
    )
    assert few.record.alpha_curve["images"] == 1  # two would cost more than the scores
