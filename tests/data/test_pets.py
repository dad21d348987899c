"""The photographs, network and adapter that ship: small, licensed, and as their rules say."""

import json
from pathlib import Path

import pytest
import ship_pets
import torch
from PIL import Image
from torch import nn

from sufficit import Classifier, UserError
from sufficit.classifier.pets_net import folded
from sufficit.data.pets import BREEDS, FOLDER, MASKS, PHOTOS, pet_photos

JPEGS = sorted(PHOTOS.glob("*/*.jpg"))


def test_there_is_one_photograph_per_breed_with_a_mask_of_the_same_size() -> None:
    assert len(JPEGS) == len({photo.parent.name for photo in JPEGS}) == BREEDS
    for photo in JPEGS:
        assert ship_pets.breed_of(photo) == photo.parent.name
        mask = MASKS / photo.parent.name / f"{photo.stem}.png"
        with Image.open(photo) as image, Image.open(mask) as drawn:
            assert image.size == drawn.size == (224, 224)
            assert image.mode == "RGB"
            assert 0.02 < drawn.convert("L").histogram()[255] / 224**2 < 0.98
    assert len([*MASKS.glob("*/*.png")]) == BREEDS


def test_all_that_ships_for_pets_is_small_and_names_its_sources() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 8_000_000
    sources = (FOLDER / "SOURCES.md").read_text()
    for words in ("Oxford-IIIT", "CC BY-SA 4.0", "ImageNet", "BSD-3-Clause", "SHA-256"):
        assert words in sources
    assert (
        "creativecommons.org/licenses/by-sa/4.0"
        in (FOLDER / "LICENSES" / "CC-BY-SA-4.0-photographs.txt").read_text()
    )


def test_photographs_come_in_the_order_of_their_hashes_with_their_labels() -> None:
    pets, classifier = pet_photos(), Classifier.load("sufficit:pets")
    assert pets.names[:3] == ("basset_hound_49.jpg", "Sphynx_158.jpg", "Abyssinian_29.jpg")
    assert classifier.classes is not None
    for name, label in zip(pets.names, pets.labels.tolist(), strict=True):
        breed = ship_pets.breed_of(Path(name)).replace("_", " ").title()
        assert classifier.classes[label] == breed
    few = pet_photos(3)
    assert torch.equal(few.images, pets.images[:3])
    assert torch.equal(few.masks, pets.masks[:3])


def test_a_photograph_and_its_mask_are_the_files() -> None:
    pets = pet_photos(1, side=224)
    with Image.open(PHOTOS / "basset_hound" / "basset_hound_49.jpg") as photo:
        pixel = photo.getpixel((150, 100))
    assert (pets.images[0, :, 100, 150] * 255).round().int().tolist() == list(pixel)
    with Image.open(MASKS / "basset_hound" / "basset_hound_49.png") as mask:
        white = mask.convert("L").histogram()[255]
    assert int(pets.masks.sum()) == white


@pytest.mark.parametrize("n", [0, 38])
def test_there_are_no_more_photographs(n: int) -> None:
    with pytest.raises(UserError, match="1 to 37 photographs"):
        pet_photos(n)


def test_the_network_knows_the_breeds() -> None:
    pets, classifier = pet_photos(), Classifier.load("sufficit:pets")
    with torch.no_grad():
        right = classifier(pets.images).argmax(1) == pets.labels
    assert int(right.sum()) == 35
    known = json.loads((FOLDER / "pets-net.json").read_text())
    assert known["accuracy"]["test"] > 0.9


def test_the_network_is_saved_and_loaded_again(tmp_path: Path) -> None:
    images, classifier = pet_photos(2).images, Classifier.load("sufficit:pets")
    found = Classifier.load(classifier.save(tmp_path / "pets"))
    with torch.no_grad():
        assert torch.equal(found(images), classifier(images))
    other = Classifier.load("sufficit:pets", weights=None, num_classes=5)
    with torch.no_grad():
        assert other(images).shape == (2, 5)


def test_folded_batch_norms_change_no_output_and_no_name() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(first, nn.Sequential(nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))).eval()
    for norm in (first[1], model[1][1]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    images = torch.rand(2, 3, 8, 8)
    names = [name for name, _ in model.named_modules()]
    with torch.no_grad():
        before = model(images)
        after = folded(model)(images)
    assert torch.allclose(before, after, atol=1e-5)
    assert names == [name for name, _ in model.named_modules()]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
