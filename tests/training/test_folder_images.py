"""Batches of images to train on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from sufficit import UserError
from sufficit.data.images import list_images
from sufficit.data.loader import Entry
from sufficit.data.splits import Part
from sufficit.training.folder_images import TrainingImages


def part_of(folder: Path, n: int, bad: tuple[int, ...] = ()) -> Part:
    """Images whose grey value is their number; the bad ones are empty files."""
    for number in range(n):
        path = folder / f"{number:02d}.png"
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(path)
        if number in bad:
            path.write_bytes(b"")
    return tuple(Entry(k, image, k) for k, image in enumerate(list_images(folder)))


def orders(batches: object) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", ["shuffled", "in order"])
def test_batches_and_later_draws_are_those_of_a_torch_data_loader(
    tmp_path: Path, order: str
) -> None:
    part = part_of(tmp_path, 11)
    sampler = SequentialSampler(part) if order == "in order" else None
    loader = TrainingImages(part, None, 4, sampler=sampler)
    data = TensorDataset(torch.arange(11), torch.arange(11))
    peer = DataLoader(data, 4, shuffle=order == "shuffled")
    for seed in range(3):
        found = []
        for batches in (loader, peer):
            torch.manual_seed(seed)
            found.append((orders(batches), torch.rand(1).item()))
        assert found[0] == found[1]
    assert (len(loader), loader.passes) == (3, 3)
    for images, labels in loader:
        assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), labels)


def test_images_alone_are_given_where_there_are_no_labels(tmp_path: Path) -> None:
    part = tuple(replace(entry, label=None) for entry in part_of(tmp_path, 5))
    batches = list(TrainingImages(part, None, 2, sampler=SequentialSampler(part)))
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 4, 4), (2, 3, 4, 4), (1, 3, 4, 4)]


def test_unreadable_images_are_skipped_and_empty_batches_left_out(tmp_path: Path) -> None:
    part = part_of(tmp_path, 6, bad=(0, 2, 3))
    loader = TrainingImages(part, None, 2, sampler=SequentialSampler(part))
    assert orders(loader) == [[1], [4, 5]]
    assert loader.skipped == dict.fromkeys(["00.png", "02.png", "03.png"], "the file is empty")
    strict = TrainingImages(part, None, 2, sampler=SequentialSampler(part), on_error="stop")
    with pytest.raises(UserError, match=r"Cannot read 00\.png"):
        list(strict)


def test_processes_take_equally_many_steps(tmp_path: Path) -> None:
    part = part_of(tmp_path, 8, bad=(4, 6))  # the second batch of the first process
    for rank, wanted in ((0, [[0, 2], [0, 2]]), (1, [[1, 3], [5, 7]])):
        sampler = DistributedSampler(range(8), 2, rank, shuffle=False)
        assert orders(TrainingImages(part, None, 2, sampler=sampler)) == wanted


def test_reading_with_more_threads_gives_the_same_batches(tmp_path: Path) -> None:
    part = part_of(tmp_path, 9)
    found = []
    for workers in (0, 1, 3):
        torch.manual_seed(5)
        found.append(orders(TrainingImages(part, None, 2, workers=workers)))
    assert found[0] == found[1] == found[2]
