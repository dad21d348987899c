"""`explain` with a fit: regions that are enough for the model, each with its certificate."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier, check_images, check_targets
from sufficit.data.batch import Batch
from sufficit.errors import UserError
from sufficit.evaluation import batch_of
from sufficit.explainers import Method, explain_all
from sufficit.explainers.registry import word_of
from sufficit.progress import counting_bar
from sufficit.sources import Cut, Fitted, Given, source_of
from sufficit.sources.asked import Asked, Coming, in_step
from sufficit.sources.certificate import (
    Around,
    Certificate,
    Said,
    Size,
    certificate_row,
    certificates_of,
    certifying,
)
from sufficit.sources.fitted import FIT_FILLS

if TYPE_CHECKING:
    import pandas

LEAST_IN_HALVES = 32  # images; halves of fewer would leave a GPU idle

__all__ = ["Around", "Certificate", "Regions", "Said", "Size", "explain"]


@dataclass(frozen=True)
class Regions:
    """Regions of some images: heatmaps that mark them at 0.5, and a certificate for each."""

    heatmaps: Tensor  # [N,H,W]
    certificates: list[Certificate]

    def __len__(self) -> int:
        return len(self.certificates)

    def __getitem__(self, number: int) -> Certificate:
        return self.certificates[number]

    def frame(self) -> "pandas.DataFrame":
        """Return one row per image: share, enough, and what the model says with each fill."""
        import pandas

        return pandas.DataFrame([certificate_row(proof) for proof in self.certificates])


@overload
def explain(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    method: Method = "gradcam",
    *,
    fit: Literal[False] = False,
    size: float | None = None,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Tensor: ...


@overload
def explain(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    method: Method = "gradcam",
    *,
    fit: Literal[True],
    fills: Sequence[str] = FIT_FILLS,
    enough: float = 0.9,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Regions: ...


def explain(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    method: Given = "gradcam",
    *,
    fit: bool = False,
    size: float | None = None,
    fills: Sequence[str] = FIT_FILLS,
    enough: float = 0.9,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Tensor | Regions:
    """Return heatmaps of images in 0..1: [N,C,H,W] -> [N,H,W] in 0..1, on the classifier's device.

    - `classifier`: the model that is explained; it is left as it was.
    - `images`: floats in 0..1, [N,C,H,W].
    - `targets`: the class to explain of each image, [N]. Without them, the model's predictions.
    - `method`: a word as on the command line ("gradcam", "finer-cam:nearest=5"), a name with
      options, ("finer-cam", {"nearest": 5}), an Explainer, a trained Lax, or a function of your
      own, (classifier, images, targets) -> [N,H,W].
    - `fit`: cut each map where the model agrees, and return Regions: heatmaps that mark a region at
      0.5, and a certificate per image of what the model says of it.
    - `size`: cut each map at this share of the image instead, above 0 to 1: the heatmaps mark the
      pixels of the highest ranks at 0.5, a region that lies in that of every larger size.
    - `fills`: of the fit: what surrounds the region while the model is asked.
    - `enough`: of the fit: the share of the whole image's score that a region must keep where the
      model does not give the target for the whole image.
    - `layer`: the feature layer, named as in model.named_modules().
    - `batch_size`: images per forward pass; chosen for the device if left out.
    - `seed`: for methods that draw random numbers.
    - `progress`: a bar; by default when the work takes long in a terminal.

    >>> import torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 2, 1, bias=False), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> _ = model[0].weight.data.copy_(torch.tensor([1.0, -1.0])[:, None, None, None])
    >>> images = torch.tensor([[[[0.0, 0.5], [0.25, 1.0]]]])
    >>> explain(Classifier(model, layer="0"), images, torch.tensor([0]))[0]
    tensor([[0.0000, 0.5000],
            [0.2500, 1.0000]])
    """
    if size is not None:
        if fit:
            raise UserError(f"a fit chooses the size of each region: leave out size={size}, or fit")
        return _cut(classifier, images, targets, method, size, layer=layer, seed=seed)
    if not fit:
        drawer = word_of(*method) if isinstance(method, tuple) else method
        name = drawer if isinstance(drawer, str) else getattr(drawer, "__name__", "own method")
        drawn = explain_all(
            classifier,
            images,
            targets,
            {name: drawer},  # type: ignore[dict-item]  # refused there if it draws nothing
            layer=layer,
            batch_size=batch_size,
            seed=seed,
            progress=progress,
        )
        return drawn[name]
    check_classifier(classifier)
    check_images(images)
    goals = check_targets(targets, len(images))
    # Checked before any pass: an adapter of another model, a method that finds no attention.
    inner = source_of("method", method, layer=layer, seed=seed)
    inner.check(classifier, [])
    source = Fitted(inner, fills=tuple(fills), enough=enough, name="fit", batch_size=batch_size)
    # What is usual, for an honest forecast; at most there are three times as many.
    with counting_bar("fitting", source.usual_passes * len(images), progress):
        batch = batch_of(classifier, images.to(classifier.device), goals)
        halves = _halves(batch, source, classifier.device)
        parts = in_step([_proving(classifier, source, half) for half in halves])
    heatmaps = torch.cat([part.heatmaps for part in parts])
    return Regions(heatmaps, [proof for part in parts for proof in part.certificates])


def _halves(batch: Batch, source: Fitted, device: torch.device) -> list[Batch]:
    """Return a batch in two halves where a GPU can answer one while Python judges the other.

    A method of the user's gets all images at once, as it does without a fit.
    """
    is_ours = getattr(source.source, "is_trusted", False)
    if device.type != "cuda" or not is_ours or len(batch) < LEAST_IN_HALVES:
        return [batch]
    middle = len(batch) // 2
    return [batch.rows(range(middle)), batch.rows(range(middle, len(batch)))]


def _proving(
    classifier: Classifier, source: Fitted, batch: Batch
) -> Generator[Coming, Asked, Regions]:
    """Fit the maps of a batch and ask for their certificates."""
    maps = yield from source.fitting(classifier, batch)
    full = yield from certifying(classifier, batch, maps, batch_size=source.batch_size)
    proofs = certificates_of(classifier, batch.targets, full, enough=source.enough)
    return Regions(maps.at(batch.size).float(), proofs)


# Its parameters are those of `explain` that a cut needs.
def _cut(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None,
    method: Given,
    size: float,
    *,
    layer: str | None,
    seed: int,
) -> Tensor:
    """Return maps that mark a share of the pixels, by the order before ReLU where there is one."""
    check_classifier(classifier)
    check_images(images)
    source = Cut(source_of("method", method, layer=layer, seed=seed), size)
    source.check(classifier, [])
    batch = batch_of(classifier, images.to(classifier.device), check_targets(targets, len(images)))
    return source.maps(classifier, batch).at(batch.size).float()
