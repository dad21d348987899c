"""What scoring costs beside the bare forward passes, and beside torchcam and quantus, in one run.

    python benchmarks/evaluate.py --device cpu
    python benchmarks/evaluate.py --device cuda --out results.json

Everything is measured side by side, alternating, and printed as ratios of medians; absolute times
mean something only on an otherwise idle GPU.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import models

from sufficit import Classifier, evaluate
from sufficit.metrics import COLUMNS
from sufficit.provenance import provenance
from timing import medians, side_by_side

PERCENT = ("insertion_percent", "deletion_percent")


class Nothing(nn.Module):
    """A model that costs next to nothing: two numbers of the picture are the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return images[:, 0, 0, :2] * self.scale


def smooth_maps(n: int, side: int) -> Tensor:
    """Heatmaps as CAMs are: 7x7 noise, upsampled, stretched to 0..1."""
    from sufficit import normalize, resize

    small = torch.rand(n, 7, 7, generator=torch.Generator().manual_seed(1))
    return normalize(resize(small, (side, side)))


def big_classifier(device: str) -> Classifier:
    torch.manual_seed(0)
    if device == "cuda":
        model = models.resnet50().cuda().to(torch.bfloat16, memory_format=torch.channels_last)
    else:
        model = models.resnet18()
    return Classifier(model.eval(), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def bare(classifier: Classifier, side: int, count: int, batch: int) -> Callable[[], None]:
    """Forward passes of the same count on inputs that lie ready."""
    inputs = torch.rand(batch, 3, side, side, device=classifier.device, dtype=classifier.dtype)
    inputs = inputs.contiguous(memory_format=classifier.memory_format)

    @torch.no_grad()
    def work() -> None:
        for start in range(0, count, batch):
            classifier.model(inputs[: min(batch, count - start)])

    return work


def against_bare(device: str, rounds: int) -> dict[str, object]:
    """(a) The eleven columns over the bare forward passes at their best batch size."""
    n, side = (64, 224) if device == "cuda" else (2, 224)
    batches = (128, 256, 512, 1024, 2048) if device == "cuda" else (2, 4, 8, 16, 32)
    classifier = big_classifier(device)
    images, maps = torch.rand(n, 3, side, side), smooth_maps(n, side)
    images, maps = images.to(device), maps.to(device)
    targets = torch.zeros(n, dtype=torch.long, device=device)
    calls = int(evaluate(classifier, images, maps, targets).calls.sum())
    trial = min(calls, 4096 if device == "cuda" else 64)
    tries = {str(b): bare(classifier, side, trial, b) for b in batches}
    best = min(found := medians(side_by_side(tries, device, 2)), key=lambda name: found[name])
    jobs: dict[str, Callable[[], object]] = {
        "evaluate": lambda: evaluate(classifier, images, maps, targets),
        "bare": bare(classifier, side, calls, int(best)),
    }
    seconds = medians(side_by_side(jobs, device, rounds))
    return {
        "model": "ResNet50 bf16 channels-last" if device == "cuda" else "ResNet18 fp32",
        "pixels": side,
        "images": n,
        "calls_per_image": calls / n,
        "best_bare_batch": int(best),
        "masked_images_per_second": calls / seconds["evaluate"],
        "bare_images_per_second": calls / seconds["bare"],
        "ratio": seconds["evaluate"] / seconds["bare"],
    }


class FakeExtractor:
    """Hands torchcam a ready heatmap, so that only its metric is measured."""

    def __init__(self, model: nn.Module, maps: Tensor) -> None:
        self.model, self.maps = model, maps

    def __call__(self, *_: object, **__: object) -> list[Tensor]:
        return [self.maps]

    def fuse_cams(self, cams: list[Tensor]) -> Tensor:
        return cams[0]

    def _hooks_off(self) -> object:
        from contextlib import nullcontext

        return nullcontext()


def torchcam_job(
    model: nn.Module, images: Tensor, maps: Tensor, batch: int
) -> Callable[[], object]:
    from functools import partial

    from torchcam.metrics import DeletionInsertionMetric

    metric = DeletionInsertionMetric(
        FakeExtractor(model, maps), partial(torch.softmax, dim=-1), steps=50, batch_size=batch
    )
    return lambda: metric.update(images, [0] * len(images))


def flips(side: int) -> tuple[int, int]:
    """The steps of quantus' pixel flipping, about 50, and the channel-pixels of each."""
    wanted = 3 * side * side / 50
    divisors = [d for d in range(1, side * side + 1) if side * side % d == 0]
    step = min(divisors, key=lambda d: abs(d - wanted))
    return 3 * side * side // step, step


def quantus_job(
    model: nn.Module, images: Tensor, maps: Tensor, batch: int, targets: Sequence[int] | None = None
) -> Callable[[], object]:
    """PixelFlipping in about 50 steps; it flips channel-pixels: its areas are not ours."""
    import quantus

    steps, step = flips(images.shape[-1])
    metric = quantus.PixelFlipping(
        features_in_step=step,
        disable_warnings=True,
        display_progressbar=False,
        perturb_baseline="black",
    )
    x, a = images.float().cpu().numpy(), maps.float().cpu().numpy()[:, None]
    y = np.array(targets or [0] * len(images))
    device = str(images.device)

    def work() -> object:
        return metric(model=model, x_batch=x, y_batch=y, a_batch=a, device=device, batch_size=batch)

    work.masked = len(images) * steps  # type: ignore[attr-defined]
    return work


def ours_job(
    classifier: Classifier, images: Tensor, maps: Tensor, columns: tuple[str, ...]
) -> Callable[[], object]:
    targets = torch.zeros(len(images), dtype=torch.long, device=images.device)
    return lambda: evaluate(
        classifier, images, maps, targets, score="confidence", columns=columns, progress=False
    )


def peers() -> list[str]:
    found = []
    for name in ("torchcam", "quantus"):
        try:
            __import__(name)
            found.append(name)
        except ImportError as error:
            print(f"{name} left out: {error}")
    return found


def overhead(rounds: int, installed: list[str]) -> list[dict[str, object]]:
    """(b) Microseconds a masked image on the CPU, with a model that costs next to nothing."""
    rows = []
    for side in (64, 224):
        n = 16
        images, maps = torch.rand(n, 3, side, side), torch.rand(n, side, side)
        model = Nothing().eval()
        ours = ours_job(Classifier(model), images, maps, PERCENT)
        masked = {"sufficit": int(ours().calls.sum())}  # type: ignore[attr-defined]
        jobs: dict[str, Callable[[], object]] = {"sufficit": ours}
        if "torchcam" in installed:
            jobs["torchcam"] = torchcam_job(model, images, maps, 32)
            masked["torchcam"] = n * (2 * 49 + 1)
        if "quantus" in installed:
            jobs["quantus"] = quantus_job(model, images, maps, 64)
            masked["quantus"] = jobs["quantus"].masked  # type: ignore[attr-defined]
        seconds = medians(side_by_side(jobs, "cpu", rounds))
        micro = {name: 1e6 * seconds[name] / masked[name] for name in jobs}
        ratios = {
            f"over_{name}": micro["sufficit"] / micro[name] for name in jobs if name != "sufficit"
        }
        rows.append({"pixels": side, "microseconds": micro, **ratios})
    return rows


def plain_loop(classifier: Classifier, images: Tensor, maps: Tensor) -> Callable[[], object]:
    """The eleven columns as one would write them: image by image, metric by metric, mask by mask.

    The masks of one metric go through the model together; nothing is shared between metrics.
    """
    values, shares = [i / 100 for i in range(101)], [i / 50 for i in range(51)]
    upper = [a for a in values if a >= 0.5]

    def ask(image: Tensor, masks: Tensor) -> Tensor:
        inputs = classifier.normalize(image * masks[:, None])
        inputs = inputs.contiguous(memory_format=classifier.memory_format)
        return classifier.model(inputs).float().softmax(1)[:, 0]

    def wanted(heat: Tensor) -> list[Tensor]:
        order = heat.flatten().argsort(descending=True, stable=True)
        rank = order.argsort().view_as(heat) / heat.numel()
        above = torch.stack([heat > a for a in values])
        first = torch.stack([rank < k for k in shares])
        hide = torch.stack([(heat > 0.5) & (heat <= a) for a in upper])
        show = torch.stack([heat > a for a in upper])
        base = torch.cat([show, hide, (heat <= 0.5)[None]])
        # insertion and deletion, Fid- and Fid+, by value and by percentage; base score; MSI
        return [above, ~above, first, ~first] * 2 + [base, base]

    @torch.no_grad()
    def work() -> None:
        for image, heat in zip(images, maps, strict=True):
            for masks in wanted(heat):
                ask(image, masks)
        torch.cuda.synchronize()

    return work


def one_by_one(classifier: Classifier, images: Tensor, maps: Tensor) -> Callable[[], object]:
    """The eleven columns by separate calls of evaluate."""

    def work() -> None:
        for name in COLUMNS:
            ours_job(classifier, images, maps, (name,))()

    return work


def against_peers(rounds: int, installed: list[str]) -> dict[str, object]:
    """(c) On the GPU: the same insertion and deletion areas by each, and the eleven one by one."""
    classifier = big_classifier("cuda")
    n, side = 16, 224
    images, maps = torch.rand(n, 3, side, side), smooth_maps(n, side)
    images, maps = images.cuda(), maps.cuda()
    inputs = classifier.normalize(images)
    jobs: dict[str, Callable[[], object]] = {
        "areas by sufficit": ours_job(classifier, images, maps, PERCENT),
        "eleven by sufficit": ours_job(classifier, images, maps, COLUMNS),
        "eleven by sufficit, one call a column": one_by_one(classifier, images, maps),
        "eleven in a plain loop": plain_loop(classifier, images, maps),
    }
    if "torchcam" in installed:
        jobs["areas by torchcam"] = torchcam_job(classifier.model, inputs, maps, 256)
    if "quantus" in installed:
        # quantus feeds float32 arrays, so it gets the float32 model, half of its two areas.
        model = models.resnet50().cuda().eval()
        jobs["deletion by quantus, fp32"] = quantus_job(model, images, maps, 256)
        single = ours_job(Classifier(model), images, maps, ("deletion_percent",))
        jobs["deletion by sufficit, fp32"] = single
    seconds = medians(side_by_side(jobs, "cuda", rounds))
    return {"images": n, "pixels": side, "seconds": seconds}


def peak_memory(device: str) -> dict[str, float]:
    """(d) Peak memory in MiB with 100 and with 1,000 bands, each in a process of its own."""
    return {
        str(bands): float(
            subprocess.run(
                [sys.executable, __file__, "--device", device, "--peak", str(bands)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()[-1]
        )
        for bands in (100, 1000)
    }


def measure_peak(device: str, bands: int) -> None:
    classifier = Classifier(Nothing().to(device))
    images, maps = torch.rand(8, 3, 224, 224).to(device), torch.rand(8, 224, 224).to(device)
    columns = ("insertion_pixel",)
    # The first run pays for libraries and the allocator's pools.
    evaluate(classifier, images, maps, columns=columns, value_step=0.1, progress=False)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    evaluate(classifier, images, maps, columns=columns, value_step=1 / bands, progress=False)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else kib / 2**10)


def show(results: dict[str, object]) -> None:
    print(json.dumps(results, indent=2, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--skip-model", action="store_true", help="leave part (a) out")
    arguments = parser.parse_args()
    if arguments.peak:
        measure_peak(arguments.device, arguments.peak)
        return
    warnings.simplefilter("ignore")
    installed = peers()
    results: dict[str, object] = {
        **provenance(vars(arguments), torch.device(arguments.device), torch.float32),
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
    }
    if not arguments.skip_model:
        results["a_against_bare"] = against_bare(arguments.device, arguments.rounds)
        show(results)
        gc.collect()
    if arguments.device == "cpu":
        results["b_overhead"] = overhead(arguments.rounds, installed)
    else:
        results["c_against_peers"] = against_peers(arguments.rounds, installed)
    results["d_peak_mib"] = peak_memory(arguments.device)
    show(results)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
