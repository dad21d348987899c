"""Does a method's heatmap depend on what the model has learned? (Adebayo et al. 2018.)

A check of a folder opens, draws, labels and reads its images as every run does: by a job. The maps
of the changed copies are no units of a run. A run per copy would hash each copy's weights and
write and read every map, to resume what takes seconds; copies as heatmap sources of one run would
all be in memory, and share no forward pass between methods.
"""

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from markupsafe import Markup
from torch import Tensor

from sufficit import plots
from sufficit.classifier import randomization
from sufficit.classifier.classifier import Classifier, check_classifier, check_images, check_targets
from sufficit.classifier.randomization import STEPS, randomise
from sufficit.data.image_files import ignore_image_warnings
from sufficit.data.loader import check_any
from sufficit.errors import EmptyHeatmapWarning
from sufficit.explainers import CAMS, Methods, methods_for
from sufficit.explainers.explanation import draw_all
from sufficit.explainers.words import ToFit, methods_from, sources_from
from sufficit.files import make_folder, writing
from sufficit.outside import as_csv
from sufficit.progress import bar
from sufficit.provenance import provenance, save_json
from sufficit.runs.config import RunConfig
from sufficit.runs.job import make_job
from sufficit.runs.unit_rows import SKIPPED
from sufficit.seeds import seeded
from sufficit.similarity import estimate, rank_correlation, structural_similarity
from sufficit.statistics import Estimate
from sufficit.sums import few_images
from sufficit.training.validation import predictions

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


THRESHOLD = 0.5  # at this rank correlation a quarter of the ranks' variance is shared
Verdict = Literal["passes", "insensitive", "undecided"]


@dataclass(frozen=True)
class Likeness:
    """Per image, the similarity of a method's heatmaps for the original and for a changed model."""

    method: str
    step: int  # randomised blocks
    layer: str  # the block randomised last
    rank_correlation: Tensor  # [N], NaN for constant heatmaps
    ssim: Tensor  # [N]


@dataclass(frozen=True)
class SanityReport:
    """The similarities of every method after each step of the cascade."""

    cascade: tuple[Likeness, ...]
    targets: Tensor  # [N] the explained classes
    threshold: float
    seed: int

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order given."""
        return tuple(dict.fromkeys(found.method for found in self.cascade))

    def frame(self) -> "pandas.DataFrame":
        """Return a row per method and step: means with 95 % intervals; NaN is counted."""
        import pandas

        rows = []
        for found in self.cascade:
            row: dict[str, Any] = {"method": found.method, "step": found.step, "layer": found.layer}
            for name in ("rank_correlation", "ssim"):
                value = estimate(getattr(found, name), seed=self.seed)
                row |= {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
            missing = int(found.rank_correlation.isnan().sum())  # a constant heatmap has none
            rows.append(row | {"n": len(found.rank_correlation), "n_nan": missing})
        return pandas.DataFrame(rows)

    def cascade_of(self, method: str) -> list[Likeness]:
        """Return the similarities of one method, step by step."""
        return [found for found in self.cascade if found.method == method]

    def verdicts(self) -> dict[str, Verdict]:
        """Return each method's verdict: rank correlation at the end against the threshold."""
        return {one.method: _verdict(self._mean(one), self.threshold) for one in self._ends()}

    def sentences(self) -> dict[str, str]:
        """Return the finding for each method, in words."""
        return {one.method: self._sentence(one) for one in self._ends()}

    def figure(self) -> "Figure":
        """Rank correlation and SSIM over the cascade, a line per method."""
        return plots.sanity_figure(self.frame(), self.threshold, len(self.targets))

    def _ends(self) -> list[Likeness]:
        """Return the last step of each method, with all layers random."""
        return [self.cascade_of(method)[-1] for method in self.methods]

    def _mean(self, found: Likeness) -> Estimate:
        """Return the mean rank correlation after a step."""
        return estimate(found.rank_correlation, seed=self.seed)

    def _sentence(self, last: Likeness) -> str:
        """Return the finding for a method, by the last step of the cascade."""
        end = self._mean(last)
        verdict = _verdict(end, self.threshold)
        if _too_few(end):
            words = f"undecided: {_missing(end)}"
        else:
            words = {
                "insensitive": "insensitive to the weights: rank correlation is still",
                "passes": "passes: rank correlation falls to",
                "undecided": "undecided, use more images: rank correlation is",
            }[verdict]
            words += f" {_value(end)} with all layers random"
            words += f" ({_missing(end)})" if end.n_nan else ""
        if verdict == "passes":  # say from which layer on
            steps = self.cascade_of(last.method)
            means = [float(found.rank_correlation.nanmean()) for found in steps]
            # The last step at which maps are still alike, counted from 1.
            high = [number for number, mean in enumerate(means, 1) if mean >= self.threshold]
            layer = steps[high[-1] if high else 0].layer
            words += f", and stays below {self.threshold:g} once {layer} is random"
        return f"{words}."


def _verdict(found: Estimate, threshold: float) -> Verdict:
    """Return the verdict by the whole interval, which a single image does not have."""
    if _too_few(found) or np.isnan(found.low):
        return "undecided"
    if found.low >= threshold:
        return "insensitive"
    return "passes" if found.high < threshold else "undecided"


def _too_few(found: Estimate) -> bool:
    """Return whether most images have no rank correlation."""
    return found.n == 0 or found.n < found.n_nan


def _value(found: Estimate) -> str:
    """Return a mean with its interval, if there is one."""
    spread = f" ({found.low:.2f} .. {found.high:.2f})" if found.low < found.high else ""
    return f"{found.mean:.2f}{spread}"


def _missing(found: Estimate) -> str:
    """Return for how many images there is no rank correlation."""
    return f"{found.n_nan} of {found.n + found.n_nan} images have a constant heatmap"


def sanity_check(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    methods: Methods = CAMS,
    *,
    steps: int = STEPS,
    done: int | None = None,
    threshold: float = THRESHOLD,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    orders: Collection[str] = (),
) -> SanityReport:
    """Compare each method's heatmaps with those for a randomised copy of the model.

    The copy's layers are re-initialised block by block, from the output to the input. The model
    itself does not change.

    - `classifier`: the model; `images`: floats in 0..1, [N,C,H,W].
    - `targets`: the class of each image, [N]. Without them, the original model's predictions.
    - `methods`: names, or a dict of names, functions and adapters. An adapter must belong to the
      model; it then reads the features of the copies.
    - `steps`: most blocks; `done`: re-initialise only so many of them.
    - `threshold`: a method is insensitive if its rank correlation stays at or above it.
    - `layer`: the feature layer, named as in model.named_modules().
    - `batch_size`: images per forward pass; chosen for the device if left out.
    - `seed`: of the new weights, and of methods that draw random numbers.
    - `progress`: a bar; by default when the work takes long in a terminal.
    - `orders`: methods of which the order of all pixels is compared, in place of the heatmap.
    """
    check_classifier(classifier)
    check_images(images)
    known = check_targets(targets, len(images))
    # The same class for every copy: a random copy would predict another one.
    goals = predictions(classifier, images) if known is None else known
    used = methods_for(methods, classifier)
    size = (images.shape[2], images.shape[3])

    def maps_of(model: Classifier) -> dict[str, Tensor]:
        with seeded(seed):  # stochastic methods use the same seed for every model
            drawn = draw_all(
                model,
                images,
                goals,
                used,
                layer=layer,
                batch_size=batch_size,
                seed=seed,
                progress=False,
            )
        return {
            name: one.order_at(size) if name in orders else one.at(size)
            for name, one in drawn.items()
        }

    def likenesses(model: Classifier, step: int, layer: str) -> list[Likeness]:
        with warnings.catch_warnings():
            # Heatmaps that became empty count as NaN.
            warnings.simplefilter("ignore", EmptyHeatmapWarning)
            pairs = [(name, original[name], found) for name, found in maps_of(model).items()]
        return [
            Likeness(name, step, layer, rank_correlation(a, b), structural_similarity(a, b))
            for name, a, b in pairs
        ]

    original = maps_of(classifier)
    # One copy for all steps: the cascade adds to what is random already.
    copy = randomization.copied(classifier)
    blocks = randomization.cascade(copy, images, steps)[:done]
    found: list[Likeness] = []
    with bar("randomising layers", progress) as tick:
        for step, block in enumerate(blocks, 1):
            randomise(copy.bare, block, seed)
            found += likenesses(copy, step, block.name)
            if tick:
                tick(step, len(blocks))
    return SanityReport(tuple(found), goals.cpu(), threshold, seed)


@dataclass(frozen=True)
class FolderSanity:
    """The report on a folder, and the images it is about."""

    report: SanityReport
    names: list[str]
    target_kind: str
    skipped: dict[str, str]  # name -> why


def check_folder(
    config: RunConfig,
    classifier: Classifier,
    *,
    steps: int = STEPS,
) -> FolderSanity:
    """Check methods on images that the config's seed draws from its data."""
    methods: Methods = methods_from(config.methods)
    given = sources_from(config.methods)
    orders = [name for name, source in given.items() if isinstance(source, ToFit)]
    # No controls: only the methods are drawn.
    job = make_job(replace(config, checks=("none",)), classifier=classifier)
    with ignore_image_warnings():
        batch, notes = job.reader.entries([*job.entries])
    skipped = notes[SKIPPED]
    check_any(0 if batch is None else len(batch), len(skipped), skipped)
    assert batch is not None  # there are images
    report = sanity_check(
        classifier,
        batch.images,
        batch.targets,
        methods,
        steps=steps,
        layer=config.layer,
        seed=config.seed,
        orders=orders,
    )
    return FolderSanity(report, list(batch.names), job.targets, dict(skipped))


def save_sanity(
    folder: Path,
    result: FolderSanity,
    classifier: Classifier,
    config: dict[str, Any],
) -> None:
    """Write sanity.csv, sanity.png, report.html and, last, run.json."""
    from sufficit.report.html import environment, look_and_feel  # slow to import

    report = result.report
    verdicts = report.verdicts()
    sentences = report.sentences()
    n = len(result.names)
    make_folder(folder)
    with writing(folder / "sanity.csv") as path:
        path.write_text(as_csv(report.frame()), encoding="utf-8")
    plots.save(report.figure(), folder / "sanity.png")
    run = provenance(config, classifier.device, classifier.dtype) | {
        "n": n,
        "images": result.names,
        "targets": result.target_kind,
        "threshold": report.threshold,
        "seed": report.seed,
        "verdicts": verdicts,
        "sentences": sentences,
        "skipped": result.skipped,
    }
    verdict = "No method is insensitive to the weights."
    failed = [name for name, found in verdicts.items() if found == "insensitive"]
    if failed:
        verdict = f"Insensitive to the weights: {', '.join(failed)}."
    steps = {name: report.cascade_of(name) for name in report.methods}
    device = run["device"]
    facts = {
        "Command": run["command"],
        "Date": run["time"],
        "Seed": run["seed"],
        "Targets": run["targets"],
        "Device": f"{device['type']}, {device['name']}",
        "Skipped": len(run["skipped"]),
        "Commit": run["commit"] or "",
    }
    template = environment().get_template("sanity.html")
    page = template.render(
        model=config["model"],
        data_name=config["data"],
        n=n,
        verdict=verdict,
        layers=[one.layer for one in next(iter(steps.values()))],
        rows=[
            {
                "method": name,
                "verdict": verdicts[name],
                "sentence": sentences[name],
                "means": [float(one.rank_correlation.nanmean()) for one in found],
            }
            for name, found in steps.items()
        ],
        threshold=report.threshold,
        cautions=[*filter(None, [few_images(n)])],
        chart=Markup(plots.svg(report.figure(), "sanity", "Similarity over the cascade")),
        facts=[(name, str(value)) for name, value in facts.items() if value != ""],
        **look_and_feel(),
    )
    with writing(folder / "report.html") as path:
        path.write_text(page, encoding="utf-8")
    save_json(folder / "run.json", run)
