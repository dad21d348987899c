"""Plain training of a classifier: what it sees, that it learns, that it goes on when stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sufficit import Classifier
from sufficit.data.splits import Split, seen
from sufficit.errors import UserError
from sufficit.training.classifier_training import (
    ClassifierRecipe,
    accuracy,
    augmented,
    augmented_loader,
    train_classifier,
)
from sufficit.training.feed import Shuffled, loader_for
from sufficit.training.processes import fabric_for

RECIPE = ClassifierRecipe(epochs=6, batch_size=16, lr=0.1, weight_decay=0)
NORMAL = {"mean": (0.5,) * 3, "std": (0.25,) * 3}


def colours(n: int = 64, side: int = 8) -> Split:
    """Red, green or blue pictures in noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 3
    images = 60 * torch.rand(n, 3, side, side, generator=generator)
    images[torch.arange(n), labels] += 120
    return Split(images.byte(), labels, side)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def train(out: Path, recipe: ClassifierRecipe = RECIPE, seed: int = 0, progress=False) -> nn.Module:
    model = net()
    fabric = fabric_for(torch.device("cpu"))
    split = colours()
    train_classifier(
        model, split, recipe, **NORMAL, fabric=fabric, out=out, seed=seed, progress=progress
    )
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_it_learns_colours(tmp_path: Path, optimizer: str) -> None:
    recipe = replace(RECIPE, optimizer=optimizer, lr=0.1 if optimizer == "sgd" else 0.02)
    model = train(tmp_path, recipe)
    assert not model.training
    held = Split(colours(99).images[64:], colours(99).labels[64:], 8)
    assert accuracy(Classifier(model, **NORMAL), held, batch_size=10) == 1


@pytest.mark.parametrize("batches", [1, 6, 9, 22])
def test_a_stopped_training_ends_with_the_same_weights(tmp_path: Path, batches: int) -> None:
    class StoppedError(Exception):
        pass

    def tell(done: float, _: float) -> None:
        if done == batches:
            raise StoppedError

    whole = train(tmp_path / "whole")
    with pytest.raises(StoppedError):
        train(tmp_path / "out", progress=tell)
    again = train(tmp_path / "out")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_finished_training_is_not_done_again(tmp_path: Path) -> None:
    first = train(tmp_path)
    asked: list[float] = []
    again = train(tmp_path, progress=lambda done, _: asked.append(done))
    assert not asked
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, train(tmp_path / "b", seed=1)[0].weight)


def test_another_trainings_checkpoint_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(UserError, match=r"Cannot resume .*: `seed` was 0, now 1"):
        train(tmp_path, seed=1)
    (tmp_path / "checkpoint.pt").write_text("broken")
    with pytest.raises(UserError, match="Cannot read"):
        train(tmp_path)


def test_every_epoch_has_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def spy(images: torch.Tensor, side: int) -> torch.Tensor:
        given.extend(images[:, :, 0, 0].float().mean(1).tolist())
        return seen(images, side)

    monkeypatch.setattr("sufficit.training.classifier_training.seen", spy)
    train(tmp_path, replace(RECIPE, epochs=2, augment=False))
    first, second = given[:64], given[64:]
    assert first != second
    assert sorted(first) == sorted(second), "the same pictures"


def test_the_rate_rises_and_falls() -> None:
    rates = [RECIPE.rate(done) for done in (0, 0.1, 0.2, 0.6, 1)]
    assert rates == pytest.approx([0.004, 0.052, 0.1, 0.05, 0])


def plain_crops(image: torch.Tensor, side: int, pad: int) -> set[tuple]:
    """Every crop of a picture and of its mirror image."""
    padded = nn.functional.pad(image, (pad,) * 4)
    found = set()
    for one in (padded, padded.flip(2)):
        for top in range(padded.shape[1] - side + 1):
            for left in range(padded.shape[2] - side + 1):
                crop = one[:, top : top + side, left : left + side]
                found.add(tuple(crop.flatten().tolist()))
    return found


@pytest.mark.parametrize(("stored", "side", "pad"), [(8, 8, 1), (10, 8, 0), (8, 32, 1)])
def test_pictures_are_flipped_and_cropped_anywhere(stored: int, side: int, pad: int) -> None:
    torch.manual_seed(0)
    image = torch.randint(0, 256, (3, stored, stored), dtype=torch.uint8)
    found = augmented(image[None].expand(400, -1, -1, -1), side)
    kept = min(stored, side)
    assert found.shape == (400, 3, kept, kept)
    seen = {tuple(one.flatten().tolist()) for one in found}
    assert seen == plain_crops(image, kept, pad), "each of them, and no other"


def test_a_loader_gives_every_picture_once_with_its_label() -> None:
    split = colours(10)
    batches = list(Shuffled(split.part, 10, torch.device("cpu"), 4))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    given = sorted(
        (int(255 * x[0, 0, 0] + 0.5), int(y))
        for xs, ys in batches
        for x, y in zip(xs, ys, strict=True)
    )
    known = sorted(
        (int(x[0, 0, 0]), int(y)) for x, y in zip(split.images, split.labels, strict=True)
    )
    assert given == known
    some = Shuffled(split.part, 10, torch.device("cpu"), 4, limit=6)
    assert sum(len(y) for _, y in some) == 6
    assert len(some) == 2


def test_an_augmented_loader_gives_crops_of_its_pictures_with_their_labels() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8)
    batches = list(augmented_loader(Split(images, torch.arange(4), 6), 3))
    assert [len(labels) for _, labels in batches] == [3, 1]
    assert sorted(int(y) for _, ys in batches for y in ys) == [0, 1, 2, 3]
    for xs, ys in batches:
        for x, y in zip((255 * xs).round().byte(), ys.tolist(), strict=True):
            assert tuple(x.flatten().tolist()) in plain_crops(images[y], 6, 1)


def test_features_are_computed_once_and_are_the_pictures_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = colours(10)
    classifier = Classifier(net().eval(), "2", **NORMAL)
    loader = loader_for(classifier, split, 4)
    for batch in loader:
        with torch.no_grad():
            wanted, _ = classifier.features(batch.images)
        torch.testing.assert_close(batch.features[-1], wanted)
    monkeypatch.setattr("sufficit.training.feed.MEMORY", 100)
    plain = loader_for(classifier, split, 4)
    assert [type(batch) for batch in plain] == [tuple] * 3, "too large for the memory"
