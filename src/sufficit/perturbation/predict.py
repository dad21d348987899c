"""The only loop that sends masked images to a model."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sufficit.classifier.acceleration import is_compiled
from sufficit.classifier.classifier import Classifier, check_range
from sufficit.errors import UserError, warn_user
from sufficit.perturbation import tokens
from sufficit.perturbation.bands import EVERYTHING, Band, distinct_masks, ranks_and_runs
from sufficit.perturbation.fills import ROAD, Masker, ViewMasker, fill_for, rows_of
from sufficit.perturbation.predictions import (
    Predictions,
    Score,
    ViewPredictions,
    confidence,
    judge,
    only_logit,
    relative,
)
from sufficit.progress import passed

AnyMasker = Masker | ViewMasker | tokens.TokenMasker

_GROUP_ELEMENTS = {"cuda": 2**26}  # of images on the device at once; masks are never stored
_GROUP_IMAGES = {"cuda": 256}
_BATCH_ELEMENTS = {"cuda": 2**27, "cpu": 2**19}
_FEW_SIZES = ("cuda",)  # where libraries plan for each new batch size, which is slow
_SIZES = 8  # of batches, there


# `predict` and `predict_views` have many parameters: everything that asks a model does it here.
# `MaskedModel` is their short form, for a model with a fill.
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
    drawn: Tensor | None = None,
    whole: Predictions | None = None,
) -> Predictions:
    """Return the model's prediction for every image in every band: [N,C,H,W], [N,H,W] -> [N,B].

    Equal masks are sent once. `weigh` names bands of which only the size is wanted. Without
    targets, the model's own predictions are the targets. Whole images are sent only where a
    target is missing or a band keeps all pixels. Heatmaps of M methods may come in one tensor,
    method after method: [MN,H,W] -> [MN,B]. With `drawn`, numbers of bands, each image is asked its
    own ones only: [N,K] -> [N,K] or [MN,K]. `whole` are answers for the whole images [N,1], which
    are then not asked again. Calls count masks that hide something.
    """
    loop = _Loop(classifier, images, fill, batch_size)
    parts: list[Predictions] = []
    total = len(heatmaps)
    n = len(images)
    start = 0
    with torch.no_grad(), classifier.in_eval_mode():
        for count in _groups(total, images, classifier.device):
            # The maps of all methods come one after the other, so images repeat after n.
            rows: slice | list[int] = [row % n for row in range(start, start + count)]
            if start % n + count <= n:
                rows = slice(start % n, start % n + count)  # copies nothing
            inputs, hidden = loop.normalized(rows)
            maps = heatmaps[start : start + count].to(inputs.device)
            # Cut maps are float64: their order has more steps than float32 can tell apart.
            maps = maps if maps.dtype == torch.float64 else maps.float()
            places, spans = ranks_and_runs(maps, [*bands, *weigh])
            chosen = None if drawn is None else drawn[rows]
            asked = spans[:, : len(bands)]
            if chosen is not None:
                numbers = chosen.to(spans.device, torch.long)[..., None].expand(-1, -1, 2)
                asked = asked.gather(1, numbers)
            wanted = None if targets is None else targets[rows]
            goals, named, confidences, calls = loop.group(
                inputs,
                hidden,
                places,
                asked,
                targets=wanted,
                known=None if whole is None else whole.rows(rows),
            )
            first, last = spans[:, len(bands) :].cpu().unbind(-1)
            parts.append(
                Predictions(
                    bands=tuple(bands),
                    named=named,
                    confidences=confidences,
                    weighed=tuple(weigh),
                    shares=(last - first).double() / maps[0].numel(),
                    targets=goals,
                    calls=calls,
                    drawn=chosen,
                )
            )
            start += count
    return Predictions.join(parts)


def predict_whole(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    *,
    batch_size: int | None = None,
) -> Predictions:
    """Return the prediction for whole images [N,C,H,W], as for the band of everything: [N,1].

    Without targets, the predictions are the targets. It counts as no call.
    """
    loop = _Loop(classifier, images, "black", batch_size)
    loop.highest = -1 if targets is None else int(targets.max())
    own_score = classifier.score is not None
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    start = 0
    with torch.no_grad(), classifier.in_eval_mode():
        for count in _groups(len(images), images, classifier.device):
            rows = slice(start, start + count)
            inputs, _ = loop.normalized(rows)
            logits = loop.each(inputs, loop.answer)
            if targets is None or own_score:
                goals = logits.argmax(1)
            else:
                goals = targets[rows].to(logits.device)
            named, confidences = judge(logits, goals, loop.score)
            if own_score:
                named, confidences = relative(confidences, logits[:, 0])
            found.append((named, confidences, goals))
            start += count
        named, confidences, goals = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    return Predictions(
        bands=(EVERYTHING,),
        named=named[:, None],
        confidences=confidences[:, None],
        weighed=(),
        shares=torch.zeros(len(named), 0, dtype=torch.float64, device="cpu"),
        targets=goals,
        calls=torch.zeros(len(named), dtype=torch.long, device="cpu"),
    )


def predict_views(
    classifier: Classifier,
    images: Tensor,
    masks: Tensor,
    views: tuple[Tensor, Tensor],
    *,
    targets: Tensor | None = None,
    fill: str | Tensor = "black",
    batch_size: int | None = None,
    score: Score | None = None,
    whole: Tensor | None = None,
) -> ViewPredictions:
    """Return the prediction for each view, on the model's device, which is not waited for.

    `views` are the numbers of the image and of the mask of each view: any of the images [N,C,H,W]
    is seen through any of the masks [M,H,W], bool or the share of the image in 0..1. Targets are
    the class of each view: [T]. `score` takes the place of the confidence. `whole` are the
    `whole_values` of the images, where they are known: [N].
    """
    loop = _Loop(classifier, images, fill, batch_size)
    loop.score = score or loop.score
    loop.highest = -1 if targets is None or not len(targets) else int(targets.max())
    # Image by image, so that each is on the device once; `ends` is where the views of each end.
    used, place = views[0].unique(return_inverse=True)
    order = place.argsort(stable=True)
    ends = place.bincount().cumsum(0).tolist()
    if loop.vit:
        masks = tokens.patches_of(masks, loop.vit.patch)
    named = torch.empty(len(order), dtype=torch.long, device=classifier.device)
    confidences = torch.empty(len(order), device=classifier.device)
    start = done = 0
    with torch.no_grad(), classifier.in_eval_mode():
        for count in _groups(len(used), images, classifier.device):
            rows = used[start : start + count].tolist()
            inputs, hidden = loop.normalized(rows)
            here = order[done : ends[start + count - 1]]
            seen = queued(place[here] - start, inputs.device)
            through = queued(views[1][here], masks.device)
            sent = torch.arange(len(here), device=inputs.device)
            goals = torch.zeros_like(sent)
            if targets is not None:
                goals = queued(targets[here].to(goals.dtype), inputs.device)
            masker: AnyMasker
            if loop.vit:
                kept = masks[through].to(inputs.device)
                masker, sent = loop.token_masker(inputs, seen, kept)
            else:
                masker = ViewMasker(
                    inputs=inputs,
                    hidden=hidden,
                    masks=masks,
                    seen=seen,
                    through=through,
                    layout=classifier.memory_format,
                    imputes=loop.imputes,
                )
            rows_here = queued(here, inputs.device)
            found = loop.masked(masker, goals, sent)
            named[rows_here] = found[0].long()
            confidences[rows_here] = found[1]
            start += count
            done += len(here)
    if targets is None:
        confidences.fill_(torch.nan)
    if classifier.score is not None:
        if whole is None:
            whole = torch.zeros(len(images), device="cpu")
            whole[used] = whole_values(classifier, images[used.tolist()], batch_size)
        named, confidences = relative(confidences, whole[views[0]].to(confidences))
    return ViewPredictions(named, confidences)


def queued(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, which a GPU makes once it has done what is queued before.

    From memory that is not pinned a copy to a GPU would make Python wait for all that.
    """
    if device.type != "cuda" or numbers.is_cuda:
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def whole_values(classifier: Classifier, images: Tensor, batch_size: int | None = None) -> Tensor:
    """Return the value of whole images by a score of the user's, NaN without one: [N]."""
    if classifier.score is None:
        return torch.full((len(images),), torch.nan, device="cpu")
    loop = _Loop(classifier, images, "black", batch_size)
    with torch.no_grad(), classifier.in_eval_mode():
        rows = torch.arange(len(images)).split(_groups(len(images), images, classifier.device))
        found = [loop.each(loop.normalized(some.tolist())[0], loop.answer) for some in rows]
    return torch.cat(found)[:, 0].cpu()


def check_batch_size(batch_size: int | None) -> None:
    """Raise unless the batch size is None or a whole number above 0."""
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise UserError(
            f"batch_size must be 1 or more, got {batch_size}: leave it out for the best one"
        )


def halved(failed: int) -> int:
    """Return half of a batch size that was too large for memory, and warn; raise if it was 1."""
    if failed == 1:
        raise UserError(
            "out of memory at batch size 1: use smaller images, a lower precision or another device"
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warn_user(f"out of memory: retrying with batch size {failed // 2}", RuntimeWarning)
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
    elements = _GROUP_ELEMENTS.get(device.type, 2**25)
    most = _GROUP_IMAGES.get(device.type, 64)
    groups = -(-total // max(1, min(most, elements // images[0].numel())))
    return [total * (k + 1) // groups - total * k // groups for k in range(groups)]


_fitting: "WeakKeyDictionary[nn.Module, dict[object, int]]" = WeakKeyDictionary()
"""Batch sizes found after running out of memory, per model, device, precision and image size."""


class _Loop:
    """Sends inputs to the model in batches, in smaller ones once memory ran out."""

    def __init__(
        self, classifier: Classifier, images: Tensor, fill: str | Tensor, batch_size: int | None
    ) -> None:
        self.classifier = classifier
        self.images = images
        self.fill = fill
        # With the fill `drop`, the model in two parts; masks are then unions of patches.
        self.vit = tokens.token_model(classifier, images.shape[2:]) if tokens.drops(fill) else None
        self.imputes = isinstance(fill, str) and fill == ROAD
        # What ran out of memory once is not tried again by the next call.
        self.known = _fitting.setdefault(classifier.bare, {})
        self.case = (classifier.device, classifier.dtype, tuple(images.shape[1:]))
        wanted = batch_size or usual_batch(classifier, images.shape[1:])
        self.batch_size = min(wanted, self.known.get(self.case, wanted))
        self.highest = -1  # of the target classes
        # A score of the user's is the only logit.
        self.score: Score = confidence if classifier.score is None else only_logit

    def normalized(self, rows: slice | list[int]) -> tuple[Tensor, Tensor]:
        """Return some images and their fill on the device, normalised: twice [N or 1,C,H,W]."""
        numbers = (
            rows
            if isinstance(rows, slice)
            else queued(torch.tensor(rows, device="cpu"), self.images.device)
        )
        images = self.images[numbers].to(self.classifier.device, torch.float32)
        filler = fill_for(images, rows_of(self.fill, rows)).expand(-1, images.shape[1], -1, -1)
        return self.classifier.normalize(images), self.classifier.normalize(filler)

    def group(
        self,
        inputs: Tensor,
        hidden: Tensor,
        ranks: Tensor,
        spans: Tensor,
        *,
        targets: Tensor | None,
        known: Predictions | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return targets [N], classes and scores of each run of ranks [N,B], and calls [N].

        Inputs, ranks and runs are those of a group of images that is on the device. `known` are
        the predictions for these images without a mask, if there are any.
        """
        pixels = ranks[0].numel()
        own_score = self.classifier.score is not None
        # A mask that hides nothing is the whole image, which is asked without masking.
        if self.vit:
            kept = tokens.kept_patches(ranks, spans, self.vit.patch)
            owners, kept, place = tokens.distinct_patches(kept)
            hides = ~kept.all(1)
        else:
            owners, starts, stops, place = distinct_masks(spans, pixels)
            hides = (starts > 0) | (stops < pixels)
        asked = hides.nonzero()[:, 0]
        unmasked = (~hides).nonzero()[:, 0]
        whole = owners[unmasked]
        self.highest = -1 if targets is None else int(targets.max())
        if targets is None or own_score:
            every = self.each(inputs, self.answer)
            targets = every.argmax(1)
            logits = every[whole]
        else:
            targets = targets.to(inputs.device)
            if known is None:
                every_image = len(whole) == len(inputs)
                logits = self.each(inputs if every_image else inputs[whole], self.answer)
        goals = targets[owners]
        masker: AnyMasker
        if self.vit:
            masker, order = self.token_masker(inputs, owners[asked], kept[asked])
            asked = asked[order]
        else:
            layout = self.classifier.memory_format
            masker = Masker(
                inputs=inputs.contiguous(memory_format=layout),
                hidden=hidden,
                ranks=ranks,
                owners=owners[asked].tolist(),
                starts=starts[asked],
                stops=stops[asked],
                layout=layout,
                imputes=self.imputes,
            )
        named, confidences = self.masked(masker, goals, asked)
        if len(whole) and known is not None and not own_score:
            seen = whole.cpu()
            named[unmasked] = known.named[seen, 0].to(named)
            confidences[unmasked] = known.confidences[seen, 0].to(confidences)
        elif len(whole):
            named[unmasked], confidences[unmasked] = judge(logits, goals[unmasked], self.score)
        if own_score:
            named, confidences = relative(confidences, every[owners, 0])
        place = place.cpu()
        calls = owners[asked].bincount(minlength=len(inputs)).cpu()
        return targets.cpu(), named.cpu()[place], confidences.cpu()[place], calls

    def token_masker(
        self, inputs: Tensor, owners: Tensor, kept: Tensor
    ) -> tuple[tokens.TokenMasker, Tensor]:
        """Return a masker of the masks' tokens, and the order in which it takes the masks."""
        assert self.vit is not None
        self.vit.check(self.classifier, inputs[:1])
        order = kept.sum(1).argsort(stable=True)
        whole = self.each(inputs, self.vit.embed)
        return tokens.TokenMasker(whole, owners[order], kept[order]), order

    def masked(self, masker: AnyMasker, goals: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return class and score of a masker's inputs, the i-th in row order[i]: twice [T]."""
        confidences = torch.empty(len(goals), dtype=torch.float32, device=goals.device)
        named = torch.empty_like(confidences, dtype=torch.int32)

        def one(start: int, stop: int) -> None:
            rows = order[start:stop]
            logits = self.answer(masker.batch(start, stop))
            named[rows], confidences[rows] = judge(logits, goals[rows], self.score)
            passed(stop - start)

        self._in_batches(len(order), one, masker)
        return named, confidences

    def answer(self, batch: Tensor) -> Tensor:
        """Return the logits of images [N,C,H,W] or tokens [N,T,K]; raise for a missing class."""
        n = len(batch)
        if self.vit and batch.ndim == 3:
            logits = self.classifier.as_logits(self.vit.finish(batch)).float()
        else:
            if more := self._room(n) - n:  # repeat the last image
                batch = torch.cat([batch, batch[-1:].expand(more, -1, -1, -1)])
                batch = batch.contiguous(memory_format=self.classifier.memory_format)
            logits = self.classifier.logits_of(batch)[:n].float()
        check_range(self.highest, logits.shape[1])
        return logits

    def _next(self, left: int) -> int:
        """Return how many of the images that are left go into the next batch."""
        part = self._part
        # A compiled copy answers in two sizes: a few small batches cost less than a filled-up one.
        if is_compiled(self.classifier) and left <= self.batch_size - part:
            return min(left, part)
        return min(left, self.batch_size)

    @property
    def _part(self) -> int:
        """The smaller of the sizes in which a compiled copy answers."""
        return -(-self.batch_size // 4)

    def _room(self, n: int) -> int:
        """Return the number of images that a batch of n is sent with."""
        if is_compiled(self.classifier):  # each size is compiled, so there are two
            return self._part if n <= self._part else self.batch_size
        if self.classifier.device.type not in _FEW_SIZES:
            return n
        step = -(-self.batch_size // _SIZES)
        return min(self.batch_size, -(-n // step) * step)

    def each(self, inputs: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what unmasked inputs are answered with: [N,C,H,W] -> [N,...]."""
        parts: list[Tensor] = [inputs.new_empty(0, 0, dtype=torch.float32)]

        def one(start: int, stop: int) -> None:
            batch = inputs[start:stop].clone(memory_format=self.classifier.memory_format)
            # A copy, because a compiled model may return the same memory at each call.
            parts.append(answer(batch).clone())

        self._in_batches(len(inputs), one)
        return torch.cat(parts[1:] or parts)

    def _in_batches(
        self, total: int, one: Callable[[int, int], None], masker: AnyMasker | None = None
    ) -> None:
        """Call `one(start, stop)` per batch; out of memory, free buffers and halve the batch."""
        start = 0
        counts = masker.counts if isinstance(masker, tokens.TokenMasker) else ()
        while start < total:
            stop = start + self._next(total - start)
            if counts:
                stop = min(stop, bisect_right(counts, counts[start]))
            try:
                one(start, stop)
                start = stop
                continue
            except torch.OutOfMemoryError:
                pass  # what the model held is freed once the exception is gone
            if isinstance(masker, Masker):
                masker.buffers = None  # so that smaller ones can be allocated
            size = halved(self._room(stop - start))
            self.batch_size = self.known[self.case] = size
