"""Does a method's map depend on what the model has learned? (Adebayo et al. 2018.)"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier, check_classifier, check_images, check_targets
from sufficit.errors import EmptyHeatmapWarning
from sufficit.explainers import CAMS, Methods, explain_all, methods_for
from sufficit.progress import bar
from sufficit.sanity.randomising import (
    EPOCHS,
    STEPS,
    Pairs,
    cascade,
    copied,
    randomise,
    train_on_random_labels,
)
from sufficit.sanity.report import THRESHOLD, Likeness, SanityReport
from sufficit.seeds import seeded
from sufficit.similarity import rank_correlation, structural_similarity


def sanity_check(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    methods: Methods = CAMS,
    *,
    steps: int = STEPS,
    random_labels: Pairs | None = None,
    epochs: int = EPOCHS,
    threshold: float = THRESHOLD,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> SanityReport:
    """Compare each method's maps with those for a copy of the model that is made random.

    The copy's layers are re-initialised from the output downwards, in at most `steps` blocks; the
    targets stay those given, or the original model's predictions. `random_labels`, a loader of
    (images, labels), adds a copy trained on permuted labels. The model itself is not touched. An
    adapter must belong to the model, and then draws from the features of its copies too.
    """
    check_classifier(classifier)
    check_images(images)
    goals = check_targets(targets, len(images))
    goals = predictions(classifier, images) if goals is None else goals
    known = methods_for(methods, classifier)
    drawing = _Drawing(images, goals, known, layer, batch_size, seed)
    original = drawing.of(classifier)
    fallen = _cascade(classifier, drawing, original, steps, progress)
    labelled: list[Likeness] = []
    training = None
    if random_labels is not None:
        student, training = train_on_random_labels(
            classifier, random_labels, epochs=epochs, seed=seed, progress=progress
        )
        labelled = drawing.likenesses(student, original, None, "all, trained on random labels")
    return SanityReport(tuple(fallen), tuple(labelled), training, goals.cpu(), threshold, seed)


@dataclass(frozen=True)
class _Drawing:
    """What is drawn the same way for every model."""

    images: Tensor
    targets: Tensor
    methods: Methods
    layer: str | None
    batch_size: int | None
    seed: int

    def of(self, classifier: Classifier) -> dict[str, Tensor]:
        """The maps of every method; a method that draws lots draws the same for every model."""
        with seeded(self.seed):
            return explain_all(
                classifier,
                self.images,
                self.targets,
                self.methods,
                layer=self.layer,
                batch_size=self.batch_size,
                seed=self.seed,
                progress=False,
            )

    def likenesses(
        self, copy: Classifier, original: dict[str, Tensor], step: int | None, layer: str
    ) -> list[Likeness]:
        """How like the original maps those of a changed copy are, by every method."""
        with warnings.catch_warnings():
            # Maps that became empty are counted as NaN.
            warnings.simplefilter("ignore", EmptyHeatmapWarning)
            maps = self.of(copy)
        return [
            Likeness(
                name,
                step,
                layer,
                rank_correlation(original[name], maps[name]),
                structural_similarity(original[name], maps[name]),
            )
            for name in original
        ]


def _cascade(
    classifier: Classifier,
    drawing: _Drawing,
    original: dict[str, Tensor],
    steps: int,
    progress: bool | None,
) -> list[Likeness]:
    """Randomise a copy block by block, and draw after each: method by method within a step."""
    copy = copied(classifier)
    blocks = cascade(copy, drawing.images, steps)
    found: list[Likeness] = []
    with bar("randomising layers", progress) as tick:
        for step, block in enumerate(blocks, 1):
            randomise(copy.bare, block, drawing.seed)
            found += drawing.likenesses(copy, original, step, block.name)
            if tick:
                tick(step, len(blocks))
    return found


def predictions(classifier: Classifier, images: Tensor) -> Tensor:
    """The model's own classes: [N,C,H,W] -> [N]."""
    with torch.no_grad():
        return torch.cat([classifier(batch).argmax(1).cpu() for batch in images.split(64)])
