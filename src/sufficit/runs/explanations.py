"""Images read and explained by every source, each once in a run; donors of leakage first."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as Collection
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.fingerprint import digest
from sufficit.data.images import ignore_image_warnings
from sufficit.data.loader import Entry, ImageLoader, Item, Unit, decode_entry
from sufficit.data.truth import TruthError
from sufficit.errors import EmptyHeatmapWarning, NotFiniteError, UserError, cannot_resume
from sufficit.explainers.explanation import DrawnMaps
from sufficit.runs.job import Job
from sufficit.runs.maps import GivenMaps, draw_sources, maps_as_file, maps_from_file, pack, unpack
from sufficit.runs.store import DONORS, HEATMAPS, StageFile, Store

NOT_FINITE = "the model gives NaN or infinite values for it"


@dataclass(frozen=True)
class Sample(Item):
    """An image as the model sees it, and its maps of sources that are not drawn here."""

    maps: Mapping[str, Tensor]  # source -> [h,w]
    contents: str = ""  # a digest of the pixels
    truth: Tensor | None = None  # [H,W]
    problem: str = ""  # why its truth cannot be used


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


class ImageWorker:
    """Reads and explains the units of a job; it holds the model, and the donors once drawn."""

    def __init__(self, job: Job, store: Store) -> None:
        self.job, self.store = job, store
        self.loader = ImageLoader(self._sample, job.config.on_error, one_size=job.config.leak)
        self.donors: MapBatch | None = None
        self._donor_rows: dict[int, int] = {}  # image number -> row

    def batch(self, items: Sequence[Sample]) -> tuple[MapBatch | None, dict[str, str]]:
        """The images with every source's maps, without those the model gives NaN for."""
        broken: dict[str, str] = {}
        left = list(items)
        while left:
            images = torch.stack([item.pixels for item in left]).to(self.job.classifier.device)
            targets = self._targets(left, images)
            try:
                maps = self._maps(left, images, targets)
            except NotFiniteError as error:
                broken |= self.not_finite([left[i].name for i in error.images])
                left = [item for item in left if item.name not in broken]
                continue
            numbers = [item.entry.number for item in left]
            names, truth = [item.name for item in left], _truth(left)
            return MapBatch(numbers, names, images, targets, maps, truth), broken
        return None, broken

    def not_finite(self, names: Sequence[str]) -> dict[str, str]:
        """Images that the model gives NaN for, with the reason to skip them."""
        if names and self.job.config.on_error == "stop":
            remedy = "Try another --precision, or pass --on-error skip."
            raise UserError(f"{names[0]}: {NOT_FINITE}. {remedy}")
        return dict.fromkeys(names, NOT_FINITE)

    def maps_file(self, batch: MapBatch, facts: Mapping[str, Any]) -> StageFile:
        """The maps of a unit at the size they were drawn, as a file of the store."""
        shape = batch.images.shape[1:]
        tensors, known = maps_as_file(batch.numbers, shape, batch.maps, self.job.sources)
        return HEATMAPS, tensors, {**facts, **known, "names": batch.names}

    def draw_donors(self) -> None:
        """Read and explain the images that leakage lays masks over; once in a run."""
        if not self.job.pool or self.donors is not None:
            return
        self.donors = self._stored_donors() if self.store.has(DONORS, 0) else self._new_donors()
        if self.donors is not None:
            self._donor_rows = {number: row for row, number in enumerate(self.donors.numbers)}

    def _stored_donors(self) -> MapBatch | None:
        kept, device = self.store.read(DONORS, 0), self.job.classifier.device
        if not kept.facts["names"]:
            return None
        images = unpack(kept.tensors["images"]).to(device)
        known = (kept.facts["numbers"], kept.facts["names"], images, kept.tensors["targets"])
        return MapBatch(*known, maps_from_file(kept, self.job.config.seed, device))

    def _new_donors(self) -> MapBatch | None:
        parts: list[MapBatch] = []
        pool = [self.job.entries[number] for number in self.job.pool]
        size = self.job.entries.unit
        starts = range(0, len(pool), size)
        groups = (Unit(k, tuple(pool[s : s + size])) for k, s in enumerate(starts))
        for _, items in self.loader.ahead(groups):
            batch, _ = self.batch(items)
            parts += [] if batch is None else [batch]
        self.loader.skipped.clear()  # they are met again in their unit
        if not parts:
            self.store.write(DONORS, 0, {}, {"names": []})
            return None
        maps = {
            name: DrawnMaps(torch.cat([part.maps[name].maps for part in parts]), one.final)
            for name, one in parts[0].maps.items()
        }
        donors = MapBatch(
            [number for part in parts for number in part.numbers],
            [name for part in parts for name in part.names],
            torch.cat([part.images for part in parts]),
            torch.cat([part.targets for part in parts]),
            maps,
        )
        tensors, facts = maps_as_file(
            donors.numbers, donors.images.shape[1:], maps, self.job.sources
        )
        tensors |= {"images": pack(donors.images), "targets": donors.targets}
        self.store.write(DONORS, 0, tensors, {**facts, "names": donors.names})
        return donors

    def _sample(self, entry: Entry) -> Sample:
        """An image with the maps given for it; called in the loader's threads."""
        row = self._donor_rows.get(entry.number)
        if row is not None and self.donors is not None:
            pixels = self.donors.images[row].cpu()
        else:
            pixels = entry.image.read(self.job.classifier.view)
        given = {n: s for n, s in self.job.sources.items() if isinstance(s, GivenMaps)}
        maps = {name: source.read(entry) for name, source in given.items()}
        contents = digest(pixels)
        if self.job.truth is None:
            return Sample(entry, pixels, maps, contents)
        try:
            truth = self.job.truth.read(entry, self.job.classifier.view)
            if truth.shape != pixels.shape[1:]:
                came = f"{list(truth.shape)}, not {list(pixels.shape[1:])} as the image"
                raise TruthError(f"its truth is {came}: give it in the image's size")
        except TruthError as error:
            return Sample(
                entry, pixels, maps, contents, torch.zeros_like(pixels[0]).byte(), str(error)
            )
        return Sample(entry, pixels, maps, contents, truth)

    def _targets(self, items: Sequence[Sample], images: Tensor) -> Tensor:
        """Labels, or the model's predictions, asked once so that all sources explain the same."""
        if self.job.targets == "label":
            return torch.tensor([item.entry.label for item in items])
        with torch.no_grad():
            return self.job.classifier(images).argmax(1).cpu()

    def _maps(
        self, items: Sequence[Sample], images: Tensor, targets: Tensor
    ) -> dict[str, DrawnMaps]:
        """Every source's maps; those of donors are known already."""
        rows = [self._donor_rows.get(item.entry.number) for item in items]
        new = [i for i, row in enumerate(rows) if row is None]
        found: dict[str, DrawnMaps] = {}
        if new:
            some, job = [items[i] for i in new], self.job
            try:
                found = draw_sources(
                    job.classifier,
                    job.sources,
                    images if len(new) == len(items) else images[new],
                    targets[new],
                    [item.entry.number for item in some],
                    [item.maps for item in some],
                    seed=job.config.seed,
                    layer=job.config.layer,
                    names=[item.name for item in some],
                )
            except NotFiniteError as error:  # its indices count within `some`
                raise NotFiniteError(str(error), [new[i] for i in error.images]) from error
        if len(new) == len(items) or self.donors is None:
            return found
        drawn = iter(range(len(new)))
        order = [(next(drawn), True) if row is None else (row, False) for row in rows]
        return {
            name: DrawnMaps(
                torch.stack([found[name].maps[k] if fresh else one.maps[k] for k, fresh in order]),
                one.final,
            )
            for name, one in self.donors.maps.items()
        }


def check_contents(job: Job, store: Store, stage: str, changed: Collection[int] | None) -> None:
    """Raise if images of finished units are others now. `changed` are those to read; None: all."""
    read = partial(decode_entry, job.classifier.view)
    loader = ImageLoader(read, one_size=False)

    def check(numbers: Iterable[int], known: Mapping[str, str]) -> None:
        entries = [job.entries[k] for k in numbers if changed is None or k in changed]
        for item in loader.items(entries):
            was, is_now = known.get(item.name), digest(item.pixels)
            if was not in (None, is_now):
                raise cannot_resume(store.folder, f"contents of {item.name}", was, is_now)
        loader.skipped.clear()

    for number in sorted(store.done(stage)):
        entries = job.units[number].entries
        if changed is None or not changed.isdisjoint({entry.number for entry in entries}):
            check([entry.number for entry in entries], store.facts(stage, number)["contents"])
    if store.has(DONORS, 0):
        kept = store.read(DONORS, 0)
        images = unpack(kept.tensors["images"]) if kept.facts["names"] else ()
        known = {name: digest(one) for name, one in zip(kept.facts["names"], images, strict=True)}
        check(kept.facts.get("numbers", ()), known)


def _truth(items: Sequence[Sample]) -> Tensor | None:
    """The truths of some images, None where there is none at all: [N,H,W]."""
    known = [item.truth for item in items if item.truth is not None]
    return torch.stack(known) if known else None


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings about single files and units: they are counted and reported once."""
    with ignore_image_warnings():
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        yield
