"""What a model says of a region: alone, without it, and of nothing. The proof that it is enough."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.errors import UserError, unknown
from sufficit.perturbation.bands import EVERYTHING
from sufficit.perturbation.fills import FILLS
from sufficit.perturbation.masked_model import whole_images
from sufficit.sources.asked import NOTHING, REGION, REST, SIZES, THOUSANDTHS, Asked, Parts
from sufficit.sources.kinds import Maps

UNSEEN = ("blur", "mean", "noise", "black")  # the first that is not asked is shown as well
ALONE = ("region", "rest", "nothing")
SCORE = "the score"  # in place of a class, by a score of the user's


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
class Size:
    """What the model says of a region of another size and of its rest, by fill, where asked."""

    share: float  # of the image, 0..1
    region: Mapping[str, Said]
    rest: Mapping[str, Said]


@dataclass(frozen=True)
class Certificate:
    """How far the region of one image is enough for the model."""

    target: str
    share: float  # of the image, 0..1
    enough: bool  # whether a part of the image suffices with every fill that was asked
    whole: Said
    fills: tuple[Around, ...]
    passes: int  # forward passes spent
    sizes: tuple[Size, ...] = ()  # those that were asked while the region was chosen
    # The share of the whole image's score above that of an empty image that a region must keep;
    # None where the model gives the target for the whole image, and must give it for the region.
    needed: float | None = None

    @property
    def sentence(self) -> str:
        """The certificate in words."""
        asked = [one for one in self.fills if one.asked]
        if self.needed is not None:
            return self._in_shares(asked, self.needed)
        if not self.enough:
            fills = _listed([one.fill for one in asked])
            found = f"No region of this map is enough for {self.target} with {fills}"
            return f"{found}: the region is the whole image."
        seen = [f"{one.fill} around it ({one.region.confidence:.2f})" for one in asked]
        found = f"{percent(self.share)} of this image is enough: the model says {self.target} with"
        found = f"{found} {_listed(seen)}; without it, {_without(asked, self.target)}."
        for one in self.fills:
            if not one.asked and not one.region.is_target:
                found += f" With {one.fill}, which was not asked, it says {one.region.name}."
        return found

    def _in_shares(self, asked: "Sequence[Around]", needed: float) -> str:
        """The sentence where the model need not give the target for the region."""
        found, owner = "", "the score"
        if self.target != SCORE:
            found = f"The model says {self.whole.name} of the whole image, not {self.target}"
            found += f" ({self.whole.confidence:.2f}). "
            owner = f"{self.target}'s score"
        keeps = f"{percent(needed)} of {owner} above that of an empty image"
        above = {one.fill: self.whole.confidence > one.nothing.confidence for one in asked}
        if self.enough:
            seen = [f"{one.fill} around it ({one.region.confidence:.2f})" for one in asked]
            left = [f"{one.fill} in its place ({one.rest.confidence:.2f})" for one in asked]
            found += f"{percent(self.share)} of this image keeps {keeps}: with {_listed(seen)}"
            return f"{found}; without it, with {_listed(left)}."
        if all(above.values()):
            fills = _listed([*above])
            found += f"No region of this map keeps {keeps} with {fills}"
            return f"{found}: the region is the whole image."
        fills = _listed([fill for fill, is_above in above.items() if not is_above])
        return (
            f"{found}The whole image scores no more than an empty one with {fills}: the region is"
            " the whole image."
        )


def certificates(
    model: Classifier,
    batch: Batch,
    maps: Maps,
    *,
    enough: float = 0.9,
    batch_size: int | None = None,
) -> list[Certificate]:
    """Return the certificate of each image of a batch, by the maps of a `Fitted`.

    What the fit has asked is not asked again. Three to nine forward passes per image are left: of
    the rest, of nothing, and of all parts with a fill that the fit has not asked. `enough` is that
    of the fit.
    """
    if maps.asked is None:
        raise UserError("a certificate needs the maps of a Fitted source: cut them by a fit first")
    unseen = _unseen(maps.asked.fills)
    asked = maps.asked.with_fill(unseen)
    thousandths = (1000 * maps.columns["fit_share"]).round().long().tolist()
    sizes = [THOUSANDTHS.index(one) if one in THOUSANDTHS else None for one in thousandths]
    wanted = torch.zeros_like(asked.known)
    wanted[..., NOTHING] = True
    for row, size in enumerate(sizes):
        if size is not None:
            wanted[row, :, [REGION.start + size, REST.start + size]] = True
    parts = Parts.of(model, batch, maps.maps, batch_size)
    asked = parts.ask(asked, wanted & ~asked.known)
    said = _sentences_of(model, batch, asked)
    whole = _whole(model, batch)
    by_class = [one.is_target and model.score is None for one in whole]
    tried = maps.asked.known
    return [
        Certificate(
            target=class_name(model, int(batch.targets[row])),
            share=float(maps.columns["fit_share"][row]),
            enough=bool(maps.columns["fit_enough"][row]),
            whole=whole[row],
            fills=tuple(
                _around(fill, fill != unseen, said[row][number], sizes[row], whole[row])
                for number, fill in enumerate(asked.fills)
            ),
            passes=int(asked.passes[row]),
            sizes=_sizes(maps.asked.fills, tried[row], said[row]),
            needed=None if by_class[row] else enough,
        )
        for row in range(len(batch))
    ]


def certificate_row(one: Certificate) -> dict[str, object]:
    """A certificate as a row of a table."""
    row: dict[str, object] = {"target": one.target, "share": one.share, "enough": one.enough}
    row |= {"whole": one.whole.name, "whole_confidence": one.whole.confidence}
    for around in one.fills:
        for part in ALONE:
            said: Said = getattr(around, part)
            row[f"{around.fill}_{part}"] = said.name
            row[f"{around.fill}_{part}_confidence"] = said.confidence
    return row | {"passes": one.passes, "sentence": one.sentence}


def _unseen(asked: Sequence[str]) -> str:
    """The first fill that the fit has not asked."""
    free = [fill for fill in UNSEEN if fill not in asked]
    if not free:
        raise unknown("fill that a fit leaves out", ", ".join(asked), FILLS)
    return free[0]


def _sentences_of(model: Classifier, batch: Batch, asked: Asked) -> list[list[list[Said]]]:
    """What was said of each image, with each fill, of each part."""
    return [
        [
            _said(model, int(target), names, confidences)
            for names, confidences in zip(by_fill, own, strict=True)
        ]
        for target, by_fill, own in zip(batch.targets, asked.named, asked.confidences, strict=True)
    ]


def _whole(model: Classifier, batch: Batch) -> list[Said]:
    """What the model says of each whole image."""
    whole = whole_images(model, batch)
    named = whole.classes_of([EVERYTHING])
    confidences = whole.of([EVERYTHING], "confidence")
    return [
        _said(model, int(target), names, values)[0]
        for target, names, values in zip(batch.targets, named, confidences, strict=True)
    ]


def _said(model: Classifier, target: int, named: Tensor, confidences: Tensor) -> list[Said]:
    """Answers of one image and target, from numbers of classes: [P], [P] -> P."""
    return [
        Said(class_name(model, number), number == target, confidence)
        for number, confidence in zip(named.tolist(), confidences.tolist(), strict=True)
    ]


def _around(fill: str, asked: bool, said: Sequence[Said], size: int | None, whole: Said) -> Around:
    """What was said of the region, the rest and nothing, with one fill."""
    nothing = said[NOTHING]
    if size is None:  # the region is the whole image
        return Around(fill, asked, whole, nothing, nothing)
    return Around(fill, asked, said[REGION.start + size], said[REST.start + size], nothing)


def _sizes(fills: Sequence[str], known: Tensor, said: Sequence[Sequence[Said]]) -> tuple[Size, ...]:
    """The sizes of one image of which something was asked: bool [F,P], F of P."""

    def of(part: int) -> dict[str, Said]:
        return {fill: said[k][part] for k, fill in enumerate(fills) if known[k, part]}

    found = [
        Size(share, of(REGION.start + number), of(REST.start + number))
        for number, share in enumerate(SIZES)
    ]
    return tuple(one for one in found if one.region or one.rest)


def class_name(model: Classifier, number: int) -> str:
    """The name of a class, or its number; a model that gives NaN names none."""
    if model.score is not None:
        return SCORE if number >= 0 else "less than half of it"
    if number < 0:
        return "nothing"
    known = model.classes or ()
    return known[number] if number < len(known) else f"class {number}"


def percent(share: float) -> str:
    """A share of an image in words.

    >>> percent(0.02), percent(0.125), percent(0.9)
    ('2%', '12.5%', '90%')
    """
    return f"{100 * share:.3g}%"


def _without(asked: Sequence[Around], target: str) -> str:
    """What the model says of the rest: one class, or one with each fill."""
    said = {one.fill: f"still {target}" if one.rest.is_target else one.rest.name for one in asked}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return _listed([f"{name} with {fill}" for fill, name in said.items()])


def _listed(words: Sequence[str]) -> str:
    """Words in a sentence.

    >>> _listed(["black", "blur", "noise"])
    'black, blur and noise'
    """
    head = ", ".join(words[:-1])
    return f"{head} and {words[-1]}" if head else words[-1]
