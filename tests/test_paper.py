"""The paper's tables in paper/: they use the public API alone, and one runs end to end."""

import ast
import hashlib
import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import image_sets
import networks
import reproduce
from classifier_training import Training, train_classifier
from image_sets import Batches, ImageSet, Wanted, augmented, read_sets
from sufficit import Classifier, UserError
from tables import COLUMNS, TABLES

PAPER = Path(__file__).parents[1] / "paper"
PUBLIC = {"sufficit", "sufficit.data.digits", "sufficit.provenance", "sufficit.sources"}
TINY = {
    **{"images": 4, "train-images": 64, "test-images": 20, "epochs": 1, "lax-epochs": 1},
    **{"twin-epochs": 1, "seeds": 2, "step": 0.25, "device": "cpu"},
}


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.py")), ids=lambda path: path.name)
def test_the_tables_use_the_public_api_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(one.name.startswith("sufficit.") for one in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sufficit"):
            assert node.module in PUBLIC
            assert not any(one.name.startswith("_") for one in node.names)
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            assert own or not node.attr.startswith("_") or node.attr.startswith("__")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished table of four images, two adapters per recipe."""
    folder = tmp_path_factory.mktemp("paper") / "run"
    reproduce.main(command(folder))
    return folder


def command(out: Path, **changed: object) -> list[str]:
    given = TINY | {"out": out} | changed
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["synthetic-mnist", "--quick", *options]


@pytest.mark.filterwarnings("ignore")  # an adapter of one epoch is not worth much, and says so
def test_a_table_is_made_from_data_to_report(out: Path) -> None:
    results = out / "results"
    rows = pandas.read_parquet(results / "rows.parquet")
    cams = ["gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam"]
    adapters = [f"lax-{recipe}-{seed}" for recipe in ("paper", "robust") for seed in (0, 1)]
    assert {*cams, *adapters, "random", "center"} <= {*rows.method}
    assert (rows.groupby("method").size() == 4).all()
    np.testing.assert_allclose(rows.base_score - rows.mask_penalty, rows.msi, atol=1e-12)
    assert rows.msi_twin.notna().all()
    assert rows.iou.between(0, 1).all()
    assert not (rows.msi_twin == rows.msi).all()
    run = json.loads((results / "run.json").read_text())
    assert (run["n"], run["alpha_min"], run["config"]["network"]) == (4, 0.5, "small-net")
    assert run["versions"]["torch"]
    assert 0 <= run["classifier"]["test_accuracy"] <= 1
    lines = (results / "table.md").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("| Grad-CAM |"))
    assert lines[place + 1].startswith("| *paper* | *0.744* |")
    assert (results / "report.html").stat().st_size > 10_000
    for kind, name in (("classifier", "classifier"), ("twin", "twin")):
        stored = (out / f"{name}.safetensors").read_bytes()
        assert run[kind]["sha256"] == hashlib.sha256(stored).hexdigest()
    stored = (out / "adapters" / "lax-paper-1" / "model.safetensors").read_bytes()
    assert run["adapters"]["lax-paper-1"]["sha256"] == hashlib.sha256(stored).hexdigest()
    assert run["gpu_minutes"] > 0


@pytest.mark.filterwarnings("ignore")
def test_a_finished_table_is_read_and_another_plan_is_refused(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it is done")

    for name in ("train_classifier", "train_lax", "train_twin", "compare", "write_results"):
        monkeypatch.setattr(reproduce, name, never)
    before = (out / "results" / "run.json").read_text()
    reproduce.main(command(out))
    assert (out / "results" / "run.json").read_text() == before
    with pytest.raises(SystemExit, match="cannot resume .*: epochs was 1, now 2"):
        reproduce.main(command(out, epochs=2))


def test_data_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give --data ROOT"):
        read_sets("cifar10", Wanted(None, 32))
    with pytest.raises(UserError, match=r"no CIFAR10 in .*: check --data, or add --download"):
        read_sets("cifar10", Wanted(tmp_path, 32))
    with pytest.raises(UserError, match=r"has no classes\.txt"):
        read_sets("cub200", Wanted(tmp_path, 224))


def test_cifar_is_read_from_class_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for k, name in enumerate(("cat", "ship")):
            folder = tmp_path / "cifar10" / part / name
            folder.mkdir(parents=True)
            for i in range(3):
                shade = 40 * k + 10 * i + (part == "test")
                Image.new("RGB", (32, 32), (shade, 0, 7)).save(folder / f"{i}.png")
    found = read_sets("cifar10", Wanted(tmp_path, 32, test=2))
    assert found.classes == ("cat", "ship")
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.train.pixels[:, 0, 5, 5].tolist() == [0, 10, 20, 40, 50, 60]
    assert found.test.labels.tolist() == [0, 1], "evenly over the classes"
    assert image_sets.as_seen(found.test.pixels, 224).shape == (2, 3, 224, 224)


def write_cub(folder: Path) -> None:
    lines: dict[str, list[str]] = {name: [] for name in image_sets.CUB_LISTS}
    boxes = []
    for k, name in enumerate(("001.Black_Crow", "002.Red_Finch", "003.Tiny_Wren"), 1):
        (folder / "images" / name).mkdir(parents=True)
        lines["classes.txt"].append(f"{k} {name}")
        for i in range(4):
            number = 4 * k + i
            picture = Image.new("RGB", (40, 30), (50 * k + i, 0, 0))
            picture.save(folder / "images" / name / f"{i}.png")
            lines["images.txt"].append(f"{number} {name}/{i}.png")
            lines["image_class_labels.txt"].append(f"{number} {k}")
            lines["train_test_split.txt"].append(f"{number} {int(i != 3)}")
            boxes.append(f"{number} 10.0 0.0 15.0 30.0")
    for name, rows in {**lines, image_sets.CUB_BOXES: boxes}.items():
        (folder / name).write_text("\n".join(rows) + "\n")


def test_cub_is_read_by_its_own_lists_with_the_birds_boxes(tmp_path: Path) -> None:
    write_cub(tmp_path / "CUB_200_2011")
    found = read_sets("cub200", Wanted(tmp_path, 28))
    assert found.classes == ("001.Black_Crow", "002.Red_Finch", "003.Tiny_Wren")
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found.test.pixels[:, 0, 9, 9].tolist() == [53, 103, 153]
    assert found.test.pixels.shape == (3, 3, 32, 32), "room to crop"
    # 40 x 30 becomes 43 x 32, of which columns 5 to 36 are seen.
    assert found.test.objects is not None
    marked = found.test.objects[1]
    assert marked.any(0).nonzero().flatten().tolist() == list(range(6, 22))
    assert marked.any(1).all()


def test_pictures_are_flipped_and_cropped_anywhere() -> None:
    torch.manual_seed(0)
    image = torch.randint(0, 256, (3, 6, 6), dtype=torch.uint8)
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    wanted = {
        tuple(one[:, top : top + 6, left : left + 6].flatten().tolist())
        for one in (padded, padded.flip(2))
        for top in range(3)
        for left in range(3)
    }
    found = augmented(image.expand(400, -1, -1, -1), 6)
    assert {tuple(one.flatten().tolist()) for one in found} == wanted, "each of them, and no other"


def colours(n: int = 64) -> ImageSet:
    """Red, green or blue pictures in noise."""
    labels = torch.arange(n) % 3
    pixels = 60 * torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pixels[torch.arange(n), labels] += 120
    return ImageSet(pixels.byte(), labels)


def train(checkpoint: Path, epochs: int = 4) -> Classifier:
    classifier = networks.build("small-net", ("red", "green", "blue"), 8)
    training = Training(TABLES["cifar10"].training, epochs, 0.05, seed=0)
    train_classifier(classifier, Batches(colours(), 8, 16, augment=True), training, checkpoint)
    return classifier


def test_a_stopped_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole.pt")
    assert not whole.model.training
    assert (whole(image_sets.as_seen(colours().pixels, 8)).argmax(1) == colours().labels).all()
    usual, epochs = torch.save, []

    def stop(state: object, path: Path) -> None:
        usual(state, path)
        epochs.append(path)
        if len(epochs) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "out.pt")
    again = train(tmp_path / "out.pt")
    assert len(epochs) == 3 + 2, "the third epoch was not kept"
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_the_rate_rises_and_falls() -> None:
    training = Training(TABLES["cifar10"].training, 10, 0.1, seed=0)
    rates = [training.rate(done) for done in (0, 0.1, 0.2, 0.6, 1)]
    assert rates == pytest.approx([0.004, 0.052, 0.1, 0.05, 0])


def test_weights_must_fit_but_for_the_head(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    given = networks.build("small-net", tuple("abcd"), 32, seed=1).model
    save_file(given.state_dict(), tmp_path / "w.safetensors")
    model = networks.build("small-net", tuple("abc"), 32).model
    assert networks.fill_in(model, "small-net", str(tmp_path / "w.safetensors")) == ["head"]
    assert torch.equal(model.features[0][0].weight, given.features[0][0].weight)
    tiny = networks.build("tiny-vit", tuple("abc"), 32).model
    with pytest.raises(UserError, match="do not fit tiny-vit"):
        networks.fill_in(tiny, "tiny-vit", str(tmp_path / "w.safetensors"))
    with pytest.raises(UserError, match="no weights file at nowhere"):
        networks.fill_in(model, "small-net", "nowhere")


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_every_network_has_logits_of_its_classes(name: str) -> None:
    side = networks.NETWORKS[name].side or 64
    classifier = networks.build(name, tuple("abc"), side)
    assert classifier(torch.rand(1, 3, side, side)).shape == (1, 3)


def test_the_papers_numbers_are_those_of_its_tables() -> None:
    for table in TABLES.values():
        for method, row in table.printed.items():
            # Finer-CAM on Synthetic MNIST and rollout are printed with another difference.
            if method not in ("finer-cam", "rollout"):
                msi = row["base_score"] - row["mask_penalty"]
                assert row["msi"] == pytest.approx(msi, abs=0.0021), (table.title, method)
    assert TABLES["cifar10"].printed["lax"]["msi"] == 0.007
    assert [table.alpha_min for table in TABLES.values()] == [0.5, 0.5, 0.4, 0.5]
    assert [*COLUMNS][-1] == "msi"


def test_the_papers_hyperparameters_are_the_papers() -> None:
    values = {name: (t.adapter.entropy, t.adapter.lr) for name, t in TABLES.items()}
    wanted = {"synthetic-mnist": (5, 1e-3), "cub200": (5, 1e-4), "cifar10": (2, 1e-3)}
    assert values == {**wanted, "cifar10-vit": (2, 1e-3)}
    assert TABLES["cifar10"].adapter.upsample == 2
    plan = reproduce.make_plan(reproduce.parser().parse_args(["cifar10"]))
    recipe = reproduce.paper_recipe(plan)
    assert (recipe.entropy, recipe.temperature, recipe.lr, recipe.upsample) == (2, 0.5, 1e-3, 2)
    assert recipe.fills == ("black",)
