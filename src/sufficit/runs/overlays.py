"""`sufficit explain`: a run without scoring. Overlays, sheets, and heatmap files to score later."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sufficit import plots
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import ImageFile, ImageSource, class_forms, class_named, list_images
from sufficit.data.loader import Unit, check_any
from sufficit.errors import UserError, unknown
from sufficit.files import (
    make_folder,
    read_json,
    remove_folder,
    short_name,
    version_of,
    writing,
)
from sufficit.progress import Progress
from sufficit.provenance import provenance, save_json
from sufficit.runs.config import Workers
from sufficit.runs.engine import Worker, compute, opened, start
from sufficit.runs.explanations import Sample
from sufficit.runs.job import Job
from sufficit.runs.maps import heatmaps_from_file, source_facts
from sufficit.runs.store import HEATMAPS, StageFile, Store

SHEET_ROWS = 24  # images of a sheet, and of a unit


def images_in(paths: Sequence[Path]) -> ImageSource:
    """The images among files and folders, each under its own name."""
    found: list[ImageFile] = []
    for path in paths:
        if path.suffix == ".parquet" or path.is_dir():
            found.extend(list_images(path))
        elif path.is_file() and path.suffix == ".tar":
            raise UserError(f"{path} is a shard: give the folder it is in")
        elif path.is_file():
            found.append(ImageFile(str(path), path.name, None, version=version_of(path)))
        else:
            raise UserError(f"no image file or folder at {path}: check the path")
    twice = [name for name, count in Counter(i.name for i in found).items() if count > 1]
    if twice:
        raise UserError(f"two images are called {twice[0]}: give the folder above them instead")
    return ImageSource(found)


def class_number(target: str, classes: Sequence[str] | None) -> int:
    """A class by number or by name."""
    named = class_named(target, class_forms(classes or ()))
    if named is not None:
        return named
    if re.fullmatch("[0-9]{1,18}", target):
        return int(target)
    if re.fullmatch(r"[+-]?[\d.]+", target):
        raise UserError(f"a class number must be a whole number, 0 or more, got {target[:40]!r}")
    if classes is None:
        raise UserError(f"the model has no class names: give --target a number, got {target!r}")
    raise unknown("class", target, classes)


def explain_run(
    job: Job,
    out: Path,
    *,
    overwrite: bool = False,
    progress: bool | None = None,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Draw every source's heatmap of every image: sheets, overlays, METHOD.npz, run.json last.

    Return the record. Run again after an interruption, it draws only the units that are missing.
    """
    earlier: list[str] = []  # the methods of a run of explain that is in the folder
    with suppress(UserError, KeyError, TypeError):
        earlier = list(read_json(out / "run.json")["methods"])
    with opened(job, out, overwrite, workers) as (placed, owned, cluster):
        if overwrite:  # its files, and nothing else
            remove_folder(out / "overlays")
            sheets = (p for p in out.glob("sheet*.png") if re.fullmatch(r"sheet(-\d+)?", p.stem))
            for path in [*sheets, *(p for p in out.glob("*.npz") if p.stem in earlier)]:
                path.unlink()
        store = start(placed, owned, placed.key(), (HEATMAPS,))
        compute(OverlayWorker(placed, store, HEATMAPS), progress, cluster)
        facts = [store.facts(HEATMAPS, unit) for unit in range(len(job.units))]
        skipped = {name: why for one in facts for name, why in one["skipped"].items()}
        n = sum(len(one["names"]) for one in facts)
        if not n:
            store.clear_units()
        check_any(n, len(skipped), skipped)
        for name in job.sources:
            write_heatmaps(out / f"{name}.npz", _heatmaps(store, facts, name, job.config.seed))
        named = [pair for one in facts for pair in zip(one["names"], one["targets"], strict=True)]
        empty = {name: sum(one["empty"].get(name, 0) for one in facts) for name in job.sources}
        record = provenance(asdict(job.config), job.classifier.device, job.classifier.dtype) | {
            "n": n,
            "methods": list(job.sources),
            "sources": {name: source_facts(source) for name, source in job.sources.items()},
            "targets": dict(named),
            "empty_heatmaps": empty,
            "skipped": skipped,
        }
        save_json(out / "run.json", record)
        store.clear_units()
    return record


def _heatmaps(
    store: Store, facts: Sequence[Mapping[str, Any]], source: str, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Every image's heatmap at the image's size, a unit at a time."""
    for unit, one in enumerate(facts):
        if one["names"]:
            maps = heatmaps_from_file(store.read(HEATMAPS, unit), seed)[source]
            yield from zip(one["names"], maps, strict=True)


class OverlayWorker(Worker):
    """Draws units instead of scoring them."""

    def work(
        self, unit: Unit, items: Sequence[Sample], tick: Progress | None = None
    ) -> list[StageFile]:
        """Overlays and a sheet of a unit, then its heatmaps, which make it done."""
        batch, facts = self.batch(unit, items)
        if batch is None:
            return [(HEATMAPS, {}, facts | {"targets": [], "empty": {}})]
        from PIL import Image

        classifier, out = self.job.classifier, self.store.folder
        with torch.no_grad():
            probabilities = classifier(batch.images).float().softmax(1).cpu()
        heatmaps = {name: maps.cpu() for name, maps in batch.heatmaps.items()}
        images, targets = batch.images.cpu(), batch.targets.tolist()
        overlays = make_folder(out / "overlays")
        for method, maps in heatmaps.items():
            for name, image, heatmap in zip(batch.names, images, maps, strict=True):
                pixels = (plots.blend(image, heatmap) * 255).round().to(torch.uint8).numpy()
                path = _inside(overlays, f"{name}.{method}.png")
                make_folder(path.parent)
                with writing(path) as part:
                    Image.fromarray(pixels).save(part)
        titles = [
            row_title(name, row, target, classifier.classes)
            for name, row, target in zip(batch.names, probabilities, targets, strict=True)
        ]
        sheet = "sheet.png" if unit.number == 0 else f"sheet-{unit.number + 1}.png"
        plots.save(plots.sheet_figure(images, heatmaps, titles), out / sheet)
        known = facts | {"targets": targets, "empty": batch.empty}
        return [batch.as_file(self.job.sources, **known)]


def row_title(name: str, probabilities: Tensor, target: int, classes: Sequence[str] | None) -> str:
    """File, likeliest classes with probabilities, and the class explained if it is another."""
    numbers: list[int] = probabilities.topk(min(3, len(probabilities))).indices.tolist()
    words = {k: classes[k] if classes else f"class {k}" for k in (*numbers, target)}
    lines = [f"{words[k][:22]} {probabilities[k]:.2f}" for k in numbers]
    if target != numbers[0]:
        lines.append(f"explained: {words[target][:14]} {probabilities[target]:.2f}")
    return "\n".join([name if len(name) <= 28 else f"...{name[-25:]}", *lines])


def _inside(folder: Path, name: str) -> Path:
    """The path of a file below a folder; raise where the name leads out of it."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{name!r} leads out of {folder}: rename the image")
    return path.with_name(short_name(path.name))
