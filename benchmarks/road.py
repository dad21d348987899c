"""What the fill `road` costs: seconds per masked image, as a ratio to bare forward passes.

python benchmarks/road.py --device cpu --out benchmarks/results/road-cpu.json
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import nn

from sufficit import Classifier
from sufficit.data.digits import synthetic_digits
from sufficit.perturbation.bands import grid, top
from sufficit.perturbation.fills import grey_noise, impute
from sufficit.perturbation.heatmaps import normalize, resize
from sufficit.perturbation.predict import predict, usual_batch
from sufficit.provenance import provenance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--masks", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cases = {
        "small net, 64 px": (Classifier.load("sufficit:digits"), 64),
        "ResNet18, 224 px": (Classifier(torchvision.models.resnet18(weights=None)), 224),
        "ResNet50, 224 px": (Classifier(torchvision.models.resnet50(weights=None)), 224),
    }
    found = {}
    for name, case in cases.items():
        found[name] = measured(*case, given)
        print(name, found[name], flush=True)
    device = torch.device(given.device)
    result = {"cases": found} | provenance(vars(given) | {"out": ""}, device, torch.float32)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


def measured(classifier: Classifier, side: int, given: argparse.Namespace) -> dict[str, float]:
    """Seconds per masked image of bare forwards, the fill black and the fill road; ratios."""
    classifier.to(given.device)
    images = synthetic_digits(given.images).images
    images = nn.functional.interpolate(images, size=(side, side), mode="bilinear")
    generator = torch.Generator().manual_seed(0)
    maps = normalize(resize(torch.rand(given.images, 7, 7, generator=generator), (side, side)))
    images, maps = images.to(given.device), maps.to(given.device)
    bands = [top(share) for share in grid(1 / given.masks)[1:-1]]
    total, targets = given.images * len(bands), torch.zeros(given.images, dtype=torch.long)
    size = min(total, usual_batch(classifier, images.shape[1:]))
    batch = classifier.normalize(images[:1].expand(size, -1, -1, -1).contiguous())

    def bare() -> None:
        with torch.no_grad():
            for _ in range(-(-total // size)):
                classifier.logits_of(batch)

    def scored(fill: str) -> Callable[[], object]:
        return lambda: predict(classifier, images, maps, targets, bands, fill=fill)

    work = {"bare": bare, "black": scored("black"), "road": scored("road")}
    seconds = {name: best(one, given) / total for name, one in work.items()}
    masks = (maps[:1] > 0.5).expand(size, -1, -1)
    alone = best(lambda: impute(batch.float(), masks, grey_noise(images)), given) / size
    ratios = {f"{name} / bare": seconds[name] / seconds["bare"] for name in ("black", "road")}
    return seconds | {"imputation alone": alone} | ratios


def best(work: Callable[[], object], given: argparse.Namespace) -> float:
    """The least seconds of some repeats, after one to warm up."""
    work()
    found, on_cpu = [], given.device == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter  # others may use the CPU too
    for _ in range(given.repeats):
        start = clock()
        work()
        if not on_cpu:
            torch.cuda.synchronize()
        found.append(clock() - start)
    return min(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
