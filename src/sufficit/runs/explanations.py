"""Images read and explained by every source, each once in a run; donors of leakage first."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as Collection
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.fingerprint import digest
from sufficit.data.images import ignore_image_warnings
from sufficit.data.loader import Entry, ImageLoader, Item, Unit, decode_entry
from sufficit.data.truth import TruthError
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError, cannot_resume
from sufficit.explainers import EXPLAINERS, Method, explainer_named
from sufficit.explainers.explanation import DrawnMaps, draw_all
from sufficit.perturbation.heatmaps import resize
from sufficit.runs.job import Job
from sufficit.runs.maps import GivenMaps, Source, maps_from_file, noise, pack, unpack
from sufficit.runs.store import DONORS, HEATMAPS, StageFile, Store

NOT_FINITE = "the model gives NaN or infinite values for it"


@dataclass(frozen=True)
class Sample(Item):
    """An image as the model sees it, and its maps of sources that are not drawn here."""

    maps: Mapping[str, Tensor]  # source -> [h,w]
    contents: str  # a digest of the pixels
    truth: Tensor | None  # [H,W]
    problem: str  # why its truth cannot be used


@dataclass(frozen=True)
class MapBatch:
    """Images with their targets and every source's maps: what a unit is scored from."""

    numbers: Sequence[int]  # which of all images these are
    names: Sequence[str]
    images: Tensor  # [N,C,H,W]
    targets: Tensor  # [N]
    maps: Mapping[str, DrawnMaps]  # source -> [N,h,w]
    truth: Tensor | None = None  # [N,H,W]

    @cached_property
    def heatmaps(self) -> dict[str, Tensor]:
        """Every source's heatmaps at the image's size: source -> [N,H,W]."""
        size = self.images.shape[2], self.images.shape[3]
        return {name: one.at(size) for name, one in self.maps.items()}

    @property
    def empty(self) -> dict[str, int]:
        """The number of each source's heatmaps that are all zeros."""
        return {name: int((one.amax((1, 2)) == 0).sum()) for name, one in self.heatmaps.items()}

    def rows(self, some: Sequence[int]) -> "MapBatch":
        """Some of the images."""
        maps = {name: DrawnMaps(one.maps[some], one.final) for name, one in self.maps.items()}
        numbers, names = [self.numbers[i] for i in some], [self.names[i] for i in some]
        truth = None if self.truth is None else self.truth[some]
        return MapBatch(numbers, names, self.images[some], self.targets[some], maps, truth)

    def as_file(self, sources: Mapping[str, Source], **facts: Any) -> StageFile:
        """The maps at the size they were drawn, as a file of the store; of controls the name."""
        words = {name: source for name, source in sources.items() if isinstance(source, str)}
        # A control reads only the image's size: it is drawn again instead of stored.
        controls = {name: w for name, w in words.items() if explainer_named(w).needs == "images"}
        drawn = {name: one for name, one in self.maps.items() if name not in controls}
        known: dict[str, Any] = {"numbers": self.numbers, "names": self.names}
        known["shape"] = self.images.shape[1:]
        known |= {"final": {name: one.final for name, one in drawn.items()}, "controls": controls}
        return HEATMAPS, {f"maps/{name}": one.maps for name, one in drawn.items()}, facts | known

    @staticmethod
    def joined(parts: Sequence["MapBatch"]) -> "MapBatch":
        """The images of several batches in the order of their numbers, without truth."""
        maps = {
            name: DrawnMaps(torch.cat([part.maps[name].maps for part in parts]), one.final)
            for name, one in parts[0].maps.items()
        }
        numbers = [number for part in parts for number in part.numbers]
        names = [name for part in parts for name in part.names]
        images, targets = ([getattr(p, name) for p in parts] for name in ("images", "targets"))
        whole = MapBatch(numbers, names, torch.cat(images), torch.cat(targets), maps)
        return whole.rows(sorted(range(len(numbers)), key=numbers.__getitem__))


def draw_sources(
    job: Job, items: Sequence[Sample], images: Tensor, targets: Tensor
) -> dict[str, DrawnMaps]:
    """Every source's maps of a batch, by one shared forward pass: [N,C,H,W] -> each [N,h,w].

    The control `random` depends on the seed and the number of the image, not on the batch.
    """
    seed, numbers = job.config.seed, [item.entry.number for item in items]
    control = replace(EXPLAINERS["random"], draw=lambda images, _: noise(images, seed, numbers))
    methods: dict[str, Method] = {
        name: control if source == "random" else source
        for name, source in job.sources.items()
        if not isinstance(source, GivenMaps)
    }
    how: Any = {"layer": job.config.layer, "seed": seed, "progress": False}
    how["names"] = [item.name for item in items]
    found = draw_all(job.classifier, images, targets, methods, **how) if methods else {}
    for name in job.sources.keys() - methods.keys():
        maps = [item.maps[name] for item in items]
        if len({one.shape for one in maps}) > 1:  # a file may hold maps of several sizes
            maps = [resize(one[None], (images.shape[2], images.shape[3]))[0] for one in maps]
        found[name] = DrawnMaps(torch.stack(maps).to(images.device), final=True)
    return {name: found[name] for name in job.sources}


class ImageWorker:
    """Reads and explains the units of a job; it holds the model, and the donors once drawn."""

    def __init__(self, job: Job, store: Store) -> None:
        self.job, self.store = job, store
        self.loader = ImageLoader(self._sample, job.config.on_error, one_size=job.config.leak)
        self.donors: MapBatch | None = None
        self._donor_rows: dict[int, int] = {}  # image number -> row

    def batch(self, unit: Unit, items: Sequence[Sample]) -> tuple[MapBatch | None, dict[str, Any]]:
        """A unit's images with every source's maps, without those the model gives NaN for.

        The facts are those of a unit without images: which were skipped, and contents.
        """
        job, parts, skipped = self.job, list[MapBatch](), self.loader.dropped(unit)
        contents = {item.name: item.contents for item in items}
        facts = {"names": [], "skipped": skipped, "contents": contents}
        rows = [self._donor_rows.get(item.entry.number) for item in items]
        if self.donors is not None and (known := [row for row in rows if row is not None]):
            parts = [self.donors.rows(known)]  # which are explained already
        left = [item for item, row in zip(items, rows, strict=True) if row is None]
        while left:
            names, numbers = [item.name for item in left], [item.entry.number for item in left]
            images = torch.stack([item.pixels for item in left]).to(job.classifier.device)
            if job.targets == "label":
                targets = torch.tensor([item.entry.label for item in left])
            else:  # asked once, so that all sources explain the same class
                with torch.no_grad():
                    targets = job.classifier(images).argmax(1).cpu()
            try:
                maps = draw_sources(job, left, images, targets)
            except NotFiniteError as error:
                skipped |= self.not_finite([names[i] for i in error.images])
                left = [item for item in left if item.name not in skipped]
                continue
            parts.append(MapBatch(numbers, names, images, targets, maps))
            break
        if not parts:
            return None, facts
        found = parts[0] if len(parts) == 1 else MapBatch.joined(parts)
        whole = [item.truth for item in items if item.name not in skipped]
        truths = [one for one in whole if one is not None]  # all of them, or none
        return replace(found, truth=torch.stack(truths) if truths else None), facts

    def not_finite(self, names: Sequence[str]) -> dict[str, str]:
        """Images that the model gives NaN for, with the reason to skip them."""
        if names and self.job.config.on_error == "stop":
            remedy = "Try another --precision, or pass --on-error skip."
            raise UserError(f"{names[0]}: {NOT_FINITE}. {remedy}")
        return dict.fromkeys(names, NOT_FINITE)

    def draw_donors(self) -> None:
        """Have the images that leakage lays masks over, read and explained once in a run."""
        job, store, device = self.job, self.store, self.job.classifier.device
        if not job.pool or self.donors is not None:
            return
        if not store.has(DONORS, 0):
            store.write(DONORS, 0, *self._new_donors())
        kept = store.read(DONORS, 0)
        if numbers := kept.facts.get("numbers"):
            maps = maps_from_file(kept, job.config.seed, device)
            images, targets = unpack(kept.tensors["images"]).to(device), kept.tensors["targets"]
            ordered = {name: maps[name] for name in job.sources}
            self.donors = MapBatch(numbers, kept.facts["names"], images, targets, ordered)
            self._donor_rows = {number: row for row, number in enumerate(numbers)}

    def _new_donors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and facts of the donors' file."""
        parts, contents = list[MapBatch](), dict[str, str]()
        pool, size = [self.job.entries[number] for number in self.job.pool], self.job.entries.unit
        groups = (tuple(pool[start : start + size]) for start in range(0, len(pool), size))
        for unit, items in self.loader.ahead(Unit(k, one) for k, one in enumerate(groups)):
            batch, known = self.batch(unit, items)  # what is skipped is met again in its unit
            parts += [] if batch is None else [batch]
            contents |= known["contents"]
        if not parts:
            return {}, {"numbers": [], "contents": contents}
        donors = MapBatch.joined(parts)
        _, tensors, facts = donors.as_file(self.job.sources, contents=contents)
        return {**tensors, "images": pack(donors.images), "targets": donors.targets}, {**facts}

    def _sample(self, entry: Entry) -> Sample:
        """An image with the maps given for it; called in the loader's threads."""
        row = self._donor_rows.get(entry.number)
        if row is not None and self.donors is not None:
            pixels = self.donors.images[row].cpu()
        else:
            pixels = entry.image.read(self.job.classifier.view)
        given = {n: s for n, s in self.job.sources.items() if isinstance(s, GivenMaps)}
        maps = {name: source.read(entry) for name, source in given.items()}
        truth, problem = None, ""
        if self.job.truth is not None:
            try:
                truth = self.job.truth.read(entry, self.job.classifier.view)
                if truth.shape != pixels.shape[1:]:
                    came = f"{list(truth.shape)}, not {list(pixels.shape[1:])} as the image"
                    raise TruthError(f"its truth is {came}: give it in the image's size")
            except TruthError as error:
                truth, problem = torch.zeros_like(pixels[0]).byte(), str(error)
        return Sample(entry, pixels, maps, digest(pixels), truth, problem)


def check_contents(job: Job, store: Store, stage: str, changed: Collection[int] | None) -> None:
    """Raise if images of finished units are others now. `changed` are those to read; None: all."""
    loader = ImageLoader(partial(decode_entry, job.classifier.view), one_size=False)
    done = [(stage, number) for number in sorted(store.done(stage))]
    for kind, number in [*done, *([(DONORS, 0)] if store.has(DONORS, 0) else [])]:
        units = job.units[number].entries
        entries = units if kind == stage else tuple(job.entries[k] for k in job.pool)
        read = [entry for entry in entries if changed is None or entry.number in changed]
        known = store.facts(kind, number).get("contents", {}) if read else {}
        for item in loader.items(read):
            was, is_now = known.get(item.name), digest(item.pixels)
            if was not in (None, is_now):
                raise cannot_resume(store.folder, f"contents of {item.name}", was, is_now)
        loader.skipped.clear()


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings about single files and units: they are counted and reported once."""
    with ignore_image_warnings():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        yield
