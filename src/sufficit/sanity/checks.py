"""Does a method's heatmap depend on what the model has learned? (Adebayo et al. 2018.)"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from markupsafe import Markup
from torch import Tensor

from sufficit import plots
from sufficit.classifier.classifier import Classifier, check_classifier, check_images, check_targets
from sufficit.data.images import ImageSource, open_images
from sufficit.data.loader import labels_for
from sufficit.data.pixels import ignore_image_warnings
from sufficit.data.splits import Part
from sufficit.errors import EmptyHeatmapWarning
from sufficit.explainers import CAMS, Methods, explain_all, methods_for
from sufficit.files import make_folder, writing
from sufficit.intervals import few_images
from sufficit.outside import as_csv
from sufficit.progress import bar
from sufficit.provenance import provenance, save_json
from sufficit.sanity import randomization
from sufficit.sanity.randomization import EPOCHS, STEPS, Pairs, randomise
from sufficit.sanity.sanity_report import THRESHOLD, Likeness, SanityReport
from sufficit.seeds import seeded
from sufficit.similarity import estimate, rank_correlation, structural_similarity
from sufficit.training.folder_images import ReadImages, read_part
from sufficit.training.validation import predictions

BATCH = 32  # images per step of training on random labels


def sanity_check(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor | None = None,
    methods: Methods = CAMS,
    *,
    steps: int = STEPS,
    done: int | None = None,
    random_labels: Pairs | None = None,
    epochs: int = EPOCHS,
    threshold: float = THRESHOLD,
    layer: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> SanityReport:
    """Compare each method's heatmaps with those for a randomised copy of the model.

    The copy's layers are re-initialised from the output downwards, in at most `steps` blocks, or
    only the first `done` of them. The
    targets stay those given, or the original model's predictions. `random_labels`, a loader of
    (images, labels), adds a copy trained on permuted labels. The model itself does not change. An
    adapter must belong to the model; it then reads the features of the copies.
    """
    check_classifier(classifier)
    check_images(images)
    known = check_targets(targets, len(images))
    goals = predictions(classifier, images) if known is None else known
    used = methods_for(methods, classifier)
    options: Any = {"layer": layer, "batch_size": batch_size, "seed": seed, "progress": False}

    def maps_of(model: Classifier) -> dict[str, Tensor]:
        with seeded(seed):  # stochastic methods use the same seed for every model
            return explain_all(model, images, goals, used, **options)

    def likenesses(model: Classifier, step: int | None, layer: str) -> list[Likeness]:
        with warnings.catch_warnings():
            # Heatmaps that became empty count as NaN.
            warnings.simplefilter("ignore", EmptyHeatmapWarning)
            pairs = [(name, original[name], found) for name, found in maps_of(model).items()]
        return [
            Likeness(name, step, layer, rank_correlation(a, b), structural_similarity(a, b))
            for name, a, b in pairs
        ]

    original = maps_of(classifier)
    copy = randomization.copied(classifier)
    blocks = randomization.cascade(copy, images, steps)[:done]
    found: list[Likeness] = []
    with bar("randomising layers", progress) as tick:
        for step, block in enumerate(blocks, 1):
            randomise(copy.bare, block, seed)
            found += likenesses(copy, step, block.name)
            if tick:
                tick(step, len(blocks))
    labelled: list[Likeness] = []
    training = None
    if random_labels is not None:
        learn = randomization.train_on_random_labels
        student, training = learn(classifier, random_labels, epochs, seed, progress)
        labelled = likenesses(student, None, "all, trained on random labels")
    return SanityReport(tuple(found), tuple(labelled), training, goals.cpu(), threshold, seed)


def head_check(
    classifier: Classifier, images: Tensor, targets: Tensor, methods: Methods, seed: int = 0
) -> dict[str, Any]:
    """One step of the cascade: do the maps change when the output layer is random?"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)  # the run has counted them
        report = sanity_check(
            classifier, images, targets, methods, done=1, seed=seed, progress=False
        )
    layer = report.cascade[0].layer
    found = {one.method: estimate(one.rank_correlation, seed=seed) for one in report.cascade}
    return {"layer": layer, "n": len(images), "rank_correlation": found}


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
    image_column: str | None = None  # of parquet files
    label_column: str | None = None
    on_error: Literal["skip", "stop"] = "skip"
    seed: int = 0
    progress: bool | None = None


@dataclass(frozen=True)
class FolderSanity:
    """The report on a folder, and the images it is about."""

    report: SanityReport
    names: tuple[str, ...]
    target_kind: str
    skipped: dict[str, str]  # name -> why


def check_folder(
    classifier: Classifier, data: Path, options: SanityOptions | None = None
) -> FolderSanity:
    """Check methods on images drawn by seed from those below a folder."""
    options = options or SanityOptions()
    methods = methods_for(options.methods, classifier)
    columns = {"image_column": options.image_column, "label_column": options.label_column}
    source = open_images(data, **columns)
    found = list(source)
    labels = labels_for(classifier, ImageSource.of(found, source.classes), options.targets)

    def draw(n: int) -> ReadImages:
        """At most n images by seed, in the folder's order."""
        generator = torch.Generator().manual_seed(options.seed)
        rows = torch.randperm(len(found), generator=generator)[:n].sort().values.tolist()
        images = tuple(found[i] for i in rows)
        numbers = [number for i in images if (number := labels.number(i)) is not None]
        with ignore_image_warnings():
            return read_part(Part(images, tuple(numbers) or None), classifier, options.on_error)

    sample = draw(options.images)
    loader, skipped = None, sample.skipped
    if options.random_labels:
        learnt = draw(options.train_images)
        loader = zip(learnt.images.split(BATCH), learnt.targets.split(BATCH), strict=True)
        skipped = skipped | learnt.skipped
    names = ("steps", "epochs", "layer", "seed", "progress")
    same = {name: getattr(options, name) for name in names} | {"random_labels": loader}
    report = sanity_check(classifier, sample.images, sample.targets, methods, **same)
    return FolderSanity(report, sample.names, labels.kind, skipped)


def save_sanity(
    folder: Path,
    result: FolderSanity,
    classifier: Classifier,
    config: dict[str, Any],
    options: SanityOptions,
) -> None:
    """Write sanity.csv, sanity.png, report.html and, last, run.json."""
    report = result.report
    make_folder(folder)
    with writing(folder / "sanity.csv") as path:
        path.write_text(as_csv(report.frame()), encoding="utf-8")
    plots.save(report.figure(), folder / "sanity.png")
    config = config | {"options": replace(options, methods=tuple(options.methods))}
    run = provenance(config, classifier.device, classifier.dtype) | {
        "n": len(result.names),
        "images": result.names,
        "targets": result.target_kind,
        "threshold": report.threshold,
        "seed": report.seed,
        "verdicts": report.verdicts(),
        "sentences": report.sentences(),
        "training": report.training,
        "skipped": result.skipped,
    }
    with writing(folder / "report.html") as path:
        path.write_text(_page(report, run), encoding="utf-8")
    save_json(folder / "run.json", run)


def _page(report: SanityReport, run: dict[str, Any]) -> str:
    """The report of a sanity check as one HTML file."""
    from sufficit.report.html import environment, look_and_feel  # slow to import

    verdicts, sentences = report.verdicts(), report.sentences()
    failed = [name for name, verdict in verdicts.items() if verdict == "insensitive"]
    words = f"Insensitive to the weights: {', '.join(failed)}." if failed else (
        "No method is insensitive to the weights."
    )  # fmt: skip
    steps = {name: report.cascade_of(name) for name in report.methods}
    rows = [
        {
            "method": name,
            "verdict": verdicts[name],
            "sentence": sentences[name],
            "means": [float(one.rank_correlation.nanmean()) for one in found],
        }
        for name, found in steps.items()
    ]
    device, config = run["device"], run["config"]
    facts = {"Command": run["command"], "Date": run["time"], "Seed": run["seed"]}
    facts |= {"Targets": run["targets"], "Device": f"{device['type']}, {device['name']}"}
    facts |= {"Skipped": len(run["skipped"]), "Commit": run["commit"] or ""}
    figure = report.figure()
    return (
        environment()
        .get_template("sanity.html")
        .render(
            model=config["model"],
            data_name=config["data"],
            n=run["n"],
            verdict=words,
            layers=[one.layer for one in next(iter(steps.values()))],
            rows=rows,
            threshold=report.threshold,
            cautions=[*filter(None, [few_images(run["n"]), report.remark()])],
            chart=Markup(plots.svg(figure, "sanity", "Similarity over the cascade")),
            facts=[(name, str(value)) for name, value in facts.items() if value != ""],
            **look_and_feel(),
        )
    )
