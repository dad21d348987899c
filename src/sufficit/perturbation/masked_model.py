"""A model, and what it sees in place of hidden pixels: the only way to ask about masked images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from sufficit.classifier.acceleration import FastCopy
from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.perturbation.bands import EVERYTHING, NOTHING, Band, runs
from sufficit.perturbation.fills import rows_of
from sufficit.perturbation.predict import predict, predict_views, predict_whole, usual_batch
from sufficit.perturbation.predictions import NO_CLASS, Predictions, Score, ViewPredictions
from sufficit.perturbation.sampling import Sampling

Fill = str | Tensor


@dataclass(frozen=True, eq=False)
class MaskedModel:
    """A classifier with one fill for hidden pixels."""

    model: Classifier
    fill: Fill = "black"
    batch_size: int | None = None
    faster: FastCopy | None = None  # of the model, for masked images

    def runner(self, images: Tensor) -> Classifier:
        """Return what masked images are sent to: the model, or its faster copy."""
        if self.faster is None:
            return self.model
        shape = tuple(images.shape[1:])
        return self.faster.of(shape, usual_batch(self.model, shape))

    def ask(
        self,
        batch: Batch,
        heatmaps: Tensor,
        bands: Sequence[Band],
        *,
        sizes: Sequence[Band] = (),
        drawing: Sampling | None = None,
        seed: int = 0,
    ) -> Predictions:
        """Return answers for bands of heatmaps of M sources: [MN,H,W] -> [MN,1+B].

        Rows are the images of one source after the other. The first column is the whole image,
        which is taken from the batch. `sizes` are bands of which only the size is wanted. With
        `drawing` each image is asked some of the bands, drawn by seed and name: the same ones for
        every model, fill and source.
        """
        whole = self.whole(batch)
        drawn = None if drawing is None else drawing.draw(batch.names, seed)
        masked = predict(
            self.runner(batch.images),
            batch.images,
            heatmaps,
            batch.targets,
            bands,
            weigh=sizes,
            fill=self.fill,
            batch_size=self.batch_size,
            drawn=drawn,
            whole=whole,
        )
        # Sources share the images, so what is known of the whole images is theirs too.
        sources = len(heatmaps) // len(batch)
        named = [whole.named.repeat(sources, 1), masked.named]
        confidences = [whole.confidences.repeat(sources, 1), masked.confidences]
        answers = replace(
            masked,
            bands=(EVERYTHING, *bands),
            named=torch.cat(named, dim=1),
            confidences=torch.cat(confidences, dim=1),
        )
        if drawing is None or masked.drawn is None:
            return answers
        # The whole image is band 0 now, so the numbers of the others move by one.
        numbers = F.pad(masked.drawn + 1, (1, 0))
        return replace(answers, drawn=numbers, counts=drawing.counts_with_whole)

    def views(
        self,
        images: Tensor,
        masks: Tensor,
        views: tuple[Tensor, Tensor],
        *,
        targets: Tensor | None = None,
        score: Score | None = None,
        whole: Tensor | None = None,
    ) -> ViewPredictions:
        """Return answers for any of the images through any of the masks: [N,C,H,W], [M,H,W] -> [T].

        They are on the model's device, which is not waited for.

        - images: [N,C,H,W] in 0..1.
        - masks: [M,H,W], true or 1 where the image is shown.
        - views: the numbers of image and mask of each view, each [T].
        - targets: the class of each view [T]; None: no confidences.
        - score: takes the place of the confidence.
        - whole: the `whole_values` of the images, where they are known: [N].
        """
        return predict_views(
            self.runner(images),
            images,
            masks,
            views,
            targets=targets,
            fill=self.fill,
            batch_size=self.batch_size,
            score=score,
            whole=whole,
        )

    def everything(
        self,
        batch: Batch,
        bands: Sequence[Band],
        *,
        sizes: Sequence[Band] = (),
        nothing: Predictions | None = None,
    ) -> Predictions:
        """Return answers for bands of maps of ones: [N,1+B], the whole image first.

        A band of values keeps all pixels or none, so that the model is asked at most for images of
        which nothing is shown, and not if their answers `nothing` are known: [N,1]. A band of ranks
        would cut a map that has no order: its answers are NaN.
        """
        whole = self.whole(batch)
        # An empty image is a band that keeps no rank, of any map.
        if nothing is None:
            no_maps = torch.zeros(len(batch), *batch.size, device="cpu")
            asked = self.ask(batch, no_maps, [NOTHING])
            calls = asked.calls
            nothing = asked.column(NOTHING)
        else:
            calls = torch.zeros_like(whole.calls)
        ones = torch.ones(1, *batch.size, device="cpu")
        first, last = runs(ones, [*bands, *sizes])[0].unbind(-1)
        shares = (last - first).double() / ones.numel()
        keeps_all = shares[: len(bands)] == 1
        by_rank = torch.tensor([band.axis == "rank" for band in bands], dtype=torch.bool)
        named = torch.where(keeps_all, whole.named, nothing.named)
        confidences = torch.where(keeps_all, whole.confidences, nothing.confidences)
        return Predictions(
            bands=(EVERYTHING, *bands),
            named=torch.cat([whole.named, named.masked_fill(by_rank, NO_CLASS)], dim=1),
            confidences=torch.cat(
                [whole.confidences, confidences.masked_fill(by_rank, torch.nan)], dim=1
            ),
            weighed=tuple(sizes),
            shares=shares[len(bands) :].expand(len(batch), -1),
            targets=whole.targets,
            calls=calls,
        )

    def whole(self, batch: Batch) -> Predictions:
        """Return answers for the whole images: [N,1]."""
        return whole_images(self.model, batch, self.batch_size)

    def over(self, images: Sequence[int]) -> "MaskedModel":
        """Return the same for some of the images, where each image has a fill of its own."""
        return replace(self, fill=rows_of(self.fill, list(images)))


def whole_images(model: Classifier, batch: Batch, batch_size: int | None = None) -> Predictions:
    """Return what a model says of the whole images, asked once however many probes there are."""
    return batch.remember(
        ("whole", model),
        lambda: predict_whole(model, batch.images, batch.targets, batch_size=batch_size),
    )


def finite(answers: Predictions) -> list[bool]:
    """Return whether the model gave numbers for each whole image."""
    is_finite: list[bool] = (answers.classes_of([EVERYTHING])[:, 0] != NO_CLASS).tolist()
    return is_finite
