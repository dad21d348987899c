"""Repeat a table of the paper: train a classifier and LAX, score every method on test images.

    python paper/reproduce.py synthetic-mnist --quick
    python paper/reproduce.py cifar10 --data ROOT --out runs/cifar10
    python paper/reproduce.py imagenet --data ROOT --stand-ins WEIGHTS --out runs/imagenet

Run the same command again to resume: a step that is done is skipped, a run of `compare` resumes.
`--seconds` ends the work in time, `--processes` shares it, `--restore` and `--keep` carry it.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from shutil import rmtree
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
from ledger import Rows
from networks import NETWORKS, build, fill_in
from results_page import Page, draw
from state import pack, unpack
from steps import Clock, Step, facts_of, minutes_of, side_by_side, work
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

ORDER_BATCH = 192  # images per step of the default recipe, as `train-lax` has them on a GPU
IMAGENET = "imagenet"  # the table that is not the paper's
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
    usual = table.quick_network if quick else table.network
    stands_in = given.stand_ins is not None and not quick
    network = given.network or (table.stand_in.network if stands_in else usual)
    # The network that ships with the package knows digits already, and soon fits.
    random = quick and (network, table.data) != ("small-net", "synthetic-mnist")
    plan: dict[str, Any] = {
        "network": network,
        "weights": "none" if random else stand_in_weights(table, given) or "default",
        "side": NETWORKS[network].side or (table.quick_side if quick else table.side),
        "train_images": 512 if quick else None,
        "test_images": 200 if quick else None,
        "images": 20 if quick else 1000,
        "epochs": (6 if random else 2) if quick else table.training.epochs,
        "lax_epochs": 4 if quick else table.adapter.epochs,
        "twin_epochs": 1 if quick else 6,
        "recipes": ("paper", "robust"),
        "seeds": 1 if quick else 3,
        "step": table.step,
        "seed": 0,
    }
    asked = {name: value for name, value in vars(given).items() if value is not None}
    return Plan(given.table, quick, **{name: asked.get(name, plan[name]) for name in plan})


def stand_in_weights(table: Table, given: argparse.Namespace) -> str | None:
    """Return the file of a stand-in's weights, "none" if it has none, or None without one."""
    if given.stand_ins is None or given.quick:
        return None
    name = table.stand_in.weights
    return name if name == "none" else str(given.stand_ins / name)


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


@dataclass
class Making:
    """A table in the making: what its steps read and write."""

    plan: Plan
    out: Path
    device: torch.device
    data: Path | None = None
    download: bool = False

    @cached_property
    def sets(self) -> ImageSets:
        """The images, of which some training images are held out."""
        plan = self.plan
        wanted = Wanted(
            self.data, plan.side, plan.seed, plan.train_images, plan.test_images, self.download
        )
        found = read_sets(plan.paper.data, wanted)
        print(f"{found.source}: {len(found.train)} training, {len(found.test)} test images")
        return found

    @cached_property
    def parts(self) -> tuple[ImageSet, ImageSet]:
        """The images to train on, and those that select epochs."""
        n = min(VALIDATION, max(2, len(self.sets.train) // SHARE))
        train, validation = held_out(self.sets.train, n, self.plan.seed)
        return train.to(self.device), validation.to(self.device)

    @property
    def validation(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The images that select epochs, as a loader."""
        found = self.parts[1]
        return [(as_seen(found.pixels, self.plan.side), found.labels)]

    @property
    def weights(self) -> Path:
        """The file of the classifier."""
        return self.out / "classifier.safetensors"

    @property
    def twin_weights(self) -> Path:
        """The file of the twin."""
        return self.out / "twin.safetensors"

    def empty(self) -> Classifier:
        """Return the network before its training."""
        plan = self.plan
        return build(plan.network, self.sets.classes, plan.side, plan.seed).to(self.device)

    def loaded(self, path: Path) -> Classifier:
        """Return the network with the weights of a file, on a GPU in bfloat16."""
        found = self.empty()
        state = {
            name: one.float() for name, one in load_file(path, device=str(self.device)).items()
        }
        own = found.model.state_dict()
        found.model.load_state_dict({name: one.to(own[name].dtype) for name, one in state.items()})
        found.model.eval()
        return found.to(dtype=torch.bfloat16 if self.device.type == "cuda" else None)

    @cached_property
    def classifier(self) -> Classifier:
        """The trained classifier, as it is stored."""
        return self.loaded(self.weights)

    def steps(self) -> list[Step]:
        """The steps of the table, with the seconds that they take on an H200, about."""
        plan = self.plan
        quick = plan.quick
        found = [Step("classifier", self.train_classifier, (), 0 if quick else 60)]
        for name in plan.adapters:
            training = partial(self.train_adapter, name)
            found.append(Step(name, training, ("classifier",), 0 if quick else 90))
        last = [*plan.adapters]
        if plan.twin_epochs:
            found.append(Step("twin", self.train_twin, ("classifier",), 0 if quick else 60))
            last.append("twin")
        found.append(Step("score", self.score, tuple(last), 0 if quick else 30))
        found.append(Step("results", self.write, ("score",), 0 if quick else 20))
        return found

    def train_classifier(self, clock: Clock) -> dict[str, Any]:
        """Train the classifier, store it, and measure the accuracy of what is stored."""
        plan, sets, recipe = self.plan, self.sets, self.plan.paper.training
        classifier, train = self.empty(), self.parts[0]
        random = fill_in(classifier.model, plan.network, plan.weights)
        size = min(plan.batch_sizes[0], len(train))
        # The rates are those of the table's batch size.
        lr = (recipe.lr if plan.weights == "none" else recipe.fine_lr) * size / recipe.batch_size
        batches = Batches(train, plan.side, size, recipe.augment)
        training = Training(recipe, plan.epochs, lr, plan.seed)
        checkpoint = self.out / "classifier.pt"
        history = train_classifier(classifier, batches, training, checkpoint, clock.check)
        save_weights(classifier, self.weights)
        checkpoint.unlink()
        return {
            "test_accuracy": accuracy(self.loaded(self.weights), sets.test, plan.side),
            "test_images": len(sets.test),
            "train_images": len(train),
            "random_at_first": random,
            "data": sets.source,
            "history": history,
            "sha256": digest(self.weights),
        }

    def train_adapter(self, name: str, clock: Clock) -> dict[str, Any]:
        """Train an adapter; images held out select the epoch or the size."""
        plan, own, (train, validation) = self.plan, self.plan.paper.adapter, self.parts
        recipe, seed = plan.adapters[name]
        folder = self.out / "training" / name
        # An order takes crops and flips itself, and larger batches.
        is_order = recipe == "robust"
        size = ORDER_BATCH if is_order and not plan.quick else plan.batch_sizes[1]
        augment = own.augment and not is_order
        lax = train_lax(
            self.classifier,
            Batches(train, plan.side, min(size, len(train)), augment, own.images),
            recipe=paper_recipe(plan) if recipe == "paper" else recipe,
            # An order is trained for a number of steps, whatever the data.
            epochs=None if is_order and not plan.quick else plan.lax_epochs,
            alpha_min=plan.paper.alpha_min,
            seed=seed,
            out=folder,
            validation=self.validation,
            validation_images=len(validation),
            patience=None,
            fabric=fabric_on(self.device),
            progress=clock.check,
        )
        lax.save_pretrained(self.adapter(name), half=True)
        rmtree(folder)
        found = {"recipe": recipe, "seed": seed, "last_epoch": lax.trained["history"][-1]}
        return found | {"sha256": digest(self.adapter(name) / "model.safetensors")}

    def adapter(self, name: str) -> Path:
        """The folder of a trained adapter."""
        return self.out / "adapters" / name

    def train_twin(self, clock: Clock) -> dict[str, Any]:
        """Train a copy of the classifier that is used to hidden pixels."""
        plan, own, (train, validation) = self.plan, self.plan.paper.adapter, self.parts
        made = train_twin(
            self.classifier,
            Batches(train, plan.side, min(plan.batch_sizes[1], len(train)), own.augment),
            epochs=plan.twin_epochs,
            seed=plan.seed,
            validation=self.validation,
            validation_images=len(validation),
            fabric=fabric_on(self.device),
            progress=clock.check,
        )
        save_weights(made, self.twin_weights)
        right = accuracy(self.loaded(self.twin_weights), self.sets.test, plan.side)
        return {"test_accuracy": right, "sha256": digest(self.twin_weights)}

    def score(self, clock: Clock) -> dict[str, Any]:
        """Score all methods on the same images. All options of `compare` are here."""
        plan, sets = self.plan, self.sets
        rows = evenly(sets.test.labels, plan.images, plan.seed)
        test = sets.test.only(rows)
        labels = [sets.classes[label] for label in test.labels.tolist()]
        names = [f"{label}/{row:05d}" for label, row in zip(labels, rows.tolist(), strict=True)]
        cams = (*CAMS, "rollout") if NETWORKS[plan.network].tokens else CAMS
        adapters = {
            name: Lax.from_pretrained(self.adapter(name)).to(self.device) for name in plan.adapters
        }
        objects = None if test.objects is None else middle(test.objects, plan.side)
        compare(
            self.classifier,
            as_seen(test.pixels, plan.side),
            methods={**{name: name for name in cams}, **adapters},
            targets=test.labels,
            names=names,
            truth=objects,
            twin=self.loaded(self.twin_weights) if plan.twin_epochs else None,
            alpha_min=plan.paper.alpha_min,
            calls="exact",
            value_step=plan.step,
            percent_step=2 * plan.step,
            checks="controls,fill,leak,alpha-curve",
            seed=plan.seed,
            device=str(self.device),
            out=self.out / "compare",
            progress=clock.check,
        )
        return {"images": len(test)}

    def write(self, clock: Clock) -> dict[str, Any]:
        """Write rows, facts, table and report."""
        plan, adapters = self.plan, {name: facts_of(self.out, name) for name in self.plan.adapters}
        facts = {
            "table": plan.table,
            "config": asdict(plan),
            "classifier": facts_of(self.out, "classifier"),
            "adapters": adapters,
            "twin": facts_of(self.out, "twin") if plan.twin_epochs else None,
            "gpu_minutes": round(minutes_of(self.out), 1),
        }
        write_results(self.out, facts)
        rows = Rows(self.out / "results")
        table = Page(self.out).table("results")
        (rows.folder / "table.md").write_text(table + "\n")
        print(table)
        draw(rows, rows.folder / "msi.png")
        RunResults.read(self.out / "compare").report(rows.folder / "report.html")
        return {}


def save_weights(classifier: Classifier, path: Path) -> None:
    """Write a file of weights whole or not at all, kernels and matrices in half precision."""
    weights = {}
    for name, value in classifier.model.state_dict().items():
        is_wide = value.ndim > 1 and value.is_floating_point()
        weights[name] = (value.half() if is_wide else value).contiguous()
    part = path.with_suffix(".part")
    save_file(weights, part)
    part.replace(path)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


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


def parser() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("table", choices=[*TABLES, IMAGENET])
    made.add_argument("--data", type=Path, metavar="ROOT", help="folder of the data sets")
    made.add_argument("--download", action="store_true", help="download the data to ROOT first")
    made.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; TABLE")
    made.add_argument("--quick", action="store_true", help="a small network, few images: minutes")
    made.add_argument("--device", help="cpu, cuda or cuda:1; a GPU if there is one")
    made.add_argument("--network", choices=NETWORKS, help="another network than the table's")
    made.add_argument("--weights", help="to start from: default (ImageNet), none, or a file")
    made.add_argument(
        "--stand-ins", type=Path, metavar="DIR", help="networks whose weights are in this folder"
    )
    made.add_argument("--networks", type=lambda text: tuple(text.split(",")), help="of imagenet")
    made.add_argument(
        "--photographs", choices=("test", "report"), default="test", help="that imagenet scores"
    )
    made.add_argument(
        "--few", type=int, help="photographs of methods that search, of imagenet; 200"
    )
    made.add_argument("--recipes", type=lambda text: tuple(text.split(",")), help="paper,robust")
    made.add_argument("--step", type=float, help="of the pixel-value curves; 0.01, ViT 0.02")
    made.add_argument("--seconds", type=float, help="end in time; run again to go on")
    made.add_argument("--restore", type=Path, metavar="DIR", help="unpack a run from here first")
    made.add_argument("--keep", type=Path, metavar="DIR", help="pack the run to here at the end")
    numbers = {
        "processes": "that share the steps; 1",
        "images": "test images to score; 1000",
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


def steps_for(given: argparse.Namespace, out: Path, device: torch.device) -> list[Step]:
    """Return the steps of a table."""
    if given.table == IMAGENET:
        from imagenet import imagenet_steps

        return imagenet_steps(given, out, device)
    plan = make_plan(given)
    keep_plan(plan, out)
    return Making(plan, out, device, given.data, given.download).steps()


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    command = [*(sys.argv[1:] if words is None else words)]
    given = parser().parse_args(command)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out, clock = given.out or Path(given.table), Clock(given.seconds)
    try:
        if given.restore and not (out / "done").exists():
            unpack(given.restore, out)
        steps = steps_for(given, out, device)
        if given.processes and given.processes > 1:
            share(command, given, clock)
            finished = work(steps, out, Clock(-1))
        else:
            finished = work(steps, out, clock)
        if given.keep:
            print("packed:", ", ".join(path.name for path in pack(out, given.keep)))
    except UserError as error:
        sys.exit(f"Error: {error}")
    left = [step.name for step in steps if not (out / "done" / f"{step.name}.json").exists()]
    where = f"All files are in {out}, tables and figures in {out / 'results'}."
    print(where if finished else f"Not done yet: {', '.join(left)}. Run the same command again.")


def share(command: Sequence[str], given: argparse.Namespace, clock: Clock) -> None:
    """Let several processes work on the steps, each as this one would alone."""
    words = [str(Path(__file__)), *without(command, ("--processes", "--keep", "--restore"))]
    if given.seconds is not None:
        words = [*without(words, ("--seconds",)), "--seconds", f"{clock.left:.0f}"]
    side_by_side(words, given.processes)


def without(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command without some options and their values.

    >>> without(["a", "--keep", "b", "--seed=1", "--keep=c"], ["--keep"])
    ['a', '--seed=1']
    """
    found: list[str] = []
    skips = False
    for word in command:
        if skips:
            skips = False
        elif word in options:
            skips = True
        elif word.split("=")[0] not in options:
            found.append(word)
    return found


if __name__ == "__main__":
    main()
