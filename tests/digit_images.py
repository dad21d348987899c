"""Synthetic digits as image files."""

from pathlib import Path

from PIL import Image

from sufficit.data.digits import synthetic_digits


def write_digits(folder: Path, n: int, seed: int = 4) -> Path:
    """Digits as PNG files in class folders."""
    made = synthetic_digits(n, seed=seed)
    pixels = (made.images * 255).byte().permute(0, 2, 3, 1).numpy()
    for i, (image, label) in enumerate(zip(pixels, made.labels.tolist(), strict=True)):
        path = folder / str(label) / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder
