"""What the fill `drop` saves on a ViT: tokens left out, and equal patch masks asked once.

    python benchmarks/drop.py --device cuda --out benchmarks/results/drop-h200.json
    python benchmarks/drop.py --device cuda --weights deit_tiny.safetensors --data PHOTOGRAPHS
    python benchmarks/drop.py --images 2 --side 64 --rounds 1    # on a CPU

Scores are computed with `drop` and with `black`, in turns, on a ViT of the shape of DeiT-tiny with
random weights, or those of a file. First the eleven columns of smooth heatmaps: `drop` asks fewer
masks, because many keep the same patches. Then the columns of values of heatmaps with one value per
patch: both fills ask the same masks, so that only the tokens left out differ.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import VisionTransformer

from compiled import classifier_of, images_of
from evaluate import smooth_maps
from sufficit import Classifier, Scores, evaluate
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from timing import medians, side_by_side

PATCH = 16


def tiny(side: int, device: str, weights: str | None) -> Classifier:
    if weights:
        return classifier_of(f"deit-tiny={weights}", side, device)
    torch.manual_seed(0)
    sizes = {"num_layers": 12, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
    model = VisionTransformer(image_size=side, patch_size=PATCH, **sizes).eval()
    torch.nn.init.normal_(model.heads[-1].weight, std=0.02)  # torchvision starts it at zero
    classifier = Classifier(model, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return classifier.to(device, torch.bfloat16 if device == "cuda" else None)


def patch_maps(n: int, side: int) -> Tensor:
    """Heatmaps of one value per patch."""
    cells = side // PATCH
    values = torch.rand(n, cells, cells, generator=torch.Generator().manual_seed(1))
    return values.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)


def measure(
    kind: str, maps: Tensor, columns: list[str] | None, asked: argparse.Namespace
) -> dict[str, object]:
    classifier = tiny(asked.side, asked.device, asked.weights)
    shape = (asked.images, 3, asked.side, asked.side)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    if asked.data:
        images = images_of(asked, classifier)
    images, maps = images.to(asked.device), maps.to(asked.device)
    with torch.no_grad():
        targets = torch.cat([classifier(some).argmax(1) for some in images.split(64)])

    def scored(fill: str) -> Callable[[], Scores]:
        how = {"fill": fill, "columns": columns, "batch_size": asked.batch_size}
        return lambda: evaluate(classifier, images, maps, targets, **how)

    fills = ("black", "drop")
    once = {fill: scored(fill)() for fill in fills}
    calls = {fill: int(one.calls.sum()) for fill, one in once.items()}
    means = {fill: one.mean() for fill, one in once.items()}
    jobs = {fill: scored(fill) for fill in fills}
    seconds = medians(side_by_side(jobs, asked.device, asked.rounds))
    rates = {fill: calls[fill] / seconds[fill] for fill in fills}
    found: dict[str, object] = {
        "heatmaps": kind,
        "pixels": asked.side,
        "images": asked.images,
        "batch": asked.batch_size or usual_batch(classifier, shape[1:]),
        "dtype": str(classifier.dtype),
        "calls": calls,
        "means": means,
        "seconds": seconds,
        "calls_per_second": rates,
        "rate_drop_over_black": rates["drop"] / rates["black"],
        "time_black_over_drop": seconds["black"] / seconds["drop"],
    }
    print(json.dumps(found, indent=2), flush=True)
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--images", type=int, default=256)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--batch-size", type=int)
    words.add_argument("--weights", help="of DeiT-tiny, for 1,000 classes; else random")
    words.add_argument("--data", type=Path, help="a folder of images; else noise")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    smooth, blocky = (make(asked.images, asked.side) for make in (smooth_maps, patch_maps))
    by_value = ["insertion_pixel", "deletion_pixel", "msi"]
    found = [
        measure("smooth, all columns", smooth, None, asked),
        measure("one value per patch, columns of values", blocky, by_value, asked),
    ]
    if asked.out:
        dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
        facts = provenance({"argv": sys.argv[1:]}, torch.device(asked.device), dtype)
        asked.out.write_text(json.dumps(facts | {"results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
