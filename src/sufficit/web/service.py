"""One model: explain one image, score the explanation; nothing is kept between calls."""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.data.batch import Batch
from sufficit.errors import EmptyHeatmapWarning, UserError, unknown
from sufficit.evaluation import batch_of, evaluate
from sufficit.explainers import CAMS, EXPLAINERS, Explainer, explain_all, methods_for
from sufficit.explainers.explanation import Methods
from sufficit.explainers.registry import explainer_named
from sufficit.metrics.metric import Schedule
from sufficit.perturbation import bands
from sufficit.perturbation.fills import FILLS
from sufficit.perturbation.heatmaps import resize
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.tokens import DROP
from sufficit.progress import Progress, counting_bar
from sufficit.report import viewer_data
from sufficit.runs.overlays import class_number
from sufficit.sources import Fitted, Maps, cut_at, source_of
from sufficit.sources.certificate import Said, Size, certificates
from sufficit.sources.fitted import FIT_FILLS
from sufficit.sources.kinds import drawn_by
from sufficit.web.forms import (
    LEAST_STEP,
    CurveForm,
    ExplainForm,
    ImageForm,
    RegionForm,
    ScoreForm,
)

COLUMNS = ("insertion_pixel", "deletion_pixel", "base_score", "mask_penalty", "msi")
VALUE_STEP = 0.05  # the tables use 0.01, which takes five times as long
LIKELIEST = 5
ROUNDED = tuple((i + 0.5) / 255 for i in range(255))  # the grid whose steps are 255 M, rounded
Answer = dict[str, Any]  # as JSON has it


@dataclass(frozen=True)
class Service:
    """A classifier with an input size, and the methods and fills that work on it."""

    classifier: Classifier
    name: str
    methods: Mapping[str, Explainer]
    usual: tuple[str, ...]  # methods that run if a request names none
    fills: tuple[str, ...]
    size: tuple[int, int]  # height and width of an input
    classes: tuple[str, ...]  # their names, or numbers
    value_step: float  # of the curves, if a request names none

    @property
    def facts(self) -> Answer:
        """The model, and what a request can ask for."""
        return {
            "name": self.name,
            "classes": list(self.classes),
            "height": self.size[0],
            "width": self.size[1],
            "device": str(self.classifier.device),
            "methods": [
                {
                    "name": name,
                    "about": method.description,
                    "usual": name in self.usual,
                    "class_agnostic": method.class_agnostic,
                }
                for name, method in self.methods.items()
            ],
            "fills": list(self.fills),
            "value_step": self.value_step,
        }

    def explain(self, images: Tensor, form: ExplainForm, progress: Progress) -> Answer:
        """Return the prediction and the heatmaps of one image [1,C,H,W], without masked images."""
        common, probabilities, heatmaps = self._look(images, form, form.methods, progress)
        likeliest = probabilities.nan_to_num(-1).topk(min(LIKELIEST, len(self.classes))).indices
        # A page with one image can hold its maps at full size.
        maps = viewer_data.encode_heatmaps(heatmaps, common["grid"], sides=(512,))
        values = viewer_data.encode_heatmaps(heatmaps, ROUNDED, sides=(512,))
        marked = bands.at_least(form.alpha_min)
        return common | {
            "height": images.shape[2],
            "width": images.shape[3],
            "image": viewer_data.encode_images(images)[0],
            "fill": viewer_data.encode_fill(images, form.fill)[0],
            "prediction": [self._class(number, probabilities) for number in likeliest.tolist()],
            "maps": [
                {
                    "method": name,
                    "class_agnostic": self.methods[name].class_agnostic,
                    "map": maps[name][0],
                    "values": values[name][0],
                    "shares": viewer_data.shares_of(found, common["grid"])[0],
                    "mask_penalty": bands.inside(found.cpu(), marked).double().mean().item(),
                    "empty": not bool(found.any()),
                }
                for name, found in heatmaps.items()
            ],
        }

    def score(self, images: Tensor, form: ScoreForm, progress: Progress) -> Answer:
        """Return the scores of one method on one image [1,C,H,W], as `evaluate` returns them."""
        common, _, heatmaps = self._look(images, form, [form.method], progress)
        scores = evaluate(
            self.classifier,
            images,
            heatmaps[form.method],
            torch.tensor([common["target"]["number"]]),
            alpha_min=form.alpha_min,
            score=form.score,
            fill=form.fill,
            value_step=common["value_step"],
            columns=COLUMNS,
            progress=progress,
        )
        # The viewer of the report reads the same curves.
        curves = viewer_data.answers_along(scores.answers, form.alpha_min, common["grid"])[0]
        values = {name: scores[name].item() for name in COLUMNS}
        return common | {
            **{name: None if math.isnan(value) else value for name, value in values.items()},
            "method": form.method,
            "score": form.score,
            "fill": form.fill,
            "curves": curves,
            "classes": {k: self.classes[k] for k in sorted(viewer_data.classes_in(curves))},
            "calls": int(scores.calls[0]),
        }

    def region(self, images: Tensor, form: RegionForm, progress: Progress) -> Answer:
        """Return the region of one image [1,C,H,W] that is enough, or the answer at one size."""
        target, _ = self._target(images, form, [form.method])
        batch = batch_of(self.classifier, images.to(self.classifier.device), torch.tensor([target]))
        source = source_of(form.method, self.methods[form.method])
        if form.size is not None:
            found = self._at_size(batch, drawn_by(source, self.classifier, batch), form.size)
            return {"fills": FIT_FILLS, "sizes": [viewer_data.size_data(found, FIT_FILLS)]}
        with counting_bar("fitting", 1, progress):  # which hears of every forward pass
            maps = Fitted(source, name=form.method).maps(self.classifier, batch)
            (certificate,) = certificates(self.classifier, batch, maps)
        order = viewer_data.encode_orders(maps.at(batch.size), side=512)[0]
        return viewer_data.region_data(certificate, order)

    def _at_size(self, batch: Batch, maps: Maps, share: float) -> Size:
        """Return the answers for the region of a size and for the rest, with the fills of a fit."""
        target = int(batch.targets[0])
        shares = torch.tensor([share], dtype=torch.float64, device=maps.maps.device)
        region = cut_at(resize(maps.maps, batch.size), shares) >= 0.5
        parts: dict[str, list[Said]] = {}
        for fill in FIT_FILLS:
            views = MaskedModel(self.classifier, fill).views(
                batch.images,
                torch.cat([region, ~region]),
                (torch.tensor([0, 0]), torch.tensor([0, 1])),
                targets=batch.targets.cpu().repeat(2),
            )
            parts[fill] = [
                Said(self.classes[number], number == target, confidence)
                for number, confidence in zip(
                    views.named.tolist(), views.confidences.tolist(), strict=True
                )
            ]
        return Size(
            share=share,
            region={fill: said[0] for fill, said in parts.items()},
            rest={fill: said[1] for fill, said in parts.items()},
        )

    def _target(self, images: Tensor, form: ImageForm, names: Sequence[str]) -> tuple[int, Tensor]:
        """Return the class to explain and the probabilities [classes]; refuse unknown methods."""
        for name in names:
            if name not in self.methods:
                raise unknown("method", name, self.methods)
        with torch.no_grad():
            probabilities = self.classifier(images).float().softmax(1).cpu()[0]
        target = int(probabilities.argmax())
        if form.target.strip():
            target = class_number(form.target.strip(), self.classifier.classes)
        most = len(self.classes) - 1
        if target > most:
            raise UserError(f"target must be a class of the model, 0..{most}, got {target}")
        return target, probabilities

    def _look(
        self, images: Tensor, form: CurveForm, names: Sequence[str], progress: Progress
    ) -> tuple[Answer, Tensor, dict[str, Tensor]]:
        """Return what both answers share, the probabilities [classes], and the heatmaps [1,H,W]."""
        if form.fill not in self.fills:
            raise unknown("fill for this model", form.fill, self.fills)
        target, probabilities = self._target(images, form, names)
        progress(0, 1)
        methods = {name: self.methods[name] for name in names or self.usual}
        heatmaps = _heatmaps(self.classifier, images, torch.tensor([target]), methods)
        step = self.value_step if form.value_step is None else form.value_step
        grid = viewer_data.stops(Schedule(form.alpha_min, value_step=step).values, [form.alpha_min])
        common = {
            "target": self._class(target, probabilities),
            "alpha_min": form.alpha_min,
            "value_step": step,
            "grid": grid,
            "start": grid.index(form.alpha_min),
        }
        return common, probabilities, heatmaps

    def _class(self, number: int, probabilities: Tensor) -> Answer:
        """Return a class as answers hold it."""
        probability = viewer_data.rounded(probabilities[number : number + 1])[0]
        return {"number": number, "name": self.classes[number], "probability": probability}


def open_service(
    classifier: Classifier, name: str, methods: Methods = (), value_step: float = VALUE_STEP
) -> Service:
    """Return a service whose usual methods are `methods`, which must work; others that work follow.

    Without `methods` the usual ones are the CAMs and rollout, as far as they work on the model.
    """
    view = classifier.view
    if view is None or view.crop is None:
        raise UserError(f"{name} has no input size of its own: give --size, as in --size 224")
    bands.grid(value_step)  # raises if the step makes no grid
    if value_step < LEAST_STEP:
        raise UserError(f"value_step must be {LEAST_STEP:g} or more, got {value_step}")
    # Which methods and fills work is tried on a grey image.
    grey = torch.full((1, view.channels, *view.crop), 0.5)
    with torch.no_grad():
        n_classes = classifier(grey).shape[1]
    own = methods_for(methods, classifier) if methods else {}
    if own:
        _heatmaps(classifier, grey, None, own)  # raises if one of them does not work
    others: dict[str, Explainer] = {}
    for word, entry in EXPLAINERS.items():
        # A page is to answer at once: methods of many passes are offered only if they are named.
        quick = isinstance(entry.passes, int) and entry.passes <= 3
        if quick and word not in own:
            with suppress(UserError):  # it does not work on this model
                _heatmaps(classifier, grey, None, [word])
                others[word] = explainer_named(word)
    return Service(
        classifier=classifier,
        name=name,
        methods=own | others,
        usual=tuple(own or [word for word in (*CAMS, "rollout") if word in others] or others),
        fills=tuple(fill for fill in FILLS if fill != DROP or _can_drop(classifier, grey)),
        size=view.crop,
        classes=tuple(classifier.classes or [f"class {number}" for number in range(n_classes)]),
        value_step=value_step,
    )


def _can_drop(classifier: Classifier, grey: Tensor) -> bool:
    """Return whether a model has tokens that can be left out, and answers without some of them."""
    half = torch.zeros_like(grey[:, 0])
    half[:, : half.shape[1] // 2] = 1
    try:
        evaluate(classifier, grey, half, fill=DROP, value_step=0.5, columns=("base_score",))
    except UserError:
        return False
    return True


def _heatmaps(
    classifier: Classifier, images: Tensor, targets: Tensor | None, methods: Methods
) -> dict[str, Tensor]:
    """Return the heatmaps of each method, without warnings for empty ones: answers say so."""
    with warnings.catch_warnings():  # safe: one thread alone runs the model
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        return explain_all(classifier, images, targets, methods, progress=False)
