"""Explain image files: overlays, one sheet, and heatmap files that can be scored."""

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sufficit import plots as figures
from sufficit.classifier.classifier import Classifier
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import (
    BadImageError,
    ImageFile,
    ignore_image_warnings,
    labels_of,
    list_images,
    plain_name,
)
from sufficit.errors import UserError, unknown
from sufficit.explainers import Methods, explain_all, methods_for
from sufficit.explainers.lax import name_of
from sufficit.files import make_folder, read_json, safe_name, short_name, writing
from sufficit.results import provenance, save_json

SHEET_ROWS = 24
Wanted = int | Literal["auto", "label", "prediction"]
"""The class to explain: one for all, each picture's label, or the model's prediction."""


@dataclass(frozen=True)
class Drawn:
    """Heatmaps of some files, and what the model says of them."""

    names: tuple[str, ...]
    images: Tensor  # [N,C,H,W]
    heatmaps: dict[str, Tensor]  # method -> [N,H,W]
    targets: Tensor  # [N]
    probabilities: Tensor  # [N,classes]
    skipped: dict[str, str]  # name -> why


def pictures_of(paths: Sequence[Path]) -> list[ImageFile]:
    """The pictures among files and folders, each under a name of its own."""
    found: list[ImageFile] = []
    for path in paths:
        if path.is_dir():
            found.extend(list_images(path))
        elif path.is_file() and path.suffix == ".tar":
            raise UserError(f"{path} is a shard: give the folder it lies in")
        elif path.is_file():
            found.append(ImageFile(path, path.name, None))
        else:
            raise UserError(f"no image file or folder at {path}")
    twice = [name for name, count in Counter(p.name for p in found).items() if count > 1]
    if twice:
        raise UserError(f"two images are called {twice[0]}: give the folder above them instead")
    return found


def class_number(target: str, classes: Sequence[str] | None) -> int:
    """A class by number or by name."""
    if classes and target in classes:
        return list(classes).index(target)
    if target.isdecimal():
        return int(target)
    if classes is None:
        raise UserError(f"the model names no classes: give --target as a number, got {target!r}")
    plain = [plain_name(name) for name in classes]
    if plain_name(target) not in plain:
        raise unknown("class", target, classes)
    return plain.index(plain_name(target))


def explain_pictures(
    classifier: Classifier,
    pictures: Sequence[ImageFile],
    methods: Methods,
    target: Wanted = "auto",
    *,
    layer: str | None = None,
    seed: int = 0,
    on_error: Literal["skip", "stop"] = "skip",
    progress: bool | None = None,
) -> Drawn:
    """Read the files and draw every method's heatmap for them.

    The class explained is one for all, or each picture's label (its class folder), or the model's
    prediction; "auto" takes labels where all pictures lie in class folders.
    """
    known = methods_for(methods, classifier)  # what is wrong is said before anything is read
    with ignore_image_warnings():
        kept, images, skipped = read_pictures(pictures, classifier, on_error)
    with torch.no_grad():
        batches = [classifier(batch).float().softmax(1).cpu() for batch in images.split(64)]
    probabilities = torch.cat(batches)
    goals = _goals(classifier, kept, probabilities, target)
    heatmaps = explain_all(
        classifier, images, goals, known, layer=layer, seed=seed, progress=progress
    )
    shown = {name: maps.cpu() for name, maps in heatmaps.items()}
    return Drawn(tuple(p.name for p in kept), images, shown, goals, probabilities, skipped)


def _goals(
    classifier: Classifier,
    pictures: Sequence[ImageFile],
    probabilities: Tensor,
    target: Wanted,
) -> Tensor:
    """The class to explain for each picture: [N]."""
    if isinstance(target, int):
        return torch.full((len(pictures),), target)
    if target == "prediction":
        return probabilities.argmax(1)
    labels = labels_of(pictures, classifier.classes, probabilities.shape[1])
    if labels is None and target == "label":
        raise UserError("--targets label needs class folders: FOLDER/CLASS/image.png")
    return probabilities.argmax(1) if labels is None else torch.tensor(labels)


def save_drawn(
    folder: Path, drawn: Drawn, classifier: Classifier, config: dict[str, Any]
) -> list[Path]:
    """Write sheet.png, METHOD.npz, overlays/IMAGE.METHOD.png and, last, run.json.

    What an earlier run has left there is removed first.
    """
    if (folder / "run.json").exists():
        _clear(folder)
    overlays = make_folder(folder / "overlays")
    written = []
    for method, maps in drawn.heatmaps.items():
        path = folder / f"{method}.npz"
        write_heatmaps(path, dict(zip(drawn.names, maps, strict=True)))
        written.append(path)
        for name, image, heatmap in zip(drawn.names, drawn.images, maps, strict=True):
            _save_overlay(_inside(overlays, f"{name}.{method}.png"), image, heatmap)
    sheets = _save_sheets(folder, drawn, classifier.classes)
    run = provenance(config, classifier.device, classifier.dtype) | {
        "n": len(drawn.names),
        "targets": dict(zip(drawn.names, drawn.targets.tolist(), strict=True)),
        "skipped": drawn.skipped,
    }
    save_json(folder / "run.json", run)
    return [*sheets, *written, overlays, folder / "run.json"]


def _clear(folder: Path) -> None:
    """Remove what an earlier run has drawn, so that nothing old stands beside new."""
    try:
        methods = [safe_name(name_of(word.strip())) for word in _methods_of(folder)]
    except (UserError, AttributeError, KeyError, TypeError):  # whatever else wrote it
        methods = []
    (folder / "run.json").unlink()
    shutil.rmtree(folder / "overlays", ignore_errors=True)
    for path in folder.glob("sheet*.png"):
        if re.fullmatch(r"sheet(-\d+)?\.png", path.name):
            path.unlink()
    for method in methods:
        (folder / f"{method}.npz").unlink(missing_ok=True)


def _methods_of(folder: Path) -> list[str]:
    """The methods that an earlier run was asked for."""
    found: list[str] = read_json(folder / "run.json")["config"]["methods"]
    return found


def _save_sheets(folder: Path, drawn: Drawn, classes: Sequence[str] | None) -> list[Path]:
    """sheet.png, and sheet-2.png and so on for more images than fit on one."""
    paths = []
    for start in range(0, len(drawn.names), SHEET_ROWS):
        rows = slice(start, start + SHEET_ROWS)
        facts = zip(drawn.names, drawn.probabilities, drawn.targets.tolist(), strict=True)
        titles = [row_title(*fact, classes) for fact in list(facts)[rows]]
        shown = {name: maps[rows] for name, maps in drawn.heatmaps.items()}
        number = 1 + start // SHEET_ROWS
        paths.append(folder / ("sheet.png" if number == 1 else f"sheet-{number}.png"))
        figures.save(figures.sheet_figure(drawn.images[rows], shown, titles), paths[-1])
    return paths


def row_title(name: str, probabilities: Tensor, target: int, classes: Sequence[str] | None) -> str:
    """File, likeliest classes with probabilities, and the class explained if it is another."""
    numbers: list[int] = probabilities.topk(min(3, len(probabilities))).indices.tolist()
    lines = [f"{_class_name(k, classes)[:22]} {probabilities[k]:.2f}" for k in numbers]
    if target != numbers[0]:
        word = _class_name(target, classes)[:14]
        lines.append(f"explained: {word} {probabilities[target]:.2f}")
    return "\n".join([name if len(name) <= 28 else f"...{name[-25:]}", *lines])


def _class_name(number: int, classes: Sequence[str] | None) -> str:
    return classes[number] if classes else f"class {number}"


def read_pictures(
    pictures: Sequence[ImageFile], classifier: Classifier, on_error: Literal["skip", "stop"]
) -> tuple[list[ImageFile], Tensor, dict[str, str]]:
    """The pictures that can be read, their images, and why the others can't."""
    kept: list[ImageFile] = []
    images: list[Tensor] = []
    skipped: dict[str, str] = {}
    for picture in pictures:
        try:
            images.append(picture.read(classifier.view))
            kept.append(picture)
        except (BadImageError, OSError) as error:
            if on_error == "stop":
                raise UserError(
                    f"{picture.name}: {error}. Mend it, or go on without it with --on-error skip"
                ) from error
            skipped[picture.name] = str(error)
    if not images:
        name, why = next(iter(skipped.items()))
        raise UserError(f"none of {len(pictures)} images can be read; the first, {name}: {why}")
    if len({image.shape for image in images}) > 1:
        raise UserError("images differ in size and the model names none: give --size")
    return kept, torch.stack(images), skipped


def _inside(folder: Path, name: str) -> Path:
    """Where a file of this name is written; raise where that is not below the folder."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{name!r} can't be drawn below {folder}, it leads out of it: rename it")
    return path.with_name(short_name(path.name))


def _save_overlay(path: Path, image: Tensor, heatmap: Tensor) -> None:
    from PIL import Image

    pixels = (figures.overlay(image, heatmap) * 255).round().to(torch.uint8).numpy()
    make_folder(path.parent)
    with writing(path) as part:
        Image.fromarray(pixels).save(part)
