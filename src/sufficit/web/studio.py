"""What a model says of one image, as the viewer shows it; nothing is kept between two calls."""

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.drawing import class_number
from sufficit.errors import EmptyHeatmapWarning, UserError, unknown
from sufficit.explainers import CAMS, EXPLAINERS, Method, explain_all, methods_for
from sufficit.explainers.entry import Explainer
from sufficit.metrics.registry import Schedule
from sufficit.metrics.scores import evaluate
from sufficit.perturbation import bands
from sufficit.progress import Progress
from sufficit.report.encoding import encode_fill, encode_heatmaps, encode_images
from sufficit.report.numbers import answers_along, classes_in, rounded, shares_of, stops
from sufficit.web.schemas import (
    ClassFacts,
    Curves,
    Explained,
    ExplainForm,
    Map,
    Scored,
    ScoreForm,
    Settings,
)

COLUMNS = ("insertion_pixel", "deletion_pixel", "base_score", "mask_penalty", "msi")
VALUE_STEP = 0.05  # the tables have 0.01, which takes five times as long
MAP_SIDES = (512,)  # one image has room for its maps as they are
LIKELIEST = 5


@dataclass(frozen=True)
class Studio:
    """A classifier and the methods that work on it."""

    classifier: Classifier
    name: str
    methods: Mapping[str, Method]
    usual: tuple[str, ...]
    size: tuple[int, int]  # height and width of what the model sees
    n_classes: int
    value_step: float = VALUE_STEP

    def explain(self, images: Tensor, form: ExplainForm) -> Explained:
        """Prediction and heatmaps: [1,C,H,W]. One forward pass or two, and no masks."""
        begun = time.monotonic()
        methods = self._methods(form.methods)
        probabilities = self._probabilities(images)
        target = self._target(form, probabilities)
        with _quiet():
            maps = explain_all(
                self.classifier, images, torch.tensor([target]), methods, progress=False
            )
        schedule = self._schedule(form)
        grid = stops(schedule.values, [form.alpha_min])
        likeliest = probabilities.nan_to_num(-1).topk(min(LIKELIEST, self.n_classes)).indices
        return Explained(
            height=images.shape[2],
            width=images.shape[3],
            image=encode_images(images)[0],
            fill=encode_fill(images, form.fill)[0],
            prediction=[self._class(number, probabilities) for number in likeliest.tolist()],
            target=self._class(target, probabilities),
            alpha_min=form.alpha_min,
            value_step=schedule.value_step,
            grid=_plain(grid),
            start=grid.index(form.alpha_min),
            maps=_maps(maps, grid, form.alpha_min),
            seconds=round(time.monotonic() - begun, 3),
        )

    def score(self, images: Tensor, form: ScoreForm, progress: Progress) -> Scored:
        """The scores of one method, as `evaluate` gives them: [1,C,H,W]."""
        begun = time.monotonic()
        methods = self._methods([form.method])
        probabilities = self._probabilities(images)
        target = self._target(form, probabilities)
        goals, schedule = torch.tensor([target]), self._schedule(form)
        progress(0, 1)
        with _quiet():
            maps = explain_all(self.classifier, images, goals, methods, progress=False)
        scores = evaluate(
            self.classifier,
            images,
            maps[form.method],
            goals,
            alpha_min=form.alpha_min,
            score=form.score,
            fill=form.fill,
            value_step=schedule.value_step,
            columns=COLUMNS,
            progress=progress,
        )
        grid = stops(schedule.values, [form.alpha_min])
        curves = answers_along(scores, [0], grid)[0]
        return Scored(
            method=form.method,
            target=self._class(target, probabilities),
            score=form.score,
            fill=form.fill,
            alpha_min=form.alpha_min,
            value_step=schedule.value_step,
            grid=_plain(grid),
            start=grid.index(form.alpha_min),
            **{name: _number(scores[name]) for name in COLUMNS},
            curves=Curves(**curves),
            classes={number: self.class_name(number) for number in sorted(classes_in(curves))},
            calls=int(scores.calls[0]),
            seconds=round(time.monotonic() - begun, 3),
        )

    def about(self, name: str) -> str:
        """A method in a few words."""
        method = self.methods[name]
        found = EXPLAINERS.get(method) if isinstance(method, str) else method
        return found.description if isinstance(found, Explainer) else "learned for this model"

    def class_name(self, number: int) -> str:
        """A class in words, or its number."""
        classes = self.classifier.classes
        return classes[number] if classes else f"class {number}"

    def _methods(self, names: Sequence[str]) -> dict[str, Method]:
        for name in names:
            if name not in self.methods:
                raise unknown("method", name, self.methods)
        return {name: self.methods[name] for name in names or self.usual}

    def _probabilities(self, images: Tensor) -> Tensor:
        """Of the whole image, on the CPU: [1,C,H,W] -> [classes]."""
        with torch.no_grad():
            return self.classifier(images).float().softmax(1).cpu()[0]

    def _target(self, form: Settings, probabilities: Tensor) -> int:
        if not form.target.strip():
            return int(probabilities.argmax())
        number = class_number(form.target.strip(), self.classifier.classes)
        if number >= self.n_classes:
            raise UserError(
                f"target must be a class of the model, 0..{self.n_classes - 1}, got {number}"
            )
        return number

    def _schedule(self, form: Settings) -> Schedule:
        step = self.value_step if form.value_step is None else form.value_step
        return Schedule(form.alpha_min, value_step=step)

    def _class(self, number: int, probabilities: Tensor) -> ClassFacts:
        value = rounded(probabilities[number : number + 1])[0]
        return ClassFacts(number=number, name=self.class_name(number), probability=value)


def open_studio(
    classifier: Classifier,
    name: str,
    adapters: Mapping[str, Method] | None = None,
    value_step: float = VALUE_STEP,
) -> Studio:
    """A studio with every method that works on this model, and the adapters, which must."""
    if classifier.view is None or classifier.view.crop is None:
        raise UserError(f"{name} names no size of its own: give --size, as in --size 224")
    bands.grid(value_step)  # refuses a step that makes none
    h, w = classifier.view.crop
    grey = torch.full((1, classifier.view.channels, h, w), 0.5)
    with torch.no_grad():
        n_classes = classifier(grey).shape[1]
    own = methods_for(adapters, classifier) if adapters else {}
    working = _working(classifier, grey)
    usual = (*own, *(method for method in (*CAMS, "rollout") if method in working))
    methods = {**own, **working}
    return Studio(classifier, name, methods, usual or tuple(methods), (h, w), n_classes, value_step)


def _working(classifier: Classifier, images: Tensor) -> dict[str, Method]:
    """The methods that can draw for this model; those of one pass are tried at once."""
    folding = [name for name, method in EXPLAINERS.items() if method.needs == "attention"]
    others = [name for name in EXPLAINERS if name not in folding]
    found = {name for name in folding if _works(classifier, [name], images)}
    if _works(classifier, others, images):
        found.update(others)
    else:
        found.update(name for name in others if _works(classifier, [name], images))
    return {name: name for name in EXPLAINERS if name in found}


def _works(classifier: Classifier, methods: list[str], images: Tensor) -> bool:
    try:
        with _quiet():
            explain_all(classifier, images, None, methods, progress=False)
    except UserError:
        return False
    return True


def _maps(heatmaps: Mapping[str, Tensor], grid: Sequence[float], alpha_min: float) -> list[Map]:
    addresses = encode_heatmaps(heatmaps, grid, MAP_SIDES)
    marked = bands.at_least(alpha_min)
    return [
        Map(
            method=name,
            map=addresses[name][0],
            shares=[share or 0.0 for share in shares_of(found, grid)[0]],
            mask_penalty=bands.inside(found.cpu(), marked).double().mean().item(),
            empty=not bool(found.any()),
        )
        for name, found in heatmaps.items()
    ]


def _number(values: Tensor) -> float | None:
    """The one value as JSON knows it: [1] -> a number, None for NaN."""
    value = values.item()
    return None if math.isnan(value) else value


def _plain(grid: Sequence[float]) -> list[float]:
    return [round(alpha, 4) for alpha in grid]


@contextmanager
def _quiet() -> Iterator[None]:
    """No warning of empty maps, which are told in the answer; one worker alone comes here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        yield
