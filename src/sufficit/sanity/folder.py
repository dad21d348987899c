"""Sanity checks on a folder of images, and their results on disk."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sufficit import plots as figures
from sufficit.classifier.classifier import Classifier
from sufficit.data.images import ImageFile, ignore_image_warnings, labels_of, list_images
from sufficit.drawing import read_pictures
from sufficit.errors import UserError
from sufficit.explainers import CAMS, Methods, methods_for
from sufficit.files import make_folder, writing
from sufficit.results import provenance, save_json
from sufficit.sanity.checking import predictions, sanity_check
from sufficit.sanity.randomising import EPOCHS, STEPS
from sufficit.sanity.report import SanityReport

BATCH = 32  # images a step of training


@dataclass(frozen=True)
class SanityOptions:
    """How to check methods on a folder of images."""

    methods: Methods = CAMS
    images: int = 64
    steps: int = STEPS
    random_labels: bool = False
    epochs: int = EPOCHS
    train_images: int = 1000
    targets: Literal["auto", "label", "prediction"] = "auto"
    layer: str | None = None
    on_error: Literal["skip", "stop"] = "skip"
    seed: int = 0
    progress: bool | None = None


@dataclass(frozen=True)
class FolderSanity:
    """What came out of a folder."""

    report: SanityReport
    names: tuple[str, ...]
    target_kind: str
    skipped: dict[str, str]  # name -> why


@dataclass(frozen=True)
class _Sample:
    """Some pictures of a folder, and their classes."""

    names: tuple[str, ...]
    images: Tensor
    labels: Tensor
    skipped: dict[str, str]


def check_folder(
    classifier: Classifier, data: Path, options: SanityOptions | None = None
) -> FolderSanity:
    """Check methods on images drawn by seed from those below a folder."""
    options = options or SanityOptions()
    methods = methods_for(options.methods, classifier)
    pictures = list_images(data)
    sample = _draw(classifier, pictures, options.images, options)
    loader = None
    skipped = dict(sample.skipped)
    if options.random_labels:
        learnt = _draw(classifier, pictures, options.train_images, options)
        loader = zip(learnt.images.split(BATCH), learnt.labels.split(BATCH), strict=True)
        skipped |= learnt.skipped
    report = sanity_check(
        classifier,
        sample.images,
        sample.labels,
        methods,
        steps=options.steps,
        random_labels=loader,
        epochs=options.epochs,
        layer=options.layer,
        seed=options.seed,
        progress=options.progress,
    )
    kind = "label" if _labelled(pictures, options) else "prediction"
    return FolderSanity(report, sample.names, kind, skipped)


def save_sanity(
    folder: Path,
    result: FolderSanity,
    classifier: Classifier,
    config: dict[str, Any],
    options: SanityOptions,
) -> None:
    """Write sanity.csv, sanity.png and, last, run.json."""
    report = result.report
    make_folder(folder)
    with writing(folder / "sanity.csv") as path:
        report.frame().to_csv(path, index=False)
    figures.save(report.figure(), folder / "sanity.png")
    named = asdict(replace(options, methods=tuple(options.methods)))
    run = provenance(config | {"options": named}, classifier.device, classifier.dtype)
    run |= {
        "n": len(result.names),
        "images": list(result.names),
        "targets": result.target_kind,
        "threshold": report.threshold,
        "seed": report.seed,
        "verdicts": report.verdicts(),
        "sentences": report.sentences(),
        "training": report.training and asdict(report.training),
        "skipped": result.skipped,
    }
    save_json(folder / "run.json", run)


def _draw(
    classifier: Classifier, pictures: Sequence[ImageFile], n: int, options: SanityOptions
) -> _Sample:
    """At most n pictures by seed, in the folder's order, with labels or predictions."""
    generator = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(len(pictures), generator=generator)[:n].sort().values.tolist()
    with ignore_image_warnings():
        kept, images, skipped = read_pictures(
            [pictures[i] for i in chosen], classifier, options.on_error
        )
    labels = predictions(classifier, images)
    if _labelled(pictures, options):
        with torch.no_grad():
            classes = classifier(images[:1]).shape[1]
        known = labels_of(pictures, classifier.classes, classes)
        assert known is not None
        numbers = {p.name: label for p, label in zip(pictures, known, strict=True)}
        labels = torch.tensor([numbers[picture.name] for picture in kept])
    return _Sample(tuple(picture.name for picture in kept), images, labels, skipped)


def _labelled(pictures: Sequence[ImageFile], options: SanityOptions) -> bool:
    """Whether classes come from class folders."""
    inside = any(picture.folder for picture in pictures)
    if options.targets == "label" and not inside:
        raise UserError("--targets label needs class folders: DATA/CLASS/image.png")
    return inside and options.targets != "prediction"
