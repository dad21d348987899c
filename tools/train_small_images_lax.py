r"""Train adapters on the paper's data sets and compare them on validation images.

    export PYTHONPATH=src:paper
    python tools/train_small_images_lax.py pack --data ROOT --weights ROOT --out PACKED
    python tools/train_small_images_lax.py train cifar10 --packed PACKED --out FOLDER --arms crisp

`pack` makes one small file per data set, of training images alone, and stores the weights that
networks start from. `train` trains the classifier of a table, or reads the one in OUT, then every
arm. It holds out images to validate on, and no test image is read. Run it again to resume: rows
are in OUT/TABLE.json, classifiers in OUT/TABLE-classifier-*.safetensors, in half precision.
"""

import argparse
import copy
import io
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import functional as transforms

from classifier_training import Training, accuracy, train_classifier
from image_sets import Batches, ImageSet, Wanted, as_seen, cub200, held_out
from networks import build, fill_in
from sufficit import Classifier, Lax, evaluate, explain, train_lax
from sufficit.data.digits import compose_all
from sufficit.explainers.explanation import draw_all
from sufficit.training import RECIPES, LaxRecipe, OrderRecipe
from sufficit.training.level_sets import LevelSets, level_sets
from sufficit.training.processes import fabric_for
from tables import TABLES

SHARD = 15 * 2**20  # bytes of a file of weights, at most
DIGITS = 20_000


@dataclass(frozen=True)
class Setting:
    """What is trained on a data set."""

    table: str
    network: str
    side: int
    epochs: int  # of the classifier
    images: int | None  # of those to train the classifier on; None: all
    weights: str = ""  # file that the network starts from
    held_out: int = 1000
    batch: int = 192


SETTINGS = {
    "synthetic-mnist": Setting("synthetic-mnist", "small-resnet18", 64, 4, None),
    "cifar10": Setting("cifar10", "small-resnet18", 32, 14, None),
    "cifar10-deit": Setting(
        "cifar10-vit", "deit-tiny", 224, 2, 15_000, "deit-tiny.safetensors", held_out=500
    ),
    "cub200": Setting("cub200", "resnet50-v1", 224, 24, None, "resnet50-v1.safetensors", 150, 96),
}


def pack(data: Path, weights: Path, out: Path) -> None:
    """Write the training images and the weights to start from."""
    out.mkdir(parents=True, exist_ok=True)
    digits = datasets.MNIST(str(data), train=True)
    np.savez_compressed(
        out / "mnist.npz", strokes=digits.data[:DIGITS].numpy(), labels=digits.targets[:DIGITS]
    )
    known = datasets.ImageFolder(data / "cifar10" / "train")
    blobs = [Path(path).read_bytes() for path, _ in known.samples]
    if not known.samples[0][0].endswith("jpg"):  # as JPEG of the highest quality
        blobs = [_jpeg(Image.open(io.BytesIO(blob)), 95) for blob in blobs]
    _save_blobs(out / "cifar10.npz", blobs, known.targets)
    birds = cub200(Wanted(data, 224)).train
    blobs = [_jpeg(transforms.to_pil_image(pixels), 88) for pixels in birds.pixels]
    _save_blobs(out / "cub200.npz", blobs, birds.labels.tolist())
    for name, file in (
        ("deit-tiny", "deit_tiny_imagenet.safetensors"),
        ("resnet50-v1", "resnet50_v1_imagenet.safetensors"),
    ):
        state = load_file(weights / file)
        save_file(
            rounded(state) if name == "resnet50-v1" else halved(state), out / f"{name}.safetensors"
        )


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=quality, subsampling=0)
    return file.getvalue()


def _save_blobs(path: Path, blobs: list[bytes], labels: list[int]) -> None:
    offsets = np.cumsum([0, *(len(blob) for blob in blobs)])
    data = np.frombuffer(b"".join(blobs), dtype=np.uint8)
    np.savez_compressed(path, data=data, offsets=offsets, labels=np.array(labels))


def halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with matrices and kernels in float16."""
    return {
        name: (value.half() if value.ndim > 1 else value).contiguous()
        for name, value in state.items()
    }


def rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with kernels as bytes, a scale per channel: enough to start a training from."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.ndim == 4 and not name.startswith("fc."):
            scale = value.float().flatten(1).abs().amax(1).clamp(min=1e-12) / 127
            found[name] = (value.float() / scale[:, None, None, None]).round().to(torch.int8)
            found[f"{name}/scale"] = scale
        elif not name.startswith("fc."):
            found[name] = value.contiguous()
    return found


def unrounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that `rounded` or `halved` wrote, in float32."""
    return {
        name: value.float() * state[f"{name}/scale"][:, None, None, None]
        if f"{name}/scale" in state
        else value.float()
        for name, value in state.items()
        if not name.endswith("/scale")
    }


def read(setting: Setting, packed: Path, device: torch.device) -> ImageSet:
    """The training images of a data set."""
    data = TABLES[setting.table].data
    if data == "synthetic-mnist":
        with np.load(packed / "mnist.npz") as file:
            strokes = torch.from_numpy(file["strokes"]).float().to(device) / 255
            labels = torch.from_numpy(file["labels"]).to(device)
        return ImageSet(*compose_all(strokes, labels, len(labels), (0, "train")))
    with np.load(packed / f"{data}.npz") as file:
        offsets, labels, whole = file["offsets"], file["labels"], file["data"].tobytes()
    blobs = [whole[start:end] for start, end in pairwise(offsets)]

    def decode(blob: bytes) -> Tensor:
        with Image.open(io.BytesIO(blob)) as image:
            return transforms.pil_to_tensor(image.convert("RGB"))

    with ThreadPoolExecutor(8) as pool:
        pixels = torch.stack(list(pool.map(decode, blobs)))
    return ImageSet(pixels, torch.from_numpy(labels).long()).to(device)


def trained_classifier(
    name: str, setting: Setting, train: ImageSet, validation: ImageSet, packed: Path, out: Path
) -> tuple[Classifier, dict[str, Any]]:
    """The classifier of a data set, trained or read."""
    device = train.labels.device
    classes = tuple(str(k) for k in range(int(train.labels.max()) + 1))
    classifier = build(setting.network, classes, setting.side).to(device)
    facts_file = out / f"{name}-classifier.json"
    if facts_file.exists():
        state: dict[str, Tensor] = {}
        for path in sorted(out.glob(f"{name}-classifier-*.safetensors")):
            state |= load_file(path)
        classifier.model.load_state_dict(unrounded(state))
        classifier.model.eval()
        return classifier, json.loads(facts_file.read_text())
    begun, recipe = time.monotonic(), TABLES[setting.table].training
    if setting.weights:
        start = packed / f"{name}-start.safetensors"
        save_file(unrounded(load_file(packed / setting.weights)), start)
        fill_in(classifier.model, setting.network, str(start))
        start.unlink()
    else:
        fill_in(classifier.model, setting.network, "none")
    if device.type == "cuda":
        classifier.to(memory_format=torch.channels_last)
    some = train
    if setting.images is not None:
        rows = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        some = train.only(rows[: setting.images].to(device))
    size = min(recipe.batch_size, len(some))
    lr = (recipe.fine_lr if setting.weights else recipe.lr) * size / recipe.batch_size
    batches = Batches(some, setting.side, size, recipe.augment)
    checkpoint = out / f"{name}-checkpoint.pt"
    train_classifier(classifier, batches, Training(recipe, setting.epochs, lr, 0), checkpoint)
    checkpoint.unlink()
    facts = {
        "accuracy": accuracy(classifier, validation, setting.side),
        "seconds": time.monotonic() - begun,
        "epochs": setting.epochs,
        "images": len(some),
    }
    save_shards(halved(classifier.model.state_dict()), out, f"{name}-classifier")
    facts_file.write_text(json.dumps(facts, indent=1) + "\n")
    # As it will be read, so that a resumed run has the same classifier.
    return trained_classifier(name, setting, train, validation, packed, out)


def save_shards(state: dict[str, Tensor], out: Path, stem: str) -> None:
    """Write weights to files of at most SHARD bytes."""
    shard: dict[str, Tensor] = {}
    number = size = 0
    for name, value in state.items():
        length = value.numel() * value.element_size()
        if shard and size + length > SHARD:
            save_file(shard, out / f"{stem}-{number}.safetensors")
            shard, size, number = {}, 0, number + 1
        shard[name] = value.cpu().contiguous()
        size += length
    save_file(shard, out / f"{stem}-{number}.safetensors")


def order(**changes: Any) -> OrderRecipe:
    """The default recipe with changes."""
    recipe = RECIPES["robust"]
    assert isinstance(recipe, OrderRecipe)
    return replace(recipe, **changes)


def crisp(**changes: Any) -> LaxRecipe:
    """The recipe crisp with changes."""
    recipe = RECIPES["crisp"]
    assert isinstance(recipe, LaxRecipe)
    return replace(recipe, **changes)


ARMS: dict[str, Callable[[], LaxRecipe | OrderRecipe]] = {
    "robust": order,
    "robust-100": lambda: order(steps=100),
    "robust-1600": lambda: order(steps=1600),
    "rest-1": lambda: order(rest=1.0),
    "no-crops": lambda: order(crops=0.0),
    "hard": lambda: order(softness=(0.5, 0.03)),
    "power-1": lambda: order(power=1.0),
    "fine": lambda: order(cells=56),
    "crisp": crisp,
    "crisp-no-donors": lambda: crisp(donors=0.0),
    "crisp-no-mosaics": lambda: crisp(mosaics=0.0),
    "crisp-no-masked-out": lambda: crisp(drop=0.0),
    "crisp-not-pushed": lambda: crisp(decide=0.0),
    "crisp-class-free": lambda: crisp(absent=0.0),
}
FILLS = ("black", "blur")


def scored(
    classifier: Classifier, method: Lax | str, images: Tensor, targets: Tensor, alpha_min: float
) -> dict[str, Any]:
    """MSI, its parts and leakage of the map as it is, and what its level sets are worth."""
    maps = draw_all(classifier, images, targets, {"m": method}, progress=False)["m"].maps
    sets = {f: level_sets(classifier, images, targets, maps, fill=f) for f in FILLS}
    found: dict[str, Any] = {f"order {f}": worth(one) for f, one in sets.items()}
    heatmaps = explain(classifier, images, targets, method)
    scores = evaluate(
        classifier,
        images,
        heatmaps,
        targets,
        alpha_min=alpha_min,
        columns=("base_score", "mask_penalty", "msi"),
        held_out_fill="blur",
        value_step=0.05,
        leak_donors=16,
        progress=False,
    )
    found |= {name: value for name, value in scores.mean().items() if not math.isnan(value)}
    ratio = scores.summary().get("leak_ratio")
    return found | ({} if ratio is None else {"leak_ratio": [ratio.mean, ratio.low, ratio.high]})


def worth(sets: LevelSets) -> dict[str, float]:
    """Insertion, MSI at the best common size and at the best size per image."""
    return {
        "insertion": float(sets.insertion.mean()),
        "common": float(sets.at_best.mean()),
        "size": sets.size,
        "hindsight": float(sets.msi.amax(1).mean()),
        "everything": float(sets.everything.mean()),
    }


def train(name: str, packed: Path, out: Path, arms: list[str], seeds: int, options: Any) -> None:
    """Train the classifier and every arm; write a row for each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    setting = SETTINGS[name]
    if options.epochs:
        setting = replace(setting, epochs=options.epochs)
    out.mkdir(parents=True, exist_ok=True)
    whole = read(setting, packed, torch.device("cpu"))
    if options.limit:
        whole = whole.only(torch.arange(0, len(whole), len(whole) // options.limit))
    held = min(setting.held_out, len(whole) // 4)
    learn, validation = (part.to(device) for part in held_out(whole, held, 0))
    classifier, facts = trained_classifier(name, setting, learn, validation, packed, out)
    print(name, json.dumps(facts), flush=True)
    path = out / f"{name}.json"
    rows = json.loads(path.read_text()) if path.exists() else {"classifier": facts}
    images = as_seen(validation.pixels, setting.side)
    targets = validation.labels.cpu()
    alpha = TABLES[setting.table].alpha_min
    fast = classifier
    if device.type == "cuda":  # scored in bfloat16, as the tables are
        fast = classifier.over(copy.deepcopy(classifier.model)).to(dtype=torch.bfloat16)
    if "gradcam" not in rows:
        rows["gradcam"] = scored(fast, "gradcam", images, targets, alpha)
        print(name, "gradcam", json.dumps(rows["gradcam"]), flush=True)
    for arm in arms:
        for seed in range(seeds):
            key = f"{arm}-{seed}"
            if key in rows:
                continue
            recipe = ARMS[arm]()
            own = TABLES[setting.table].adapter
            batches = Batches(
                learn, setting.side, min(setting.batch, len(learn)), own.augment, own.images
            )
            epochs = None
            if isinstance(recipe, LaxRecipe):
                epochs = max(2, round(options.crisp_steps / len(batches)))
            if options.steps and isinstance(recipe, OrderRecipe):
                recipe = replace(recipe, steps=options.steps)
            begun = time.monotonic()
            lax = train_lax(
                classifier,
                batches,
                recipe=recipe,
                epochs=epochs,
                alpha_min=alpha,
                seed=seed,
                validation=[(images, validation.labels)],
                validation_images=min(len(images), 300),
                patience=None if isinstance(recipe, LaxRecipe) else "auto",
                fabric=fabric_for(device, precision="bf16" if device.type == "cuda" else "fp32"),
                progress=False,
            )
            seconds = time.monotonic() - begun
            rows[key] = {
                "seconds": seconds,
                "kept": lax.size,
                **scored(fast, lax, images, targets, alpha),
            }
            lax.save_pretrained(out / "adapters" / f"{name}-{key}", half=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")
            print(name, key, json.dumps(rows[key]), flush=True)


def main() -> None:
    """Pack, or train."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("pack")
    one.add_argument("--data", type=Path, required=True)
    one.add_argument("--weights", type=Path, required=True)
    one.add_argument("--out", type=Path, required=True)
    one = commands.add_parser("train")
    one.add_argument("name", choices=SETTINGS)
    one.add_argument("--packed", type=Path, required=True)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--arms", default="robust,crisp")
    one.add_argument("--seeds", type=int, default=1)
    one.add_argument("--epochs", type=int, help="of the classifier")
    one.add_argument("--steps", type=int, help="of the order")
    one.add_argument("--crisp-steps", type=int, default=2500)
    one.add_argument("--limit", type=int, help="images, to try it out")
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.data, given.weights, given.out)
    else:
        train(given.name, given.packed, given.out, given.arms.split(","), given.seeds, given)


if __name__ == "__main__":
    main()
