"""The adapters that ship for public ImageNet networks: what is in them, and whose they are."""

import json
from pathlib import Path

import pytest
import torch
from torchvision import models

import sufficit
from sufficit import Classifier, Lax, UserError
from sufficit.explainers.lax import NAMED, SHIPPED

NAMES = [name for name in SHIPPED if name.startswith(NAMED)]


def test_mobilenet_v2_ships() -> None:
    assert "lax:mobilenet_v2" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_card_says_data_numbers_verdict_and_licence(name: str) -> None:
    folder = SHIPPED[name]
    card = (folder / "README.md").read_text()
    parts = ("Classifier: torchvision:", "Trained on: ", "Verdict: ", "Licence: ", "MSI at that")
    for word in parts:
        assert word in card
    assert "ImageNet" in card
    assert "research" in card
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
    about = json.loads((folder / "config.json").read_text())["trained"]["about"]
    assert {*about} == {"model", "data", "verdict", "licence"}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_in_half_precision_and_finite(name: str) -> None:
    lax = Lax.from_pretrained(name)
    values = [value for value in lax.state_dict().values() if value.is_floating_point()]
    assert all(value.isfinite().all() for value in values)
    assert all(torch.equal(value, value.half().to(value)) for value in values)


def test_it_refuses_other_weights_with_the_command_that_trains_one() -> None:
    lax = Lax.from_pretrained("lax:mobilenet_v2")
    other = Classifier(models.mobilenet_v2(), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    with pytest.raises(UserError, match="another classifier.*sufficit train-lax --model"):
        lax.check(other)


def test_the_licence_goes_with_it() -> None:
    notice = Path(sufficit.__file__).parent / "assets" / "lax" / "NOTICE.md"
    assert "ImageNet" in notice.read_text()
