"""Warnings name the user's own line, however deep in the package they come from."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lax_toys import QUICK
from small_models import random_images, small_model
from sufficit import Classifier, evaluate, explain, explain_all, train_lax, train_twin
from sufficit.classifier.outputs import OutputWarning
from sufficit.errors import EmptyHeatmapWarning

IMAGES, LABELS = random_images(4), torch.arange(4) % 3
MAPS = random_images(4, seed=2)[:, 0]
BATCHES = [(IMAGES, LABELS)]
train = partial(train_lax, recipe=QUICK, epochs=1, validation_images=4, progress=False)


class Short(nn.Module):
    """A model that is out of memory when it first gets several images."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.failed = small_model(), False

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > 1 and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError
        found: Tensor = self.model(images)
        return found


def softmax() -> Classifier:
    return Classifier(nn.Sequential(*small_model(), nn.Softmax(1)).eval(), layer="4")


def short() -> Classifier:
    return Classifier(Short().eval(), layer="model.4")


def blind() -> Classifier:
    """One class for all images, for which nothing speaks."""
    model = small_model().eval()
    with torch.no_grad():
        model[-1].weight.zero_()
    return Classifier(model, layer="4")


CALLS: list[tuple[Callable[[], Classifier], type[Warning], Callable[[Any], object]]] = [
    (softmax, OutputWarning, lambda found: found(IMAGES)),
    (softmax, OutputWarning, lambda found: found.features(IMAGES)),
    (softmax, OutputWarning, lambda found: explain(found, IMAGES)),
    (softmax, OutputWarning, lambda found: explain(found, IMAGES, method="rise")),
    (softmax, OutputWarning, lambda found: evaluate(found, IMAGES, MAPS)),
    (softmax, OutputWarning, lambda found: train(found, BATCHES)),
    (softmax, OutputWarning, lambda found: train_twin(found, BATCHES, epochs=1, progress=False)),
    (short, RuntimeWarning, lambda found: explain(found, IMAGES)),
    (short, RuntimeWarning, lambda found: explain_all(found, IMAGES, methods=["gradcam"])),
    (short, RuntimeWarning, lambda found: explain(found, IMAGES, LABELS, method="smoothgrad")),
    (short, RuntimeWarning, lambda found: explain(found, IMAGES, LABELS, method="rise")),
    (short, RuntimeWarning, lambda found: evaluate(found, IMAGES, MAPS)),
    (short, RuntimeWarning, lambda found: evaluate(found, IMAGES, MAPS, calls=26)),
    (blind, EmptyHeatmapWarning, lambda found: explain(found, IMAGES)),
    (blind, EmptyHeatmapWarning, lambda found: explain_all(found, IMAGES, methods=["gradcam"])),
    (blind, UserWarning, lambda found: evaluate(found, IMAGES, MAPS, leak_donors=1)),
]


@pytest.mark.parametrize(("make", "kind", "call"), CALLS)
def test_a_warning_names_the_line_of_the_call(make, kind, call) -> None:
    classifier = make()
    with pytest.warns(kind) as caught:
        call(classifier)
    found = [(one.filename, one.lineno) for one in caught if issubclass(one.category, kind)]
    assert found == [(__file__, call.__code__.co_firstlineno)]
