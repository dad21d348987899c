"""The two cases MSI was made for, on the small net that ships with the package.

python tools/msi_cases.py docs/msi-cases.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from sufficit import Classifier, Scores, evaluate
from sufficit.data.digits import SIDE, synthetic_digits
from sufficit.plots import blend, save

ALPHA_MIN = 0.5


@dataclass(frozen=True)
class Case:
    """Images, and heatmaps of each kind for them."""

    images: Tensor  # [N,3,H,W]
    labels: Tensor  # [N]
    heatmaps: dict[str, Tensor]  # each [N,H,W]


def grown(masks: Tensor, by: int = 4) -> Tensor:
    """A mask and what lies within a few pixels of it: [N,H,W] -> [N,H,W]."""
    return F.max_pool2d(masks[:, None], 2 * by + 1, 1, by)[:, 0]


def suffices(classifier: Classifier, images: Tensor, masks: Tensor, labels: Tensor) -> Tensor:
    """Whether the model still knows the digit from the masked image: [N]."""
    with torch.no_grad():
        return classifier(images * masks[:, None]).argmax(1) == labels


def large_mask(classifier: Classifier, n: int = 64) -> Case:
    """Case (i): a focused mask, and a bloated one that ranks the digit just as high.

    Kept are the images in which the focused region suffices, as in the paper's example, and black
    does not: the model calls a black picture some digit too.
    """
    digits = synthetic_digits(n, seed=3)
    region = grown(digits.masks)
    inner = F.avg_pool2d(region[:, None], 9, 1, 4)[:, 0]
    focused = region * (0.9 + 0.1 * inner)
    bloated = torch.where(region > 0, focused, 0.51 + 0.01 * inner)
    fine = suffices(classifier, digits.images, region, digits.labels)
    fine &= suffices(classifier, digits.images, torch.ones_like(region), digits.labels)
    fine &= ~suffices(classifier, digits.images, torch.zeros_like(region), digits.labels)
    maps = {"focused": focused[fine], "bloated": bloated[fine]}
    return Case(digits.images[fine], digits.labels[fine], maps)


def two_regions(classifier: Classifier, n: int = 96) -> Case:
    """Case (ii): the digit stands in both halves; masks of one, of both, and of background.

    Kept are the images in which either digit suffices, and so does the image without either, and
    black does not.
    """
    digits = synthetic_digits(n, seed=5, copies=2)
    both = grown(digits.masks)
    one = both.clone()
    one[:, :, SIDE // 2 :] = 0
    elsewhere = torch.stack(
        [_first_pixels(b == 0, int(o.sum())) for b, o in zip(both, one, strict=True)]
    )
    fine = ~suffices(classifier, digits.images, torch.zeros_like(both), digits.labels)
    for shown in (one, both - one, 1 - one, 1 - (both - one)):
        fine &= suffices(classifier, digits.images, shown, digits.labels)
    maps = {"one digit": one[fine], "both digits": both[fine], "background": elsewhere[fine]}
    return Case(digits.images[fine], digits.labels[fine], maps)


def _first_pixels(where: Tensor, count: int) -> Tensor:
    chosen = where.flatten().nonzero()[:count, 0]
    return torch.zeros(where.numel()).index_fill(0, chosen, 1).view_as(where)


def score(classifier: Classifier, case: Case) -> dict[str, Scores]:
    """Every column for every kind of heatmap."""
    return {
        name: evaluate(
            classifier, case.images, maps, case.labels, alpha_min=ALPHA_MIN, progress=False
        )
        for name, maps in case.heatmaps.items()
    }


def figure(cases: list[tuple[str, Case, dict[str, Scores]]]) -> Figure:
    """An example of each case above the mean of every column."""
    drawn = Figure(figsize=(11, 9.2))
    rows = drawn.subfigures(len(cases), 1)
    for (title, case, scores), row in zip(cases, rows, strict=True):
        row.suptitle(title, fontsize=10, x=0.02, ha="left", weight="bold")
        left, right = row.subfigures(1, 2, width_ratios=[1, 1.15])
        _pictures(left, case)
        _bars(right, scores, len(case.labels))
    return drawn


def _pictures(place: Figure, case: Case) -> None:
    axes = place.subplots(1, 1 + len(case.heatmaps))
    place.subplots_adjust(left=0.02, right=0.98, wspace=0.06)
    axes[0].imshow(case.images[0].permute(1, 2, 0).numpy())
    axes[0].set_title("image", fontsize=9)
    for axis, (name, maps) in zip(axes[1:], case.heatmaps.items(), strict=True):
        axis.imshow(blend(case.images[0], maps[0]).numpy())
        axis.set_title(name, fontsize=9)
    for axis in axes:
        axis.set_axis_off()


def _bars(place: Figure, scores: dict[str, Scores], n: int) -> None:
    axis = place.subplots()
    columns = list(next(iter(scores.values())).mean())
    height = 0.8 / len(scores)
    colours = (
        ("#0f766e", "#c2410c", "#9ca3af") if len(scores) == 2 else ("#c2410c", "#0f766e", "#9ca3af")
    )
    for i, (name, found) in enumerate(scores.items()):
        places = [row + i * height for row in range(len(columns))]
        axis.barh(places, found.mean().values(), height, label=name, color=colours[i])
    axis.axvline(0, color="#1f2937", linewidth=0.8)
    axis.set_yticks([row + 0.4 - height / 2 for row in range(len(columns))], columns, fontsize=8)
    axis.get_yticklabels()[-1].set_weight("bold")
    axis.tick_params(axis="x", labelsize=8)
    axis.invert_yaxis()
    axis.set_xlim(-0.7, 1.05)
    axis.set_title(f"mean over {n} images, alpha_min {ALPHA_MIN}", fontsize=8)
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    place.subplots_adjust(left=0.24, right=0.98, bottom=0.08, top=0.86)


def main(path: Path) -> None:
    """Draw the figure and print the numbers behind it."""
    classifier = Classifier.load("sufficit:digits")
    cases = []
    for title, make in (
        ("(i) A focused and a bloated mask: only MSI tells them apart", large_mask),
        (
            "(ii) Two sufficient regions: deletion takes one digit for background, MSI does not",
            two_regions,
        ),
    ):
        case = make(classifier)
        scores = score(classifier, case)
        cases.append((title, case, scores))
        print(f"\n{title}; {len(case.labels)} images\n")
        columns = list(next(iter(scores.values())).mean())
        print("| heatmap | " + " | ".join(columns) + " |")
        print("|---" * (1 + len(columns)) + "|")
        for name, found in scores.items():
            print(f"| {name} | " + " | ".join(f"{v:.3f}" for v in found.mean().values()) + " |")
    save(figure(cases), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
