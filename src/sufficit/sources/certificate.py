"""What a model says of a region: alone, without it, and of nothing. The proof that it is enough."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.errors import UserError, unknown
from sufficit.perturbation.fills import FILLS
from sufficit.sources.asked import (
    ALL,
    NOTHING,
    REGION,
    REST,
    SIZES,
    THOUSANDTHS,
    UNASKED,
    Asked,
    Coming,
    Parts,
    in_step,
)
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
        asked = [around for around in self.fills if around.asked]
        if self.needed is not None:
            return self._in_shares(asked, self.needed)
        if not self.enough:
            fills = _listed([around.fill for around in asked])
            return (
                f"No region of this map is enough for {self.target} with {fills}: the region is"
                " the whole image."
            )
        regions = [f"{around.fill} around it ({around.region.confidence:.2f})" for around in asked]
        sentence = (
            f"{percent(self.share)} of this image is enough: the model says {self.target} with"
            f" {_listed(regions)}; without it, {_without(asked, self.target)}."
        )
        # A fill that chose no size may disagree: the sentence says so.
        for around in self.fills:
            if not around.asked and not around.region.is_target:
                said = around.region.name
                sentence += f" With {around.fill}, which was not asked, it says {said}."
        return sentence

    @property
    def caption(self) -> tuple[str, str, str]:
        """The certificate in three short lines, to be written below a picture."""
        asked = [around for around in self.fills if around.asked]
        regions = [f"{around.region.confidence:.2f} with {around.fill}" for around in asked]
        alone = f"alone: {', '.join(regions)}"
        if self.target == SCORE:
            rests = [f"{around.rest.confidence:.2f} with {around.fill}" for around in asked]
            return self._title, alone, f"without it: {', '.join(rests)}"
        whole = f"whole image: {self.whole.name}, {self.whole.confidence:.2f}"
        return self._title, f"{alone}; {whole}", f"without it: {_without(asked, self.target)}"

    @property
    def _title(self) -> str:
        """The first line of the caption."""
        if not self.enough:
            return f"No region of this map is enough for {self.target}"
        if self.needed is not None:
            return f"{percent(self.share)} keeps {percent(self.needed)} of {self._owned} score"
        return f"{percent(self.share)} is enough: {self.target}"

    @property
    def _owned(self) -> str:
        return "the" if self.target == SCORE else f"{self.target}'s"

    def _in_shares(self, asked: "Sequence[Around]", needed: float) -> str:
        """Return the sentence where the model need not give the target for the region."""
        first = ""
        if self.target != SCORE:
            first = (
                f"The model says {self.whole.name} of the whole image, not {self.target}"
                f" ({self.whole.confidence:.2f}). "
            )
        keeps = f"{percent(needed)} of {self._owned} score above that of an empty image"
        if self.enough:
            regions = [f"{one.fill} around it ({one.region.confidence:.2f})" for one in asked]
            rests = [f"{one.fill} in its place ({one.rest.confidence:.2f})" for one in asked]
            return (
                f"{first}{percent(self.share)} of this image keeps {keeps}: with"
                f" {_listed(regions)}; without it, with {_listed(rests)}."
            )
        low = [one.fill for one in asked if not self.whole.confidence > one.nothing.confidence]
        if low:  # no region could keep a share of nothing
            return (
                f"{first}The whole image scores no more than an empty one with {_listed(low)}: the"
                " region is the whole image."
            )
        fills = _listed([one.fill for one in asked])
        return (
            f"{first}No region of this map keeps {keeps} with {fills}: the region is the whole"
            " image."
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

    `enough` is that of the fit.
    """
    full = certified(model, batch, maps, batch_size=batch_size)
    return certificates_of(model, batch.targets, full, enough=enough)


def certified(
    model: Classifier, batch: Batch, maps: Maps, *, batch_size: int | None = None
) -> Maps:
    """Return the maps of a `Fitted` with all answers that certificates need."""
    (full,) = in_step([certifying(model, batch, maps, batch_size=batch_size)])
    return full


def certifying(
    model: Classifier, batch: Batch, maps: Maps, *, batch_size: int | None = None
) -> Generator[Coming, Asked, Maps]:
    """Ask all that certificates need, for `in_step`.

    What the fit has asked is not asked again. Three to nine forward passes per image are left: of
    the rest, of nothing, and of all parts with a fill that the fit has not asked.
    """
    if maps.asked is None:
        raise UserError("a certificate needs the maps of a Fitted source: cut them by a fit first")
    if maps.asked.unseen:
        return maps
    asked = maps.asked.with_unseen(_unseen(maps.asked.fills))
    wanted = torch.zeros_like(asked.known)
    wanted[..., NOTHING] = True
    for row, size in enumerate(_sizes_of(maps)):
        if size is not None:  # None: the region is the whole image, which is known
            wanted[row, :, [REGION.start + size, REST.start + size]] = True
    parts = Parts.of(model, batch, maps.maps, batch_size)
    full = yield parts.ask(asked, wanted & ~asked.known)
    return replace(maps, asked=full)


def certificates_of(
    model: Classifier, targets: Tensor, maps: Maps, *, enough: float
) -> list[Certificate]:
    """Return the certificates that `certified` maps hold; the model is asked nothing."""
    assert maps.asked is not None  # by `certified`
    asked = maps.asked
    sizes = _sizes_of(maps)
    passes = asked.passes.tolist()
    made = []
    for row, target in enumerate(targets.tolist()):
        said = _said(model, target, asked.named[row], asked.confidences[row])
        whole = said[0][ALL]  # the same with every fill: nothing is hidden
        # As the fit has judged the image: by class, or by a share of the score.
        by_class = whole.is_target and model.score is None
        made.append(
            Certificate(
                target=class_name(model, target),
                share=float(maps.columns["fit_share"][row]),
                enough=bool(maps.columns["fit_enough"][row]),
                whole=whole,
                fills=tuple(
                    _around(fill, fill != asked.unseen, own, sizes[row])
                    for fill, own in zip(asked.fills, said, strict=True)
                ),
                passes=passes[row],
                sizes=_sizes(asked, said),
                needed=None if by_class else enough,
            )
        )
    return made


def certificate_row(proof: Certificate) -> dict[str, object]:
    """Return a certificate as a row of a table."""
    row: dict[str, object] = {
        "target": proof.target,
        "share": proof.share,
        "enough": proof.enough,
        "whole": proof.whole.name,
        "whole_confidence": proof.whole.confidence,
    }
    for around in proof.fills:
        for part in ALONE:
            said: Said = getattr(around, part)
            row[f"{around.fill}_{part}"] = said.name
            row[f"{around.fill}_{part}_confidence"] = said.confidence
    return row | {"passes": proof.passes, "sentence": proof.sentence}


def _unseen(asked: Sequence[str]) -> str:
    """Return the first fill that the fit has not asked."""
    free = [fill for fill in UNSEEN if fill not in asked]
    if not free:
        raise unknown("fill that a fit leaves out", ", ".join(asked), FILLS)
    return free[0]


def _sizes_of(maps: Maps) -> list[int | None]:
    """Return the number of the size that was chosen for each image; None where no size suffices."""
    # A float is not looked up: its thousandths are exact.
    thousandths = (1000 * maps.columns["fit_share"]).round().long().tolist()
    return [THOUSANDTHS.index(size) if size in THOUSANDTHS else None for size in thousandths]


def _said(
    model: Classifier, target: int, named: Tensor, confidences: Tensor
) -> list[dict[int, Said]]:
    """Return what was said of the parts of one image that were asked, fill by fill: [F,P] twice."""
    by_fill = []
    for numbers, values in zip(named.tolist(), confidences.tolist(), strict=True):
        by_fill.append(
            {
                part: Said(class_name(model, number), number == target, values[part])
                for part, number in enumerate(numbers)
                if number != UNASKED  # most are not, and objects for them would cost time
            }
        )
    return by_fill


def _around(fill: str, asked: bool, said: Mapping[int, Said], size: int | None) -> Around:
    """Return what was said of the region, the rest and nothing, with one fill."""
    nothing = said[NOTHING]
    if size is None:  # the region is the whole image
        return Around(fill, asked, said[ALL], nothing, nothing)
    return Around(fill, asked, said[REGION.start + size], said[REST.start + size], nothing)


def _sizes(asked: Asked, said: Sequence[Mapping[int, Said]]) -> tuple[Size, ...]:
    """Return the sizes of one image that were asked while one was chosen."""
    chosen_with = [
        (fill, own) for fill, own in zip(asked.fills, said, strict=True) if fill != asked.unseen
    ]

    def of(part: int) -> dict[str, Said]:
        return {fill: own[part] for fill, own in chosen_with if part in own}

    sizes = []
    for number, share in enumerate(SIZES):
        region = of(REGION.start + number)
        rest = of(REST.start + number)
        if region or rest:
            sizes.append(Size(share, region, rest))
    return tuple(sizes)


def class_name(model: Classifier, number: int) -> str:
    """Return the name of a class, or its number; a model that gives NaN names none."""
    if model.score is not None:
        return SCORE if number >= 0 else "less than half of it"
    if number < 0:
        return "nothing"
    names = model.classes or ()
    return names[number] if number < len(names) else f"class {number}"


def percent(share: float) -> str:
    """Return a share of an image in words.

    >>> percent(0.02), percent(0.125), percent(0.9)
    ('2%', '12.5%', '90%')
    """
    return f"{100 * share:.3g}%"


def _without(asked: Sequence[Around], target: str) -> str:
    """Return what the model says of the rest: one class, or several with their fills."""
    fills: dict[str, list[str]] = {}
    for around in asked:
        name = f"still {target}" if around.rest.is_target else around.rest.name
        fills.setdefault(name, []).append(around.fill)
    if len(fills) == 1:
        return next(iter(fills))
    return ", ".join(f"{name} with {_listed(alike)}" for name, alike in fills.items())


def _listed(words: Sequence[str]) -> str:
    """Return words in a sentence.

    >>> _listed(["black", "blur", "noise"])
    'black, blur and noise'
    """
    head = ", ".join(words[:-1])
    return f"{head} and {words[-1]}" if head else words[-1]
