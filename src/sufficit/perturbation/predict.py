"""The only loop that sends masked images to a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier
from sufficit.errors import UserError
from sufficit.perturbation.bands import ranks, runs
from sufficit.perturbation.fills import fill_for
from sufficit.perturbation.masking import Masker, Tasks, masks_of
from sufficit.perturbation.memory import halved
from sufficit.perturbation.types import NO_CLASS, Band, Predictions, Progress, Views

_GROUP_ELEMENTS = {"cuda": 2**26}  # of images held ready at once; masks are never stored
_GROUP_IMAGES = {"cuda": 256}
_BATCH_ELEMENTS = {"cuda": 2**27, "cpu": 2**19}
_FEW_SIZES = ("cuda",)  # where a batch of a new size is slow at first: libraries plan for each
_SIZES = 8  # of batches, there


@dataclass(frozen=True)
class _Distinct:
    """The distinct masks of a group of images, sorted by image."""

    images: Tensor  # [T] which image
    starts: Tensor  # [T]
    stops: Tensor  # [T]
    hides: Tensor  # [T] whether the mask hides anything
    place: Tensor  # [N,B] where each band's answer is, on the CPU
    calls: Tensor  # [N] masks of each image, on the CPU

    @property
    def bare(self) -> Tensor:
        """The images that are asked whole, in order: one for each mask that hides nothing."""
        return self.images[~self.hides]

    def tasks(self) -> Tasks:
        """Those that hide something."""
        asked = self.hides
        return Tasks(self.images[asked].tolist(), self.starts[asked], self.stops[asked])


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
    """Ask the model of every image through every band: [N,C,H,W], [N,H,W] -> [N,B].

    Masks that coincide are asked once. `weigh` names bands whose size alone is wanted. Without
    targets, the model's own predictions are the targets. A whole image is asked only where it is
    a target's source or some band keeps all of it. Heatmaps of several methods may be given at
    once, one method's after the other's: [MN,H,W] -> [MN,B].
    """
    loop = _Loop(classifier, images, batch_size)
    parts: list[Predictions] = []
    total, start = len(heatmaps), 0
    with torch.no_grad(), classifier.in_eval_mode():
        for here in _groups(total, images, classifier.device):
            part, rows = slice(start, start + here), _rows(start, here, len(images))
            device_images = images[rows].to(classifier.device, torch.float32)
            filler = fill_for(device_images, fill, rows)
            wanted = None if targets is None else targets[rows]
            loop.tick = _ticker(progress, start, here, total)
            parts.append(loop.group(device_images, filler, heatmaps[part], wanted, bands, weigh))
            start += here
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
    """The class the model names for each image seen through a heatmap's value band: [T].

    Images [N,C,H,W] and heatmaps [M,H,W] need not belong together; -1 stands for NaN. Targets are
    only checked: the model must have such classes.
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
            part = used[start : start + count]
            device_images = images[part].to(classifier.device, torch.float32)
            here = order[done : ends[start + count - 1]]
            rows = Views(place[here] - start, views.heatmaps[here])
            loop.tick = _ticker(progress, done, len(here), len(order))
            filler = fill_for(device_images, fill)
            named[here] = loop.views(device_images, filler, masks, rows)
            start, done = start + count, done + len(here)
    return named


def check_batch_size(batch_size: int | None) -> None:
    """Raise unless it is a whole number above 0, or left out."""
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise UserError(
            f"batch_size must be 1 or more, got {batch_size}: leave it out for the best one"
        )


def _groups(total: int, images: Tensor, device: torch.device) -> list[int]:
    """How many images are held ready at a time, about as many each time."""
    elements, most = _GROUP_ELEMENTS.get(device.type, 2**25), _GROUP_IMAGES.get(device.type, 64)
    groups = -(-total // max(1, min(most, elements // images[0].numel())))
    return [total * (k + 1) // groups - total * k // groups for k in range(groups)]


def _rows(start: int, count: int, n: int) -> slice | list[int]:
    """Whose images so many heatmaps are, begun at one, where those of n images come over again."""
    if start % n + count <= n:
        return slice(start % n, start % n + count)
    return [row % n for row in range(start, start + count)]


def _ticker(
    progress: Progress | None, before: int, here: int, total: int
) -> Callable[[float], None]:
    """Tells the progress in images from the share of this group's masks that is done."""

    def tick(share: float) -> None:
        if progress:
            progress(before + share * here, total)

    return tick


def auto_batch_size(images: Tensor, device: torch.device) -> int:
    """A power of two that keeps a GPU busy, or stays in a CPU's cache."""
    elements = _BATCH_ELEMENTS.get(device.type, 2**22)
    fitting = max(4, elements // images[0].numel())
    return min(4096, 1 << (fitting.bit_length() - 1))


_fitting: "WeakKeyDictionary[nn.Module, dict[object, int]]" = WeakKeyDictionary()
"""The batch a model had memory for where it once ran out, by device, precision and image size."""


class _Loop:
    """Sends tasks to the model a batch at a time, in smaller batches once memory ran out."""

    def __init__(self, classifier: Classifier, images: Tensor, batch_size: int | None) -> None:
        self.classifier = classifier
        self.known = _fitting.setdefault(classifier.bare, {})
        self.case = (classifier.device, classifier.dtype, tuple(images.shape[1:]))
        wanted = batch_size or auto_batch_size(images, classifier.device)
        self.batch_size = min(wanted, self.known.get(self.case, wanted))
        self.highest = -1  # of the classes wanted
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
        """The answers for a group of images on the device."""
        inputs, hidden = self._prepared(images, filler)
        maps = heatmaps.to(inputs.device, torch.float32)
        spans = runs(maps, [*bands, *weigh])
        distinct = _distinct(spans[:, : len(bands)], maps[0].numel())
        self.highest = -1 if targets is None else int(targets.max())
        if targets is None:
            whole = self._logits(inputs)
            goals, known = whole.argmax(1), whole[distinct.bare]
        else:
            all_bare = len(distinct.bare) == len(inputs)
            known = self._logits(inputs if all_bare else inputs[distinct.bare])
            goals = targets.to(inputs.device)
        maker = Masker(inputs, hidden, ranks(maps), self.classifier.memory_format)
        named, confidences = self._ask(maker, distinct, goals, known)
        return Predictions(
            tuple(bands),
            named.cpu()[distinct.place],
            confidences.cpu()[distinct.place],
            tuple(weigh),
            _shares(spans[:, len(bands) :], maps[0].numel()),
            goals.cpu(),
            distinct.calls,
        )

    def views(self, images: Tensor, filler: Tensor, masks: Tensor, views: Views) -> Tensor:
        """The class named for each view of a group of images on the device, on the CPU: [T]."""
        inputs, hidden = self._prepared(images, filler)
        named = torch.empty(len(views.images), dtype=torch.long, device=inputs.device)

        def one(start: int, stop: int) -> None:
            rows = views.images[start:stop].to(inputs.device)
            mask = masks[views.heatmaps[start:stop].to(masks.device)].to(inputs)[:, None]
            # At weights 0 and 1 lerp gives its ends to the bit.
            batch = torch.lerp(hidden[rows] if len(hidden) > 1 else hidden, inputs[rows], mask)
            batch = batch.contiguous(memory_format=self.classifier.memory_format)
            named[start:stop] = _name(self._answer(batch))
            self.tick(stop / len(named))

        self._in_batches(len(named), one)
        return named.cpu()

    def _prepared(self, images: Tensor, filler: Tensor) -> tuple[Tensor, Tensor]:
        """Images and what hides them, normalised."""
        hidden = self.classifier.normalize(filler.expand(-1, images.shape[1], -1, -1))
        return self.classifier.normalize(images), hidden

    def _answer(self, batch: Tensor) -> Tensor:
        """Logits of a batch as float32, once it is sure that the model has the classes wanted."""
        n = len(batch)
        logits = self.classifier.logits_of(self._filled_up(batch))[:n].float()
        _check_targets(self.highest, logits.shape[1])
        return logits

    def _filled_up(self, batch: Tensor) -> Tensor:
        """A batch with its last image once more, as often as there is room for."""
        n = len(batch)
        more = self._room(n) - n
        if not more:
            return batch
        whole = torch.cat([batch, batch[-1:].expand(more, -1, -1, -1)])
        return whole.contiguous(memory_format=self.classifier.memory_format)

    def _room(self, n: int) -> int:
        """With how many images a batch of n is sent."""
        if self.classifier.device.type not in _FEW_SIZES:
            return n
        step = -(-self.batch_size // _SIZES)
        return min(self.batch_size, -(-n // step) * step)

    def _logits(self, inputs: Tensor) -> Tensor:
        """Logits of the images as they are: [N,C,H,W] -> [N,classes]."""
        parts: list[Tensor] = [inputs.new_empty(0, 0, dtype=torch.float32)]

        def one(start: int, stop: int) -> None:
            batch = inputs[start:stop].clone(memory_format=self.classifier.memory_format)
            # A copy, because a compiled model may hand out the same memory at each call.
            parts.append(self._answer(batch).clone())

        self._in_batches(len(inputs), one)
        return torch.cat(parts[1:] or parts)

    def _ask(
        self, maker: Masker, distinct: _Distinct, targets: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The class that came first, and the target's softmax, for each distinct mask: [T], [T].

        The logits for masks that hide nothing are known already.
        """
        confidences = torch.empty(len(distinct.images), dtype=torch.float32, device=targets.device)
        named = torch.empty_like(confidences, dtype=torch.int32)
        if len(known):
            bare = ~distinct.hides
            named[bare], confidences[bare] = _judge(known, targets[distinct.bare])
        asked = distinct.hides.nonzero()[:, 0]
        tasks = distinct.tasks()
        goals = targets[distinct.images[asked]]

        def one(start: int, stop: int) -> None:
            logits = self._answer(maker.masked(tasks, start, stop))
            rows = asked[start:stop]
            named[rows], confidences[rows] = _judge(logits, goals[start:stop])
            self.tick(stop / len(asked))

        self._in_batches(len(asked), one, maker.drop)
        return named, confidences

    def _in_batches(
        self, total: int, one: Callable[[int, int], None], drop: Callable[[], None] = lambda: None
    ) -> None:
        """Call `one` on every stretch of a batch's size; when memory runs out, drop and halve."""
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


def _distinct(found: Tensor, pixels: int) -> _Distinct:
    """The distinct runs among those of every image and band: [N,B,2]."""
    n, width = len(found), pixels + 1
    image = torch.arange(n, device=found.device)[:, None]
    codes = (image * width + found[..., 0]) * width + found[..., 1]
    distinct, place = codes.unique(return_inverse=True)
    owner = distinct // width**2
    starts, stops = distinct // width % width, distinct % width
    hides = (starts > 0) | (stops < pixels)
    dtype = torch.float32 if pixels <= 2**24 else torch.float64
    calls = owner.bincount(minlength=n).cpu()
    return _Distinct(owner, starts.to(dtype), stops.to(dtype), hides, place.cpu(), calls)


def _shares(spans: Tensor, pixels: int) -> Tensor:
    """Share of the pixels that each run keeps, on the CPU: [N,B,2] -> [N,B]."""
    start, stop = spans.cpu().unbind(-1)
    return (stop - start).double() / pixels


def _judge(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The class that comes first, and the target's softmax: [N,C] -> [N], [N]."""
    confidence = logits.softmax(1).gather(1, targets[:, None])[:, 0]
    named = logits.argmax(1).masked_fill(confidence.isnan(), NO_CLASS)
    return named.to(torch.int32), confidence


def _name(logits: Tensor) -> Tensor:
    """The class that comes first, or NO_CLASS where the model says NaN: [N,C] -> [N]."""
    return logits.argmax(1).masked_fill(logits.softmax(1)[:, 0].isnan(), NO_CLASS)


def _check_targets(highest: int, classes: int) -> None:
    if highest >= classes:
        raise UserError(
            f"targets must lie in 0..{classes - 1}, the model has {classes} classes, got {highest}"
        )
