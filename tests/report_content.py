"""A content of the report for tests: which quarter of an image is bright?"""

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from PIL import Image
from torch import nn

from sufficit import Classifier, evaluate
from sufficit.perturbation.heatmaps import normalize, resize
from sufficit.report import Content, Facts, MethodScores, Shown
from sufficit.report.content import MOST_SHOWN, Choice
from sufficit.report.viewer_data import viewer_data
from sufficit.statistics import compare_values

HOSTILE = '</script><script>window.hacked=1</script><!--"\'&<img src=x onerror="window.hacked=2">'


class Quarters(nn.Module):
    """Class k where quarter k of the image is brightest."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        means = nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), 2)
        return 40 * means.flatten(1)


def quarters(n: int, side: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Dim noise with one bright quarter, and which."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.4 * torch.rand(n, 3, side, side, generator=generator)
    targets = torch.arange(n) % 4
    half = side // 2
    for image, target in zip(images, targets.tolist(), strict=True):
        row, column = divmod(target, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.3
    return images, targets


def choose(msi: Mapping[str, Any], *, most: int = MOST_SHOWN, seed: int = 0) -> dict[int, str]:
    """The rows that a run of these images shows, and why: {method: [N]}."""
    choice, n = Choice(most), len(np.asarray(next(iter(msi.values()))))
    choice.add(np.arange(n), msi)
    return choice.chosen(np.random.default_rng(seed).permutation(n).tolist())


def coarse_maps(n: int, side: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(resize(torch.rand(n, 7, 7, generator=generator), (side, side)))


def make(
    n: int = 8,
    side: int = 16,
    names: list[str] | None = None,
    maps: dict[str, torch.Tensor] | None = None,
    fill: str = "black",
    **options: Any,
) -> Content:
    images, targets = quarters(n, side)
    classifier = Classifier(Quarters())
    if maps is None:
        maps = {"bright": normalize(images.mean(1)), "coarse": coarse_maps(n, side, 1)}
    scores = {
        name: evaluate(classifier, images, found, targets, fill=fill, progress=False, **options)
        for name, found in maps.items()
    }
    rows = sorted(choose({name: found.msi for name, found in scores.items()}))
    names = names or [f"image-{i}" for i in range(n)]
    column = pandas.Series(names, dtype=object)  # names may be no UTF-8
    return Content(
        title="Which quarter is bright?",
        facts=Facts(model="quarters", data="noise", seed=3, n_skipped=2, command="by hand"),
        scores={name: MethodScores.of(found, rows) for name, found in scores.items()},
        summaries={name: found.summary() for name, found in scores.items()},
        standing=compare_values({name: found.msi for name, found in scores.items()}),
        rows={name: found.frame().assign(image=column) for name, found in scores.items()},
        shown=Shown(
            rows,
            [names[row] for row in rows],
            images[rows],
            {name: found[rows] for name, found in maps.items()},
            fill=fill,
        ),
        classes=["north-west", "north-east", "south-west", "south-east"],
    )


def curves_shown(content: Content, method: str) -> tuple[list[float], list[dict[str, Any]]]:
    """The grid of the viewer, and what it knows of a method on each image shown."""
    data = viewer_data(content)
    place = data["methods"].index(method)
    return data["grid"], [image["curves"][place] for image in data["images"]]


def decoded(address: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))) as picture:
        return np.asarray(picture)
