"""`compare` for Python: any classifier, images in memory or on disk, any heatmap sources."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sufficit.classifier.classifier import (
    Classifier,
    check_classifier,
    check_images,
    check_targets,
)
from sufficit.data.images import ImageSource, open_images
from sufficit.errors import UserError
from sufficit.files import check_output
from sufficit.progress import Progress
from sufficit.runs.config import METHODS, config_from
from sufficit.runs.engine import run
from sufficit.runs.job import make_job, sources_named, with_controls
from sufficit.runs.maps import MapTensor, Source
from sufficit.runs.results import RunResults

IN_MEMORY = "images in memory"


def compare(
    classifier: Classifier,
    images: Tensor | Path | str,
    methods: Mapping[str, Source | Tensor] | Sequence[str] = METHODS,
    targets: Tensor | None = None,
    *,
    names: Sequence[str] | None = None,
    out: Path | str | None = None,
    overwrite: bool = False,
    progress: bool | Progress | None = None,
    **options: Any,
) -> RunResults:
    """Score every heatmap source on the same images and test which differences are significant.

    `images` is a tensor [N,C,H,W] in 0..1, or a folder or tar shards as the command line takes
    them. A source is a method's name, a trained Lax, a function (classifier, images, targets) ->
    [N,H,W], a word as in `--methods`, or heatmaps [N,H,W]. `out` keeps the run: after an
    interruption, call it again to resume. Further options are those of `sufficit compare`, such as
    alpha_min, fill or leak=False.
    """
    check_classifier(classifier)
    if isinstance(images, Tensor):
        check_images(images)
        labels = check_targets(targets, len(images))
        source = ImageSource.from_tensors(images, names, labels)
    elif targets is not None:
        raise UserError("targets go with images in memory: class folders give a folder's labels")
    else:
        source = open_images(images)
    data = IN_MEMORY if isinstance(images, Tensor) else str(images)
    recipe = classifier.recipe
    model = type(classifier.model).__name__ if recipe is None else recipe.source
    words = list(methods) if not isinstance(methods, Mapping) else [*methods]
    options = {"methods": words, "model": model, "data": data} | options
    config = config_from(options)
    if isinstance(methods, Mapping):
        sources = with_controls(
            {name: _source(one) for name, one in methods.items()}, wanted=config.controls
        )
    else:
        sources = sources_named(config)
    place = None if out is None else Path(out)
    if place is not None:
        folders = [] if isinstance(images, Tensor) else [Path(images)]
        check_output(place, folders, overwrite=overwrite, command="compare")
    job = make_job(config, classifier=classifier, images=source, sources=sources)
    return run(job, place, overwrite=overwrite, progress=progress)


def _source(given: Source | Tensor) -> Source:
    """A heatmap source of a dict: words are read as on the command line."""
    if isinstance(given, Tensor):
        return MapTensor(given)
    if isinstance(given, str):
        word = replace(config_from({"model": "", "data": "", "methods": [given]}), controls=False)
        return next(iter(sources_named(word).values()))
    return given
