"""The manifest of a run: the listed images in order, read back a few units at a time."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sufficit.data import manifest
from sufficit.data.images import KINDS, ImageFile, ImageSource, SourceImage
from sufficit.data.manifest import FILE, NUMBERS, TEXTS, Manifest, listed
from sufficit.errors import UserError


def files(count: int) -> list[ImageFile]:
    words = ("ant", "bee")
    return [
        ImageFile(f"/data/{k}.png", f"{words[k % 2]}/{k}.png", words[k % 2], "", 100 + k)
        for k in range(count)
    ]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "GROUP", 2)


def test_entries_are_the_listed_images_with_numbers_and_labels() -> None:
    images = files(11)
    found = listed(images, 3).labelled({"ant": 7, "bee": 4})
    assert [entry.image for entry in found] == images
    assert [entry.number for entry in found] == list(range(11))
    assert [entry.label for entry in found] == [7, 4] * 5 + [7]
    assert found.labels().tolist() == [7, 4] * 5 + [7]
    assert found.words == ["ant", "bee"]


@pytest.mark.parametrize("unit", [0, 2, 3])
def test_a_unit_is_a_slice_of_the_list(unit: int) -> None:
    images = files(11)
    part = slice(3 * unit, 3 * unit + 3)
    found = [*listed(images, 3).of_unit(unit)]
    assert [entry.image for entry in found] == images[part]
    assert [entry.number for entry in found] == [*range(11)][part]


def test_single_entries_are_found_from_both_ends() -> None:
    found = listed(files(11), 3)
    assert found[10].number == found[-1].number == 10
    with pytest.raises(IndexError):
        found[11]


def test_images_without_labels_count_as_classes_of_their_own() -> None:
    found = listed(files(4), 3)
    assert [entry.label for entry in found] == [None] * 4
    assert found.labels().tolist() == [0, 1, 2, 3]


def test_a_run_without_pyarrow_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        listed(files(2), 3)


def test_one_class_for_all_images() -> None:
    found = listed(files(4), 3).labelled(target=5)
    assert [entry.label for entry in found] == [5] * 4
    assert found.labels().tolist() == [5] * 4


def test_images_without_a_class_are_counted_unless_they_are_never_read() -> None:
    loose = ImageFile("/data/x.png", "x.png", None, "", 1)
    broken = ImageFile("/data/y.png", "y.png", None, "cut off", 1)
    assert listed([*files(2), broken, loose, loose], 2).loose == (2, "x.png")


def test_only_the_digest_of_a_changed_unit_changes() -> None:
    before, images = listed(files(9), 3).digests(), files(9)
    images[4] = ImageFile(images[4].file, images[4].name, images[4].folder, "", 1)
    after = listed(images, 3).digests()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_the_images_are_listed_once_and_groups_are_read_as_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def walk() -> Iterator[SourceImage]:
        for image in files(40):
            seen.append(image.name)
            yield image

    read: list[int] = []
    real = manifest._read_group
    note = lambda file, lock, group: read.append(group) or real(file, lock, group)  # noqa: E731
    monkeypatch.setattr(manifest, "_read_group", note)
    found = listed(walk(), 3)
    assert (len(seen), read) == (40, [])
    assert [entry.number for entry in found.of_unit(10)] == [30, 31, 32]
    assert read == [5]  # of seven groups with two units each
    list(found)
    list(found)
    assert len(read) < 16


def test_a_copy_in_another_process_reads_the_same_file(tmp_path: Path) -> None:
    found = listed(files(7), 3).labelled({"ant": 0, "bee": 1})
    found.save(tmp_path / "manifest.parquet")
    entries, packed = list(found), pickle.dumps(found.at(tmp_path / "manifest.parquet"))
    del found
    assert list(pickle.loads(packed)) == entries


def test_images_in_memory_keep_their_pixels() -> None:
    source = ImageSource.from_tensors(torch.rand(5, 3, 4, 4), labels=[1, 0, 1, 0, 1])
    first = listed(source, 2).labelled({"0": 0, "1": 1})
    found = pickle.loads(pickle.dumps(first))
    for entry, image in zip(found, source, strict=True):
        assert torch.equal(entry.image.read(None), image.read(None))
    assert [entry.label for entry in found] == [1, 0, 1, 0, 1]


def test_the_temporary_listing_is_deleted_with_its_last_manifest() -> None:
    first = listed(files(3), 2)
    second, folder = first.labelled({"ant": 0, "bee": 1}), first.path.parent
    del first
    assert folder.exists()
    assert len(list(second)) == 3
    del second
    assert not folder.exists()


def test_a_listing_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Iterator[SourceImage]:
        yield from files(3)
        raise UserError("the disk is gone")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match="the disk is gone"):
        listed(broken(), 2)
    assert not list(tmp_path.iterdir())


def test_every_kind_of_image_fits_the_columns() -> None:
    for kind in KINDS.values():
        assert {*kind.__match_args__} <= {*TEXTS, *NUMBERS, FILE}


def test_a_corrupt_manifest_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "manifest.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="cannot read .*manifest.parquet"):
        Manifest(path)
