"""Photographs for timing: as JPEG files of the size that ImageNet has, or as tensors."""

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

SIZE = (500, 375)  # width and height
CLASSES = 4  # folders, so that images have labels


def write_jpegs(data: Path | None, folder: Path, n: int, size: tuple[int, int] = SIZE) -> None:
    """Write n JPEG files in class folders: photographs of `data`, or made up without any."""
    for number in range(CLASSES):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)

    def write(number: int, image: Image.Image) -> None:
        image.save(folder / str(number % CLASSES) / f"{number:05d}.jpg", quality=90)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(n), pool.map(partial(_image, size=size), _sources(data, n))))


def read_images(data: Path | None, n: int, side: int) -> Tensor:
    """The same as tensors: [N,3,side,side] in 0..1."""
    with ThreadPoolExecutor() as pool:
        images = pool.map(partial(_image, size=(side, side)), _sources(data, n))
        pixels = [torch.from_numpy(np.array(image)) for image in images]
    return torch.stack(pixels).permute(0, 3, 1, 2).float() / 255


def _sources(data: Path | None, n: int) -> list[bytes | int]:
    """The contents of n JPEG files, from the first again where there are too few; or numbers."""
    if data is None:
        return list(range(n))
    found = [path.read_bytes() for path in islice(sorted(data.rglob("*.jpg")), n)]
    for archive in sorted(data.glob("*.tar")):
        with tarfile.open(archive) as tar:
            files = (tar.extractfile(one) for one in tar if one.name.endswith(".jpg"))
            found += [file.read() for file in islice(files, n - len(found)) if file is not None]
    if not found:
        raise SystemExit(f"{data} holds no .jpg, and no .tar with one: give a folder that does")
    return [found[number % len(found)] for number in range(n)]


def _image(source: bytes | int, size: tuple[int, int]) -> Image.Image:
    """A photograph at some size, or smooth colours under a little noise."""
    if isinstance(source, bytes):
        with Image.open(io.BytesIO(source)) as image:
            return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    drawn = np.random.default_rng(source)
    coarse = Image.fromarray(drawn.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
    noisy = smooth + 25 * drawn.standard_normal(smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
