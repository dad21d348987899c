"""Pictures with their heatmaps, read together."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sufficit.data.heatmaps import HeatmapFile
from sufficit.data.images import BadPictureError, Picture
from sufficit.errors import UserError
from sufficit.heatmaps import check_range, normalize, resize
from sufficit.parts import View
from sufficit.reading import Item


@dataclass(frozen=True)
class Pair(Item):
    """A picture and its heatmap."""

    heatmap: Tensor  # [H,W]


@dataclass(frozen=True)
class Pairs:
    """Pictures with their heatmaps."""

    view: View | None
    maps: HeatmapFile
    keys: dict[str, str | None]
    normalize: bool
    askew: set[str] = field(default_factory=set)

    def read(self, picture: Picture, label: int | None) -> Pair:
        """A picture and its heatmap, or an error that says what is wrong with either."""
        key = self.keys[picture.name]
        if key is None:
            raise BadPictureError(f"no heatmap: {self.maps.path.name} has no such key")
        image = picture.read(self.view)
        return Pair(picture, label, image, self._heatmap(key, picture.name, image))

    def _heatmap(self, key: str, name: str, image: Tensor) -> Tensor:
        heatmap = self.maps.read(key)[None]
        if not heatmap.isfinite().all():
            raise BadPictureError("its heatmap has NaN or infinite values")
        if self.normalize:
            heatmap = normalize(heatmap)
        check_range(heatmap, [name])
        ratio = heatmap.shape[1] / heatmap.shape[2] * image.shape[2] / image.shape[1]
        if not 0.9 < ratio < 1.1:
            self.askew.add(name)
        return resize(heatmap, (image.shape[1], image.shape[2]))[0]


def keys_of(maps: HeatmapFile, pictures: Sequence[Picture]) -> dict[str, str | None]:
    """The key of each picture's heatmap; raise where none has one."""
    keys = maps.match([picture.name for picture in pictures])
    if not any(keys.values()):
        raise UserError(
            f"none of the {len(pictures)} images has a heatmap in {maps.path}: images are named"
            f" like {pictures[0].name!r}, keys like {(maps.keys or ['(none)'])[0]!r}"
        )
    return keys


def warn_of_stretched(askew: Sequence[str]) -> None:
    """Say which heatmaps had to be stretched."""
    if askew:
        warnings.warn(
            f"{len(askew)} heatmaps (first {askew[0]}) have other proportions than"
            " what the model sees, and are stretched to it: were they made on the uncropped"
            " image?",
            stacklevel=3,
        )
