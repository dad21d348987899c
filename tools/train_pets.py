"""Train the network for the 37 breeds of Oxford-IIIT pets that ships with the package.

    python tools/train_pets.py --data build/pets --start build/weights/mobilenet_v2.safetensors \
        --out OUT

MobileNetV2 starts from torchvision's ImageNet weights (IMAGENET1K_V1) and sees 128 pixels. DATA has
`train/BREED/*.jpg` and `test/images/BREED_NUMBER.jpg`. Ten training photographs per breed, drawn by
a hash of their names, are held out: they choose the learning rate. The test photographs are only
reported on. The network learns from photographs that are cropped, flipped and changed in colour; in
a quarter of them a rectangle is erased. It is not trained on hidden backgrounds.

OUT gets the saved classifier in half precision, `pets-net.json` with accuracies and settings, and
`held-out.txt`. On one H200 this takes a minute.
"""

import argparse
import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import mobilenet_v2
from torchvision.transforms.v2.functional import pil_to_tensor, resize

from sufficit import Classifier
from sufficit.classifier.checkpoint import WEIGHTS, Recipe, View

SIDE = 128
HELD_OUT = 10  # training photographs per breed
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as the ImageNet weights expect
SMOOTHING, DECAY, ERASED, WARM_UP = 0.1, 0.02, 0.25, 0.1


def read_photos(paths: list[Path]) -> Tensor:
    """Decode photographs of one size: bytes [N,3,H,W]."""

    def read(path: Path) -> Tensor:
        with Image.open(path) as image:
            return pil_to_tensor(image.convert("RGB"))

    with ThreadPoolExecutor() as pool:
        return torch.stack(list(pool.map(read, paths)))


def split(photos: list[Path]) -> tuple[list[Path], list[Path]]:
    """Separate one breed's photographs: those to learn from, and those held out."""
    drawn = sorted(photos, key=lambda path: hashlib.sha256(path.name.encode()).hexdigest())
    return drawn[HELD_OUT:], drawn[:HELD_OUT]


def augmented(photos: Tensor, generator: torch.Generator) -> Tensor:
    """Crop, flip, colour and erase each photograph in its own way: bytes -> [N,3,SIDE,SIDE]."""
    n, device = len(photos), photos.device

    def chance(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, device=device, generator=generator)

    proportion = chance(-0.29, 0.29).exp()  # 3/4 to 4/3
    area = chance(0.3, 1)
    height = (area / proportion).sqrt().clamp(max=1)
    width = (area * proportion).sqrt().clamp(max=1)
    flip = torch.where(chance(0, 1) < 0.5, -1.0, 1.0)
    place = torch.zeros(n, 2, 3, device=device)
    place[:, 0, 0] = width * flip
    place[:, 1, 1] = height
    place[:, 0, 2] = chance(-1, 1) * (1 - width)
    place[:, 1, 2] = chance(-1, 1) * (1 - height)
    # Twice as fine, then the mean of four: sampling a larger photograph would alias.
    grid = F.affine_grid(place, [n, 3, 2 * SIDE, 2 * SIDE], align_corners=False)
    fine = F.grid_sample(photos.float() / 255, grid, padding_mode="border", align_corners=False)
    images = F.avg_pool2d(fine, 2)

    def factor() -> Tensor:
        return chance(0.7, 1.3)[:, None, None, None]

    images = images * factor()
    grey = images.mean((1, 2, 3), keepdim=True)
    images = grey + (images - grey) * factor()
    tint = images.mean(1, keepdim=True)
    images = (tint + (images - tint) * factor()).clamp(0, 1)

    line = torch.arange(SIDE, device=device) / SIDE
    tall, wide = chance(0.15, 0.5), chance(0.15, 0.5)
    top, left = chance(0, 1) * (1 - tall), chance(0, 1) * (1 - wide)
    rows = (line >= top[:, None]) & (line < (top + tall)[:, None])
    columns = (line >= left[:, None]) & (line < (left + wide)[:, None])
    erased = rows[:, :, None] & columns[:, None, :] & (chance(0, 1) < ERASED)[:, None, None]
    return torch.where(erased[:, None], grey, images)


def train(
    start: dict[str, Tensor],
    photos: Tensor,
    labels: Tensor,
    *,
    rate: float,
    epochs: int,
    batch: int,
    seed: int,
) -> nn.Module:
    """Return the network after so many epochs over the photographs."""
    device = photos.device
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    model = mobilenet_v2(num_classes=int(labels.max()) + 1)
    kept = {key: value for key, value in start.items() if not key.startswith("classifier")}
    fresh = model.load_state_dict(kept, strict=False)
    assert not fresh.unexpected_keys, "not the weights of torchvision's MobileNetV2"
    model.to(device, memory_format=torch.channels_last).train()
    steps = epochs * (len(photos) // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rate, total_steps=steps, pct_start=WARM_UP, cycle_momentum=False
    )
    mean = torch.tensor(MEAN, device=device)[:, None, None]
    std = torch.tensor(STD, device=device)[:, None, None]
    for _ in range(epochs):
        order = torch.randperm(len(photos), device=device, generator=generator)
        for chosen in order.split(batch):
            if len(chosen) < batch:
                continue
            images = (augmented(photos[chosen], generator) - mean) / std
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(images.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), labels[chosen], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def accuracy(classifier: Classifier, photos: Tensor, labels: Tensor) -> float:
    """Return the share of whole photographs that the classifier names correctly."""
    right = 0
    with torch.no_grad():
        for some, wanted in zip(photos.split(256), labels.split(256), strict=True):
            images = resize(some.float() / 255, [SIDE, SIDE], antialias=True)
            right += int((classifier(images).argmax(1) == wanted).sum())
    return right / len(photos)


def classifier_of(model: nn.Module, breeds: list[str]) -> Classifier:
    """Wrap the network with its breeds and with what it sees of an image."""
    names = [breed.replace("_", " ").title() for breed in breeds]
    recipe = Recipe("torchvision:mobilenet_v2", {"num_classes": len(names)})
    view = View((SIDE, SIDE))
    return Classifier(model, mean=MEAN, std=STD, classes=names, view=view, recipe=recipe)


def main() -> None:
    """Train with each learning rate, keep the best on the held-out photographs, save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--breeds", type=int, default=37, help="the first so many, for a trial")
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    breeds = sorted(path.name for path in (args.data / "train").iterdir())[: args.breeds]
    parts = [split(sorted((args.data / "train" / breed).glob("*.jpg"))) for breed in breeds]
    tested = [sorted((args.data / "test/images").glob(f"{breed}_[0-9]*.jpg")) for breed in breeds]
    files = {
        "learn": [learned for learned, _ in parts],
        "held out": [held_out for _, held_out in parts],
        "test": tested,
    }
    photos, labels = {}, {}
    for part, of_breeds in files.items():
        photos[part] = read_photos([path for paths in of_breeds for path in paths]).to(device)
        counts = torch.tensor([len(paths) for paths in of_breeds])
        labels[part] = torch.arange(len(breeds)).repeat_interleave(counts).to(device)
    print(f"read {sum(map(len, labels.values()))} photographs: {time.monotonic() - began:.0f} s")

    start = load_file(args.start)
    arms = {}
    best, kept = -1.0, None
    for rate in args.rates:
        model = train(
            start,
            photos["learn"],
            labels["learn"],
            rate=rate,
            epochs=args.epochs,
            batch=args.batch,
            seed=args.seed,
        )
        right = accuracy(classifier_of(model, breeds), photos["held out"], labels["held out"])
        arms[str(rate)] = round(right, 4)
        print(f"learning rate {rate}: {right:.4f} held out, {time.monotonic() - began:.0f} s")
        if right > best:
            best, kept = right, model
    assert kept is not None, "give a learning rate"

    args.out.mkdir(parents=True, exist_ok=True)
    classifier_of(kept.float().cpu().to(memory_format=torch.contiguous_format), breeds).save(
        args.out
    )
    halves = {key: value.half() for key, value in kept.state_dict().items() if value.ndim}
    save_file(halves, args.out / WEIGHTS)
    classifier = Classifier.load(args.out).to(device)  # as users have it: rounded to 16 bits
    facts = {
        "accuracy": {
            part: round(accuracy(classifier, photos[part], labels[part]), 4) for part in files
        },
        "photographs": {part: len(labels[part]) for part in files},
        "held out per learning rate": arms,
        "architecture": "torchvision:mobilenet_v2",
        "start": "torchvision MobileNet_V2_Weights.IMAGENET1K_V1, trained on ImageNet",
        "data": "Oxford-IIIT Pet, CC BY-SA 4.0",
        "side": SIDE,
        "epochs": args.epochs,
        "batch": args.batch,
        "label smoothing": SMOOTHING,
        "weight decay": DECAY,
        "share with an erased rectangle": ERASED,
        "seed": args.seed,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__},
        "seconds": round(time.monotonic() - began),
    }
    (args.out / "pets-net.json").write_text(json.dumps(facts, indent=2) + "\n")
    names = [f"{path.parent.name}/{path.name}" for paths in files["held out"] for path in paths]
    (args.out / "held-out.txt").write_text("\n".join(names) + "\n")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
