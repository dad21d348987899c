"""Heatmap sources: whatever gives a map per image. The words that name them are read elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest
from sufficit.classifier.source_code import code_of, identity_of
from sufficit.data.batch import Batch
from sufficit.data.heatmap_files import HeatmapError, HeatmapFile
from sufficit.data.image_files import BadImageError
from sufficit.errors import NotFiniteError, SkipError, UserError
from sufficit.explainers import EXPLAINERS, Explainer, explainer_named, methods_for
from sufficit.explainers.explanation import DrawnMaps, draw_all
from sufficit.explainers.explanation import Method as AnyMethod
from sufficit.explainers.guard import call_guarded
from sufficit.explainers.lax import Lax
from sufficit.explainers.registry import full_word, word_of
from sufficit.metrics.column import Columns, Heading
from sufficit.metrics.columns import ZERO_LINE
from sufficit.perturbation.heatmaps import check_range, normalize, resize
from sufficit.sources.asked import Asked

STRETCH = '--normalize minmax (for compare, normalize = "minmax" in a RUN.toml)'
Role = Literal["method", "control", "reference"]
"""A method is ranked; it must beat the controls; a reference is scored and not ranked."""
CONTROLS = (ZERO_LINE, "random", "center")
STRETCHED = "stretched"  # a note: a map of other proportions than the image
NOT_FINITE = "the model gives NaN or infinite values for it"
_opening = Lock()


@dataclass(frozen=True)
class Maps(DrawnMaps):
    """Heatmaps as a source drew them, and what it has to say of each image."""

    columns: Columns = field(default_factory=dict)  # of the source's own, each [N]
    notes: Mapping[str, Tensor] = field(default_factory=dict)  # which images have a note: bool [N]
    asked: Asked | None = None  # what the model said of the parts that a fit put to it

    def in_full(self, size: tuple[int, int]) -> "Maps":
        """Return the same at the image's size: finished maps, or orders with their shares."""
        maps = self.at(size) if self.shares is None else resize(self.maps, size)
        return replace(self, maps=maps, final=True)

    def with_shares(self) -> Iterator[tuple[Tensor, float | None]]:
        """Return the map of each image, and its share if it is cut."""
        shares = [None] * len(self.maps) if self.shares is None else self.shares.tolist()
        return zip(self.maps, shares, strict=True)

    def rows(self, some: Sequence[int]) -> "Maps":
        """Return the maps of some of the images."""
        places = list(some)
        return Maps(
            maps=self.maps[places],
            final=self.final,
            columns={name: values[places] for name, values in self.columns.items()},
            notes={name: marks[places] for name, marks in self.notes.items()},
            shares=None if self.shares is None else self.shares[places],
            asked=None if self.asked is None else self.asked.rows(places),
        )

    def to(self, device: str) -> "Maps":
        """Return the same on another device."""
        return Maps(
            maps=self.maps.to(device),
            final=self.final,
            columns={name: values.to(device) for name, values in self.columns.items()},
            notes={name: marks.to(device) for name, marks in self.notes.items()},
            shares=None if self.shares is None else self.shares.to(device),
            asked=self.asked,  # it is read on the CPU, wherever the maps are
        )

    def marks(self, kind: str) -> Tensor:
        """Return which images have a kind of note: bool [N]."""
        return self.notes.get(kind, torch.zeros(len(self.maps), dtype=torch.bool))

    @staticmethod
    def joined(parts: Sequence["Maps"], size: tuple[int, int]) -> "Maps":
        """Return the maps of several batches, one after the other."""
        first = parts[0]
        shares = [part.shares for part in parts if part.shares is not None]
        asked = [part.asked for part in parts if part.asked is not None]
        kinds = dict.fromkeys(kind for part in parts for kind in part.notes)
        # A file may hold maps of several sizes: they can be joined at the image's size alone.
        if len({(part.maps.shape[1:], part.final) for part in parts}) > 1:
            parts = [part.in_full(size) for part in parts]
        return Maps(
            maps=torch.cat([part.maps for part in parts]),
            final=parts[0].final,
            columns={n: torch.cat([part.columns[n] for part in parts]) for n in first.columns},
            notes={kind: torch.cat([part.marks(kind) for part in parts]) for kind in kinds},
            shares=torch.cat(shares) if shares else None,
            asked=Asked.joined(asked) if asked else None,
        )


@dataclass(frozen=True)
class SourceFacts:
    """What results record of a source."""

    kind: str  # method, adapter, function or heatmaps
    class_agnostic: bool = False  # it draws one map for every class
    passes: int | str = 0  # forward passes per image, a backward pass counted as two
    method: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    sign: str = "none"
    reference: str = ""
    fit_fills: Sequence[str] = ()  # with which its maps are cut where the model agrees


class Source(Protocol):
    """Whatever gives heatmaps."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def role(self) -> Role:
        """Whether it is ranked."""

    @property
    def headings(self) -> Mapping[str, Heading]:
        """The columns of its own that its maps bring."""

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Draw a map per image. Raise SkipError for images that have none."""

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Raise before a run for what cannot work."""

    def digest(self) -> str:
        """Tell it from another source of the same name: a run is resumed with the same ones."""

    def facts(self) -> SourceFacts:
        """Return what results record of it."""

    def methods(self) -> "list[Method]":
        """Return the methods whose maps it reads: those of one layer share a forward pass."""

    def close(self) -> None:
        """Close its files."""


class SourceBase:
    """What most sources leave as it is. A source of your own gives `name`, `maps` and `digest`."""

    name: str
    role: Role = "method"
    headings: Mapping[str, Heading] = {}
    fills: tuple[str, ...] = ()  # with which it asks the model: no held-out fill is among them
    is_trusted = False  # whether it leaves the model as it was without being watched

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Accept any model and images."""

    def facts(self) -> SourceFacts:
        """Say that it is a source of the user's."""
        return SourceFacts("function")

    def methods(self) -> "list[Method]":
        """Read no method."""
        return []

    def close(self) -> None:
        """Close nothing."""


@dataclass(frozen=True, eq=False)
class Method(SourceBase):
    """A method of Sufficit or a library, an adapter, or a function of the user's."""

    is_trusted = True
    name: str
    method: AnyMethod
    layer: str | None = None
    seed: int = 0
    role: Role = "method"

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Draw the maps, unless they were drawn together with others before."""
        draw_together(model, batch, [self])
        maps: Maps = batch.known[model, self]  # type: ignore[assignment]  # drawn just now
        return maps

    def methods(self) -> "list[Method]":
        """Return the method itself, to be drawn with others."""
        return [self]

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Raise for an adapter of another model, or a method that the model has nothing for."""
        methods_for({self.name: self.method}, model)

    def digest(self) -> str:
        """Return the word with its options, the weights of an adapter, the code of a function."""
        method = self.method
        if isinstance(method, str):
            explainer = explainer_named(method)
            library = explainer.reference if explainer.extra else ""  # with its version
            return "/".join(filter(None, [full_word(method), library]))
        if isinstance(method, tuple):
            return full_word(word_of(*method))
        if isinstance(method, Explainer):
            parts = [identity_of(method.draw), identity_of(method.score)]
            return "/".join([method.description, str(dict(method.chosen)), *parts])
        identity = [identity_of(method)]
        # Two modules of one class differ in their weights.
        if isinstance(method, nn.Module):
            identity += [code_of(method), digest(*method.state_dict().values())]
        return "/".join(filter(None, identity))

    def facts(self) -> SourceFacts:
        """Return kind, options, what becomes of the sign, and what it costs."""
        method = word_of(*self.method) if isinstance(self.method, tuple) else self.method
        if isinstance(method, str | Explainer):
            explainer = explainer_named(method) if isinstance(method, str) else method
            word = method if isinstance(method, str) else explainer.description
            return SourceFacts(kind="method", method=word, **explainer.facts())
        if isinstance(method, Lax):
            return SourceFacts("adapter", class_agnostic=method.class_free, passes=method.passes)
        return SourceFacts("function", getattr(method, "class_agnostic", False) is True)


@dataclass(frozen=True)
class Control(SourceBase):
    """A map that ignores the image: noise by seed and number of the image, or a blob."""

    is_trusted = True
    name: str
    seed: int = 0
    alias_of: str = ""  # the control that a user gave under another name, to rank it

    @property
    def word(self) -> str:
        """Which control it is."""
        return self.alias_of or self.name

    @property
    def role(self) -> Role:  # type: ignore[override]  # computed here
        """Whether it is ranked."""
        return "method" if self.alias_of else "control"

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Draw the control; the noise of an image does not depend on its batch."""
        if self.word == "random":
            drawn = noise(batch.size, self.seed, batch.numbers).to(batch.images.device)
        else:
            drawn = EXPLAINERS[self.word].draw(batch.images)
        return Maps(drawn, final=True)

    def digest(self) -> str:
        """Return its word; the seed is a setting of the run."""
        return self.word

    def facts(self) -> SourceFacts:
        """Return a method that costs nothing."""
        return SourceFacts(kind="method", method=self.word, **EXPLAINERS[self.word].facts())


@dataclass(frozen=True, eq=False)
class MapTensor(SourceBase):
    """Heatmaps in memory, one per image of the run, in the order of the images."""

    is_trusted = True
    name: str
    tensor: Tensor  # [N,h,w], in 0..1 if not normalised
    normalize: str = "none"
    role: Role = "method"

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Return the maps of the batch's images, by their numbers."""
        maps = self.tensor[list(batch.numbers)].float()
        return Maps(normalize(maps, self.normalize).to(batch.images.device), final=True)

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Raise unless there is a finite map for every image, in 0..1 if it is taken as it is."""
        if self.tensor.ndim != 3 or len(self.tensor) != len(names):
            raise UserError(
                f"heatmaps must be [N,h,w] with N = {len(names)} images, got"
                f" {list(self.tensor.shape)}: give one map per image"
            )
        if self.normalize == "none":
            check_range(self.tensor, list(names), ', or pass normalize="minmax"')
        elif not self.tensor.isfinite().all():
            raise UserError("heatmaps must be finite, got NaN or infinite values: replace them")

    def digest(self) -> str:
        """Return the values."""
        return f"{digest(self.tensor)}, normalize {self.normalize}"

    def facts(self) -> SourceFacts:
        """Return heatmaps from elsewhere."""
        return SourceFacts("heatmaps")


@dataclass(eq=False)
class MapFile(SourceBase):
    """A heatmap file: one map per image, found by the image's name.

    Maps that are stored before the cut are cut at their shares, and need no normalisation.
    """

    is_trusted = True
    name: str
    path: Path
    normalize: str = "none"
    role: Role = "method"
    _opened: HeatmapFile | None = field(default=None, repr=False)

    @property
    def file(self) -> HeatmapFile:
        """The open file; each process opens it once."""
        with _opening:  # several threads read
            self._opened = self._opened or HeatmapFile(self.path)
            return self._opened

    def __getstate__(self) -> dict[str, Any]:
        # An open file cannot be sent to another process, which opens its own.
        return vars(self) | {"_opened": None}

    def close(self) -> None:
        """Close the file; it opens again when it is read."""
        if self._opened is not None:
            self._opened.__exit__()
        self._opened = None

    def check(self, model: Classifier, names: Sequence[str]) -> None:
        """Raise where no image has a map, or a key fits two images."""
        with closing(self):
            keys = [self.file.key(name) for name in names]
            if not any(key is not None for key in keys):
                raise UserError(
                    f"{self.path} has a heatmap for none of the {len(names)} images. Images are"
                    f" named like {names[0]!r}, its keys like"
                    f" {(self.file.keys or ['(none)'])[0]!r}: use the image names as keys"
                )

    def maps(self, model: Classifier, batch: Batch) -> Maps:
        """Read the maps of the batch's images; skip images without a usable one."""
        maps: list[Tensor] = []
        shares: list[float] = []
        wrong: dict[int, str] = {}
        for row, name in enumerate(batch.names):
            try:
                maps.append(self.read(name))
                if self.file.is_cut:
                    shares.append(self.file.share(self._key(name)))
            except (BadImageError, HeatmapError, OSError) as error:
                wrong[row] = str(error)
        if wrong:
            raise SkipError(f"{self.path} lacks heatmaps of {len(wrong)} images", wrong)
        # A map of other proportions was drawn on another view of the image, or has its axes turned.
        shape = batch.size[0] / batch.size[1]
        stretched = [not 0.9 < one.shape[0] / one.shape[1] / shape < 1.1 for one in maps]
        if len({one.shape for one in maps}) > 1:  # a file may hold maps of several sizes
            maps = [resize(one[None], batch.size)[0] for one in maps]
        return Maps(
            maps=torch.stack(maps).to(batch.images.device),
            final=True,
            notes={STRETCHED: torch.tensor(stretched)},
            shares=torch.tensor(shares, dtype=torch.float64) if shares else None,
        )

    def _key(self, name: str) -> str:
        """Return the key of an image; raise if it has none."""
        key = self.file.key(name)
        if key is None:
            raise BadImageError(f"no heatmap: {self.path.name} has no such key")
        return key

    def read(self, name: str) -> Tensor:
        """Return the map of an image: [h,w] in 0..1, or any order of the pixels if it is cut."""
        stored = self.file.read(self._key(name))[None]
        if not stored.isfinite().all():
            raise BadImageError(f"its heatmap in {self.path.name} has NaN or infinite values")
        if self.file.is_cut:
            return stored[0]
        heatmap = normalize(stored, self.normalize)
        check_range(heatmap, [name], f", or pass {STRETCH}")
        return heatmap[0]

    def digest(self) -> str:
        """Return the contents of the file."""
        return f"{self.file.digest()}, normalize {self.normalize}"

    def facts(self) -> SourceFacts:
        """Return heatmaps from elsewhere."""
        return SourceFacts("heatmaps")


def draw(model: Classifier, batch: Batch, sources: Sequence[Source]) -> dict[str, Maps]:
    """Draw every source's maps. Methods of one layer share a forward pass.

    Raise SkipError, with the rows and reasons, for images that a source has no map for.
    """
    # A source of the user's need not have `methods`.
    lists: list[list[Method]] = [getattr(source, "methods", list)() for source in sources]
    draw_together(model, batch, [method for methods in lists for method in methods])
    return {source.name: drawn_by(source, model, batch) for source in sources}


def drawn_by(source: Source, model: Classifier, batch: Batch) -> Maps:
    """Return the maps of a source. One of the user's must leave the model as it was."""
    # Ours are tested to leave the model as it was; to watch them takes time in every batch.
    if getattr(source, "is_trusted", False):
        return source.maps(model, batch)
    return call_guarded(
        f"source {source.name}",
        source,
        lambda rows: source.maps(model, batch.rows(rows)),
        lambda parts: Maps.joined(parts, batch.size),
        classifier=model,
        images=batch.images,
        names=batch.names,
        seed=getattr(source, "seed", 0),
    )


def draw_together(model: Classifier, batch: Batch, methods: Sequence[Method]) -> None:
    """Draw methods of one layer by one pass; the batch remembers their maps."""
    shared: dict[tuple[str | None, int], list[Method]] = {}
    for method in methods:
        # By the model too: a twin of it draws other maps.
        if (model, method) not in batch.known:
            shared.setdefault((method.layer, method.seed), []).append(method)
    for (layer, seed), alike in shared.items():
        try:
            drawn = draw_all(
                model,
                batch.images,
                batch.targets,
                {method.name: method.method for method in alike},
                layer=layer,
                seed=seed,
                progress=False,
                names=batch.names,
            )
        except NotFiniteError as error:
            raise SkipError(str(error), dict.fromkeys(error.images, NOT_FINITE)) from error
        for method in alike:
            own = drawn[method.name]
            batch.known[model, method] = Maps(own.maps, own.final, own.shares)


def noise(size: tuple[int, int], seed: int, numbers: Sequence[int]) -> Tensor:
    """Return uniform noise per pixel by seed and image number: -> [N,H,W]."""
    generators = [np.random.default_rng([seed, number]) for number in numbers]
    maps = [generator.random(size, dtype=np.float32) for generator in generators]
    return torch.from_numpy(np.stack(maps))
