"""Pictures with their heatmaps, read together."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import BadImageError, SourceImage
from sufficit.data.loader import Entry, Item
from sufficit.errors import UserError
from sufficit.perturbation.heatmaps import check_range, normalize, resize


@dataclass(frozen=True)
class Pair(Item):
    """A picture and its heatmap."""

    heatmap: Tensor  # [H,W]


@dataclass(frozen=True)
class Pairs:
    """Pictures with their heatmaps."""

    view: View | None
    maps: HeatmapFile
    normalize: bool
    askew: set[str] = field(default_factory=set)

    def read(self, entry: Entry) -> Pair:
        """A picture and its heatmap, or an error that says what is wrong with either."""
        key = self.maps.key(entry.image.name)
        if key is None:
            raise BadImageError(
                entry.image.problem or f"no heatmap: {self.maps.path.name} has no such key"
            )
        image = entry.image.read(self.view)
        return Pair(entry, image, self._heatmap(key, entry.image.name, image))

    def _heatmap(self, key: str, name: str, image: Tensor) -> Tensor:
        heatmap = self.maps.read(key)[None]
        if not heatmap.isfinite().all():
            raise BadImageError("its heatmap has NaN or infinite values")
        if self.normalize:
            heatmap = normalize(heatmap)
        check_range(heatmap, [name])
        ratio = heatmap.shape[1] / heatmap.shape[2] * image.shape[2] / image.shape[1]
        if not 0.9 < ratio < 1.1:
            self.askew.add(name)
        return resize(heatmap, (image.shape[1], image.shape[2]))[0]


def check_any_pair(maps: HeatmapFile, pictures: Iterable[SourceImage]) -> None:
    """Raise where no picture has a heatmap; none behind the first that has one is looked at."""
    count, like = 0, ""
    for picture in pictures:
        if maps.key(picture.name) is not None:
            return
        count, like = count + 1, like or picture.name
    raise UserError(
        f"none of the {count} images has a heatmap in {maps.path}: images are named like {like!r},"
        f" keys like {(maps.keys or ['(none)'])[0]!r}"
    )


def warn_of_stretched(askew: Sequence[str]) -> None:
    """Say which heatmaps had to be stretched."""
    if askew:
        warnings.warn(
            f"{len(askew)} heatmaps (first {askew[0]}) have other proportions than"
            " what the model sees, and are stretched to it: were they made on the uncropped"
            " image?",
            stacklevel=3,
        )
