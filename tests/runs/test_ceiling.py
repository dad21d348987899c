"""What a run says of the ceiling: boxes searched for each image, under a held-out fill."""

from pathlib import Path
from typing import Any

import pytest
import torch

from small_runs import config_for, interrupted, run_small, write_photos
from sufficit import Lax, UserError, evaluate, explain
from sufficit.data.images import read_image
from sufficit.explainers.region_search import region_search
from sufficit.runs import rankings
from sufficit.runs.job import make_job


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rankings, "CALLS", 120)
    return write_photos(tmp_path, 7)


@pytest.mark.parametrize("held_out", ["auto", "noise"])
def test_the_ceiling_is_the_msi_of_searched_boxes_under_a_fill_they_never_saw(
    photos: Path, tmp_path: Path, held_out: str
) -> None:
    config = config_for(photos, ceiling=True, held_out_fill=held_out, leak=False)
    found = run_small(config, tmp_path / "out").record["ceiling"]
    fill = "blur" if held_out == "auto" else held_out
    assert found["fill"] == fill
    assert fill not in found["fills"]
    classifier = make_job(config).classifier
    images = torch.stack([read_image(photos / name, classifier.view) for name in found["images"]])
    classes = ["ant", "bee", "cat"]
    targets = torch.tensor([classes.index(name.split("/")[0]) for name in found["images"]])
    options: Any = {"value_step": 0.25, "columns": ("msi",), "progress": False, "fill": fill}
    boxes = region_search(classifier, images, targets, calls=120, fills=found["fills"])
    wanted = evaluate(classifier, images, boxes, targets, **options).mean()["msi"]
    assert found["searched"]["mean"] == pytest.approx(wanted, abs=1e-6)
    assert found["searched"]["low"] <= wanted <= found["searched"]["high"]
    maps = explain(classifier, images, targets, "gradcam", progress=False)
    own = evaluate(classifier, images, maps, targets, **options).mean()["msi"]
    assert found["msi"]["gradcam"] == pytest.approx(own, abs=1e-6)
    share = own / wanted if wanted > 0 else None
    assert found["share"]["gradcam"] == pytest.approx(share, abs=1e-5)
    assert found["n"] == 7
    assert set(found["msi"]) == {"gradcam", "layercam", "random", "center"}
    assert found["model_calls"] > 7 * 120


def test_an_interrupted_run_has_the_same_ceiling(photos: Path, tmp_path: Path) -> None:
    config = config_for(photos, ceiling=True, leak=False)
    whole = run_small(config, tmp_path / "whole", unit=3).record["ceiling"]
    interrupted(lambda: run_small(config, tmp_path / "part", unit=3))
    assert run_small(config, tmp_path / "part", unit=3).record["ceiling"] == whole


def test_without_the_option_nothing_is_searched(photos: Path, tmp_path: Path) -> None:
    assert "ceiling" not in run_small(config_for(photos, leak=False), tmp_path / "out").record


@pytest.mark.parametrize("more", [{"alpha_min": "search"}, {"columns": ["insertion_pixel"]}])
def test_a_ceiling_needs_msi_at_one_alpha_min(photos: Path, more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="ceiling needs MSI at one alpha_min"):
        make_job(config_for(photos, ceiling=True, leak=False, **more))


def test_a_run_with_refine_is_told_apart_by_the_adapters_weights(
    photos: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lax"
    keys = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        Lax(4).save_pretrained(folder)
        job = make_job(config_for(photos, methods=[f"refine:{folder}:steps=1"], leak=False))
        keys.append(job.key()["methods"])
    assert keys[0] == keys[1] != keys[2]
