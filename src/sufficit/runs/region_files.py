"""What `explain` writes of fitted sources: a picture of each region, and certificates.csv."""

from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor

from sufficit import plots
from sufficit.classifier.checkpoint import View
from sufficit.data.image_files import BadImageError
from sufficit.data.images import ImageTensor, SourceImage
from sufficit.data.loader import Unit
from sufficit.data.pictures import upright_size
from sufficit.files import writing
from sufficit.outside import as_csv
from sufficit.plots.regions import LEAST, MOST
from sufficit.runs.drawing import drawn_rows
from sufficit.runs.job import Job
from sufficit.runs.store import Store
from sufficit.runs.unit_rows import Rows
from sufficit.sources import Fitted, Maps
from sufficit.sources.certificate import (
    Certificate,
    certificate_row,
    certificates_of,
    certified,
)

CERTIFICATES = "certificates.csv"
QUALITY = 92  # of JPEG: photographs as PNG take ten times as much


def fitted_sources(job: Job) -> list[Fitted]:
    """Return the sources of a job whose maps are cut."""
    return [source for source in job.sources if isinstance(source, Fitted)]


def explain_unit(job: Job, unit: Unit, following: Unit | None = None) -> Rows:
    """Read and draw a unit: its rows with the maps, and all that certificates say."""
    rows, batch, _ = drawn_rows(job, unit, following)
    if batch is not None:
        size = job.config.batch_size
        for source in fitted_sources(job):
            maps = certified(job.classifier, batch, rows.maps[source.name], batch_size=size)
            rows.maps[source.name] = maps
    return rows


def usual_passes(job: Job) -> int:
    """Return the forward passes that fits and certificates of a job usually take per image."""
    return sum(source.usual_passes for source in fitted_sources(job))


def certificates_in(job: Job, source: Fitted, targets: Tensor, maps: Maps) -> list[Certificate]:
    """Return the certificates of some images by one source."""
    return certificates_of(job.classifier, targets, maps, enough=source.enough)


def write_certificates(path: Path, job: Job, store: Store, units: range) -> None:
    """Write a row per image and fitted source."""
    import pandas

    with writing(path) as part:
        frame = pandas.DataFrame([*_certificate_rows(job, store, units)])
        part.write_text(as_csv(frame), encoding="utf-8")


def _certificate_rows(job: Job, store: Store, units: range) -> Iterator[dict[str, Any]]:
    """Yield a row of the table per image and fitted source."""
    for unit in units:
        rows = store.read(unit)
        kept = store.read_maps(unit)
        if not len(rows):
            continue
        found = {
            source.name: certificates_in(job, source, rows.targets, kept.maps[source.name])
            for source in fitted_sources(job)
        }
        for row, name in enumerate(rows.names):
            for source, own in found.items():
                yield {"image": name, "method": source, **certificate_row(own[row])}


def draw_region(
    path: Path, job: Job, number: int, image: Tensor, heatmap: Tensor, certificate: Certificate
) -> None:
    """Write the picture of a region, in the resolution of the photograph where that is larger."""
    photo = photograph(job.entries[number].image, job.classifier.view, image)
    title, *lines = certificate.caption
    picture = plots.region_picture(photo, heatmap, title, lines)
    with writing(path) as part:
        picture.save(part, format="JPEG", quality=QUALITY, subsampling=0)


def photograph(source: SourceImage, view: View | None, image: Tensor) -> Tensor:
    """Return what the model sees of an image, with as many pixels as its file has, within limits.

    `image` is what the model sees; it is returned where it is in memory alone. [C,H,W] in 0..1.
    """
    if isinstance(source, ImageTensor) or view is None or view.crop is None:
        return image
    h, w = view.crop
    try:
        # How many times the model's input fits into the photograph.
        own = min(upright_size(BytesIO(source.content()))) // (view.resize or min(h, w))
        factor = max(-(-LEAST // min(h, w)), min(own, MOST // max(h, w)))
        resize = None if view.resize is None else factor * view.resize
        return source.read(replace(view, crop=(factor * h, factor * w), resize=resize))
    except (BadImageError, OSError):  # it has gone since it was explained
        return image
