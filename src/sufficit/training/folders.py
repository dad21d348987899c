"""Train an adapter on a folder of pictures: the whole chain, from files to files."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DistributedSampler

from sufficit.classifier.classifier import Classifier
from sufficit.data.images import ignore_image_warnings
from sufficit.errors import UserError
from sufficit.training.feeding import CachedLoader, Loader, cache_features
from sufficit.training.lax import PATIENCE, one_device, train_lax
from sufficit.training.outcomes import HeldOut, Outcome, judge, save_outcome
from sufficit.training.pictures import OnError, Part, PictureLoader
from sufficit.training.processes import launch
from sufficit.training.recipes import LaxRecipe
from sufficit.training.splitting import Folder, read_folder

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sufficit.explainers.lax import Lax


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
    workers: int = 0  # processes that read pictures
    cache: bool = False  # keep all images and features in memory
    on_error: OnError = "skip"
    overwrite: bool = False
    seed: int = 0
    progress: bool | None = None

    def training(self) -> dict[str, Any]:
        """What of this `train_lax` is told."""
        names = ("recipe", "epochs", "area", "alpha_min", "patience", "seed", "overwrite")
        return {name: getattr(self, name) for name in (*names, "progress")}


def train_folder(
    classifier: Classifier,
    data: str | Path,
    out: str | Path,
    options: FolderOptions | None = None,
    *,
    fabric: "Fabric | None" = None,
    config: dict[str, Any] | None = None,
) -> Outcome | None:
    """Train an adapter on the pictures below a folder and write it, with its story, to `out`.

    The same call goes on with a run that was stopped. Over several processes, which `fabric`
    starts, only the first has an outcome. `config` is kept in run.json.
    """
    options, out, begun = options or FolderOptions(), Path(out), time.monotonic()
    folder = read_folder(
        classifier, Path(data), options.target, options.validation_share, options.seed
    )
    fabric = fabric or one_device(classifier)
    launch(fabric)
    classifier.to(fabric.device)
    with ignore_image_warnings():
        judged_by = _read_held_out(classifier, folder.validation, options)
        pictures = _loader(classifier, folder.training, options, fabric)
        lax = _train(classifier, folder, pictures, judged_by, out, options, fabric)
        skipped = judged_by.skipped | _skipped(pictures, out, fabric)
    if not fabric.is_global_zero:
        return None
    trained_on = sum(picture.name not in skipped for picture in folder.training.pictures)
    seconds = time.monotonic() - begun
    outcome = judge(classifier, lax, judged_by, trained_on, skipped, folder.target, seconds)
    settings = {**(config or {}), "data": str(data), "options": _plain(options)}
    save_outcome(out, outcome, judged_by, classifier, settings)
    return outcome


def _train(
    classifier: Classifier,
    folder: Folder,
    pictures: PictureLoader,
    judged_by: HeldOut,
    out: Path,
    options: FolderOptions,
    fabric: "Fabric",
) -> "Lax":
    if options.overwrite and fabric.is_global_zero:
        (out / "run.json").unlink(missing_ok=True)
    loader = _cached(classifier, pictures, folder, options, fabric) if options.cache else pictures
    return train_lax(
        classifier,
        loader,
        target=folder.target,
        out=out,
        validation=[judged_by.batch],
        validation_images=len(judged_by.images),
        fabric=fabric,
        about=_about(folder, options, fabric),
        **options.training(),
    )


def _about(folder: Folder, options: FolderOptions, fabric: "Fabric") -> dict[str, Any]:
    """What else must be the same for a run to be gone on with."""
    return {
        "images": len(folder.training),
        "pictures": folder.digest(),
        "batch_size": options.batch_size,
        "precision": str(fabric.strategy.precision.precision),
        "cached": options.cache,
    }


def _loader(
    classifier: Classifier, part: Part, options: FolderOptions, fabric: "Fabric"
) -> PictureLoader:
    """Batches in random order: all, or this process's share of them."""
    sampler: Any = "shuffled"
    if fabric.world_size > 1:
        places = (fabric.world_size, fabric.global_rank)
        sampler = DistributedSampler(part.pictures, *places, seed=options.seed)  # type: ignore[arg-type]  # its length is all that is asked
    return PictureLoader(
        part,
        classifier.view,
        options.batch_size,
        sampler=sampler,
        workers=options.workers,
        on_error=options.on_error,
    )


def _cached(
    classifier: Classifier,
    pictures: PictureLoader,
    folder: Folder,
    options: FolderOptions,
    fabric: "Fabric",
) -> Loader:
    if fabric.world_size > 1:
        raise UserError("features are cached in one process: leave out the cache or --devices")
    whole = cache_features(classifier, pictures, folder.target).whole
    return CachedLoader(whole, options.batch_size)


def _read_held_out(classifier: Classifier, part: Part, options: FolderOptions) -> HeldOut:
    loader = PictureLoader(
        part,
        classifier.view,
        options.batch_size,
        sampler="in order",
        on_error=options.on_error,
    )
    given = list(loader)
    names = tuple(p.name for p in part.pictures if p.name not in loader.skipped)
    if len(names) < 2:
        raise UserError(
            f"{len(names)} of {len(part)} images held out for validation can be read: two or more"
            " are needed"
        )
    if part.labels is None:
        return HeldOut(torch.cat(given), None, names, loader.skipped)
    images, labels = (torch.cat(parts) for parts in zip(*given, strict=True))
    return HeldOut(images, labels, names, loader.skipped)


def _skipped(pictures: PictureLoader, out: Path, fabric: "Fabric") -> dict[str, str]:
    """What could not be read, in all processes; of a run that was finished before, what it said."""
    if not pictures.passes:
        earlier = _earlier(out) if fabric.is_global_zero else None
        earlier = fabric.broadcast(earlier)
        if earlier is not None:
            return earlier
        for _ in pictures:
            pass
    found: dict[str, str] = {}
    for rank in range(fabric.world_size):
        found |= fabric.broadcast(pictures.skipped, src=rank)
    return found


def _earlier(out: Path) -> dict[str, str] | None:
    try:
        return dict(json.loads((out / "run.json").read_text())["skipped"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _plain(options: FolderOptions) -> dict[str, Any]:
    return asdict(replace(options, progress=None))
