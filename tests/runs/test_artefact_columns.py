"""Fragments as a column of runs, of methods, adapters and heatmap files."""

from pathlib import Path

import numpy as np
import pandas
import torch

from digit_images import write_digits
from sufficit import Classifier, Lax, explain
from sufficit.data.images import read_image
from sufficit.metrics.artefacts import fragments

COLUMNS = ("--columns", "msi,fragments", "--value-step", "0.25", "--device", "cpu")


def test_runs_count_fragments(sufficit, undrawn, tmp_path: Path) -> None:
    photos, out = write_digits(tmp_path / "photos", 8), tmp_path / "out"
    model = ("--model", "sufficit:digits", "--data", photos)
    run = sufficit(
        "compare",
        *model,
        *COLUMNS,
        "--methods",
        "gradcam,sufficit:digits",
        "--out",
        out,
        "--checks",
        "controls",
    )
    assert run.code == 0, run.err
    assert "parts" in run.words
    classifier = Classifier.load("sufficit:digits")
    frames = {p.parent.name: pandas.read_parquet(p) for p in out.glob("*/scores.parquet")}
    assert len(frames) == 5  # two methods, three controls
    own = next(name for name in frames if name not in ("gradcam", "random", "center"))
    names = frames[own]["image"].tolist()
    images = torch.stack([read_image(photos / name, None) for name in names])
    targets = torch.tensor(frames[own]["target"].tolist())
    adapter = Lax.from_pretrained("sufficit:digits")
    for name, method in (("gradcam", "gradcam"), (own, adapter)):
        maps = explain(classifier, images, targets, method)
        found = frames[name]
        np.testing.assert_allclose(found["fragments"], fragments(maps, 0.5))
    stored = {name: one.numpy() for name, one in zip(names, maps, strict=True)}
    np.savez(tmp_path / "maps.npz", **stored)
    scored = sufficit(
        "evaluate", *model, *COLUMNS, "--heatmaps", tmp_path / "maps.npz", "--out", tmp_path / "own"
    )
    assert scored.code == 0, scored.err
    again = pandas.read_parquet(tmp_path / "own" / "heatmaps" / "scores.parquet")
    assert again["fragments"].tolist() == frames[own]["fragments"].tolist()
