"""Train an adapter for an ImageNet network on photographs at hand; score it on others.

    python tools/imagenet_adapters.py resnet50-v1 resnet50_v1_imagenet.safetensors \
        --train photos/birds photos/animals --test elsewhere --out runs/ready --device cuda
    python tools/imagenet_adapters.py mobilenet-v2 mobilenet_v2_imagenet.safetensors \
        --train photos/birds --test elsewhere --out runs/ready --steps 20 --images 16   # on a CPU

The recipe is `robust` and the targets are the network's own predictions: nothing needs labels. A
tenth of the training photographs is held out and selects the epoch. The photographs of --test come
from other sources; each folder is scored on its own, next to Grad-CAM and the controls. The adapter
draws for the prediction only, because the evidence of 1,000 classes does not fit into 3 MB;
--with-classes draws for any class. OUT/NAME-SEED gets the adapter, OUT/NAME-SEED.json the scores
and OUT/NAME-SEED-FOLDER.png the maps.
"""

import argparse
import math
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision import models

from sufficit import Classifier, View, evaluate, explain, plots, train_lax
from sufficit.classifier.architectures import IMAGENET_MEAN, IMAGENET_STD, MODELS, build, fill_in
from sufficit.classifier.checkpoint import read_state
from sufficit.data.images import list_images
from sufficit.data.splits import evenly
from sufficit.errors import EmptyHeatmapWarning
from sufficit.explainers import Method
from sufficit.explainers.lax import WEIGHTS, Lax
from sufficit.files import make_folder
from sufficit.metrics.artefacts import ARTEFACTS
from sufficit.metrics.compare_scores import compare_scores
from sufficit.metrics.scores import Scores
from sufficit.provenance import provenance, save_json
from sufficit.training.feed import Shuffled
from sufficit.training.processes import fabric_for
from sufficit.training.validation import CONTROLS, HELD_OUT_FILL, ValidationSet, trust

SIDE, STORED = 224, 256  # pixels
SMALLEST, STRETCH = 0.25, 4 / 3  # of a random crop: share of the image, most width over height
MOST = 3.0  # MB of an adapter that may ship
SHEET = 24  # photographs on a sheet
NAMES = models.ResNet50_Weights.DEFAULT.meta["categories"]


@dataclass(frozen=True)
class Photographs:
    """Photographs of a folder."""

    names: list[str]
    images: Tensor  # [N,3,H,W] bytes


def network(name: str, file: Path, device: str) -> Classifier:
    """A network with the weights of 1,000 classes in a file."""
    if name in MODELS:
        model = build(name, len(NAMES), SIDE)
        assert not fill_in(model, name, file, SIDE), "some layers have random weights"
    else:
        model = models.get_model(name.replace("-", "_"))
        found = model.load_state_dict(read_state(file), strict=False)
        assert all(key.endswith("num_batches_tracked") for key in found.missing_keys)
    layer = MODELS[name].layer if name in MODELS else None
    seen = View((SIDE, SIDE), STORED)
    given: Any = (model.eval(), layer, IMAGENET_MEAN, IMAGENET_STD)
    layout = torch.channels_last if device.startswith("cuda") else None
    return Classifier(*given, classes=NAMES, view=seen).to(device, memory_format=layout)


def photographs(folder: Path, view: View, most: int | None) -> Photographs:
    """The photographs below a folder, or some of them, as a view shows them."""
    found = list(list_images(folder))
    some = found[:: max(1, len(found) // most)][:most] if most else found
    bytes_ = [(image.read(view) * 255).round().to(torch.uint8) for image in some]
    return Photographs([image.name for image in some], torch.stack(bytes_))


def cropped(images: Tensor, side: int) -> Tensor:
    """Random parts of images, half of them mirrored: [N,3,h,w] bytes -> [N,3,side,side] in 0..1."""
    n, here = len(images), images.device
    chance = torch.rand(5, n, device=here)
    area = SMALLEST + (1 - SMALLEST) * chance[0]
    shape = STRETCH ** (2 * chance[1] - 1)  # width over height
    wide, high = ((area * ratio).sqrt().clamp(max=1) for ratio in (shape, 1 / shape))
    theta = torch.zeros(n, 2, 3, device=here)
    theta[:, 0, 0] = torch.where(chance[2] < 0.5, -wide, wide)
    theta[:, 1, 1] = high
    theta[:, 0, 2] = (1 - wide) * (2 * chance[3] - 1)
    theta[:, 1, 2] = (1 - high) * (2 * chance[4] - 1)
    grid = F.affine_grid(theta, [n, 3, side, side], align_corners=False)
    return F.grid_sample(images / 255, grid, padding_mode="border", align_corners=False)


def loader_of(images: Tensor, device: str, batch: int, steps: int) -> Shuffled:
    """A loader of so many batches of random crops: each photograph comes up several times."""
    kept, n = images.to(device), len(images)
    take = lambda rows: cropped(kept[rows % n], SIDE)  # noqa: E731
    rows = math.ceil(steps * batch / n) * n
    return Shuffled(take, rows, torch.device(device), batch, limit=steps * batch)


def score(
    classifier: Classifier, images: Tensor, targets: Tensor, method: Method, alpha_min: float
) -> tuple[Scores, Tensor]:
    """Every column of a method on photographs, and its maps."""
    maps = explain(classifier, images, targets, method, progress=False)
    columns = ("base_score", "mask_penalty", "msi", *ARTEFACTS)
    options: Any = {"value_step": 0.02, "leak_donors": 64, "held_out_fill": HELD_OUT_FILL}
    options |= {"columns": columns, "alpha_min": alpha_min, "progress": False}
    return evaluate(classifier, images, maps, targets, **options), maps.cpu()


def judged(classifier: Classifier, lax: Lax, shown: Photographs, sheet: Path) -> dict[str, Any]:
    """The adapter next to Grad-CAM and the controls on photographs, and a sheet of maps."""
    alpha_min = lax.trained["recipe"]["alpha_min"]
    images = shown.images.to(classifier.device) / 255
    with torch.no_grad():
        said = torch.cat([classifier(part).float().softmax(1) for part in images.split(64)])
    sure, targets = said.max(1)
    methods: dict[str, Method] = {"lax": lax, "gradcam": "gradcam"}
    methods |= {name: name for name in CONTROLS}
    found = {
        name: score(classifier, images, targets, one, alpha_min) for name, one in methods.items()
    }
    scores = {name: one[0] for name, one in found.items()}
    maps = {name: found[name][1] for name in ("lax", "gradcam")}
    verdict = trust(scores, alpha_min)
    rows = [
        {"image": name, "prediction": NAMES[int(k)], "p": round(float(p), 3)}
        | {f"msi_{method}": round(float(one.msi[i]), 3) for method, one in scores.items()}
        for i, (name, k, p) in enumerate(zip(shown.names, targets, sure, strict=True))
    ]
    draw_sheet(images.cpu(), rows, maps, sheet)
    return {
        "n": len(images),
        "summary": {
            name: {column: asdict(value) for column, value in one.summary().items()}
            for name, one in scores.items()
        },
        "lax_minus_gradcam": {
            column: difference(scores, column) for column in ("msi", "msi_held_out")
        },
        "trusted": verdict.trusted,
        "verdict": verdict.lines(),
        "images": rows,
    }


def difference(scores: dict[str, Scores], column: str) -> dict[str, float]:
    """The mean of LAX - Grad-CAM over the images, its 95 % interval and p."""
    pair = compare_scores(scores, column, controls=CONTROLS).pair("lax", "gradcam")
    assert pair is not None
    ends = (pair.low, pair.high) if pair.first == "lax" else (-pair.high, -pair.low)
    mean = pair.difference if pair.first == "lax" else -pair.difference
    return {"mean": mean, "low": ends[0], "high": ends[1], "p_corrected": pair.p_corrected}


def draw_sheet(
    images: Tensor, rows: list[dict[str, Any]], maps: dict[str, Tensor], file: Path
) -> None:
    """The maps of some photographs, spread over all."""
    some = torch.linspace(0, len(rows) - 1, min(SHEET, len(rows))).round().long()
    shown = [rows[i] for i in some]
    titles = [f"{row['image'][-28:]}\n{row['prediction']}, p {row['p']:.2f}" for row in shown]
    captions = {name: [f"MSI {row[f'msi_{name}']:+.2f}" for row in shown] for name in maps}
    drawn = {name: one[some] for name, one in maps.items()}
    plots.save(plots.sheet_figure(images[some], drawn, titles, captions), file, dpi=80)


def one(asked: argparse.Namespace, classifier: Classifier, seed: int) -> None:
    """Train and score the adapter of a seed."""
    read = [photographs(f, View((STORED, STORED)), asked.images) for f in asked.train]
    names = [f"{f.name}/{n}" for f, some in zip(asked.train, read, strict=True) for n in some.names]
    kinds = torch.tensor([k for k, some in enumerate(read) for _ in some.names])
    whole = torch.cat([some.images for some in read])
    away = torch.zeros(len(whole), dtype=torch.bool)
    away[evenly(kinds, max(4, min(128, len(whole) // 10)), seed)] = True
    edge = (STORED - SIDE) // 2
    middle = whole[away][:, :, edge : edge + SIDE, edge : edge + SIDE]
    held = Photographs([n for n, out in zip(names, away.tolist(), strict=True) if out], middle)
    loader = loader_of(
        whole[~away], asked.device, asked.batch, math.ceil(asked.steps / asked.epochs)
    )
    precision = "bf16" if asked.device.startswith("cuda") else "fp32"
    folder, start = make_folder(asked.out / f"{asked.name}-{seed}"), time.monotonic()
    lax = train_lax(
        classifier,
        loader,
        target="prediction",
        epochs=asked.epochs,
        seed=seed,
        validation=ValidationSet.of(classifier, held.images / 255, None),
        class_free=not asked.with_classes,
        patience=None,
        fabric=fabric_for(torch.device(asked.device), precision=precision),
        about={"images": len(whole) - len(held.names), "folders": [f.name for f in asked.train]},
    )
    seconds = time.monotonic() - start
    lax.save_pretrained(folder)
    megabytes = (folder / WEIGHTS).stat().st_size / 1e6
    sets = {"held_out": held}
    sets |= {f.name: photographs(f, View((SIDE, SIDE), STORED), asked.images) for f in asked.test}
    found = {}
    for name, shown in sets.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmptyHeatmapWarning)  # it scores as such
            sheet = asked.out / f"{asked.name}-{seed}-{name}.png"
            found[name] = judged(classifier, lax, shown, sheet)
        apart = {
            column: f"{one['mean']:+.3f} ({one['low']:+.3f} .. {one['high']:+.3f})"
            for column, one in found[name]["lax_minus_gradcam"].items()
        }
        title = f"{asked.name}, seed {seed}, {len(shown.names)} images of {name}; LAX - Grad-CAM:"
        print(title, apart, *found[name]["verdict"], sep="\n  ", flush=True)
    facts = provenance({"argv": sys.argv[1:]}, classifier.device, classifier.dtype)
    facts |= {"network": asked.name, "seed": seed, "steps": asked.steps, "batch": asked.batch}
    facts |= {"n_trained_on": len(whole) - len(held.names), "seconds_of_training": seconds}
    facts |= {"megabytes": megabytes, "small_enough": megabytes <= MOST, "layers": lax.layers}
    save_json(asked.out / f"{asked.name}-{seed}.json", facts | {"sets": found})
    print(f"{asked.name}, seed {seed}: {megabytes:.2f} MB, {seconds:.0f} s", flush=True)


def main() -> None:
    """Every seed of one network."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name", choices=("resnet50-v1", "deit-tiny", "mobilenet-v2"))
    options.add_argument("weights", type=Path)
    options.add_argument("--train", type=Path, nargs="+", required=True, help="folders")
    options.add_argument("--test", type=Path, nargs="+", required=True, help="folders")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--epochs", type=int, default=10, help="the best of these is kept")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--images", type=int, help="of each folder, at most")
    options.add_argument("--with-classes", action="store_true")
    options.add_argument("--device", default="cpu")
    asked = options.parse_args()
    classifier = network(asked.name, asked.weights, asked.device)
    for seed in asked.seeds:
        one(asked, classifier, seed)


if __name__ == "__main__":
    main()
