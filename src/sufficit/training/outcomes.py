"""What a training run gave: an adapter judged beside Grad-CAM, and its story on disk."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sufficit import plots as figures
from sufficit.classifier.classifier import Classifier
from sufficit.errors import EmptyHeatmapWarning
from sufficit.explainers import Method, explain_all
from sufficit.explainers.lax import Lax
from sufficit.files import writing
from sufficit.metrics.leakage import leak_warning
from sufficit.metrics.scores import Scores, evaluate
from sufficit.results import Estimate, as_json, provenance, save_json, summarise
from sufficit.training.figure import training_figure
from sufficit.training.runs import best_of
from sufficit.training.validation import DONORS, VALUE_STEP, examination_of

SHOWN = 12
COLUMNS = ("base_score", "mask_penalty", "msi")


@dataclass(frozen=True)
class HeldOut:
    """The pictures an adapter is judged by; it was not trained on them."""

    images: Tensor  # [N,C,H,W]
    labels: Tensor | None  # [N]
    names: tuple[str, ...]
    skipped: dict[str, str]  # name -> why

    @property
    def batch(self) -> Any:
        """All of them as a loader gives them."""
        return self.images if self.labels is None else (self.images, self.labels)


@dataclass(frozen=True)
class Outcome:
    """A trained adapter, and how it stands beside Grad-CAM on the held-out pictures."""

    lax: Lax
    heatmaps: dict[str, Tensor]  # method -> [N,H,W]
    scores: dict[str, Scores]
    summaries: dict[str, dict[str, Estimate]]
    trained_on: int
    validated_on: int
    skipped: dict[str, str]  # name -> why
    target: str
    seconds: float  # of this start

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row an epoch."""
        return list(self.lax.trained["history"])

    @property
    def best(self) -> dict[str, Any]:
        """The row of the epoch the adapter is of."""
        return best_of(self.history)

    @property
    def warning(self) -> str | None:
        """Whether the adapter's masks leak, in words."""
        return leak_warning(self.summaries["lax"])

    def in_words(self) -> str:
        """What the numbers mean."""
        lax, cam = self.summaries["lax"], self.summaries["gradcam"]
        msi, penalty = lax["msi"], lax["mask_penalty"]
        return (
            f"The adapter of epoch {self.best['epoch']} is the best by MSI less what leaks above"
            f" chance: on {self.validated_on} images it was not trained on its MSI is"
            f" {_with_interval(msi)}, and it marks {penalty.mean:.0%} of the image; Grad-CAM's is"
            f" {_with_interval(cam['msi'])}. MSI is near +1 when a small region suffices and"
            " nothing else does. These images chose the epoch: score others before you"
            " publish a number."
        )


def judge(
    classifier: Classifier,
    lax: Lax,
    held_out: HeldOut,
    trained_on: int,
    skipped: dict[str, str],
    target: str,
    seconds: float,
) -> Outcome:
    """Score the adapter and Grad-CAM on the held-out pictures, as every epoch was scored."""
    exam = examination_of(classifier, held_out.images, held_out.labels)
    with warnings.catch_warnings():
        # Grad-CAM is only there to be compared with: its empty maps score as such.
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        methods: dict[str, Method] = {"lax": lax, "gradcam": "gradcam"}
        maps = explain_all(classifier, exam.images, exam.targets, methods, progress=False)
    alpha_min = lax.trained["recipe"]["alpha_min"]
    scores = {
        name: evaluate(
            classifier,
            exam.images,
            heatmaps,
            exam.targets,
            alpha_min=alpha_min,
            value_step=VALUE_STEP,
            columns=COLUMNS,
            leak_donors=DONORS,
            progress=False,
        )
        for name, heatmaps in maps.items()
    }
    summaries = {name: summarise(found) for name, found in scores.items()}
    shown = {name: heatmaps.cpu() for name, heatmaps in maps.items()}
    n = len(held_out.names)
    return Outcome(lax, shown, scores, summaries, trained_on, n, skipped, target, seconds)


def save_outcome(
    folder: Path,
    outcome: Outcome,
    held_out: HeldOut,
    classifier: Classifier,
    config: dict[str, Any],
) -> None:
    """Write the adapter, history.csv, training.png, sheet.png and, last, run.json."""
    import pandas

    outcome.lax.save_pretrained(folder)
    frame = pandas.DataFrame(outcome.history)
    with writing(folder / "history.csv") as path:
        frame.to_csv(path, index=False)
    figure = training_figure(frame, int(outcome.best["epoch"]), outcome.validated_on)
    figures.save(figure, folder / "training.png")
    figures.save(_sheet(outcome, held_out, classifier), folder / "sheet.png")
    run = provenance(config, classifier.device, classifier.dtype)
    save_json(folder / "run.json", run | _facts(outcome, held_out))


def _facts(outcome: Outcome, held_out: HeldOut) -> dict[str, Any]:
    return {
        "n_trained_on": outcome.trained_on,
        "n_validated_on": outcome.validated_on,
        "n_skipped": len(outcome.skipped),
        "targets": outcome.target,
        "best_epoch": outcome.best["epoch"],
        "summary": {name: as_json(found) for name, found in outcome.summaries.items()},
        "leak_warning": outcome.warning,
        "trained": {k: v for k, v in outcome.lax.trained.items() if k != "history"},
        "history": outcome.history,
        "validation_images": list(held_out.names),
        "skipped": outcome.skipped,
        "seconds": outcome.seconds,
        "seconds_of_training": sum(row["seconds"] for row in outcome.history),
    }


def _sheet(outcome: Outcome, held_out: HeldOut, classifier: Classifier) -> Any:
    """The image, the adapter's map and Grad-CAM's, each with its MSI, for a few pictures."""
    n = len(held_out.names)
    chosen = torch.linspace(0, n - 1, min(SHOWN, n)).round().long()
    with torch.no_grad():
        said = classifier(held_out.images[chosen]).float().softmax(1).cpu()
    targets = outcome.scores["lax"].targets[chosen].tolist()
    names = [held_out.names[i] for i in chosen.tolist()]
    facts = zip(names, said, targets, strict=True)
    titles = [_title(*fact, classifier.classes) for fact in facts]
    maps = {name: heatmaps[chosen] for name, heatmaps in outcome.heatmaps.items()}
    captions = {
        name: [f"MSI {value:+.2f}" for value in outcome.scores[name].msi[chosen].tolist()]
        for name in maps
    }
    return figures.sheet_figure(held_out.images[chosen], maps, titles, captions)


def _title(name: str, said: Tensor, target: int, classes: Sequence[str] | None) -> str:
    """File, and the class that is explained with its probability."""
    word = classes[target][:22] if classes else f"class {target}"
    return f"{name if len(name) <= 28 else f'...{name[-25:]}'}\n{word}, p {said[target]:.2f}"


def _with_interval(found: Estimate) -> str:
    return f"{found.mean:+.2f} (95 % interval {found.low:+.2f} .. {found.high:+.2f})"
