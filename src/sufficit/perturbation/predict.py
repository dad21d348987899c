"""The only loop that sends masked images to a model."""

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sufficit.classifier.acceleration import is_compiled
from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.perturbation import tokens
from sufficit.perturbation.bands import Band, distinct_masks, ranks, runs
from sufficit.perturbation.fills import fill_for
from sufficit.perturbation.imputation import ROAD, impute
from sufficit.perturbation.predictions import ANOTHER, NO_CLASS, Predictions, ViewPredictions
from sufficit.progress import Progress

Score = Callable[[Tensor, Tensor], Tensor]
"""Logits [N,C] and targets [N] -> one number per image [N]."""

HALF = 0.5  # of the whole image's value counts as right, by a score of the user's
_GROUP_ELEMENTS = {"cuda": 2**26}  # of images on the device at once; masks are never stored
_GROUP_IMAGES = {"cuda": 256}
_BATCH_ELEMENTS = {"cuda": 2**27, "cpu": 2**19}
_FEW_SIZES = ("cuda",)  # where libraries plan for each new batch size, which is slow
_SIZES = 8  # of batches, there


def predict(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    targets: Tensor | None,
    bands: Sequence[Band],
    *,
    weigh: Sequence[Band] = (),
    fill: str | Tensor = "black",
    batch_size: int | None = None,
    progress: Progress | None = None,
    drawn: Tensor | None = None,
) -> Predictions:
    """Return the model's prediction for every image in every band: [N,C,H,W], [N,H,W] -> [N,B].

    Equal masks are sent once. `weigh` names bands of which only the size is wanted. Without
    targets, the model's own predictions are the targets. Whole images are sent only where a
    target is missing or a band keeps all pixels. Heatmaps of M methods may come in one tensor,
    method after method: [MN,H,W] -> [MN,B]. With `drawn`, numbers of bands, each image is asked its
    own ones only: [N,K] -> [N,K] or [MN,K].
    """
    loop = _Loop(classifier, images, fill, batch_size)
    parts: list[Predictions] = []
    total, n, start = len(heatmaps), len(images), 0
    with torch.no_grad(), classifier.in_eval_mode():
        for count in _groups(total, images, classifier.device):
            rows: slice | list[int] = [row % n for row in range(start, start + count)]
            if start % n + count <= n:
                rows = slice(start % n, start % n + count)  # copies nothing
            inputs = loop.normalized(images[rows], fill, rows)
            wanted = None if targets is None else targets[rows]
            loop.reports = (progress, start, count, total)
            maps, chosen = heatmaps[start : start + count], None if drawn is None else drawn[rows]
            parts.append(loop.group(*inputs, maps, wanted, bands, weigh, chosen))
            start += count
    return Predictions.join(parts)


def predict_views(
    classifier: Classifier,
    images: Tensor,
    masks: Tensor,
    views: tuple[Tensor, Tensor],
    *,
    targets: Tensor | None = None,
    fill: str | Tensor = "black",
    batch_size: int | None = None,
    progress: Progress | None = None,
    score: Score | None = None,
) -> ViewPredictions:
    """Return the prediction for each view, on the CPU.

    `views` are the numbers of the image and of the mask of each view: any of the images [N,C,H,W]
    is seen through any of the masks [M,H,W], bool or the share of the image in 0..1. Targets are
    the class of each view: [T]. `score` takes the place of the confidence.
    """
    loop = _Loop(classifier, images, fill, batch_size)
    loop.score = score or loop.score
    loop.highest = -1 if targets is None or not len(targets) else int(targets.max())
    used, place = views[0].unique(return_inverse=True)
    order = place.argsort(stable=True)
    ends = place.bincount().cumsum(0).tolist()
    if loop.vit:
        masks = tokens.patches_of(masks, loop.vit.patch)
    named = torch.empty(len(order), dtype=torch.long, device="cpu")
    confidences = torch.full((len(order),), torch.nan, device="cpu")
    start = done = 0
    with torch.no_grad(), classifier.in_eval_mode():
        for count in _groups(len(used), images, classifier.device):
            rows = used[start : start + count].tolist()
            inputs = loop.normalized(images[rows], fill, rows)
            here = order[done : ends[start + count - 1]]
            loop.reports = (progress, done, len(here), len(order))
            goals = None if targets is None else targets[here]
            found = loop.views(*inputs, masks, place[here] - start, views[1][here], goals)
            named[here] = found.named
            confidences[here] = found.confidences
            start, done = start + count, done + len(here)
    if classifier.score is not None:
        whole = classifier(images[used.tolist()])[:, 0].float().cpu()
        named, confidences = _relative(confidences, whole[place])
    return ViewPredictions(named, confidences)


def check_batch_size(batch_size: int | None) -> None:
    """Raise unless the batch size is None or a whole number above 0."""
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise UserError(
            f"batch_size must be 1 or more, got {batch_size}: leave it out for the best one"
        )


def halved(failed: int, stacklevel: int) -> int:
    """Return half of a batch size that was too large for memory, and warn; raise if it was 1."""
    if failed == 1:
        raise UserError(
            "out of memory at batch size 1: use smaller images, a lower precision or another device"
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    words = f"out of memory: retrying with batch size {failed // 2}"
    warnings.warn(words, RuntimeWarning, stacklevel=stacklevel + 1)
    return failed // 2


def usual_batch(classifier: Classifier, shape: Sequence[int]) -> int:
    """Return the batch size for images [C,H,W], where none is given.

    It is a power of two that keeps a GPU busy, or stays in the cache of a CPU.
    """
    elements = _BATCH_ELEMENTS.get(classifier.device.type, 2**22)
    fitting = max(4, elements // math.prod(shape))
    return min(4096, 1 << (fitting.bit_length() - 1))


def _groups(total: int, images: Tensor, device: torch.device) -> list[int]:
    """Return how many images each group on the device has, all about equal."""
    elements, most = _GROUP_ELEMENTS.get(device.type, 2**25), _GROUP_IMAGES.get(device.type, 64)
    groups = -(-total // max(1, min(most, elements // images[0].numel())))
    return [total * (k + 1) // groups - total * k // groups for k in range(groups)]


_fitting: "WeakKeyDictionary[nn.Module, dict[object, int]]" = WeakKeyDictionary()
"""Batch sizes found after running out of memory, per model, device, precision and image size."""


class _Loop:
    """Sends inputs to the model in batches, in smaller ones once memory ran out."""

    def __init__(
        self,
        classifier: Classifier,
        images: Tensor,
        fill: str | Tensor,
        batch_size: int | None,
    ) -> None:
        self.classifier = classifier
        # With the fill `drop`, the model in two parts; masks are then unions of patches.
        self.vit = tokens.token_model(classifier, images.shape[2:]) if tokens.drops(fill) else None
        self.imputes = isinstance(fill, str) and fill == ROAD
        self.known = _fitting.setdefault(classifier.bare, {})
        self.case = (classifier.device, classifier.dtype, tuple(images.shape[1:]))
        wanted = batch_size or usual_batch(classifier, images.shape[1:])
        self.batch_size = min(wanted, self.known.get(self.case, wanted))
        self.highest = -1  # of the target classes
        # A score of the user's is the only logit.
        self.score: Score = confidence if classifier.score is None else only_logit
        # To whom progress is reported, images done before this group, in this group, in all.
        self.reports: tuple[Progress | None, int, int, int] = (None, 0, 0, 0)

    def tick(self, share: float) -> None:
        """Report progress in images, from the share of a group that is done."""
        progress, before, here, total = self.reports
        if progress is not None:
            progress(before + share * here, total)

    def normalized(
        self, images: Tensor, fill: str | Tensor, part: slice | list[int] = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Return images and their fill on the device, normalised: [N,C,H,W], [1 or N,C,H,W]."""
        images = images.to(self.classifier.device, torch.float32)
        filler = fill_for(images, fill, part).expand(-1, images.shape[1], -1, -1)
        return self.classifier.normalize(images), self.classifier.normalize(filler)

    def group(
        self,
        inputs: Tensor,
        hidden: Tensor,
        heatmaps: Tensor,
        targets: Tensor | None,
        bands: Sequence[Band],
        weigh: Sequence[Band],
        drawn: Tensor | None,
    ) -> Predictions:
        """Return the predictions for a group of images that is on the device."""
        maps = heatmaps.to(inputs.device, torch.float32)
        pixels = maps[0].numel()
        spans = runs(maps, [*bands, *weigh])
        asked_spans = spans[:, : len(bands)]
        if drawn is not None:
            chosen = drawn.to(spans.device, torch.long)[..., None].expand(-1, -1, 2)
            asked_spans = asked_spans.gather(1, chosen)
        if self.vit:
            kept = tokens.kept_patches(ranks(maps), asked_spans, self.vit.patch)
            owners, kept, place = tokens.distinct_patches(kept)
            hides = ~kept.all(1)
        else:
            owners, starts, stops, place = distinct_masks(asked_spans, pixels)
            hides = (starts > 0) | (stops < pixels)
        whole = owners[~hides]
        self.highest = -1 if targets is None else int(targets.max())
        logits, goals, values = self._whole(inputs, targets, whole)
        wanted = goals[owners]
        confidences = torch.empty(len(wanted), dtype=torch.float32, device=inputs.device)
        named = torch.empty_like(confidences, dtype=torch.int32)
        if len(whole):
            named[~hides], confidences[~hides] = _judge(logits, wanted[~hides], self.score)
        asked = hides.nonzero()[:, 0]
        masker: Masker | tokens.TokenMasker
        if self.vit:
            asked = asked[kept[asked].sum(1).argsort(stable=True)]
            masker = tokens.TokenMasker(self._tokens(inputs), owners[asked], kept[asked])
        else:
            layout, those = self.classifier.memory_format, owners[asked].tolist()
            inputs = inputs.contiguous(memory_format=layout)
            runs_asked = (starts[asked], stops[asked])
            given = (inputs, hidden, ranks(maps), those, *runs_asked, layout)
            masker = Masker(*given, imputes=self.imputes)

        def one(start: int, stop: int) -> None:
            rows = asked[start:stop]
            logits = self._answer(masker.batch(start, stop))
            named[rows], confidences[rows] = _judge(logits, wanted[rows], self.score)
            self.tick(stop / len(asked))

        self._in_batches(len(asked), one, masker)
        if values is not None:
            named, confidences = _relative(confidences, values[owners])
        first, last = spans[:, len(bands) :].cpu().unbind(-1)
        place = place.cpu()
        return Predictions(
            bands=tuple(bands),
            named=named.cpu()[place],
            confidences=confidences.cpu()[place],
            weighed=tuple(weigh),
            shares=(last - first).double() / pixels,
            targets=goals.cpu(),
            calls=owners.bincount(minlength=len(maps)).cpu(),
            drawn=drawn,
        )

    def _whole(
        self, inputs: Tensor, targets: Tensor | None, whole: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits of some whole images, targets, and values by a score of the user's."""
        if targets is not None and self.classifier.score is None:
            some = inputs if len(whole) == len(inputs) else inputs[whole]
            return self._each(some, self._answer), targets.to(inputs.device), None
        logits = self._each(inputs, self._answer)
        values = None if self.classifier.score is None else logits[:, 0]
        return logits[whole], logits.argmax(1), values

    def views(
        self,
        inputs: Tensor,
        hidden: Tensor,
        masks: Tensor,
        seen: Tensor,
        through: Tensor,
        targets: Tensor | None,
    ) -> ViewPredictions:
        """Return the prediction for each view of a group on the device, on the CPU."""
        named = torch.empty(len(seen), dtype=torch.int32, device=inputs.device)
        confidences = torch.empty(len(seen), dtype=torch.float32, device=inputs.device)
        goals = torch.zeros_like(named, dtype=torch.long)
        goals = goals if targets is None else targets.to(goals)
        masker, order = None, torch.arange(len(seen), device=inputs.device)
        if self.vit:
            kept = masks[through.to(masks.device)].to(inputs.device)
            order = kept.sum(1).argsort(stable=True)
            masker = tokens.TokenMasker(
                self._tokens(inputs), seen.to(order.device)[order], kept[order]
            )

        def pixels(start: int, stop: int) -> Tensor:
            rows = seen[start:stop].to(inputs.device)
            mask = masks[through[start:stop].to(masks.device)].to(inputs)[:, None]
            # At weights 0 and 1 lerp returns its ends to the bit.
            if self.imputes:
                batch = impute(inputs[rows], mask[:, 0], hidden)
                return batch.contiguous(memory_format=self.classifier.memory_format)
            batch = torch.lerp(hidden[rows] if len(hidden) > 1 else hidden, inputs[rows], mask)
            return batch.contiguous(memory_format=self.classifier.memory_format)

        def one(start: int, stop: int) -> None:
            rows = order[start:stop]
            logits = self._answer((masker.batch if masker else pixels)(start, stop))
            named[rows], confidences[rows] = _judge(logits, goals[rows], self.score)
            self.tick(stop / len(named))

        self._in_batches(len(named), one, masker)
        if targets is None:
            confidences.fill_(torch.nan)
        return ViewPredictions(named.cpu().long(), confidences.cpu())

    def _answer(self, batch: Tensor) -> Tensor:
        """Return the logits of images [N,C,H,W] or tokens [N,T,K]; raise for a missing class."""
        n = len(batch)
        if self.vit and batch.ndim == 3:
            logits = self.classifier.as_logits(self.vit.finish(batch)).float()
        else:
            if more := self._room(n) - n:  # repeat the last image
                batch = torch.cat([batch, batch[-1:].expand(more, -1, -1, -1)])
                batch = batch.contiguous(memory_format=self.classifier.memory_format)
            logits = self.classifier.logits_of(batch)[:n].float()
        classes = logits.shape[1]
        if self.highest >= classes:
            raise UserError(
                f"targets must lie in 0..{classes - 1}, the model has {classes} classes, got"
                f" {self.highest}"
            )
        return logits

    def _room(self, n: int) -> int:
        """Return the number of images that a batch of n is sent with."""
        if is_compiled(self.classifier):  # each size is compiled, so there are two
            part = -(-self.batch_size // 4)
            return part if n <= part else self.batch_size
        if self.classifier.device.type not in _FEW_SIZES:
            return n
        step = -(-self.batch_size // _SIZES)
        return min(self.batch_size, -(-n // step) * step)

    def _tokens(self, inputs: Tensor) -> Tensor:
        """Return the tokens of whole inputs: [N,C,H,W] -> [N,T,K]."""
        assert self.vit is not None
        self.vit.check(self.classifier, inputs[:1])
        return self._each(inputs, self.vit.embed)

    def _each(self, inputs: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what unmasked inputs are answered with: [N,C,H,W] -> [N,...]."""
        parts: list[Tensor] = [inputs.new_empty(0, 0, dtype=torch.float32)]

        def one(start: int, stop: int) -> None:
            batch = inputs[start:stop].clone(memory_format=self.classifier.memory_format)
            # A copy, because a compiled model may return the same memory at each call.
            parts.append(answer(batch).clone())

        self._in_batches(len(inputs), one)
        return torch.cat(parts[1:] or parts)

    def _in_batches(
        self,
        total: int,
        one: Callable[[int, int], None],
        masker: "Masker | tokens.TokenMasker | None" = None,
    ) -> None:
        """Call `one(start, stop)` per batch; out of memory, free buffers and halve the batch."""
        start, counts = 0, masker.counts if isinstance(masker, tokens.TokenMasker) else ()
        while start < total:
            stop = min(start + self.batch_size, total)
            if counts:
                stop = min(stop, bisect_right(counts, counts[start]))
            try:
                one(start, stop)
                start = stop
                continue
            except torch.OutOfMemoryError:
                pass  # what the model held is freed once the exception is gone
            if isinstance(masker, Masker):
                masker.drop_buffers()
            size = halved(self._room(stop - start), stacklevel=6)
            self.batch_size = self.known[self.case] = size


def confidence(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the softmax of the target: [N,C], [N] -> [N]."""
    return logits.softmax(1).gather(1, targets[:, None])[:, 0]


def only_logit(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the number that a score of the user's gives: [N,1], [N] -> [N]."""
    return logits[:, 0]


def _relative(values: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class and the share of the whole image's value, in 0..1: [T], [T] -> [T], [T].

    A share of HALF or more counts as the target, 0. It is NaN where the whole image has the value 0
    or either is not finite.
    """
    shares = (values / whole).clamp(0, 1)
    shares = shares.masked_fill(~(values.isfinite() & whole.isfinite()) | (whole == 0), torch.nan)
    named = torch.where(shares >= HALF, 0, ANOTHER).masked_fill(shares.isnan(), NO_CLASS)
    return named.to(torch.int32), shares


def _judge(logits: Tensor, targets: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """Return the predicted class and the score of the target: [N,C] -> [N], [N]."""
    scores = score(logits, targets)
    return logits.argmax(1).masked_fill(scores.isnan(), NO_CLASS).to(torch.int32), scores


@dataclass
class Masker:
    """Makes masked inputs in its own buffers, from inputs that are already normalised.

    Masking after normalising gives the same numbers as normalising after masking, and reads the
    memory once per mask.
    """

    inputs: Tensor  # [N,C,H,W]
    hidden: Tensor  # [N,C,H,W], or [1,...] where all images have one fill
    ranks: Tensor  # [N,H,W]
    owners: list[int]  # which image each mask is of, in order
    starts: Tensor  # [T] the first rank that is kept
    stops: Tensor  # [T] the first rank after it that is hidden
    layout: torch.memory_format
    imputes: bool = False  # hidden pixels from their neighbours
    buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def batch(self, start: int, stop: int) -> Tensor:
        """Keep each mask's run of ranks, fill the rest: masks start..stop -> [T,C,H,W]."""
        if self.buffers is None or len(self.buffers[0]) < stop - start:
            self.buffers = None
            c, h, w = self.inputs.shape[1:]
            size, empty = stop - start, self.inputs.new_empty
            batch = torch.empty_like(empty(size, c, h, w), memory_format=self.layout)
            self.buffers = (batch, empty(size, h, w), empty(size, h, w))
        batch, keep, below = (buffer[: stop - start] for buffer in self.buffers)
        cuts = [i for i in range(start + 1, stop) if self.owners[i] != self.owners[i - 1]]
        for first, last in pairwise([start, *cuts, stop]):  # the masks of one image
            image, here = self.owners[first], slice(first - start, last - start)
            torch.ge(self.ranks[image], self.starts[first:last, None, None], out=keep[here])
            torch.lt(self.ranks[image], self.stops[first:last, None, None], out=below[here])
            mask = keep[here].mul_(below[here])[:, None]
            hidden = self.hidden[image if len(self.hidden) > 1 else 0]
            # At weights 0 and 1 lerp returns its ends to the bit, and is far faster than where.
            torch.lerp(hidden, self.inputs[image], mask, out=batch[here])
        if self.imputes:
            return impute(batch, keep, self.hidden).contiguous(memory_format=self.layout)
        return batch

    def drop_buffers(self) -> None:
        """Free the buffers, so that smaller ones can be allocated."""
        self.buffers = None
