"""What a forward pass of masked images gains: masks made inside the compiled model, another stem.

    PYTHONPATH=src python benchmarks/stem.py --device cuda --out benchmarks/results/stem-h200.json
    PYTHONPATH=src python benchmarks/stem.py --batch 8 --side 32 --model resnet18 --batches 1

All variants answer the same masks of the same images and take turns: the masks made before the
model, as today, or in its graph; the first convolution as it is, or over blocks of 2 x 2 pixels as
channels. `largest_difference` is that of the logits to today's, relative to their largest.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compiled import classifier_of
from sufficit import Classifier
from sufficit.classifier.acceleration import _folded
from sufficit.perturbation.fills import Masker
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from timing import medians, side_by_side

EACH = 24  # masks per image


class BlockStem(nn.Module):
    """A convolution of stride 2 as one of stride 1 over blocks of 2 x 2 pixels as channels."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        size, pad = conv.kernel_size[0], conv.padding[0]
        before = -(-pad // 2)  # blocks
        first = 2 * before - pad  # places of the kernel before its first weight
        blocks = -(-(first + size) // 2)
        after = blocks - 1 - before
        self.pads = (before, after, before, after)
        weight = F.pad(conv.weight.data, (first, 2 * blocks - first - size) * 2)
        weight = F.pixel_unshuffle(weight, 2)  # as the images: [K,4C,blocks,blocks]
        self.more = -weight.shape[1] % 8
        self.weight = nn.Parameter(F.pad(weight, (0, 0, 0, 0, 0, self.more)), requires_grad=False)
        self.bias = conv.bias

    def forward(self, images: Tensor) -> Tensor:
        """Return what the convolution does: [N,C,H,W] -> [N,K,H/2,W/2]."""
        blocks = F.pad(F.pixel_unshuffle(images, 2), (*self.pads, 0, self.more))
        blocks = blocks.contiguous(memory_format=torch.channels_last)
        return F.conv2d(blocks, self.weight, self.bias)


class Masking(nn.Module):
    """A model that makes its masked inputs itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: Tensor, hidden: Tensor, ranks: Tensor, owners: Tensor, runs: Tensor
    ) -> Any:
        """Logits of the masks: [U,C,H,W], [1,C,H,W], [U,H,W], [N], [2,N] -> [N,C]."""
        places = ranks[owners]
        first, last = runs[:, :, None, None]
        keep = (places >= first) & (places < last)
        return self.model(torch.where(keep[:, None], inputs[owners], hidden))


def with_block_stem(model: nn.Module) -> nn.Module:
    """A copy whose first convolution works on blocks."""
    found = copy.deepcopy(model)
    name, conv = next((n, m) for n, m in found.named_modules() if isinstance(m, nn.Conv2d))
    parent, _, leaf = name.rpartition(".")
    setattr(found.get_submodule(parent), leaf, BlockStem(conv))
    return found


def main() -> None:  # noqa: PLR0915  # one measurement, from the models to the table
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    words.add_argument("--model", default="resnet50")
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--batch", type=int)
    words.add_argument("--batches", type=int, default=32)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    on_gpu = asked.device == "cuda"
    classifier: Classifier = classifier_of(asked.model, asked.side, asked.device)
    shape = (3, asked.side, asked.side)
    batch = asked.batch or usual_batch(classifier, shape)
    dtype = classifier.dtype
    few = classifier.normalize(torch.rand(2, *shape)).to(asked.device)
    folded = _folded(copy.deepcopy(classifier.bare), few).eval().requires_grad_(False)
    blocks = with_block_stem(folded)
    layout = torch.channels_last
    plain, blocks = (m.to(asked.device, dtype).to(memory_format=layout) for m in (folded, blocks))
    n = -(-batch // EACH)
    images = torch.rand(n, *shape, device=asked.device)
    inputs = classifier.normalize(images).contiguous(memory_format=layout)
    hidden = classifier.normalize(torch.zeros_like(images[:1]))
    pixels = asked.side**2
    ranks = torch.rand(n, pixels, device=asked.device).argsort(1).view(n, *shape[1:]).float()
    owners = torch.arange(batch, device=asked.device) // EACH
    starts = torch.zeros(batch, device=asked.device)
    stops = (torch.rand(batch, device=asked.device) * pixels).floor()
    runs = torch.stack([starts, stops])
    places = owners.tolist()

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, dynamic=False) if on_gpu else model

    def before(model: Any) -> Callable[[], Tensor]:
        def job() -> Tensor:
            masker = Masker(inputs, hidden, ranks, places, starts, stops, layout)
            for _ in range(asked.batches):
                found = model(masker.batch(0, batch).clone())
            return found

        return job

    def within(model: Any) -> Callable[[], Tensor]:
        def job() -> Tensor:
            for _ in range(asked.batches):
                found = model(inputs, hidden, ranks, owners, runs)
            return found

        return job

    ready = torch.rand(batch, *shape, device=asked.device, dtype=dtype)
    ready = ready.contiguous(memory_format=layout)

    def bare(model: Any) -> Callable[[], Tensor]:
        def job() -> Tensor:
            for _ in range(asked.batches):
                found = model(ready)
            return found

        return job

    models = {"plain stem": compiled(plain), "block stem": compiled(blocks)}
    masking = {
        name: compiled(Masking(one)) for name, one in zip(models, (plain, blocks), strict=True)
    }
    jobs: dict[str, Callable[[], Tensor]] = {}
    for name, model in models.items():
        jobs[f"bare, {name}"] = bare(model)
        jobs[f"masks before, {name}"] = before(model)
        jobs[f"masks within, {name}"] = within(masking[name])
    seconds: dict[str, float] = {}
    answers = {}
    with torch.no_grad():
        for name, job in jobs.items():
            begun = time.perf_counter()
            answers[name] = job().float()
            if on_gpu:
                torch.cuda.synchronize()
            print(f"{name}: first call {time.perf_counter() - begun:.1f} s", flush=True)
        seconds = medians(side_by_side(dict(jobs), asked.device, asked.rounds))
    results = {}
    for name, spent in seconds.items():
        wanted = answers[
            "bare, plain stem" if name.startswith("bare") else "masks before, plain stem"
        ]
        apart = float((answers[name] - wanted).abs().max() / wanted.abs().max())
        results[name] = {
            "images_per_second": batch * asked.batches / spent,
            "largest_difference": apart,
        }
        print(f"{name:28} {results[name]['images_per_second']:10,.0f} images/s {apart:.2e}")
    if asked.out:
        facts = provenance({"argv": sys.argv[1:]}, torch.device(asked.device), dtype)
        facts |= {"batch": batch, "results": results}
        asked.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
