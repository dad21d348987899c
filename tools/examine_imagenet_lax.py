r"""Examine trained adapters: two classes, photographs from elsewhere, cost, a sheet.

    PYTHONPATH=src:tools:experiments/lax python tools/examine_imagenet_lax.py WHAT \\
        --network resnet50 --adapter FOLDER --weights ROOT --out FILE \\
        [--photos FOLDER] [--data ROOT]

- pairs: photographs of two classes side by side (`choose`); is the peak of each class's map on its
  own half?
- elsewhere: `--photos` of another data set, with `masks/` beside them or not; the adapter's map at
  its own size against every CAM at the size that is best for it on these very photographs.
- cost: seconds of logits and heatmap over seconds of logits, in PyTorch and in onnxruntime.
- sheet: the first 24 of `--photos`, a column per method, written as a picture.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import center_crop, pil_to_tensor, resize
from train_imagenet_lax import read

from sufficit import Classifier, Lax, explain
from sufficit.explainers.explanation import draw_all
from sufficit.perturbation.heatmaps import resize as enlarged
from sufficit.statistics import compare_values
from sufficit.training.level_sets import level_sets

SIDE = 224
CAMS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
FILLS = ("black", "blur")
SHOWN = 24


def photographs(folder: Path, limit: int | None) -> tuple[list[Path], Tensor]:
    """The photographs below a folder, evenly spaced, at the networks' size: [N,3,224,224]."""
    root = folder / "images" if (folder / "images").is_dir() else folder
    paths = sorted(root.rglob("*.jpg"))
    paths = paths[:: max(1, len(paths) // limit)][:limit] if limit else paths
    pixels = [
        pil_to_tensor(center_crop(resize(Image.open(path).convert("RGB"), SIDE), SIDE))
        for path in paths
    ]
    return paths, torch.stack(pixels).float() / 255


def pairs(classifier: Classifier, lax: Lax, images: Tensor) -> dict[str, float]:
    """How often the peak of each class's map lies on its own half of a composed photograph."""
    device = classifier.device
    with torch.no_grad():
        said = torch.cat([classifier(some.to(device)).argmax(1).cpu() for some in images.split(64)])
    half = SIDE // 4
    found: dict[str, list[Tensor]] = {}
    partners = torch.arange(len(images)).roll(1)
    apart = said != said[partners]
    for rows in torch.arange(len(images))[apart].split(32):
        left, right = images[rows], images[partners[rows]]
        both = torch.cat([left[..., half:-half], right[..., half:-half]], 3).to(device)
        with torch.no_grad():
            top5 = classifier(both).topk(5, dim=1).indices.cpu()
        for name, goals, first in (
            ("left", said[rows], True),
            ("right", said[partners[rows]], False),
        ):
            known = (top5 == goals[:, None]).any(1)
            for method, one in (("lax", lax), ("gradcam", "gradcam")):
                drawn = draw_all(classifier, both, goals, {"m": one}, progress=False)["m"].maps
                order = enlarged(drawn.float().cpu(), (SIDE, SIDE))
                peak = order.flatten(1).argmax(1) % SIDE
                hit = (peak < SIDE // 2) if first else (peak >= SIDE // 2)
                found.setdefault(f"{method} {name}", []).append(hit)
                found.setdefault(f"{method} all", []).append(hit)
                found.setdefault(f"{method} where the model sees it", []).append(hit[known])
    return {name: float(torch.cat(parts).float().mean()) for name, parts in found.items()} | {
        "n": float(apart.sum())
    }


def elsewhere(classifier: Classifier, lax: Lax, folder: Path, limit: int | None) -> dict:
    """MSI of the adapter at its size, of CAMs at their best, of everything; pointing at masks."""
    paths, images = photographs(folder, limit)
    images = images.to(classifier.device)
    with torch.no_grad():
        goals = torch.cat([classifier(some).argmax(1).cpu() for some in images.split(64)])
    masks = None
    if (folder / "masks").is_dir():
        known = [folder / "masks" / f"{path.stem}.png" for path in paths]
        opened = [np.array(Image.open(one)) for one in known]
        masks = torch.stack([torch.from_numpy(one > 0) for one in opened])
    rows: dict = {"n": len(images)}
    values: dict[str, dict[str, np.ndarray]] = {fill: {} for fill in FILLS}
    for name in ("lax", *CAMS):
        method = lax if name == "lax" else name
        drawn = draw_all(classifier, images, goals, {"m": method}, progress=False)["m"]
        row: dict = {}
        for fill in FILLS:
            sets = level_sets(classifier, images, goals, drawn.maps, fill=fill)
            place = sets.best if drawn.shares is None else None
            if place is None:
                places = torch.tensor([sets.number_of(float(one)) for one in drawn.shares])
                scores = sets.msi.gather(1, places[:, None])[:, 0]
            else:
                scores = sets.msi[:, place]
            values[fill][name] = scores.numpy()
            values[fill]["everything"] = sets.everything.numpy()
            row[fill] = {"msi": float(scores.mean()), "insertion": float(sets.insertion.mean())}
        if masks is not None:
            order = enlarged(drawn.maps.float().cpu(), (SIDE, SIDE)).flatten(1)
            at = order.argmax(1, keepdim=True)
            row["pointing"] = float(masks.flatten(1).gather(1, at).float().mean())
            inside = order.topk(int(0.1 * SIDE * SIDE), dim=1).indices
            row["top 10 % on it"] = float(masks.flatten(1).gather(1, inside).float().mean())
        rows[name] = row
        print(name, json.dumps(row), flush=True)
    for fill in FILLS:
        standing = compare_values(values[fill], "MSI", controls=["everything"])
        rows[f"{fill} lax beats"] = [
            other for other in (*CAMS, "everything") if standing.beats("lax", other)
        ]
        rows[f"{fill} everything"] = float(values[fill]["everything"].mean())
    return rows


def cost(classifier: Classifier, lax: Lax, batches: tuple[int, ...]) -> dict[str, float]:
    """The ratio of logits and heatmap to logits, in turns, the median of eleven rounds."""
    found: dict[str, float] = {}
    kind = classifier.device.type
    for n in batches:
        images = torch.rand(n, 3, SIDE, SIDE, device=classifier.device)

        def logits(images: Tensor = images) -> None:
            with torch.no_grad():
                classifier(images).argmax(1)

        def both(images: Tensor = images) -> None:
            explain(classifier, images, None, lax)

        found[f"{kind}, {n} at a time"] = ratio(both, logits, kind)

        def order(images: Tensor = images) -> None:
            draw_all(classifier, images, None, {"lax": lax}, progress=False)

        found[f"{kind}, {n} at a time, uncut"] = ratio(order, logits, kind)
    if kind == "cpu":
        found |= onnx_cost(classifier, lax, batches)
    return found


def onnx_cost(classifier: Classifier, lax: Lax, batches: tuple[int, ...]) -> dict[str, float]:
    """The same for two files in onnxruntime: classifier with adapter, and classifier alone."""
    import onnxruntime

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = classifier.bare

        def forward(self, images: Tensor) -> Tensor:
            return self.model(classifier.normalize(images))

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = lax.export(classifier, Path(folder) / "both.onnx", (SIDE, SIDE))
        alone = Path(folder) / "alone.onnx"
        example = torch.rand(2, 3, SIDE, SIDE)
        shapes = {"images": {0: torch.export.Dim("batch", min=1)}}
        traced = torch.export.export(
            Logits().eval(), (example,), dynamic_shapes=shapes, strict=False
        )
        names = {"input_names": ["images"], "output_names": ["logits"]}
        torch.onnx.export(traced, dynamo=True, **names).save(str(alone))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        sessions = [
            onnxruntime.InferenceSession(str(one), options, providers=["CPUExecutionProvider"])
            for one in (whole, alone)
        ]
        for n in batches:
            given = {"images": np.random.default_rng(0).random((n, 3, SIDE, SIDE), np.float32)}
            both, bare = (partial(session.run, None, given) for session in sessions)
            found[f"onnxruntime, {n} at a time"] = ratio(both, bare, "cpu")
    return found


def ratio(job: Callable[[], object], bare: Callable[[], object], device: str) -> float:
    """The median time of one job over that of another, in turns."""
    times: list[list[float]] = [[], []]
    for turn in range(12):
        for place, one in enumerate((job, bare)):
            if device == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            one()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[place].append(time.perf_counter() - begun)
    return statistics.median(times[0]) / statistics.median(times[1])


def sheet(classifier: Classifier, lax: Lax, folder: Path, out: Path) -> None:
    """A picture of 24 photographs: each beside its regions and maps by every method."""
    _, images = photographs(folder, SHOWN)
    images = images.to(classifier.device)
    rows = []
    columns = {
        "lax": explain(classifier, images, None, lax),
        "lax 10 %": explain(classifier, images, None, lax, size=0.1),
        "lax fitted": explain(classifier, images, None, lax, fit=True).heatmaps,
        "gradcam": explain(classifier, images, None, "gradcam"),
        "gradcam fitted": explain(classifier, images, None, "gradcam", fit=True).heatmaps,
    }
    for number, image in enumerate(images.cpu()):
        parts = [image]
        for name, maps in columns.items():
            one = maps[number].float().cpu()
            shown = one if name == "gradcam" else (one >= 0.5).float()
            parts.append(image * (0.15 + 0.85 * shown))
        rows.append(torch.cat([part[:, ::2, ::2] for part in parts], 2))
    half = len(rows) // 2
    whole = torch.cat([torch.cat(rows[:half], 1), torch.cat(rows[half:], 1)], 2)
    pixels = (255 * whole.clamp(0, 1)).byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(out, quality=88)
    print("columns: photograph,", ", ".join(columns))


def main() -> None:
    """Examine, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("pairs", "elsewhere", "cost", "sheet"))
    parser.add_argument("--network", required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    os.environ["LAX_WEIGHTS"] = str(args.weights)
    import classifiers  # reads the folder

    classifier = classifiers.NAMES[args.network]().to(torch.device(args.device))
    lax = Lax.from_pretrained(args.adapter).to(args.device)
    if args.device != "cpu":
        classifier.to(dtype=torch.bfloat16, memory_format=torch.channels_last)
    if args.what == "sheet":
        sheet(classifier, lax, args.photos, args.out)
        return
    if args.what == "pairs":
        found = pairs(classifier, lax, read(args.data, args.limit)["choose"].float() / 255)
    elif args.what == "elsewhere":
        found = elsewhere(classifier, lax, args.photos, args.limit)
    else:
        found = cost(classifier, lax, (1, 8) if args.device == "cpu" else (1, 64, 256))
    print(json.dumps(found, indent=1))
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
