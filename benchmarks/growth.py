"""How the time of scoring grows with bands, methods, pixels and images, three sizes each.

    OMP_NUM_THREADS=1 python benchmarks/growth.py --out benchmarks/results/growth-cpu.json

Three sizes of one thing take turns. Seconds are those of the processor, of which others on the
machine take none away, and the least of the rounds; ratios are to the middle size.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from bands import band_probe
from sufficit import Classifier, evaluate
from sufficit.provenance import provenance

USUAL = {"bands": 179, "methods": 2, "pixels": 64, "images": 2}
STEPS = {74: (0.05, 0.1), 179: (0.02, 0.04), 354: (0.01, 0.02)}  # of the curves
SIZES = {
    "bands": (74, 179, 354),
    "methods": (1, 2, 4),
    "pixels": (32, 64, 128),
    "images": (1, 2, 4),
}


def smooth(n: int, side: int, seed: int) -> Tensor:
    """Smooth maps in 0..1 whose pixels all differ: [n,side,side]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 1, 7, 7, generator=generator)
    maps = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")[:, 0]
    return maps.clamp(0, 1)


def score(classifier: Classifier, bands: int, methods: int, pixels: int, images: int) -> int:
    """Score so many heatmaps of so many images; the model calls it took."""
    value_step, percent_step = STEPS[bands]
    probe = band_probe(classifier, value_step=value_step, percent_step=percent_step)
    assert len(probe.bands) + 1 == bands  # and the whole image
    pictures = torch.rand(images, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    calls = 0
    for method in range(methods):
        maps = smooth(images, pixels, method)
        scores = evaluate(
            classifier, pictures, maps, value_step=value_step, percent_step=percent_step
        )
        calls += int(scores.calls.sum())
    return calls


def flops(model: torch.nn.Module, pixels: int) -> int:
    """Of one forward pass; a multiplication with its addition counts as two."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.rand(1, 3, pixels, pixels))
    return int(counter.get_total_flops())


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    torch.manual_seed(0)
    classifier = Classifier(models.resnet18(num_classes=10).eval())
    results: dict[str, object] = {}
    for name, sizes in SIZES.items():
        settings = {str(size): USUAL | {name: size} for size in sizes}
        calls = {key: score(classifier, **one) for key, one in settings.items()}
        found = dict.fromkeys(settings, float("inf"))
        for _ in range(asked.rounds):
            for key, one in settings.items():
                begun = time.process_time()
                score(classifier, **one)
                found[key] = min(found[key], time.process_time() - begun)
        middle = str(USUAL[name])
        ratios = {key: round(seconds / found[middle], 3) for key, seconds in found.items()}
        asking = {key: round(n / calls[middle], 3) for key, n in calls.items()}
        results[name] = {"time": ratios, "model_calls": asking, "seconds": found}
        print(name, "time", ratios, "calls", asking, flush=True)
    named = {"resnet18": models.resnet18(), "resnet50": models.resnet50()}
    results["flops"] = {f"{key}, 224 px": flops(m.eval(), 224) for key, m in named.items()}
    results["flops"] |= {f"resnet18, {p} px": flops(classifier.model, p) for p in SIZES["pixels"]}
    print(results["flops"])
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, torch.device("cpu"), torch.float32)
        asked.out.write_text(
            json.dumps(facts | {"usual": USUAL, "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
