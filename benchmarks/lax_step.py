"""What a step of training an order takes, beside the bare work of its network.

python benchmarks/lax_step.py --device cuda --out benchmarks/results/lax-step-h200.json
python benchmarks/lax_step.py                 # small sizes, on the CPU

The bare work is what no step can do without: a forward pass over the photographs, then one forward
and back to the pixels over twice as many. `plain` asks the network as it is (under autocast on a
GPU), `frozen` a copy with batch norms folded, in bfloat16 on a GPU, `compiled` that copy compiled.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import Tensor

from profiling import print_profile, profiled
from sufficit import Classifier, Lax
from sufficit.provenance import provenance
from sufficit.training import RECIPES, OrderRecipe
from sufficit.training.frozen_copy import frozen_copy
from sufficit.training.lax_training import untrained_order
from sufficit.training.order_step import (
    at_image_size,
    mask_of_size,
    order_step,
    precision_of,
    random_sizes,
    random_views,
)
from sufficit.training.recipes import mixed_fills
from timing import medians, side_by_side

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def network(name: str) -> torch.nn.Module:
    """A network of random weights, small where it adds: its values stay as in a trained one."""
    if name == "deit_tiny":
        made = torchvision.models.VisionTransformer(
            image_size=224, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768
        )
        torch.nn.init.normal_(made.heads.head.weight, std=0.1)
        return made
    made = torchvision.models.get_model(name)
    for module in made.modules():
        if isinstance(module, torchvision.models.resnet.Bottleneck):
            torch.nn.init.constant_(module.bn3.weight, 0.2)
    return made


class Steps:
    """The steps of a training, and its parts, on one batch."""

    def __init__(self, classifier: Classifier, asked: Classifier, lax: Lax, images: Tensor) -> None:
        self.classifier, self.asked, self.lax, self.images = classifier, asked, lax, images
        recipe = RECIPES["robust"]
        assert isinstance(recipe, OrderRecipe)
        self.recipe = recipe
        self.device = images.device.type
        self.generator = torch.Generator(images.device).manual_seed(0)
        self.optimizer = torch.optim.AdamW(lax.parameters(), 1e-4)
        with self.autocast(), torch.no_grad(), precision_of(asked):
            assert lax.head is not None
            seen = lax.look(asked, images)
            self.features, self.evidence = lax.head.read(seen, lax.layers, seen.logits.argmax(1))
        self.cells = lax(self.features, self.evidence).detach()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def step(self) -> None:
        with self.autocast():
            found = order_step(
                self.asked,
                self.lax,
                self.lax,
                self.images,
                None,
                self.recipe,
                self.generator,
                done=0.5,
                flips=True,
            )
        self.optimizer.zero_grad()
        found["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.lax.parameters(), 1.0, error_if_nonfinite=False)
        self.optimizer.step()

    def bare(self) -> None:
        both = torch.cat([self.images, self.images])
        with self.autocast(), precision_of(self.asked):
            with torch.no_grad():
                self.asked.logits_of(self.asked.normalize(self.images))
            inputs = self.asked.normalize(both).requires_grad_()
            torch.autograd.grad(self.asked.logits_of(inputs).float().sum(), inputs)

    def look(self) -> None:
        with self.autocast(), precision_of(self.asked):
            self.lax.look(self.asked, self.images)

    def read(self) -> None:
        assert self.lax.head is not None
        with self.autocast(), precision_of(self.asked):
            seen = self.lax.look(self.asked, self.images)
            self.lax.head.read(seen, self.lax.layers, seen.logits.argmax(1))

    def net(self) -> None:
        with self.autocast():
            self.lax(self.features, self.evidence).square().mean().backward()

    def views(self) -> None:
        random_views(self.images, self.recipe.crops, self.recipe.flips, self.generator)

    def fills(self) -> None:
        mixed_fills(self.images, self.recipe.fills, self.generator)

    def masks(self) -> None:
        cells = self.cells.clone().requires_grad_()
        sizes = random_sizes(len(cells), self.recipe.sizes, self.generator)
        mask_of_size(at_image_size(cells, self.images), sizes, 0.2).sum().backward()

    def mixed(self) -> None:
        mask = torch.rand_like(self.images[:, :1]).requires_grad_()
        regions = torch.lerp(self.images.flip(0), self.images, mask)
        rests = torch.lerp(self.images, self.images.flip(0), mask)
        self.asked.normalize(torch.cat([regions, rests])).float().sum().backward()


def kernel_ms(job: Callable[[], object]) -> float:
    """Milliseconds that the GPU is busy with a job, whatever Python takes."""
    for _ in range(3):
        job()
    found = profiled(lambda: [job() for _ in range(5)], top=1)
    return 1000 * found["seconds"] * found["gpu_busy"] / 5


def measured(name: str, device: str, side: int, batch: int, rounds: int, compiled: bool) -> dict:
    """The median milliseconds of steps and parts, and the ratio of a step to its bare work."""
    torch.manual_seed(0)
    classifier = Classifier(network(name).eval().requires_grad_(False), mean=MEAN, std=STD)
    classifier.to(torch.device(device))
    if device == "cuda":
        classifier.to(memory_format=torch.channels_last)
    images = torch.rand(batch, 3, side, side, device=device)
    recipe = RECIPES["robust"]
    assert isinstance(recipe, OrderRecipe)
    lax = untrained_order(classifier, images, recipe, None, 0).to(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    begun = time.perf_counter()
    frozen = frozen_copy(classifier, images[:4], lax.reads, dtype)
    kinds = {"plain": classifier, "frozen": frozen}
    found: dict = {"copied_s": time.perf_counter() - begun}
    if compiled:
        begun = time.perf_counter()
        kinds["compiled"] = frozen.over(torch.compile(frozen.model, dynamic=False))
        Steps(classifier, kinds["compiled"], lax, images).step()
        found["compiled_s"] = time.perf_counter() - begun
    jobs: dict[str, Callable[[], object]] = {}
    for kind, asked in kinds.items():
        steps = Steps(classifier, asked, lax, images)
        jobs |= {f"{kind} step": steps.step, f"{kind} bare": steps.bare}
    last = Steps(classifier, frozen, lax, images)
    parts = ("look", "read", "net", "views", "fills", "masks", "mixed")
    found["folded"] = frozen is not classifier
    if device == "cuda":
        found["gpu_ms"] = {
            name: kernel_ms(getattr(last, name)) for name in ("step", "bare", *parts)
        }
    for part in parts:
        jobs[f"part {part}"] = getattr(last, part)
    found["ms"] = {k: 1000 * v for k, v in medians(side_by_side(jobs, device, rounds)).items()}
    found["step_over_bare"] = {
        kind: found["ms"][f"{kind} step"] / found["ms"][f"{kind} bare"] for kind in kinds
    }
    print(name, json.dumps(found, indent=1), flush=True)
    return found


def profile(name: str, device: str, side: int, batch: int) -> dict:
    """Kernels and operators of ten steps with the frozen copy."""
    torch.manual_seed(0)
    classifier = Classifier(network(name).eval().requires_grad_(False), mean=MEAN, std=STD)
    classifier.to(torch.device(device))
    if device == "cuda":
        classifier.to(memory_format=torch.channels_last)
    images = torch.rand(batch, 3, side, side, device=device)
    recipe = RECIPES["robust"]
    assert isinstance(recipe, OrderRecipe)
    lax = untrained_order(classifier, images, recipe, None, 0).to(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    steps = Steps(classifier, frozen_copy(classifier, images[:4], lax.reads, dtype), lax, images)
    for _ in range(3):
        steps.step()
    found = profiled(lambda: [steps.step() for _ in range(10)], top=40)
    print_profile(found)
    return found


def main() -> None:
    """Measure and print; `--profile` shows where the time of a step goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", default=["resnet50", "mobilenet_v2", "deit_tiny"])
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batch = args.batch or (192 if args.device == "cuda" else 4)
    config = {**vars(args), "out": str(args.out), "batch": batch}
    rows: dict = {"made": provenance(config, torch.device(args.device), torch.float32)}
    for name in args.networks:
        rows[name] = measured(name, args.device, args.side, batch, args.rounds, args.compile)
        if args.profile:
            rows[name]["profile"] = profile(name, args.device, args.side, batch)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
