"""Train the small net that ships with the package, on synthetic digits, in a few minutes on a CPU.

    python tools/train_digits.py src/sufficit/assets/digits

Plain training: cross-entropy on whole pictures, made anew each epoch; it never sees a masked one.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from sufficit import Classifier, Recipe, View
from sufficit.classifier.digit_net import SmallNet
from sufficit.data.digits import synthetic_digits

EPOCHS, PICTURES, BATCH, SEED = 25, 4000, 100, 0


def main(folder: Path) -> None:
    """Train, test on the held-out digits, save."""
    torch.manual_seed(SEED)
    model = SmallNet()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    steps = EPOCHS * PICTURES // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        digits = synthetic_digits(PICTURES, seed=1 + epoch, held_out=False)
        inputs = (digits.images - 0.5) / 0.25
        for batch in torch.randperm(PICTURES).split(BATCH):
            loss = F.cross_entropy(model(inputs[batch]), digits.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}", flush=True)
    classifier = Classifier(
        model.eval(),
        layer="features",
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        classes=[str(digit) for digit in range(10)],
        view=View((64, 64)),
        recipe=Recipe("sufficit:digits"),
    )
    held_out = synthetic_digits(2000, seed=0)
    with torch.no_grad():
        right = (classifier(held_out.images).argmax(1) == held_out.labels).float().mean()
    print(f"accuracy on 2,000 pictures of held-out digits: {right:.4f}")
    print("saved", classifier.save(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
