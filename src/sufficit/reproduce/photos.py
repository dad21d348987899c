"""Many picture files as one tensor of bytes, decoded in threads."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.images import FORMATS, BadImageError, ignore_image_warnings, read_image
from sufficit.errors import UserError

ROOM = 8 / 7  # stored side over the side seen, so that training can crop


def read_bytes(paths: Sequence[Path], side: int) -> Tensor:
    """The middle of each picture, its shorter side brought to this one: [N,3,side,side] uint8."""
    view = View((side, side))

    def read(path: Path) -> Tensor:
        try:
            with Image.open(path, formats=FORMATS) as opened:
                if opened.size == (side, side) and opened.mode == "RGB":  # the quick way
                    return torch.from_numpy(np.array(opened)).permute(2, 0, 1)
            return (read_image(path, view) * 255).round().to(torch.uint8)
        except (BadImageError, OSError) as error:
            raise UserError(f"{path}: {error}") from error

    with ignore_image_warnings(), ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        return torch.stack(list(pool.map(read, paths)))
