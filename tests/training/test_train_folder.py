"""Adapters on the command line: trained on a folder, gone on with, used as methods."""

import io
import itertools
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler

from digit_images import write_digits
from object_server import ObjectServer
from sufficit import Classifier, Lax, UserError, evaluate, explain, sanity_check
from sufficit.classifier.checkpoint import View
from sufficit.cli import main
from sufficit.data.images import ImageFile, read_image
from sufficit.data.loader import Entry
from sufficit.data.splits import Part, evenly, how_many, read_folder
from sufficit.explainers.words import methods_from
from sufficit.training.folder_images import TrainingImages, replace_missing
from sufficit.training.validation import ValidationScores

N = 20
MODEL = ["--model", "sufficit:digits"]
QUICK = ["--recipe", "paper", "--epochs", "1", "--batch-size", "8"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of digits in class folders; nobody writes to it."""
    return write_digits(tmp_path_factory.mktemp("data") / "digits", N)


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of one epoch, made on the command line."""
    out = tmp_path_factory.mktemp("trained") / "digits-lax"
    words = ["sufficit", *map(str, training(digits, out))]
    with pytest.MonkeyPatch.context() as patched, (out.parent / "printed.txt").open("w") as file:
        patched.setattr(sys, "argv", words)
        patched.setattr("warnings.showwarning", None)
        errors = io.StringIO()
        with redirect_stdout(file), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    assert "leak" not in errors.getvalue(), "the verdict has said it"
    return out


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out images scored with few masks, where a test does not look at the scores."""
    few = {"value_step": 0.25, "leak_donors": 2}
    quick = lambda *given, **options: evaluate(*given, **options | few)  # noqa: E731
    monkeypatch.setattr("sufficit.training.validation.evaluate", quick)


def training(digits: Path, out: Path, *more: object) -> list[object]:
    return ["train-lax", *MODEL, "--data", digits, "--out", out, *QUICK, *more]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_trained_adapter_lies_in_its_folder_with_its_story(trained: Path, digits: Path) -> None:
    lax = Lax.from_pretrained(trained)
    lax.check(Classifier.load("sufficit:digits"))
    run = json.loads((trained / "run.json").read_text())
    frame = pandas.read_csv(trained / "history.csv")
    assert run["n_trained_on"] + run["n_validated_on"] == N
    assert run["n_validated_on"] == 5
    assert run["targets"] == "label"
    assert run["skipped"] == {}
    assert run["history"] == lax.trained["history"]
    assert frame["msi"].tolist() == [row["msi"] for row in run["history"]]
    assert run["config"]["options"]["recipe"] == "paper"
    assert run["summary"]["lax"]["msi"]["mean"] == pytest.approx(frame["msi"][0], abs=1e-6)
    for name in ("training.png", "sheet.png"):
        with Image.open(trained / name) as picture:
            assert min(picture.size) > 300
    printed = " ".join((trained.parent / "printed.txt").read_text().split())
    assert f"{frame['msi'][0]:.3f}" in printed
    assert "On 5 held-out images: MSI" in printed
    assert "The model names the class of 5 of 5 held-out images." in printed
    assert run["accuracy"] == {"right": 5, "n": 5, "chance": pytest.approx(0.2)}
    assert run["trust"]["verdict"] in printed
    assert {*run["summary"]} == {"lax", "gradcam", "everything", "random", "center"}
    names = ["MSI", "MSI with another fill", "MSI at a common size", "leakage", "fragments"]
    assert [check["name"] for check in run["trust"]["checks"]] == names
    page = (trained / "trust.md").read_text()
    assert all(check["words"] in page for check in run["trust"]["checks"])
    assert frame["fragments"][0] == run["summary"]["lax"]["fragments"]["mean"]
    assert printed.endswith(
        f"Next: sufficit explain {digits} --model sufficit:digits --methods {trained}"
    )


def test_the_scores_told_are_those_of_the_held_out_images(trained: Path, digits: Path) -> None:
    run = json.loads((trained / "run.json").read_text())
    names = run["validation_images"]
    images = torch.stack([read_image(digits / name, None) for name in names])
    labels = torch.tensor([int(name.split("/")[0]) for name in names])
    classifier = Classifier.load("sufficit:digits")
    for name, method in (("lax", Lax.from_pretrained(trained)), ("gradcam", "gradcam")):
        maps = explain(classifier, images, labels, method)
        expected = evaluate(classifier, images, maps, labels, value_step=0.05, columns=("msi",))
        found = run["summary"][name]["msi"]["mean"]
        assert found == pytest.approx(expected.mean()["msi"], abs=1e-6)


def test_an_adapter_explains_and_its_heatmaps_are_scored(
    sufficit, trained: Path, digits: Path, tmp_path: Path
) -> None:
    drawn = tmp_path / "drawn"
    method = f"{trained}/,gradcam"
    run = sufficit(
        "explain", digits / "3", *MODEL, "--methods", method, "--target", 3, "--no-fit",
        "--out", drawn,
    )  # fmt: skip
    assert run.code == 0, run.err
    assert (drawn / "overlays").is_dir()
    classifier = Classifier.load("sufficit:digits")
    with np.load(drawn / "digits-lax.npz") as maps:
        names = list(maps.files)
        found = torch.from_numpy(np.stack([maps[name] for name in names]))
    images = torch.stack([read_image(digits / "3" / name, None) for name in names])
    expected = explain(classifier, images, method=Lax.from_pretrained(trained))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (drawn / "gradcam.npz").exists()
    scored = sufficit(
        "evaluate", *MODEL, "--data", digits / "3", "--heatmaps", drawn / "digits-lax.npz",
        "--out", tmp_path / "run", "--value-step", "0.1", "--columns", "msi",
    )  # fmt: skip
    assert scored.code == 0, scored.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    by_hand = evaluate(classifier, images, expected, value_step=0.1, columns=("msi",))
    assert summary["heatmaps"]["msi"]["mean"] == pytest.approx(by_hand.mean()["msi"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_a_run_that_was_stopped_ends_as_one_in_a_single_go(
    sufficit, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ["--epochs", "2", "--recipe", "robust", "--workers", "0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert sufficit(*training(digits, whole, *two)).code == 0
    with monkeypatch.context() as patched:
        patched.setattr(TrainingImages, "__iter__", interrupted_in_pass(2, TrainingImages.__iter__))
        stopped = sufficit(*training(digits, parts, *two, "--overwrite"))
    assert stopped.code == 130
    assert "Run the same command again to resume" in stopped.err
    assert stopped.err.strip().endswith("Leave out --overwrite, which starts from the beginning.")
    assert not (parts / "run.json").exists()
    assert torch.load(parts / "checkpoint.pt")["state"]["epoch"] == 1
    line = shlex.join(word for word in sys.argv if word != "--overwrite")
    command = "Run the same command again to resume:"
    command += f" cd {shlex.quote(str(Path.cwd()))} && {line}"
    assert sufficit("status", parts).words == f"training: 1 of 2 epochs done {command}"
    known = {"done": 1, "epochs": 2, "is_over": False}
    found = json.loads(sufficit("status", parts, "--json").out)
    assert {name: found["trainings"]["training"][name] for name in known} == known
    assert sufficit(*training(digits, parts, *two)).code == 0
    assert sufficit("status", parts).words == "training: 2 of 2 epochs done Finished."
    ends = [torch.load(folder / "checkpoint.pt") for folder in (whole, parts)]
    assert [end["state"]["epoch"] for end in ends] == [2, 2]
    assert same(ends[0]["model"], ends[1]["model"])
    assert same(weights(whole), weights(parts))
    runs = [json.loads((folder / "run.json").read_text()) for folder in (whole, parts)]
    assert runs[0]["summary"] == runs[1]["summary"]


def interrupted_in_pass(number: int, real):
    """A loader that is stopped by Ctrl-C in its n-th pass of training, after a batch."""

    def passing(self):
        shuffled = isinstance(self.sampler, torch.utils.data.RandomSampler)
        for batch in real(self):
            yield batch
            if shuffled and self.passes == number - 1:
                raise KeyboardInterrupt

    return passing


def test_a_finished_run_is_reported_and_not_trained_on(
    sufficit, trained: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights(trained)
    monkeypatch.setattr("sufficit.training.lax_training.take_step", None)
    run = sufficit(*training(digits, trained))
    assert run.code == 0, run.err
    assert "1 epoch, scored on 5 held-out images" in run.words
    assert same(weights(trained), before)


@pytest.mark.usefixtures("coarse")
def test_overwrite_begins_anew(sufficit, trained: Path, digits: Path, tmp_path: Path) -> None:
    out = shutil.copytree(trained, tmp_path / "lax")
    before = weights(out)
    assert sufficit(*training(digits, out, "--seed", "1")).code == 2
    run = sufficit(*training(digits, out, "--seed", "1", "--overwrite"))
    assert run.code == 0, run.err
    assert not same(weights(out), before)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--epochs", "3"], "`recipe.epochs` was 1, now 3."),
        (["--seed", "5"], "`seed` was 0, now 5."),
        (["--batch-size", "7"], "`batches` was 2, now 3."),
        (["--precision", "bf16"], "`about.precision` was '32-true', now 'bf16-mixed'."),
    ],
)
def test_a_run_with_other_settings_is_left_alone(
    sufficit, trained: Path, digits: Path, more: list[str], words: str
) -> None:
    before = (trained / "checkpoint.pt").read_bytes()
    run = sufficit(*training(digits, trained, *more))
    assert run.code == 2
    assert words in run.err
    assert "Use another --out for a new run, --overwrite to delete this one, or" in run.err
    assert "Traceback" not in run.err
    assert (trained / "checkpoint.pt").read_bytes() == before


def test_the_folder_of_another_command_is_left_alone(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text("{}")
    run = sufficit(*training(digits, tmp_path))
    assert (run.code, "holds a finished run" in run.err) == (2, True)
    inside = sufficit(*training(digits, digits / "lax"))
    assert (inside.code, "is inside" in inside.err) == (2, True)


TWO = """
import atexit
import importlib
import os
import sys
from pathlib import Path

import lightning.fabric
import torch

from sufficit.cli import main

torch.set_num_threads(1)
train_folder = importlib.import_module("sufficit.training.train_folder")
trained = train_folder.train_lax


def saved(*given, **named):
    lax = trained(*given, **named)
    place = Path(__file__).parent / f"rank{named['fabric'].global_rank}.pt"
    torch.save(lax.state_dict(), place)
    atexit.register(list_threads, place.with_suffix(".threads"))
    return lax


def list_threads(place):
    threads = Path("/proc/self/task").glob("*/comm")
    place.write_text(" ".join(thread.read_text().strip() for thread in threads))


def start_machine(number):
    child = os.fork()
    if not child:
        os.environ["NODE_RANK"] = str(number)
        main()
    return child


train_folder.train_lax = saved
if "MACHINES" in os.environ:  # forked, so that they import once
    children = [start_machine(number) for number in range(int(os.environ["MACHINES"]))]
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
main()
"""


def machines(n: int) -> dict[str, str]:
    """What tells as many machines of each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "MACHINES": str(n)}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--devices", "--num-nodes"])
def test_two_processes_train_one_adapter_and_speak_once(tmp_path: Path, option: str) -> None:
    script, data, out = tmp_path / "two.py", tmp_path / "data", tmp_path / "lax"
    script.write_text(TWO)
    broken = write_digits(data, 12) / "0" / "broken.png"
    broken.parent.mkdir(exist_ok=True)
    broken.write_bytes(b"no picture")
    words = [*training(data, out, option, "2"), "--device", "cpu"]
    words[words.index("--batch-size") + 1] = "4"
    quiet = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    ended = subprocess.run(
        [sys.executable, script, *map(str, words)],
        env=quiet | (machines(2) if option == "--num-nodes" else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    printed, complaints = ended.stdout, ended.stderr
    assert ended.returncode == 0, complaints
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert same(*ranks)
    assert same(ranks[0], weights(out))
    # Gloo's threads abort a process that ends before they do.
    assert all("gloo" not in (tmp_path / f"rank{r}.threads").read_text() for r in (0, 1))
    assert printed.count("1 epoch, scored on") == 1
    assert "distributed" not in complaints
    run = json.loads((out / "run.json").read_text())
    assert run["trained"]["processes"] == 2
    assert list(run["skipped"]) == ["0/broken.png"]
    assert run["n_trained_on"] + run["n_validated_on"] == 12


def stranger() -> Classifier:
    """The digits' classifier with other weights."""
    classifier = Classifier.load("sufficit:digits")
    with torch.no_grad():
        for weight in classifier.model.parameters():
            weight.copy_(weight.flip(0))
    return classifier


def test_an_adapter_of_another_classifier_is_refused_in_a_line(
    sufficit, trained: Path, digits: Path, tmp_path: Path
) -> None:
    saved = stranger().save(tmp_path / "stranger")
    for words in (["explain", digits], ["sanity", "--data", digits]):
        out = ["--out", tmp_path / "out"]
        run = sufficit(*words, "--model", saved, "--methods", trained, *out)
        assert run.code == 2
        assert "Error: this adapter was trained on another classifier" in run.err
        assert "Traceback" not in run.err


def test_sanity_asks_an_adapter_about_copies_of_its_classifier(
    sufficit, trained: Path, digits: Path, tmp_path: Path
) -> None:
    run = sufficit(
        "sanity", *MODEL, "--data", digits, "--methods", f"{trained},center", "--images", "4",
        "--steps", "2", "--out", tmp_path / "sane",
    )  # fmt: skip
    assert run.code == 0, run.err
    frame = pandas.read_csv(tmp_path / "sane" / "sanity.csv")
    record = json.loads((tmp_path / "sane" / "run.json").read_text())
    assert list(record["verdicts"]) == ["digits-lax", "center"]
    classifier, lax = Classifier.load("sufficit:digits"), Lax.from_pretrained(trained)
    images = torch.stack([read_image(digits / name, None) for name in record["images"]])
    labels = torch.tensor([int(name.split("/")[0]) for name in record["images"]])
    report = sanity_check(classifier, images, labels, methods={"digits-lax": lax}, steps=2)
    ours = frame[frame["method"] == "digits-lax"]["rank_correlation"].to_numpy()
    assert ours == pytest.approx(report.frame()["rank_correlation"].to_numpy(), abs=1e-6)
    assert ours[-1] < 0.99
    assert frame[frame["method"] == "center"]["rank_correlation"].tolist() == [1.0, 1.0]


def test_an_adapter_must_belong_to_the_classifier_whose_sanity_is_checked(trained: Path) -> None:
    lax, images = Lax.from_pretrained(trained), torch.rand(2, 3, 64, 64)
    with pytest.raises(UserError, match="trained on another classifier"):
        sanity_check(stranger(), images, methods={"lax": lax})


def test_words_of_method(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = methods_from(f" {trained} , gradcam,,")
    assert list(found) == ["digits-lax", "gradcam"]
    assert isinstance(found["digits-lax"], Lax)
    assert found["gradcam"] == "gradcam"
    monkeypatch.chdir(trained)
    assert list(methods_from(".")) == ["digits-lax"]
    for words, message in {
        "lax": "give the folder of its adapter, --methods PATH",
        "grad-cam": "Did you mean 'gradcam'?",
        str(tmp_path): "no adapter in",
        f"{trained},{trained}/.": "two methods are called digits-lax",
        "gradcam, gradcam": "gradcam is given twice",
    }.items():
        with pytest.raises(UserError, match=message):
            methods_from(words)


def test_the_list_of_methods_has_lax(sufficit) -> None:
    row = sufficit("methods").words.partition("lax 1 ")[2]  # wrapped, columns side by side
    assert row.startswith("learned for one")
    assert "train-lax" in row


@pytest.mark.slow
@pytest.mark.filterwarnings("default:The model names:UserWarning")
def test_folders_in_another_order_than_the_classes_are_told(sufficit, tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits", N)
    folders = sorted(data.iterdir())
    for folder in folders:
        folder.rename(data / f"of {folder.name}")
    for number, folder in enumerate(folders):
        (data / f"of {folder.name}").rename(folders[number - 1])
    run = sufficit(*training(data, tmp_path / "lax"))
    assert run.code == 0, run.err
    words = "The model names the class of 0 of 5 held-out images, not significantly more than by"
    assert words in run.err
    assert words in run.words
    assert "the order of the class folders" in run.words
    again = sufficit(*training(data, tmp_path / "other", "--targets", "prediction"))
    assert "class of" not in again.err + again.words


def test_a_folder_with_one_class_is_told_what_is_wanted(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    data = tmp_path / "one"
    (data / "3").mkdir(parents=True)
    picture = next((digits / "3").iterdir()).read_bytes()
    for number in range(8):
        (data / "3" / f"{number}.png").write_bytes(picture)
    run = sufficit(*training(data, tmp_path / "lax"))
    assert run.code == 2
    assert "a folder with one class (3)" in run.err
    assert "two classes or more" in run.err
    again = sufficit(*training(data, tmp_path / "lax", "--target", "prediction"))
    assert again.code == 2
    assert "All 2 validation images have class 3" in again.err
    assert "classes: add images of other classes; if there are some, shuffle" in again.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--recipe", "robst"], "Unknown recipe 'robst'. Did you mean 'robust'?"),
        (["--area", "2", "--recipe", "l1"], "area must be between 0 and 1"),
        (["--layer", "nowhere"], "Unknown layer 'nowhere'"),
        (["--validation-share", "0.9"], "must lie in 0..0.5, got 0.9"),
        (["--devices", "2", "--cache-features", "--device", "mps"], "mps"),
        (["--size", "none"], "--size must be pixels such as 224"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    sufficit, digits: Path, tmp_path: Path, more: list[str], words: str
) -> None:
    run = sufficit(*training(digits, tmp_path / "lax", *more))
    assert run.code == 2
    assert words in run.err
    assert "Traceback" not in run.err
    assert not (tmp_path / "lax").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_a_training_that_stops_early_says_so(
    sufficit, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = itertools.count(0.0, -0.1)
    monkeypatch.setattr(ValidationScores, "worth", property(lambda _: next(falling)))
    run = sufficit(*training(digits, tmp_path / "lax", "--epochs", 9, "--patience", 2))
    assert run.code == 0, run.err
    assert (
        " Stopped after 3 of 9 epochs, because epoch 1 was the best by MSI and leakage, and"
        " 2 more epochs (4 steps) brought nothing better; --patience 0 trains to the end."
    ) in run.words
    # Without --patience, seven epochs of two steps are too few to stop early.
    whole = sufficit(*training(digits, tmp_path / "whole", "--epochs", 7))
    assert "7 epochs, scored on 5 held-out images" in whole.words
    assert "Stopped" not in whole.words


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "Trained on 9 images for the labels of their folders. Trained for"),
        (
            ["--class-free"],
            "Trained on 9 images, class-free: it draws one map per image, whichever class is asked"
            " for. Targets in training: the labels of their folders. Selected",
        ),
    ],
)
def test_a_training_says_whether_the_adapter_knows_a_class(
    sufficit, tmp_path: Path, more: list[str], said: str
) -> None:
    words = training(write_digits(tmp_path / "few", 12), tmp_path / "lax", *more)
    words[words.index("paper")] = "crisp" if more else "robust"
    run = sufficit(*words)
    assert run.code == 0, run.err
    assert said in run.words
    assert Lax.from_pretrained(tmp_path / "lax").class_free == bool(more)


@pytest.mark.usefixtures("coarse")
def test_too_few_images_and_folders_that_do_not_fit(sufficit, tmp_path: Path) -> None:
    few = write_digits(tmp_path / "few", 7)
    assert "7 images in" in (run := sufficit(*training(few, tmp_path / "lax"))).err
    assert "8 or more" in run.err
    data = write_digits(tmp_path / "named", 12)
    next(data.iterdir()).rename(data / "zebra")
    run = sufficit(*training(data, tmp_path / "lax"))
    assert run.code == 2
    assert "'zebra') do not fit the model's 10 classes" in run.err
    without = sufficit(*training(data, tmp_path / "lax", "--target", "prediction"))
    assert without.code == 0, without.err
    assert "Targets in training: the model's own predictions." in without.words
    assert json.loads((tmp_path / "lax" / "run.json").read_text())["targets"] == "prediction"


NO_SIZE = """
from sufficit import Classifier


def digits():
    classifier = Classifier.load("sufficit:digits")
    classifier.view = None
    return classifier
"""


@pytest.mark.usefixtures("coarse")
def test_images_of_several_sizes_want_a_size(sufficit, tmp_path: Path) -> None:
    data = write_digits(tmp_path / "data", 16)
    odd = sorted(data.rglob("*.png"))[-1]
    Image.new("RGB", (80, 60)).save(odd)
    (tmp_path / "own.py").write_text(NO_SIZE)
    own = ["--model", f"python:{tmp_path / 'own.py'}:digits"]
    run = sufficit(*training(data, tmp_path / "lax", *own))
    assert run.code == 2
    assert "images differ in size" in run.err
    assert "give --size" in run.err
    assert sufficit(*training(data, tmp_path / "lax", *own, "--size", "64")).code == 0


@pytest.mark.usefixtures("coarse")
def test_unreadable_pictures_are_counted_and_named(sufficit, tmp_path: Path) -> None:
    data = write_digits(tmp_path / "data", 12)
    for number in range(3):
        (data / "1" / f"bad{number}.png").write_bytes(b"no picture")
    out = tmp_path / "lax"
    stopped = sufficit(*training(data, out, "--on-error", "stop"))
    assert stopped.code == 2
    assert "(other commands: --on-error skip)" in stopped.err
    for _ in range(2):  # the second time it is finished already, and says the same
        run = sufficit(*training(data, out))
        assert run.code == 0, run.err
        assert "3 images skipped" in run.err
        record = json.loads((out / "run.json").read_text())
        assert sorted(record["skipped"]) == [f"1/bad{n}.png" for n in range(3)]
        assert record["n_trained_on"] + record["n_validated_on"] == 12


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_a_full_disk_leaves_the_earlier_checkpoint_and_adapter_whole(
    sufficit, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "lax"
    real, calls = Path.write_bytes, []

    def full(path: Path, content: bytes) -> int:
        calls.append(path.name)
        if "checkpoint" in path.name and sum("checkpoint" in name for name in calls) == 2:
            real(path, bytes(content[:100]))
            raise OSError(28, "No space left on device")
        return real(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        run = sufficit(*training(digits, out, "--epochs", "2"))
    assert run.code == 2, run.err
    assert run.err.endswith("checkpoint.pt could not be written: No space left on device")
    assert "Traceback" not in run.err
    assert torch.load(out / "checkpoint.pt")["state"]["epoch"] == 1
    Lax.from_pretrained(out).check(Classifier.load("sufficit:digits"))
    assert not list(out.glob(".*"))
    assert sufficit(*training(digits, out, "--epochs", "2")).code == 0
    assert len(json.loads((out / "run.json").read_text())["history"]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_features_may_be_cached_and_pictures_read_by_workers(
    sufficit, digits: Path, tmp_path: Path, trained: Path
) -> None:
    read = sufficit(*training(digits, tmp_path / "read", "--workers", "1"))
    assert read.code == 0, read.err
    assert same(weights(tmp_path / "read"), weights(trained))
    cached = sufficit(*training(digits, tmp_path / "cached", "--cache-features"))
    assert cached.code == 0, cached.err
    assert not same(weights(tmp_path / "cached"), weights(trained))  # in another order
    assert torch.load(tmp_path / "cached" / "checkpoint.pt")["settings"]["batches"] == 2
    history = json.loads((tmp_path / "cached" / "run.json").read_text())["history"]
    assert history[0]["loss"] == pytest.approx(
        json.loads((trained / "run.json").read_text())["history"][0]["loss"], rel=0.2
    )


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_half_precision_trains_to_nearly_the_same(
    sufficit, digits: Path, tmp_path: Path, trained: Path
) -> None:
    run = sufficit(*training(digits, tmp_path / "half", "--precision", "bf16"))
    assert run.code == 0, run.err
    half, whole = (
        json.loads((folder / "run.json").read_text())["history"][0]["loss"]
        for folder in (tmp_path / "half", trained)
    )
    assert half != whole
    assert half == pytest.approx(whole, rel=0.02)


@pytest.mark.usefixtures("coarse")
def test_the_next_command_names_what_the_model_needs(
    sufficit, digits: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a lax"
    run = sufficit(*training(digits, out, "--size", "32", "--layer", "features.2"))
    assert run.code == 0, run.err
    assert run.words.endswith(f"--model sufficit:digits --size 32 --methods '{out}'")
    assert Lax.from_pretrained(out).layer == "features.2"


def test_held_out_images_are_spread_over_classes_and_drawn_by_seed() -> None:
    labels = [0] * 50 + [1] * 10 + [2] * 3 + [3]

    def held_out(labels: list[int], n: int, seed: int) -> list[int]:
        return evenly(labels, n, seed, spare_half=True).tolist()

    for seed in range(5):
        chosen = held_out(labels, 9, seed)
        assert len(set(chosen)) == 9
        assert sorted(labels[i] for i in chosen) == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert held_out(labels, 9, 0) == held_out(labels, 9, 0)
    assert held_out(labels, 9, 0) != held_out(labels, 9, 1)
    assert len(held_out([0, 1, 2], 2, 0)) == 2  # classes of one image


def test_a_share_is_held_out_and_not_trained_on(digits: Path) -> None:
    folder = read_folder(Classifier.load("sufficit:digits"), digits, "auto", 0.4, seed=3)
    parts = (folder.training, folder.validation)
    names = [{entry.image.name for entry in part} for part in parts]
    assert [len(part) for part in names] == [12, 8]
    assert not names[0] & names[1]
    for part in parts:
        assert all(entry.label == int(entry.image.folder or "") for entry in part)
    other = read_folder(Classifier.load("sufficit:digits"), digits, "auto", 0.4, seed=4)
    assert folder.digest() != other.digest()
    with pytest.raises(UserError, match="share"):
        how_many(100, 0)


def bad_among_good(tmp_path: Path, kinds: str) -> Part:
    """A picture for each letter: g is good and as bright as its number, b is none."""
    pictures = []
    for number, kind in enumerate(kinds):
        path = tmp_path / f"{number}.png"
        Image.new("L", (2, 2), number).save(path)
        if kind == "b":
            path.write_bytes(b"")
        pictures.append(Entry(number, ImageFile(str(path), path.name, None), number))
    return tuple(pictures)


def test_a_batch_of_bad_pictures_is_left_out(tmp_path: Path) -> None:
    part = bad_among_good(tmp_path, "gbbbgg")
    loader = TrainingImages(part, View(channels=1), 2, sampler=SequentialSampler(part))
    batches = [(images[:, 0, 0, 0] * 255).round().tolist() for images, _ in loader]
    assert batches == [[0.0], [4.0, 5.0]]
    assert [labels.tolist() for _, labels in loader] == [[0], [4, 5]]
    assert loader.skipped == dict.fromkeys(["1.png", "2.png", "3.png"], "the file is empty")
    assert loader.passes == 2
    bad = bad_among_good(tmp_path, "bb")
    nothing = TrainingImages(bad, None, 2, sampler=SequentialSampler(bad))
    assert list(nothing) == []


def test_workers_that_are_kept_see_the_order_of_a_run_that_goes_on(tmp_path: Path) -> None:
    part = bad_among_good(tmp_path, "g" * 8)

    def order(loader: TrainingImages) -> list[int]:
        torch.manual_seed(3)
        return torch.cat([labels for _, labels in loader]).tolist()

    kept = TrainingImages(part, View(channels=1), 2, workers=1)
    orders = [order(kept) for _ in range(3)]
    assert orders == [order(TrainingImages(part, View(channels=1), 2))] * 3


def test_processes_in_step_get_as_many_batches_as_there_are() -> None:
    assert list(replace_missing([None, None, 1, None, 2])) == [1, 1, 1, 1, 2]
    with pytest.raises(UserError, match="none of the images in 2 batches"):
        list(replace_missing([None, None]))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("workers", [0, 1])
def test_training_from_object_storage_equals_the_local_one(
    sufficit,
    trained: Path,
    digits: Path,
    bucket: str,
    object_server: ObjectServer,
    workers: int,
    tmp_path: Path,
) -> None:
    object_server.upload(digits, f"{bucket}/digits")
    out = tmp_path / "digits-lax"
    ran = sufficit(*training(f"{bucket}/digits", out, "--workers", workers))
    assert ran.code == 0, ran.err
    loaded = Lax.from_pretrained(out).state_dict()
    assert same(loaded, Lax.from_pretrained(trained).state_dict())
    assert {path.name for path in trained.iterdir()} == {path.name for path in out.iterdir()}
