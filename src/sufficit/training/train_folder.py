"""Train an adapter, or a twin, on a folder of images: the whole chain, from files to files."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sufficit import plots
from sufficit.classifier.checkpoint import check_saving
from sufficit.classifier.classifier import Classifier
from sufficit.data.image_files import ignore_image_warnings
from sufficit.declared import FolderOptions, TwinOptions
from sufficit.errors import EmptyHeatmapWarning, UserError, warn_user
from sufficit.explainers import Method
from sufficit.explainers.explanation import draw_all
from sufficit.explainers.lax import Lax
from sufficit.files import place, read_json, writing
from sufficit.metrics.leakage import leak_warning
from sufficit.outside import as_csv
from sufficit.progress import duration
from sufficit.provenance import plain, provenance, save_json
from sufficit.training.feed import Loader, cache_features
from sufficit.training.folder_images import FolderImages, open_folder
from sufficit.training.lax_training import (
    best_of,
    seconds_per_pass,
    train_lax,
    usual_precision,
)
from sufficit.training.level_sets import LevelSets, level_sets
from sufficit.training.processes import fabric_for
from sufficit.training.recipes import OrderRecipe, recipe_of
from sufficit.training.twin_training import train_twin
from sufficit.training.validation import (
    CONTROLS,
    Accuracy,
    Trust,
    ValidationScores,
    ValidationSet,
    leak_summary,
    predictions,
    trust,
)

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from matplotlib.figure import Figure
    from pandas import DataFrame

PASSES_OF_VERDICT = 350  # per held-out image: five methods scored, level sets of two
SHOWN = 12  # images on the sheet
STEPS = 1500  # that a training has at least, unless epochs are given; of an order, its recipe's
BATCH, SMALL_BATCH = 192, 32  # of an order on a GPU, and of anything else


@dataclass(frozen=True)
class TrainingOutcome:
    """A trained adapter, the verdict on it, and what run.json holds."""

    lax: Lax
    trust: Trust
    record: dict[str, Any]

    def in_words(self) -> str:
        """What the numbers mean."""
        lax, cam = (self.record["summary"][name] for name in ("lax", "gradcam"))
        ours, theirs = (
            f"{found.mean:+.2f} (95 % interval {found.low:+.2f} .. {found.high:+.2f})"
            for found in (lax["msi"], cam["msi"])
        )
        accuracy = self.record["accuracy"]
        right = "" if accuracy is None else f" {accuracy.words}"
        if self.lax.head is not None:
            steps = sum(row["steps"] for row in self.record["history"])
            return (
                f"Trained for {steps} steps. Its maps mark {self.lax.marks},"
                f" {self.record['size_from']}. On {self.record['n_validated_on']} held-out images:"
                f" MSI {ours}; Grad-CAM: MSI {theirs}. MSI is near +1 if a small region suffices"
                f" and nothing else does. Score others before you publish a number.{right}"
            )
        return (
            f"Selected epoch {self.record['best_epoch']}, the last of the best by MSI and leakage."
            f" On {self.record['n_validated_on']} held-out images: MSI {ours}, marking"
            f" {lax['mask_penalty'].mean:.0%} of the image; Grad-CAM: MSI {theirs}. MSI is near +1"
            " if a small region suffices and nothing else does. These images selected the epoch:"
            f" score others before you publish a number.{right}"
        )


def train_folder(
    classifier: Classifier,
    data: str | Path,
    out: str | Path,
    options: FolderOptions | None = None,
    *,
    fabric: "Fabric | None" = None,
    config: dict[str, Any] | None = None,
    announce: Callable[[str], None] | None = None,
) -> TrainingOutcome | None:
    """Train an adapter on the images below a folder and write it, with its history, to `out`.

    The same call resumes an interrupted run. With several processes, which `fabric` starts, only
    the first returns an outcome. `config` is stored in run.json. `announce` gets a sentence on how
    long the training will take, before it starts.
    """
    out, start = place(out), time.monotonic()
    options = options or FolderOptions()
    fabric = fabric or fabric_for(
        classifier.device, precision=usual_precision(classifier, recipe_of(options.recipe))
    )
    options = planned(options, fabric.device)
    with ignore_image_warnings():
        found = open_folder(classifier, data, options.target, options, fabric)
        target, images = found.folder.target, found.images
        validation = ValidationSet.of(classifier, found.held_out, found.labels)
        accuracy = _accuracy(classifier, found)
        if accuracy is not None and accuracy.poor and fabric.is_global_zero:
            warn_user(accuracy.words)
        if options.overwrite and fabric.is_global_zero:
            (out / "run.json").unlink(missing_ok=True)
        loader: Loader = images
        if options.cache:
            if fabric.world_size > 1:
                raise UserError("--cache-features works in one process only: drop it, or --devices")
            cached = cache_features(classifier, images, target, layers=options.layers or ())
            loader = replace(cached, batch_size=options.batch_size or SMALL_BATCH)
        about = found.about | {"cached": options.cache}
        lax = train_lax(
            classifier,
            loader,
            recipe=options.recipe,
            target=target,
            epochs=_epochs(options, len(images)),
            area=options.area,
            seed=options.seed,
            out=out,
            validation=validation,
            alpha_min=options.alpha_min,
            class_free=options.class_free,
            layers=options.layers,
            deterministic=options.deterministic,
            patience=options.patience,
            overwrite=options.overwrite,
            fabric=fabric,
            about=about,
            progress=options.progress,
            announce=with_the_verdict(announce, classifier, validation),
        )
        images_read = found.record(out, fabric)
    if not fabric.is_global_zero:
        return None
    alpha_min, history = lax.trained["recipe"]["alpha_min"], list(lax.trained["history"])
    with warnings.catch_warnings():
        # Grad-CAM is here for comparison only: its empty maps score as such.
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        methods: dict[str, Method] = {"lax": lax, "gradcam": "gradcam"}
        methods |= {name: name for name in CONTROLS}
        scored = {
            name: validation.score(classifier, method, alpha_min, last=True)
            for name, method in methods.items()
        }
    scores = {name: one.scores for name, one in scored.items()}
    sets = {name: _level_sets(classifier, validation, methods[name]) for name in ("lax", "gradcam")}
    judged = trust(scores, alpha_min, sets)
    summary = {name: one.summary() for name, one in scores.items()}
    settings = {**(config or {}), "data": str(data), "options": replace(options, progress=None)}
    record = provenance(settings, classifier.device, classifier.dtype) | {
        **images_read,
        "targets": target,
        "accuracy": accuracy,  # of the model, on the labels of the validation images
        "best_epoch": int(best_of(history)["epoch"]),
        "summary": summary,
        "common_size": {
            name: {"size": s.size, "msi": float(s.at_best.mean())} for name, s in sets.items()
        },
        "size_from": size_from(lax, options.area),
        "leak_warning": leak_warning(leak_summary(scores)),
        "trust": {
            "trusted": judged.trusted,
            "verdict": judged.verdict,
            "checks": judged.checks,
        },
        "trained": {k: v for k, v in lax.trained.items() if k != "history"},
        "history": history,
        "seconds": time.monotonic() - start,
        "seconds_of_training": sum(row["seconds"] for row in history),
    }
    outcome = TrainingOutcome(lax, judged, record)
    sheet = _sheet(scored, found.names, validation, classifier)
    figure = plots.training_figure(_history(out, history), record["best_epoch"], len(found.names))
    plots.save(figure, out / "training.png")
    plots.save(sheet, out / "sheet.png")
    verdict, *checks = judged.lines()
    listed = "\n".join(f"- {check}" for check in checks)
    page = f"# Can this adapter be trusted?\n\n{verdict}\n\n{listed}\n\n{outcome.in_words()}\n"
    with writing(out / "trust.md") as path:
        path.write_text(page, encoding="utf-8")
    save_json(out / "run.json", record)  # last: it says that all is there
    return outcome


def size_from(lax: Lax, area: float | None) -> str:
    """Why its maps mark as much as they do, and what the other way is worth."""
    if area is not None:
        return "as asked"
    looks = [row for row in lax.trained["history"] if "msi_one_size" in row]
    last = looks[-1] if looks else {}
    if "msi_predicted_sizes" not in last:
        return "which is best on these images"
    one, predicted = last["msi_one_size"], last["msi_predicted_sizes"]
    if lax.size_head is None:
        return (
            "which is best on these images: sizes predicted for each are not significantly better"
            f" (MSI {predicted:+.2f} against {one:+.2f}, each on images that did not fit it)"
        )
    return (
        f"which is better than one size for all (MSI {predicted:+.2f} against {one:+.2f}, each on"
        " images that did not fit it)"
    )


def with_the_verdict(
    announce: Callable[[str], None] | None, classifier: Classifier, validation: ValidationSet
) -> Callable[[str], None] | None:
    """Announce a forecast with the time of the verdict added."""
    if announce is None:
        return None

    def tell(forecast: str) -> None:
        n = len(validation.images)
        seconds = n * PASSES_OF_VERDICT * seconds_per_pass(classifier, validation.images)
        announce(f"{forecast} To judge it on {n} held-out images takes {duration(seconds)}.")

    return tell


def _accuracy(classifier: Classifier, found: FolderImages) -> Accuracy | None:
    """The classifier's accuracy on the images held out, where they have labels."""
    if found.labels is None:
        return None
    return Accuracy.of(predictions(classifier, found.held_out), found.labels)


def _history(folder: Path, history: list[dict[str, Any]]) -> "DataFrame":
    """The rows of all epochs as a table, which history.csv gets."""
    import pandas

    frame = pandas.DataFrame(history)
    with writing(folder / "history.csv") as path:
        path.write_text(as_csv(frame), encoding="utf-8")
    return frame


def planned(options: FolderOptions, device: torch.device) -> FolderOptions:
    """The options with a batch size that fits the recipe and the device.

    On a CPU an order sees a sixth of the images that it sees on a GPU: that many are nearly enough.
    """
    recipe = recipe_of(options.recipe, None, options.area, options.alpha_min, options.class_free)
    small = device.type == "cpu" or not isinstance(recipe, OrderRecipe)
    options = replace(options, batch_size=options.batch_size or (SMALL_BATCH if small else BATCH))
    if options.cache and isinstance(recipe, OrderRecipe):
        raise UserError(
            "robust shows another view of each image in every epoch, so features cannot be cached:"
            " drop --cache-features"
        )
    return options


def _epochs(options: FolderOptions, batches: int) -> int | None:
    """The epochs that are asked for; else few images get more than the recipe has."""
    recipe = recipe_of(options.recipe, None, options.area, options.alpha_min)
    if options.epochs is not None or isinstance(recipe, OrderRecipe):
        return options.epochs
    return max(recipe.epochs, math.ceil(STEPS / max(1, batches)))


def _level_sets(classifier: Classifier, validation: ValidationSet, method: Method) -> LevelSets:
    """What the model says of the level sets of a method's maps of the validation images."""
    images, targets = validation.images, validation.targets
    drawn = draw_all(classifier, images, targets, {"method": method}, progress=False)
    return level_sets(classifier, images, targets, drawn["method"].maps)


def _sheet(
    scored: Mapping[str, ValidationScores],
    names: Sequence[str],
    validation: ValidationSet,
    classifier: Classifier,
) -> "Figure":
    """For some images: the image, the adapter's map and Grad-CAM's, each with its MSI."""
    n, classes = len(names), classifier.classes
    chosen = torch.linspace(0, n - 1, min(SHOWN, n)).round().long()
    images, targets = validation.images[chosen], validation.targets[chosen].tolist()
    with torch.no_grad():
        probabilities = classifier(images).float().softmax(1).cpu()
    titles = []
    for i, target, row in zip(chosen.tolist(), targets, probabilities, strict=True):
        file = names[i] if len(names[i]) <= 28 else f"...{names[i][-25:]}"
        word = classes[target][:22] if classes else f"class {target}"
        titles.append(f"{file}\n{word}, p {float(row[target]):.2f}")
    shown = {name: found for name, found in scored.items() if name not in CONTROLS}
    maps = {name: found.heatmaps[chosen] for name, found in shown.items()}
    captions = {
        name: plots.score_captions({"msi": found.scores.msi[chosen].tolist()})
        for name, found in shown.items()
    }
    return plots.sheet_figure(images, maps, titles, captions)


def train_twin_folder(
    classifier: Classifier,
    data: str | Path,
    out: str | Path,
    options: TwinOptions | None = None,
    *,
    fabric: "Fabric | None" = None,
    config: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train a twin on the images below a folder; return what run.json holds.

    `out` gets the twin, history.csv and run.json. The same call resumes an interrupted run. With
    several processes, which `fabric` starts, only the first returns a record.
    """
    options, out, start = options or TwinOptions(), place(out), time.monotonic()
    check_saving(classifier)
    fabric = fabric or fabric_for(classifier.device)
    with ignore_image_warnings():
        wanted: Any = "label" if options.target == "label" else "auto"
        found = open_folder(classifier, data, wanted, options, fabric)
        held, labels = found.held_out, found.labels
        if options.overwrite and fabric.is_global_zero:
            (out / "run.json").unlink(missing_ok=True)
        train_twin(
            classifier,
            found.images,
            target=options.target,
            epochs=options.epochs,
            lr=options.lr,
            seed=options.seed,
            out=out,
            validation=[held if labels is None else (held, labels)],
            validation_images=len(held),
            patience=options.patience,
            overwrite=options.overwrite,
            fabric=fabric,
            about=found.about,
            progress=options.progress,
        )
        images_read = found.record(out, fabric)
    if not fabric.is_global_zero:
        return None
    record: dict[str, Any] = read_json(out / "run.json")
    _history(out, record["history"])
    settings = {**(config or {}), "data": str(data), "options": replace(options, progress=None)}
    record |= images_read | {
        "config": plain(record["config"] | settings),
        "seconds": time.monotonic() - start,
    }
    save_json(out / "run.json", record)
    return record
