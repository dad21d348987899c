"""What a fit costs beside its forward passes: `explain(..., fit=True)` on photographs, eager.

    PYTHONPATH=src python benchmarks/fit.py --device cuda --data PHOTOGRAPHS --weights FOLDER
    PYTHONPATH=src python benchmarks/fit.py --images 2 --side 64    # made up, on a CPU

Every image that goes through the model is counted. Bare is as many images through the same model in
the same precision: in full batches of the size that `explain` takes by itself, and once more in the
very batches that the fit sent. All take turns. A fit asks until a size suffices, so the number of
passes depends on the model: weights that know something matter.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from jpegs import read_images
from profiling import print_profile, profiled
from sufficit import Classifier, explain
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from timing import side_by_side

AIM = 1.1
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
NETWORKS = Path(__file__).parents[1] / "experiments" / "lax"


def classifier_of(asked: argparse.Namespace) -> Classifier:
    """ResNet50 with ImageNet weights on a GPU in bf16; ResNet18 without weights elsewhere."""
    torch.manual_seed(0)
    if asked.weights is None:
        model: nn.Module = models.resnet18()
    else:
        sys.path.insert(0, str(NETWORKS))
        from networks import resnet50

        model = resnet50(asked.weights)
    classifier = Classifier(model.eval(), **IMAGENET)
    if asked.device == "cuda":
        classifier.to("cuda", torch.bfloat16, torch.channels_last)
    return classifier


class Counting:
    """Counts the batches that a model is sent, by their number of images."""

    def __init__(self, model: nn.Module) -> None:
        self.batches: Counter[int] = Counter()
        model.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, inputs: tuple[Tensor]) -> None:
        self.batches[len(inputs[0])] += 1

    def of(self, job: Any) -> tuple[Any, Counter[int]]:
        """What a job returns, and the batches that it sent."""
        self.batches = Counter()
        found = job()
        return found, self.batches


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a fit and of its forward passes, in turns."""
    classifier = classifier_of(asked)
    images = read_images(asked.data, asked.images, asked.side).to(asked.device)
    counting = Counting(classifier.model)
    print("images are read", flush=True)
    regions, batches = counting.of(lambda: explain(classifier, images, fit=True, progress=False))
    _, of_map = counting.of(lambda: explain(classifier, images))
    passes = sum(size * times for size, times in batches.items())
    batch = usual_batch(classifier, images.shape[1:])
    largest = max(batch, *batches)
    inputs = torch.rand(largest, *images.shape[1:], device=classifier.device).to(classifier.dtype)
    inputs = inputs.contiguous(memory_format=classifier.memory_format)

    @torch.no_grad()
    def bare(sizes: Counter[int]) -> None:
        for size, times in sizes.items():
            for _ in range(times):
                classifier.model(inputs[:size])

    full = Counter({batch: passes // batch})
    full[passes % batch] += passes % batch > 0
    jobs = {
        "fit": lambda: explain(classifier, images, fit=True, progress=False),
        "map alone": lambda: explain(classifier, images),
        "passes in full batches": lambda: bare(full),
        "passes in the batches of the fit": lambda: bare(batches),
    }
    times = side_by_side(jobs, asked.device, asked.rounds)

    def over(name: str) -> dict[str, float]:
        ratios = [a / b for a, b in zip(times["fit"], times[name], strict=True)]
        return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}

    found: dict[str, Any] = {
        "images": len(images),
        "passes": passes,
        "passes_of_the_map": sum(size * times for size, times in of_map.items()),
        "passes_per_image_by_certificate": statistics.mean(one.passes for one in regions),
        "found": statistics.mean(one.enough for one in regions),
        "share": statistics.mean(one.share for one in regions),
        "batch": batch,
        "batches_of_the_fit": dict(sorted(batches.items())),
        "rounds": asked.rounds,
        "seconds": times,
        "fit_over_passes_in_full_batches": over("passes in full batches"),
        "fit_over_passes_in_its_batches": over("passes in the batches of the fit"),
    }
    report(found)
    write(asked, found)
    some = images[: asked.profiled]
    found["profile"] = profiled(lambda: explain(classifier, some, fit=True, progress=False))
    print_profile(found["profile"])
    return found


def report(found: dict[str, Any]) -> None:
    """Print the ratios."""
    ratios = found["fit_over_passes_in_full_batches"], found["fit_over_passes_in_its_batches"]
    fit, map_alone = (statistics.median(found["seconds"][name]) for name in ("fit", "map alone"))
    print(
        f"{found['images']} images, {found['passes']} passes"
        f" ({found['passes_per_image_by_certificate']:.1f} per image by the certificates),"
        f" a part suffices for {found['found']:.1%}, mean share {found['share']:.2f}"
    )
    print(f"fit {fit:.3f} s, the map alone {map_alone:.3f} s")
    for one, what in zip(ratios, ("in full batches", "in the batches of the fit"), strict=True):
        print(
            f"fit / its forward passes {what}: **{one['median']:.3f}**"
            f" ({one['lowest']:.3f} to {one['highest']:.3f})"
        )
    print(f"aim {AIM}: {'met' if ratios[0]['median'] <= AIM else 'missed'}\n", flush=True)


def write(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what is known so far."""
    if asked.out is None:
        return
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    facts = provenance({"argv": sys.argv[1:]}, torch.device(asked.device), dtype)
    asked.out.write_text(json.dumps(facts | {"results": found}, indent=2) + "\n")


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    words.add_argument("--data", type=Path, help="photographs; made up where left out")
    words.add_argument("--weights", type=Path, help="folder with the weights of ResNet50")
    words.add_argument("--images", type=int, default=500)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--rounds", type=int, default=4)
    words.add_argument("--profiled", type=int, default=64, help="images")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    started = time.perf_counter()
    found = measure(asked)
    found["spent"] = time.perf_counter() - started
    print(f"spent {found['spent']:.0f} s")
    write(asked, found)


if __name__ == "__main__":
    main()
