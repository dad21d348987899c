"""Photographs of cats and dogs that ship with the package: one of each of 37 breeds, with masks.

They are test photographs of the Oxford-IIIT Pet Dataset (O. Parkhi, A. Vedaldi, A. Zisserman,
C. V. Jawahar, CVPR 2012), licensed CC BY-SA 4.0. Of each breed it is the photograph whose file name
has the smallest SHA-256, so that nobody chose them by what a method makes of them.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from sufficit.classifier.checkpoint import View
from sufficit.data.images import list_images
from sufficit.data.pictures import read_mask, seen
from sufficit.errors import UserError

FOLDER = Path(__file__).parents[1] / "assets" / "pets"
PHOTOS = FOLDER / "photos"
MASKS = FOLDER / "masks"
CREDIT = "Oxford-IIIT Pet Dataset, CC BY-SA 4.0"
SIDE = 128  # pixels that sufficit:pets sees; the files have 224
BREEDS = 37


@dataclass(frozen=True)
class Pets:
    """Photographs of cats and dogs, the number of each breed, and where the animals are."""

    images: Tensor  # [N,3,H,W] in 0..1
    labels: Tensor  # [N], as the classes of sufficit:pets
    masks: Tensor  # [N,H,W] 1 on the animal
    names: tuple[str, ...]  # of the files


def pet_photos(n: int = BREEDS, *, side: int = SIDE) -> Pets:
    """Return n photographs in the order of their names' hashes, with `side` pixels.

    >>> pets = pet_photos(2)
    >>> pets.images.shape, pets.names
    (torch.Size([2, 3, 128, 128]), ('basset_hound_49.jpg', 'Sphynx_158.jpg'))
    """
    if not 1 <= n <= BREEDS:
        raise UserError(f"n must be 1 to {BREEDS} photographs, got {n}: there is one per breed")
    listed = list_images(PHOTOS)
    breeds = sorted({image.folder for image in listed if image.folder})
    chosen = sorted(listed, key=lambda image: sha256(image.path.name.encode()).digest())[:n]
    view = View((side, side))
    masks = []
    for image in chosen:
        mask = seen(read_mask(MASKS / Path(image.name).with_suffix(".png")).convert("L"), view)
        pixels = torch.frombuffer(bytearray(mask.tobytes()), dtype=torch.uint8)
        masks.append((pixels.view(side, side) >= 128).float())
    return Pets(
        images=torch.stack([image.read(view) for image in chosen]),
        labels=torch.tensor([breeds.index(str(image.folder)) for image in chosen]),
        masks=torch.stack(masks),
        names=tuple(image.path.name for image in chosen),
    )
