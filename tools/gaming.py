"""What MSI can be made to say: methods and searched boxes, scored on a model and on its twin.

    python tools/gaming.py digits --out gaming                      # CPU, minutes
    python tools/gaming.py cifar10 --data FOLDER --out gaming       # GPU, two minutes

FOLDER holds cifar10-train-jpeg.npz and cifar10-test-jpeg.npz (JPEGs in a row: data, offsets,
labels), or CIFAR-10 as `sufficit reproduce` reads it. gaming.json is written after every row, so
that a run that is cut off leaves what it has; gaming.md and gaming.png come last. The same command
resumes the training, which is kept in --work.
"""

import argparse
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import save as safetensors
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sufficit import Classifier, Lax, evaluate, explain, leak, plots
from sufficit.data.digits import synthetic_digits
from sufficit.data.splits import evenly
from sufficit.files import make_folder, read_json, writing
from sufficit.provenance import provenance, save_json
from sufficit.reproduce.pipeline import TablePipeline
from sufficit.reproduce.table_plan import plan_for
from sufficit.training import train_twin
from sufficit.training.classifier_training import accuracy, augmented_loader

SEARCHES = {  # name -> fills, score; blur is never searched with
    "search: black, accuracy": ("black", "accuracy"),
    "search: black, confidence": ("black", "confidence"),
    "search: black+mean+noise, confidence": ("black+mean+noise", "confidence"),
}
METHODS = ("gradcam", "kpca-cam", "finer-cam", "center", "random")
HELD_OUT, SHOWN = "blur", 6
HEADINGS = {
    "model_black": "model, black", f"model_{HELD_OUT}": f"model, {HELD_OUT} (held out)",
    "twin_black": "twin, black", f"twin_{HELD_OUT}": f"twin, {HELD_OUT}",
    "mask_penalty": "area", "leak_ratio": "leak ratio", "calls": "calls per image", "n": "images",
}  # fmt: skip


class Subject:
    """A model, its twin, its adapter, and the images that are scored."""

    model: Classifier
    twin: Classifier
    lax: Lax
    images: Tensor
    labels: Tensor
    alpha_min: float
    facts: dict[str, Any]


def digits(options: argparse.Namespace) -> Subject:
    """The net and the adapter that ship, and a twin that is trained here."""
    found = Subject()
    found.model, found.lax = (
        Classifier.load("sufficit:digits"),
        Lax.from_pretrained("sufficit:digits"),
    )
    shown = synthetic_digits(options.train_images, seed=1, held_out=False)
    loader = DataLoader(TensorDataset(shown.images, shown.labels), 32, shuffle=True)
    test, held = (synthetic_digits(n, seed=s) for n, s in ((options.images, 2), (128, 3)))
    found.twin = train_twin(
        found.model, loader, epochs=options.twin_epochs, validation=[(held.images, held.labels)],
        out=options.work / "twin",
    )  # fmt: skip
    found.images, found.labels, found.alpha_min = test.images, test.labels, 0.5
    right = [
        (one(test.images).argmax(1) == test.labels).float().mean().item()
        for one in (found.model, found.twin)
    ]
    known = read_json(options.work / "twin" / "run.json")
    known = {name: known[name] for name in ("original", "twin", "best_epoch", "config")}
    found.facts = {
        "data": "synthetic digits",
        "model": "sufficit:digits",
        "test_accuracy": right,
        "twin": known,
    }
    return found


def cifar10(options: argparse.Namespace) -> Subject:
    """A ResNet18 and a robust adapter by the code of `sufficit reproduce`, and a twin."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = {
        "model": options.model, "weights": "none", "epochs": options.epochs,
        "lax_epochs": options.lax_epochs, "lax_batch": 512, "recipes": ("robust",), "seeds": 1,
        "train_images": options.train_images,
        "test_images": options.test_images, "images": options.images,
    }  # fmt: skip
    plan = plan_for(
        options.work / "table", "cifar10", asked, quick=False, cuda=device.type == "cuda"
    )
    root = unpacked(options.data, options.work / "data")
    table = TablePipeline(plan, options.work / "table", root, device, progress=False)
    table.train_classifier()
    table.train_adapters()
    found = Subject()
    found.model, train, held = table.classifier, *table.parts
    found.lax = Lax.from_pretrained(options.work / "table" / "adapters" / "lax-robust-0")
    started = time.monotonic()
    found.twin = train_twin(
        found.model, augmented_loader(train, min(512, len(train))), epochs=options.twin_epochs,
        validation=[held.part(slice(None))], fabric=table.fabric, out=options.work / "twin",
        progress=False,
    )  # fmt: skip
    print(f"twin: {time.monotonic() - started:.1f} s", flush=True)
    test = table.sets.test
    rows = evenly(test.labels, options.images, 0).to(test.labels.device)
    found.images, found.labels = test.part(rows)
    found.alpha_min = plan.paper.alpha_min
    right = [accuracy(one, test) for one in (found.model, found.twin)]
    known = read_json(options.work / "twin" / "run.json")
    known = {name: known[name] for name in ("original", "twin", "best_epoch", "config")}
    found.facts = {
        "data": table.sets.source,
        "model": plan.model,
        "test_accuracy": right,
        "twin": known,
    }
    return found


def unpacked(data: Path, folder: Path) -> Path:
    """A folder that `sufficit reproduce` reads: this one, or binaries made from the JPEGs."""
    if not (data / "cifar10-train-jpeg.npz").exists():
        return data
    where, started = make_folder(folder / "cifar-10-batches-bin"), time.monotonic()

    def pixels(content: bytes) -> bytes:
        with Image.open(io.BytesIO(content)) as image:
            return np.array(image.convert("RGB")).transpose(2, 0, 1).tobytes()

    for part, files in (("train", 5), ("test", 1)):
        packed = np.load(data / f"cifar10-{part}-jpeg.npz")
        whole, ends, labels = packed["data"].tobytes(), packed["offsets"], packed["labels"]
        with ThreadPoolExecutor(16) as pool:
            images = list(pool.map(pixels, (whole[a:b] for a, b in pairwise(ends))))
        records = [bytes([y]) + image for y, image in zip(labels.tolist(), images, strict=True)]
        size = -(-len(records) // files)
        for k in range(files):
            name = "test_batch.bin" if part == "test" else f"data_batch_{k + 1}.bin"
            (where / name).write_bytes(b"".join(records[k * size : (k + 1) * size]))
    print(f"data: {time.monotonic() - started:.1f} s", flush=True)
    return folder


def scored(subject: Subject, heatmaps: Tensor, step: float) -> dict[str, float]:
    """MSI on model and twin with black and with the held-out fill; area and leakage."""
    n = len(heatmaps)
    images, labels = subject.images[:n], subject.labels[:n]
    row: dict[str, float] = {}
    options: Any = {"alpha_min": subject.alpha_min, "value_step": step, "progress": False}
    for who, model in (("model", subject.model), ("twin", subject.twin)):
        for fill in ("black", HELD_OUT):
            columns = ("msi", "mask_penalty")
            scores = evaluate(
                model, images, heatmaps, labels, fill=fill, columns=columns, **options
            )
            estimate = scores.summary()["msi"]
            row |= {f"{who}_{fill}": estimate.mean, "mask_penalty": scores.mean()["mask_penalty"]}
            row[f"{who}_{fill}_half"] = (estimate.high - estimate.low) / 2
    found = leak(
        subject.model, images, heatmaps, labels, alpha_min=subject.alpha_min, progress=False
    )
    return row | {"leak_ratio": found.ratio, "n": n}


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("subject", choices=("digits", "cifar10"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="for data and weights; default: work in --out")
    parser.add_argument("--images", type=int, default=32, help="that are scored")
    parser.add_argument("--calls", type=int, default=500, help="per image and fill, of a search")
    parser.add_argument("--step", type=float, default=0.05, help="of the curves")
    parser.add_argument("--model", default="resnet18", help="small-net to try the script (cifar10)")
    parser.add_argument("--epochs", type=int, default=12, help="of the classifier (cifar10)")
    parser.add_argument("--lax-epochs", type=int, default=4)
    parser.add_argument("--twin-epochs", type=int, default=5)
    parser.add_argument("--train-images", type=int)
    parser.add_argument("--test-images", type=int)
    parser.add_argument("--seconds", type=float, help="searches take fewer images to end in time")
    options = parser.parse_args()
    options.out = make_folder(options.out)
    options.work = make_folder(options.work or options.out / "work")
    if options.subject == "digits":
        options.train_images = options.train_images or 768
    return options


def main() -> None:
    """Train, score row by row, draw."""
    started, options = time.monotonic(), arguments()
    subject = (digits if options.subject == "digits" else cifar10)(options)
    rows: dict[str, dict[str, Any]] = {}
    kept: dict[str, Tensor] = {}
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    facts = provenance(asked, subject.model.device, subject.model.dtype) | subject.facts
    facts |= {"alpha_min": subject.alpha_min}

    def add(name: str, draw: Callable[[Tensor, Tensor], Tensor], n: int, calls: int) -> float:
        begin = time.monotonic()
        heatmaps = draw(subject.images[:n], subject.labels[:n])
        took = time.monotonic() - begin
        rows[name] = scored(subject, heatmaps, options.step) | {"calls": calls}
        rows[name] |= {"seconds_to_draw": took, "seconds": time.monotonic() - begin}
        kept[name] = heatmaps[:SHOWN].cpu()
        shown = {"images": subject.images[:SHOWN].cpu().contiguous(), **kept}
        with writing(options.out / "shown.safetensors") as path:
            path.write_bytes(safetensors({k: v.contiguous() for k, v in shown.items()}))
        save_json(
            options.out / "gaming.json",
            facts | {"rows": rows, "seconds": time.monotonic() - started},
        )
        print(f"{time.monotonic() - started:6.1f} s  {name}: {rows[name]}", flush=True)
        return took

    for method in METHODS[:3]:
        add(
            method,
            lambda x, y, m=method: explain(subject.model, x, y, m, progress=False),
            len(subject.images),
            1,
        )
    add(
        "LAX robust",
        lambda x, y: explain(subject.model, x, y, subject.lax, progress=False),
        len(subject.images),
        1,
    )
    for method in METHODS[3:]:
        add(
            method,
            lambda x, y, m=method: explain(subject.model, x, y, m, progress=False),
            len(subject.images),
            0,
        )
    rate = None  # seconds per call
    for name, (fills, score) in SEARCHES.items():
        calls, n = options.calls * len(fills.split("+")), len(subject.images)
        if rate is not None and options.seconds is not None:
            left = options.seconds - (time.monotonic() - started) - 10  # for scores and the picture
            later = sum(len(f.split("+")) for k, (f, _) in SEARCHES.items() if k not in rows)
            n = max(16, min(n, int(left / later / (rate * options.calls))))
        word = f"region-search:calls={calls}:fills={fills}:score={score}"
        took = add(
            name, lambda x, y, w=word: explain(subject.model, x, y, w, progress=False), n, calls
        )
        rate = took / (calls * n)
    text = table_of(rows)
    with writing(options.out / "gaming.md") as path:
        path.write_text(text)
    print(text)
    plots.save(picture(subject, kept, rows), options.out / "gaming.png")


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as a table in markdown."""
    lines = [f"| maps | {' | '.join(HEADINGS.values())} |", f"|---|{'---:|' * len(HEADINGS)}"]
    for name, row in rows.items():
        cells = [
            f"{row[k]}" if k in ("calls", "n") else f"{row[k]:.2f}" if k == "leak_ratio"
            else f"{row[k]:.3f}" + (f" ± {row[f'{k}_half']:.2f}" if f"{k}_half" in row else "")
            for k in HEADINGS
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture(subject: Subject, kept: dict[str, Tensor], rows: dict[str, dict[str, Any]]) -> Figure:
    """A row per image: the image, and what the mask of each method keeps of it."""
    names = ["gradcam", "LAX robust", *(name for name in SEARCHES if name in kept)]
    shown = min(SHOWN, len(subject.images))
    figure = Figure(figsize=(1.5 * (len(names) + 1), 1.35 * shown + 0.9))
    axes = figure.subplots(shown, len(names) + 1, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i in range(shown):
        image = subject.images[i].cpu().permute(1, 2, 0)
        axes[i][0].imshow(image.numpy())
        for k, name in enumerate(names, 1):
            inside = (kept[name][i] > subject.alpha_min)[:, :, None]
            axes[i][k].imshow(torch.where(inside, image, torch.full_like(image, 0.25)).numpy())
    axes[0][0].set_title("image", fontsize=8)
    for k, name in enumerate(names, 1):
        row = rows[name]
        scores = f"MSI {row['model_black']:.2f}, {HELD_OUT} {row[f'model_{HELD_OUT}']:.2f}"
        title = name.replace(": ", ":\n")
        axes[0][k].set_title(f"{title}\n{scores}", fontsize=7)
    figure.tight_layout(pad=0.4)
    return figure


if __name__ == "__main__":
    main()
