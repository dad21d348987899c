"""Explain image files: overlays, one sheet, and heatmap files that can be scored."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sufficit import figures
from sufficit.classifiers import Classifier
from sufficit.data.heatmaps import write_heatmaps
from sufficit.data.images import (
    BadPictureError,
    Picture,
    find_pictures,
    plain_name,
    quiet_reading,
    read_picture,
)
from sufficit.errors import UserError, unknown
from sufficit.explainers import explain_all
from sufficit.files import writing

SHEET_ROWS = 24


@dataclass(frozen=True)
class Drawn:
    """Heatmaps of some files, and what the model says of them."""

    names: tuple[str, ...]
    images: Tensor  # [N,C,H,W]
    heatmaps: dict[str, Tensor]  # method -> [N,H,W]
    targets: Tensor  # [N]
    probabilities: Tensor  # [N,classes]


def pictures_of(paths: Sequence[Path]) -> list[Picture]:
    """The pictures among files and folders, each under a name of its own."""
    found: list[Picture] = []
    for path in paths:
        if path.is_dir():
            found.extend(find_pictures(path))
        elif path.is_file():
            found.append(Picture(path, path.name, None))
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
    pictures: Sequence[Picture],
    methods: Sequence[str],
    target: int | None = None,
    *,
    layer: str | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Drawn:
    """Read the files and draw every method's heatmap for them."""
    with quiet_reading():
        images = _read(pictures, classifier)
    targets = None if target is None else torch.full((len(images),), target)
    with torch.no_grad():
        batches = [classifier(batch).float().softmax(1).cpu() for batch in images.split(64)]
    probabilities = torch.cat(batches)
    goals = probabilities.argmax(1) if targets is None else targets
    heatmaps = explain_all(
        classifier, images, goals, methods, layer=layer, seed=seed, progress=progress
    )
    shown = {name: maps.cpu() for name, maps in heatmaps.items()}
    return Drawn(tuple(p.name for p in pictures), images, shown, goals, probabilities)


def save_drawn(folder: Path, drawn: Drawn, classes: Sequence[str] | None) -> list[Path]:
    """Write sheet.png, METHOD.npz for each method and overlays/IMAGE.METHOD.png for each pair."""
    overlays = folder / "overlays"
    overlays.mkdir(parents=True, exist_ok=True)
    written = []
    for method, maps in drawn.heatmaps.items():
        path = folder / f"{method}.npz"
        write_heatmaps(path, dict(zip(drawn.names, maps, strict=True)))
        written.append(path)
        for name, image, heatmap in zip(drawn.names, drawn.images, maps, strict=True):
            _save_overlay(overlays / f"{name}.{method}.png", image, heatmap)
    return [*_save_sheets(folder, drawn, classes), *written, overlays]


def _save_sheets(folder: Path, drawn: Drawn, classes: Sequence[str] | None) -> list[Path]:
    """sheet.png, and sheet-2.png and so on for more images than fit on one."""
    paths = []
    for start in range(0, len(drawn.names), SHEET_ROWS):
        rows = slice(start, start + SHEET_ROWS)
        titles = [top_line(p, classes) for p in drawn.probabilities[rows]]
        shown = {name: maps[rows] for name, maps in drawn.heatmaps.items()}
        number = 1 + start // SHEET_ROWS
        paths.append(folder / ("sheet.png" if number == 1 else f"sheet-{number}.png"))
        figures.save(figures.sheet_figure(drawn.images[rows], shown, titles), paths[-1])
    return paths


def top_line(probabilities: Tensor, classes: Sequence[str] | None, count: int = 3) -> str:
    """The likeliest classes with their probabilities, a line each: [classes] -> text."""
    values, numbers = probabilities.topk(min(count, len(probabilities)))
    words = [classes[int(k)] if classes else f"class {int(k)}" for k in numbers]
    return "\n".join(f"{word[:22]} {value:.2f}" for word, value in zip(words, values, strict=True))


def _read(pictures: Sequence[Picture], classifier: Classifier) -> Tensor:
    images: list[Tensor] = []
    for picture in pictures:
        try:
            images.append(read_picture(picture.path, classifier.view))
        except (BadPictureError, OSError) as error:
            raise UserError(f"{picture.path}: {error}") from error
    if len({image.shape for image in images}) > 1:
        raise UserError("images differ in size and the model names none: give --size")
    return torch.stack(images)


def _save_overlay(path: Path, image: Tensor, heatmap: Tensor) -> None:
    from PIL import Image

    pixels = (figures.overlay(image, heatmap) * 255).round().to(torch.uint8).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as part:
        Image.fromarray(pixels).save(part)
