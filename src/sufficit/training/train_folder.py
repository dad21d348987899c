"""Train an adapter on a folder of images: the whole chain, from files to files."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from sufficit.classifier.classifier import Classifier
from sufficit.data.batches import TrainingImages
from sufficit.data.loader import OnError
from sufficit.data.pixels import ignore_image_warnings
from sufficit.data.splits import Folder, Part, read_folder
from sufficit.errors import UserError
from sufficit.files import read_json
from sufficit.training.feed import CachedLoader, Loader, cache_features
from sufficit.training.lax_training import PATIENCE, train_lax
from sufficit.training.processes import fabric_for, launch
from sufficit.training.recipes import LaxRecipe
from sufficit.training.training_report import TrainingOutcome, outcome_of, save_outcome
from sufficit.training.validation import ValidationSet

if TYPE_CHECKING:
    from lightning.fabric import Fabric

SHARED = ("recipe", "epochs", "area", "alpha_min", "patience", "seed", "overwrite", "progress")
"""The options of a folder that `train_lax` has too."""


@dataclass(frozen=True)
class FolderOptions:
    """How to train on a folder: the options of `train_lax`, and how files are read."""

    recipe: str | LaxRecipe = "robust"
    target: Literal["auto", "label", "prediction"] = "auto"
    epochs: int | None = None
    area: float | None = None
    alpha_min: float | None = None
    patience: int | None = PATIENCE
    batch_size: int = 32  # in each process
    validation_share: float = 0.1
    workers: int = 0  # that read images
    cache: bool = False  # keep all images and features in memory
    on_error: OnError = "skip"
    overwrite: bool = False
    seed: int = 0
    progress: bool | None = None


def train_folder(
    classifier: Classifier,
    data: str | Path,
    out: str | Path,
    options: FolderOptions | None = None,
    *,
    fabric: "Fabric | None" = None,
    config: dict[str, Any] | None = None,
) -> TrainingOutcome | None:
    """Train an adapter on the images below a folder and write it, with its history, to `out`.

    The same call resumes an interrupted run. With several processes, which `fabric` starts, only
    the first returns an outcome. `config` is stored in run.json.
    """
    options, out, start = options or FolderOptions(), Path(out), time.monotonic()
    share = options.validation_share
    folder = read_folder(classifier, Path(data), options.target, share, options.seed)
    fabric = fabric or fabric_for(classifier.device)
    launch(fabric)
    classifier.to(fabric.device)
    with ignore_image_warnings():
        held_out = read_part(folder.validation, classifier, options.on_error, options.batch_size)
        if len(held_out.names) < 2:
            raise UserError(
                f"Only {len(held_out.names)} of {len(folder.validation)} validation images can be"
                " read, 2 or more are needed: check the files"
            )
        validation = ValidationSet.of(classifier, held_out.images, held_out.labels)
        if options.overwrite and fabric.is_global_zero:
            (out / "run.json").unlink(missing_ok=True)
        images = _training_images(classifier, folder.training, options, fabric)
        lax = train_lax(
            classifier,
            _cached(classifier, images, folder, options, fabric) if options.cache else images,
            target=folder.target,
            out=out,
            validation=validation,
            fabric=fabric,
            about={
                "images": len(folder.training),
                "pictures": folder.digest(),
                "batch_size": options.batch_size,
                "precision": str(fabric.strategy.precision.precision),
                "cached": options.cache,
            },
            **{name: getattr(options, name) for name in SHARED},
        )
        skipped = held_out.skipped | _skipped(images, out, fabric)
    if not fabric.is_global_zero:
        return None
    outcome = outcome_of(
        classifier,
        lax,
        validation,
        names=held_out.names,
        trained_on=sum(name not in skipped for name in names_of(folder.training)),
        skipped=skipped,
        target=folder.target,
        seconds=time.monotonic() - start,
    )
    stored = asdict(replace(options, progress=None))
    settings = {**(config or {}), "data": str(data), "options": stored}
    save_outcome(out, outcome, validation, classifier, settings)
    return outcome


@dataclass(frozen=True)
class ReadImages:
    """The readable images of a part of a folder, in memory."""

    names: tuple[str, ...]
    images: Tensor  # [N,C,H,W]
    labels: Tensor | None  # [N]
    skipped: dict[str, str]  # name -> why


def read_part(
    part: Part, classifier: Classifier, on_error: OnError, batch_size: int = 32
) -> ReadImages:
    """Read the images of a part in order; those that can't be read are skipped, or stop it."""
    loader = TrainingImages(
        part, classifier.view, batch_size, sampler="in order", on_error=on_error
    )
    batches = list(loader)
    names = tuple(name for name in names_of(part) if name not in loader.skipped)
    if not names:
        name, why = next(iter(loader.skipped.items()))
        raise UserError(
            f"None of {len(part)} images can be read; the first, {name}: {why}. Check the files."
        )
    if part.labels is None:
        return ReadImages(names, torch.cat(batches), None, loader.skipped)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return ReadImages(names, images, labels, loader.skipped)


def names_of(part: Part) -> list[str]:
    """The names of the images of a part, in order."""
    return [image.name for image in part.images]


def _training_images(
    classifier: Classifier, part: Part, options: FolderOptions, fabric: "Fabric"
) -> TrainingImages:
    """Batches in random order: all of them, or this process's share."""
    sampler: Any = "shuffled"
    if fabric.world_size > 1:
        ranks = (fabric.world_size, fabric.global_rank)
        sampler = DistributedSampler(range(len(part)), *ranks, seed=options.seed)  # type: ignore[arg-type]  # only its length is used
    return TrainingImages(
        part,
        classifier.view,
        options.batch_size,
        sampler=sampler,
        workers=options.workers,
        on_error=options.on_error,
    )


def _cached(
    classifier: Classifier,
    images: TrainingImages,
    folder: Folder,
    options: FolderOptions,
    fabric: "Fabric",
) -> Loader:
    if fabric.world_size > 1:
        raise UserError("--cache-features works in one process only: drop it, or --devices")
    return CachedLoader(cache_features(classifier, images, folder.target).whole, options.batch_size)


def _skipped(images: TrainingImages, out: Path, fabric: "Fabric") -> dict[str, str]:
    """Unreadable training images of all processes; of a run finished before, those in run.json."""
    if not images.passes:
        earlier = fabric.broadcast(_earlier(out) if fabric.is_global_zero else None)
        if earlier is not None:
            return dict(earlier)
        for _ in images:
            pass
    found: dict[str, str] = {}
    for rank in range(fabric.world_size):
        found |= fabric.broadcast(images.skipped, src=rank)
    return found


def _earlier(out: Path) -> dict[str, str] | None:
    try:
        return dict(read_json(out / "run.json")["skipped"])
    except (UserError, KeyError, TypeError, ValueError):
        return None
