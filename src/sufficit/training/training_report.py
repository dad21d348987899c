"""The result of a training run: scores next to Grad-CAM's, and its files."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sufficit import plots
from sufficit.classifier.classifier import Classifier
from sufficit.errors import EmptyHeatmapWarning
from sufficit.explainers.lax import Lax
from sufficit.files import writing
from sufficit.metrics.leakage import leak_warning
from sufficit.provenance import plain, provenance, save_json
from sufficit.statistics import Estimate
from sufficit.training.lax_training import best_of
from sufficit.training.validation import ValidationScores, ValidationSet

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 12  # images on the sheet


@dataclass(frozen=True)
class TrainingOutcome:
    """A trained adapter, and its scores next to Grad-CAM's on the held-out images."""

    lax: Lax
    scored: dict[str, ValidationScores]  # by method
    summaries: dict[str, dict[str, Estimate]]
    names: tuple[str, ...]  # of the held-out images
    trained_on: int
    skipped: dict[str, str]  # name -> why
    target: str
    seconds: float  # of this start

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
        lax, cam = self.summaries["lax"], self.summaries["gradcam"]
        return (
            f"Selected epoch {self.best_epoch} (highest MSI minus excess leakage). On"
            f" {len(self.names)} held-out images: MSI {_with_interval(lax['msi'])}, marking"
            f" {lax['mask_penalty'].mean:.0%} of the image; Grad-CAM: MSI"
            f" {_with_interval(cam['msi'])}. MSI is near +1 if a small region suffices and nothing"
            " else does. These images selected the epoch: score others before you publish a number."
        )


def outcome_of(
    classifier: Classifier, lax: Lax, validation: ValidationSet, **facts: Any
) -> TrainingOutcome:
    """An adapter with its scores, which the set has unless an earlier start trained the epoch."""
    alpha_min = lax.trained["recipe"]["alpha_min"]
    with warnings.catch_warnings():
        # Grad-CAM is here for comparison only: its empty maps score as such.
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        scored = {
            "lax": validation.best or validation.score(classifier, lax, alpha_min),
            "gradcam": validation.score(classifier, "gradcam", alpha_min),
        }
    summaries = {name: found.scores.summary() for name, found in scored.items()}
    return TrainingOutcome(lax, scored, summaries, **facts)


def save_outcome(
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
        frame.to_csv(path, index=False)
    figure = training_figure(frame, outcome.best_epoch, len(outcome.names))
    plots.save(figure, folder / "training.png")
    plots.save(_sheet(outcome, validation, classifier), folder / "sheet.png")
    facts = {
        "n_trained_on": outcome.trained_on,
        "n_validated_on": len(outcome.names),
        "n_skipped": len(outcome.skipped),
        "targets": outcome.target,
        "best_epoch": outcome.best_epoch,
        "summary": {name: plain(found) for name, found in outcome.summaries.items()},
        "leak_warning": outcome.warning,
        "trained": {k: v for k, v in outcome.lax.trained.items() if k != "history"},
        "history": outcome.history,
        "validation_images": list(outcome.names),
        "skipped": outcome.skipped,
        "seconds": outcome.seconds,
        "seconds_of_training": sum(row["seconds"] for row in outcome.history),
    }
    run = provenance(config, classifier.device, classifier.dtype)
    save_json(folder / "run.json", run | facts)


def _sheet(outcome: TrainingOutcome, validation: ValidationSet, classifier: Classifier) -> "Figure":
    """For some images: the image, the adapter's map and Grad-CAM's, each with its MSI."""
    n = len(outcome.names)
    chosen = torch.linspace(0, n - 1, min(SHOWN, n)).round().long()
    images, targets = validation.images[chosen], validation.targets[chosen].tolist()
    with torch.no_grad():
        probabilities = classifier(images).float().softmax(1).cpu()
    titles = [
        _title(outcome.names[i], target, float(row[target]), classifier.classes)
        for i, target, row in zip(chosen.tolist(), targets, probabilities, strict=True)
    ]
    maps = {name: found.heatmaps[chosen] for name, found in outcome.scored.items()}
    captions = {
        name: [f"MSI {value:+.2f}" for value in found.scores.msi[chosen].tolist()]
        for name, found in outcome.scored.items()
    }
    return plots.sheet_figure(images, maps, titles, captions)


def _title(name: str, target: int, probability: float, classes: Sequence[str] | None) -> str:
    """The file, and the explained class with its probability."""
    word = classes[target][:22] if classes else f"class {target}"
    return f"{name if len(name) <= 28 else f'...{name[-25:]}'}\n{word}, p {probability:.2f}"


def _with_interval(found: Estimate) -> str:
    return f"{found.mean:+.2f} (95 % interval {found.low:+.2f} .. {found.high:+.2f})"


def training_figure(history: "pandas.DataFrame", best: int, n: int) -> "Figure":
    """The scores, the leakage and the loss of each epoch, a panel each."""
    figure, axes = plots.axes_for(3)
    shown = {"base_score": plots.SHOW, "mask_penalty": plots.HIDE, "msi": plots.INK}
    _panel(axes[0], history, shown, (f"On {n} held-out images", "score"), best)
    axes[0].axhline(0, color=plots.QUIET, linewidth=0.6)
    leaks = {"leak": plots.HIDE, "leak_chance": plots.QUIET}
    titles = ("Leakage and chance, held-out images", "share of donor images")
    _panel(axes[1], history, leaks, titles, best)
    axes[1].set_ylim(0, max(0.05, 1.1 * float(history[[*leaks]].max().max())))
    _panel(axes[2], history, {"loss": plots.INK}, ("Training", "loss"), best)
    other = axes[2].twinx()
    _panel(other, history, {"accuracy": plots.SHOW}, ("", "accuracy on masked images"), best)
    other.set_ylim(0, 1.02)
    other.yaxis.label.set_color(plots.SHOW)
    other.tick_params(colors=plots.SHOW)
    other.spines["right"].set_visible(True)
    title = f"Training, epoch by epoch; epoch {best} is selected"
    figure.suptitle(title, fontsize=10, color=plots.INK)
    return figure


def _panel(
    axis: "Axes",
    history: "pandas.DataFrame",
    colours: dict[str, str],
    titles: tuple[str, str],
    best: int,
) -> None:
    """A line per column over the epochs; a dotted line marks the best epoch."""
    from matplotlib.ticker import MaxNLocator

    marker = "o" if len(history) < 30 else None
    look: dict[str, Any] = {"linewidth": 1.6, "marker": marker, "markersize": 3}
    for name, colour in colours.items():
        label = {"msi": "MSI", "leak_chance": "chance"}.get(name, name.replace("_", " "))
        axis.plot(history["epoch"], history[name], color=colour, label=label, **look)
    if len(colours) > 1:
        axis.legend(frameon=False, fontsize=7)
    axis.axvline(best, color=plots.QUIET, linestyle=":", linewidth=1)
    axis.set_title(titles[0], fontsize=9, color=plots.INK)
    axis.set_xlabel("epoch", fontsize=8)
    axis.set_ylabel(titles[1], fontsize=8)
    axis.tick_params(labelsize=7)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
