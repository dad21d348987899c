"""Image sources: folders, class folders, images in memory."""

import os
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from shard_files import png, write_shard
from small_runs import config_for, interrupted, run_small
from sufficit import Classifier, UserError
from sufficit.data.image_files import BadImageError, pixels_of
from sufficit.data.images import ImageFile, ImageSource, ImageTensor, list_images, open_images
from sufficit.data.loader import Entry, ImageLoader, decode_entry, labels_for
from sufficit.errors import GoneError
from sufficit.runs.engine import run
from sufficit.runs.job import make_job


def pictures(root: Path, *names: str) -> ImageSource:
    """Images whose first folder is their class folder; the last of them can be read."""
    words = [name.rpartition("/")[0] or None for name in names]
    for word in words:
        (root / (word or "")).mkdir(exist_ok=True)
    files = [ImageFile(str(root / n), n, w) for n, w in zip(names, words, strict=True)]
    return ImageSource([*files[:-1], ImageTensor("last.png", words[-1], torch.zeros(3, 4, 4))])


def numbers_of(source: ImageSource, classes: list[str] | None, count: int) -> list[int | None]:
    model = nn.Sequential(nn.Conv2d(3, count, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    labels = labels_for(Classifier(model, classes=classes), source, "auto")
    return [None] * len(list(source)) if labels is None else labels


@pytest.mark.parametrize(
    ("names", "classes", "count", "wanted"),
    [
        (["dog/1.png", "House Cat/2.png"], ["zebra", "house_cat", "dog"], 3, [2, 1]),
        (["10/1.png", "9/2.png"], None, 11, [10, 9]),  # not sorted as text
        (["x/1.png", "y/2.png", "x/3.png"], None, 2, [0, 1, 0]),  # a folder for each class
        (["1.png", "2.png"], None, 2, [None, None]),
        (["-1/1.png", "1/2.png"], ["-1", "1"], 2, [0, 1]),  # a sign is part of a name
        (["A-b/1.png", "a_b/2.png"], ["a_b", "A-b"], 2, [1, 0]),  # to the letter comes first
        (["1/1.png", "fiat 500/2.png"], None, 2, [0, 1]),
    ],
)
def test_labels_come_from_class_names_or_numbers_or_the_order(
    names: list[str],
    classes: list[str] | None,
    count: int,
    wanted: list[int | None],
    tmp_path: Path,
) -> None:
    assert numbers_of(pictures(tmp_path, *names), classes, count) == wanted


@pytest.mark.parametrize(
    ("names", "classes", "count", "words"),
    [
        (["cats/1.png", "dogs/2.png"], ["dog", "cat"], 2, r"first 'cats'.*\(dog, cat, \.\.\.\)"),
        (["x/1.png", "y/2.png"], None, 10, "do not fit the model's 10 classes"),
        (["cats/1.png"], None, 10, "the class folder 'cats' does not fit the model's 10 classes"),
        (["-1/1.png", "0/2.png"], ["0", "1"], 2, r"first '-1'\) do not fit the model's 2 classes"),
        (["-1/1.png", "1/2.png"], None, 2, r"first '-1'\) do not fit the model's 2 classes"),
        (["1/1.png", "2/2.png"], None, 2, r"first '1'\) do not fit the model's 2 classes"),
        (["crane/1.png"], ["crane", "x", "Crane", "crane"], 4, r"2 classes .* 'crane' \(0, 3\)"),
        (["2.png", "x/1.png"], None, 2, r"1 images \(first 2\.png\) are not in a class folder"),
    ],
)
def test_folders_that_fit_no_class_are_an_error(
    names: list[str], classes: list[str] | None, count: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        numbers_of(pictures(tmp_path, *names), classes, count)


def test_class_folders_are_found_behind_links_once(tmp_path: Path) -> None:
    names = ["b/1.png", "b/2.png", "a/deep/3.png", "c!/4.jpg", "empty/notes.txt", "5.txt"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"x")
    (tmp_path / "in" / "a" / "round").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in" / "b")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "6.png").write_bytes(b"x")
    for name in ("linked", "linked twice"):
        (tmp_path / "in" / name).symlink_to(tmp_path / "elsewhere")
    found = [image.folder for image in open_images(tmp_path / "in")]
    assert found == ["a", "b", "b", "c!", "linked"]


def test_a_folder_that_can_not_be_opened_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.png", "shut/2.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    whole = os.scandir

    def scandir(folder: str) -> Any:
        if str(folder).endswith("shut"):
            raise OSError(36, "File name too long")
        return whole(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        source = open_images(tmp_path)
        assert [[p.name for p in source] for _ in range(2)] == [["a/1.png"]] * 2
    assert len(said) == 1
    assert "shut can't be opened" in str(said[0].message)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_bytes_become_the_floats_of_torchvision(mode: str) -> None:
    from torchvision.transforms.v2 import functional as V

    values = torch.arange(256, dtype=torch.uint8).repeat(3)  # all there are
    seen = Image.frombytes(mode, (16 if mode == "RGB" else 48, 16), values.numpy().tobytes())
    found, wanted = pixels_of(seen), V.to_dtype(V.to_image(seen), torch.float32, scale=True)
    assert torch.equal(found, wanted)
    assert (type(found), found.stride()) == (torch.Tensor, wanted.stride())


def test_images_in_memory_are_read_as_files_are() -> None:
    pixels = torch.rand(3, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    source = ImageSource.from_tensors(pixels, labels=torch.tensor([2, 0, 2]))
    assert [(image.name, image.folder) for image in source] == [
        ("image-0000", "2"),
        ("image-0001", "0"),
        ("image-0002", "2"),
    ]
    assert [image.size for image in source] == [3 * 6 * 5 * 4] * 3
    entries = [Entry(k, image) for k, image in enumerate(source)]
    items = ImageLoader(partial(decode_entry, None)).items(entries)
    assert torch.stack([item.pixels for item in items]).equal(pixels)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    labels = labels_for(Classifier(model), source, "auto")
    assert labels == [2, 0, 2]


def test_an_image_in_memory_is_pickled_without_its_neighbours() -> None:
    source = ImageSource.from_tensors(torch.zeros(200, 3, 16, 16))
    one = next(iter(source))
    content = pickle.dumps(one)
    assert len(content) < 2 * one.size
    again = pickle.loads(content)
    assert isinstance(again, ImageTensor)
    assert (again.name, again.folder, again.problem) == ("image-0000", None, "")
    assert again.read(None).equal(one.read(None))


@pytest.mark.parametrize(
    ("images", "more", "words"),
    [
        (
            torch.zeros(2, 3, 8, 8),
            {"names": ["a"]},
            "one entry per image, 2, got 1",
        ),
        (torch.zeros(2, 3, 8, 8), {"labels": [1, 2, 3]}, "labels must have one entry per image"),
        (torch.zeros(2, 3, 8, 8), {"names": ["a", "a"]}, "names must differ"),
        (torch.zeros(3, 8, 8), {}, "add the batch axis"),
        (torch.full((1, 3, 8, 8), 7.0), {}, r"0\.\.1"),
    ],
)
def test_images_in_memory_are_checked(images: torch.Tensor, more: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ImageSource.from_tensors(images, **more)


def test_a_folder_of_thousands_of_levels_is_listed(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    (tmp_path / "a.png").rename(tmp_path / "d" / "b.png")
    os.close(folder)
    assert [image.name for image in list_images(tmp_path)] == ["d/b.png"]
    for depth in range(1500, 0, -1):  # pytest's own removal would be too deep
        (tmp_path / "d" / "b.png").unlink(missing_ok=True)
        tmp_path.joinpath(*["d"] * depth).rmdir()


def test_data_without_permission_for_a_while_stop_the_run_and_skip_nothing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = config_for(photos, checks="controls,fill"), tmp_path / "out"

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    interrupted(lambda: run_small(config, out))
    job = make_job(config, unit=4)
    with monkeypatch.context() as patched:
        patched.setattr("sufficit.data.image_files.os.scandir", denied)
        patched.setattr("sufficit.data.image_files.read_image", denied)
        with pytest.raises(GoneError, match="Permission denied.*resume"):
            run(job, out, progress=False)
    results = run_small(config, out)
    assert (len(results.names), results.skipped) == (11, {})


def test_a_file_that_is_replaced_after_it_was_listed_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "s" / "0.tar", [("a.png", png(0))])
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.png").write_bytes(png(0))
    listed = [*list_images(tmp_path / "f"), *list_images(tmp_path / "s")]
    for image in listed:
        before = image.path.stat()
        image.path.write_bytes(image.path.read_bytes().replace(png(0), png(1)[: len(png(0))]))
        assert image.path.stat().st_size == before.st_size
        os.utime(image.path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        for read in (image.content, lambda image=image: image.read(None)):
            with pytest.raises(UserError, match=f"^{image.file} was changed after it was listed"):
                read()
        os.utime(image.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert len(image.content()) == len(png(0))
    with listed[0].path.open("ab") as file:
        file.write(b"x")
    os.utime(listed[0].path, ns=(0, int(listed[0].version)))
    with pytest.raises(UserError, match="was changed after it was listed"):
        listed[0].read(None)
    listed[0].path.unlink()
    (tmp_path / "f" / "b.png").touch()
    with pytest.raises(BadImageError, match="can't be opened"):
        listed[0].read(None)
