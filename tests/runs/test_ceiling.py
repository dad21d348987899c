"""What a run says of the ceiling: boxes searched for each image, under a held-out fill."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from small_runs import config_for, run_small, write_photos
from sufficit import UserError, evaluate, explain
from sufficit.data.images import read_image
from sufficit.explainers.region_search import SEARCHED_FILLS, region_search
from sufficit.probes.ceiling import CeilingProbe
from sufficit.runs import probes_of
from sufficit.runs.job import make_job


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(probes_of, "CeilingProbe", partial(CeilingProbe, search=120))
    return write_photos(tmp_path, 7)


@pytest.mark.parametrize("fills", ["black", "blur,mean"])
def test_the_ceiling_is_the_msi_of_searched_boxes_under_a_fill_they_never_saw(
    photos: Path, tmp_path: Path, fills: str
) -> None:
    config = config_for(photos, fills=fills, checks="controls,ceiling")
    results = run_small(config, tmp_path / "out")
    fill = "blur" if fills == "black" else "noise"
    (probe,) = (one for one in make_job(config).probes if one.key == "ceiling")
    assert probe.inner.asked.fill == fill
    assert {*probe.fills} == {*SEARCHED_FILLS} - {fill}
    classifier = make_job(config).classifier
    images = torch.stack([read_image(photos / name, classifier.view) for name in results.names])
    classes = ["ant", "bee", "cat"]
    targets = torch.tensor([classes.index(name.split("/")[0]) for name in results.names])
    options: Any = {"value_step": 0.25, "columns": ("msi",), "progress": False, "fill": fill}
    seen = [one for one in SEARCHED_FILLS if one != fill]
    assert len(seen) >= 2
    boxes = region_search(classifier, images, targets, calls=120, fills=seen)
    wanted = evaluate(classifier, images, boxes, targets, **options).msi
    maps = explain(classifier, images, targets, "gradcam", progress=False)
    own = evaluate(classifier, images, maps, targets, **options).msi
    for method in ("gradcam", "layercam", "random", "center"):
        found = results.rows[method]["ceiling"].to_numpy()
        assert found == pytest.approx(wanted.numpy(), abs=1e-6), "the same for every source"
        estimate = results.summaries[method]["ceiling"]
        assert estimate.low <= wanted.mean() <= estimate.high
    found = results.rows["gradcam"]["msi_ceiling"].to_numpy()
    assert found == pytest.approx(own.numpy(), abs=1e-6)


def test_a_sample_is_searched_where_there_are_many_images(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes_of, "CEILING_IMAGES", 3)
    results = run_small(config_for(photos, checks="ceiling"), tmp_path / "out", unit=3)
    found = results.rows["gradcam"]["ceiling"].to_numpy()
    assert np.flatnonzero(~np.isnan(found)).tolist() == [0, 2, 4]
    estimate = results.summaries["gradcam"]["ceiling"]
    assert (estimate.n, estimate.n_nan) == (3, 0), "nothing is missing"
    assert "msi_ceiling" in results.report(tmp_path / "report.html").read_text()


def test_without_the_check_nothing_is_searched(photos: Path, tmp_path: Path) -> None:
    assert "ceiling" not in run_small(config_for(photos), tmp_path / "out").table()


@pytest.mark.parametrize("more", [{"alpha_min": "search"}, {"columns": ["insertion_pixel"]}])
def test_a_ceiling_needs_msi_at_one_alpha_min(photos: Path, more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="ceiling needs MSI at one alpha_min"):
        make_job(config_for(photos, checks="ceiling", **more))
