"""What a compiled copy of the model saves, and how often its predictions differ, in one run.

    python benchmarks/compiled.py --device cuda --out benchmarks/results/compiled-h200.json
    python benchmarks/compiled.py --images 4 --model resnet18 --side 64    # on a CPU

The eleven columns are computed with the model as it is and with its compiled copy, in turns; beside
them as many bare forward passes of each on inputs that lie ready. Then masked images go through
both, and the share of other predicted classes is counted.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torchvision import models

from bands import band_probe
from evaluate import bare, smooth_maps
from sufficit import Classifier, View, evaluate
from sufficit.classifier.acceleration import accelerated
from sufficit.data.images import list_images
from sufficit.perturbation.predict import predict, usual_batch
from sufficit.provenance import provenance
from timing import medians, side_by_side

NETWORKS = Path(__file__).parents[1] / "paper" / "networks.py"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def classifier_of(word: str, side: int, device: str) -> Classifier:
    """A torchvision model with random weights by its name, or what `Classifier.load` takes.

    NAME=FILE is a network of paper/networks.py with the weights of 1,000 classes in a file.
    """
    torch.manual_seed(0)
    name, _, file = word.partition("=")
    if not file and (":" in word or "/" in word):
        classifier = Classifier.load(word)
    else:
        if file:
            function = f"python:{NETWORKS}:{name.replace('-', '_')}"
            classifier = Classifier.load(function, weights=file)
        else:
            classifier = Classifier(models.get_model(word).eval(), mean=MEAN, std=STD)
        classifier.view = View((side, side), resize=side * 256 // 224)
    if device == "cuda":
        return classifier.to(device, torch.bfloat16, torch.channels_last)
    return classifier


def images_of(asked: argparse.Namespace, classifier: Classifier) -> Tensor:
    """The first images of a folder, spread over it, or coloured blobs: [N,3,side,side]."""
    n, side = asked.images, asked.side
    if asked.data is None:
        random = torch.Generator().manual_seed(2)
        blobs = torch.rand(n, 3, 14, 14, generator=random)
        return torch.nn.functional.interpolate(blobs, (side, side), mode="bicubic").clamp(0, 1)
    found = list_images(asked.data)
    some = found[:: max(1, len(found) // n)][:n]
    with ThreadPoolExecutor(8) as pool:
        return torch.stack(list(pool.map(lambda image: image.read(classifier.view), some)))


def measure(name: str, asked: argparse.Namespace) -> dict[str, object]:
    classifier = classifier_of(name, asked.side, asked.device)
    shape = (3, asked.side, asked.side)
    batch = usual_batch(classifier, shape)
    begun = time.perf_counter()
    fast = accelerated(classifier, (batch, *shape))
    compiling = time.perf_counter() - begun
    images = images_of(asked, classifier).to(asked.device)
    maps = smooth_maps(len(images), asked.side).to(asked.device)
    with torch.no_grad():
        targets = classifier(images).argmax(1)
    calls = int(evaluate(classifier, images, maps, targets).calls.sum())
    jobs: dict[str, Callable[[], object]] = {
        "eager": lambda: evaluate(classifier, images, maps, targets),
        "compiled": lambda: evaluate(fast, images, maps, targets),
        "bare eager": bare(classifier, asked.side, calls, batch),
        "bare compiled": bare(fast, asked.side, calls, batch),
    }
    seconds = medians(side_by_side(jobs, asked.device, asked.rounds))
    bands = band_probe(classifier).bands
    one, two = (predict(each, images, maps, targets, bands) for each in (classifier, fast))
    other = float((one.named != two.named).double().mean())
    rates = {job: calls / spent for job, spent in seconds.items()}
    found: dict[str, object] = {
        "model": name,
        "pixels": asked.side,
        "images": len(images),
        "calls": calls,
        "batch": batch,
        "seconds_to_compile": compiling,
        "calls_per_second": rates,
        "compiled_over_eager": rates["compiled"] / rates["eager"],
        "evaluate_over_bare_compiled": seconds["compiled"] / seconds["bare compiled"],
        "predictions": one.named.numel(),
        "other_class": other,
        "largest_difference_of_confidence": float((one.confidences - two.confidences).abs().max()),
    }
    print(json.dumps(found, indent=2), flush=True)
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument(
        "--model", action="append", help="torchvision's name, NAME=FILE, or as sufficit's; repeat"
    )
    words.add_argument("--data", type=Path, help="a folder of images; else they are made up")
    words.add_argument("--images", type=int, default=320)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    found = [measure(name, asked) for name in asked.model or ["resnet50"]]
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, torch.device(asked.device), torch.bfloat16)
        asked.out.write_text(json.dumps(facts | {"results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
