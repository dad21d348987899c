"""The stages of a run, each of which leaves files and is skipped where these are there."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from sufficit.classifiers import Classifier
from sufficit.compare import Scored, score_folder
from sufficit.comparing.groups import draw, quiet
from sufficit.comparing.jobs import Job, make_job
from sufficit.comparing.settings import Settings
from sufficit.data.datasets import DataOptions, load_sets
from sufficit.data.images import Picture, find_pictures
from sufficit.data.splits import Sets, Split, evenly, held_out, middle
from sufficit.models import IMAGENET_MEAN, IMAGENET_STD, MODELS, build, fill_in, fold
from sufficit.parsing import DTYPES
from sufficit.parts import Recipe, View
from sufficit.reproducing.clock import Clock
from sufficit.reproducing.kept import Kept
from sufficit.reproducing.plans import NUMBERS, Plan
from sufficit.reproducing.tables import Table, table_of
from sufficit.results import provenance, save_json
from sufficit.training import RECIPES, LaxRecipe, train_lax
from sufficit.training.classifiers import Augmented, ClassifierRecipe, accuracy, train_classifier
from sufficit.training.loaders import Shuffled, loader_for
from sufficit.training.processes import fabric_for
from sufficit.types import Progress

if TYPE_CHECKING:
    from lightning.fabric import Fabric

VALIDATION = 256
SEARCH_STEP = 0.05  # of the curves when alpha_min is searched for
MSI = ("base_score", "mask_penalty", "msi")
SHOWN = 12
TRAINED = "trained.json"  # the last file of a training
NO_ANSWER = 2  # stands for NaN among hits


@dataclass(frozen=True)
class Work:
    """A run: its plan, its folder, where data and device are; what is dear is made once."""

    plan: Plan
    out: Path
    root: Path | None
    device: torch.device
    clock: Clock
    progress: bool | Progress | None = None

    @property
    def table(self) -> Table:
        """The table it is for."""
        return table_of(self.plan.table)

    @cached_property
    def fabric(self) -> "Fabric":
        """The device and precision of training."""
        return fabric_for(self.device, 1, self.plan.precision)

    @cached_property
    def sets(self) -> Sets:
        """The data, read when a stage needs it."""
        plan = self.plan
        options = DataOptions(
            side=plan.side,
            seed=plan.seed,
            train_images=plan.train_images,
            test_images=plan.test_images,
            classes=plan.classes,
            device=self.device,
        )
        with self.clock("data"):
            return load_sets(self.table.data, self.root, options)

    @cached_property
    def parts(self) -> tuple[Split, Split]:
        """Pictures to train on, and some held out to choose adapters by."""
        train = self.sets.train
        return held_out(train, min(VALIDATION, max(2, len(train) // 10)), self.plan.seed)

    @cached_property
    def classifier(self) -> Classifier:
        """The trained classifier on its device, in its precision."""
        layout = torch.channels_last if self.device.type == "cuda" else None
        found = Classifier.load(self.out / "classifier")
        return found.to(self.device, DTYPES[self.plan.precision], layout)

    @cached_property
    def loader(self) -> Shuffled:
        """What adapters train on."""
        adapter = self.table.adapter
        size = min(adapter.batch_size, len(self.parts[0]))
        if adapter.augment:
            return Augmented(self.parts[0], size, adapter.images)
        return loader_for(self.classifier, self.parts[0], size, adapter.images)

    @property
    def settings(self) -> Settings:
        """How the methods are compared."""
        plan = self.plan
        return Settings(
            model=str(self.out / "classifier"),
            data=str(self.out / "test"),
            methods=self.table.methods if MODELS[plan.model].attention else _plain(self.table),
            lax=tuple(str(self.out / "adapters" / name) for name in plan.adapters),
            targets="label",
            alpha_min=self.table.alpha_min,
            value_step=plan.step,
            percent_step=2 * plan.step,
            precision=plan.precision,  # type: ignore[arg-type]  # checked by the plan
            batch_size=plan.batch_size,
            on_error="stop",
            seed=plan.seed,
        )

    def kept(self, name: str) -> Kept:
        """Where a stage's numbers lie: all that a table and a report are made of."""
        return Kept(self.out / NUMBERS / f"{name}.safetensors")

    def record(self) -> dict[str, Any]:
        """What the numbers of a stage need to be believed and repeated."""
        return provenance(asdict(self.plan), self.device, DTYPES[self.plan.precision])


def _plain(table: Table) -> tuple[str, ...]:
    return tuple(method for method in table.methods if method != "rollout")


def train_the_classifier(work: Work) -> None:
    """Train it plainly, fold its batch norms, save it, test it."""
    folder, note = work.out / "classifier", work.out / "classifier" / TRAINED
    if note.exists():
        return
    plan, sets, training = work.plan, work.sets, work.out / "classifier-training"
    with work.clock("classifier"):
        with torch.random.fork_rng():
            torch.manual_seed(plan.seed)
            model = build(plan.model, len(sets.classes), plan.side)
        random = fill_in(model, plan.model, plan.weights, plan.side)
        history = train_classifier(
            model,
            work.parts[0],
            _recipe(work),
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            fabric=work.fabric,
            out=training,
            seed=plan.seed,
            progress=work.progress,
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
        right = accuracy(work.classifier, sets.test)
        told = {"test_accuracy": right, "test_images": len(sets.test), "history": history}
        counts = {"train_images": len(work.parts[0]), "random_at_first": random}
        save_json(note, told | counts | {"data": sets.source} | work.record())
        shutil.rmtree(training, ignore_errors=True)
    work.clock.say(f"  {right:.1%} of {len(sets.test)} test images right")


def _recipe(work: Work) -> ClassifierRecipe:
    training = work.table.training
    return ClassifierRecipe(
        epochs=work.plan.epochs,
        batch_size=training.batch_size,
        optimizer=training.optimizer,
        lr=training.lr if work.plan.weights == "none" else training.fine_lr,
        weight_decay=training.weight_decay,
        augment=training.augment,
    )


def train_the_adapters(work: Work) -> None:
    """An adapter for each recipe and seed."""
    for name, (recipe, seed) in work.plan.adapters.items():
        folder = work.out / "adapters" / name
        if (folder / TRAINED).exists():
            continue
        loader = work.loader
        images, labels = work.parts[1].part(slice(None))
        with work.clock(f"adapter {name}"), quiet():
            lax = train_lax(
                work.classifier,
                loader,
                recipe=lax_recipe(work.table, recipe, work.plan.lax_epochs),
                seed=seed,
                alpha_min=work.table.alpha_min,
                patience=None,
                validation=[(images, labels)],
                validation_images=len(labels),
                fabric=work.fabric,
                out=folder,
                progress=work.progress,
            )
            save_json(folder / TRAINED, work.record() | {"seed": seed, "recipe": recipe})
            (folder / "checkpoint.pt").unlink(missing_ok=True)
        work.clock.say(f"  validation MSI {lax.trained['history'][-1]['msi']:.3f}")


def lax_recipe(table: Table, name: str, epochs: int) -> LaxRecipe:
    """A recipe as this table has it."""
    recipe = replace(RECIPES[name], epochs=epochs)
    if name != "paper":
        return recipe
    adapter = table.adapter
    return replace(recipe, entropy=adapter.entropy, upsample=adapter.upsample, lr=adapter.lr)


def write_the_test_folder(work: Work) -> None:
    """Some of the test images, as many of each class, as PNG in class folders."""
    note = work.out / "test.json"
    if note.exists():
        return
    sets, plan = work.sets, work.plan
    with work.clock("test folder"):
        chosen = evenly(sets.test.labels, plan.images, plan.seed)
        split = sets.test.pick(chosen).to("cpu")
        labels = split.labels.tolist()
        names = [
            f"{sets.classes[k]}/{i:05d}.png" for k, i in zip(labels, chosen.tolist(), strict=True)
        ]
        for name in sets.classes:
            (work.out / "test" / name).mkdir(parents=True, exist_ok=True)
        pixels = middle(split.images, plan.side).permute(0, 2, 3, 1).contiguous().numpy()

        def write(job: tuple[str, Any]) -> None:
            Image.fromarray(job[1]).save(work.out / "test" / job[0])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, zip(names, pixels, strict=True)))
        if split.masks is not None:
            facts = {"names": names}
            Kept(work.out / "masks.safetensors").write({"masks": split.masks.byte()}, facts)
        save_json(note, {"names": names, "labels": labels, "of": len(sets.test)})


def score_the_table(work: Work) -> None:
    """All methods at the paper's alpha_min, with every column and the leak."""
    kept, place = work.kept("scores"), work.out / "compare"
    if kept.exists():
        return
    with work.clock("scoring"), quiet():
        scored = score_folder(work.settings, place, **_asked(work))
        work.kept("answers").write(compact(scored), {"scoring": scored.job.scoring})
        trained = json.loads((work.out / "classifier" / TRAINED).read_text())
        facts = {"record": work.record(), "classifier": trained, "source": trained["data"]}
        kept.write(_columns(scored), _facts(scored) | facts)
    shutil.rmtree(place, ignore_errors=True)


def search_alpha(work: Work) -> None:
    """MSI of all methods over alpha_min, on some of the images."""
    kept, place = work.kept("search"), work.out / "search"
    if kept.exists():
        return
    settings = replace(
        work.settings, alpha_min="search", leak=False, value_step=max(SEARCH_STEP, work.plan.step)
    )
    pictures = some_pictures(work, work.plan.search_images)
    with work.clock("search of alpha_min"), quiet():
        scored = score_folder(settings, place, **_asked(work), columns=MSI, pictures=pictures)
        searches = {method: one.search for method, one in scored.scores.items() if one.search}
        alphas = list(next(iter(searches.values())).alphas)
        tensors = {f"{method}/msi": search.msi for method, search in searches.items()}
        kept.write(tensors, _facts(scored) | {"alphas": alphas})
    shutil.rmtree(place, ignore_errors=True)


def find_the_digits(work: Work) -> None:
    """Where masks of the object are known: overlap with it, and whether the peak lies on it."""
    kept, masks = work.kept("places"), Kept(work.out / "masks.safetensors")
    if kept.exists() or not masks.exists():
        return
    with work.clock("places"), quiet():
        truth, facts = masks.read()
        job, labels = _job(work, work.plan.images), _labels(work)
        where = {name: i for i, name in enumerate(facts["names"])}
        found: dict[str, list[Tensor]] = {}
        names = [picture.name for picture in job.pictures]
        for start in range(0, len(names), job.group):
            some = names[start : start + job.group]
            _, maps = draw(job, some, torch.tensor([labels[name] for name in some]))
            digit = truth["masks"][[where[name] for name in some]].bool()
            for method, heatmaps in maps.items():
                iou = overlap(heatmaps, digit, work.table.alpha_min)
                found.setdefault(f"{method}/iou", []).append(iou)
                found.setdefault(f"{method}/pointing", []).append(pointing(heatmaps, digit))
        kept.write({key: torch.cat(parts) for key, parts in found.items()}, {"names": names})


def overlap(heatmaps: Tensor, truth: Tensor, alpha_min: float) -> Tensor:
    """Intersection over union of what is marked and what is there: [N,H,W], [N,H,W] -> [N]."""
    marked = heatmaps > alpha_min
    both = (marked & truth).flatten(1).sum(1)
    return both.double() / (marked | truth).flatten(1).sum(1).clamp(min=1)


def pointing(heatmaps: Tensor, truth: Tensor) -> Tensor:
    """Share of the highest pixels that lie on what is there: [N,H,W], [N,H,W] -> [N]."""
    flat = heatmaps.flatten(1)
    highest = flat == flat.amax(1, keepdim=True)
    return (highest & truth.flatten(1)).sum(1).double() / highest.sum(1)


def draw_some(work: Work) -> None:
    """A few images with every method's heatmap, as bytes, for the sheet and the report."""
    kept = work.kept("shown")
    if kept.exists():
        return
    with work.clock("sheet"), quiet():
        job, labels = _job(work, SHOWN), _labels(work)
        names = [picture.name for picture in job.pictures]
        images, maps = draw(job, names, torch.tensor([labels[name] for name in names]))
        tensors = {"images": as_bytes(images)}
        tensors |= {f"{method}/heatmaps": as_bytes(found) for method, found in maps.items()}
        facts = {"names": names, "methods": list(maps), "classes": work.classifier.classes}
        kept.write(tensors, facts)


def as_bytes(values: Tensor) -> Tensor:
    """Values in 0..1 as 0..255."""
    return (values * 255).round().byte()


def compact(scored: Scored) -> dict[str, Tensor]:
    """What the model answered, as small as the curves of a report allow."""
    found: dict[str, Tensor] = {}
    for method, answers in scored.found.answers.items():
        found[f"{method}/hits"] = answers.hits.nan_to_num(NO_ANSWER).byte()
        found[f"{method}/confidences"] = answers.confidences.half()
        found[f"{method}/shares"] = answers.shares
        found[f"{method}/calls"] = answers.calls
    return found


def _asked(work: Work) -> dict[str, Any]:
    return {"classifier": work.classifier, "group": work.plan.group, "progress": work.progress}


def some_pictures(work: Work, n: int) -> list[Picture]:
    """As many of each class, of the test folder."""
    pictures = find_pictures(work.out / "test")
    labels = _labels(work)
    rows = evenly([labels[picture.name] for picture in pictures], n, work.plan.seed)
    return [pictures[row] for row in rows.tolist()]


def _labels(work: Work) -> dict[str, int]:
    note = json.loads((work.out / "test.json").read_text())
    return dict(zip(note["names"], note["labels"], strict=True))


def _job(work: Work, n: int) -> Job:
    pictures = some_pictures(work, n)
    return make_job(work.settings, work.classifier, pictures, work.plan.group, False)


def _columns(scored: Scored) -> dict[str, Tensor]:
    """Every method's columns, a value an image."""
    return {
        f"{method}/{name}": values.double()
        for method, scores in scored.scores.items()
        for name, values in scores.columns.items()
    } | {"clean": next(iter(scored.scores.values())).clean}


def _facts(scored: Scored) -> dict[str, Any]:
    scores = scored.scores
    return {
        "names": list(scored.found.names),
        "targets": scored.found.targets.tolist(),
        "methods": list(scores),
        "contest": scored.contest,
        "alpha_min": scores[scored.contest[0]].alpha_min,
        "empty": scored.found.empty,
        "model_calls": sum(int(one.calls.sum()) for one in scores.values()),
    }
