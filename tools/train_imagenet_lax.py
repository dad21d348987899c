r"""Train the package's own recipe on `learn`, calibrate it on `choose`, and score it there.

    PYTHONPATH=src:experiments/lax python tools/train_imagenet_lax.py --data ROOT --weights ROOT \\
        --network resnet50 --out FOLDER [--seed 0] [--report] [--cells 28] [--steps 400]

`--data` holds the archives of photographs, or, as unpacked, `train/` and `splits.csv`. `--report`
scores `report` too, which decides nothing. Rows go to OUT/NETWORK-SEED.json, the adapter to
OUT/NETWORK-SEED.
"""

import argparse
import csv
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from sufficit import Classifier, Lax, train_lax
from sufficit.data.batch import Batch
from sufficit.evaluation import batch_of
from sufficit.explainers.explanation import draw_all
from sufficit.perturbation.heatmaps import resize
from sufficit.sources import Fitted, Maps, SourceBase
from sufficit.training import RECIPES, OrderRecipe
from sufficit.training.level_sets import LevelSets, level_sets
from sufficit.training.processes import fabric_for

PARTS = ("learn", "choose", "report")
FILLS = ("black", "blur", "mean", "noise")


def read(root: Path, limit: int | None) -> dict[str, Tensor]:
    """The photographs of each part: uint8 [N,3,224,224]."""
    table = root / "splits.csv"
    if not table.exists():
        import photographs

        return {name: found.pixels for name, found in photographs.load(root, "cpu", limit).items()}
    with table.open() as file:
        rows = [(row["part"], row["image"]) for row in csv.DictReader(file)]
    found = {}
    for part in PARTS:
        names = sorted(name for own, name in rows if own == part)
        names = names[:: max(1, len(names) // limit)][:limit] if limit else names
        images = [Image.open(root / "train" / name).convert("RGB") for name in names]
        found[part] = torch.stack([pil_to_tensor(image) for image in images])
    return found


class Batches:
    """Batches of float images from bytes, in a new order each time."""

    def __init__(self, pixels: Tensor, size: int) -> None:
        self.pixels, self.size = pixels, size

    def __len__(self) -> int:
        return math.ceil(len(self.pixels) / self.size)

    def __iter__(self):
        for rows in torch.randperm(len(self.pixels)).split(self.size):
            yield self.pixels[rows].float() / 255


class Drawn(SourceBase):
    """Maps that were drawn before."""

    is_trusted = True
    name = "drawn"

    def __init__(self, maps: Tensor) -> None:
        self.drawn = maps

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Those of the batch."""
        return Maps(self.drawn[list(batch.numbers)].to(batch.images.device), final=False)

    def digest(self) -> str:
        """A word."""
        return "drawn"


def scored(classifier: Classifier, images: Tensor, method: object, size: float | None) -> dict:
    """Insertion, MSI at one size and the best size under each fill, and the fitted maps' MSI."""
    orders, targets = [], []
    for some in images.split(128):
        with torch.no_grad():
            goals = classifier(some).argmax(1)
        orders.append(draw_all(classifier, some, goals, {"m": method}, progress=False)["m"].maps)
        targets.append(goals)
    order, goals = torch.cat(orders), torch.cat(targets).cpu()
    sets = {fill: level_sets(classifier, images, goals, order, fill=fill) for fill in FILLS}
    black: LevelSets = sets["black"]
    place = black.best if size is None else black.number_of(size)
    rows: dict[str, object] = {"n": len(images), "size": black.size_of(place)}
    for fill, found in sets.items():
        rows[fill] = {
            "insertion": float(found.insertion.mean()),
            "common": float(found.msi[:, place].mean()),
            "everything": float(found.everything.mean()),
        }
    batch = batch_of(classifier, images, goals)
    fitted = Fitted(Drawn(order), name="fitted").maps(classifier, batch)
    large = resize(fitted.maps, batch.size)
    rows["fitted"] = {
        fill: float(msi_of(classifier, images, goals, large, fitted.shares, fill).mean())
        for fill in FILLS
    }
    return rows


def msi_of(
    classifier: Classifier, images: Tensor, goals: Tensor, order: Tensor, shares: Tensor, fill: str
) -> Tensor:
    """MSI of each image's order cut at its own share, the whole image included: [N]."""
    found = torch.zeros(len(images), dtype=torch.float64)
    for share in shares.unique().tolist():
        rows = (shares == share).nonzero()[:, 0]
        sets = level_sets(classifier, images[rows], goals[rows], order[rows].cpu(), fill=fill)
        whole = share >= 1
        found[rows] = sets.everything if whole else sets.msi[:, sets.number_of(share)]
    return found


def chosen_photographs(photos: dict[str, Tensor], args: argparse.Namespace) -> tuple[Tensor, str]:
    """Replace `learn` as the options say; return what calibrates the size, and a name for both."""
    choose, learned_from = photos["choose"], "ImageNet validation photographs (learn)"
    if args.learn is not None:
        from examine_imagenet_lax import photographs

        found = (photographs(args.learn, args.limit)[1] * 255).round().byte()
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
        choose, photos["learn"] = found[order[:250]], found[order[250:]]
        learned_from = f"photographs of {args.learn.name}"
    if args.photographs is not None:
        photos["learn"] = photos["learn"][: args.photographs]
        # Who has so few photographs has as many fewer to calibrate the size by.
        choose = choose[: max(50, args.photographs // 4)]
    return choose.float() / 255, learned_from


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--network", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--photographs", type=int, help="to learn from; all")
    parser.add_argument("--learn", type=Path, help="a folder of photographs to learn from instead")
    recipe = RECIPES["robust"]
    assert isinstance(recipe, OrderRecipe)
    for name in ("steps", "cells", "width"):
        parser.add_argument(f"--{name}", type=int, default=getattr(recipe, name))
    parser.add_argument("--block", default=recipe.block)
    return parser.parse_args()


def main() -> None:
    """Train, score, write."""
    args = options()
    recipe = RECIPES["robust"]
    assert isinstance(recipe, OrderRecipe)
    os.environ["LAX_WEIGHTS"] = str(args.weights)
    import classifiers  # reads the folder

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    classifier = classifiers.NAMES[args.network]().to(device)
    if device == "cuda":
        classifier.to(memory_format=torch.channels_last)
    precision = args.precision or ("bf16" if device == "cuda" else "fp32")
    photos = read(args.data, args.limit)
    choose, learned_from = chosen_photographs(photos, args)
    names = ("steps", "cells", "width", "block")
    recipe = replace(recipe, **{name: getattr(args, name) for name in names})
    name = f"{args.network}-{args.seed}"
    name += "" if args.photographs is None else f"-{args.photographs}"
    name += "" if args.learn is None else f"-{args.learn.name}"
    folder = args.out / name
    began = time.monotonic()
    lax = train_lax(
        classifier,
        Batches(photos["learn"].to(device), args.batch),
        recipe=recipe,
        target="prediction",
        seed=args.seed,
        validation=list(choose.split(128)),
        validation_images=len(choose),
        out=folder,
        about={"data": f"{len(photos['learn'])} {learned_from}"},
        fabric=fabric_for(torch.device(device), precision=precision),
        progress=True,
    )
    seconds = time.monotonic() - began
    history = lax.trained["history"]
    rows = {
        "network": args.network,
        "seed": args.seed,
        "seconds": seconds,
        "weights": sum(p.numel() for p in lax.parameters()),
        "size": lax.size,
        "predicts_size": lax.size_head is not None,
        "looks": [row for row in history if "size" in row],
    }
    if precision == "bf16":
        classifier.to(dtype=torch.bfloat16)
    methods: dict[str, Lax | str] = {"lax": lax, "gradcam": "gradcam"}
    parts = ("choose", "report") if args.report else ("choose",)
    chosen: dict[str, float] = {"lax": lax.size}
    for part in parts:
        images = (photos[part].float() / 255).to(device)
        for kind, method in methods.items():
            found = scored(classifier, images, method, chosen.get(kind))
            chosen.setdefault(kind, float(found["size"]))
            rows[f"{part}/{kind}"] = found
            print(part, kind, json.dumps(found), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"trained in {seconds:.0f} s, size {lax.size}, written to {folder}")


if __name__ == "__main__":
    main()
