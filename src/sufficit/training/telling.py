"""What is told while an adapter trains, and the watch for losses that are no numbers."""

import torch
from torch import Tensor

from sufficit.progress import Tick
from sufficit.training.steps import Step

EVERY = 20  # steps between looks at the loss: looking makes a GPU wait
NAMES = ("loss", "accuracy", "area", "share")


class NotFiniteError(Exception):
    """A loss was NaN or infinite; the message says in which batch."""


class Told:
    """The means of an epoch so far."""

    def __init__(self, epoch: int, total: int, epochs: int, tick: Tick | None) -> None:
        self.epoch, self.total, self.epochs, self.tick = epoch, total, epochs, tick
        self.waiting: list[Tensor] = []
        self.sums = torch.zeros(len(NAMES), dtype=torch.float64)
        self.count = 0

    def add(self, step: Step) -> None:
        """Take note of a step; look at the notes now and then."""
        noted = [step.loss.detach(), step.accuracy, step.area, step.share]
        self.waiting.append(torch.stack([value.float() for value in noted]))
        if len(self.waiting) >= EVERY:
            self._look()

    def means(self) -> dict[str, float]:
        """Mean of each number over the epoch."""
        self._look()
        return dict(zip(NAMES, (self.sums / max(1, self.count)).tolist(), strict=True))

    def _look(self) -> None:
        if not self.waiting:
            return
        values = torch.stack(self.waiting).cpu().double()  # [steps,4]
        self.waiting.clear()
        broken = (~values[:, 0].isfinite()).nonzero().flatten().tolist()
        if broken:
            raise NotFiniteError(self._blame(self.count + broken[0] + 1, values[broken[0], 0]))
        self.sums += values.sum(0)
        self.count += len(values)
        self._tell(values[-1].tolist())

    def _blame(self, batch: int, loss: Tensor) -> str:
        of = f" of {self.total}" if self.total else ""
        return (
            f"the loss became {loss.item():g} in epoch {self.epoch + 1}, batch {batch}{of}: look at"
            " its images, at the classifier's precision, and at the learning rate"
        )

    def _tell(self, last: list[float]) -> None:
        if self.tick is None:
            return
        loss, accuracy, area, share = last
        note = f"loss {loss:.2f}, right {accuracy:.0%}, mean mask {area:.2f}, marked {share:.0%}"
        whole = self.total or self.count
        self.tick(self.epoch * whole + self.count, self.epochs * whole, note)
