r"""Train adapters with the losses of other works on `learn`, and score them as LAX is scored.

    PYTHONPATH=src:tools:experiments:experiments/lax python tools/train_imagenet_rivals.py \\
        --data ROOT --weights ROOT --network resnet50 --out FOLDER [--sizes 0.25,1,4] [--report]

The same photographs, as many presentations, the same net at the same width, the size calibrated on
`choose` and the same fit. Each rival is trained with its weight of size times each of `--sizes`;
`choose` decides which of them scores `report`. Rows go to OUT/rivals-NETWORK.json; run again to
resume.
"""

import argparse
import json
import math
import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from train_imagenet_lax import read, scored

from rival_losses import FINAL, FINAL_RECIPES
from sufficit import Classifier, Lax, train_lax
from sufficit.training.frozen_copy import frozen_copy
from sufficit.training.processes import fabric_for

PASSES = 4  # through the photographs, in what the training calls an epoch


class Views:
    """Batches of photographs, half of them mirrored, several times over."""

    def __init__(self, pixels: Tensor, size: int) -> None:
        self.pixels, self.size = pixels, size

    def __len__(self) -> int:
        return PASSES * math.ceil(len(self.pixels) / self.size)

    def __iter__(self):
        for _ in range(PASSES):
            for rows in torch.randperm(len(self.pixels)).split(self.size):
                some = self.pixels[rows.to(self.pixels.device)].float() / 255
                mirrored = torch.rand(len(some), 1, 1, 1, device=some.device) < 0.5
                yield torch.where(mirrored, some.flip(3), some)


def unsaturated(lax: Lax):
    """A method that draws the adapter's logits, so that its order has no ties: [N,H,W] in 0..1."""

    def rival(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            stages, _ = classifier.stages(images, lax.layers)
            logits = lax.logits([stage.float() for stage in stages])
        large = F.interpolate(logits[:, None], images.shape[2:], mode="bilinear")[:, 0]
        low, high = large.amin((1, 2), keepdim=True), large.amax((1, 2), keepdim=True)
        return (large - low) / (high - low).clamp(min=1e-6)

    return rival


def main() -> None:
    """Train, score, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--network", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="0.25,1,4")
    parser.add_argument("--rivals", default=",".join(FINAL))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    os.environ["LAX_WEIGHTS"] = str(args.weights)
    import classifiers  # reads the folder

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    photos = read(args.data, args.limit)
    classifier = classifiers.NAMES[args.network]().to(device)
    some = photos["choose"][:8].float().to(device) / 255
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    classifier = frozen_copy(classifier, some, classifier.stage_layers(some), dtype)
    choose = photos["choose"].float() / 255
    loader = Views(photos["learn"].to(device), min(args.batch, len(photos["learn"])))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"rivals-{args.network}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    for name in args.rivals.split(","):
        trained: dict[str, Lax] = {}
        for size in map(float, args.sizes.split(",")):
            key = f"{name} x{size:g}"
            if key in rows:
                continue
            began = time.monotonic()
            lax = train_lax(
                classifier,
                loader,
                recipe=FINAL_RECIPES[name],
                loss=partial(FINAL[name], size=size),
                target="prediction",
                class_free=True,
                epochs=max(1, round(args.steps / len(loader))),
                patience=None,
                validation=list(choose.split(64)),
                validation_images=min(64, len(choose)),
                fabric=fabric_for(device, precision="bf16" if device.type == "cuda" else "fp32"),
                progress=False,
            )
            trained[key] = lax
            seconds = time.monotonic() - began
            found = scored(classifier, choose.to(device), unsaturated(lax), None)
            rows[key] = {"seconds": seconds, "choose": found}
            path.write_text(json.dumps(rows, indent=1) + "\n")
            print(key, json.dumps(rows[key]), flush=True)
        if args.report and trained:
            best = max(trained, key=lambda key: rows[key]["choose"]["black"]["common"])
            images = photos["report"].float().to(device) / 255
            size = rows[best]["choose"]["size"]
            rows[best]["report"] = scored(classifier, images, unsaturated(trained[best]), size)
            path.write_text(json.dumps(rows, indent=1) + "\n")
            print(best, "report", json.dumps(rows[best]["report"]), flush=True)


if __name__ == "__main__":
    main()
