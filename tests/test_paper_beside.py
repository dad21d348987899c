"""The scripts that stand beside published tables: RISE's protocol, torchcam in the same process."""

import json
from pathlib import Path

import check_results
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn

import beside_torchcam
import imagenet
import reproduce
import results_page
import rise_protocol
from sufficit import Classifier

PAPER_TABLES = Path(imagenet.__file__).with_name("tables.toml")
SIDE, ROWS = 32, rise_protocol.ROWS
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    return Classifier(net.eval(), layer="3", mean=MEAN, std=STD)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def slow_blur(normalised: Tensor) -> Tensor:
    """The notebook's blur of a normalised image, one pixel at a time: [3,H,W]."""
    point = np.zeros((11, 11))
    point[5, 5] = 1
    kernel = gaussian_filter(point, 5)
    wide = np.zeros((3, SIDE + 10, SIDE + 10))
    wide[:, 5:-5, 5:-5] = normalised.numpy()
    found = np.zeros((3, SIDE, SIDE))
    for y in range(SIDE):
        for x in range(SIDE):
            found[:, y, x] = (wide[:, y : y + 11, x : x + 11] * kernel).sum((1, 2))
    return torch.from_numpy(found).float()


def slow_area(net: nn.Module, start: Tensor, finish: Tensor, heatmap: Tensor, target: int) -> float:
    """The protocol's loop: so many pixels at a time become those of `finish`, all [3,H,W]."""
    order = sorted(range(SIDE * SIDE), key=lambda i: -heatmap.flatten()[i].item())
    step = ROWS * SIDE
    now, values = start.clone().flatten(1), []
    for number in range(SIDE * SIDE // step + 1):
        with torch.no_grad():
            values.append(net(now.view(1, 3, SIDE, SIDE)).softmax(1)[0, target].item())
        some = order[number * step : (number + 1) * step]
        now[:, some] = finish.flatten(1)[:, some]
    return (sum(values) - values[0] / 2 - values[-1] / 2) / (len(values) - 1)


def test_rises_protocol_is_its_loop_over_pixels(classifier: Classifier, images: Tensor) -> None:
    heatmaps = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(2))
    found = rise_protocol.scores(classifier, images, heatmaps)
    mean, std = (torch.tensor(one)[:, None, None] for one in (MEAN, STD))
    for i in range(3):
        inputs = (images[i] - mean) / std
        with torch.no_grad():
            target = int(classifier.model(inputs[None]).argmax())
        grey, soft = torch.zeros_like(inputs), slow_blur(inputs)
        deleted = slow_area(classifier.model, inputs, grey, heatmaps[i], target)
        inserted = slow_area(classifier.model, soft, inputs, heatmaps[i], target)
        assert found.deletion[i] == pytest.approx(deleted, abs=1e-5)
        assert found.insertion[i] == pytest.approx(inserted, abs=1e-5)


def test_a_step_is_an_eighth_of_the_rows_of_the_paper() -> None:
    assert 224 * ROWS == 1792
    assert rise_protocol.PUBLISHED == {"deletion": (0.1024, 0.1073), "insertion": (0.7654, 0.7784)}


def test_torchcam_and_sufficit_say_the_same(classifier: Classifier, images: Tensor) -> None:
    rows = beside_torchcam.rows_of(classifier, images, ("a", "b", "c"))
    assert len(rows) == 3 * len(beside_torchcam.METHODS)
    for name in beside_torchcam.PAIRS:
        np.testing.assert_allclose(rows[name], rows[f"torchcam_{name}"], atol=1e-6, err_msg=name)
    assert rows.msi.std() > 0
    assert rows.deletion_percent.std() > 0


def write_photographs(root: Path) -> None:
    """Made-up photographs in the layout of the data: three classes, every part, boxes."""
    folder = root / "imagenet"
    lines, boxes = ["image,part"], ["image,x,y,width,height"]
    for number in range(3):
        inside = folder / "train" / f"{number:03d}"
        inside.mkdir(parents=True)
        for place, kind in enumerate(("learn", "choose", "report")):
            drawn = np.random.default_rng(10 * number + place).integers(0, 255, (14, 14, 3))
            picture = Image.fromarray(drawn.astype(np.uint8)).resize((224, 224))
            picture.save(inside / f"{kind}.jpg")
            lines.append(f"{number:03d}/{kind}.jpg,{kind}")
            boxes.append(f"{number:03d}/{kind}.jpg,30,40,90,80")
    (folder / "splits.csv").write_text("\n".join(lines) + "\n")
    (folder / "train-boxes.csv").write_text("\n".join(boxes) + "\n")


def small_network(network: str, weights: Path, device: torch.device) -> Classifier:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 8, stride=8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 4, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 1000, bias=False),
    )
    with torch.no_grad():
        net[0].weight *= 9
        net[6].weight *= 30
    return Classifier(net.eval(), layer="2", mean=MEAN, std=STD)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # adapters of one epoch say what they are worth
def test_the_imagenet_table_is_made_and_printed(tmp_path: Path, monkeypatch) -> None:
    write_photographs(tmp_path)
    monkeypatch.setattr(imagenet, "classifier_of", small_network)
    out = tmp_path / "out"
    words = ["imagenet", "--quick", "--data", tmp_path, "--stand-ins", tmp_path, "--out", out]
    words += ["--photographs", "report", "--networks", "resnet50", "--device", "cpu"]
    reproduce.main([str(word) for word in [*words, "--seeds", 2, "--few", 2]])
    rows = pandas.read_parquet(out / "results" / "rows-resnet50.parquet")
    assert {*rows.way} == {"as-is", "common", "fitted", "few", "equal"}
    sizes = rows.groupby("way")["image"].nunique()
    assert sizes.to_dict() == {"as-is": 3, "common": 3, "fitted": 3, "few": 2, "equal": 2}
    fitted = rows[rows.way == "fitted"]
    assert {"gradcam", "lax-0", "lax-1", "masked-in-out", "learn-to-rank", "center"} <= {
        *fitted.method
    }
    assert {*rows[rows.way == "few"].method} == {*imagenet.SEARCHING, imagenet.CEILING}
    assert {*rows[rows.way == "equal"].method} == {*imagenet.SEARCHING}
    as_is = rows[rows.way == "as-is"]
    for name in ("msi_blur", "msi_mean_fill", "msi_noise", "average_drop", "pointing"):
        assert as_is[name].notna().all(), name
    run = json.loads((out / "results" / "run.json").read_text())
    steps = run["networks"]["resnet50"]["steps"]
    assert {*steps["resnet50-sizes"]["sizes"].values()} <= {*imagenet.SIZES}
    passes = steps["resnet50-passes"]
    assert all(passes["fitted"][name] > passes["drawn"][name] for name in passes["drawn"])
    # A table of a working tree with changes is not printed, so the commit is made up.
    results = tmp_path / "results" / "imagenet"
    results.mkdir(parents=True)
    for path in (out / "results").iterdir():
        (results / path.name).write_bytes(path.read_bytes())
    (results / "run.json").write_text(json.dumps(run | {"commit": "abcdef0"}))
    text, claims = results_page.page(tmp_path / "results", "{{all first}}\n\n{{imagenet networks}}")
    tables = check_results.Tables(tmp_path / "results", PAPER_TABLES)
    assert [*check_results.problems(text, json.loads(json.dumps(claims)), tables)] == []
    assert "| `lax` | fitted |" in text
    assert "| `rise` | equal |" in text


def test_photographs_are_read_by_part_with_their_boxes(tmp_path) -> None:
    folder = tmp_path / "imagenet"
    lines = ["image,part"]
    for number in range(3):
        inside = folder / "train" / f"{number:03d}"
        inside.mkdir(parents=True)
        for kind in ("learn", "report"):
            Image.new("RGB", (224, 224), (40 * number, 0, 7)).save(
                inside / f"{kind}.jpg", quality=99
            )
            lines.append(f"{number:03d}/{kind}.jpg,{kind}")
    (folder / "splits.csv").write_text("\n".join(lines) + "\n")
    boxes = "image,x,y,width,height\n001/report.jpg,10,20,4,2\n001/learn.jpg,0,0,9,9\n"
    (folder / "train-boxes.csv").write_text(boxes)
    found = imagenet.read_photographs(tmp_path, "report", None)
    assert found.names == tuple(f"{number:03d}/report.jpg" for number in range(3))
    assert found.labels.tolist() == [0, 1, 2]
    assert found.truth.sum((1, 2)).tolist() == [0, 8, 0]
    assert found.truth[1, 20:22, 10:14].all()
    assert imagenet.read_photographs(tmp_path, "report", 2).names == (
        found.names[0],
        found.names[2],
    )
    assert imagenet.first(found, 1).names == found.names[:1]


def test_the_ways_of_a_table_are_told_apart_by_their_names() -> None:
    rows = pandas.DataFrame({"method": ["gradcam", "gradcam@0.4", "gradcam+fit", "center+fit"]})
    assert [imagenet.plain_name(name) for name in rows.method] == ["gradcam"] * 3 + ["center"]
