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

from sufficit.classifier import architectures as nets
from sufficit.classifier.checkpoint import Recipe, View
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest
from sufficit.classifier.loading import load_classifier
from sufficit.data.images import ImageFile, ImageSource, list_images
from sufficit.data.splits import Sets, Split, evenly, held_out, middle
from sufficit.explainers.lax import Lax
from sufficit.files import CHECKPOINT, make_folder, safe_name, writing
from sufficit.lock import locked
from sufficit.progress import Progress
from sufficit.provenance import provenance, save_json
from sufficit.reproduce import table_plan as plans
from sufficit.reproduce.datasets import DataOptions, load_sets
from sufficit.reproduce.table_plan import PLAN, SECONDS, TRAINED, TablePlan
from sufficit.reproduce.table_results import TableResults, seconds_in
from sufficit.runs.config import Workers, config_from
from sufficit.runs.engine import run
from sufficit.runs.explanations import quiet
from sufficit.runs.job import make_job
from sufficit.seeds import seeded
from sufficit.training import classifier_training as training
from sufficit.training import train_lax
from sufficit.training.feed import Shuffled, loader_for
from sufficit.training.processes import fabric_for

if TYPE_CHECKING:
    from lightning.fabric import Fabric

VALIDATION, SHARE = 256, 16  # images held out to select epochs: one in 16, at most 256
SAMPLE = 64  # images of each part that the digest of the data reads
SEARCH_STEP = 0.05  # of the curves when alpha_min is searched


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
    of a TablePlan. With `workers` Ray trains the adapters, each on a device of its own, and scores
    the images; the classifier is trained in this process.
    """
    with locked(out):
        if overwrite:
            plans.clear(out)
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        plan = plans.plan_for(out, table, asked, quick=quick, cuda=device.type == "cuda")
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
    workers: Workers | None = None  # of the adapters and of scoring

    def train_classifier(self) -> None:
        """Train the classifier, fold its batch norms, save it, measure its test accuracy."""
        folder, done = self.out / "classifier", self.out / "classifier" / TRAINED
        if done.exists():
            return
        plan, sets, images = self.plan, self.sets, self.parts[0]
        own, mean, std = plan.paper.training, nets.IMAGENET_MEAN, nets.IMAGENET_STD
        lr = (own.lr if plan.weights == "none" else own.fine_lr) * plan.train_batch / own.batch_size
        recipe = training.ClassifierRecipe(
            plan.epochs, plan.train_batch, own.optimizer, lr, own.weight_decay, own.augment
        )
        work = self.out / "classifier-training"
        options: Any = {"mean": mean, "std": std, "seed": plan.seed, "progress": self.progress}
        made = {"num_classes": len(sets.classes), "image_size": plan.side, "folded": True}
        with self._timed("classifier"):
            with seeded(plan.seed):
                model = nets.build(plan.model, len(sets.classes), plan.side)
            random = nets.fill_in(model, plan.model, plan.weights, plan.side)
            history = training.train_classifier(
                model, images, recipe, fabric=self.fabric, out=work, **options
            )
            Classifier(
                nets.fold(model.cpu().eval()),
                nets.MODELS[plan.model].layer,
                mean,
                std,
                classes=sets.classes,
                view=View((plan.side, plan.side)),
                recipe=Recipe(f"sufficit:{plan.model}", made),
            ).save(folder)
            right = training.accuracy(self.classifier, sets.test)
            facts = {
                "test_accuracy": right,
                "test_images": len(sets.test),
                "history": history,
                "train_images": len(images),
                "random_at_first": random,
                "data": sets.source,
            }
            save_json(done, facts | self._provenance())
            shutil.rmtree(work, ignore_errors=True)
        self.say(f"  test accuracy {right:.1%} on {len(sets.test)} images")

    def train_adapters(self) -> None:
        """Train an adapter for each recipe and seed; with workers, several at the same time."""
        plans.check_same(self.out, "recipes", self.plan.recipe_values)
        folder = self.out / "adapters"
        missing = [name for name in self.plan.adapters if not (folder / name / TRAINED).exists()]
        if self.workers is not None and missing:
            from sufficit.reproduce.adapters import train_on
            from sufficit.runs.distributed import RayCluster

            with RayCluster(self.workers, self.device) as cluster:
                for name, took, value in train_on(cluster, self, missing):
                    self._add_seconds(f"adapter {name}", took)
                    self.say(f"adapter {name}: {took:.1f} s, validation MSI {value:.3f}")
            return
        for name in missing:
            self.loader  # noqa: B018  # read before the clock of the adapter starts
            with self._timed(f"adapter {name}"):
                value = self.train_named(name)
            self.say(f"  validation MSI {value:.3f}")

    def train_named(self, name: str) -> float:
        """Train an adapter of the table, or resume it; return its validation MSI."""
        (recipe, seed), folder = self.plan.adapters[name], self.out / "adapters" / name
        options = {"recipe": self.plan.recipe(recipe), "seed": seed, "progress": self.progress}
        loader, start = self.loader, time.monotonic()
        with quiet():
            lax = self.train_adapter(loader, out=folder, **options)
            took = round(time.monotonic() - start, 2)
            facts = {"seed": seed, "recipe": recipe, "seconds": took}
            save_json(folder / TRAINED, self._provenance() | facts)
            (folder / CHECKPOINT).unlink(missing_ok=True)
        return float(lax.trained["history"][-1]["msi"])

    def train_adapter(self, loader: Shuffled, **options: Any) -> Lax:
        """An adapter of the classifier; images held out from training select the epoch."""
        held = self.parts[1].part(slice(None))
        options |= {"validation": [held], "validation_images": len(held[1]), "patience": None}
        options |= {"alpha_min": self.plan.paper.alpha_min, "fabric": self.fabric}
        return train_lax(self.classifier, loader, **options)

    def write_test_images(self) -> None:
        """Write some test images, evenly over the classes, and the objects in them, as PNG."""
        if (self.out / "test.json").exists():
            return
        sets, plan = self.sets, self.plan
        with self._timed("test folder"):
            chosen = evenly(sets.test.labels, plan.images, plan.seed)
            split = sets.test.pick(chosen).to("cpu")
            folders = [safe_name(sets.classes[label]) for label in split.labels.tolist()]
            names = [f"{f}/{i:05d}.png" for f, i in zip(folders, chosen.tolist(), strict=True)]
            pixels = middle(split.images, plan.side).permute(0, 2, 3, 1).contiguous().numpy()
            drawn = {"test": pixels}
            if split.masks is not None:
                masks = middle(split.masks[:, None], plan.side)[:, 0].byte().numpy() * 255
                drawn["truth"] = masks

            def write(image: tuple[Path, Any]) -> None:
                with writing(image[0]) as path:
                    Image.fromarray(image[1]).save(path)

            for kind, arrays in drawn.items():
                for name in folders:
                    make_folder(self.out / kind / name)
                paths = [self.out / kind / name for name in names]
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(write, zip(paths, arrays, strict=True)))
            save_json(self.out / "test.json", {"names": names})

    def compare_methods(self) -> None:
        """Score all methods at the paper's alpha_min: every column, and leakage."""
        truth = self.out / "truth"
        known = {"truth": str(truth)} if truth.exists() else {}
        self._run("compare", "scoring", list_images(self.out / "test"), **known)

    def search_alpha(self) -> None:
        """Score MSI of all methods at every alpha_min, on some of the images."""
        images = list_images(self.out / "test")
        classes = sorted({str(image.folder) for image in images})
        labels = [classes.index(str(image.folder)) for image in images]
        rows = evenly(labels, self.plan.search_images, self.plan.seed).tolist()
        changed = {"alpha_min": "search", "value_step": max(SEARCH_STEP, self.plan.step)}
        changed |= {"leak": False, "columns": ("base_score", "mask_penalty", "msi")}
        self._run("search", "search of alpha_min", [images[row] for row in rows], **changed)

    def _run(self, stage: str, title: str, images: list[ImageFile], **changed: Any) -> None:
        if (self.out / stage / "run.json").exists():
            return
        plan, out, classifier = self.plan, self.out, self.classifier
        values: dict[str, Any] = {
            "model": str(out / "classifier"),
            "data": str(out / "test"),
            "methods": (*plan.peers, *(str(out / "adapters" / name) for name in plan.adapters)),
            "targets": "label",
            "alpha_min": plan.paper.alpha_min,
            "calls": "exact",
            "held_out_fill": "none",
            "alpha_curve": False,  # the search has it on more images
            "value_step": plan.step,
            "percent_step": 2 * plan.step,
            "device": str(self.device),
            **{name: getattr(plan, name) for name in ("precision", "batch_size", "seed")},
            "on_error": "stop",
        }
        config, source = config_from(values | changed), ImageSource(images)
        with self._timed(title):
            job = make_job(config, classifier=classifier, images=source, unit=plan.group)
            run(job, out / stage, progress=self.progress, workers=self.workers)

    @cached_property
    def sets(self) -> Sets:
        """The data, read when a stage needs it; raise if the run started with other data."""
        plan = self.plan
        names = ("side", "seed", "train_images", "test_images", "classes")
        asked = {name: getattr(plan, name) for name in names}
        with self._timed("data"):
            options = DataOptions(**asked, device=self.device)
            found = load_sets(plan.paper.data, self.root, options)
            splits = (found.train, found.test)
            some = [part.images[:: max(1, len(part) // SAMPLE)] for part in splits]
            identity = {  # what tells data from other data: all labels and some images, bit by bit
                "source": found.source,
                "classes": list(found.classes),
                "images": [*map(len, splits)],
                "digest": digest(*some, *(part.labels for part in splits)),
            }
            plans.keep_plan(self.out, plan, identity)
        train, test = map(len, splits)
        self.say(f"  {found.source}: {train} training images, {test} test images")
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
            return training.augmented_loader(self.parts[0], size, adapter.images)
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
                self._add_seconds(stage, took)
        self.say(f"{stage}: {took:.1f} s")

    def _add_seconds(self, stage: str, took: float) -> None:
        known = seconds_in(self.out)
        save_json(self.out / SECONDS, known | {stage: round(known.get(stage, 0) + took, 2)})
