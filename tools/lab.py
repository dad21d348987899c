"""Data and classifiers for the experiments with LAX: Synthetic MNIST and CIFAR-10."""

import gzip
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models import resnet18

from sufficit import Classifier
from sufficit.data.images import find_pictures, read_picture

CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SIDE = 64


@dataclass(frozen=True)
class Split:
    """Images as bytes on the device, and their labels."""

    images: Tensor  # [N,3,H,W] uint8
    labels: Tensor  # [N]
    masks: Tensor | None = None  # [N,H,W] bool, where the digit is

    def part(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Images in 0..1 and labels."""
        return self.images[rows].float() / 255, self.labels[rows]


class Shuffled:
    """A loader over a split: batches in a new order each time, drawn from torch's own generator."""

    def __init__(self, split: Split, batch_size: int, limit: int | None = None) -> None:
        self.split, self.batch_size = split, batch_size
        self.limit = limit or len(split.labels)

    def __len__(self) -> int:
        return self.limit // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.split.labels)).to(self.split.labels.device)
        for rows in order[: len(self) * self.batch_size].split(self.batch_size):
            yield self.split.part(rows)


def read_idx(path: Path) -> Tensor:
    """A file of MNIST, packed or not."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        kind = struct.unpack(">HBB", file.read(4))[2]
        shape = struct.unpack(f">{kind}I", file.read(4 * kind))
        return torch.from_numpy(np.frombuffer(file.read(), np.uint8).copy()).view(*shape)


def synthetic_mnist(root: Path, train: bool, n: int, seed: int, device: str) -> Split:
    """Digits of MNIST at random size and place, over random pixels and boxes of random colour."""
    stem = "train" if train else "t10k"
    strokes = read_idx(_first(root, f"{stem}-images-idx3-ubyte*")).float().to(device) / 255
    labels = read_idx(_first(root, f"{stem}-labels-idx1-ubyte*")).long().to(device)
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randint(len(labels), (n,), generator=generator, device=device)
    if n == len(labels):
        rows = torch.arange(n, device=device)
    parts = [_compose(strokes[part], generator) for part in rows.split(2000)]
    images, ink = (torch.cat(both) for both in zip(*parts, strict=True))
    return Split((images * 255).round().to(torch.uint8), labels[rows], ink > 0.5)


def _compose(strokes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures [N,3,64,64] and the ink in them [N,64,64], from strokes [N,28,28]."""
    n, device = len(strokes), strokes.device

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    pictures = 0.6 * draw(n, 3, SIDE, SIDE)
    line = torch.arange(SIDE, device=device)
    number = (draw(n) * 5).long()
    for box in range(4):
        sides = 4 + (draw(n, 2) * 21).long()
        corner = (draw(n, 2) * (SIDE - sides)).long()
        inside = (line >= corner[..., None]) & (line < (corner + sides)[..., None])  # [n,2,64]
        area = inside[:, 0, :, None] & inside[:, 1, None, :] & (number > box)[:, None, None]
        pictures = torch.where(area[:, None], 0.8 * draw(n, 3, 1, 1), pictures)
    side = 20 + (draw(n) * 21).long()
    corner = (draw(n, 2) * (SIDE - side + 1)[:, None]).long()
    places = (line + 0.5 - corner[..., None]) / side[:, None, None] * 2 - 1  # [n,2,64]
    grid = torch.stack(
        [places[:, 1, None, :].expand(-1, SIDE, -1), places[:, 0, :, None].expand(-1, -1, SIDE)], -1
    )
    ink = F.grid_sample(strokes[:, None], grid, mode="bilinear", align_corners=False)[:, 0]
    shade = 0.8 + 0.2 * draw(n, 3, 1, 1)
    return pictures * (1 - ink[:, None]) + shade * ink[:, None], ink


def cifar10(root: Path, split: str, device: str) -> Split:
    """CIFAR-10 as class folders, root/cifar10/{train,test}/CLASS/*, in an order drawn once."""
    pictures = find_pictures(root / "cifar10" / split)
    with ThreadPoolExecutor(16) as pool:
        images = list(pool.map(lambda picture: read_picture(picture.path, None), pictures))
    labels = torch.tensor([CIFAR_CLASSES.index(str(picture.folder)) for picture in pictures])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    bytes_ = (torch.stack(images)[order] * 255).round().to(torch.uint8)
    return Split(bytes_.to(device), labels[order].to(device))


def _first(root: Path, pattern: str) -> Path:
    return next(path for path in sorted(root.rglob(pattern)))


def stride8_resnet18(num_classes: int = 10) -> nn.Module:
    """ResNet18 whose last map is an eighth of the image's side."""
    model = resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def train_plainly(
    model: nn.Module, train: Split, epochs: int, *, augment: bool, seed: int = 0, batch: int = 512
) -> None:
    """Cross-entropy on whole images, with flips and crops or without."""
    torch.manual_seed(seed)
    device = train.images.device
    model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.4, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    loader = Shuffled(train, batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.4, total_steps=epochs * len(loader), pct_start=0.2
    )
    for _ in range(epochs):
        for images, labels in loader:
            inputs = normal(_augmented(images) if augment else images)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(inputs).float(), labels, label_smoothing=0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def normal(images: Tensor) -> Tensor:
    """As the classifiers want them."""
    return ((images - 0.5) / 0.25).contiguous(memory_format=torch.channels_last)


def _augmented(images: Tensor) -> Tensor:
    """Flipped at random, and moved by up to four pixels."""
    n, _, h, w = images.shape
    flip = torch.rand(n, device=images.device) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    padded = F.pad(images, (4, 4, 4, 4))
    rows, columns = (torch.randint(0, 9, (n, 1), device=images.device) for _ in range(2))
    rows = rows + torch.arange(h, device=images.device)
    columns = columns + torch.arange(w, device=images.device)
    index = torch.arange(n, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


def classifier_of(model: nn.Module) -> Classifier:
    """The trained model as a classifier, in bfloat16 on a GPU, its batch norms folded in."""
    for module in model.modules():
        for conv, norm in (("conv1", "bn1"), ("conv2", "bn2"), ("0", "1")):
            children = dict(module.named_children())
            if isinstance(children.get(norm), nn.BatchNorm2d):
                fused = fuse_conv_bn_eval(children[conv], children[norm])
                setattr(module, conv, fused)
                setattr(module, norm, nn.Identity())
    device = next(model.parameters()).device
    found = Classifier(model.eval(), layer="layer4", mean=(0.5,) * 3, std=(0.25,) * 3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return found.to(device, dtype, torch.channels_last)


def accuracy(classifier: Classifier, split: Split) -> float:
    """Share of a split that the classifier gets right."""
    right = 0
    with torch.no_grad():
        for rows in torch.arange(len(split.labels), device=split.labels.device).split(2000):
            images, labels = split.part(rows)
            right += int((classifier(images).argmax(1) == labels).sum())
    return right / len(split.labels)
