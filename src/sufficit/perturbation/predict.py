"""The only loop that sends masked images to a model."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.perturbation.bands import Band, ranks, runs
from sufficit.perturbation.fills import fill_for
from sufficit.perturbation.masks import Masker, distinct_masks, masks_of
from sufficit.perturbation.predictions import NO_CLASS, Predictions
from sufficit.progress import Progress

_GROUP_ELEMENTS = {"cuda": 2**26}  # of images on the device at once; masks are never stored
_GROUP_IMAGES = {"cuda": 256}
_BATCH_ELEMENTS = {"cuda": 2**27, "cpu": 2**19}
_FEW_SIZES = ("cuda",)  # where libraries plan for each new batch size, which is slow
_SIZES = 8  # of batches, there


@dataclass(frozen=True)
class Views:
    """Which image is seen through which heatmap's mask."""

    images: Tensor  # [T]
    heatmaps: Tensor  # [T]


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
) -> Predictions:
    """Return the model's prediction for every image in every band: [N,C,H,W], [N,H,W] -> [N,B].

    Equal masks are sent once. `weigh` names bands of which only the size is wanted. Without
    targets, the model's own predictions are the targets. Whole images are sent only where a
    target is missing or a band keeps all pixels. Heatmaps of M methods may come in one tensor,
    method after method: [MN,H,W] -> [MN,B].
    """
    loop = _Loop(classifier, images, batch_size)
    parts: list[Predictions] = []
    total, n, start = len(heatmaps), len(images), 0
    with torch.no_grad(), classifier.in_eval_mode():
        for count in _groups(total, images, classifier.device):
            rows: slice | list[int] = [row % n for row in range(start, start + count)]
            if start % n + count <= n:
                rows = slice(start % n, start % n + count)  # copies nothing
            device_images = images[rows].to(classifier.device, torch.float32)
            filler = fill_for(device_images, fill, rows)
            wanted = None if targets is None else targets[rows]
            maps = heatmaps[start : start + count]
            loop.tick = _ticker(progress, start, count, total)
            parts.append(loop.group(device_images, filler, maps, wanted, bands, weigh))
            start += count
    return Predictions.join(parts)


def predict_views(
    classifier: Classifier,
    images: Tensor,
    heatmaps: Tensor,
    band: Band,
    views: Views,
    *,
    targets: Tensor | None = None,
    fill: str | Tensor = "black",
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Return the predicted class of each view, NO_CLASS where the model returned NaN: [T].

    A view is any of the images [N,C,H,W] through the value band of any of the heatmaps [M,H,W].
    Targets are only checked: the model must have these classes.
    """
    loop = _Loop(classifier, images, batch_size)
    loop.highest = -1 if targets is None else int(targets.max())
    used, place = views.images.unique(return_inverse=True)
    order = place.argsort(stable=True)
    ends = place.bincount().cumsum(0).tolist()
    masks = masks_of(heatmaps, band, classifier.device)
    named = torch.empty(len(order), dtype=torch.long, device="cpu")
    start = done = 0
    with torch.no_grad(), classifier.in_eval_mode():
        for count in _groups(len(used), images, classifier.device):
            device_images = images[used[start : start + count]]
            device_images = device_images.to(classifier.device, torch.float32)
            here = order[done : ends[start + count - 1]]
            rows = Views(place[here] - start, views.heatmaps[here])
            loop.tick = _ticker(progress, done, len(here), len(order))
            named[here] = loop.views(device_images, fill_for(device_images, fill), masks, rows)
            start, done = start + count, done + len(here)
    return named


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
    warnings.warn(
        f"out of memory: retrying with batch size {failed // 2}",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )
    return failed // 2


def _groups(total: int, images: Tensor, device: torch.device) -> list[int]:
    """Return how many images each group on the device has, all about equal."""
    elements, most = _GROUP_ELEMENTS.get(device.type, 2**25), _GROUP_IMAGES.get(device.type, 64)
    groups = -(-total // max(1, min(most, elements // images[0].numel())))
    return [total * (k + 1) // groups - total * k // groups for k in range(groups)]


def _ticker(
    progress: Progress | None, before: int, here: int, total: int
) -> Callable[[float], None]:
    """Return a function that reports progress in images, from the share of a group that is done."""
    if progress is None:
        return lambda share: None
    return lambda share: progress(before + share * here, total)


_fitting: "WeakKeyDictionary[nn.Module, dict[object, int]]" = WeakKeyDictionary()
"""Batch sizes found after running out of memory, per model, device, precision and image size."""


class _Loop:
    """Sends inputs to the model in batches, in smaller ones once memory ran out."""

    def __init__(self, classifier: Classifier, images: Tensor, batch_size: int | None) -> None:
        self.classifier = classifier
        self.known = _fitting.setdefault(classifier.bare, {})
        self.case = (classifier.device, classifier.dtype, tuple(images.shape[1:]))
        # A power of two that keeps a GPU busy, or stays in the cache of a CPU.
        elements = _BATCH_ELEMENTS.get(classifier.device.type, 2**22)
        fitting = max(4, elements // images[0].numel())
        wanted = batch_size or min(4096, 1 << (fitting.bit_length() - 1))
        self.batch_size = min(wanted, self.known.get(self.case, wanted))
        self.highest = -1  # of the target classes
        self.tick: Callable[[float], None] = lambda share: None

    def group(
        self,
        images: Tensor,
        filler: Tensor,
        heatmaps: Tensor,
        targets: Tensor | None,
        bands: Sequence[Band],
        weigh: Sequence[Band],
    ) -> Predictions:
        """Return the predictions for a group of images that is on the device."""
        inputs, hidden = self._normalized(images, filler)
        maps = heatmaps.to(inputs.device, torch.float32)
        pixels = maps[0].numel()
        spans = runs(maps, [*bands, *weigh])
        masks, place = distinct_masks(spans[:, : len(bands)], pixels)
        hides = (masks.starts > 0) | (masks.stops < pixels)
        whole = masks.images[~hides]
        self.highest = -1 if targets is None else int(targets.max())
        if targets is None:
            logits = self._logits(inputs)
            goals, logits = logits.argmax(1), logits[whole]
        else:
            logits = self._logits(inputs if len(whole) == len(inputs) else inputs[whole])
            goals = targets.to(inputs.device)
        wanted = goals[masks.images]
        confidences = torch.empty(len(wanted), dtype=torch.float32, device=inputs.device)
        named = torch.empty_like(confidences, dtype=torch.int32)
        if len(whole):
            named[~hides], confidences[~hides] = _judge(logits, wanted[~hides])
        asked = hides.nonzero()[:, 0]
        layout = self.classifier.memory_format
        masker = Masker(inputs, hidden, ranks(maps), masks.rows(asked), layout)

        def one(start: int, stop: int) -> None:
            rows = asked[start:stop]
            logits = self._answer(masker.batch(start, stop))
            named[rows], confidences[rows] = _judge(logits, wanted[rows])
            self.tick(stop / len(asked))

        self._in_batches(len(asked), one, masker.drop_buffers)
        first, last = spans[:, len(bands) :].cpu().unbind(-1)
        place = place.cpu()
        return Predictions(
            bands=tuple(bands),
            named=named.cpu()[place],
            confidences=confidences.cpu()[place],
            weighed=tuple(weigh),
            shares=(last - first).double() / pixels,
            targets=goals.cpu(),
            calls=masks.images.bincount(minlength=len(maps)).cpu(),
        )

    def views(self, images: Tensor, filler: Tensor, masks: Tensor, views: Views) -> Tensor:
        """Return the predicted class of each view of a group on the device, on the CPU: [T]."""
        inputs, hidden = self._normalized(images, filler)
        named = torch.empty(len(views.images), dtype=torch.long, device=inputs.device)

        def one(start: int, stop: int) -> None:
            rows = views.images[start:stop].to(inputs.device)
            mask = masks[views.heatmaps[start:stop].to(masks.device)].to(inputs)[:, None]
            # At weights 0 and 1 lerp returns its ends to the bit.
            batch = torch.lerp(hidden[rows] if len(hidden) > 1 else hidden, inputs[rows], mask)
            batch = batch.contiguous(memory_format=self.classifier.memory_format)
            logits = self._answer(batch)
            broken = logits.softmax(1)[:, 0].isnan()
            named[start:stop] = logits.argmax(1).masked_fill(broken, NO_CLASS)
            self.tick(stop / len(named))

        self._in_batches(len(named), one)
        return named.cpu()

    def _normalized(self, images: Tensor, filler: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.classifier.normalize(filler.expand(-1, images.shape[1], -1, -1))
        return self.classifier.normalize(images), hidden

    def _answer(self, batch: Tensor) -> Tensor:
        """Return the logits of a batch as float32; raise if a target is no class of the model."""
        n = len(batch)
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
        if self.classifier.device.type not in _FEW_SIZES:
            return n
        step = -(-self.batch_size // _SIZES)
        return min(self.batch_size, -(-n // step) * step)

    def _logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of unmasked inputs: [N,C,H,W] -> [N,classes]."""
        parts: list[Tensor] = [inputs.new_empty(0, 0, dtype=torch.float32)]

        def one(start: int, stop: int) -> None:
            batch = inputs[start:stop].clone(memory_format=self.classifier.memory_format)
            # A copy, because a compiled model may return the same memory at each call.
            parts.append(self._answer(batch).clone())

        self._in_batches(len(inputs), one)
        return torch.cat(parts[1:] or parts)

    def _in_batches(
        self, total: int, one: Callable[[int, int], None], drop: Callable[[], None] = lambda: None
    ) -> None:
        """Call `one(start, stop)` per batch; out of memory, call `drop` and halve the batch."""
        start = 0
        while start < total:
            stop = min(start + self.batch_size, total)
            try:
                one(start, stop)
                start = stop
                continue
            except torch.OutOfMemoryError:
                pass  # what the model held is freed once the exception is gone
            drop()
            size = halved(self._room(stop - start), stacklevel=6)
            self.batch_size = self.known[self.case] = size


def _judge(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted class and the softmax of the target: [N,C] -> [N], [N]."""
    confidence = logits.softmax(1).gather(1, targets[:, None])[:, 0]
    named = logits.argmax(1).masked_fill(confidence.isnan(), NO_CLASS)
    return named.to(torch.int32), confidence
