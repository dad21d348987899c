"""What LAX costs: a training step and an explanation, beside the bare work of the classifier.

python benchmarks/lax.py --device cuda --dtype bf16 --out benchmarks/results/lax-h200.json
python benchmarks/lax.py                 # small sizes, on the CPU
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import resnet18, resnet50

from sufficit import Classifier, Lax, explain, train_lax
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from sufficit.training import RECIPES, TrainingBatch, take_step
from sufficit.training.lax_training import untrained
from timing import medians, side_by_side


def stride8() -> torch.nn.Module:
    model = resnet18(num_classes=10)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()
    return model


MODELS = {
    "resnet18-stride8-64px": (stride8, 64),
    "resnet50-224px": (partial(resnet50, num_classes=100), 224),
}


def new_adapter(classifier: Classifier, images: Tensor, name: str) -> Lax:
    """The adapter of a recipe, as it is before training."""
    recipe = RECIPES[name]
    layers = classifier.stage_layers(images, recipe.stages)
    return untrained(classifier, images, recipe, layers, None, 0).to(images.device)


def repeats(classifier: Classifier, images: Tensor) -> dict[str, float]:
    """Whether two trainings give the same adapter, and what that costs: two epochs of 20 steps."""
    labels = torch.arange(len(images), device=images.device) % 10
    loader = [(images.roll(k, 0), labels.roll(k)) for k in range(20)]
    found: dict[str, float] = {}
    for exact in (False, True):
        adapters, seconds = [], []
        for _ in range(3):
            start = time.perf_counter()
            options = {"epochs": 2, "validation_images": 32, "deterministic": exact}
            adapters.append(train_lax(classifier, loader, progress=False, **options))
            seconds.append(time.perf_counter() - start)
        weights = [torch.cat([w.flatten() for w in one.state_dict().values()]) for one in adapters]
        word = "deterministic" if exact else "usual"
        found[f"{word}: same adapter twice"] = float(torch.equal(weights[1], weights[2]))
        found[f"seconds, {word} training"] = min(seconds)
    cost = found["seconds, deterministic training"] / found["seconds, usual training"]
    return found | {"deterministic / usual training": cost}


def step_jobs(classifier: Classifier, images: Tensor, name: str) -> dict[str, Callable[[], None]]:
    """A training step, the same with the features known, and the bare work of each."""
    recipe, lax = RECIPES[name], new_adapter(classifier, images, name)
    targets = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def features() -> TrainingBatch:
        with torch.no_grad():
            stages, logits = classifier.stages(images, lax.layers)
        return TrainingBatch(images, targets, stages, logits.topk(2, dim=1).indices)

    known = features()
    optimizer = torch.optim.Adam(lax.parameters(), lr=1e-5)
    generator = torch.Generator(images.device).manual_seed(0)
    views = 1 + bool(recipe.drop) + bool(recipe.donors)
    inputs = classifier.normalize(images).repeat(views, 1, 1, 1).requires_grad_()

    def masked() -> None:
        logits = classifier.logits_of(inputs).float()
        torch.autograd.grad(logits.logsumexp(1).sum(), inputs)

    def step(batch: TrainingBatch) -> None:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            found = take_step(classifier, lax, batch, recipe, generator, classes=lax.classes)
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
    lax = new_adapter(classifier, images, "crisp")

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
    name: str, device: str, dtype: torch.dtype, batch: int, batches: int, rounds: int, twice: bool
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
        usual = usual_batch(classifier, images.shape[1:])
    jobs = explain_jobs(classifier, torch.rand(usual, 3, side, side, device=device), batches)
    for recipe in ("paper", "crisp"):
        jobs |= step_jobs(classifier, images, recipe)
    with classifier.in_eval_mode():
        seconds = medians(side_by_side(jobs, device, rounds))
    repeated = repeats(classifier, images[:64]) if twice else {}
    ratios = {
        "images explained": float(usual),
        "explain / forward": seconds["explain"] / seconds["forward"],
        f"explain / forward, {batches} batches": seconds["explain all"] / seconds["forward of all"],
    }
    for recipe in ("paper", "crisp"):
        bare = seconds[f"{recipe}: bare"]
        for kind in ("step", "step, features known"):
            ratios[f"{recipe}: {kind} / bare"] = seconds[f"{recipe}: {kind}"] / bare
    ratios |= repeated
    return ratios | {f"seconds, {job}": value for job, value in seconds.items()}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    words.add_argument("--batch", type=int, default=None)
    words.add_argument("--batches", type=int, default=2, help="explained in one call")
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--models", default="resnet18-stride8-64px")
    words.add_argument("--no-repeats", action="store_true", help="trains no adapters")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    dtype = torch.bfloat16 if asked.dtype == "bf16" else torch.float32
    batch = asked.batch or (256 if asked.device == "cuda" else 8)
    found = {}
    for name in asked.models.split(","):
        sizes = (batch, asked.batches, asked.rounds)
        found[name] = measure(name, asked.device, dtype, *sizes, not asked.no_repeats)
        for what, value in found[name].items():
            if "/" in what or "twice" in what:
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
