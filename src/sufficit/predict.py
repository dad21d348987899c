"""The only loop that sends masked images to a model."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sufficit.bands import ranks, runs, shares
from sufficit.classifiers import Classifier
from sufficit.errors import UserError
from sufficit.fills import fill_for
from sufficit.types import Answers, Band, Progress

_GROUP_ELEMENTS = 2**25  # of images held ready at once; masks are never stored
_BATCH_ELEMENTS = {"cuda": 2**27, "cpu": 2**20}


@dataclass(frozen=True)
class _Tasks:
    """The distinct masks of a group of images, sorted by image."""

    images: list[int]  # [T] which image
    starts: Tensor  # [T] on the device
    stops: Tensor  # [T] on the device


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
) -> Answers:
    """Ask the model of every image through every band: [N,C,H,W], [N,H,W] -> [N,B].

    Masks that coincide are asked once. `weigh` names bands whose size alone is wanted. Without
    targets, the model's own predictions are the targets, at one more call an image.
    """
    loop = _Loop(classifier, batch_size or auto_batch_size(images, classifier.device))
    parts: list[Answers] = []
    group = max(1, min(64, _GROUP_ELEMENTS // images[0].numel()))
    with torch.no_grad(), classifier.in_eval_mode():
        for start in range(0, len(images), group):
            part = slice(start, start + group)
            device_images = images[part].to(classifier.device, torch.float32)
            filler = fill_for(device_images, fill, part)
            wanted = None if targets is None else targets[part]
            parts.append(loop.group(device_images, filler, heatmaps[part], wanted, bands, weigh))
            if progress:
                progress(min(start + group, len(images)), len(images))
    return Answers.join(parts)


def auto_batch_size(images: Tensor, device: torch.device) -> int:
    """A power of two that keeps the device busy: about a million numbers on a CPU, 32 on a GPU."""
    elements = _BATCH_ELEMENTS.get(device.type, 2**22)
    fitting = max(1, elements // images[0].numel())
    return min(4096, 1 << (fitting.bit_length() - 1))


class _Loop:
    """Sends tasks to the model a batch at a time, in smaller batches once memory ran out."""

    def __init__(self, classifier: Classifier, batch_size: int) -> None:
        self.classifier = classifier
        self.batch_size = batch_size

    def group(
        self,
        images: Tensor,
        filler: Tensor,
        heatmaps: Tensor,
        targets: Tensor | None,
        bands: Sequence[Band],
        weigh: Sequence[Band],
    ) -> Answers:
        """The answers for a group of images on the device."""
        inputs = self.classifier.normalize(images)
        hidden = self.classifier.normalize(filler.expand(-1, images.shape[1], -1, -1))
        maps = heatmaps.to(inputs.device, torch.float32)
        own = targets is None
        goals = self._own_targets(inputs) if targets is None else targets.to(inputs.device)
        tasks, place, calls = _distinct(runs(maps, bands), maps[0].numel())
        maker = _Masker(inputs, hidden, ranks(maps), self.classifier.memory_format)
        hits, confidences = self._ask(maker, tasks, goals)
        return Answers(
            tuple(bands),
            hits.cpu()[place],
            confidences.cpu()[place],
            tuple(weigh),
            shares(maps, weigh).cpu(),
            goals.cpu(),
            calls + int(own),
        )

    def _own_targets(self, inputs: Tensor) -> Tensor:
        found = inputs.new_empty(len(inputs), dtype=torch.long)

        def one(start: int, stop: int) -> None:
            batch = inputs[start:stop].clone(memory_format=self.classifier.memory_format)
            found[start:stop] = self.classifier.logits_of(batch).argmax(1)

        self._in_batches(len(inputs), one)
        return found

    def _ask(self, maker: "_Masker", tasks: _Tasks, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the target came first, and its softmax, for each task: [T], [T]."""
        total = len(tasks.images)
        goals = targets[torch.tensor(tasks.images, device=targets.device)]
        highest = int(targets.max())
        confidences = torch.empty(total, dtype=torch.float32, device=targets.device)
        hits = torch.empty_like(confidences)

        def one(start: int, stop: int) -> None:
            logits = self.classifier.logits_of(maker.masked(tasks, start, stop)).float()
            _check_targets(highest, logits)
            goal = goals[start:stop, None]
            confidence = logits.softmax(1).gather(1, goal)[:, 0]
            hit = (logits.argmax(1) == goal[:, 0]).float()
            confidences[start:stop] = confidence
            hits[start:stop] = hit.masked_fill(confidence.isnan(), torch.nan)

        self._in_batches(total, one)
        return hits, confidences

    def _in_batches(self, total: int, one: Callable[[int, int], None]) -> None:
        start = 0
        while start < total:
            stop = min(start + self.batch_size, total)
            try:
                one(start, stop)
            except torch.OutOfMemoryError:
                self._halve()
                continue
            start = stop

    def _halve(self) -> None:
        if self.batch_size == 1:
            raise UserError(
                "out of memory at batch size 1: use smaller images, a lower precision or another"
                " device"
            )
        self.batch_size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warnings.warn(
            f"out of memory: going on with batches of {self.batch_size}",
            RuntimeWarning,
            stacklevel=2,
        )


class _Masker:
    """Makes masked inputs in a buffer of its own, from inputs that are already normalised.

    Normalising first and masking after gives the same numbers as the other way round, and leaves
    one pass over memory for each mask.
    """

    def __init__(
        self, inputs: Tensor, hidden: Tensor, rank: Tensor, layout: torch.memory_format
    ) -> None:
        self.inputs = inputs.contiguous(memory_format=layout)
        self.hidden = hidden
        self.rank = rank
        self.layout = layout
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def masked(self, tasks: _Tasks, start: int, stop: int) -> Tensor:
        """Keep each task's run of ranks, fill the rest: tasks start..stop -> [T,C,H,W]."""
        batch, keep, below = (buffer[: stop - start] for buffer in self._buffers(stop - start))
        for image, first, last in _stretches(tasks.images, start, stop):
            here = slice(first - start, last - start)
            rank = self.rank[image]
            torch.ge(rank, tasks.starts[first:last, None, None], out=keep[here])
            torch.lt(rank, tasks.stops[first:last, None, None], out=below[here])
            mask = keep[here].mul_(below[here])[:, None]
            hidden = self.hidden[image if len(self.hidden) > 1 else 0]
            # At weights 0 and 1 lerp gives its ends to the bit, and is far faster than where.
            torch.lerp(hidden, self.inputs[image], mask, out=batch[here])
        return batch

    def _buffers(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.buffers is None or len(self.buffers[0]) < size:
            self.buffers = None
            c, h, w = self.inputs.shape[1:]
            empty = self.inputs.new_empty
            batch = torch.empty_like(empty(size, c, h, w), memory_format=self.layout)
            self.buffers = (batch, empty(size, h, w), empty(size, h, w))
        return self.buffers


def _distinct(found: Tensor, pixels: int) -> tuple[_Tasks, Tensor, Tensor]:
    """Tasks for the distinct runs [N,B,2], where each band's answer will be [N,B], calls [N]."""
    n, width = len(found), pixels + 1
    image = torch.arange(n, device=found.device)[:, None]
    codes = (image * width + found[..., 0]) * width + found[..., 1]
    distinct, place = codes.unique(return_inverse=True)
    owner = distinct // width**2
    dtype = torch.float32 if pixels <= 2**24 else torch.float64
    starts, stops = (distinct // width % width).to(dtype), (distinct % width).to(dtype)
    calls = owner.bincount(minlength=n).cpu()
    return _Tasks(owner.tolist(), starts, stops), place.cpu(), calls


def _stretches(images: list[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """The stretches of one image in a batch of tasks: (image, first, last)."""
    cuts = [i for i in range(start + 1, stop) if images[i] != images[i - 1]]
    edges = [start, *cuts, stop]
    return [(images[a], a, b) for a, b in pairwise(edges)]


def _check_targets(highest: int, logits: Tensor) -> None:
    if highest >= logits.shape[1]:
        raise UserError(
            f"targets must lie in 0..{logits.shape[1] - 1}, the model has {logits.shape[1]}"
            f" classes, got {highest}"
        )
