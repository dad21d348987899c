"""`explain` with a fit: regions that are enough for the model, each with its certificate."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier, check_images, check_targets
from sufficit.data.batch import Batch
from sufficit.errors import UserError, unknown
from sufficit.evaluation import batch_of
from sufficit.explainers import Method, explain_all
from sufficit.explainers.registry import word_of
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.fills import FILLS
from sufficit.perturbation.masked_model import MaskedModel, whole_images
from sufficit.progress import counting_bar
from sufficit.sources import Fitted, Given, source_of
from sufficit.sources.fitted import FILLS as ASKED
from sufficit.sources.fitted import SIZES

if TYPE_CHECKING:
    import pandas

UNSEEN = ("blur", "mean", "noise", "black")  # the first that is not asked is shown as well
PARTS = ("region", "rest", "nothing")


@dataclass(frozen=True)
class Said:
    """What the model says of an image: a class, and its confidence in the target."""

    name: str  # of the class, or its number
    is_target: bool
    confidence: float


@dataclass(frozen=True)
class Around:
    """What the model says of the region alone, of the rest, and of nothing, with one fill."""

    fill: str
    asked: bool  # while the region was chosen
    region: Said
    rest: Said
    nothing: Said


@dataclass(frozen=True)
class Certificate:
    """How far the region of one image is enough for the model."""

    target: str
    share: float  # of the image, 0..1
    enough: bool  # whether a part of the image suffices with every fill that was asked
    whole: Said
    fills: tuple[Around, ...]
    passes: int  # forward passes spent

    @property
    def sentence(self) -> str:
        """The certificate in words."""
        if not self.enough:
            return f"No part of this image is enough for {self.target}: the region is all of it."
        asked = [one for one in self.fills if one.asked]
        seen = [f"{one.fill} around it ({one.region.confidence:.2f})" for one in asked]
        left = dict.fromkeys(_without(one, self.target) for one in asked)
        found = f"{self.share:.0%} of this image is enough: the model says {self.target} with"
        found = f"{found} {_listed(seen)}; without it, {_listed([*left])}."
        for one in self.fills:
            if not one.asked and not one.region.is_target:
                found += f" With {one.fill}, which was not asked, it says {one.region.name}."
        return found


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

        rows = []
        for one in self.certificates:
            row: dict[str, object] = {"target": one.target, "share": one.share}
            row |= {"enough": one.enough, "passes": one.passes}
            for around in one.fills:
                for part in PARTS:
                    said = asdict(getattr(around, part))
                    row[f"{around.fill}_{part}"] = said["name"]
                    row[f"{around.fill}_{part}_confidence"] = said["confidence"]
            rows.append(row | {"sentence": one.sentence})
        return pandas.DataFrame(rows)


@overload
def explain(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    method: Method = "gradcam",
    *,
    fit: Literal[False] = False,
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
    fills: Sequence[str] = ASKED,
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
    fills: Sequence[str] = ASKED,
    enough: float = 0.9,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Tensor | Regions:
    """Heatmaps of images in 0..1: [N,C,H,W] -> [N,H,W] in 0..1, on the classifier's device.

    - `classifier`: the model that is explained; it is left as it was.
    - `images`: floats in 0..1, [N,C,H,W].
    - `targets`: the class to explain of each image, [N]. Without them, the model's predictions.
    - `method`: a word as on the command line ("gradcam", "finer-cam:nearest=5"), a name with
      options, ("finer-cam", {"nearest": 5}), an Explainer, a trained Lax, or a function of your
      own, (classifier, images, targets) -> [N,H,W].
    - `fit`: cut each map where the model agrees, and return Regions: heatmaps that mark a region at
      0.5, and a certificate per image of what the model says of it.
    - `fills`: of the fit: what surrounds the region while the model is asked.
    - `enough`: of the fit: the share of the whole image's score that a region must keep where the
      model does not give the target for the whole image.
    - `layer`: the feature layer, named as in model.named_modules().
    - `batch_size`: images per forward pass; chosen for the device if left out.
    - `seed`: for methods that draw random numbers.
    - `progress`: a bar; by default when the work takes long in a terminal.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 2, 1, bias=False), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> _ = model[0].weight.data.copy_(torch.tensor([1.0, -1.0])[:, None, None, None])
    >>> images = torch.tensor([[[[0.0, 0.5], [0.25, 1.0]]]])
    >>> explain(Classifier(model, layer="0"), images, torch.tensor([0]))[0]
    tensor([[0.0000, 0.5000],
            [0.2500, 1.0000]])
    """
    if not fit:
        drawn = word_of(*method) if isinstance(method, tuple) else method
        name = drawn if isinstance(drawn, str) else getattr(drawn, "__name__", "own method")
        found = explain_all(
            classifier,
            images,
            targets,
            {name: drawn},  # type: ignore[dict-item]  # refused there if it draws nothing
            layer=layer,
            batch_size=batch_size,
            seed=seed,
            progress=progress,
        )
        return found[name]
    check_classifier(classifier)
    check_images(images)
    known = check_targets(targets, len(images))
    inner = source_of("method", method, layer=layer, seed=seed)
    inner.check(classifier, [])
    source = Fitted(inner, fills=tuple(fills), enough=enough, name="fit", batch_size=batch_size)
    shown = (*source.fills, _unseen(source.fills))
    passes = len(source.fills) * (2 * len(SIZES) + 1) + len(shown) * len(PARTS)
    with counting_bar("fitting", passes * len(images), progress):
        batch = batch_of(classifier, images.to(classifier.device), known)
        maps = source.maps(classifier, batch)
        heatmaps = maps.at(batch.size)
        arounds = [
            _around(MaskedModel(classifier, fill, batch_size), batch, heatmaps >= 0.5, fill, source)
            for fill in shown
        ]
    whole = _said(classifier, batch, *_of_whole(classifier, batch))
    spent = maps.columns["calls@fit"].long() + len(shown) * len(PARTS)
    certificates = [
        Certificate(
            target=_class(classifier, int(batch.targets[row])),
            share=float(maps.columns["fit_share"][row]),
            enough=bool(maps.columns["fit_enough"][row]),
            whole=whole[row],
            fills=tuple(around[row] for around in arounds),
            passes=int(spent[row]),
        )
        for row in range(len(batch))
    ]
    return Regions(heatmaps.float(), certificates)


def _unseen(asked: Sequence[str]) -> str:
    """The first fill that the fit has not asked."""
    free = [fill for fill in UNSEEN if fill not in asked]
    if not free:
        raise unknown("fill that a fit leaves out", ", ".join(asked), FILLS)
    return free[0]


def _around(
    asked: MaskedModel, batch: Batch, masks: Tensor, fill: str, source: Fitted
) -> list[Around]:
    """What the model says of the region, the rest and nothing, of each image."""
    n = len(batch)
    if not n:
        raise UserError("images must be [N,C,H,W] with at least one image")
    every = torch.cat([masks, ~masks, torch.zeros_like(masks)])
    images = torch.arange(n).repeat(len(PARTS))
    views = asked.views(
        batch.images,
        every,
        (images, torch.arange(len(every))),
        targets=batch.targets.cpu().repeat(len(PARTS)),
    )
    parts = [
        _said(asked.model, batch, named, confidences)
        for named, confidences in zip(views.named.split(n), views.confidences.split(n), strict=True)
    ]
    return [
        Around(fill, fill in source.fills, region, rest, nothing)
        for region, rest, nothing in zip(*parts, strict=True)
    ]


def _of_whole(classifier: Classifier, batch: Batch) -> tuple[Tensor, Tensor]:
    """The class of each whole image, and the target's confidence: twice [N]."""
    whole = whole_images(classifier, batch)
    return whole.classes_of([EVERYTHING])[:, 0], whole.of([EVERYTHING], "confidence")[:, 0]


def _said(classifier: Classifier, batch: Batch, named: Tensor, confidences: Tensor) -> list[Said]:
    targets = batch.targets.tolist()
    rows = zip(named.tolist(), confidences.tolist(), targets, strict=True)
    return [
        Said(_class(classifier, number), number == target, confidence)
        for number, confidence, target in rows
    ]


def _class(classifier: Classifier, number: int) -> str:
    """The name of a class, or its number; a model that gives NaN names none."""
    if number < 0:
        return "another class" if classifier.score is not None else "nothing"
    known = classifier.classes or ()
    return known[number] if number < len(known) else f"class {number}"


def _without(one: Around, target: str) -> str:
    return f"still {target}" if one.rest.is_target else one.rest.name


def _listed(words: Sequence[str]) -> str:
    """Words in a sentence.

    >>> _listed(["black", "blur", "noise"])
    'black, blur and noise'
    """
    head = ", ".join(words[:-1])
    return f"{head} and {words[-1]}" if head else words[-1]
