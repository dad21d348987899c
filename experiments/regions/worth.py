"""What a fit is worth: maps as they are, at one common size, and fitted, on one network.

    PYTHONPATH=src:experiments/lax python experiments/regions/worth.py --network resnet50 \
        --data FOLDER --weights FOLDER --out FOLDER [--adapters FOLDER] [--device cuda]

Each map is scored on the photographs marked `report`, by the package alone:

- as it is: `explain`, scored with `--calls` masks per photograph and fill;
- at one common size: the size that is best on the photographs marked `choose`, under black;
- fitted with the fills a fit asks by default, and with black and blur;
- RISE and extremal perturbations, as they are, with as many forward passes as the fitted Grad-CAM
  took, on the first `--few` photographs.

The targets are the network's own predictions. Fills: black, blur, mean, noise and `patches`,
another photograph with its 32-px patches shuffled, which no fit asks. One row per photograph, map
and way goes to `rows-NETWORK.parquet` after every map; `table.py` prints the table of them.
Forward passes are counted at the model; a backward pass counts as two.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import photographs
import torch
from fills import patches
from measure import SIZES, donors_of, ranks_of
from photographs import Photographs
from torch import Tensor, nn

import networks
from sufficit import Classifier, Lax, evaluate, explain
from sufficit.metrics import Metric
from sufficit.perturbation.bands import all_but_top, top

ASKED = ("black", "blur", "mean", "noise")
MAPS = ("gradcam", "center", "layercam", "random")
BLACK_AND_BLUR = ("gradcam", "trained", "center")  # maps that are fitted with these two as well
SEARCHED = ("rise", "extremal-perturbation")
DONORS = 16
LIFTS = ("leak_lift", "leak_lift_10", "leak_lift_25", "leak_lift_45")
COLUMNS = ("msi", "mask_penalty", "pointing")
NORMALIZED = {"efficientnet_lite0": {"mean": (0.5,) * 3, "std": (0.5,) * 3}}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def classifier_of(name: str, weights: Path, device: str) -> Classifier:
    """A network as the package takes it, on a GPU in bfloat16."""
    model: nn.Module = getattr(networks, name)(weights).eval()
    networks.fold(model)  # a batch norm takes as long as a convolution
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    classifier = Classifier(model, **NORMALIZED.get(name, IMAGENET))
    if device == "cuda":
        is_vit = name == "deit_tiny"
        layout = torch.contiguous_format if is_vit else torch.channels_last
        classifier.to(device, torch.bfloat16, layout)
    return classifier


class Passes:
    """Counts the images that go through a model; those with a gradient count three times."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        model.register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.count += len(inputs[0]) * (3 if output.requires_grad else 1)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count from zero inside."""
        self.count = 0
        yield


def truth_of(some: Photographs, side: int) -> Tensor:
    """One on the pixels whose centres lie in a box of the photograph: [N,side,side]."""
    found = torch.zeros(len(some), side, side)
    centres = torch.arange(side) + 0.5
    for number, boxes in enumerate(some.boxes):
        for x, y, width, height in boxes:
            down = (centres >= y) & (centres <= y + height)
            across = (centres >= x) & (centres <= x + width)
            found[number][down[:, None] & across] = 1
    return found


def at_size(size: float) -> Metric:
    """MSI of the top share of a map, as a mask of zeros and ones, but for the empty image."""
    region, rest = top(size), all_but_top(size)

    def formula(found: Any, _: object) -> Tensor:
        kept, left = found.of([region, rest], "accuracy").unbind(1)
        return kept - left / 2 - size

    return Metric(True, lambda _: [region, rest], formula)


def order_of(maps: Tensor) -> Tensor:
    """The order of the pixels, 1 for the first and above 0 for the last: [N,H,W]."""
    return 1 - ranks_of(maps).double() / maps[0].numel()


class Scorer:
    """Scores maps of the photographs of `report`."""

    def __init__(
        self, classifier: Classifier, some: Photographs, targets: Tensor, calls: int | str
    ) -> None:
        self.classifier, self.targets, self.calls, self.names = (
            classifier, targets, calls, some.names
        )  # fmt: skip
        self.images = some.images(slice(None))
        self.truth = truth_of(some, self.images.shape[3])
        donors = donors_of(len(some)).to(self.images.device)
        self.patches = patches(self.images, self.images[donors])

    def rows(self, maps: Tensor, *, exact: bool, leak: bool) -> pandas.DataFrame:
        """One row per photograph: MSI under every fill, share, pointing and lifts of the order."""
        n = len(maps)
        score = partial(
            evaluate,
            self.classifier,
            self.images[:n],
            maps,
            self.targets[:n],
            calls="exact" if exact else self.calls,
            names=self.names[:n],
            progress=False,
        )
        found = score(
            fills=ASKED,
            columns=COLUMNS,
            truth=self.truth[:n],
            leak_donors=min(DONORS, n - 1) if leak else 0,
        )
        unseen = score(fill=self.patches[:n], columns=["msi"])
        columns = {"msi_black": found["msi"], "msi_patches": unseen["msi"]}
        columns |= {f"msi_{fill}": found[f"msi_{fill}"] for fill in ASKED[1:]}
        columns |= {"share": found["mask_penalty"], "pointing": found["pointing"]}
        if leak:
            columns |= {name: found[name] for name in LIFTS}
        arrays = {name: values.numpy() for name, values in columns.items()}
        return pandas.DataFrame({"image": self.names[:n], **arrays})


class Run:
    """The ways of all maps on one network, and the rows they give."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.started = asked, time.perf_counter()
        self.classifier = classifier_of(asked.network, asked.weights, asked.device)
        self.passes = Passes(self.classifier.model)
        parts = photographs.load(asked.data, asked.device, asked.limit, ("choose", "report"))
        self.choose, self.report = parts["choose"], parts["report"]
        self.targets = {part: self._predicted(some) for part, some in parts.items()}
        calls = asked.calls if asked.calls == "exact" else int(asked.calls)
        self.scorer = Scorer(self.classifier, self.report, self.targets["report"], calls)
        self.tables: list[pandas.DataFrame] = []
        self.facts: dict[str, Any] = {"network": asked.network, "calls": calls, "seconds": {}}
        right = (self.targets["report"] == self.report.labels).double().mean().item()
        device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
        self.facts |= {"right": right, "n": len(self.report), "device": device}
        self.facts["torch"] = torch.__version__
        self.say(f"ready; right about the class {right:.3f}")

    def say(self, text: str) -> None:
        """Print with the time since the start."""
        seconds = time.perf_counter() - self.started
        print(f"{self.asked.network} {seconds:6.1f} s: {text}", flush=True)

    def has_time(self) -> bool:
        """Whether another map may start."""
        return time.perf_counter() - self.started < self.asked.seconds

    def _predicted(self, some: Photographs) -> Tensor:
        numbers = torch.arange(len(some), device=some.pixels.device)
        with torch.no_grad():
            found = [self.classifier(some.images(rows)).argmax(1) for rows in numbers.split(256)]
        return torch.cat(found)

    def add(
        self, name: str, way: str, maps: Tensor, passes: float | Sequence[float], **more: Any
    ) -> pandas.DataFrame:
        """Score maps and keep their rows."""
        begun = time.perf_counter()
        # An order has the same lifts however it is cut.
        leak = way == "fitted" or name in SEARCHED
        found = self.scorer.rows(maps, exact="as it is" not in way, leak=leak)
        found = found.assign(passes=passes, **more)
        found.insert(0, "way", way)
        found.insert(0, "map", name)
        found.insert(0, "network", self.asked.network)
        self.tables.append(found)
        self.facts["seconds"][f"{name}, {way}"] = time.perf_counter() - begun
        values = " ".join(
            f"{fill} {found[f'msi_{fill}'].mean():.3f}" for fill in (*ASKED, "patches")
        )
        share, passed = found["share"].mean(), found["passes"].mean()
        self.say(f"{name}, {way}: {values}; share {share:.2f}, {passed:.1f} passes")
        return found

    def write(self) -> None:
        """Write the rows so far."""
        rows = pandas.concat(self.tables, ignore_index=True)
        out = self.asked.out / f"rows-{self.asked.network}.parquet"
        rows.to_parquet(out, index=False)
        self.facts["spent"] = time.perf_counter() - self.started
        facts = self.asked.out / f"facts-{self.asked.network}.json"
        facts.write_text(json.dumps(self.facts, indent=2) + "\n")

    def everything(self) -> None:
        """The zero line: all of the image is marked."""
        whole = torch.ones_like(self.scorer.images[:, 0])
        self.add("everything", "whole image", whole, 0.0)

    def ways_of_all(self, methods: dict[str, Any]) -> None:
        """Every way of several maps, while there is time."""
        for name, method in methods.items():
            if self.has_time():
                self.ways_of(name, method)
            else:
                self.say(f"no time for {name}")

    def ways_of(self, name: str, method: Any) -> None:
        """A map as it is, at one common size, and fitted."""
        images, targets = self.scorer.images, self.targets["report"]
        draw = partial(explain, self.classifier, images, targets, method, progress=False)
        with self.passes.counted():
            maps = draw()
        drawing = self.passes.count / len(images)
        self.add(name, "as it is", maps, drawing)

        regions = self._fitted(name, "fitted", draw, drawing)
        order = order_of(regions)  # before ReLU, where the map has negative parts
        size = self._common_size(method)
        common = torch.where(order > 1 - size, 0.995 + 0.005 * order, 0.005 * order)
        self.add(name, "at one common size", common, drawing, common_size=size)
        if name in BLACK_AND_BLUR:
            with_two = partial(draw, fills=("black", "blur"))
            self._fitted(name, "fitted, black and blur", with_two, drawing)
        self.write()

    def _fitted(self, name: str, way: str, draw: Any, drawing: float) -> Tensor:
        begun = time.perf_counter()
        regions = draw(fit=True)
        self.facts["seconds"][f"{name}, {way}: the fit"] = time.perf_counter() - begun
        # A certificate leaves out the passes of the map itself.
        passes = [drawing + one.passes for one in regions]
        self.add(name, way, regions.heatmaps, passes, enough=[one.enough for one in regions])
        return regions.heatmaps

    def _common_size(self, method: Any) -> float:
        """The size that is best by black on the photographs marked `choose`."""
        images, targets = self.choose.images(slice(None)), self.targets["choose"]
        regions = explain(
            self.classifier, images, targets, method, fit=True, fills=("black",), progress=False
        )
        found = evaluate(
            self.classifier,
            images,
            order_of(regions.heatmaps),
            targets,
            columns=[str(size) for size in SIZES],
            metrics={str(size): at_size(size) for size in SIZES},
            progress=False,
        ).mean()
        return max(SIZES, key=lambda size: found[str(size)])

    def at_equal_cost(self) -> None:
        """RISE and extremal perturbations with the passes that the fitted Grad-CAM took."""
        fitted = [one for one in self.tables if list(one.iloc[0, 1:3]) == ["gradcam", "fitted"]]
        if not fitted:
            self.say("no RISE and no extremal perturbations: Grad-CAM was not fitted")
            return
        passes = round(fitted[0]["passes"].mean())
        few = min(self.asked.few, len(self.report))
        options = {"rise": {"masks": passes}, "extremal-perturbation": {"steps": passes // 3}}
        for name, values in options.items():
            if not self.has_time():
                self.say(f"no time for {name}")
                return
            images, targets = self.scorer.images[:few], self.targets["report"][:few]
            with self.passes.counted():
                maps = explain(self.classifier, images, targets, (name, values), progress=False)
            self.add(name, "as it is", maps, self.passes.count / few)
            self.write()


def main() -> None:
    """Score every map in every way, and write rows as they come."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--network", required=True, choices=networks.NAMES)
    words.add_argument("--data", type=Path, required=True, help="archives, splits and boxes")
    words.add_argument("--weights", type=Path, required=True)
    words.add_argument("--adapters", type=Path, help="FOLDER/NETWORK is an adapter, if it is there")
    words.add_argument("--maps", default=",".join(MAPS))
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--calls", default="12", help="of maps as they are; exact for all")
    words.add_argument("--few", type=int, default=200, help="photographs of the costly methods")
    words.add_argument("--limit", type=int, help="photographs of each part, to try it out")
    words.add_argument("--seconds", type=float, default=220, help="no map starts later")
    words.add_argument("--out", type=Path, required=True)
    asked = words.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    first, *others = asked.maps.split(",")
    methods: dict[str, Any] = {first: first}
    adapter = asked.adapters and asked.adapters / asked.network
    if adapter and adapter.is_dir():
        trained = Lax.from_pretrained(adapter)
        trained.fingerprint = None  # it was trained on these weights, before they were folded
        methods["trained"] = trained
    methods |= {name: name for name in others}
    run = Run(asked)
    run.everything()
    # What says least comes last, in case the time is up.
    last = [name for name in methods if name == "random"]
    run.ways_of_all({name: one for name, one in methods.items() if name not in last})
    run.at_equal_cost()
    run.ways_of_all({name: methods[name] for name in last})
    run.say("done")


if __name__ == "__main__":
    main()
