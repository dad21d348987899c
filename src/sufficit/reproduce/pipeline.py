"""`reproduce`: one table of the paper, from data to report. Read this file first."""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from sufficit.classifier.architectures import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MODELS,
    build,
    fill_in,
    fold,
)
from sufficit.classifier.checkpoint import Recipe, View
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest
from sufficit.classifier.loading import load_classifier
from sufficit.data.images import ImageFile, ImageSource, list_images
from sufficit.data.splits import Sets, Split, evenly, held_out, middle
from sufficit.explainers.lax import Lax
from sufficit.files import CHECKPOINT, make_folder, safe_name, writing
from sufficit.progress import Progress
from sufficit.provenance import provenance, save_json
from sufficit.reproduce.datasets import DataOptions, load_sets
from sufficit.reproduce.plan import (
    PLAN,
    SECONDS,
    TRAINED,
    TablePlan,
    check_same,
    clear,
    keep_plan,
    plan_for,
)
from sufficit.reproduce.table_results import TableResults, seconds_in
from sufficit.runs.config import RunConfig, Workers, config_from
from sufficit.runs.engine import run
from sufficit.runs.explanations import quiet
from sufficit.runs.job import make_job
from sufficit.seeds import seeded
from sufficit.training import train_lax
from sufficit.training.classifier_training import (
    Augmented,
    ClassifierRecipe,
    accuracy,
    train_classifier,
)
from sufficit.training.loaders import Shuffled, loader_for
from sufficit.training.processes import fabric_for

if TYPE_CHECKING:
    from lightning.fabric import Fabric

VALIDATION, SHARE = 256, 16  # images held out to select epochs: one in 16, at most 256
SAMPLE = 64  # images of each part that the digest of the data reads
SEARCH_STEP = 0.05  # of the curves when alpha_min is searched
MSI = ("base_score", "mask_penalty", "msi")


def reproduce(
    table: str,
    out: Path,
    *,
    data: Path | None = None,
    device: torch.device | None = None,
    quick: bool = False,
    overwrite: bool = False,
    report: bool = True,
    say: Callable[[str], None] = print,
    progress: bool | Progress | None = None,
    workers: Workers | None = None,
    **asked: Any,
) -> TableResults:
    """Train the classifier and LAX, score every method on test images, write results and report.

    A stage whose files are in `out` is skipped, and an interrupted one resumes. `asked` are fields
    of a TablePlan. With `workers` Ray scores the images; training stays in this process.
    """
    if overwrite:
        clear(out)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = plan_for(out, table, asked, quick=quick, cuda=device.type == "cuda")
    work = TablePipeline(plan, out, data, device, say, progress, workers)
    if not all((out / stage / "run.json").exists() for stage in ("compare", "search")):
        work.train_classifier()
        work.train_adapters()
        work.write_test_images()
        work.compare_methods()
        work.search_alpha()
    results = TableResults.read(out)
    results.write(out / "results", report=report)
    return results


@dataclass(frozen=True)
class TablePipeline:
    """The stages of a table: each one is skipped where its last file is there."""

    plan: TablePlan
    out: Path
    root: Path | None  # of the data
    device: torch.device
    say: Callable[[str], None] = print
    progress: bool | Progress | None = None
    workers: Workers | None = None  # of scoring

    def train_classifier(self) -> None:
        """Train the classifier, fold its batch norms, save it, measure its test accuracy."""
        folder, done = self.out / "classifier", self.out / "classifier" / TRAINED
        if done.exists():
            return
        plan, sets, (training, _) = self.plan, self.sets, self.parts
        own = plan.paper.training
        lr = own.lr if plan.weights == "none" else own.fine_lr
        recipe = ClassifierRecipe(
            epochs=plan.epochs,
            batch_size=plan.train_batch,
            optimizer=own.optimizer,
            lr=lr * plan.train_batch / own.batch_size,
            weight_decay=own.weight_decay,
            augment=own.augment,
        )
        with self._timed("classifier"):
            with seeded(plan.seed):
                model = build(plan.model, len(sets.classes), plan.side)
            random = fill_in(model, plan.model, plan.weights, plan.side)
            history = train_classifier(
                model,
                training,
                recipe,
                mean=IMAGENET_MEAN,
                std=IMAGENET_STD,
                fabric=self.fabric,
                out=self.out / "classifier-training",
                seed=plan.seed,
                progress=self.progress,
            )
            options = {"num_classes": len(sets.classes), "image_size": plan.side, "folded": True}
            Classifier(
                fold(model.cpu().eval()),
                MODELS[plan.model].layer,
                IMAGENET_MEAN,
                IMAGENET_STD,
                classes=sets.classes,
                view=View((plan.side, plan.side)),
                recipe=Recipe(f"sufficit:{plan.model}", options),
            ).save(folder)
            right = accuracy(self.classifier, sets.test)
            facts = {
                "test_accuracy": right,
                "test_images": len(sets.test),
                "history": history,
                "train_images": len(training),
                "random_at_first": random,
                "data": sets.source,
            }
            save_json(done, facts | self._provenance())
            shutil.rmtree(self.out / "classifier-training", ignore_errors=True)
        self.say(f"  test accuracy {right:.1%} on {len(sets.test)} images")

    def train_adapters(self) -> None:
        """Train an adapter for each recipe and seed."""
        plan = self.plan
        check_same(self.out, "recipes", plan.recipe_values)
        for name, (recipe, seed) in plan.adapters.items():
            folder = self.out / "adapters" / name
            if (folder / TRAINED).exists():
                continue
            options = {"recipe": plan.recipe(recipe), "seed": seed, "out": folder}
            loader, start = self.loader, time.monotonic()
            with self._timed(f"adapter {name}"), quiet():
                lax = self.train_adapter(loader, **options, progress=self.progress)
                took = round(time.monotonic() - start, 2)
                facts = {"seed": seed, "recipe": recipe, "seconds": took}
                save_json(folder / TRAINED, self._provenance() | facts)
                (folder / CHECKPOINT).unlink(missing_ok=True)
            self.say(f"  validation MSI {lax.trained['history'][-1]['msi']:.3f}")

    def train_adapter(self, loader: Shuffled, **options: Any) -> Lax:
        """An adapter of the classifier; images held out from training select the epoch."""
        images, labels = self.parts[1].part(slice(None))
        return train_lax(
            self.classifier,
            loader,
            alpha_min=self.plan.paper.alpha_min,
            patience=None,
            validation=[(images, labels)],
            validation_images=len(labels),
            fabric=self.fabric,
            **options,
        )

    def write_test_images(self) -> None:
        """Write some test images, evenly over the classes, as PNG in class folders."""
        from safetensors.torch import save

        if (self.out / "test.json").exists():
            return
        sets, plan = self.sets, self.plan
        with self._timed("test folder"):
            chosen = evenly(sets.test.labels, plan.images, plan.seed)
            split = sets.test.pick(chosen).to("cpu")
            folders = [safe_name(sets.classes[label]) for label in split.labels.tolist()]
            names = [f"{f}/{i:05d}.png" for f, i in zip(folders, chosen.tolist(), strict=True)]
            for name in folders:
                make_folder(self.out / "test" / name)
            pixels = middle(split.images, plan.side).permute(0, 2, 3, 1).contiguous().numpy()

            def write(image: tuple[str, Any]) -> None:
                with writing(self.out / "test" / image[0]) as path:
                    Image.fromarray(image[1]).save(path)

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(write, zip(names, pixels, strict=True)))
            if split.masks is not None:
                with writing(self.out / "masks.safetensors") as path:
                    path.write_bytes(save({"masks": split.masks.byte()}))
            save_json(self.out / "test.json", {"names": names})

    def compare_methods(self) -> None:
        """Score all methods at the paper's alpha_min: every column, and leakage."""
        self._run("compare", "scoring", self._config(), list_images(self.out / "test"))

    def search_alpha(self) -> None:
        """Score MSI of all methods at every alpha_min, on some of the images."""
        images = list_images(self.out / "test")
        classes = sorted({str(image.folder) for image in images})
        labels = [classes.index(str(image.folder)) for image in images]
        rows = evenly(labels, self.plan.search_images, self.plan.seed).tolist()
        step = max(SEARCH_STEP, self.plan.step)
        config = self._config(alpha_min="search", leak=False, columns=MSI, value_step=step)
        self._run("search", "search of alpha_min", config, [images[row] for row in rows])

    def _run(self, stage: str, title: str, config: RunConfig, images: list[ImageFile]) -> None:
        if (self.out / stage / "run.json").exists():
            return
        classifier, source = self.classifier, ImageSource.of(images)
        with self._timed(title):
            job = make_job(config, classifier=classifier, images=source, unit=self.plan.group)
            run(job, self.out / stage, progress=self.progress, workers=self.workers)

    def _config(self, **changed: Any) -> RunConfig:
        plan, out = self.plan, self.out
        adapters = [str(out / "adapters" / name) for name in plan.adapters]
        values: dict[str, Any] = {
            "model": str(out / "classifier"),
            "data": str(out / "test"),
            "methods": (*plan.peers, *adapters),
            "targets": "label",
            "alpha_min": plan.paper.alpha_min,
            "alpha_curve": False,  # the search has it on more images
            "value_step": plan.step,
            "percent_step": 2 * plan.step,
            "device": str(self.device),
            "precision": plan.precision,
            "batch_size": plan.batch_size,
            "on_error": "stop",
            "seed": plan.seed,
        }
        return config_from(values | changed)

    @cached_property
    def sets(self) -> Sets:
        """The data, read when a stage needs it; raise if the run started with other data."""
        plan = self.plan
        options = DataOptions(
            side=plan.side,
            seed=plan.seed,
            train_images=plan.train_images,
            test_images=plan.test_images,
            classes=plan.classes,
            device=self.device,
        )
        with self._timed("data"):
            found = load_sets(plan.paper.data, self.root, options)
            keep_plan(self.out, plan, _identity(found))
        counts = f"{len(found.train)} training images, {len(found.test)} test images"
        self.say(f"  {found.source}: {counts}")
        return found

    @cached_property
    def parts(self) -> tuple[Split, Split]:
        """Images to train on, and images held out to select epochs."""
        train = self.sets.train
        return held_out(train, min(VALIDATION, max(2, len(train) // SHARE)), self.plan.seed)

    @cached_property
    def classifier(self) -> Classifier:
        """The trained classifier on its device, in its precision."""
        folder, device = str(self.out / "classifier"), str(self.device)
        return load_classifier(folder, device=device, precision=self.plan.precision)

    @cached_property
    def loader(self) -> Shuffled:
        """The batches that adapters are trained on."""
        size = min(self.plan.lax_batch, len(self.parts[0]))
        adapter = self.plan.paper.adapter
        if adapter.augment:
            return Augmented(self.parts[0], size, adapter.images)
        return loader_for(self.classifier, self.parts[0], size, adapter.images)

    @cached_property
    def fabric(self) -> "Fabric":
        """The device and precision of training."""
        return fabric_for(self.device, 1, self.plan.precision)

    def _provenance(self) -> dict[str, Any]:
        return provenance(asdict(self.plan), self.device, self.classifier.dtype)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Print how long a stage takes and store it; the time of a resumed stage adds up."""
        start = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - start
            if (self.out / PLAN).exists():  # a failed start leaves nothing
                known = seconds_in(self.out)
                total = round(known.get(stage, 0) + took, 2)
                save_json(self.out / SECONDS, known | {stage: total})
        self.say(f"{stage}: {took:.1f} s")


def _identity(sets: Sets) -> dict[str, Any]:
    """What tells data from other data: all labels and some images, bit by bit."""
    parts = (sets.train, sets.test)
    some = [part.images[:: max(1, len(part) // SAMPLE)] for part in parts]
    return {
        "source": sets.source,
        "classes": list(sets.classes),
        "images": [len(part) for part in parts],
        "digest": digest(*some, *(part.labels for part in parts)),
    }
