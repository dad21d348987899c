"""Folders as people have them: every kind of bad file has an outcome that is known beforehand."""

import csv
import io
import json
import os
import socket
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from sufficit.classifier.checkpoint import View
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.image_files import FORMATS, BadImageError, ignore_image_warnings, read_image
from sufficit.data.images import list_images
from sufficit.errors import UserError
from sufficit.files import short_name
from sufficit.outside import literal
from sufficit.provenance import save_json

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
GREY = PIXELS[..., 0]
LONG = "x" * 251 + ".png"  # as long as a name may be
BYTES = "caf\udce9.png"  # a name that is no UTF-8
MODEL = ("--model", "sufficit:digits")
FAST = ("--value-step", "0.5", "--percent-step", "0.5", "--device", "cpu")


def picture() -> Image.Image:
    return Image.fromarray(PIXELS)


def film(path: Path) -> None:
    first, *more = (Image.new("RGB", (24, 20), (v, v, v)) for v in (51, 153, 255))
    first.save(path, save_all=True, append_images=more)


def palette(path: Path) -> None:
    """Sixteen colours, the first transparent; a PNG may have others half so."""
    shares = bytes([0, 128] + [255] * 14) if path.suffix == ".png" else 0
    picture().quantize(16).save(path, transparency=shares)


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    picture().save(path, exif=exif, lossless=True)


def truncated(path: Path) -> None:
    picture().save(path)
    path.write_bytes(path.read_bytes()[:-300])


def through(path: Path, kind: str) -> None:
    with path.open("wb") as file:
        picture().save(file, kind)


def bomb(path: Path) -> None:
    """A picture of a few kilobytes whose header tells of 40,000 x 40,000 pixels."""
    Image.new("RGB", (8, 8)).save(path)
    content = path.read_bytes()
    head = b"IHDR" + (40_000).to_bytes(4, "big") * 2 + content[24:29]
    checked = head + zlib.crc32(head).to_bytes(4, "big")
    path.write_bytes(content[:12] + checked + content[33:])


def bound(path: Path) -> None:
    """A socket; the place where it is bound must have a short path."""
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


GOOD: dict[str, Callable[[Path], object]] = {
    "plain.png": lambda path: picture().save(path),
    "cmyk.jpg": lambda path: picture().convert("CMYK").save(path, quality=100),
    "grey.pgm": lambda path: Image.fromarray(GREY).save(path),
    "deep.tif": lambda path: Image.fromarray(GREY.astype(np.uint16) * 257).save(path),
    "film.gif": film,
    "film.png": film,
    "film.webp": film,
    "palette.png": palette,
    "palette.gif": palette,
    "alpha.png": lambda path: picture().convert("RGBA").save(path),
    "rotated.webp": rotated,
    "png called.jpg": lambda path: through(path, "PNG"),
    "dot.png": lambda path: Image.new("RGB", (1, 1), (51, 102, 153)).save(path),
    "line.png": lambda path: Image.new("RGB", (1, 999), (51, 102, 153)).save(path),
    "قطة.png": lambda path: picture().save(path),
    "🐈.png": lambda path: picture().save(path),
    r"$\frac$.png": lambda path: picture().save(path),
    "two\nlines.png": lambda path: picture().save(path),
    "\x1b[31mred.png": lambda path: picture().save(path),
    BYTES: lambda path: through(path, "PNG"),
    LONG: lambda path: picture().save(path),
}
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated.png": (truncated, "not a readable image"),
    "truncated.jpg": (truncated, "not a readable image"),
    "nothing.png": (Path.touch, "the file is empty"),
    "text.png": (lambda path: path.write_text("hello"), "not a readable image"),
    "postscript.png": (lambda path: through(path, "EPS"), "cannot identify image file"),
    "bomb.png": (bomb, "too large to open safely"),
    "sliver.png": (lambda path: Image.new("1", (300_000, 1)).save(path), "too large"),
    "float.tiff": (lambda p: Image.fromarray(GREY / np.float32(255)).save(p), "no known range"),
    "whole.tiff": (lambda p: Image.fromarray(GREY.astype(np.int32)).save(p), "no known range"),
    "dangling.png": (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
    "self.png": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "pipe.png": (os.mkfifo, "a pipe, socket, device or folder, not a file"),
    "socket.png": (bound, "a pipe, socket, device or folder, not a file"),
    "device.png": (lambda path: path.symlink_to("/dev/zero"), "device"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with every good and every bad file."""
    root = tmp_path_factory.mktemp("data") / "pictures"
    for place in (root / "3", root / "5"):
        place.mkdir(parents=True)
    for number, (name, make) in enumerate(GOOD.items()):
        make(root / "35"[number % 2] / name)
    for name, (make, _) in BAD.items():
        make(root / "3" / name)
    (root / "5" / "folder.png").mkdir()
    (root / "5" / "notes.txt").write_text("no picture")
    (root / "5" / ".half.part-0123abcd-7.png").write_text("left by a killed run")
    (root / "loop").symlink_to(root)
    return root


def written(name: str) -> str:
    """How a name stands in results."""
    return name.replace("\udce9", r"\xe9")


def read(path: Path, view: View | None = None) -> torch.Tensor:
    with ignore_image_warnings():
        return read_image(path, view)


def test_all_that_is_called_like_a_picture_is_found_once(folder: Path) -> None:
    found = sorted(picture.name.partition("/")[2] for picture in list_images(folder))
    assert found == sorted(written(name) for name in (*GOOD, *BAD))


def values_of(name: str) -> np.ndarray:
    """What a model sees of a good file, from the definition of its kind."""
    flat = {"film": 51, "dot": (51, 102, 153), "line": (51, 102, 153)}
    whole = PIXELS / 255
    for word, value in flat.items():
        if name.startswith(word):
            size = {"film": (20, 24), "dot": (1, 1), "line": (999, 1)}[word]
            return np.broadcast_to(np.array(value) / 255, (*size, 3))
    if name in ("grey.pgm", "deep.tif"):
        return np.repeat(whole[..., :1], 3, axis=2)
    if name == "rotated.webp":
        return np.rot90(whole, -1)
    if name.startswith("palette"):
        return np.asarray(picture().quantize(16).convert("RGB")) / 255
    return whole


@pytest.mark.parametrize("name", GOOD, ids=lambda name: ascii(name)[:20])
def test_what_can_be_read_is_read_as_its_kind_says(folder: Path, name: str) -> None:
    path = next(p for p in (folder / "3" / name, folder / "5" / name) if p.exists())
    seen = read_image(path, None).permute(1, 2, 0).numpy()  # without a warning
    if name == "cmyk.jpg":  # lossy
        assert np.abs(seen - values_of(name)).mean() < 0.05
        return
    assert seen == pytest.approx(values_of(name), abs=1.01 / 255)


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_read_says_why_and_does_not_hang(folder: Path, name: str) -> None:
    with pytest.raises(BadImageError, match=BAD[name][1]):
        read(folder / "3" / name, View((64, 64)))


def test_a_folder_called_like_a_picture_is_no_picture(folder: Path) -> None:
    with pytest.raises(BadImageError, match="not a file"):
        read(folder / "5" / "folder.png")


def test_no_format_that_runs_a_program_is_opened() -> None:
    assert not {"EPS", "WMF", "PDF"} & set(FORMATS)


def test_whatever_pillow_raises_is_a_bad_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture().save(tmp_path / "a.png")
    for error in (IndexError("i"), PermissionError(13, "Permission denied"), MemoryError("m")):

        def broken(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(Image, "open", broken)
        with pytest.raises(BadImageError, match="not a readable image"):
            read_image(tmp_path / "a.png", None)


def test_links_to_folders_are_followed_once_and_never_round(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    for place in (data / "cat", other / "deep"):
        place.mkdir(parents=True)
        picture().save(place / "a.png")
    (data / "dog").symlink_to(other)  # elsewhere: followed
    (data / "eel").symlink_to(other)  # the same again
    (data / "fox").symlink_to(data / "cat")  # found anyway
    (data / "up").symlink_to(tmp_path)  # around the data
    (data / "root").symlink_to("/")
    (other / "deep" / "back").symlink_to(other)
    (other / "across").symlink_to(data)
    assert [picture.name for picture in list_images(data)] == ["cat/a.png", "dog/deep/a.png"]


def test_names_that_are_written_alike_are_refused(tmp_path: Path) -> None:
    through(tmp_path / BYTES, "PNG")
    picture().save(tmp_path / written(BYTES))
    with pytest.raises(UserError, match="written alike"):
        list_images(tmp_path)


def test_long_names_stay_apart_and_short_ones_as_they_are() -> None:
    one, other = (short_name(f"{'é' * 130}{k}.gradcam.png") for k in "ab")
    assert one != other
    assert max(len(os.fsencode(name)) for name in (one, other)) <= 255
    assert one.endswith("a.gradcam.png")
    assert short_name(LONG) == LONG


def reasons(record: object) -> dict[str, str]:
    """Names without their folder, and why they were left out."""
    assert isinstance(record, list | dict)
    if isinstance(record, list):
        record = {entry["name"]: entry["reason"] for entry in record}
    return {name.partition("/")[2]: why for name, why in record.items()}


def assert_all_told(out: Path) -> None:
    """Every bad file with its reason, and every other one scored."""
    run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert run["n"] == len(GOOD)
    told = reasons(run["skipped"])
    assert told.keys() == BAD.keys()
    for name, (_, why) in BAD.items():
        assert why in told[name]


@pytest.mark.filterwarnings("ignore:heatmaps with no positive part")
def test_compare_goes_on_without_bad_files_and_counts_them(
    sufficit, folder: Path, tmp_path: Path
) -> None:
    words = ["compare", *MODEL, "--data", folder, *FAST, "--methods", "gradcam"]
    words += ["--checks", "fill,leak", "--out", tmp_path / "out"]
    (tmp_path / "stop.toml").write_text('on_error = "stop"\ndonors = 1\nsave_heatmaps = true')
    (tmp_path / "skip.toml").write_text("donors = 1\nsave_heatmaps = true")
    stopped = sufficit(*words, "--config", tmp_path / "stop.toml")
    assert stopped.code == 2
    assert "3/bomb.png: too large to open safely" in stopped.err
    run = sufficit(*words, "--config", tmp_path / "skip.toml")
    assert run.code == 0, run.err
    assert f"{len(BAD)} images skipped" in run.err
    with np.load(tmp_path / "out" / "gradcam" / "heatmaps.npz") as kept:
        assert {name.partition("/")[2] for name in kept} == set(map(written, GOOD))
    assert_all_told(tmp_path / "out")
    rows = pandas.read_parquet(tmp_path / "out" / "gradcam" / "scores.parquet")
    assert {name.partition("/")[2] for name in rows["image"]} == set(map(written, GOOD))
    assert f"{len(BAD)} skipped" in (tmp_path / "out" / "report.html").read_text()


def test_evaluate_goes_on_without_bad_files_and_counts_them(
    sufficit, folder: Path, tmp_path: Path
) -> None:
    names = [picture.name for picture in list_images(folder)]
    write_heatmaps(tmp_path / "maps.npz", {name: torch.rand(8, 8) for name in names})
    words = ["evaluate", *MODEL, "--data", folder, "--heatmaps", tmp_path / "maps.npz", *FAST]
    run = sufficit(*words, "--out", tmp_path / "out")
    assert run.code == 0, run.err
    assert_all_told(tmp_path / "out")


@pytest.mark.filterwarnings("ignore::sufficit.errors.EmptyHeatmapWarning")
def test_explain_draws_what_can_be_read_under_any_name(
    sufficit, folder: Path, tmp_path: Path
) -> None:
    run = sufficit("explain", folder, *MODEL, "--device", "cpu", "--out", tmp_path / "out")
    assert run.code == 0, run.err
    assert_all_told(tmp_path / "out")
    drawn = [path.name for path in (tmp_path / "out" / "regions").glob("*/*")]
    assert set(drawn) == {short_name(f"{written(name)}.gradcam+fit.jpg") for name in GOOD}


def test_names_give_no_orders_to_the_terminal(sufficit, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    picture().save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "\x1b[2J.png").touch()
    run = sufficit("explain", tmp_path / "data", *MODEL, "--out", tmp_path / "out")
    assert run.code == 0, run.err
    assert r"\x1b[2J.png: the file is empty" in run.err
    assert "\x1b[2J" not in run.err


FORGED = (
    r"\[/]x.png",
    "[link=https:evil.example]x[bold].png",
    "x.png: fine\nError: forged.png",
    "a\rb\u202egnp.png",
    "trailing\\",
    "=1+1.png",
)


@pytest.mark.filterwarnings("ignore::sufficit.errors.EmptyHeatmapWarning")
def test_names_are_shown_as_they_are_on_one_line(sufficit, tmp_path: Path) -> None:
    """Neither markup, nor a link, nor a line of its own; and no formula in a table."""
    folder = tmp_path / "data"
    folder.mkdir()
    picture().save(folder / "a.png")
    (folder / "\\[").mkdir()
    (folder / "good \\[").mkdir()
    for name in FORGED:
        (folder / f"{name}.png").touch()
        picture().save(folder / f"good {name}.png")
    shown = [literal(f"{name}.png: the file is empty").plain for name in FORGED]
    own = ("--targets", "prediction", "--device", "cpu")
    words = (*MODEL, *own, "--data", folder, *FAST, "--methods", "@x=gradcam,center")
    runs = [
        sufficit("explain", folder, *MODEL, *own, "--out", tmp_path / r"\[/]out"),
        sufficit("compare", *words, "--checks", "fill", "--out", tmp_path / "[bold]out"),
    ]
    for run in runs:
        assert run.code == 0, run.err
        joined = "".join(run.err.split())  # lines are wrapped
        assert all("".join(one.split()) in joined for one in shown)
        assert not any(line.startswith("Error: forged") for line in run.err.splitlines())
        assert not any(c in run.err + run.out for c in "\x1b\r\u202e")
    with (tmp_path / "[bold]out" / "skipped.csv").open(newline="") as file:
        cells = list(csv.reader(file))
    assert ["'=1+1.png.png", "the file is empty"] in cells
    assert not any(cell.startswith("=") for row in cells for cell in row)
    pairs = (tmp_path / "[bold]out" / "pairs.csv").read_text()
    assert ",'@x," in pairs
    assert ",@x" not in pairs


def test_a_terminal_that_knows_few_letters_is_told_what_it_can_show(
    sufficit, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert sufficit("--version").code == 0
    screen.write("🐈")
    screen.flush()
    assert screen.buffer.getvalue().endswith(rb"\U0001f408")


def test_json_holds_names_that_are_no_utf8(tmp_path: Path) -> None:
    save_json(tmp_path / "run.json", {"data": BYTES, "cat": "🐈"})
    assert json.loads((tmp_path / "run.json").read_text()) == {"data": BYTES, "cat": "🐈"}
