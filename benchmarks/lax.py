"""What LAX costs: a training step and an explanation, beside the bare work of the classifier.

python benchmarks/lax.py --device cuda --dtype bf16 --out benchmarks/results/lax-h200.json
python benchmarks/lax.py                 # small sizes, on the CPU
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import resnet18, resnet50

from sufficit import Classifier, Lax, explain
from sufficit.explainers.explanation import usual_batch
from sufficit.explainers.recipes import RECIPES
from sufficit.explainers.step import Batch, take_step
from sufficit.provenance import provenance
from timing import medians, side_by_side


def stride8() -> torch.nn.Module:
    model = resnet18(num_classes=10)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()
    return model


MODELS = {"resnet18-stride8-64px": (stride8, 64), "resnet50-224px": (resnet50, 224)}


def step_jobs(classifier: Classifier, images: Tensor, name: str) -> dict[str, Callable[[], None]]:
    """A training step, the same with the features known, and the bare work of each."""
    recipe = RECIPES[name]
    targets = torch.zeros(len(images), dtype=torch.long, device=images.device)
    with torch.no_grad():
        known = classifier.features(images)[0]
    lax = Lax(known.shape[1], upsample=recipe.upsample).to(images.device)
    optimizer = torch.optim.Adam(lax.parameters(), lr=1e-5)
    generator = torch.Generator(images.device).manual_seed(0)
    views = 1 + bool(recipe.drop) + bool(recipe.donors)
    inputs = classifier.normalize(images).repeat(views, 1, 1, 1).requires_grad_()

    def features() -> Tensor:
        with torch.no_grad():
            return classifier.features(images)[0]

    def masked() -> None:
        logits = classifier.logits_of(inputs).float()
        torch.autograd.grad(logits.logsumexp(1).sum(), inputs)

    def step(given: Tensor) -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            found = take_step(classifier, lax, Batch(images, targets, given), recipe, generator)
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()

    def bare() -> None:
        features()
        masked()

    return {
        f"{name}: bare": bare,
        f"{name}: step": lambda: step(features()),
        f"{name}: step, features known": lambda: step(known),
    }


def explain_jobs(
    classifier: Classifier, images: Tensor, batches: int
) -> dict[str, Callable[[], None]]:
    """The classifier's own forward pass, and an explanation: of a batch, and of several at once."""
    with torch.no_grad():
        channels = classifier.features(images[:2])[0].shape[1]
    lax = Lax(channels, upsample=RECIPES["robust"].upsample).to(images.device)
    lax.belong_to(classifier, str(classifier.layer))

    size, many = len(images), images.repeat(batches, 1, 1, 1)

    def forward(given: Tensor) -> None:
        with torch.no_grad():
            for part in given.split(size):
                classifier(part)

    return {
        "forward": lambda: forward(images),
        "explain": lambda: explain(classifier, images, method=lax, batch_size=size),
        "forward of all": lambda: forward(many),
        "explain all": lambda: explain(classifier, many, method=lax, batch_size=size),
    }


def measure(
    name: str, device: str, dtype: torch.dtype, batch: int, batches: int, rounds: int
) -> dict[str, float]:
    build, side = MODELS[name]
    torch.manual_seed(0)
    classifier = Classifier(build().eval(), layer="layer4", mean=(0.5,) * 3, std=(0.25,) * 3)
    classifier.to(device, dtype, torch.channels_last if device == "cuda" else None)
    for parameter in classifier.model.parameters():
        parameter.requires_grad_(False)
    images = torch.rand(batch, 3, side, side, device=device)
    usual = batch  # on a CPU; on a GPU as many as explain takes by itself
    if device == "cuda":
        usual = usual_batch(images, classifier.device)
    jobs = explain_jobs(classifier, torch.rand(usual, 3, side, side, device=device), batches)
    for recipe in ("paper", "robust"):
        jobs |= step_jobs(classifier, images, recipe)
    with classifier.in_eval_mode():
        seconds = medians(side_by_side(jobs, device, rounds))
    ratios = {
        "images explained": float(usual),
        "explain / forward": seconds["explain"] / seconds["forward"],
        f"explain / forward, {batches} batches": seconds["explain all"] / seconds["forward of all"],
    }
    for recipe in ("paper", "robust"):
        bare = seconds[f"{recipe}: bare"]
        for kind in ("step", "step, features known"):
            ratios[f"{recipe}: {kind} / bare"] = seconds[f"{recipe}: {kind}"] / bare
    return ratios | {f"seconds, {job}": value for job, value in seconds.items()}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    words.add_argument("--batch", type=int, default=None)
    words.add_argument("--batches", type=int, default=2, help="explained in one call")
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--models", default="resnet18-stride8-64px")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    dtype = torch.bfloat16 if asked.dtype == "bf16" else torch.float32
    batch = asked.batch or (256 if asked.device == "cuda" else 8)
    found = {}
    for name in asked.models.split(","):
        found[name] = measure(name, asked.device, dtype, batch, asked.batches, asked.rounds)
        for what, value in found[name].items():
            if "/" in what:
                print(f"{name}, batch {batch}: {what} = {value:.3f}")
    if asked.out:
        config = {
            "batch": batch,
            "batches": asked.batches,
            "rounds": asked.rounds,
            "argv": sys.argv[1:],
        }
        facts = provenance(config, torch.device(asked.device), dtype)
        asked.out.write_text(json.dumps(facts | {"results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
