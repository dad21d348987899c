"""`sufficit explain`: a run without scoring. Pictures, sheets, and heatmap files to score later."""

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
from sufficit.progress import bar, counted
from sufficit.provenance import plain, provenance, save_json
from sufficit.runs.engine import quiet
from sufficit.runs.job import Job
from sufficit.runs.region_files import (
    CERTIFICATES,
    certificates_in,
    draw_region,
    explain_unit,
    fitted_sources,
    usual_passes,
    write_certificates,
)
from sufficit.runs.shown import maps_in_full
from sufficit.runs.spread import Spread, UnitProgress, in_this_process
from sufficit.runs.store import RUN, Store
from sufficit.runs.unit_rows import EMPTY, SKIPPED, Rows

# Folders of pictures.
OVERLAYS = "overlays"
REGIONS = "regions"
SHEET_ROWS = 24  # images of a sheet, and of a unit


def images_in(paths: Sequence[Path]) -> ImageSource:
    """Return the images among files and folders, each under its own name."""
    found: list[ImageFile] = []
    for path in paths:
        if path.suffix == ".parquet" or path.is_dir():
            found.extend(list_images(path))
        elif path.is_file() and path.suffix == ".tar":
            raise UserError(f"{path} is a shard: give the folder it is in")
        elif path.is_file():
            found.append(ImageFile(str(path), path.name, None, version=version_of(path)))
        else:
            raise UserError(f"no image file or folder at {path}")
    twice = [name for name, count in Counter(i.name for i in found).items() if count > 1]
    if twice:
        raise UserError(f"two images are called {twice[0]}: give the folder above them instead")
    return ImageSource(found)


def class_number(target: str, classes: Sequence[str] | None) -> int:
    """Return a class by number or by name."""
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
    # Before the folder is cleared: what this command may overwrite.
    with suppress(UserError, KeyError, TypeError):
        earlier = list(read_json(out / "run.json")["methods"])
    compute = spread or in_this_process
    # No probes: maps are drawn, not scored.
    job = replace(job, only=())
    with quiet(), closing(job), Store.locked(out, overwrite=overwrite) as owned:
        if overwrite:  # its files, and nothing else
            remove_folder(out / OVERLAYS)
            remove_folder(out / REGIONS)
            (out / CERTIFICATES).unlink(missing_ok=True)
            # Not a sheet-final.png of the user's own.
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
            shown = UnitProgress(tick, done, total, max(1, total * usual_passes(job)))
            with counted(shown.passed if tick else None):
                for rows in compute(job, store, partial(explain_unit, job), missing):
                    # Pictures first: the file of a unit says that all of its work is done.
                    _draw_pictures(job, out, rows)
                    store.write(rows)
                    shown.done(job.units.images_in([rows.unit]))
        record = _record(job, store, units)
        for source in job.sources:
            with heatmap_writer(out / f"{source.name}.npz") as write:
                for name, heatmap, share in _heatmaps(job, store, units, source.name):
                    write(name, heatmap, share)
        if fitted_sources(job):
            write_certificates(out / CERTIFICATES, job, store, units)
        save_json(out / "run.json", record)
        store.clear_units()
    return record


def _record(job: Job, store: Store, units: range) -> dict[str, Any]:
    """Return what run.json holds; raise if no image could be drawn."""
    skipped: dict[str, str] = {}
    targets: dict[str, int] = {}
    empty = dict.fromkeys((source.name for source in job.sources), 0)
    uncut: dict[str, list[str]] = {source.name: [] for source in fitted_sources(job)}
    for unit in units:
        rows = store.read(unit)
        skipped |= rows.notes.get(SKIPPED, {})
        targets |= dict(zip(rows.names, rows.targets.tolist(), strict=True))
        for source, columns in rows.values.items():
            empty[source] += int(columns[EMPTY].sum())
            if source in uncut:
                enough = zip(rows.names, columns["fit_enough"].tolist(), strict=True)
                uncut[source] += [name for name, is_enough in enough if not is_enough]
    # Nothing to resume: whoever repairs the files starts again.
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
            "no_region": uncut,
            "skipped": skipped,
            RUN: store.run,
        }
    )
    return found


def _heatmaps(
    job: Job, store: Store, units: range, source: str
) -> Iterator[tuple[str, Tensor, float | None]]:
    """Yield every image's name, heatmap at the image's size, and share if it is cut."""
    for unit in units:
        kept = store.read_maps(unit)
        if kept.names:
            maps = maps_in_full(kept, job.config.seed)[source]
            for name, (heatmap, share) in zip(kept.names, maps.with_shares(), strict=True):
                yield name, heatmap, share


def _draw_pictures(job: Job, out: Path, rows: Rows) -> None:
    """Write a picture per image and source, and the sheet of a unit."""
    if not len(rows):
        return
    classifier = job.classifier
    batch, _ = job.reader.entries([job.entries[number] for number in rows.numbers])
    assert batch is not None  # it was drawn just now
    with torch.no_grad():
        probabilities = classifier(batch.images).float().softmax(1).cpu()
    heatmaps = {name: one.at(batch.size).cpu() for name, one in rows.maps.items()}
    images = batch.images.cpu()
    fitted = {source.name: source for source in fitted_sources(job)}
    captions: dict[str, list[str]] = {}
    for method, maps in heatmaps.items():
        if method not in fitted:
            _draw_overlays(out / OVERLAYS, method, rows, images, maps)
            continue
        certificates = certificates_in(job, fitted[method], rows.targets, rows.maps[method])
        captions[method] = [one.caption[0] for one in certificates]
        for name, number, *drawn in zip(
            rows.names, rows.numbers, images, maps, certificates, strict=True
        ):
            path = _picture(out / REGIONS, f"{name}.{method}.jpg")
            draw_region(path, job, number, *drawn)
    targets = rows.targets.tolist()
    titles = [
        row_title(name, row, target, classifier.classes)
        for name, row, target in zip(rows.names, probabilities, targets, strict=True)
    ]
    sheet = "sheet.png" if rows.unit == 0 else f"sheet-{rows.unit + 1}.png"
    figure = plots.sheet_figure(images, heatmaps, titles, captions, regions=[*fitted])
    plots.save(figure, out / sheet)


def _draw_overlays(folder: Path, method: str, rows: Rows, images: Tensor, maps: Tensor) -> None:
    """Write a heatmap over its image, for each image: [n,C,H,W], [n,H,W]."""
    from PIL import Image

    for name, image, heatmap in zip(rows.names, images, maps, strict=True):
        pixels = (plots.blend(image, heatmap) * 255).round().to(torch.uint8).numpy()
        with writing(_picture(folder, f"{name}.{method}.png")) as part:
            Image.fromarray(pixels).save(part)


def row_title(name: str, probabilities: Tensor, target: int, classes: Sequence[str] | None) -> str:
    """File, likeliest classes with probabilities, and the class explained if it is another."""
    numbers: list[int] = probabilities.topk(min(3, len(probabilities))).indices.tolist()
    words = {k: classes[k] if classes else f"class {k}" for k in (*numbers, target)}
    lines = [f"{words[k][:22]} {probabilities[k]:.2f}" for k in numbers]
    if target != numbers[0]:
        lines.append(f"explained: {words[target][:14]} {probabilities[target]:.2f}")
    return "\n".join([name if len(name) <= 28 else f"...{name[-25:]}", *lines])


def _picture(folder: Path, name: str) -> Path:
    """Make the folder of a picture and return its path; raise if the name leads out of it."""
    path = make_folder(folder) / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{name!r} leads out of {folder}: rename the image")
    make_folder(path.parent)
    return path.with_name(short_name(path.name))
