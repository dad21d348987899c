"""What all five CAMs cost beside one bare forward and backward, and beside grad-cam, in one run.

    python benchmarks/explain.py --device cpu --batch 16
    python benchmarks/explain.py --device cuda --out results.json

The jobs take turns and their medians are compared: the ratios mean something where other work runs
on the same machine, the seconds only where none does.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision import models

from sufficit import Classifier
from sufficit.explainers import CAMS, explain_all
from sufficit.provenance import provenance
from timing import Job, medians, side_by_side

GOAL = 1.3
VITS = {"deit_tiny": {"num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}}


def make_model(name: str) -> nn.Module:
    """A torchvision model, or a DeiT-tiny, with random weights and batch statistics of its own."""
    torch.manual_seed(0)
    if name in VITS:
        model = models.VisionTransformer(image_size=224, patch_size=16, num_layers=12, **VITS[name])
        nn.init.normal_(model.heads.head.weight, std=0.1)  # torchvision starts it at zero
        return model
    return models.get_model(name, weights=None)


def settle(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Batch statistics of the inputs, without which deep random models shrink them to nothing."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(inputs)
    return model.eval()


def bare(model: nn.Module, layer: str, inputs: Tensor, targets: Tensor) -> Job:
    """The least that any of them needs: one forward, and one backward to the layer."""
    rows = torch.arange(len(inputs), device=inputs.device)

    def work() -> Tensor:
        leaves = []

        def cut(_: nn.Module, __: object, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            torch.set_grad_enabled(True)
            return leaves[0]

        handle = model.get_submodule(layer).register_forward_hook(cut)
        with torch.no_grad():
            logits = model(inputs)
        handle.remove()
        with torch.enable_grad():
            score = logits[rows, targets].sum()
        return torch.autograd.grad(score, leaves[0])[0]

    return work


def grad_cam_package(model: nn.Module, layer: str, inputs: Tensor) -> dict[str, Job]:
    """Each CAM by grad-cam, of the model's own prediction; nothing where it is not installed."""
    try:
        import pytorch_grad_cam as peer
    except ImportError as error:
        print(f"grad-cam left out: {error}")
        return {}
    kinds = (peer.GradCAM, peer.GradCAMPlusPlus, peer.LayerCAM, peer.KPCA_CAM, peer.FinerCAM)
    tokens = isinstance(model, models.VisionTransformer)

    def reshape(output: Tensor) -> Tensor:
        side = round((output.shape[1] - 1) ** 0.5)
        return output[:, 1:].mT.reshape(len(output), -1, side, side)

    def one(kind: Callable[..., Callable[..., object]]) -> Job:
        cam = kind(model, [model.get_submodule(layer)], reshape if tokens else None)
        return lambda: cam(inputs, None)

    return {name: one(kind) for name, kind in zip(CAMS, kinds, strict=True)}


def farthest(ours: dict[str, Tensor], peers: dict[str, Job]) -> dict[str, float]:
    """The largest difference between our heatmaps and grad-cam's, method by method."""
    theirs = {name: torch.as_tensor(job()) for name, job in peers.items()}
    return {name: float((ours[name].cpu() - maps).abs().max()) for name, maps in theirs.items()}


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    device = arguments.device
    images = torch.rand(arguments.batch, 3, arguments.size, arguments.size)
    classifier = Classifier(settle(make_model(arguments.model), images[:8]).to(device))
    images = images.to(device)
    with torch.no_grad():
        targets = classifier(images).argmax(1)
    layer = classifier.feature_layer(images)
    peers = grad_cam_package(classifier.model, layer, images)

    def ours(methods: tuple[str, ...]) -> Job:
        size = arguments.batch
        return lambda: explain_all(classifier, images, targets, methods, batch_size=size)

    jobs: dict[str, Job] = {
        "bare forward and backward": bare(classifier.model, layer, images, targets),
        "sufficit, five CAMs": ours(CAMS),
        **{f"sufficit, {name} alone": ours((name,)) for name in CAMS},
    }
    if peers:
        jobs["grad-cam, five CAMs"] = lambda: [job() for job in peers.values()]
    times = side_by_side(jobs, device, arguments.rounds)
    typical = medians(times)
    base = typical["bare forward and backward"]
    return {
        **provenance(vars(arguments), classifier.device, classifier.dtype),
        "threads": torch.get_num_threads(),
        "model": arguments.model,
        "layer": layer,
        "batch": arguments.batch,
        "pixels": arguments.size,
        "rounds": arguments.rounds,
        "seed": 0,
        "seconds": times,
        "median_seconds": typical,
        "over_bare": {name: value / base for name, value in typical.items()},
        "farthest_from_grad_cam": farthest(explain_all(classifier, images, targets), peers),
    }


def show(found: dict[str, object]) -> None:
    what = f"{found['batch']} images of {found['pixels']} px"
    print(f"{found['model']} on {found['device']['name']}, {what}\n")
    print("| job | median ms | fastest ms | median over bare |\n|---|---|---|---|")
    ratios = found["over_bare"]
    for name, times in found["seconds"].items():
        median, fastest = 1000 * found["median_seconds"][name], 1000 * min(times)
        print(f"| {name} | {median:.1f} | {fastest:.1f} | {ratios[name]:.2f} |")
    five = ratios["sufficit, five CAMs"]
    print(f"\nfive CAMs over bare: {five:.2f} (goal {GOAL}: {'met' if five <= GOAL else 'missed'})")
    if "grad-cam, five CAMs" in ratios:
        print(f"grad-cam over sufficit: {ratios['grad-cam, five CAMs'] / five:.1f} times the time")
        print(f"farthest from grad-cam: {found['farthest_from_grad_cam']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="a torchvision name, or deit_tiny")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    arguments = parser.parse_args()
    arguments.model = arguments.model or ("resnet50" if arguments.device == "cuda" else "resnet18")
    warnings.simplefilter("ignore")
    found = measure(arguments)
    show(found)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
