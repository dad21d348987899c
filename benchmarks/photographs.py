"""Write photographs again as JPEG files of the size that cameras and ImageNet have, for timing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (500, 375)  # width and height
CLASSES = 4  # folders, so that images have labels


def write_jpegs(data: Path | None, folder: Path, n: int, size: tuple[int, int] = SIZE) -> None:
    """Write n JPEG files in class folders: the photographs below `data`, made up without any."""
    found = [] if data is None else sorted(data.rglob("*.jpg"))
    if data is not None and not found:
        raise SystemExit(f"{data} holds no .jpg: give a folder of photographs")
    for number in range(CLASSES):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)

    def write(number: int) -> None:
        # Spread over the folder, and from its start again where there are too few.
        source = found[number * max(1, len(found) // n) % len(found)] if found else None
        image = _made_up(number, size) if source is None else _opened(source, size)
        place = folder / str(number % CLASSES) / f"{number:05d}.jpg"
        image.save(place, quality=90)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(n)))


def _opened(path: Path, size: tuple[int, int]) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def _made_up(number: int, size: tuple[int, int]) -> Image.Image:
    """Smooth colours under a little noise."""
    drawn = np.random.default_rng(number)
    coarse = Image.fromarray(drawn.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
    noisy = smooth + 25 * drawn.standard_normal(smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
