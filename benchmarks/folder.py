"""What `sufficit evaluate` costs on a folder, all read as it goes, beside the bare model.

    python benchmarks/folder.py --device cuda --out benchmarks/results/folder-h200.json
    python benchmarks/folder.py --images 4 --model resnet18 --side 64    # on a CPU

Photographs are made up and written as JPEG, twice as large as the model sees them, with heatmaps in
one file; then all eleven columns are computed by the code behind the command. Bare is as many
images through the model alone, at its best batch size, on inputs that lie ready on the device. The
two take turns.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchvision import models

from compare import Clock, write_photographs
from evaluate import bare, smooth_maps
from sufficit import Classifier, View
from sufficit.classifier.acceleration import accelerated
from sufficit.data.images import list_images
from sufficit.perturbation.predict import usual_batch
from sufficit.provenance import provenance
from sufficit.runs.config import RunConfig
from sufficit.runs.engine import run
from sufficit.runs.job import make_job
from sufficit.runs.results import RunResults
from timing import medians, side_by_side


def make_classifier(asked: argparse.Namespace) -> Classifier:
    torch.manual_seed(0)
    view = View((asked.side, asked.side), resize=asked.side * 256 // 224)
    model = models.get_model(asked.model).eval()
    classifier = Classifier(model, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), view=view)
    if asked.device == "cpu":
        return classifier
    return classifier.to(asked.device, torch.bfloat16, torch.channels_last)


def best_batch(classifier: Classifier, side: int, calls: int, device: str) -> int:
    """The batch at which the bare model is fastest."""
    sizes = (256, 512, 1024, 2048) if device == "cuda" else (4, 8, 16, 32)
    trial = min(calls, 8 * sizes[-1])
    tries = {str(size): bare(classifier, side, trial, size) for size in sizes}
    found = medians(side_by_side(tries, device, 2))
    return int(min(found, key=lambda name: found[name]))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", default="cpu")
    words.add_argument("--model", default="resnet50")
    words.add_argument("--images", type=int, default=256)
    words.add_argument("--side", type=int, default=224)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--compiled", action="store_true", help="compiled before the clock starts")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    classifier = make_classifier(asked)
    if asked.compiled:
        shape = (3, asked.side, asked.side)
        classifier = accelerated(classifier, (usual_batch(classifier, shape), *shape))
    with tempfile.TemporaryDirectory() as place:
        photographs, heatmaps = Path(place) / "photographs", Path(place) / "maps.safetensors"
        write_photographs(photographs, asked.images, asked.side * 2)
        names = [image.name for image in list_images(photographs)]
        maps = smooth_maps(len(names), asked.side)
        save_file({name: one.clone() for name, one in zip(names, maps, strict=True)}, heatmaps)
        config = RunConfig(
            calls="exact",
            model=asked.model,
            data=str(photographs),
            methods=(f"heatmaps={heatmaps}",),
            checks=("none",),
            targets="label",
        )
        scoring_seconds: list[float] = []

        def evaluate() -> RunResults:
            clock, started = Clock(), time.perf_counter()
            job = make_job(config, classifier=classifier)
            found = run(job, None, progress=False, spread=clock)
            scoring_seconds.append(clock.ends[-1] - started)
            return found

        calls = evaluate().record.model_calls
        batch = usual_batch(classifier, (3, asked.side, asked.side))
        if not asked.compiled:
            batch = best_batch(classifier, asked.side, calls, asked.device)
        jobs: dict[str, Callable[[], object]] = {
            "evaluate": evaluate,
            "bare": bare(classifier, asked.side, calls, batch),
        }
        seconds = medians(side_by_side(jobs, asked.device, asked.rounds))
    share = seconds["bare"] / seconds["evaluate"]
    scoring = seconds["bare"] / statistics.median(scoring_seconds[1:])
    print(
        f"{asked.model}, {asked.images} files of {2 * asked.side} px, seen at {asked.side} px,"
        f" {calls} passes: {calls / seconds['evaluate']:.0f} a second, the bare model"
        f" {calls / seconds['bare']:.0f} (batch {batch}): {share:.1%} of its throughput;"
        f" {scoring:.1%} without writing the results"
    )
    if asked.out:
        results = {"passes": calls, "bare_batch": batch, "seconds": seconds, "share": share}
        results["share_of_scoring"] = scoring
        facts = provenance({"argv": sys.argv[1:]}, classifier.device, classifier.dtype)
        asked.out.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
