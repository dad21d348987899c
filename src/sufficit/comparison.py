"""`compare` for Python: any classifier, images in memory or on disk, any heatmap sources."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from torch import Tensor

from sufficit.classifier.classifier import (
    Classifier,
    check_classifier,
    check_images,
    check_range,
    check_targets,
)
from sufficit.classifier.source_code import code_digest
from sufficit.data.images import ImageSource, open_images
from sufficit.data.loader import num_classes
from sufficit.data.truth import TruthFiles, truth_from
from sufficit.errors import UserError
from sufficit.files import check_output, place
from sufficit.loggers import check_log
from sufficit.metrics.metric import AnyMetric
from sufficit.probes.probe import Probe
from sufficit.progress import Progress
from sufficit.runs.config import METHODS, Workers, config_from
from sufficit.runs.engine import run
from sufficit.runs.job import make_job
from sufficit.runs.results import RunResults
from sufficit.runs.workers import spreading
from sufficit.sources import Given, sources_of

IN_MEMORY = "images in memory"
P = ParamSpec("P")


def _labels_by_name(function: Callable[P, RunResults]) -> Callable[P, RunResults]:
    """Raise for labels in third place, where `explain` has them, also with `methods` by name."""

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> RunResults:
        third: Any = args[2] if len(args) > 2 else ()
        listed = isinstance(third, list | tuple) and any(isinstance(one, int) for one in third)
        if hasattr(third, "shape") or listed:
            raise UserError(
                f"the third argument of compare is methods, got {third!r:.99}: give labels by name,"
                " as in compare(classifier, images, targets=labels, methods=...)"
            )
        return function(*args, **options)

    return checked


@_labels_by_name
def compare(
    classifier: Classifier,
    images: Tensor | Path | str,
    methods: Mapping[str, Given] | Sequence[str] | str = METHODS,
    targets: Tensor | None = None,
    *,
    names: Sequence[str] | None = None,
    draw: int | None = None,
    out: Path | str | None = None,
    overwrite: bool = False,
    progress: bool | Progress | None = None,
    workers: int | Workers | None = None,
    truth: Tensor | Path | str | None = None,
    twin: Classifier | Path | str | None = None,
    metrics: Mapping[str, AnyMetric] | None = None,
    probes: Sequence[Probe] = (),
    **options: Any,
) -> RunResults:
    """Score every heatmap source on the same images and test which differences are significant.

    - `classifier`: the model that is asked; it is left as it was.
    - `images`: a tensor [N,C,H,W] in 0..1, or a folder or tar shards as --data takes them.
    - `methods`: words as in `--methods`, or a dict that names sources: a word, a method with its
      options as in ("finer-cam", {"nearest": 5}), a trained Lax, a function (classifier, images,
      targets) -> [N,H,W], heatmaps [N,H,W], or a Source of your own.
    - `targets`: the class of each image in memory, [N]. Without them, the model's predictions.
    - `names`: of images in memory; their numbers by default.
    - `draw`: score a random subset of so many of a folder's images, as `--images` does.
    - `out`: a folder that keeps the run. Call it again to resume. Without it, rows are in memory.
    - `overwrite`: delete what an earlier run left in `out`.
    - `progress`: a bar; by default when the work takes long in a terminal. Or a function of
      (done, total).
    - `workers`: processes that Ray starts here, or Workers(address="auto") to join a cluster.
    - `truth`: masks [N,H,W], or a path as `--truth` takes it: where the objects are.
    - `twin`: a classifier of the same classes, or its folder, that is asked the same masks.
    - `metrics`: columns of your own, {name: Metric}.
    - `probes`: measurements of your own, in the table and the report beside those of Sufficit.
    - `options`: those of `sufficit compare`, such as alpha_min, fills, checks or calls.
    """
    check_classifier(classifier)
    if callable(function := options.get("score")):
        classifier = classifier.with_score(function)
        classifier.code += code_digest(function)
        options["score"] = f"python:{function.__module__}:{function.__qualname__}"
    asked = _workers(workers)
    source = _images(classifier, images, targets, names)
    data = IN_MEMORY if isinstance(images, Tensor) else str(images)
    recipe = classifier.recipe
    model = type(classifier.model).__name__ if recipe is None else recipe.source
    options = {"methods": _words(methods), "model": model, "data": data, "images": draw} | options
    where = truth_from(truth)
    if where is not None:
        options["truth"] = str(where.path) if isinstance(where, TruthFiles) else IN_MEMORY
    own = twin if isinstance(twin, Classifier) else None
    if twin is not None:
        options["twin"] = str(twin) if own is None else own.recipe and own.recipe.source
    config = config_from(options)
    sources = sources_of(
        methods if isinstance(methods, Mapping) else config.methods,
        controls="controls" in config.wanted_checks,
        layer=config.layer,
        seed=config.seed,
        normalize=config.normalize,
    )
    folder = None if out is None else place(out)
    if folder is not None:
        folders = [] if isinstance(images, Tensor) else [place(images)]
        check_output(folder, folders, command="compare")
    check_log(config.log, folder)
    job = make_job(
        config,
        classifier=classifier,
        images=source,
        sources=sources,
        truth=where,
        twin=own,
        metrics=metrics,
        probes=probes,
    )
    with spreading(asked, job) as (job, spread):
        results = run(job, folder, overwrite=overwrite, progress=progress, spread=spread)
    results.log()
    return results


def _images(
    classifier: Classifier,
    images: Tensor | Path | str,
    targets: Tensor | None,
    names: Sequence[str] | None,
) -> ImageSource:
    """The images of a run, from memory or from disk; raise for anything else."""
    if isinstance(images, Tensor):
        check_images(images)
        labels = check_targets(targets, len(images))
        source = ImageSource.from_tensors(images, names, labels)
        if labels is not None:
            check_range(labels, num_classes(classifier, source))
        return source
    if not isinstance(images, str | Path):
        came = type(images).__name__
        remedy = "call torch.from_numpy" if came == "ndarray" else "stack them, or give the folder"
        raise UserError(f"images must be a tensor [N,C,H,W] or a folder, got {came}: {remedy}")
    if targets is not None:
        raise UserError("targets go with images in memory: class folders give a folder's labels")
    return open_images(place(images))


def _words(methods: Any) -> list[str]:
    """The words of a list or a text, the names of a dict."""
    listed = list(methods) if isinstance(methods, Iterable) else [methods]
    words = methods.split(",") if isinstance(methods, str) else listed
    if not all(isinstance(word, str) for word in words):
        raise UserError(
            "methods must be words, or a dict that names functions, adapters and heatmaps, got"
            f" {methods!r:.99}: give a dict, as in dict(mine=my_method)"
        )
    return words


def _workers(given: int | Workers | None) -> Workers | None:
    if given is None or isinstance(given, Workers):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return Workers(given)
    raise UserError(
        f"workers must be a whole number or Workers(...), got {given!r:.200}: as in workers=2"
    )
