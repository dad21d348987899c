"""The image loader: threads, reading ahead, labels, units."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shard_files import png, write_labelled_shard
from sufficit import Classifier, UserError
from sufficit.data.images import BadImageError, ImageFile, open_images
from sufficit.data.loader import (
    Entry,
    ImageLoader,
    Item,
    Unit,
    decode_entry,
    labels_for,
)

NAMES = ["ant", "bee", "cat"]


def classifier(classes: list[str] | None = None, count: int = 3) -> Classifier:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, count, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(model, classes=classes)


def test_images_of_a_unit_are_read_at_once_and_stay_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sufficit.data.loader.THREADS", 2)
    later = Event()

    def read(entry: Entry) -> Item:
        if entry.number == 0:
            assert later.wait(60)  # the next one is read meanwhile
        later.set()
        if entry.number in (1, 3):
            raise BadImageError("it is bad")
        return Item(entry, torch.zeros(1, 2, 2))

    loader = ImageLoader(read)
    entries = [
        Entry(number, ImageFile(f"{number}.png", f"{number}.png", None)) for number in range(5)
    ]
    assert [item.entry.number for item in loader.items(entries)] == [0, 2, 4]
    assert list(loader.skipped) == ["1.png", "3.png"]


@pytest.mark.parametrize(("ready", "wanted"), [(True, [8, 1, 1, 1, 1]), (False, [8, 1, 2, 4, 8])])
def test_reading_ahead_takes_more_threads_only_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, ready: bool, wanted: list[int]
) -> None:
    found = list[int]()

    class Pool:
        """Reads at once, and says whether it was done when it was asked."""

        def __init__(self, threads: int) -> None:
            assert threads == 1  # it reads in the background; `items` has threads of its own

        def submit(self, read: Any, entries: Any, threads: int) -> Any:
            items = read(entries, threads)
            return SimpleNamespace(done=lambda: ready, result=lambda: items)

        def shutdown(self, *, wait: bool) -> None:
            assert not wait

    def items(self: ImageLoader, entries: Any, threads: int | None = None) -> list[Item]:
        found.append(threads or 8)
        return []

    monkeypatch.setattr("sufficit.data.loader.THREADS", 8)
    monkeypatch.setattr("sufficit.data.loader.ThreadPoolExecutor", Pool)
    monkeypatch.setattr(ImageLoader, "items", items)
    units = [Unit(number, ()) for number in range(5)]
    read = [unit.number for unit, _ in ImageLoader(lambda _: None).ahead(units)]
    assert read == [0, 1, 2, 3, 4]
    assert found == wanted


@pytest.mark.parametrize(
    ("words", "classes", "numbers"),
    [
        (["cat", "ant", "cat"], NAMES, [2, 0, 2]),
        (["2", "0"], NAMES, [2, 0]),
        (["2", "0"], None, [2, 0]),
        (["c", "a", "b"], None, [2, 0, 1]),  # in order, as there are as many as classes
    ],
)
def test_labels_of_shards_are_numbered_as_class_folders_are(
    tmp_path: Path, words: list[str], classes: list[str] | None, numbers: list[int]
) -> None:
    source = open_images(write_labelled_shard(tmp_path / "a.tar", words))
    labels = labels_for(classifier(classes), source, "auto")
    assert labels == numbers


@pytest.mark.parametrize(
    ("words", "classes", "error"),
    [
        (["ant", None], NAMES, r"1 images \(first .*001\.png\) are not .* and have no label"),
        ([None, "ant"], NAMES, r"1 images \(first .*000\.png\) are not .* and have no label"),
        (["ant", "dog"], NAMES, r"first 'dog'\) do not fit the model's 3 classes"),
        (["0", "7"], None, r"first '0'\) do not fit the model's 3 classes"),
        (["1", "ant"], ["ant", "bee", "cat"], r"first '1'\) do not fit the model's 3 classes"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    tmp_path: Path, words: list[str | None], classes: list[str] | None, error: str
) -> None:
    source = open_images(write_labelled_shard(tmp_path / "a.tar", words))
    with pytest.raises(UserError, match=error):
        labels_for(classifier(classes), source, "auto")


def test_a_refused_file_of_a_shard_needs_no_label(tmp_path: Path) -> None:
    write_labelled_shard(tmp_path / "a.tar", ["cat", "bee"])
    (tmp_path / "b.tar").touch()
    source = open_images(tmp_path)
    assert [bool(image.problem) for image in source] == [False, False, True]
    labels = labels_for(classifier(NAMES), source, "auto")
    assert labels is not None
    assert (labels[:2], {*labels}) == ([2, 1], {1, 2})


def test_predictions_ask_for_no_label_and_labels_for_one(tmp_path: Path) -> None:
    source = open_images(write_labelled_shard(tmp_path / "a.tar", [None, "ant"]))
    assert labels_for(classifier(), source, "prediction") is None
    bare = open_images(write_labelled_shard(tmp_path / "b.tar", [None, None]))
    assert labels_for(classifier(), bare, "auto") is None
    with pytest.raises(UserError, match="--targets label needs class folders"):
        labels_for(classifier(), bare, "label")


def test_the_second_unit_is_read_ahead_and_no_other() -> None:
    found = []

    def units() -> Iterator[Unit]:
        for number in range(6):
            found.append(number)
            image = ImageFile(f"/x/{number}.png", f"{number}.png", None)
            yield Unit(number, (Entry(number, image),))

    ahead = ImageLoader(lambda entry: Item(entry, torch.zeros(1, 2, 2))).ahead(units())
    assert next(ahead)[0].names == ["0.png"]
    assert found == [0, 1]


def test_images_that_cannot_be_read_are_dropped_once_with_the_reason(tmp_path: Path) -> None:
    for number, content in enumerate([png(0), b"", png(1), b"x"]):
        (tmp_path / f"{number}.png").write_bytes(content)
    loader = ImageLoader(partial(decode_entry, None))
    unit = Unit(0, tuple(Entry(k, image) for k, image in enumerate(open_images(tmp_path))))
    assert [item.name for item in loader.items(unit.entries)] == ["0.png", "2.png"]
    dropped = loader.dropped(unit)
    assert dropped.keys() == {"1.png", "3.png"}
    assert dropped["1.png"] == "the file is empty"
    assert (loader.skipped, loader.dropped(unit)) == ({}, {})
    strict = ImageLoader(partial(decode_entry, None), on_error="stop")
    with pytest.raises(UserError, match=r"^Cannot read 1\.png: the file is empty\. Fix it"):
        strict.items(unit.entries)


@pytest.mark.parametrize("one_size", [True, False])
def test_sizes_may_differ_between_units_only_where_that_is_allowed(one_size: bool) -> None:
    images = [torch.zeros(1, 2, 2), torch.zeros(1, 2, 3)]
    entries = [Entry(k, ImageFile(f"{k}.png", f"{k}.png", None)) for k in range(2)]
    loader = ImageLoader(lambda e: Item(e, images[e.number]), one_size=one_size)
    with pytest.raises(UserError, match=r"differ in size \(0\.png \[1, 2, 2\], 1\.png .*--size"):
        loader.items(entries)
    loader.sizes.clear()
    loader.items(entries[:1])
    if one_size:
        with pytest.raises(UserError, match="differ in size"):
            loader.items(entries[1:])
    else:
        assert len(loader.items(entries[1:])) == 1
