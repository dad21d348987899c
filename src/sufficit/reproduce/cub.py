"""CUB-200-2011 in its official layout: some classes of it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sufficit.data.splits import Sets, Split
from sufficit.errors import UserError, unknown
from sufficit.reproduce.photos import ROOM, read_bytes

LISTS = ("classes.txt", "images.txt", "image_class_labels.txt", "train_test_split.txt")
CLASSES = 20


def cub200(
    root: Path,
    *,
    side: int,
    classes: Sequence[str] = (),
    seed: int = 0,
    device: torch.device | None = None,
) -> Sets:
    """The official parts of the classes named, or of twenty drawn by the seed."""
    folder = find_cub(root)
    names = _column(folder, "classes.txt")
    chosen = chosen_classes(list(names.values()), classes, seed)
    numbers = {key: chosen.index(name) for key, name in names.items() if name in chosen}
    paths, labels = _column(folder, "images.txt"), _column(folder, "image_class_labels.txt")
    is_train = _column(folder, "train_test_split.txt")
    parts = []
    for wanted in ("1", "0"):
        rows = [k for k in paths if labels.get(k) in numbers and is_train.get(k) == wanted]
        if not rows:
            raise UserError(f"{folder} has no {'training' if wanted == '1' else 'test'} images")
        images = read_bytes([folder / "images" / paths[k] for k in rows], round(side * ROOM))
        known = torch.tensor([numbers[labels[k]] for k in rows])
        parts.append(Split(images, known, side).to(device or torch.device("cpu")))
    return Sets(parts[0], parts[1], tuple(chosen), f"CUB-200-2011, {len(chosen)} classes")


def holds_cub(root: Path) -> bool:
    """Whether there is a CUB-200-2011 below a folder."""
    return any((folder / "images.txt").is_file() for folder in _places(root))


def find_cub(root: Path) -> Path:
    """The folder that holds the four lists."""
    for folder in _places(root):
        if (folder / "images.txt").is_file():
            break
    else:
        raise UserError(f"no CUB-200-2011 in {root}: looked for CUB_200_2011/images.txt")
    missing = [name for name in LISTS if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} is no whole CUB-200-2011: {', '.join(missing)} not found")
    return folder


def _places(root: Path) -> tuple[Path, Path]:
    return root / "CUB_200_2011", root


def chosen_classes(known: Sequence[str], wanted: Sequence[str], seed: int) -> list[str]:
    """The classes named, with or without their number, or twenty by the seed; sorted."""
    if not wanted:
        drawn = np.random.default_rng(seed).permutation(len(known))[:CLASSES]
        return sorted(known[int(number)] for number in drawn)
    short = {name.partition(".")[2].lower(): name for name in known}
    full = {name.lower(): name for name in known}
    found = [(full | short).get(name.lower()) for name in wanted]
    for name, match in zip(wanted, found, strict=True):
        if match is None:
            raise unknown("class", name, known)
    chosen = sorted({name for name in found if name})
    if len(chosen) < 2:
        raise UserError(f"a classifier needs two classes or more, got {', '.join(chosen)} alone")
    return chosen


def _column(folder: Path, name: str) -> dict[str, str]:
    """The second word of each line by the first."""
    lines = (folder / name).read_text().splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    if any(len(pair) != 2 for pair in pairs):
        raise UserError(f"{folder / name}: a line is not a number and a word")
    return {key: value.strip() for key, value in pairs}
