"""`sufficit explain --share`: every map cut at one share of the image."""

from pathlib import Path

import pandas
import torch

from sufficit import Classifier, explain
from sufficit.data.images import list_images, read_image
from sufficit.sources import MapFile


def test_maps_are_cut_at_the_share_and_stored_with_it(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cut"
    run = sufficit(
        *("explain", digits, "--model", "sufficit:digits", "--out", out),
        *("--methods", "gradcam,center", "--share", "0.1"),
    )
    assert run.code == 0, run.err
    assert not (out / "certificates.csv").exists(), "the model is not asked"
    names = [image.name for image in list_images(digits)]
    assert len(list((out / "overlays").rglob("*.png"))) == 2 * len(names)
    images = torch.stack([read_image(digits / name, None) for name in names])
    labels = torch.tensor([int(name[0]) for name in names])
    classifier = Classifier.load("sufficit:digits")
    for method in ("gradcam", "center"):
        wanted = explain(classifier, images, labels, method=method, size=0.1) >= 0.5
        file = out / f"{method}@0.1.npz"
        source = MapFile(method, file)
        assert source.file.is_cut
        assert {source.file.share(name) for name in names} == {0.1}
        model = ("--model", "sufficit:digits", "--data", digits, "--columns", "mask_penalty")
        maps = ("--heatmaps", file, "--out", tmp_path / method)
        scored = sufficit("evaluate", *model, *maps)
        assert scored.code == 0, scored.err
        rows = pandas.read_parquet(tmp_path / method / "heatmaps" / "scores.parquet")
        assert rows["mask_penalty"].tolist() == [410 / 4096] * len(names)
        for name, region in zip(names, wanted, strict=True):
            order = source.read(name)
            first = order.flatten().argsort(descending=True, stable=True)[:410]
            assert region.flatten()[first].all()
            assert int(region.sum()) == 410
        source.close()


def test_a_share_outside_the_image_is_one_error(sufficit, digits: Path, tmp_path: Path) -> None:
    for share in ("0", "1.5", "nan"):
        run = sufficit(
            *("explain", digits, "--model", "sufficit:digits", "--out", tmp_path / "none"),
            *("--share", share),
        )
        assert run.code == 2
        assert "the size of a region is a share of the image, above 0 to 1" in run.err
        assert not (tmp_path / "none").exists()
