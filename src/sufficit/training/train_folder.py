"""Train an adapter on a folder of images: the whole chain, from files to files."""

import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from sufficit import plots
from sufficit.classifier.classifier import Classifier
from sufficit.data.batches import TrainingImages
from sufficit.data.loader import OnError
from sufficit.data.pixels import ignore_image_warnings
from sufficit.data.splits import Part, read_folder
from sufficit.errors import EmptyHeatmapWarning, UserError
from sufficit.explainers.lax import Lax
from sufficit.explainers.recipes import LaxRecipe
from sufficit.files import place, read_json, writing
from sufficit.metrics.leakage import leak_warning
from sufficit.outside import as_csv
from sufficit.provenance import provenance, save_json
from sufficit.statistics import Estimate
from sufficit.training.feed import Loader, cache_features
from sufficit.training.lax_training import PATIENCE, best_of, train_lax
from sufficit.training.processes import fabric_for, launch
from sufficit.training.validation import ValidationScores, ValidationSet, predictions

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from matplotlib.figure import Figure

SHARED = ("recipe", "epochs", "area", "alpha_min", "patience", "seed", "overwrite", "progress")
"""The options of a folder that `train_lax` has too."""
SHOWN = 12  # images on the sheet


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
    image_column: str | None = None  # of parquet files
    label_column: str | None = None
    on_error: OnError = "skip"
    overwrite: bool = False
    seed: int = 0
    progress: bool | None = None


@dataclass(frozen=True)
class TrainingOutcome:
    """A trained adapter, and its scores next to Grad-CAM's on the held-out images."""

    lax: Lax
    scored: dict[str, ValidationScores]  # by method
    names: tuple[str, ...]  # of the held-out images
    trained_on: int
    skipped: dict[str, str]  # name -> why
    target: str
    seconds: float  # of this start

    @cached_property
    def summaries(self) -> dict[str, dict[str, Estimate]]:
        """Mean and interval of every column, by method."""
        return {name: found.scores.summary() for name, found in self.scored.items()}

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row per epoch."""
        return list(self.lax.trained["history"])

    @property
    def best_epoch(self) -> int:
        """The epoch of the adapter."""
        return int(best_of(self.history)["epoch"])

    @property
    def warning(self) -> str | None:
        """A warning if the adapter's masks leak."""
        return leak_warning(self.summaries["lax"])

    def in_words(self) -> str:
        """What the numbers mean."""
        lax, cam = self.summaries["lax"], self.summaries["gradcam"]["msi"]
        ours, theirs = (
            f"{found.mean:+.2f} (95 % interval {found.low:+.2f} .. {found.high:+.2f})"
            for found in (lax["msi"], cam)
        )
        return (
            f"Selected epoch {self.best_epoch} (highest MSI minus excess leakage). On"
            f" {len(self.names)} held-out images: MSI {ours}, marking"
            f" {lax['mask_penalty'].mean:.0%} of the image; Grad-CAM: MSI {theirs}. MSI is near +1"
            " if a small region suffices and nothing else does. These images selected the epoch:"
            " score others before you publish a number."
        )


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
    options, out, start = options or FolderOptions(), place(out), time.monotonic()
    share, size = options.validation_share, options.batch_size
    columns = {"image_column": options.image_column, "label_column": options.label_column}
    folder = read_folder(classifier, data, options.target, share, options.seed, **columns)
    fabric = fabric or fabric_for(classifier.device)
    launch(fabric)
    classifier.to(fabric.device)
    with ignore_image_warnings():
        held_out = read_part(folder.validation, classifier, options.on_error, size)
        if len(held_out.names) < 2:
            raise UserError(
                f"Only {len(held_out.names)} of {len(folder.validation)} validation images can be"
                " read, 2 or more are needed: check the files"
            )
        validation = ValidationSet.of(classifier, held_out.images, held_out.targets)
        if options.overwrite and fabric.is_global_zero:
            (out / "run.json").unlink(missing_ok=True)
        sampler: Any = "shuffled"
        if fabric.world_size > 1:  # this process's share
            numbers: Any = range(len(folder.training))
            ranks = (fabric.world_size, fabric.global_rank)
            sampler = DistributedSampler(numbers, *ranks, seed=options.seed)
        reading: Any = {"workers": options.workers, "on_error": options.on_error}
        images = TrainingImages(folder.training, classifier.view, size, sampler=sampler, **reading)
        loader: Loader = images
        if options.cache:
            if fabric.world_size > 1:
                raise UserError("--cache-features works in one process only: drop it, or --devices")
            loader = replace(cache_features(classifier, images, folder.target), batch_size=size)
        about = {
            "images": len(folder.training),
            "pictures": folder.digest(),
            "batch_size": size,
            "precision": str(fabric.strategy.precision.precision),
            "cached": options.cache,
        }
        given = {name: getattr(options, name) for name in SHARED}
        given |= {"target": folder.target, "validation": validation, "about": about}
        lax = train_lax(classifier, loader, out=out, fabric=fabric, **given)
        skipped = held_out.skipped | _skipped(images, out, fabric)
    if not fabric.is_global_zero:
        return None
    alpha_min = lax.trained["recipe"]["alpha_min"]
    with warnings.catch_warnings():
        # Grad-CAM is here for comparison only: its empty maps score as such.
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        # An earlier start that trained the best epoch has not left its scores.
        best = validation.best or validation.score(classifier, lax, alpha_min)
        scored = {"lax": best, "gradcam": validation.score(classifier, "gradcam", alpha_min)}
    count = sum(image.name not in skipped for image in folder.training.images)
    facts = (held_out.names, count, skipped, folder.target, time.monotonic() - start)
    outcome = TrainingOutcome(lax, scored, *facts)
    settings = {**(config or {}), "data": str(data), "options": replace(options, progress=None)}
    _save(out, outcome, validation, classifier, settings)
    return outcome


@dataclass(frozen=True)
class ReadImages:
    """The readable images of a part of a folder, in memory."""

    names: tuple[str, ...]
    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    skipped: dict[str, str]  # name -> why


def read_part(
    part: Part, classifier: Classifier, on_error: OnError, batch_size: int = 32
) -> ReadImages:
    """Read the images of a part in order; those that can't be read are skipped, or stop it.

    The targets are their labels or, if the part has none, the classifier's predictions.
    """
    options: Any = {"sampler": "in order", "on_error": on_error}
    loader = TrainingImages(part, classifier.view, batch_size, **options)
    batches = list(loader)
    names = tuple(image.name for image in part.images if image.name not in loader.skipped)
    if not names:
        name, why = next(iter(loader.skipped.items()))
        raise UserError(
            f"None of {len(part)} images can be read; the first, {name}: {why}. Check the files."
        )
    if part.labels is None:
        images = torch.cat(batches)
        return ReadImages(names, images, predictions(classifier, images), loader.skipped)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return ReadImages(names, images, labels, loader.skipped)


def _skipped(images: TrainingImages, out: Path, fabric: "Fabric") -> dict[str, str]:
    """Unreadable training images of all processes; of a run finished before, those in run.json."""
    if not images.passes:
        earlier = None
        if fabric.is_global_zero:
            with suppress(UserError, KeyError, TypeError, ValueError):
                earlier = dict(read_json(out / "run.json")["skipped"])
        earlier = fabric.broadcast(earlier)
        if earlier is not None:
            return dict(earlier)
        for _ in images:
            pass
    found: dict[str, str] = {}
    for rank in range(fabric.world_size):
        found |= fabric.broadcast(images.skipped, src=rank)
    return found


def _save(
    folder: Path,
    outcome: TrainingOutcome,
    validation: ValidationSet,
    classifier: Classifier,
    config: dict[str, Any],
) -> None:
    """Write history.csv, training.png, sheet.png and, last, run.json; the adapter is there."""
    import pandas

    frame = pandas.DataFrame(outcome.history)
    with writing(folder / "history.csv") as path:
        path.write_text(as_csv(frame), encoding="utf-8")
    figure = plots.training_figure(frame, outcome.best_epoch, len(outcome.names))
    plots.save(figure, folder / "training.png")
    plots.save(_sheet(outcome, validation, classifier), folder / "sheet.png")
    run = provenance(config, classifier.device, classifier.dtype) | {
        "n_trained_on": outcome.trained_on,
        "n_validated_on": len(outcome.names),
        "n_skipped": len(outcome.skipped),
        "targets": outcome.target,
        "best_epoch": outcome.best_epoch,
        "summary": outcome.summaries,
        "leak_warning": outcome.warning,
        "trained": {k: v for k, v in outcome.lax.trained.items() if k != "history"},
        "history": outcome.history,
        "validation_images": outcome.names,
        "skipped": outcome.skipped,
        "seconds": outcome.seconds,
        "seconds_of_training": sum(row["seconds"] for row in outcome.history),
    }
    save_json(folder / "run.json", run)


def _sheet(outcome: TrainingOutcome, validation: ValidationSet, classifier: Classifier) -> "Figure":
    """For some images: the image, the adapter's map and Grad-CAM's, each with its MSI."""
    n = len(outcome.names)
    chosen = torch.linspace(0, n - 1, min(SHOWN, n)).round().long()
    images, targets = validation.images[chosen], validation.targets[chosen].tolist()
    with torch.no_grad():
        probabilities = classifier(images).float().softmax(1).cpu()
    titles = []
    for i, target, row in zip(chosen.tolist(), targets, probabilities, strict=True):
        name, classes = outcome.names[i], classifier.classes
        file = name if len(name) <= 28 else f"...{name[-25:]}"
        word = classes[target][:22] if classes else f"class {target}"
        titles.append(f"{file}\n{word}, p {float(row[target]):.2f}")
    maps = {name: found.heatmaps[chosen] for name, found in outcome.scored.items()}
    captions = {
        name: plots.score_captions({"msi": found.scores.msi[chosen].tolist()})
        for name, found in outcome.scored.items()
    }
    return plots.sheet_figure(images, maps, titles, captions)
