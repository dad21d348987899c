"""`sufficit explain`: a run without scoring. Overlays, sheets, and heatmap files to score later."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sufficit import plots
from sufficit.data.heatmap_files import heatmap_writer
from sufficit.data.images import ImageFile, ImageSource, class_forms, class_named, list_images
from sufficit.data.loader import check_any
from sufficit.errors import UserError, unknown
from sufficit.files import (
    make_folder,
    read_json,
    remove_folder,
    short_name,
    version_of,
    writing,
)
from sufficit.progress import bar
from sufficit.provenance import plain, provenance, save_json
from sufficit.runs.drawing import draw_unit
from sufficit.runs.engine import quiet
from sufficit.runs.job import Job
from sufficit.runs.shown import maps_in_full
from sufficit.runs.spread import Spread, in_this_process
from sufficit.runs.store import RUN, Store
from sufficit.runs.unit_rows import EMPTY, SKIPPED, Rows

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
    spread: Spread | None = None,
) -> dict[str, Any]:
    """Draw every source's heatmap of every image: sheets, overlays, METHOD.npz, run.json last.

    Return the record. Run again after an interruption, it draws only the units that are missing;
    after its end, it draws nothing.
    """
    earlier: list[str] = []  # the methods of a run of explain that is in the folder
    with suppress(UserError, KeyError, TypeError):
        earlier = list(read_json(out / "run.json")["methods"])
    compute = spread or in_this_process
    job = replace(job, only=())
    with quiet(), closing(job), Store.locked(out, overwrite=overwrite) as owned:
        if overwrite:  # its files, and nothing else
            remove_folder(out / "overlays")
            sheets = (p for p in out.glob("sheet*.png") if re.fullmatch(r"sheet(-\d+)?", p.stem))
            for path in [*sheets, *(p for p in out.glob("*.npz") if p.stem in earlier)]:
                path.unlink()
        key = job.key()
        finished = owned.finished(key, job.entries)
        if finished is not None:
            owned.clear_units()  # a kill may have left some
            return finished
        owned.check_free()
        store = owned.start(key, job.entries)
        units = range(len(job.units))
        missing = [job.units[number] for number in units if number not in store.done()]
        total = job.units.images_in(units)
        done = total - job.units.images_in(unit.number for unit in missing)
        with bar("explaining", progress) as tick:
            for rows in compute(job, store, partial(draw_unit, job), missing):
                _draw_pictures(job, out, rows)
                store.write(rows)
                done += job.units.images_in([rows.unit])
                if tick:
                    tick(done, total)
        record = _record(job, store, units)
        for source in job.sources:
            with heatmap_writer(out / f"{source.name}.npz") as write:
                for name, heatmap, share in _heatmaps(job, store, units, source.name):
                    write(name, heatmap, share)
        save_json(out / "run.json", record)
        store.clear_units()
    return record


def _record(job: Job, store: Store, units: range) -> dict[str, Any]:
    """What run.json holds; raise if no image could be drawn."""
    skipped: dict[str, str] = {}
    targets: dict[str, int] = {}
    empty = dict.fromkeys((source.name for source in job.sources), 0)
    for unit in units:
        rows = store.read(unit)
        skipped |= rows.notes.get(SKIPPED, {})
        targets |= dict(zip(rows.names, rows.targets.tolist(), strict=True))
        for source, columns in rows.values.items():
            empty[source] += int(columns[EMPTY].sum())
    if not targets:
        store.clear_units()
    check_any(len(targets), len(skipped), skipped)
    known = provenance(asdict(job.config), job.classifier.device, job.classifier.dtype)
    found: dict[str, Any] = plain(
        known
        | {
            "n": len(targets),
            "methods": [source.name for source in job.sources],
            "sources": {source.name: source.facts() for source in job.sources},
            "targets": targets,
            "empty_heatmaps": empty,
            "skipped": skipped,
            RUN: store.run,
        }
    )
    return found


def _heatmaps(
    job: Job, store: Store, units: range, source: str
) -> Iterator[tuple[str, Tensor, float | None]]:
    """Every image's name, heatmap at the image's size, and share if it is cut."""
    for unit in units:
        kept = store.read_maps(unit)
        if kept.names:
            maps = maps_in_full(kept, job.config.seed)[source]
            for name, (heatmap, share) in zip(kept.names, maps.with_shares(), strict=True):
                yield name, heatmap, share


def _draw_pictures(job: Job, out: Path, rows: Rows) -> None:
    """Write the overlays and the sheet of a unit."""
    from PIL import Image

    if not len(rows):
        return
    classifier = job.classifier
    batch, _ = job.reader.entries([job.entries[number] for number in rows.numbers])
    assert batch is not None  # it was drawn just now
    with torch.no_grad():
        probabilities = classifier(batch.images).float().softmax(1).cpu()
    size = batch.size
    heatmaps = {name: one.at(size).cpu() for name, one in rows.maps.items()}
    images = batch.images.cpu()
    overlays = make_folder(out / "overlays")
    for method, maps in heatmaps.items():
        for name, image, heatmap in zip(rows.names, images, maps, strict=True):
            pixels = (plots.blend(image, heatmap) * 255).round().to(torch.uint8).numpy()
            path = _inside(overlays, f"{name}.{method}.png")
            make_folder(path.parent)
            with writing(path) as part:
                Image.fromarray(pixels).save(part)
    targets = rows.targets.tolist()
    titles = [
        row_title(name, row, target, classifier.classes)
        for name, row, target in zip(rows.names, probabilities, targets, strict=True)
    ]
    sheet = "sheet.png" if rows.unit == 0 else f"sheet-{rows.unit + 1}.png"
    plots.save(plots.sheet_figure(images, heatmaps, titles), out / sheet)


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
