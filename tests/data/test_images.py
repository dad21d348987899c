"""Image sources: folders, class folders, images in memory."""

import os
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sufficit import Classifier, UserError
from sufficit.data import images as sources
from sufficit.data.images import ImageSource, ImageTensor, classes_of, open_images
from sufficit.data.loader import Entry, ImageLoader, decode_entry, labels_for


def test_classes_are_known_without_listing_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    source = open_images(tmp_path / "in")
    assert source.classes is not None
    assert source.classes() == classes_of(list(source))
    assert source.classes().folders == ("a", "b", "c!", "linked")
    for name in ("z.png", "loose.png"):
        (tmp_path / "in" / name).write_bytes(b"x")
    loose = source.classes()
    assert loose == classes_of(list(source))
    assert (loose.loose, loose.first_loose) == (2, "loose.png")
    listed: list[str] = []
    whole = sources._Search._listed
    monkeypatch.setattr(
        sources._Search, "_listed", lambda self, f: listed.append(f) or whole(self, f)
    )
    source.classes()
    assert listed == [str(tmp_path / "in")]


def test_a_folder_that_can_not_be_opened_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.png", "shut/2.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    whole = os.scandir

    def scandir(folder: str) -> Any:
        if str(folder).endswith("shut"):
            raise PermissionError(13, "Permission denied")
        return whole(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        source = open_images(tmp_path)
        assert [[p.name for p in source] for _ in range(2)] == [["a/1.png"]] * 2
    assert len(said) == 1
    assert "shut can't be opened" in str(said[0].message)


def test_images_in_memory_are_read_as_files_are() -> None:
    pixels = torch.rand(3, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    source = ImageSource.from_tensors(pixels, labels=torch.tensor([2, 0, 2]))
    assert [(image.name, image.folder) for image in source] == [
        ("image-0000", "2"),
        ("image-0001", "0"),
        ("image-0002", "2"),
    ]
    assert [image.bytes() for image in source] == [3 * 6 * 5 * 4] * 3
    entries = [Entry(k, image) for k, image in enumerate(source)]
    items = ImageLoader(partial(decode_entry, None)).items(entries)
    assert torch.stack([item.pixels for item in items]).equal(pixels)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    labels = labels_for(Classifier(model), source, "auto")
    assert [labels.number(image) for image in source] == [2, 0, 2]


def test_an_image_in_memory_is_pickled_without_its_neighbours() -> None:
    source = ImageSource.from_tensors(torch.zeros(200, 3, 16, 16))
    one = next(iter(source))
    content = pickle.dumps(one)
    assert len(content) < 2 * one.bytes()
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
