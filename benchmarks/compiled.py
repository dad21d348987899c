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
from pathlib import Path

import torch
from torchvision import models

from evaluate import bare, smooth_maps
from sufficit import Classifier, evaluate
from sufficit.classifier.acceleration import accelerated
from sufficit.metrics.plan import make_plan
from sufficit.perturbation.predict import predict, usual_batch
from sufficit.provenance import provenance
from timing import medians, side_by_side


def measure(name: str, asked: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(0)
    weights = "DEFAULT" if asked.published else None
    model = models.get_model(name, weights=weights).eval().to(asked.device)
    classifier = Classifier(model, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    if asked.device == "cuda":
        classifier.to(asked.device, torch.bfloat16, torch.channels_last)
    shape = (3, asked.side, asked.side)
    batch = usual_batch(classifier, shape)
    begun = time.perf_counter()
    fast = accelerated(classifier, (batch, *shape))
    compiling = time.perf_counter() - begun
    random = torch.Generator().manual_seed(2)
    blobs = torch.rand(asked.images, 3, 14, 14, generator=random)
    images = torch.nn.functional.interpolate(blobs, shape[1:], mode="bicubic").clamp(0, 1)
    images = images.to(asked.device)
    maps = smooth_maps(asked.images, asked.side).to(asked.device)
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
    bands = make_plan().asks
    one, two = (predict(each, images, maps, targets, bands) for each in (classifier, fast))
    other = float((one.named != two.named).double().mean())
    rates = {job: calls / spent for job, spent in seconds.items()}
    found: dict[str, object] = {
        "model": name,
        "pixels": asked.side,
        "images": asked.images,
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
    words.add_argument("--model", action="append", help="of torchvision; may be given again")
    words.add_argument("--published", action="store_true", help="the published weights")
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
