"""A run that was stopped goes on only where it is the very same run; what is there is not lost."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sufficit.compare import compare_folder
from sufficit.comparing.settings import Settings
from sufficit.keeping import Parts
from sufficit.scored import Options
from torch import nn

from reference import small_net
from sufficit import Classifier, UserError, View, scoring
from sufficit.data import images
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import open_images
from sufficit.files import check_output
from sufficit.training import FolderOptions, train_folder
from sufficit.training.trainer import Trainer

SIDE = 12
STEPS = {"value_step": 0.25, "percent_step": 0.25}


class StopError(BaseException):
    """As if the power had failed."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nine pictures of two classes, heatmaps for them, and groups of three images."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, SIDE, SIDE, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number}.png")
    write_maps(tmp_path, 0)
    monkeypatch.setattr(scoring, "GROUP", 3)
    return tmp_path


def write_maps(place: Path, seed: int) -> None:
    names = [path.relative_to(place / "photos").as_posix() for path in place.rglob("*.png")]
    maps = np.random.default_rng(seed).random((len(names), SIDE, SIDE), dtype=np.float32)
    named = dict(zip(sorted(names), maps, strict=True))
    np.savez(place / "maps.npz", **named)
    save_file({k: torch.from_numpy(v) for k, v in named.items()}, place / "maps.safetensors")


def evaluated(place: Path, maps: str = "npz", view: View | None = None, **options: Any) -> Any:
    classifier = Classifier(small_net(size=(SIDE, SIDE), classes=2), view=view)
    chosen = Options(**STEPS, score="confidence", columns=("msi",), **options)
    heatmaps = place / f"maps.{maps}"
    return scoring.score_folder(classifier, place / "photos", heatmaps, chosen, out=place / "out")


def stopped(run: Callable[[], Any], after: int = 1) -> None:
    """The run, ended by force when so many parts are written."""
    whole = Parts.write

    def write(self: Parts, *given: Any) -> None:
        if len(list(self.folder.glob("*.safetensors"))) == after:
            raise StopError
        whole(self, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Parts, "write", write)
        with pytest.raises(StopError):
            run()


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_heatmaps_of_the_same_names_and_sizes_but_other_values_are_another_run(
    place: Path, kind: str
) -> None:
    stopped(lambda: evaluated(place, kind))
    size = (place / f"maps.{kind}").stat().st_size
    write_maps(place, 1)
    assert (place / f"maps.{kind}").stat().st_size == size
    with pytest.raises(UserError, match="part of another run: heatmaps was"):
        evaluated(place, kind)
    write_maps(place, 0)
    assert len(evaluated(place, kind).scores) == 9


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"fill": torch.zeros(3, 1, 1)}, {"fill": torch.ones(3, 1, 1)}, "fill"),
        ({"view": View((SIDE, SIDE))}, {"view": View((SIDE, SIDE), resize=16)}, "model's view"),
    ],
)
def test_another_fill_and_another_view_are_another_run(place: Path, first, second, what) -> None:
    stopped(lambda: evaluated(place, **first))
    with pytest.raises(UserError, match=f"part of another run: {what} was"):
        evaluated(place, **second)
    assert len(evaluated(place, **first).scores) == 9


def test_whether_a_bar_is_shown_is_no_matter(place: Path) -> None:
    stopped(lambda: evaluated(place))
    assert len(evaluated(place, progress=False).scores) == 9


def compared(place: Path, layer: str, fill: Path | None = None, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2),
    )  # fmt: skip
    settings = Settings(
        model="own", data=str(place / "photos"), methods=("gradcam",), leak=False, device="cpu",
        fill=str(fill or "black"), **STEPS,
    )  # fmt: skip
    classifier = Classifier(model, layer, view=View((SIDE, SIDE)))
    return compare_folder(settings, place / "out", classifier=classifier, group=3, **more)


def test_a_comparison_goes_on_with_its_own_layer_and_fill_alone(place: Path) -> None:
    fill = place / "fill.png"
    Image.new("RGB", (SIDE, SIDE), "red").save(fill)
    stopped(lambda: compared(place, "0", fill))
    with pytest.raises(UserError, match="model's layer was '0' and is now '2'"):
        compared(place, "2", fill)
    Image.new("RGB", (SIDE, SIDE), "blue").save(fill)
    with pytest.raises(UserError, match="part of another run: fills' values"):
        compared(place, "0", fill)


def test_overwriting_removes_the_earlier_run_and_nothing_else(place: Path) -> None:
    compared(place, "0")
    mine = [place / "out" / "other" / "scores.parquet", place / "out" / "maps" / "heatmaps.npz"]
    for path in mine:
        path.parent.mkdir()
        path.write_text("mine")
    stopped(lambda: compared(place, "2", overwrite=True))
    assert [path.read_text() for path in mine] == ["mine", "mine"]
    left = {path.name for path in (place / "out").iterdir()}
    assert left == {"other", "maps", "parts", "RUN.toml"}
    assert compared(place, "2").names


def test_a_run_of_another_command_is_not_overwritten(sufficit, place: Path) -> None:
    model = ("--model", "sufficit:digits", "--data", place / "photos", "--out", place / "out")
    words = ("--methods", "center", "--no-leak", "--value-step", "0.25", "--targets", "prediction")
    assert sufficit("compare", *model, *words).code == 0
    run = sufficit("sanity", *model, "--methods", "gradcam", "--overwrite")
    assert run.code == 2
    assert "holds a run of sufficit compare: choose another --out" in run.err


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("sufficit compare --model m", True),
        ("__main__.py compare --model m", True),
        ("sufficit sanity --model m", False),
        ("__main__.py -q tests", False),
        ("", False),
    ],
)
def test_whose_run_it_is_is_told_by_its_command(tmp_path: Path, command: str, refused) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": command}))
    with pytest.raises(UserError, match="a run of sufficit compare") if refused else nullcontext():
        check_output(tmp_path, command="sanity")


def test_explaining_anew_leaves_no_heatmap_of_the_earlier_run(sufficit, place: Path) -> None:
    words = ("--model", "sufficit:digits", "--targets", "prediction", "--out", place / "drawn")
    assert sufficit("explain", place / "photos", *words, "--method", "gradcam,center").code == 0
    for name in ("mine.npz", "sheet-of-mine.png"):
        (place / "drawn" / name).write_text("mine")
    one = next((place / "photos").rglob("*.png"))
    assert sufficit("explain", one, *words, "--method", "gradcam", "--overwrite").code == 0
    left = {path.name for path in (place / "drawn").iterdir()}
    own = {"mine.npz", "sheet-of-mine.png"}
    assert left == own | {"gradcam.npz", "overlays", "run.json", "sheet.png"}
    assert len(list((place / "drawn" / "overlays").rglob("*.png"))) == 1


def test_a_word_that_is_wrong_overwrites_nothing(sufficit, place: Path) -> None:
    compared(place, "0")
    before = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
    for words in (("--methods", "gradkam"), ("--methods", "center", "--fill", "nothing.png")):
        run = sufficit(
            "compare", "--model", "sufficit:digits", "--data", place / "photos", *words,
            "--out", place / "out", "--overwrite",
        )  # fmt: skip
        assert run.code == 2
        after = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
        assert after == before


def test_an_evaluation_that_overwrites_can_be_stopped_and_goes_on(sufficit, place: Path) -> None:
    words = ["evaluate", "--model", "sufficit:digits", "--data", place / "photos"]
    words += ["--heatmaps", place / "maps.npz", "--out", place / "out", "--columns", "msi"]
    words += ["--value-step", "0.25", "--targets", "prediction", "--device", "cpu"]
    assert sufficit(*words).code == 0
    stopped(lambda: sufficit(*words, "--alpha-min", "0.4", "--overwrite"))
    assert {path.name for path in (place / "out").iterdir()} == {"parts"}
    assert sufficit(*words, "--alpha-min", "0.4").code == 0
    assert sufficit(*words, "--alpha-min", "0.3").code == 2, "a finished one is not overwritten"


# Data that vanishes


def vanishing(place: Path, run: Callable[[], Any], parts: int, *, empty: bool = False) -> None:
    """The run, whose images are taken away when so many parts are written; they come back."""
    whole, photos, away = Parts.write, place / "photos", place / "away"

    def write(self: Parts, *given: Any) -> None:
        whole(self, *given)
        if len(list(self.folder.glob("*.safetensors"))) == parts:
            photos.rename(away)
            if empty:
                photos.mkdir()

    words = r"photos can't be read any more \(.*\): bring it back and give the same command"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Parts, "write", write)
        with pytest.raises(UserError, match=words):
            run()
    if empty:
        photos.rmdir()
    away.rename(photos)


@pytest.mark.parametrize(("parts", "empty"), [(1, False), (1, True), (2, False), (3, True)])
def test_an_evaluation_whose_data_vanish_stops_and_goes_on(
    place: Path, parts: int, empty: bool
) -> None:
    vanishing(place, lambda: evaluated(place, leak_donors=1), parts, empty=empty)
    assert len(Parts(place / "out" / "parts").done("scores")) == parts
    again = evaluated(place, leak_donors=1)
    (place / "out").rename(place / "first")
    whole = evaluated(place, leak_donors=1)
    assert again.names == whole.names
    assert not again.skipped
    assert again.scores.columns.keys() == whole.scores.columns.keys()
    for name, column in whole.scores.columns.items():
        assert torch.equal(again.scores.columns[name], column), name


@pytest.mark.filterwarnings("ignore::sufficit.errors.EmptyHeatmapWarning")
@pytest.mark.parametrize(("parts", "empty"), [(1, False), (2, True), (3, False)])
def test_a_comparison_whose_data_vanish_stops_and_goes_on(
    place: Path, parts: int, empty: bool
) -> None:
    vanishing(place, lambda: compared(place, "0"), parts, empty=empty)
    assert len(Parts(place / "out" / "parts").done("scores")) == parts
    compared(place, "0")
    (place / "out").rename(place / "first")
    compared(place, "0")
    for method in ("gradcam", "random", "center"):
        rows = [place / out / method / "scores.parquet" for out in ("first", "out")]
        assert rows[0].read_bytes() == rows[1].read_bytes()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_whose_data_vanish_stops_and_goes_on(place: Path, workers: int) -> None:
    photos, away, whole = place / "photos", place / "away", Trainer._save

    def train(out: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        )
        classifier = Classifier(model, "0", view=View((SIDE, SIDE)))
        options = FolderOptions(
            epochs=2, batch_size=3, validation_share=0.3, workers=workers, progress=False
        )
        outcome = train_folder(classifier, photos, place / out, options)
        assert outcome is not None
        return torch.cat([value.flatten() for value in outcome.lax.state_dict().values()])

    def save(*given: Any, **more: Any) -> None:
        whole(*given, **more)
        photos.rename(away)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "_save", save)
        with pytest.raises(UserError, match=r"photos can't be read any more.*same command"):
            train("out")
    away.rename(photos)
    assert torch.equal(train("out"), train("whole"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_a_disk_that_no_longer_answers_stops_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def broken(*_: object) -> None:
        raise images.BadImageError("no image") from OSError(number, os.strerror(number))

    picture = next(iter(open_images(place / "photos")))
    with monkeypatch.context() as patched:
        patched.setattr(images, "read_image", broken)
        with pytest.raises(UserError, match=rf"photos can't .* \({os.strerror(number)}\): bring"):
            picture.read(None)
    usual = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("b"):
            raise OSError(number, os.strerror(number))
        return usual(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=rf"photos can't .* \({os.strerror(number)}\): bring"):
        list(open_images(place / "photos"))


def test_heatmaps_on_a_disk_that_no_longer_answers_stop_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with HeatmapFile(place / "maps.npz") as maps:
        monkeypatch.setattr(maps, "_checked", broken)
        with pytest.raises(UserError, match=r"maps\.npz can't be read any more"):
            maps.read(maps.keys[0])


def test_one_file_that_vanishes_is_left_out(place: Path) -> None:
    found = list(open_images(place / "photos"))
    found[0].path.unlink()
    with pytest.raises(images.BadImageError, match="No such file"):
        found[0].read(None)
    with pytest.raises(FileNotFoundError):
        found[0].bytes()
    assert found[1].read(None).shape == (3, SIDE, SIDE)
