"""The tool behind the reference comparison, on a table of four images."""

import json
import sys
from pathlib import Path

import pandas
import pytest
import reference_table
import torch

from small_table import narrow_nets, small_table
from sufficit import Classifier, evaluate, explain
from sufficit.data.images import list_images


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")
def test_the_reference_comparison_of_a_small_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    small_table(run, seeds=1)
    words = ["synthetic-mnist", str(run), "--out", str(out), "--images", "4", "--cost-images", "2"]
    words += ["--twin-epochs", "1", "--twin-images", "16", "--twin-batch", "8", "--calls", "24"]
    words += ["--methods", "gradcam,occlusion,lax-robust,broken"]
    methods = reference_table.words_of

    def with_broken(table) -> dict[str, str]:
        return methods(table) | {"broken": "expected-gradients:baselines=/nowhere"}

    monkeypatch.setattr(reference_table, "words_of", with_broken)
    monkeypatch.setattr(sys, "argv", ["reference_table.py", *words])
    with narrow_nets():
        reference_table.main()
    found = json.loads((out / "reference" / "synthetic-mnist.json").read_text())
    assert found["cost"]["gradcam"]["calls"] == 3
    assert found["cost"]["occlusion"]["calls"] == 170
    assert found["cost"]["random"]["calls"] == 0
    assert "/nowhere" in found["cost"]["broken"]["failed"]
    assert set(found["methods"]) == {"gradcam", "occlusion", "lax-robust", "random", "center"}
    assert {one["key"] for one in found["conditions"]} == {"", "held_out", "twin"}
    assert {"iou", "leak_ratio", "msi_held_out", "msi_twin"} <= set(found["methods"]["gradcam"])
    twins = json.loads((out / "twins" / "synthetic-mnist.json").read_text())
    assert twins["twin"]["test_images"] == 20
    with narrow_nets():
        model, twin = Classifier.load(run / "classifier"), Classifier.load(run / "twin")
    images = torch.stack([one.read(model.view) for one in list_images(run / "test")])
    labels = torch.tensor([int(str(one.folder)) for one in list_images(run / "test")])
    maps = explain(model, images, labels, "gradcam", progress=False)
    for kind, column in (("reference", "msi_twin"), ("twins", "msi_twin_blur")):
        rows = pandas.read_parquet(run / kind / "gradcam" / "scores.parquet")
        known = json.loads((out / kind / "synthetic-mnist.json").read_text())["methods"]
        assert known["gradcam"][column]["mean"] == pytest.approx(rows[column].mean())
    right = (twin(images).argmax(1) == labels).double().mean().item()
    clean = {c["key"]: c["clean_accuracy"] for c in twins["conditions"]}
    assert clean["twin"] == pytest.approx(right)
    penalty = found["methods"]["gradcam"]["mask_penalty"]["mean"]
    exact = evaluate(model, images, maps, labels, columns=("mask_penalty",)).mean()
    assert penalty == pytest.approx(exact["mask_penalty"], abs=1e-6)
