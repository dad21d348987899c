"""Our methods beside those of captum and zennit: time, peak memory and difference of the maps.

    PYTHONPATH=src:LIBRARIES python benchmarks/methods.py --device cuda --out methods-h200.json
    PYTHONPATH=src python benchmarks/methods.py --images 2 --side 64 --steps 4    # on a CPU

LIBRARIES is a folder with the packages `captum` and `zennit`, where they are not installed. Both
sides go through `explain` on the same classifier, images and targets, with options that make them
the same work: as many steps, samples or masks. Networks have random weights. The two take turns;
ratios are theirs over ours, so above 1 ours is faster or more frugal. Peak memory includes the
weights. Random methods draw other numbers than ours, so their maps differ more, and occlusion of
captum reads the logit where ours reads the confidence.

128 images are as many as `explain` gives to a backward pass on a GPU at 224 px: both sides then
work in batches of the same size.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from explain import settle
from sufficit import Classifier, explain
from sufficit.explainers import libraries
from sufficit.explainers.explainer import Explainer
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from sufficit.seeds import seeded
from timing import Job, side_by_side

AIM = 1.1  # theirs may be so much slower or larger and still replace ours
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
NOISE = 0.15  # of SmoothGrad, as a share of the range of an image
BOTH = ("resnet50", "vit_tiny")
CNN = ("resnet50",)
TRANSFORMER = ("vit_tiny",)


@dataclass(frozen=True)
class Pair:
    """Two methods that do the same work."""

    ours: str
    theirs: str | Explainer
    networks: tuple[str, ...] = BOTH
    random: bool = False  # they draw other random numbers
    most: int | None = None  # images; None: all

    @property
    def their_name(self) -> str:
        return self.theirs if isinstance(self.theirs, str) else self.theirs.description


def pairs(asked: argparse.Namespace, batch: int) -> list[Pair]:
    """Return every method that both sides have; `batch` is what `explain` would choose."""
    steps = asked.steps
    cells = asked.cells
    masks = asked.masks
    few = min(64, asked.images)
    # Theirs show so many masks of every image at a time: the batches of the two are about equal.
    shown = max(1, batch // few)
    return [
        Pair("gradcam", "captum:LayerGradCam", CNN),
        Pair("hirescam", "captum:LayerGradientXActivation"),
        Pair("lrp", "zennit:EpsilonGammaBox:gamma=0.25", CNN),
        Pair("input-x-gradient", "captum:InputXGradient"),
        Pair(
            f"integrated-gradients:steps={steps}",
            f"captum:IntegratedGradients:n_steps={steps}:method=riemann_middle",
        ),
        Pair(
            f"expected-gradients:samples={steps}",
            f"captum:GradientShap:n_samples={steps}",
            random=True,
        ),
        Pair(
            f"smoothgrad:samples={steps}:noise={NOISE}",
            noise_tunnel(steps, batch),
            random=True,
        ),
        Pair(
            f"smoothgrad:samples={steps}:noise={NOISE}",
            noise_tunnel(steps, batch, alone=True),
            random=True,
        ),
        Pair(
            f"occlusion:grid={cells}",
            f"captum:Occlusion:grid={cells}:perturbations_per_eval={shown}",
            most=few,
        ),
        Pair(
            f"kernel-shap:samples={masks}",
            # Its bridge takes one image at a time, so that draws do not depend on the batch.
            f"captum:KernelShap:n_samples={masks + 2}:perturbations_per_eval={batch}",
            random=True,
            most=16,  # theirs builds its masks one by one
        ),
    ]


def noise_tunnel(samples: int, batch: int, *, alone: bool = False) -> Explainer:
    """captum's SmoothGrad as a method: it wraps another attribution, which no word can name.

    Its noise depends on the other images of a batch. Ours does not, and a run needs that: `alone`
    takes one image at a time, with the seed set before each.
    """

    def draw(
        classifier: Classifier, images: Tensor, targets: Tensor, *, seed: int, **_: Any
    ) -> Tensor:
        size = 1 if alone else len(images)
        parts = zip(images.split(size), targets.split(size), strict=True)
        return torch.cat([attributed(classifier, *part, seed) for part in parts])

    def attributed(classifier: Classifier, images: Tensor, targets: Tensor, seed: int) -> Tensor:
        from captum.attr import NoiseTunnel, Saliency

        gradient = Saliency(lambda inputs: classifier(inputs).float())
        together = max(1, batch // 4 // len(images))  # a backward pass needs more memory
        with torch.enable_grad(), classifier.in_eval_mode(), seeded(seed):
            found: Tensor = NoiseTunnel(gradient).attribute(
                images.detach().clone(),
                nt_type="smoothgrad",
                nt_samples=samples,
                nt_samples_batch_size=min(samples, together),
                stdevs=NOISE,
                target=targets,
                abs=False,
            )
        return found.sum(1)

    how = ", image by image" if alone else ""
    return Explainer(f"captum NoiseTunnel(Saliency){how}", "model", draw, sign="absolute")


def network(name: str, images: Tensor) -> nn.Module:
    """A network with random weights and, for batch norms, statistics of the images."""
    torch.manual_seed(0)
    if name == "resnet50":
        return settle(models.resnet50(), images[:8])
    sizes = {"num_layers": 12, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
    model = models.VisionTransformer(image_size=images.shape[-1], patch_size=16, **sizes)
    nn.init.normal_(model.heads[-1].weight, std=0.1)  # torchvision starts it at zero
    return model.eval()


def smooth_images(n: int, side: int) -> Tensor:
    """Smooth coloured noise: [N,3,H,W] in 0..1."""
    coarse = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)


def peak_of(job: Callable[[], Tensor], device: str) -> tuple[Tensor, float, float]:
    """Return what a job returns, its peak GPU memory in MiB (0 on a CPU), and its seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    maps = job()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return maps, peak, seconds


def spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def measure(
    pair: Pair, classifier: Classifier, images: Tensor, asked: argparse.Namespace
) -> dict[str, Any]:
    """Time and memory of both, in turns."""
    images = images[: pair.most]
    with torch.no_grad():
        targets = classifier(images).argmax(1)

    def job(method: Any) -> Callable[[], Tensor]:
        return lambda: explain(classifier, images, targets, method=method, progress=False)

    for method in (pair.ours, pair.theirs):  # modules are imported at the first call
        explain(classifier, images[:2], targets[:2], method=method, progress=False)
    jobs: dict[str, Job] = {"ours": job(pair.ours), "theirs": job(pair.theirs)}
    firsts = {name: peak_of(one, asked.device) for name, one in jobs.items()}
    (our_maps, our_peak, our_seconds), (their_maps, their_peak, their_seconds) = firsts.values()
    # Slow pairs get fewer rounds, so that the whole stays within its time.
    affordable = int(asked.seconds / (our_seconds + their_seconds)) - 1
    rounds = max(2, min(asked.rounds, affordable))
    seconds = side_by_side(jobs, asked.device, rounds)
    times = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    apart = (our_maps - their_maps).abs().flatten(1)
    alike = torch.stack([correlation(a, b) for a, b in zip(our_maps, their_maps, strict=True)])
    time_ratio = spread(times)
    memory_ratio = their_peak / our_peak if our_peak else None
    return {
        "ours": pair.ours,
        "theirs": pair.their_name,
        "random": pair.random,
        "rounds": rounds,
        "seconds": seconds,
        "time_ratio": time_ratio,
        "peak_mib": {"ours": our_peak, "theirs": their_peak},
        "memory_ratio": memory_ratio,
        "largest_difference": float(apart.max()),
        "mean_difference": float(apart.mean()),
        "correlation": float(alike.mean()),
        "theirs_may_replace_ours": time_ratio["median"] <= AIM and (memory_ratio or 1.0) <= AIM,
    }


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Pearson's correlation of two maps."""
    return torch.corrcoef(torch.stack([one.flatten().float(), other.flatten().float()]))[0, 1]


def line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"| {found['ours']} | {found['theirs']} | {found['error']} | | | | | |"
    times = found["time_ratio"]
    ours, theirs = (1000 * statistics.median(found["seconds"][one]) for one in ("ours", "theirs"))
    memory = "-" if found["memory_ratio"] is None else f"{found['memory_ratio']:.2f}"
    verdict = "theirs may replace ours" if found["theirs_may_replace_ours"] else "ours stays"
    return (
        f"| {found['ours']} | {found['theirs']} | {ours:.1f} / {theirs:.1f} |"
        f" {times['median']:.2f} ({times['lowest']:.2f} to {times['highest']:.2f}) | {memory} |"
        f" {found['largest_difference']:.3g}{' (random)' if found['random'] else ''} |"
        f" {found['correlation']:.4f} | {verdict} |"
    )


def version_of(library: str) -> str:
    """Return the version of a library, also of a bare folder without its metadata."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "of unknown version"


def measure_all(asked: argparse.Namespace, started: float) -> list[dict[str, Any]]:
    libraries.version = version_of  # type: ignore[attr-defined]
    images = smooth_images(asked.images, asked.side)
    found: list[dict[str, Any]] = []
    head = "| ours | theirs | ms of both | time, theirs / ours | peak memory, theirs / ours |"
    for name in BOTH:
        classifier = Classifier(network(name, images), **IMAGENET)
        classifier.to(asked.device, torch.bfloat16 if asked.device == "cuda" else None)
        here = images.to(asked.device)
        batch = usual_batch(classifier, images.shape[1:])
        print(
            f"\n{name}, {len(images)} images of {asked.side} px, {classifier.dtype}\n\n{head}",
            end="",
        )
        print(" largest difference | correlation | |\n|---|---|---|---|---|---|---|---|")
        for pair in pairs(asked, batch):
            if name not in pair.networks:
                continue
            if time.perf_counter() - started > asked.most:
                facts = {"ours": pair.ours, "theirs": pair.their_name, "error": "no time left"}
                found.append({"network": name} | facts)
                continue
            try:
                facts = measure(pair, classifier, here, asked)
            except Exception as error:  # the others are still worth their time
                facts = {"ours": pair.ours, "theirs": pair.their_name, "error": str(error)[:300]}
            print(line(facts), flush=True)
            found.append({"network": name, "batch": batch} | facts)
            write(asked, found)
    return found


def write(asked: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Write what is known so far."""
    if asked.out is None:
        return
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    facts = provenance({"argv": sys.argv[1:]}, torch.device(asked.device), dtype)
    versions = {library: version_of(library) for library in ("captum", "zennit")}
    everything = facts | {"libraries": versions, "aim": AIM, "results": found}
    asked.out.write_text(json.dumps(everything, indent=2) + "\n")


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    words.add_argument("--images", type=int, default=128)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--steps", type=int, default=16, help="of the methods by gradients")
    words.add_argument("--cells", type=int, default=14, help="per side, for occlusion")
    words.add_argument("--masks", type=int, default=128, help="of kernel-shap")
    words.add_argument("--rounds", type=int, default=7, help="at most")
    words.add_argument("--seconds", type=float, default=2.5, help="for the rounds of one pair")
    words.add_argument("--most", type=float, default=80.0, help="seconds, then no further pair")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    measure_all(asked, started)
    print(f"\nspent {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
