"""Write synthetic digits as a folder of pictures, one class folder a digit.

python tools/digit_folder.py digits 500
"""

import sys
from pathlib import Path

import torch
from PIL import Image

from sufficit.data.digits import synthetic_digits


def main(folder: Path, n: int) -> None:
    """Draw the held-out digits by seed 0, and save them."""
    digits = synthetic_digits(n)
    pixels = (digits.images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    for i, (picture, label) in enumerate(zip(pixels, digits.labels.tolist(), strict=True)):
        path = folder / str(label) / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
