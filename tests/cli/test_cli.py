"""The command line as a stranger uses it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import save_file

from sufficit import Classifier, evaluate, explain, resize
from sufficit.classifier.architectures import MODELS
from sufficit.classifier.digit_net import SMALL_NETS
from sufficit.cli import app
from sufficit.data.digits import synthetic_digits
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import read_image

N = 6
FAST = ["--value-step", "0.1", "--percent-step", "0.1"]


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A folder of digits in class folders, and heatmaps of 16 x 16 for them."""
    made = synthetic_digits(N, seed=4)
    folder = tmp_path / "digits"
    maps = {}
    for i, (image, label) in enumerate(zip(made.images, made.labels.tolist(), strict=True)):
        path = folder / str(label) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(path)
        maps[f"{label}/{i}.png"] = torch.rand(16, 16, generator=torch.Generator().manual_seed(i))
    write_heatmaps(tmp_path / "maps.npz", maps)
    return folder


def loaded(digits: Path, names: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, heatmaps at their size, and labels, in the order of the names."""
    images = torch.stack([read_image(digits / name, None) for name in names])
    with np.load(digits.parent / "maps.npz") as stored:
        maps = torch.stack([torch.from_numpy(stored[name]) for name in names])
    labels = torch.tensor([int(name.split("/")[0]) for name in names])
    return images, resize(maps, (64, 64)), labels


def scored(digits: Path, *more: object) -> list[object]:
    """The words of an ordinary run."""
    maps = digits.parent / "maps.npz"
    out = digits.parent / "out"
    return [
        "evaluate", "--model", "sufficit:digits", "--data", digits, "--heatmaps", maps,
        "--out", out, *FAST, *more,
    ]  # fmt: skip


def test_evaluate_writes_what_the_function_gives(sufficit, digits: Path) -> None:
    run = sufficit(*scored(digits, "--verbose"))
    assert run.code == 0, run.err
    out = digits.parent / "out"
    frame = pandas.read_parquet(out / "scores.parquet")
    images, maps, labels = loaded(digits, frame["image"].tolist())
    classifier = Classifier.load("sufficit:digits")
    expected = evaluate(classifier, images, maps, labels, value_step=0.1, percent_step=0.1)
    for name in expected.columns:
        assert frame[name].to_numpy() == pytest.approx(expected[name].numpy(), abs=1e-6)
    assert frame["target"].tolist() == labels.tolist()
    record = json.loads((out / "run.json").read_text())
    assert record["n"] == N
    assert record["n_skipped"] == 0
    assert record["targets"] == "label"
    assert record["model_calls"] == int(expected.calls.sum())
    assert record["config"]["options"]["value_step"] == 0.1
    assert f"{int(expected.calls.sum())} in all" in run.out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["msi"]["mean"] == pytest.approx(expected.mean()["msi"], abs=1e-6)
    assert summary["msi"]["low"] <= summary["msi"]["mean"] <= summary["msi"]["high"]
    with Image.open(out / "curves.png") as picture:
        assert picture.width > 800
    assert f"{expected.mean()['msi']:.3f}" in run.out


def test_json_alone_is_printed(sufficit, digits: Path) -> None:
    run = sufficit(*scored(digits, "--json", "--score", "confidence", "--fill", "mean"))
    printed = json.loads(run.out)
    assert printed["n"] == N
    frame = pandas.read_parquet(digits.parent / "out" / "scores.parquet")
    assert printed["columns"]["msi"]["mean"] == pytest.approx(frame["msi"].mean())
    images, maps, labels = loaded(digits, frame["image"].tolist())
    expected = evaluate(
        Classifier.load("sufficit:digits"), images, maps, labels,
        score="confidence", fill="mean", value_step=0.1, percent_step=0.1,
    )  # fmt: skip
    assert printed["columns"]["msi"]["mean"] == pytest.approx(expected.mean()["msi"], abs=1e-6)


def test_alpha_min_can_be_searched(sufficit, digits: Path) -> None:
    run = sufficit(*scored(digits, "--alpha-min", "search", "--columns", "msi,base_score"))
    assert run.code == 0, run.err
    record = json.loads((digits.parent / "out" / "run.json").read_text())
    best = int(np.argmax(record["search"]["mean_msi"]))
    assert record["alpha_min"] == record["search"]["alphas"][best]
    assert "searched" in run.out
    assert list(pandas.read_parquet(digits.parent / "out" / "scores.parquet"))[-2:] == [
        "msi",
        "base_score",
    ]


def test_images_without_class_folders_are_scored_for_the_models_prediction(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in digits.rglob("*.png"):
        path.rename(flat / path.name)
    maps = {f"{i}": torch.rand(8, 8) for i in range(N)}
    save_file(maps, tmp_path / "maps.safetensors")
    words = scored(digits, "--columns", "msi")
    words[words.index(digits)] = flat
    words[words.index(tmp_path / "maps.npz")] = tmp_path / "maps.safetensors"
    run = sufficit(*words)
    assert run.code == 0, run.err
    frame = pandas.read_parquet(tmp_path / "out" / "scores.parquet")
    assert frame["clean_accuracy"].tolist() == [1.0] * N
    assert json.loads((tmp_path / "out" / "run.json").read_text())["targets"] == "prediction"


def test_broken_images_are_named_and_counted_or_fatal(sufficit, digits: Path) -> None:
    (digits / "3").mkdir(exist_ok=True)
    (digits / "3" / "empty.png").write_bytes(b"")
    (digits / "3" / "broken.png").write_bytes(b"GIF89a nonsense")
    maps = digits.parent / "maps.npz"
    with np.load(maps) as stored:
        known = {name: torch.from_numpy(stored[name]) for name in stored.files}
    ones = torch.ones(4, 4)
    write_heatmaps(maps, known | {"3/empty.png": ones, "3/broken.png": ones})
    stopped = sufficit(*scored(digits, "--on-error", "stop", "--columns", "msi"))
    assert stopped.code == 2
    assert "3/broken.png: not a readable image" in stopped.err
    assert not (digits.parent / "out").exists()
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert run.code == 0
    assert "3/empty.png: the file is empty" in run.err
    assert "2 images skipped" in run.err
    record = json.loads((digits.parent / "out" / "run.json").read_text())
    assert (record["n"], record["n_skipped"]) == (N, 2)
    assert {row["name"] for row in record["skipped"]} == {"3/empty.png", "3/broken.png"}


def test_an_image_without_a_heatmap_is_named(sufficit, digits: Path) -> None:
    maps = digits.parent / "maps.npz"
    with np.load(maps) as stored:
        known = {name: torch.from_numpy(stored[name]) for name in stored.files}
    missing = next(iter(known))
    write_heatmaps(maps, {name: value for name, value in known.items() if name != missing})
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert f"{missing}: no heatmap: maps.npz has no such key" in run.err
    stopped = sufficit(*scored(digits, "--columns", "msi", "--on-error", "stop", "--overwrite"))
    assert stopped.code == 2
    assert missing in stopped.err


def test_heatmaps_outside_0_to_1_are_refused_or_normalised(sufficit, digits: Path) -> None:
    maps = digits.parent / "maps.npz"
    with np.load(maps) as stored:
        write_heatmaps(maps, {n: 5 * torch.from_numpy(stored[n]) - 1 for n in stored.files})
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert run.code == 2
    assert "heatmaps must lie in 0..1" in run.err
    assert "--normalize" in run.err
    assert sufficit(*scored(digits, "--columns", "msi", "--normalize")).code == 0


def test_a_heatmap_with_nan_is_named_and_counted_or_fatal(sufficit, digits: Path) -> None:
    maps = digits.parent / "maps.npz"
    with np.load(maps) as stored:
        known = {name: torch.from_numpy(stored[name]) for name in stored.files}
    broken = next(iter(known))
    known[broken][0, 0] = torch.nan
    write_heatmaps(maps, known)
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert run.code == 0
    assert f"{broken}: its heatmap has NaN or infinite values" in run.err
    stopped = sufficit(*scored(digits, "--columns", "msi", "--on-error", "stop", "--overwrite"))
    assert stopped.code == 2
    assert broken in stopped.err


@pytest.mark.filterwarnings("always:.*other proportions")
def test_heatmaps_of_other_proportions_bring_a_warning(sufficit, digits: Path) -> None:
    maps = digits.parent / "maps.npz"
    with np.load(maps) as stored:
        write_heatmaps(maps, {n: torch.from_numpy(stored[n])[:8] for n in stored.files})
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert f"{N} heatmaps" in run.err
    assert "other proportions" in run.err


def test_an_earlier_run_is_not_overwritten_unasked(sufficit, digits: Path, monkeypatch) -> None:
    assert sufficit(*scored(digits, "--columns", "msi")).code == 0
    before = (digits.parent / "out" / "run.json").read_text()
    monkeypatch.setenv("SLURM_PROCID", "3")  # one of several tasks that share nothing
    again = sufficit(*scored(digits, "--columns", "msi"))
    assert again.code == 2
    assert "holds an earlier run" in again.err
    assert (digits.parent / "out" / "run.json").read_text() == before
    assert sufficit(*scored(digits, "--columns", "msi", "--overwrite")).code == 0


def test_a_fill_can_be_a_picture(sufficit, digits: Path, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), (0, 0, 0)).save(tmp_path / "black.png")
    named = sufficit(*scored(digits, "--columns", "msi", "--json"))
    own = sufficit(
        *scored(digits, "--columns", "msi", "--json", "--overwrite"),
        "--fill",
        tmp_path / "black.png",
    )
    assert json.loads(own.out)["columns"] == json.loads(named.out)["columns"]
    record = json.loads((digits.parent / "out" / "run.json").read_text())
    assert record["config"]["fill"] == str(tmp_path / "black.png")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fill", "blak"], "Unknown fill 'blak'. Did you mean 'black'?"),
        (["--columns", "mis"], "Unknown column 'mis'. Did you mean 'msi'?"),
        (["--alpha-min", "high"], "--alpha-min must be a number in 0..1 or search"),
        (["--alpha-min", "1.5"], "alpha_min must lie in 0..1"),
        (["--device", "gpu"], "Unknown device 'gpu'"),
        (["--size", "big"], "--size must be like 224"),
        (["--heatmaps", "absent.npz"], "no heatmap file at absent.npz"),
        (["--data", "absent"], "no folder of images at absent"),
        (["--model", "torchvision:resnet19"], "Did you mean"),
        (["--model", "resnet18"], "Unknown model 'resnet18'"),
        (["--weights", "absent.pt"], "no weights file"),
        (["--percent-step", "0"], "a step must lie in 0..1"),
        (["--score", "acc"], "Invalid value for '--score'"),
    ],
)
def test_wrong_arguments_get_one_clear_line(
    sufficit, digits: Path, words: list[str], message: str
) -> None:
    run = sufficit(*scored(digits, *words))
    assert run.code == 2
    assert message in run.err
    assert "Traceback" not in run.err
    assert not (digits.parent / "out").exists()


def test_explain_draws_and_evaluate_reads_what_it_wrote(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    run = sufficit(
        "explain", digits, "--model", "sufficit:digits", "--method", "gradcam,center", "--out",
        tmp_path / "drawn",
    )  # fmt: skip
    assert run.code == 0, run.err
    paths = sorted(digits.rglob("*.png"))
    images = torch.stack([read_image(path, None) for path in paths])
    expected = explain(Classifier.load("sufficit:digits"), images)
    with np.load(tmp_path / "drawn" / "gradcam.npz") as stored:
        for path, heatmap in zip(paths, expected, strict=True):
            name = path.relative_to(digits).as_posix()
            assert stored[name] == pytest.approx(heatmap.numpy(), abs=1e-5)
    overlays = list((tmp_path / "drawn" / "overlays").rglob("*.png"))
    assert len(overlays) == 2 * N
    with Image.open(tmp_path / "drawn" / "sheet.png") as sheet:
        assert sheet.height > 6 * sheet.width / 4
    words = scored(digits, "--columns", "msi")
    words[words.index(tmp_path / "maps.npz")] = tmp_path / "drawn" / "gradcam.npz"
    assert sufficit(*words).code == 0


def test_explain_takes_a_target_by_number_or_name(sufficit, digits: Path, tmp_path: Path) -> None:
    image = next(digits.rglob("*.png"))
    words = ["explain", image, "--model", "sufficit:digits", "--out", tmp_path / "d"]
    assert sufficit(*words, "--target", "7").code == 0
    with np.load(tmp_path / "d" / "gradcam.npz") as stored:
        drawn = stored[image.name]
    images = read_image(image, None)[None]
    classifier = Classifier.load("sufficit:digits")
    assert drawn == pytest.approx(
        explain(classifier, images, torch.tensor([7]))[0].numpy(), abs=1e-5
    )
    assert "holds an earlier run" in sufficit(*words).err
    wrong = sufficit(*words, "--target", "seven", "--overwrite")
    assert wrong.code == 2
    assert "Unknown class 'seven'" in wrong.err


def test_groups_change_nothing(sufficit, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, names, skipped images and the search are over all groups together."""
    (digits / "0").mkdir(exist_ok=True)
    (digits / "0" / "empty.png").write_bytes(b"")
    words = scored(digits, "--alpha-min", "search", "--columns", "msi", "--overwrite")
    found = []
    for size in (64, 2):
        monkeypatch.setattr("sufficit.scoring.UNIT", size)
        assert sufficit(*words).code == 0
        record = json.loads((digits.parent / "out" / "run.json").read_text())
        frame = pandas.read_parquet(digits.parent / "out" / "scores.parquet")
        found.append((record["alpha_min"], record["skipped"], record["search"], frame))
    assert found[0][:3] == found[1][:3]
    pandas.testing.assert_frame_equal(found[0][3], found[1][3])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_and_device_reach_the_model(sufficit, digits: Path, precision: str) -> None:
    full = sufficit(*scored(digits, "--json", "--columns", "fid_minus_percent"))
    words = ["--precision", precision, "--device", "cpu", "--batch-size", "5", "--size", "64x64"]
    half = sufficit(
        *scored(digits, "--json", "--columns", "fid_minus_percent", "--overwrite", *words)
    )
    means = [json.loads(r.out)["columns"]["fid_minus_percent"]["mean"] for r in (full, half)]
    assert means[0] != means[1]
    assert means[0] == pytest.approx(means[1], abs=0.05)
    record = json.loads((digits.parent / "out" / "run.json").read_text())
    kind = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert record["device"]["dtype"] == kind


def test_explain_takes_a_target_by_name(sufficit, digits: Path, tmp_path: Path) -> None:
    classifier = Classifier.load("sufficit:digits")
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    classifier.classes = tuple(names)
    classifier.save(tmp_path / "named")
    image = next(digits.rglob("*.png"))
    run = sufficit(
        "explain",
        image,
        "--model",
        tmp_path / "named",
        "--target",
        "Seven",
        "--out",
        tmp_path / "d",
    )
    assert run.code == 0, run.err
    with np.load(tmp_path / "d" / "gradcam.npz") as stored:
        drawn = stored[image.name]
    expected = explain(classifier, read_image(image, None)[None], torch.tensor([7]))[0]
    assert drawn == pytest.approx(expected.numpy(), abs=1e-5)


def test_many_images_go_on_several_sheets(
    sufficit, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.drawing.SHEET_ROWS", 4)
    words = ["--method", "center", "--out", tmp_path / "d"]
    assert sufficit("explain", digits, "--model", "sufficit:digits", *words).code == 0
    with (
        Image.open(tmp_path / "d" / "sheet.png") as first,
        Image.open(tmp_path / "d" / "sheet-2.png") as second,
    ):
        assert first.height > 1.5 * second.height  # four rows and two


def test_a_grey_model_of_ones_own_reads_grey(sufficit, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from sufficit.classifier.digit_net import SmallNet\n"
        "def grey(): return SmallNet(channels=1)\n"
    )
    words = scored(digits, "--columns", "msi", "--model", f"python:{tmp_path}/own.py:grey")
    for size in ([], ["--size", "32"]):
        run = sufficit(*words, *size, "--overwrite")
        assert run.code == 0, run.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "grad-cam"], "Unknown method 'grad-cam'. Did you mean 'gradcam'?"),
        (["--method", "rollout"], "rollout needs a transformer"),
        (["--layer", "feature"], "Unknown layer 'feature'. Did you mean 'features'?"),
        (["--target", "12"], "targets must lie in 0..9"),
        (["--target", "3", "--targets", "label"], "--targets label one for each: give one of them"),
    ],
)
def test_wrong_arguments_to_explain_get_one_clear_line(
    sufficit, digits: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    run = sufficit("explain", digits, "--model", "sufficit:digits", "--out", tmp_path / "d", *words)
    assert run.code == 2
    assert message in run.err
    assert not (tmp_path / "d").exists()


def test_explain_and_evaluate_mean_the_same_class_in_class_folders(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    swapped = tmp_path / "swapped" / "7"
    swapped.mkdir(parents=True)
    image = next(path for path in digits.rglob("*.png") if path.parent.name != "7")
    image.rename(swapped / image.name)
    words = [swapped.parent, "--model", "sufficit:digits", "--out", tmp_path / "d"]
    assert sufficit("explain", *words).code == 0
    record = json.loads((tmp_path / "d" / "run.json").read_text())
    assert record["targets"] == {f"7/{image.name}": 7}
    assert sufficit("explain", *words, "--overwrite", "--targets", "prediction").code == 0
    record = json.loads((tmp_path / "d" / "run.json").read_text())
    assert record["targets"] != {f"7/{image.name}": 7}
    run = sufficit(
        "evaluate", "--model", "sufficit:digits", "--data", swapped.parent, "--heatmaps",
        tmp_path / "d" / "gradcam.npz", "--out", tmp_path / "e", *FAST,
    )  # fmt: skip
    assert "0.0% right" in run.out
    assert "misses most labels" in run.err


def test_explain_skips_what_it_cannot_read_or_stops(sufficit, digits: Path, tmp_path: Path) -> None:
    (digits / "3").mkdir(exist_ok=True)
    (digits / "3" / "empty.png").write_bytes(b"")
    words = [digits, "--model", "sufficit:digits", "--method", "center", "--out", tmp_path / "d"]
    stopped = sufficit("explain", *words, "--on-error", "stop")
    assert stopped.code == 2
    assert "3/empty.png: the file is empty" in stopped.err
    assert not (tmp_path / "d").exists()
    run = sufficit("explain", *words)
    assert run.code == 0
    assert "1 image skipped" in run.err
    assert json.loads((tmp_path / "d" / "run.json").read_text())["n"] == N


@pytest.mark.parametrize("command", ["evaluate", "explain", "demo", "sanity"])
def test_results_that_can_go_nowhere_are_refused_before_any_work(
    sufficit, digits: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").write_text("x")
    words = {
        "evaluate": scored(digits),
        "explain": ["explain", digits, "--model", "sufficit:digits"],
        "demo": ["demo", "--images", "1000"],
        "sanity": ["sanity", "--model", "sufficit:digits", "--data", digits],
    }[command]
    places = [tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")]
    if command != "demo":
        places.append(digits / "inside")
    for place in places:
        run = sufficit(*words, "--out", place)
        assert run.code == 2, place
        assert "can't be a folder" in run.err or "is inside" in run.err
    assert (tmp_path / "file").read_text() == "x"
    assert not (digits / "inside").exists()


OWN = """
import torch
from torch import nn
from sufficit import Classifier, View

class Nanny(nn.Module):
    def forward(self, images):
        return images[:, :2, 0, 0] * torch.nan

class Picky(nn.Module):
    def forward(self, images):
        raise RuntimeError("wants another size")

def nanny(): return Classifier(Nanny(), view=View((8, 8)))
def picky(): return Picky()
def broken(): raise KeyError("weights")
"""


@pytest.mark.filterwarnings("always:the model answered NaN")
def test_a_model_that_answers_nan_is_told_and_makes_valid_json(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    model = ["--model", f"python:{tmp_path}/own.py:nanny", "--targets", "prediction"]
    run = sufficit(*scored(digits, *model, "--json"))
    assert run.code == 0, run.err
    assert f"NaN for {N} of {N} whole images" in run.err
    printed = json.loads(run.out, parse_constant=pytest.fail)
    assert printed["columns"]["msi"]["mean"] is None
    assert printed["columns"]["msi"]["n_nan"] == N
    run = sufficit(*scored(digits, *model, "--overwrite"))
    assert "The model answered NaN for every image: nothing could be scored." in run.words


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("picky", 1, "RuntimeError: wants another size"),
        ("broken", 2, "raised KeyError: 'weights'"),
        ("absent", 2, "has no function 'absent'"),
    ],
)
def test_what_the_users_own_model_raises_is_no_traceback(
    sufficit, digits: Path, tmp_path: Path, function: str, code: int, message: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = sufficit(*scored(digits, "--model", f"python:{tmp_path}/own.py:{function}"))
    assert run.code == code
    assert message in run.err
    assert "Traceback" not in run.err


@pytest.mark.filterwarnings("always:the model has random weights")
def test_random_weights_are_told_and_the_same_each_time(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    words = [digits, "--model", "sufficit:digits", "--weights", "none", "--size", "64"]
    drawn = []
    for name in ("a", "b"):
        run = sufficit("explain", *words, "--method", "kpca-cam", "--out", tmp_path / name)
        assert "random weights" in run.err
        with np.load(tmp_path / name / "kpca-cam.npz") as stored:
            drawn.append({key: stored[key] for key in stored.files})
    assert drawn[0].keys() == drawn[1].keys()
    assert all(np.array_equal(drawn[0][key], drawn[1][key]) for key in drawn[0])


def test_methods_and_models_are_listed(sufficit) -> None:
    listed = sufficit("methods").out
    assert "kpca-cam" in listed
    assert "control" in listed
    named = sufficit("models", "ResNet18").out
    assert "torchvision:resnet18" in named
    assert "timm:resnet18" in named
    assert sufficit("models", "resnet1800").code == 2


def test_the_packages_own_models_are_listed_with_what_they_are_for(sufficit) -> None:
    run = sufficit("models", "sufficit:")
    named = [word for word in run.words.split() if word.startswith("sufficit:")]
    assert named == [f"sufficit:{name}" for name in (*SMALL_NETS, *MODELS)]
    assert "sufficit:digits ships with the package, for the demo" in run.words
    wanted = "sufficit:tiny-vit to train with sufficit reproduce: three layers, for --quick"
    assert wanted in run.words
    assert all(model.about for model in MODELS.values())


def test_the_demo_runs_and_leaves_its_pictures(sufficit, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    run = sufficit("demo", "--images", "2", "--train-images", "32", "--out", out)
    assert run.code == 0, run.err
    assert "true digit" in run.out
    assert "MSI is near +1" in run.out
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["true digit"]["msi"]["mean"] > summary["random"]["msi"]["mean"]
    standing = summary["standing"]
    assert "center" not in standing["ranking"]
    assert standing["means"][standing["best"]] == max(standing["means"].values())
    assert len(standing["tied"]) == 5  # two images tell nothing
    assert "= not significantly different" in run.words
    frame = pandas.read_csv(tmp_path / "demo" / "pairs.csv")
    assert frame["p_corrected"].tolist() == [pair["p_corrected"] for pair in standing["pairs"]]
    assert set(frame["correction"]) == {"holm"}
    assert "report.html" in run.out.splitlines()[-2] + run.out.splitlines()[-1]
    assert standing["best"] in (tmp_path / "demo" / "report.html").read_text()
    for name in ("sheet.png", "curves.png"):
        with Image.open(tmp_path / "demo" / name) as picture:
            assert picture.width > 800


def test_help_does_not_load_torch_and_comes_at_once() -> None:
    code = (
        "import sys, time; sys.argv = ['sufficit', '--help']\n"
        "from sufficit.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
        "assert time.process_time() < 1, time.process_time()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f" {command} " in done.stdout


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_there_are_all_these_commands() -> None:
    wanted = {"compare", "demo", "evaluate", "explain", "figure", "methods", "models", "sanity"}
    assert wanted | {"serve", "train-lax"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_every_option_help(sufficit, command: str) -> None:
    printed = sufficit(command, "--help").out
    assert printed.count(f"sufficit {command}") > 1  # the usage, and an example
    for option in COMMANDS[command].params:
        assert option.name == "help" or option.help, (command, option.name)


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_use_options_that_exist(command: str) -> None:
    known = {
        word for option in COMMANDS[command].params for word in option.opts + option.secondary_opts
    }
    examples = (COMMANDS[command].help or "").splitlines()
    used = {w for line in examples if line.strip().startswith("sufficit") for w in line.split()}
    assert {word for word in used if word.startswith("-")} <= known
