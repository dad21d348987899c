"""How much of a comparison is spent outside the model: files, masks, methods, statistics.

    python benchmarks/compare.py --device cuda --out benchmarks/results/compare-h200.json
    python benchmarks/compare.py --images 4 --model resnet18 --side 64    # on a CPU

Photographs are made up and written as JPEG, then compared by every method, controls and leak
included. All passes of the model are noted as they are asked for (how many images, and whether a
gradient comes back) and afterwards run alone, one after another, on images that lie ready on the
device: what these take is the model's share.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models

from sufficit import Classifier, View
from sufficit.data.images import ImageSource, list_images
from sufficit.data.loader import Unit
from sufficit.provenance import provenance
from sufficit.runs.config import RunConfig
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job
from sufficit.runs.spread import Score, in_this_process
from sufficit.runs.store import Store
from sufficit.runs.unit_rows import Rows

Passes = Counter[tuple[int, bool]]


def write_photographs(folder: Path, n: int, side: int) -> None:
    """Smooth colours under a little noise, in four class folders."""
    for name in range(4):
        (folder / str(name)).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda number: _write_photograph(folder, number, side), range(n)))


def _write_photograph(folder: Path, number: int, side: int) -> None:
    generator = torch.Generator().manual_seed(number)
    coarse = torch.rand(1, 3, 8, 8, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")[0]
    noisy = smooth + 0.1 * torch.randn(3, side, side, generator=generator)
    pixels = (noisy.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(folder / str(number % 4) / f"{number:04d}.jpg", quality=90)


@contextmanager
def noting(model: nn.Module) -> Iterator[Passes]:
    """How often the model is asked for so many images, with and without gradients."""
    passes: Passes = Counter()

    def note(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        passes[len(args[0]), output.requires_grad] += 1

    handle = model.register_forward_hook(note)
    try:
        yield passes
    finally:
        handle.remove()


def bare_seconds(classifier: Classifier, passes: Passes, side: int) -> float:
    """The same passes, on images that lie ready; gradients go back to the feature layer."""
    device, total = classifier.device, 0.0
    for (n, gradient), times in passes.items():
        inputs = torch.rand(n, 3, side, side, device=device).to(classifier.dtype)
        inputs = inputs.contiguous(memory_format=classifier.memory_format)

        def once(inputs: Tensor = inputs, gradient: bool = gradient) -> None:
            with torch.set_grad_enabled(gradient):
                logits = classifier.model(inputs.requires_grad_(gradient))
            if gradient:
                torch.autograd.grad(logits.float().sum(), inputs)

        once()
        _wait(device)
        begun = time.perf_counter()
        for _ in range(times):
            once()
        _wait(device)
        total += time.perf_counter() - begun
    return total


@dataclass
class Clock:
    """Computes units in this process, and notes when each was done."""

    ends: list[float] = field(default_factory=list)

    def __call__(
        self, job: Job, store: Store, score: Score, units: Sequence[Unit]
    ) -> Iterator[Rows]:
        for rows in in_this_process(job, store, score, units):
            self.ends.append(time.perf_counter())
            yield rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--model", default="resnet50")
    words.add_argument("--images", type=int, default=200)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--batch-size", type=int)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    torch.manual_seed(0)
    view = View((asked.side, asked.side), resize=asked.side * 256 // 224)
    model = models.get_model(asked.model).eval()
    classifier = Classifier(model, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), view=view)
    on_gpu = asked.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    classifier.to(asked.device, dtype, torch.channels_last if on_gpu else None)
    with tempfile.TemporaryDirectory() as place:
        photographs = Path(place) / "photographs"
        write_photographs(photographs, asked.images, asked.side * 2)
        config = RunConfig(
            calls="exact",
            model=asked.model,
            data=str(photographs),
            targets="label",
            batch_size=asked.batch_size,
        )
        few = list_images(photographs)[:: max(1, asked.images // 16)]
        warm = make_job(config, classifier=classifier, images=ImageSource(few))
        run(warm, None, progress=False)
        job, clock = make_job(config, classifier=classifier), Clock()
        with noting(model) as passes:
            _wait(classifier.device)
            started = time.perf_counter()
            run(job, Path(place) / "run", progress=False, spread=clock)
            ended = time.perf_counter()
        whole, merging = clock.ends[-1] - started, ended - clock.ends[-1]
        bare = bare_seconds(classifier, passes, asked.side)
    masked = sum(n * times for (n, _), times in passes.items())
    outside = 1 - bare / whole
    print(
        f"{asked.model}, {asked.images} images of {asked.side} px, {masked} passes:"
        f" {whole:.1f} s, of which the model alone {bare:.1f} s; {outside:.1%} outside the model."
        f" Merging the units took {merging:.1f} s more."
    )
    if asked.out:
        results = {"seconds": whole, "bare": bare, "passes": masked, "outside": outside}
        results["merging"] = merging
        facts = provenance({"argv": sys.argv[1:]}, classifier.device, dtype)
        asked.out.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
