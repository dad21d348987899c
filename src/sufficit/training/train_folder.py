"""Train an adapter on a folder of images: the whole chain, from files to files."""

import time
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from sufficit import plots
from sufficit.classifier.classifier import Classifier
from sufficit.data.pixels import ignore_image_warnings
from sufficit.errors import EmptyHeatmapWarning, UserError
from sufficit.explainers.lax import Lax
from sufficit.explainers.recipes import LaxRecipe
from sufficit.files import place, writing
from sufficit.metrics.leakage import leak_warning
from sufficit.outside import as_csv
from sufficit.provenance import provenance, save_json
from sufficit.statistics import Estimate
from sufficit.training.feed import Loader, cache_features
from sufficit.training.folder_images import ReadingOptions, open_folder
from sufficit.training.lax_training import best_of, train_lax
from sufficit.training.processes import fabric_for
from sufficit.training.validation import ValidationScores, ValidationSet

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from matplotlib.figure import Figure

SHARED = ("recipe", "epochs", "area", "alpha_min", "patience", "seed", "overwrite", "progress")
"""The options of a folder that `train_lax` has too."""
SHOWN = 12  # images on the sheet


@dataclass(frozen=True)
class FolderOptions(ReadingOptions):
    """How to train an adapter on a folder: the options of `train_lax`, and how files are read."""

    recipe: str | LaxRecipe = "robust"
    target: Literal["auto", "label", "prediction"] = "auto"
    epochs: int | None = None
    area: float | None = None
    alpha_min: float | None = None
    cache: bool = False  # keep all images and features in memory


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
    fabric = fabric or fabric_for(classifier.device)
    with ignore_image_warnings():
        found = open_folder(classifier, data, options.target, options, fabric)
        folder, held_out, images = found.folder, found.held_out, found.images
        validation = ValidationSet.of(classifier, held_out.images, held_out.targets)
        if options.overwrite and fabric.is_global_zero:
            (out / "run.json").unlink(missing_ok=True)
        loader: Loader = images
        if options.cache:
            if fabric.world_size > 1:
                raise UserError("--cache-features works in one process only: drop it, or --devices")
            cached = cache_features(classifier, images, folder.target)
            loader = replace(cached, batch_size=options.batch_size)
        about = found.about | {"cached": options.cache}
        given = {name: getattr(options, name) for name in SHARED}
        given |= {"target": folder.target, "validation": validation, "about": about}
        lax = train_lax(classifier, loader, out=out, fabric=fabric, **given)
        skipped = found.skipped(out, fabric)
    if not fabric.is_global_zero:
        return None
    alpha_min = lax.trained["recipe"]["alpha_min"]
    with warnings.catch_warnings():
        # Grad-CAM is here for comparison only: its empty maps score as such.
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        # An earlier start that trained the best epoch has not left its scores.
        best = validation.best or validation.score(classifier, lax, alpha_min)
        scored = {"lax": best, "gradcam": validation.score(classifier, "gradcam", alpha_min)}
    facts = (held_out.names, found.count(skipped), skipped, folder.target, time.monotonic() - start)
    outcome = TrainingOutcome(lax, scored, *facts)
    settings = {**(config or {}), "data": str(data), "options": replace(options, progress=None)}
    _save(out, outcome, validation, classifier, settings)
    return outcome


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
