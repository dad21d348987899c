"""torchcam beside Sufficit, in one process: python paper/beside_torchcam.py --help.

The same MobileNetV2, photographs and heatmaps go to torchcam's metrics and to `evaluate`: Average
Drop, Increase in Confidence, deletion and insertion, where both define the same. torchcam
multiplies the normalised image, so the fill is the mean colour; its curves have 20 steps. Beside
them stands MSI.

    python paper/beside_torchcam.py --data ROOT --stand-ins WEIGHTS --out runs/beside-torchcam

Writes rows.parquet and run.json to OUT/results. torchcam must be installed; a CPU will do.
`--photographs report` tries it on other photographs than those of the table.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor
from torchcam.methods import GradCAM, GradCAMpp, LayerCAM
from torchcam.metrics import ClassificationMetric, DeletionInsertionMetric

from imagenet import classifier_of, read_photographs
from sufficit import Classifier, UserError, evaluate, normalize, resize
from sufficit.provenance import surroundings
from table_results import write_json

METHODS: dict[str, Any] = {"gradcam": GradCAM, "gradcam++": GradCAMpp, "layercam": LayerCAM}
STEPS = 20
SOFTMAX = partial(torch.softmax, dim=-1)
PAIRS = {
    "average_drop": "avg_drop",
    "increase_in_confidence": "conf_increase",
    "deletion_percent": "deletion_auc",
    "insertion_percent": "insertion_auc",
}  # our column -> theirs


class Fixed:
    """An extractor of torchcam that returns a map that is known already."""

    def __init__(self, extractor: Any, heatmap: Tensor) -> None:
        self.model = extractor.model
        self.heatmap = heatmap
        self.extractor = extractor

    def __call__(self, class_idx: Any, scores: Any, **options: Any) -> list[Tensor]:
        """Return the map."""
        return [self.heatmap]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.extractor, name)

    def fuse_cams(self, cams: list[Tensor]) -> Tensor:
        """Return the only map."""
        return cams[0]


def theirs(extractor: Any, inputs: Tensor, heatmap: Tensor, target: int) -> dict[str, float]:
    """Return torchcam's four numbers for one image."""
    fixed: Any = Fixed(extractor, heatmap)
    first = ClassificationMetric(fixed, SOFTMAX)
    second = DeletionInsertionMetric(fixed, SOFTMAX, steps=STEPS)
    for metric in (first, second):
        metric.update(inputs, [target])
    return {**first.summary(), **second.summary()}


def ours(classifier: Classifier, image: Tensor, heatmap: Tensor, target: int) -> dict[str, float]:
    """Return the same four numbers for one image, and MSI."""
    assert isinstance(classifier.mean, tuple)
    ask = partial(evaluate, classifier, image, heatmap, torch.tensor([target]), progress=False)
    colour = torch.tensor(classifier.mean)
    some = ask(columns=["average_drop", "increase_in_confidence"], fill=colour)
    pixels = heatmap[0].numel()
    step = -(-pixels // STEPS) / pixels  # they round the pixels of a step up
    curves = ask(
        columns=["deletion_percent", "insertion_percent"],
        fill=colour,
        score="confidence",
        percent_step=step,
    )
    found = {**some.mean(), **curves.mean(), "msi": ask(columns=["msi"]).mean()["msi"]}
    return {name: found[name] for name in (*PAIRS, "msi")}


def rows_of(classifier: Classifier, images: Tensor, names: tuple[str, ...]) -> pandas.DataFrame:
    """Return both sides' numbers, one row per image and method of torchcam."""
    mean, std = (torch.tensor(one)[:, None, None] for one in (classifier.mean, classifier.std))
    found = []
    model = classifier.bare
    layer = model.get_submodule(classifier.feature_layer(images[:1]))
    for word, kind in METHODS.items():
        for number, name in enumerate(names):
            image = images[number : number + 1]
            inputs = (image - mean) / std
            with kind(model, target_layer=layer) as extractor:
                logits = model(inputs)
                target = int(logits.argmax(1))
                cams = extractor(target, logits)
                small = extractor.fuse_cams(cams).detach()
                heatmap = resize(normalize(small, "minmax"), (image.shape[2], image.shape[3]))
                known = theirs(extractor, inputs, heatmap, target)
            own = ours(classifier, image, heatmap, target)
            peer = {f"torchcam_{column}": known[their] for column, their in PAIRS.items()}
            found.append({"image": name, "method": word, "target": target, **own, **peer})
    return pandas.DataFrame(found)


def main() -> None:
    """Run the command line."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--data", type=Path, required=True)
    words.add_argument("--stand-ins", type=Path, required=True)
    words.add_argument("--out", type=Path, default=Path("beside-torchcam"))
    words.add_argument("--photographs", choices=("test", "report"), default="test")
    words.add_argument("--images", type=int, default=200)
    given = words.parse_args()
    try:
        classifier = classifier_of("mobilenet_v2", given.stand_ins, torch.device("cpu"))
        photographs = read_photographs(given.data, given.photographs, given.images)
    except UserError as error:
        sys.exit(f"Error: {error}")
    rows = rows_of(classifier, photographs.images, photographs.names)
    folder = given.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(folder / "rows.parquet", index=False)
    apart = {name: float((rows[name] - rows[f"torchcam_{name}"]).abs().max()) for name in PAIRS}
    facts = {"table": "beside-torchcam", "network": "mobilenet_v2", "n": len(photographs)}
    facts |= {"photographs": given.photographs, "largest_difference": apart}
    write_json(folder / "run.json", surroundings(torch.device("cpu"), torch.float32) | facts)
    print(rows.groupby("method", sort=False).mean(numeric_only=True).round(4).to_string())
    print("largest differences:", apart)


if __name__ == "__main__":
    main()
