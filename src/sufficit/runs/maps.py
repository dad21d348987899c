"""Heatmap sources: methods, adapters, functions and heatmap files, drawn and stored alike."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as V

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import BadImageError
from sufficit.data.loader import Entry
from sufficit.errors import UserError
from sufficit.explainers import EXPLAINERS, Method
from sufficit.explainers.explanation import DrawnMaps, draw_all
from sufficit.perturbation.heatmaps import check_range, normalize, resize

Drawn = Mapping[str, tuple[DrawnMaps, Tensor]]
"""By source: the maps as they were drawn, and finished at the image's size [N,H,W]."""


@dataclass
class MapFile:
    """A heatmap file as a source: one map per image, found by the image's name."""

    path: Path
    normalize: bool = False
    _opened: HeatmapFile | None = field(default=None, repr=False, compare=False)

    @property
    def file(self) -> HeatmapFile:
        """The open file; each process opens it once."""
        if self._opened is None:
            self._opened = HeatmapFile(self.path)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "normalize": self.normalize, "_opened": None}

    def close(self) -> None:
        """Close the file; it opens again when it is read."""
        if self._opened is not None:
            self._opened.__exit__()
        self._opened = None

    def check(self, names: Sequence[str]) -> None:
        """Raise where no image has a map, or a key fits two images."""
        with closing(self):
            keys = [self.file.key(name) for name in names]
            if not any(key is not None for key in keys):
                raise UserError(
                    f"{self.path} has a heatmap for none of the {len(names)} images. Images are"
                    f" named like {names[0]!r}, its keys like"
                    f" {(self.file.keys or ['(none)'])[0]!r}: use the image names as keys"
                )

    def read(self, entry: Entry) -> Tensor:
        """The map of an image: [h,w] in 0..1."""
        image = entry.image
        key = self.file.key(image.name)
        if key is None:
            raise BadImageError(image.problem or f"no heatmap: {self.path.name} has no such key")
        found = self.file.read(key)[None]
        if not found.isfinite().all():
            raise BadImageError(f"its heatmap in {self.path.name} has NaN or infinite values")
        found = normalize(found) if self.normalize else found
        check_range(found, [image.name])
        return found[0]

    def digest(self) -> str:
        """What tells these maps from others."""
        return f"{self.file.digest()}, normalize {self.normalize}"


@dataclass(frozen=True)
class MapTensor:
    """Heatmaps in memory as a source, one per image, in the order of the images."""

    maps: Tensor  # [N,h,w] in 0..1

    def check(self, names: Sequence[str]) -> None:
        """Raise unless there is a map in 0..1 for every image."""
        if self.maps.ndim != 3 or len(self.maps) != len(names):
            raise UserError(
                f"heatmaps must be [N,h,w] with N = {len(names)} images, got"
                f" {list(self.maps.shape)}: give one map per image"
            )
        check_range(self.maps, list(names))

    def read(self, entry: Entry) -> Tensor:
        """The map of an image: [h,w]."""
        return self.maps[entry.number].float().cpu()

    def digest(self) -> str:
        """What tells these maps from others."""
        return digest(self.maps)


Source = Method | MapFile | MapTensor
"""A heatmap source: a method by name, an adapter, a function, a file of heatmaps, or heatmaps."""


def known_maps(
    maps: Sequence[Tensor], size: tuple[int, int], device: torch.device
) -> tuple[DrawnMaps, Tensor]:
    """The maps of a batch that were not drawn here; resized one by one where sizes differ."""
    if len({one.shape for one in maps}) > 1:
        maps = [resize(one[None], size)[0] for one in maps]
    found = DrawnMaps(torch.stack(list(maps)).to(device), final=True)
    return found, found.at(size)


def is_control(name: str, source: Source) -> bool:
    """Whether a source is a control under its own name: it is drawn again instead of stored."""
    return source == name and EXPLAINERS[name].needs == "images"


def draw_sources(
    classifier: Classifier,
    sources: Mapping[str, Source],
    images: Tensor,
    targets: Tensor,
    numbers: Sequence[int],
    file_maps: Mapping[str, Sequence[Tensor]],
    *,
    seed: int,
    layer: str | None,
) -> Drawn:
    """Every source's maps of a batch, by one shared forward pass: [N,C,H,W] -> each [N,H,W].

    The control `random` depends on the seed and the number of the image, not on the batch.
    """
    methods: dict[str, Method] = {}
    for name, source in sources.items():
        if source == "random":
            methods[name] = replace(
                EXPLAINERS["random"], draw=lambda images, _: noise(images, seed, numbers)
            )
        elif not isinstance(source, MapFile | MapTensor):
            methods[name] = source
    found = dict(
        draw_all(classifier, images, targets, methods, layer=layer, progress=False)
        if methods
        else {}
    )
    size = images.shape[2], images.shape[3]
    for name, source in sources.items():
        if isinstance(source, MapFile | MapTensor):
            found[name] = known_maps(file_maps[name], size, images.device)
    return {name: found[name] for name in sources}


def finish(
    classifier: Classifier | None,
    sources: Mapping[str, Source],
    maps: Mapping[str, Tensor],
    final: Mapping[str, bool],
    shape: tuple[int, int, int],
    numbers: Sequence[int],
    seed: int,
) -> Drawn:
    """Stored maps at the image's size, controls drawn again; on the classifier's device."""
    device = torch.device("cpu") if classifier is None else classifier.device
    blank = torch.empty(len(numbers), *shape, device=device)
    found: dict[str, tuple[DrawnMaps, Tensor]] = {}
    for name, source in sources.items():
        if name in maps:
            drawn = DrawnMaps(maps[name].to(device), final[name])
            found[name] = drawn, drawn.at((shape[1], shape[2]))
        else:
            random = source == "random"
            done = noise(blank, seed, numbers) if random else EXPLAINERS["center"].draw(blank, seed)
            found[name] = DrawnMaps(done, final=True), done
    return found


def noise(images: Tensor, seed: int, numbers: Sequence[int]) -> Tensor:
    """Uniform noise per pixel by seed and image number: [N,C,H,W] -> [N,H,W]."""
    drawn = [
        np.random.default_rng([seed, number]).random(tuple(images.shape[2:]), dtype=np.float32)
        for number in numbers
    ]
    return torch.from_numpy(np.stack(drawn)).to(images.device)


def pack(images: Tensor) -> Tensor:
    """Images as bytes where that loses nothing, else as they are: [N,C,H,W]."""
    scaled = (images * 255).round().clamp(0, 255).to(torch.uint8)
    return scaled if torch.equal(unpack(scaled), images) else images


def unpack(pixels: Tensor) -> Tensor:
    """What was packed, as float in 0..1, as an image file is decoded: [N,C,H,W]."""
    if pixels.dtype != torch.uint8:
        return pixels
    floats: Tensor = V.to_dtype(pixels, torch.float32, scale=True)
    return floats
