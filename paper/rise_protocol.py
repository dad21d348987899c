"""RISE's own protocol, to stand beside its published numbers: python paper/rise_protocol.py --help.

The protocol of the authors' notebook (Petsiuk et al. 2018): the class is the network's prediction,
the score its probability; 1,792 pixels at a time, as many as eight rows have, are deleted to the
mean colour of ImageNet, or inserted into a blurred copy (a Gaussian of 11 pixels, sigma 5).
Published, ResNet50, classes 0 to 99 and 100 to 199 of the validation set, 5,000 photographs each:
deletion 0.1024 and 0.1073, insertion 0.7654 and 0.7784.

    python paper/rise_protocol.py --data ROOT --stand-ins WEIGHTS --out runs/rise

Writes rows.parquet and run.json to OUT/results; run it again to resume, method by method.
`--photographs report` tries it on other photographs than those of the table.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn import functional as F

from imagenet import NETWORKS, Photographs, classifier_of, read_photographs
from steps import Clock, Step, facts_of, minutes_of, work
from sufficit import Classifier, UserError, evaluate, explain
from sufficit.provenance import surroundings
from table_results import write_json

ROWS = 8  # rows of the image that are changed at a time
WIDTH, SIGMA = 11, 5.0  # of the blur
PUBLISHED = {"deletion": (0.1024, 0.1073), "insertion": (0.7654, 0.7784)}
METHODS = ("gradcam", "rise", "center", "random")


def blurred(images: Tensor, mean: tuple[float, ...]) -> Tensor:
    """Return images as the notebook blurs them: [N,3,H,W] in 0..1 -> the same.

    The kernel is a point that scipy blurs inside of the window. Beyond the edges is the mean
    colour, because the notebook blurs the normalised image, whose zero that is.
    """
    point = np.zeros((WIDTH, WIDTH))
    point[WIDTH // 2, WIDTH // 2] = 1
    kernel = torch.from_numpy(gaussian_filter(point, SIGMA)).to(images)
    colour = torch.tensor(mean).to(images)[:, None, None]
    apart = (images - colour).flatten(0, 1)[:, None]
    soft = F.conv2d(apart, kernel[None, None], padding=WIDTH // 2)
    return (soft.view_as(images) + colour).clamp(0, 1)


def scores(classifier: Classifier, images: Tensor, heatmaps: Tensor) -> pandas.DataFrame:
    """Return deletion and insertion of each image by the protocol."""
    mean = classifier.mean
    assert isinstance(mean, tuple)
    ask = partial(
        evaluate,
        classifier,
        images,
        heatmaps,
        score="confidence",
        percent_step=ROWS / images.shape[2],
        progress=False,
    )
    deleted = ask(fill=torch.tensor(mean), columns=["deletion_percent"])
    inserted = ask(fill=blurred(images, mean), columns=["insertion_percent"])
    columns = {"deletion": deleted["deletion_percent"], "insertion": inserted["insertion_percent"]}
    return pandas.DataFrame({name: one.numpy() for name, one in columns.items()})


def score_method(
    name: str, given: argparse.Namespace, classifier: Classifier, photographs: Photographs,
    clock: Clock,
) -> dict[str, Any]:  # fmt: skip
    """Draw and score the maps of a method, some photographs at a time."""
    method: Any = (name, {"masks": given.masks}) if name == "rise" else name
    parts = []
    for start in range(0, len(photographs), given.batch):
        images = photographs.pixels[start : start + given.batch].to(classifier.device).float() / 255
        maps = explain(classifier, images, None, method, seed=start, progress=False)
        names = photographs.names[start : start + given.batch]
        found = scores(classifier, images, maps)
        parts.append(found.assign(image=names, method=name))
    folder = given.out / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    pandas.concat(parts, ignore_index=True).to_parquet(folder / f"{name}.parquet", index=False)
    return {"n": len(photographs)}


def write(given: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Write all rows and the facts of the run."""
    folder = given.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    rows = pandas.concat(
        [pandas.read_parquet(given.out / "rows" / f"{name}.parquet") for name in METHODS]
    )
    rows.to_parquet(folder / "rows.parquet", index=False)
    facts = {
        "table": "rise-protocol",
        "network": given.network,
        "photographs": given.photographs,
        "masks": given.masks,
        "published": PUBLISHED,
        "n": facts_of(given.out, METHODS[0])["n"],
        "gpu_minutes": round(minutes_of(given.out), 1),
    }
    write_json(folder / "run.json", surroundings(torch.device(given.device), torch.float32) | facts)
    for name, own in rows.groupby("method", sort=False):
        print(f"{name}: deletion {own.deletion.mean():.4f}, insertion {own.insertion.mean():.4f}")
    return {}


def main() -> None:
    """Run the command line."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--data", type=Path, required=True)
    words.add_argument("--stand-ins", type=Path, required=True)
    words.add_argument("--out", type=Path, default=Path("rise"))
    words.add_argument("--network", choices=NETWORKS, default="resnet50")
    words.add_argument("--photographs", choices=("test", "report"), default="test")
    words.add_argument("--images", type=int, help="so many of them; all")
    words.add_argument("--masks", type=int, default=4000, help="of RISE")
    words.add_argument("--batch", type=int, default=100)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--seconds", type=float)
    given = words.parse_args()
    try:
        classifier = classifier_of(given.network, given.stand_ins, torch.device(given.device))
        photographs = read_photographs(given.data, given.photographs, given.images)
        steps = [
            Step(name, partial(score_method, name, given, classifier, photographs))
            for name in METHODS
        ]
        steps.append(Step("results", partial(write, given), METHODS))
        work(steps, given.out, Clock(given.seconds))
    except UserError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
