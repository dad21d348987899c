"""Repeat a table of the paper: train a classifier and LAX, score every method on test images.

    python paper/reproduce.py synthetic-mnist --quick
    python paper/reproduce.py cifar10 --data ROOT --out runs/cifar10

Run the same command again to resume: a stage whose last file exists is skipped.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file

from classifier_training import Training, accuracy, train_classifier
from image_sets import (
    Batches,
    ImageSet,
    ImageSets,
    Wanted,
    as_seen,
    evenly,
    held_out,
    middle,
    read_sets,
)
from networks import NETWORKS, build, fill_in
from sufficit import (
    Classifier,
    Lax,
    LaxRecipe,
    RunResults,
    UserError,
    compare,
    train_lax,
    train_twin,
)
from table_results import write_json, write_results
from tables import CAMS, TABLES, Table

DONE = "trained.json"  # the last file of a training
WEIGHTS = "classifier.safetensors"
VALIDATION, SHARE = 256, 16  # images held out to select epochs: one in 16, at most 256


@dataclass(frozen=True)
class Plan:
    """All that decides the numbers of a table."""

    table: str
    quick: bool
    network: str
    weights: str  # to start from: default (ImageNet), none, or a file
    side: int  # of the network's input
    train_images: int | None  # None: all
    test_images: int | None
    images: int  # test images to score
    epochs: int
    lax_epochs: int
    twin_epochs: int  # 0: no twin
    recipes: tuple[str, ...]  # of LAX
    seeds: int  # adapters per recipe
    step: float  # of the pixel-value curves; the percentage curves have twice that
    seed: int

    @property
    def paper(self) -> Table:
        """The table of the paper."""
        return TABLES[self.table]

    @property
    def adapters(self) -> dict[str, tuple[str, int]]:
        """Every adapter's name with its recipe and seed."""
        seeds = range(self.seed, self.seed + self.seeds)
        return {f"lax-{recipe}-{seed}": (recipe, seed) for recipe in self.recipes for seed in seeds}

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Images per step, of the classifier and of LAX."""
        if self.quick:
            return 32, 16
        return self.paper.training.batch_size, self.paper.adapter.batch_size


def make_plan(given: argparse.Namespace) -> Plan:
    """Take the options that are given, and the defaults of the table for the rest."""
    table, quick = TABLES[given.table], given.quick
    network = given.network or (table.quick_network if quick else table.network)
    # The network that ships with the package knows digits already, and soon fits.
    random = quick and (network, table.data) != ("small-net", "synthetic-mnist")
    plan: dict[str, Any] = {
        "network": network,
        "weights": "none" if random else "default",
        "side": NETWORKS[network].side or (table.quick_side if quick else table.side),
        "train_images": 512 if quick else None,
        "test_images": 200 if quick else None,
        "images": 20 if quick else 2000,
        "epochs": (6 if random else 2) if quick else table.training.epochs,
        "lax_epochs": 4 if quick else table.adapter.epochs,
        "twin_epochs": 1 if quick else 6,
        "recipes": ("paper", "robust"),
        "seeds": 1 if quick else 3,
        "step": 0.01,
        "seed": 0,
    }
    asked = {name: value for name, value in vars(given).items() if value is not None}
    return Plan(given.table, quick, **{name: asked.get(name, plan[name]) for name in plan})


def keep_plan(plan: Plan, out: Path) -> None:
    """Store the plan, or raise where the folder holds a table with another one."""
    path, now = out / "plan.json", json.loads(json.dumps(asdict(plan)))
    if path.exists():
        before = json.loads(path.read_text())
        for name in now:
            if before.get(name) != now[name]:
                raise UserError(
                    f"cannot resume {out}: {name} was {before.get(name)!r}, now {now[name]!r}. Use"
                    " the original options, or another --out"
                )
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, now)


def trained_classifier(plan: Plan, sets: ImageSets, out: Path, device: torch.device) -> Classifier:
    """Train the classifier and measure its test accuracy, or read the one that is done."""
    folder, recipe = out / "classifier", plan.paper.training
    classifier = build(plan.network, sets.classes, plan.side, plan.seed).to(device)
    if not (folder / DONE).exists():
        start = time.monotonic()
        folder.mkdir(exist_ok=True)
        random = fill_in(classifier.model, plan.network, plan.weights)
        size = min(plan.batch_sizes[0], len(sets.train))
        # The rates are those of the table's batch size.
        lr = (recipe.lr if plan.weights == "none" else recipe.fine_lr) * size / recipe.batch_size
        batches = Batches(sets.train, plan.side, size, recipe.augment)
        training = Training(recipe, plan.epochs, lr, plan.seed)
        history = train_classifier(classifier, batches, training, folder / "checkpoint.pt")
        save_weights(classifier, folder / WEIGHTS)
        facts = {
            "test_accuracy": accuracy(classifier, sets.test, plan.side),
            "test_images": len(sets.test),
            "train_images": len(sets.train),
            "random_at_first": random,
            "data": sets.source,
            "history": history,
            "seconds": round(time.monotonic() - start, 1),
        }
        write_json(folder / DONE, facts)
    classifier.model.load_state_dict(load_file(folder / WEIGHTS, device=str(device)))
    classifier.model.eval()
    return classifier.to(dtype=torch.bfloat16 if device.type == "cuda" else None)


def trained_adapter(
    name: str, plan: Plan, classifier: Classifier, train: ImageSet, validation: ImageSet, out: Path
) -> Lax:
    """Train an adapter, or read the one that is done; images held out select the epoch."""
    folder, own = out / "adapters" / name, plan.paper.adapter
    if not (folder / DONE).exists():
        start = time.monotonic()
        size = min(plan.batch_sizes[1], len(train))
        recipe, seed = plan.adapters[name]
        lax = train_lax(
            classifier,
            Batches(train, plan.side, size, own.augment, own.images),
            recipe=paper_recipe(plan) if recipe == "paper" else recipe,
            # An order is trained for a number of steps, whatever the data.
            epochs=None if recipe == "robust" and not plan.quick else plan.lax_epochs,
            alpha_min=plan.paper.alpha_min,
            seed=seed,
            out=folder,
            validation=[(as_seen(validation.pixels, plan.side), validation.labels)],
            validation_images=len(validation),
            patience=None,
            fabric=fabric_on(train.labels.device),
        )
        seconds = round(time.monotonic() - start, 1)
        write_json(folder / DONE, {"recipe": recipe, "seed": seed, "seconds": seconds})
        print(f"  validation MSI {lax.trained['history'][-1]['msi']:.3f}")
    return Lax.from_pretrained(folder).to(train.labels.device)


def trained_twin(
    plan: Plan, classifier: Classifier, train: ImageSet, validation: ImageSet, out: Path
) -> Classifier | None:
    """Train a copy of the classifier that is used to hidden pixels, or read it."""
    if not plan.twin_epochs:
        return None
    path, own, device = out / "twin.safetensors", plan.paper.adapter, train.labels.device
    if not path.exists():
        made = train_twin(
            classifier,
            Batches(train, plan.side, min(plan.batch_sizes[1], len(train)), own.augment),
            epochs=plan.twin_epochs,
            seed=plan.seed,
            validation=[(as_seen(validation.pixels, plan.side), validation.labels)],
            validation_images=len(validation),
            fabric=fabric_on(device),
        )
        save_weights(made, path)
    twin = build(plan.network, classifier.classes or (), plan.side).to(device, classifier.dtype)
    twin.model.load_state_dict(load_file(path, device=str(device)))
    twin.model.eval()
    return twin


def save_weights(classifier: Classifier, path: Path) -> None:
    """Write a file of weights whole or not at all."""
    weights = {name: value.contiguous() for name, value in classifier.model.state_dict().items()}
    part = path.with_suffix(".part")
    save_file(weights, part)
    part.replace(path)


def fabric_on(device: torch.device) -> Fabric:
    """Train on this device, on a GPU in bfloat16."""
    return Fabric(
        accelerator=device.type,
        devices=1,
        precision="bf16-mixed" if device.type == "cuda" else "32-true",
    )


def paper_recipe(plan: Plan) -> LaxRecipe:
    """Return the paper's recipe with the values of the table."""
    own = plan.paper.adapter
    return LaxRecipe(entropy=own.entropy, upsample=own.upsample, lr=own.lr)


def score(
    plan: Plan, classifier: Classifier, test: ImageSet, names: Sequence[str],
    adapters: Mapping[str, Lax], twin: Classifier | None, out: Path,
) -> RunResults:  # fmt: skip
    """Score all methods on the same images, or read the run. All options of `compare` are here."""
    if (out / "compare" / "run.json").exists():
        return RunResults.read(out / "compare")
    cams = (*CAMS, "rollout") if NETWORKS[plan.network].tokens else CAMS
    objects = None if test.objects is None else middle(test.objects, plan.side)
    return compare(
        classifier,
        as_seen(test.pixels, plan.side),
        methods={**{name: name for name in cams}, **adapters},
        targets=test.labels,
        names=names,
        truth=objects,
        twin=twin,
        alpha_min=plan.paper.alpha_min,
        calls="exact",
        value_step=plan.step,
        percent_step=2 * plan.step,
        seed=plan.seed,
        device=str(next(classifier.model.parameters()).device),
        out=out / "compare",
    )


def reproduce(
    plan: Plan, out: Path, data: Path | None, device: torch.device, *, download: bool = False
) -> None:
    """Train what is not trained, score what is not scored, write results and report."""
    keep_plan(plan, out)
    wanted = Wanted(data, plan.side, plan.seed, plan.train_images, plan.test_images, download)
    sets = read_sets(plan.paper.data, wanted)
    print(f"{sets.source}: {len(sets.train)} training images, {len(sets.test)} test images")
    n = min(VALIDATION, max(2, len(sets.train) // SHARE))
    train, validation = (part.to(device) for part in held_out(sets.train, n, plan.seed))
    sets = ImageSets(train, sets.test, sets.classes, sets.source)
    print("classifier", flush=True)
    classifier = trained_classifier(plan, sets, out, device)
    known = json.loads((out / "classifier" / DONE).read_text())
    print(f"  test accuracy {known['test_accuracy']:.1%} on {known['test_images']} images")
    adapters = {}
    for name in plan.adapters:
        print(f"adapter {name}", flush=True)
        adapters[name] = trained_adapter(name, plan, classifier, train, validation, out)
    print("twin", flush=True)
    twin = trained_twin(plan, classifier, train, validation, out)
    rows = evenly(sets.test.labels, plan.images, plan.seed)
    test = sets.test.only(rows)
    labels = [sets.classes[label] for label in test.labels.tolist()]
    names = [f"{label}/{row:05d}" for label, row in zip(labels, rows.tolist(), strict=True)]
    print(f"scoring {len(test)} images", flush=True)
    start = time.monotonic()
    results = score(plan, classifier, test, names, adapters, twin, out)
    seconds = {"classifier": known["seconds"], "scoring": round(time.monotonic() - start, 1)}
    for name in adapters:
        trained = json.loads((out / "adapters" / name / DONE).read_text())
        seconds[name] = trained["seconds"]
    facts = {
        "table": plan.table,
        "config": asdict(plan),
        "classifier": known,
        "seconds": seconds,  # of the last start of each stage
    }
    recipes = {name: recipe for name, (recipe, _) in plan.adapters.items()}
    write_results(out, facts, recipes)
    results.report(out / "results" / "report.html")
    results.plot("sheet").savefig(out / "results" / "sheet.png")
    if (out / "results" / "alpha.json").exists():
        results.plot("alpha").savefig(out / "results" / "alpha.png")
    print(f"All files are in {out}, tables and figures in {out / 'results'}.")


def parser() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("table", choices=TABLES)
    made.add_argument("--data", type=Path, metavar="ROOT", help="folder of the data sets")
    made.add_argument("--download", action="store_true", help="download the data to ROOT first")
    made.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; TABLE")
    made.add_argument("--quick", action="store_true", help="a small network, few images: minutes")
    made.add_argument("--device", help="cpu, cuda or cuda:1; a GPU if there is one")
    made.add_argument("--network", choices=NETWORKS, help="another network than the table's")
    made.add_argument("--weights", help="to start from: default (ImageNet), none, or a file")
    made.add_argument("--recipes", type=lambda text: tuple(text.split(",")), help="paper,robust")
    made.add_argument("--step", type=float, help="of the pixel-value curves; 0.01")
    numbers = {
        "images": "test images to score; 2000",
        "train-images": "training images; all",
        "test-images": "test images to draw from; all",
        "epochs": "of the classifier",
        "lax-epochs": "of each adapter but those of the recipe robust",
        "twin-epochs": "of the twin, a copy used to hidden pixels; 6; 0: none",
        "seeds": "adapters per recipe; 3",
        "seed": "of everything random; 0",
    }
    for name, words in numbers.items():
        made.add_argument(f"--{name}", type=int, metavar="N", help=words)
    return made


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    given = parser().parse_args(words)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    out = given.out or Path(given.table)
    try:
        plan = make_plan(given)
        reproduce(plan, out, given.data, torch.device(device), download=given.download)
    except UserError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
