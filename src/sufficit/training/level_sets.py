"""The level sets of an order: what the model says of each, and the size at which to cut all."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.evaluation import batch_of
from sufficit.perturbation.bands import EVERYTHING, all_but_top, top
from sufficit.perturbation.heatmaps import resize
from sufficit.perturbation.masked_model import MaskedModel, whole_images
from sufficit.sources.asked import SIZES

EMPTY = top(0.0)
KEPT = [top(size) for size in SIZES]
REST = [all_but_top(size) for size in SIZES]


@dataclass(frozen=True)
class LevelSets:
    """Whether the model names the class of each image's level sets, at the sizes SIZES."""

    kept: Tensor  # bool [N,24] from the region alone
    rest: Tensor  # bool [N,24] from the rest alone
    empty: Tensor  # bool [N] from nothing
    whole: Tensor  # bool [N] from the whole image

    @property
    def msi(self) -> Tensor:
        """MSI of each level set as a mask of zeros and ones: [N,24]."""
        kept, rest, empty = self.kept.double(), self.rest.double(), self.empty.double()[:, None]
        sizes = torch.tensor(SIZES, dtype=torch.float64, device="cpu")
        return 0.5 * (kept - rest) + 0.5 * (kept - empty) - sizes

    @property
    def everything(self) -> Tensor:
        """MSI of marking the whole image: [N]."""
        return self.whole.double() - self.empty.double() - 1

    @property
    def best(self) -> int:
        """The number of the one size with the highest mean MSI."""
        return int(self.msi.mean(0).argmax())

    @property
    def size(self) -> float:
        """The one size with the highest mean MSI."""
        return self.size_of(self.best)

    def size_of(self, number: int) -> float:
        """A size by its number."""
        return SIZES[number]

    def number_of(self, size: float) -> int:
        """The number of the nearest size."""
        return min(range(len(SIZES)), key=lambda number: abs(SIZES[number] - size))

    @property
    def at_best(self) -> Tensor:
        """MSI of each image at that size: [N]."""
        return self.msi[:, self.best]

    @property
    def insertion(self) -> Tensor:
        """The area under `kept` over the size, from nothing to the whole image: [N]."""
        ends = [self.empty[:, None], self.kept, self.whole[:, None]]
        sizes = torch.tensor([0.0, *SIZES, 1.0], dtype=torch.float64, device="cpu")
        return torch.trapezoid(torch.cat(ends, 1).double(), sizes, dim=1)


def level_sets(
    classifier: Classifier, images: Tensor, targets: Tensor, orders: Tensor, fill: str = "black"
) -> LevelSets:
    """Put the level sets of orders [N,h,w] to the model, with a fill around them."""
    batch = batch_of(classifier, images, targets)
    asked = MaskedModel(classifier, fill)
    large = resize(orders.detach().float().cpu(), batch.size)
    answers = asked.ask(batch, large, [EMPTY, *KEPT, *REST])
    whole = whole_images(classifier, batch)
    return LevelSets(
        kept=answers.of(KEPT, "accuracy") == 1,
        rest=answers.of(REST, "accuracy") == 1,
        empty=answers.of([EMPTY], "accuracy")[:, 0] == 1,
        whole=whole.of([EVERYTHING], "accuracy")[:, 0] == 1,
    )
