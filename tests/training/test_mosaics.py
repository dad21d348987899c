"""Mosaics of a batch, what is wanted of a class's map in them, and the evidence for a class."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from sufficit import Classifier
from sufficit.explainers.adapter_nets import LearnedEvidence, TopDown
from sufficit.training import losses
from sufficit.training import step as step_module
from sufficit.training.mosaics import Mosaics, crops, mosaics
from sufficit.training.recipes import LaxRecipe
from sufficit.training.step import recipe_loss, take_step
from sufficit.training.training_batch import TrainingBatch


def generator(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def plain_batch(targets: list[int], first: list[int], side: int = 12) -> TrainingBatch:
    """Image i is (i + 1) / 100 everywhere, so that a mosaic tells which images it shows."""
    values = (torch.arange(len(targets)) + 1.0)[:, None, None, None] / 100
    ranked = torch.tensor([first, first]).T
    images = values.expand(-1, 3, side, side)
    return TrainingBatch(images, torch.tensor(targets), (), ranked)


def shown(made: Mosaics, row: int) -> Tensor:
    """The number of the image that each pixel of a mosaic shows: [H,W]."""
    return (made.images[row, 0] * 100).round().long() - 1


# The classes that are asked for, by label and prediction


def test_a_mosaic_wants_the_masks_of_the_tiles_of_its_class_and_nothing_elsewhere() -> None:
    n, classes = 96, torch.arange(96) % 3
    batch = plain_batch(classes.tolist(), classes.tolist())
    heights = (torch.arange(n) + 1.0) / 98  # a flat mask per image
    masks = heights[:, None, None].expand(-1, 12, 12)
    made = mosaics(batch, classes, masks, generator())
    assert made is not None
    assert len(made.images) == n // 8
    kinds, several = set(), False
    for row in range(len(made.images)):
        numbers = shown(made, row)
        corners = [int(numbers[y, x]) for y, x in ((0, 0), (0, -1), (-1, 0), (-1, -1))]
        kinds.add((corners[0] != corners[1], corners[0] != corners[2]))
        assert len(numbers.unique()) == len({*corners})
        same = classes[numbers] == made.asked[row]
        assert same.any()
        several |= len(numbers[same].unique()) > 1
        torch.testing.assert_close(made.wanted[row, 0], heights[numbers] * same)
        assert (made.counted[row] == 1).all()
    assert kinds == {(True, False), (False, True), (True, True)}
    assert several  # a tile of the same class is not counted as wrong


def test_no_image_is_in_two_mosaics_and_each_tile_is_asked_for_at_times() -> None:
    classes = torch.arange(64)
    batch = plain_batch(classes.tolist(), classes.tolist())
    places = []
    for seed in range(30):
        made = mosaics(batch, classes, torch.zeros(64, 12, 12), generator(seed))
        assert made is not None
        numbers = [shown(made, row).unique().tolist() for row in range(8)]
        every = [number for row in numbers for number in row]
        assert len(every) == len({*every}) == 3 * 2 + 3 * 2 + 2 * 4
        for row in (6, 7):  # two by two
            lit = shown(made, row) == made.asked[row]
            places.append((bool(lit[:6].any()), bool(lit[:, :6].any())))
    counts = [places.count(place) for place in {*places}]
    assert len(counts) == 4
    assert min(counts) >= 5


def test_tiles_that_only_label_or_prediction_put_in_the_class_do_not_count() -> None:
    # The mask is asked for the label; half of the images of class 0 are predicted to be of 1.
    labels, predicted = [k % 3 for k in range(96)], [k % 3 if k % 6 else 1 for k in range(96)]
    batch, left_out = plain_batch(labels, predicted), 0
    for seed in range(4):
        masks = torch.ones(96, 12, 12)
        made = mosaics(batch, torch.tensor(labels), masks, generator(seed))
        assert made is not None
        for row in range(len(made.images)):
            wish = int(made.asked[row])
            for number in shown(made, row).unique().tolist():
                tile = shown(made, row) == number
                unsure = labels[number] != wish and predicted[number] == wish
                left_out += unsure
                assert (made.counted[row, 0][tile] == (0 if unsure else 1)).all()
                wanted = made.wanted[row, 0][tile].round(decimals=5).unique().tolist()
                assert wanted == [1 if labels[number] == wish else 0]
    assert left_out > 0


@pytest.mark.parametrize(("n", "count"), [(1, 0), (2, 1), (8, 1), (9, 2), (17, 3), (64, 8)])
def test_eight_images_make_one_mosaic_and_two_are_enough(n: int, count: int) -> None:
    batch = plain_batch([0] * n, [0] * n, side=5)  # odd: tiles are cut at the border
    made = mosaics(batch, batch.targets, torch.zeros(n, 5, 5), generator())
    assert (0 if made is None else len(made.images)) == count
    if made is not None:
        assert made.images.shape[2:] == made.wanted.shape[2:] == (5, 5)


# What a tile shows


def test_a_tile_shows_the_part_around_the_mask_with_its_mask() -> None:
    n, side = 200, 32
    masks = torch.zeros(n, 1, side, side)
    places = torch.randint(3, 29, (n, 2), generator=generator(1))
    for i, (y, x) in enumerate(places.tolist()):
        masks[i, 0, y - 3 : y + 4, x - 3 : x + 4] = 1
    tiles, heat = crops(masks, masks[:, 0], (16, 32), generator(2))
    assert tiles.shape == heat.shape == (n, 1, 16, 32)
    torch.testing.assert_close(tiles, heat)  # both are cut in the same way
    # The square is never cut off: it is 7 rows high, or 3.5 where the whole image is shown.
    heights = heat.sum((1, 2)).amax(1)
    assert 3 < heights.min() < 4.2
    assert 6.2 < heights.max() < 7.2
    # Across, a tile of the full width shows all of it, where it is.
    line = heat.sum((1, 2))
    middle = (line * torch.arange(side)).sum(1) / line.sum(1)
    torch.testing.assert_close(middle, places[:, 1].float(), atol=1e-3, rtol=0)


def test_a_tile_of_the_images_size_is_the_image() -> None:
    images, masks = torch.rand(3, 2, 6, 5, generator=generator()), torch.zeros(3, 6, 5)
    tiles, heat = crops(images, masks, (6, 5), generator())
    torch.testing.assert_close(tiles, images)
    assert heat.count_nonzero() == 0


# The term


def test_the_distance_of_maps_is_the_cross_entropy_of_the_cells_that_count() -> None:
    maps = torch.tensor([[[[0.2, 0.9]]], [[[0.5, 0.4]]]])
    wanted = torch.tensor([[[[0.0, 1.0]]], [[[0.3, 1.0]]]])
    counted = torch.tensor([[[[1.0, 1.0]]], [[[1.0, 0.0]]]])
    cells = [-math.log(0.8), -math.log(0.9), math.log(2)]
    assert losses.apart(maps, wanted, counted).item() == pytest.approx(sum(cells) / 3)
    certain = torch.tensor([[[[1.0, 0.0]]]])
    worst = losses.apart(certain, 1 - certain, torch.ones_like(certain))
    assert worst.item() == pytest.approx(-math.log(1e-4), rel=1e-3)  # and not infinite


class Brightness(nn.Module):
    """One feature per channel, the pixel itself; the logits are the channels' means."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """The means."""
        return self.last(images).mean((2, 3))


def test_a_step_adds_the_distance_of_the_maps_of_mosaics(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = Classifier(Brightness(), layer="last")
    classes = torch.arange(8) % 3
    images = torch.rand(8, 3, 6, 6, generator=generator())
    first = torch.stack([classes, (classes + 1) % 3], 1)
    batch = TrainingBatch(images, classes, (images,), first, ("last",))
    pictures = torch.rand(2, 3, 6, 6, generator=generator(1))
    wanted = torch.rand(2, 1, 6, 6, generator=generator(2))
    counted = (torch.arange(36).view(6, 6) % 3 > 0).float().expand(2, 1, 6, 6)
    made = Mosaics(pictures, torch.tensor([2, 0]), wanted, counted)
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(step_module, "mosaics", lambda *parts: given.append(parts) or made)

    def lax(features: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The channel of the class, as it is in the features, which are the images."""
        return features[0].gather(1, targets[:, None, None, None].expand(-1, 1, 6, 6))[:, 0]

    recipe = LaxRecipe(absent=1.0, mosaics=3.0, stages=3)
    step = take_step(classifier, lax, batch, recipe, generator(1), classes=3)
    total = count = 0.0
    for row, channel in ((0, 2), (1, 0)):
        for y in range(6):
            for x in range(6):
                p, t = pictures[row, channel, y, x].item(), wanted[row, 0, y, x].item()
                if (6 * y + x) % 3 > 0:
                    total, count = total - t * math.log(p) - (1 - t) * math.log(1 - p), count + 1
    assert step.terms["mosaics"].item() == pytest.approx(3 * total / count, rel=1e-5)
    others = sum(v.item() for name, v in step.terms.items() if name != "mosaics")
    assert step.loss.item() == pytest.approx(others + 3 * total / count, rel=1e-5)
    assert torch.equal(given[0][1], classes)  # type: ignore[arg-type]  # labels are the predictions
    assert torch.equal(given[0][2], lax((images,), classes))  # type: ignore[arg-type]  # the masks
    # The adapter reads the classifier, whoever judges.
    judge = Classifier(nn.Sequential(Brightness(), nn.Linear(3, 3)), layer="0.last")
    judged = take_step(
        classifier,
        lax,
        batch,
        recipe,
        generator(1),
        classes=3,
        loss=lambda step: recipe_loss(replace(step, judge=judge), recipe),
    )
    assert judged.terms["mosaics"].item() == pytest.approx(3 * total / count, rel=1e-5)
    assert judged.terms["keep"].item() != pytest.approx(step.terms["keep"].item(), rel=1e-3)
    free = take_step(classifier, lambda f, _: f[0][:, 0], batch, recipe, generator(1))
    assert "mosaics" not in free.terms  # without a class there is nothing to ask for


# Evidence


def test_evidence_is_the_class_activation_map_of_a_linear_classifier() -> None:
    evidence = LearnedEvidence(5, 4, 3)
    features, head = torch.randn(6, 5, 2, 3, generator=generator()), torch.randn(4, 5)
    evidence.start(features, head)
    targets = torch.tensor([0, 3, 1, 2, 2, 0])
    with torch.no_grad():
        cells, channels = evidence(features, targets)
    found = cells * channels
    weights = evidence.spread.weight[:, 0, 0, 0]
    maps = torch.zeros(6, 4, 2, 3)
    for n in range(6):
        for c in range(4):
            row = head[c] - head.mean(0)
            for y in range(2):
                for x in range(3):
                    maps[n, c, y, x] = row @ (features[n, :, y, x] - features.mean((0, 2, 3)))
    maps = maps / maps.std()
    for n, c in enumerate(targets.tolist()):
        wanted = weights[:, None, None] * maps[n, c]
        torch.testing.assert_close(found[n], wanted, atol=1e-5, rtol=1e-4)


def test_a_net_with_evidence_adds_it_to_the_coarsest_stage() -> None:
    torch.manual_seed(0)
    plain, net = TopDown([4, 5], classes=3), TopDown([4, 5], classes=3, evidence=True)
    assert plain.evidence is None
    net.load_state_dict(plain.state_dict(), strict=False)
    stages = [torch.rand(2, 4, 4, 4), torch.rand(2, 5, 2, 2)]
    targets = torch.tensor([2, 0])
    assert net.evidence is not None
    with torch.no_grad():
        with_it = net(stages, targets)
        net.evidence.spread.weight.zero_()
        without = net(stages, targets)
    torch.testing.assert_close(without, plain(stages, targets).detach())
    assert (with_it - without).abs().max() > 1e-3
