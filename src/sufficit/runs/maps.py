"""Heatmap sources: methods, adapters, functions and heatmap files, drawn and stored alike."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sufficit.classifier.fingerprint import digest
from sufficit.classifier.source_code import code_digest, code_of
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.image_files import in_0_1
from sufficit.data.images import BadImageError
from sufficit.data.loader import Entry
from sufficit.errors import UserError
from sufficit.explainers import EXPLAINERS, Explainer, Method, explainer_named
from sufficit.explainers.explanation import DrawnMaps
from sufficit.explainers.lax import Lax
from sufficit.explainers.registry import full_word, word_of
from sufficit.explainers.sources import HeatmapFileSource, sources_from
from sufficit.files import safe_name
from sufficit.perturbation.heatmaps import check_range, normalize
from sufficit.runs.config import CONTROLS, RunConfig
from sufficit.runs.store import UNITS, UnitFile

RESERVED = ("overlays", UNITS)  # folders of a run
_opening = Lock()


class GivenMaps:
    """A source whose maps come from elsewhere and are read, not drawn."""

    def check(self, names: Sequence[str]) -> None:
        """Raise unless there are maps for these images."""
        raise NotImplementedError

    def read(self, entry: Entry) -> Tensor:
        """The map of an image: [h,w] in 0..1."""
        raise NotImplementedError

    def digest(self) -> str:
        """What tells these maps from others."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files, if there are any."""


@dataclass
class MapFile(GivenMaps):
    """A heatmap file as a source: one map per image, found by the image's name."""

    path: Path
    normalize: str = "none"
    _opened: HeatmapFile | None = field(default=None, repr=False, compare=False)

    @property
    def file(self) -> HeatmapFile:
        """The open file; each process opens it once."""
        with _opening:  # several threads read
            self._opened = self._opened or HeatmapFile(self.path)
            return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": None}

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
        found = normalize(found, self.normalize)
        check_range(found, [image.name], ", or pass --normalize minmax")
        return found[0]

    def digest(self) -> str:
        """What tells these maps from others."""
        return f"{self.file.digest()}, normalize {self.normalize}"


@dataclass(frozen=True)
class MapTensor(GivenMaps):
    """Heatmaps in memory as a source, one per image, in the order of the images."""

    maps: Tensor  # [N,h,w], in 0..1 if not normalised
    normalize: str = "none"

    def check(self, names: Sequence[str]) -> None:
        """Raise unless there is a finite map for every image, in 0..1 if it is taken as it is."""
        if self.maps.ndim != 3 or len(self.maps) != len(names):
            raise UserError(
                f"heatmaps must be [N,h,w] with N = {len(names)} images, got"
                f" {list(self.maps.shape)}: give one map per image"
            )
        if self.normalize == "none":
            check_range(self.maps, list(names), ', or pass normalize="minmax"')
        elif not self.maps.isfinite().all():
            raise UserError("heatmaps must be finite, got NaN or infinite values: replace them")

    def read(self, entry: Entry) -> Tensor:
        """The map of an image: [h,w] in 0..1."""
        return normalize(self.maps[entry.number].float().cpu()[None], self.normalize)[0]

    def digest(self) -> str:
        """What tells these maps from others."""
        return f"{digest(self.maps)}, normalize {self.normalize}"


Source = Method | GivenMaps
"""A heatmap source: a method by name, an adapter, a function, a file of heatmaps, or heatmaps."""


def source_facts(source: Source) -> dict[str, Any]:
    """What results record of a source: kind, options, what became of the sign, cost."""
    if isinstance(source, tuple):
        source = word_of(*source)
    if isinstance(source, str):
        return {"kind": "method", "method": source, **explainer_named(source).facts()}
    if isinstance(source, Explainer):
        return {"kind": "method", "method": source.description, **source.facts()}
    if isinstance(source, Lax):
        agnostic = source.classes is None
        return {"kind": "adapter", "sign": "none", "passes": 1, "class_agnostic": agnostic}
    kind = "heatmaps" if isinstance(source, GivenMaps) else "function"
    return {"kind": kind, "class_agnostic": getattr(source, "class_agnostic", False) is True}


def noise(images: Tensor, seed: int, numbers: Sequence[int]) -> Tensor:
    """Uniform noise per pixel by seed and image number: [N,C,H,W] -> [N,H,W]."""
    size, random = tuple(images.shape[2:]), np.random.default_rng
    drawn = [random([seed, number]).random(size, dtype=np.float32) for number in numbers]
    return torch.from_numpy(np.stack(drawn)).to(images.device)


def pack(images: Tensor) -> Tensor:
    """Images as bytes where that loses nothing, else as they are: [N,C,H,W]."""
    scaled = (images * 255).round().clamp(0, 255).to(torch.uint8)
    return scaled if torch.equal(unpack(scaled), images) else images


def unpack(pixels: Tensor) -> Tensor:
    """What was packed, as float in 0..1, as an image file is decoded: [N,C,H,W]."""
    return in_0_1(pixels) if pixels.dtype == torch.uint8 else pixels


def maps_from_file(
    kept: UnitFile, seed: int, device: torch.device | str = "cpu"
) -> dict[str, DrawnMaps]:
    """What `MapBatch.as_file` stored; controls are drawn again."""
    facts = kept.facts
    found = {
        name: DrawnMaps(kept.tensors[f"maps/{name}"].to(device), final)
        for name, final in facts["final"].items()
    }
    blank = torch.empty(len(facts["numbers"]), *facts["shape"], device=device)
    for name, control in facts["controls"].items():
        random = control == "random"
        drawn = noise(blank, seed, facts["numbers"]) if random else EXPLAINERS[control].draw(blank)
        found[name] = DrawnMaps(drawn, final=True)
    return found


def heatmaps_from_file(
    kept: UnitFile, seed: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Every source's heatmaps at the image's size, of stored maps: source -> [N,H,W]."""
    _, h, w = kept.facts["shape"]
    return {name: one.at((h, w)) for name, one in maps_from_file(kept, seed, device).items()}


def sources_named(config: RunConfig) -> dict[str, Source]:
    """The heatmap sources of a config by name, the controls last."""
    found = sources_from(config.methods)
    if not found:
        raise UserError(f"no method given: name one or more of {', '.join(EXPLAINERS)}")
    sources: dict[str, Source] = {
        n: MapFile(s.path, config.normalize) if isinstance(s, HeatmapFileSource) else s
        for n, s in found.items()
    }
    return with_controls(sources, wanted=config.controls)


def with_controls(sources: Mapping[str, Source], *, wanted: bool) -> dict[str, Source]:
    """The sources with the controls, which come last."""
    for name in CONTROLS:
        if sources.get(name, name) != name:
            raise UserError(f"{name!r} is the name of a control: give the source another name")
    last = {name: name for name in CONTROLS if wanted or name in sources}
    return {name: one for name, one in sources.items() if name not in last} | last


def check_name(name: str) -> None:
    """Raise for a name of the run's own files."""
    if safe_name(name) in RESERVED or name.endswith((".json", ".csv", ".html", ".png", ".toml")):
        raise UserError(f"{name!r} is a file of every run: give the source another name")


def identity(source: Source) -> str:
    """What tells a source from another of the same name: weights, contents or code."""
    if isinstance(source, str):
        method = explainer_named(source)
        adapter = method.settings.get("adapter")  # refine reads its folder
        weights = Lax.from_pretrained(str(adapter)).state_dict().values() if adapter else ()
        library = method.reference if method.extra else ""  # with its version
        known = [full_word(source), digest(*weights) if weights else "", library]
        return "/".join(filter(None, known))
    if isinstance(source, GivenMaps):
        return source.digest()
    # All of the code: a function may call others beside it.
    known = [code_digest(source) or getattr(source, "__qualname__", type(source).__name__)]
    if isinstance(source, partial):
        values = (*source.args, *(value for _, value in sorted(source.keywords.items())))
        known += [repr(one) for one in values if isinstance(one, str | float | int)]
    if isinstance(source, nn.Module):
        known += [code_of(source), digest(*source.state_dict().values())]
    return "/".join(filter(None, known))
