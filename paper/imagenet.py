"""The ImageNet table: four networks, many maps, each as it is, at one common size, and fitted.

    python paper/reproduce.py imagenet --data ROOT --stand-ins WEIGHTS --out runs/imagenet

ROOT/imagenet/ holds train/NNN/, test/NNN/, boxes.csv, train-boxes.csv and splits.csv. Adapters
learn from the photographs marked `learn`; epochs and sizes are chosen on `choose`; the table is of
test/, or, to try it out, of those marked `report` (--photographs report). Targets are the network's
own predictions. WEIGHTS holds what `experiments/lax/prepare_weights.py` writes.

Ways: `as it is`; `common`, the size with the best mean MSI on `choose` under black; `fitted`, cut
for each photograph where the network agrees. Methods that search for each photograph are scored on
fewer photographs: with their usual number of passes, and with as many as the fitted Grad-CAM.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import Any

import numpy as np
import pandas
import torch
from PIL import Image
from torch import Tensor

from image_sets import Batches, ImageSet
from steps import Clock, Step, facts_of, minutes_of
from sufficit import Classifier, Fitted, Lax, UserError, View, compare, explain, train_lax
from sufficit.sources import Cut, Method, Source
from table_results import write_json

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
NETWORKS = ("resnet50", "mobilenet_v2", "efficientnet_lite0", "deit_tiny")
TRANSFORMERS = ("deit_tiny",)
HALVES = ("efficientnet_lite0",)  # networks whose images are normalised by 0.5
SIDE = 224
CNN_MAPS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam", "lrp", "input-x-gradient")
VIT_MAPS = (
    "gradcam",
    "layercam",
    "kpca-cam",
    "finer-cam",
    "rollout",
    "attnlrp",
    "input-x-gradient",
)
RIVALS = ("masked-in-out", "learn-to-rank")  # losses of other works, one training each
BATCH, RIVAL_BATCH = 192, 32
RIVAL_EPOCHS = 38  # of 2,000 photographs: as many presentations as the 400 steps of 192 of LAX
FILLS = "black,blur,mean,noise"
SIZES = (0.04, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8)
CALLS = 26  # masks per photograph and fill
FEW = 200  # photographs of methods that search
SEARCHING = {"scorecam": "channels", "rise": "masks", "extremal-perturbation": "steps"}
PASSES = {"scorecam": 1, "rise": 1, "extremal-perturbation": 3}  # of one of these
CEILING = "region-search"
COLUMNS = "paper,msi_rank,average_drop,increase_in_confidence,adcc"


@dataclass(frozen=True)
class Photographs:
    """Photographs of one part, with their names, classes and boxes."""

    names: tuple[str, ...]
    pixels: Tensor  # uint8 [N,3,224,224]
    labels: Tensor  # [N] the class by the folder
    boxes: tuple[tuple[tuple[float, float, float, float], ...], ...]  # x, y, width, height

    def __len__(self) -> int:
        return len(self.names)

    @property
    def images(self) -> Tensor:
        """The photographs in 0..1: [N,3,224,224]."""
        return self.pixels.float() / 255

    @cached_property
    def truth(self) -> Tensor:
        """One on the pixels whose centres lie in a box: [N,224,224]."""
        centres = torch.arange(SIDE) + 0.5
        found = torch.zeros(len(self), SIDE, SIDE)
        for number, boxes in enumerate(self.boxes):
            for x, y, width, height in boxes:
                down = (centres >= y) & (centres <= y + height)
                across = (centres >= x) & (centres <= x + width)
                found[number][down[:, None] & across] = 1
        return found


def read_photographs(root: Path, part: str, limit: int | None) -> Photographs:
    """Read the photographs of a part: `test`, or one of splits.csv; the first ones with a limit."""
    folder = root / "imagenet"
    inside = folder / ("test" if part == "test" else "train")
    if not inside.is_dir():
        raise UserError(f"no photographs in {inside}: check --data")
    names = sorted(path.relative_to(inside).as_posix() for path in inside.glob("*/*.jp*g"))
    if part != "test":
        with (folder / "splits.csv").open() as file:
            parts = {row["image"]: row["part"] for row in csv.DictReader(file)}
        names = [name for name in names if parts.get(name) == part]
    if limit is not None and limit < len(names):
        # Evenly over the classes, which follow each other.
        names = [names[round(place)] for place in np.linspace(0, len(names) - 1, limit)]
    with (folder / ("boxes.csv" if part == "test" else "train-boxes.csv")).open() as file:
        boxes: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
        for row in csv.DictReader(file):
            if row["image"] in boxes:
                sides = (float(row[side]) for side in ("x", "y", "width", "height"))
                x, y, width, height = sides
                boxes[row["image"]].append((x, y, width, height))
    with ThreadPoolExecutor(8) as pool:
        pixels = torch.stack([*pool.map(_read, [inside / name for name in names])])
    labels = torch.tensor([int(name.split("/")[0]) for name in names])
    return Photographs(tuple(names), pixels, labels, tuple(tuple(one) for one in boxes.values()))


def _read(path: Path) -> Tensor:
    with Image.open(path) as image:
        if image.size != (SIDE, SIDE):
            raise UserError(f"{path} is {image.size}, not {SIDE} x {SIDE} pixels: resize it first")
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def from_experiments(path: str, name: str) -> ModuleType:
    """Import a file of experiments/ under a name of its own."""
    if name not in sys.modules:
        spec = spec_from_file_location(name, EXPERIMENTS / path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def classifier_of(network: str, weights: Path, device: torch.device) -> Classifier:
    """Return a network with its weights, on a GPU in bfloat16."""
    model = getattr(from_experiments("lax/networks.py", "lax_networks"), network)(weights)
    mean, std = ((0.5,) * 3,) * 2 if network in HALVES else (IMAGENET_MEAN, IMAGENET_STD)
    classifier = Classifier(model.eval(), mean=mean, std=std, view=View((SIDE, SIDE)))
    classifier.classes = tuple(f"{number:03d}" for number in range(1000))
    if device.type == "cuda":
        plain = network in TRANSFORMERS
        layout = torch.contiguous_format if plain else torch.channels_last
        return classifier.to(device, torch.bfloat16, layout)
    return classifier.to(device)


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class ImageNetTable:
    """The table of one network in the making."""

    network: str
    out: Path
    given: argparse.Namespace
    device: torch.device

    @cached_property
    def classifier(self) -> Classifier:
        """The network."""
        return classifier_of(self.network, self.given.stand_ins, self.device)

    def part(self, name: str) -> Photographs:
        """The photographs of a part; with --images so many, and as many to learn from."""
        return read_photographs(self.given.data, name, self.given.images)

    @cached_property
    def choose(self) -> Photographs:
        """The photographs by which epochs and sizes are chosen."""
        return self.part("choose")

    @cached_property
    def scored(self) -> Photographs:
        """The photographs of the table."""
        return self.part(self.given.photographs)

    @property
    def seeds(self) -> range:
        """The seeds of the trainings of LAX."""
        first = self.given.seed or 0
        return range(first, first + (self.given.seeds or 3))

    @property
    def adapters(self) -> dict[str, tuple[str, int]]:
        """Every adapter with its kind and seed."""
        laxes = {f"lax-{seed}": ("robust", seed) for seed in self.seeds}
        return laxes | {name: (name, self.seeds[0]) for name in RIVALS}

    @property
    def words(self) -> tuple[str, ...]:
        """The methods of one or two passes."""
        return VIT_MAPS if self.network in TRANSFORMERS else CNN_MAPS

    def folder(self, *names: str) -> Path:
        """A folder of this network."""
        return self.out.joinpath(self.network, *names)

    def named(self, name: str) -> str:
        """The name of a step of this network."""
        return f"{self.network}-{name}"

    def steps(self) -> list[Step]:
        """The steps of this network, with the seconds they take on an H200, about."""
        trained = tuple(self.named(name) for name in self.adapters)
        sizes = self.named("sizes")
        quick = self.given.quick
        ways = {"as-is": 30, "common": 30, "fitted": 30, "few": 30, "equal": 30}
        found = [
            Step(self.named(name), partial(self.train, name), (), 0 if quick else 90)
            for name in self.adapters
        ]
        found.append(Step(sizes, self.choose_sizes, trained, 0 if quick else 60))
        needs = {"as-is": trained, "common": (sizes,), "fitted": trained, "few": trained}
        needs["equal"] = (self.named("passes"),)
        found.append(Step(self.named("passes"), self.count_passes, trained, 0 if quick else 30))
        found += [
            Step(self.named(way), partial(self.score, way), needs[way], 0 if quick else seconds)
            for way, seconds in ways.items()
        ]
        return found

    def train(self, name: str, clock: Clock) -> dict[str, Any]:
        """Train an adapter on the photographs to learn from."""
        kind, seed = self.adapters[name]
        learn, choose = self.part("learn"), self.choose
        images = ImageSet(learn.pixels, learn.labels).to(self.device)
        folder = self.folder("training", name)
        size = min(len(learn), BATCH if kind == "robust" else RIVAL_BATCH)
        quick_epochs = 1 if self.given.quick else None
        options: dict[str, Any] = {
            "target": "prediction",
            "seed": seed,
            "out": folder,
            "validation": [(choose.images.to(self.device), choose.labels.to(self.device))],
            "validation_images": len(choose),
            "progress": clock.check,
        }
        if kind == "robust":
            loader = Batches(images, SIDE, size, augment=False)  # its views are its own
            lax = train_lax(self.classifier, loader, epochs=quick_epochs, **options)
        else:
            losses = from_experiments("rival_losses.py", "rival_losses")
            lax = losses.train(
                kind,
                self.classifier,
                Batches(images, SIDE, size, augment=True),
                epochs=quick_epochs or RIVAL_EPOCHS,
                patience=None,
                class_free=True,
                **options,
            )
        lax.save_pretrained(self.folder("adapters", name), half=True)
        rmtree(folder)
        return {
            "kind": kind,
            "seed": seed,
            "n": len(learn),
            "last_epoch": lax.trained["history"][-1],
        }

    def sources(self) -> dict[str, Source]:
        """The maps of one or two passes, and the adapters."""
        found: dict[str, Source] = {word: Method(word, word) for word in self.words}
        for name in self.adapters:
            lax = Lax.from_pretrained(self.folder("adapters", name)).to(self.device)
            found[name] = Method(name, lax)
        return found

    def compare(
        self, name: str, photographs: Photographs, methods: Mapping[str, Any], clock: Clock,
        **options: Any,
    ) -> None:  # fmt: skip
        """Score sources; without targets they are scored for the network's predictions."""
        compare(
            self.classifier,
            photographs.images,
            methods=methods,
            names=photographs.names,
            seed=self.given.seed or 0,
            device=str(self.device),
            out=self.folder("compare", name),
            progress=clock.check,
            **options,
        )

    def choose_sizes(self, clock: Clock) -> dict[str, Any]:
        """Choose each map's common size by its mean MSI under black on `choose`."""
        cuts: dict[str, Cut] = {}
        for source in self.sources().values():
            for size in SIZES:
                cut = Cut(source, size)
                cuts[cut.name] = cut
        self.compare("sizes", self.choose, cuts, clock, columns="msi", checks="none", calls="exact")
        found: dict[str, float] = {}
        for name in [*self.words, *self.adapters]:
            means = {size: self.mean_msi("sizes", f"{name}@{size:g}") for size in SIZES}
            found[name] = max(means, key=lambda size: means[size])
        return {"sizes": found, "n": len(self.choose)}

    def rows(self, run: str, source: str) -> pandas.DataFrame:
        """The rows of a source in a run of `compare`."""
        return pandas.read_parquet(self.folder("compare", run, source) / "scores.parquet")

    def mean_msi(self, run: str, source: str) -> float:
        """The mean MSI of a source in a run of `compare`."""
        return float(self.rows(run, source)["msi"].mean())

    def score(self, way: str, clock: Clock) -> dict[str, Any]:
        """Score all sources in one way on the photographs of the table."""
        photographs, sources = self.scored, self.sources()
        methods: dict[str, Any]
        options: dict[str, Any] = {"checks": "leak", "columns": "paper,msi_rank"}
        if way == "as-is":
            methods = {**sources}
            options |= {"checks": "controls,leak", "columns": COLUMNS}
        elif way == "common":
            sizes = facts_of(self.out, self.named("sizes"))["sizes"]
            cuts = [Cut(source, sizes[name]) for name, source in sources.items()]
            methods = {cut.name: cut for cut in cuts}
        elif way == "fitted":
            methods = {f"{name}+fit": Fitted(source) for name, source in sources.items()}
            methods["center+fit"] = "center+fit"
        else:
            few = min(self.given.few or FEW, len(photographs))
            photographs = first(photographs, few)
            methods = {word: (word, self.options_of(word, way)) for word in SEARCHING}
            if way == "few":
                # What can be had: boxes that are searched with all fills but blur.
                methods[CEILING] = (CEILING, {"calls": 60} if self.given.quick else {})
        self.compare(
            way,
            photographs,
            methods,
            clock,
            fills=FILLS,
            calls=CALLS,
            truth=photographs.truth,
            **options,
        )
        return {"methods": [*methods], "n": len(photographs)}

    def count_passes(self, clock: Clock) -> dict[str, Any]:
        """Count the forward passes of each map, and of it fitted; a backward pass counts as two."""
        few = first(self.scored, min(self.given.few or FEW, len(self.scored)))
        images = few.images.to(self.device)
        drawn: dict[str, float] = {}
        fitted: dict[str, float] = {}
        for name, source in self.sources().items():
            passes = source.facts().passes
            drawn[name] = float(passes)
            method: Any = source.method  # type: ignore[attr-defined]  # of these all have one
            regions = explain(self.classifier, images, None, method, fit=True, progress=False)
            mean_passes = float(np.mean([regions[row].passes for row in range(len(few))]))
            fitted[name] = drawn[name] + mean_passes
            clock.check()
        return {"drawn": drawn, "fitted": fitted, "n": len(few)}

    def options_of(self, word: str, way: str) -> dict[str, int]:
        """The options of a method that searches: as it is, or with as many passes as a fit."""
        if self.given.quick:
            return {SEARCHING[word]: 8}
        if way == "few":
            return {}
        passes = facts_of(self.out, self.named("passes"))["fitted"]["gradcam"]
        return {SEARCHING[word]: max(1, round(passes / PASSES[word]))}

    def all_rows(self) -> pandas.DataFrame:
        """The rows of every way."""
        found = []
        for way in ("as-is", "common", "fitted", "few", "equal"):
            run = json.loads((self.folder("compare", way) / "run.json").read_text())
            for name in run["methods"]:
                rows = self.rows(way, name)
                rows.insert(0, "method", plain_name(name))
                rows.insert(0, "way", way)
                rows.insert(0, "network", self.network)
                found.append(rows)
        return pandas.concat(found, ignore_index=True)


def plain_name(method: str) -> str:
    """Return the name of a map without its way.

    >>> plain_name("gradcam+fit"), plain_name("gradcam++@0.45")
    ('gradcam', 'gradcam++')
    """
    return method.removesuffix("+fit").partition("@")[0]


def first(photographs: Photographs, count: int) -> Photographs:
    """Return some photographs, evenly over the classes."""
    places = sorted({round(one) for one in np.linspace(0, len(photographs) - 1, count)})
    return Photographs(
        names=tuple(photographs.names[place] for place in places),
        pixels=photographs.pixels[places],
        labels=photographs.labels[places],
        boxes=tuple(photographs.boxes[place] for place in places),
    )


def write_table(
    tables: list[ImageNetTable], given: argparse.Namespace, clock: Clock
) -> dict[str, Any]:
    """Write the rows of all networks and the facts of the run."""
    out = tables[0].out
    folder = out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {}
    for table in tables:
        rows = table.all_rows()
        rows.to_parquet(folder / f"rows-{table.network}.parquet", index=False)
        run = json.loads((table.folder("compare", "as-is") / "run.json").read_text())
        labels = dict(zip(table.scored.names, table.scored.labels.tolist(), strict=True))
        whole = rows[(rows["way"] == "as-is") & (rows["method"] == "gradcam")]
        right = [
            labels[name] == target for name, target in zip(whole.image, whole.target, strict=True)
        ]
        steps = [step.name for step in table.steps()]
        facts[table.network] = {
            "steps": {name: facts_of(out, name) for name in steps},
            "right": float(np.mean(right)),
            "n": len(whole),
        }
    known = {name: run.get(name) for name in ("time", "commit", "versions", "device", "alpha_min")}
    chosen = {
        "photographs": given.photographs,
        "fills": FILLS.split(","),
        "calls": CALLS,
        "sizes": SIZES,
        "seeds": [*tables[0].seeds],
    }
    about = {"table": "imagenet", "config": chosen, "networks": facts}
    write_json(folder / "run.json", known | about | {"gpu_minutes": round(minutes_of(out), 1)})
    return {}


def imagenet_steps(given: argparse.Namespace, out: Path, device: torch.device) -> list[Step]:
    """Return the steps of the ImageNet table."""
    if given.data is None or given.stand_ins is None:
        raise UserError("the ImageNet table needs --data ROOT and --stand-ins WEIGHTS")
    wanted = given.networks or NETWORKS
    tables = [ImageNetTable(network, out, given, device) for network in wanted]
    found = [step for table in tables for step in table.steps()]
    needs = tuple(step.name for step in found)
    return [*found, Step("results", partial(write_table, tables, given), needs)]
