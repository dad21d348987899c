"""The verdict on an adapter: each check fails where it should, and the words say why."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from sufficit.statistics import Estimate
from sufficit.training.recipes import LaxRecipe
from sufficit.training.train_folder import FolderOptions, _epochs
from sufficit.training.validation import Accuracy, Check, Trust, trust

N = 24


@dataclass
class Known:
    """Scores of which only what a verdict reads is known."""

    columns: dict[str, Tensor]
    ratio: tuple[float, float, float] = (1.0, 0.9, 1.1)  # of leakage, with its interval
    leaked: Any = field(default_factory=object)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __getattr__(self, name: str) -> Tensor:
        return self.__dict__["columns"][name]

    def summary(self) -> dict[str, Estimate]:
        found = {"leak_ratio": self.ratio, "leak": (0.2, 0.1, 0.3), "leak_chance": (0.1, 0.0, 0.2)}
        return {name: Estimate(*numbers, N, 0, False) for name, numbers in found.items()}


@dataclass
class KnownSets:
    """Level sets of which only what a verdict reads is known."""

    at_best: Tensor
    size: float
    everything: Tensor


def judged(
    lead: float = 0.5,
    held_out: float = 0.4,
    common: float = 0.3,
    ratio: tuple[float, float, float] = (1.0, 0.9, 1.1),
    parts: float = 1.0,
    spread: float = 0.1,
) -> Trust:
    """The verdict on an adapter with known leads over Grad-CAM: with both fills, at one size."""
    noise = torch.randn(8, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise -= noise.mean(1, keepdim=True)  # so that all means are known
    scores: dict[str, Any] = {}
    for k, (name, msi, other) in enumerate(
        (
            ("gradcam", 0.0, 0.0),
            ("random", -0.5, -0.5),
            ("center", -0.2, -0.2),
            ("everything", -0.3, -0.3),
        )
    ):
        columns = {"msi": msi + spread * noise[k], "msi_held_out": other + spread * noise[k]}
        scores[name] = Known(columns)
    own = {"msi": lead + spread * noise[4], "msi_held_out": held_out + spread * noise[5]}
    own["fragments"] = torch.full((N,), parts).double()
    nothing = torch.zeros(N, dtype=torch.float64)
    sets: dict[str, Any] = {
        "lax": KnownSets(common + spread * noise[6], 0.3, nothing),
        "gradcam": KnownSets(0.1 + spread * noise[7], 0.4, nothing),
    }
    return trust({"lax": Known(own, ratio), **scores}, 0.5, sets)


def answers(found: Trust) -> dict[str, bool | None]:
    return {check.name: check.holds for check in found.checks}


NAMES = ("MSI", "MSI with another fill", "MSI at a common size", "leakage", "fragments")
FINE = dict.fromkeys(NAMES, True)


def test_an_adapter_that_is_better_honest_and_clean_is_trusted() -> None:
    found = judged()
    assert answers(found) == FINE
    assert found.trusted is True
    assert found.verdict == "This adapter can be trusted on images like these."
    lines = found.lines()
    assert lines[1].startswith("[yes] MSI: LAX +0.50, Grad-CAM")
    assert "significantly better than each (24 images, paired tests with Holm's" in lines[1]
    assert "MSI with the fill blur, unknown to training: LAX +0.40, Grad-CAM" in lines[2]
    assert "best common size (30% and 40%): LAX +0.30, Grad-CAM +0.10" in lines[3]
    assert lines[4] == (
        "[yes] Leakage: 1.00 times chance (95 % interval 0.90 .. 1.10), not significant."
    )


def test_leakage_within_the_limit_is_not_called_none() -> None:
    found = judged(ratio=(1.4, 1.2, 1.7))
    assert answers(found) == FINE
    assert found.lines()[4] == (
        "[yes] Leakage: 1.40 times chance (95 % interval 1.20 .. 1.70), above it, within the limit"
        " of 1.5."
    )


@pytest.mark.parametrize(
    ("change", "name", "holds", "words"),
    [
        ({"lead": -0.1}, "MSI", False, "LAX is significantly worse than Grad-CAM (24 images"),
        ({"lead": -0.01}, "MSI", False, "LAX is not better than Grad-CAM (24 images"),
        ({"lead": 0.03}, "MSI", None, "difference to Grad-CAM is not significant"),
        (
            {"held_out": -0.3},
            "MSI with another fill",
            False,
            "worse than Grad-CAM and the control cent",
        ),
        ({"common": -0.1}, "MSI at a common size", False, "marking everything (24 images, paired"),
        ({"common": 0.05}, "MSI at a common size", False, "LAX is not better than Grad-CAM"),
        ({"common": 0.05}, "MSI at a common size", False, "Do not use it."),
        ({"ratio": (2.0, 1.5, 2.6)}, "leakage", False, "Leakage: the masks leak"),
        ({"ratio": (1.2, 0.4, 4.0)}, "leakage", None, "24 images are too few to tell"),
    ],
)
def test_what_the_maps_say_decides(
    change: dict[str, Any], name: str, holds: bool | None, words: str
) -> None:
    found = judged(**change)
    assert answers(found)[name] is holds
    assert words in next(check.words for check in found.checks if check.name == name)
    assert found.trusted is holds
    start = "Do not trust this adapter: it fails in" if holds is False else "Not sure: too few"
    assert found.verdict.startswith(start)
    assert name in found.verdict


@pytest.mark.parametrize("parts", [0, 7])
def test_artefacts_are_named_and_do_not_make_maps_wrong(parts: int) -> None:
    found = judged(parts=parts)
    assert answers(found) == FINE | {"fragments": False}
    assert found.trusted is True
    assert found.verdict == (
        "This adapter can be trusted on images like these."
        " Its maps show artefacts, though: fragments."
    )


def test_a_failure_outweighs_what_is_not_known() -> None:
    checks = (Check("MSI", None, ""), Check("leakage", False, ""), Check("fragments", None, ""))
    assert Trust(checks).trusted is False
    assert Trust(checks[::2]).trusted is None


@pytest.mark.parametrize(
    ("wrong", "poor"),
    [(0, False), (1, False), (2, True), (8, True)],  # of 8 coins 7 or more: 9/256, 6: 37/256
)
def test_a_model_that_is_not_better_than_chance_is_poor(wrong: int, poor: bool) -> None:
    labels = torch.tensor([0, 1] * 4)
    predicted = torch.where(torch.arange(8) < wrong, 1 - labels, labels)
    found = Accuracy.of(predicted, labels)
    assert (found.right, found.n, found.chance, found.poor) == (8 - wrong, 8, 0.5, poor)
    assert ("not significantly more than by chance (50% of them)" in found.words) == poor


def test_a_model_that_names_one_class_is_as_good_as_its_share() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10)
    found = Accuracy.of(torch.zeros(100, dtype=torch.long), labels)
    assert (found.right, found.chance, found.poor) == (90, 0.9, True)
    assert not Accuracy.of(labels[:2], labels[:2]).poor, "all right, however few"


def test_few_images_get_more_epochs_unless_epochs_are_given() -> None:
    recipe = LaxRecipe(size=1, epochs=10)
    options = FolderOptions(recipe=recipe)
    found = [_epochs(options, batches) for batches in (1, 15, 141, 150, 151, 5000)]
    assert found == [1500, 100, 11, 10, 10, 10]
    assert _epochs(FolderOptions(recipe=recipe, epochs=3), 15) == 3
