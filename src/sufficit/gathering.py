"""All that the parts of a run hold, read one after the other; the model's answers stay on disk."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from sufficit.data.loader import Skipped, check_any, check_sizes
from sufficit.files import writing
from sufficit.keeping import LARGE, SMALL, Parts
from sufficit.metrics.plan import Plan
from sufficit.perturbation.predictions import Predictions
from sufficit.sharing import SCORES, Roll


@dataclass(frozen=True)
class Gathered:
    """All that was scored, in the images' order, and what could not be."""

    names: tuple[str, ...]
    answers: dict[str, Predictions]  # by method
    held_out: dict[str, Predictions]  # with the held-out fill, where there is one
    skipped: tuple[Skipped, ...]
    counts: tuple[int, ...]  # images scored of each group

    @property
    def targets(self) -> Tensor:
        """The class each image was scored for: [N]."""
        return next(iter(self.answers.values())).targets

    @property
    def roll(self) -> Roll:
        """What the leak must know of the images."""
        return Roll(self.targets, self.counts)


def gather(
    parts: Parts,
    groups: int,
    plan: Plan,
    methods: Sequence[str],
    *,
    held_out: bool,
    one_size: bool,
    each: Callable[[Mapping[str, Any]], None],
) -> Gathered:
    """What the parts of all groups hold; `each` sees what is known of every group with images.

    What is not looked at takes no memory. A value an image is kept, and the images' names.
    """
    stems = [*methods, *(f"{method}/held_out" for method in methods if held_out)]
    names, skipped, counts = list[str](), list[Skipped](), list[int]()
    sizes: dict[tuple[int, ...], str] = {}
    with ExitStack() as files:
        piles = {stem: _Piles(parts.folder, k, files) for k, stem in enumerate(stems)}
        for number in range(groups):
            part = parts.read(SCORES, number)
            skipped += [Skipped(*pair) for pair in part.facts["skipped"].items()]
            names += (found := part.facts["names"])
            counts.append(len(found))
            if found:
                sizes.setdefault(tuple(part.facts["size"]), found[0])
                each(part.facts)
                for stem, pile in piles.items():
                    pile.add({name: part.tensors[f"{stem}/{name}"] for name in (*LARGE, *SMALL)})
    check_any(len(names), skipped)
    if one_size:
        check_sizes(sizes)
    second = {m: piles[f"{m}/held_out"].answers(plan, held_out=True) for m in methods if held_out}
    first = {method: piles[method].answers(plan) for method in methods}
    return Gathered(tuple(names), first, second, tuple(skipped), tuple(counts))


@dataclass
class _Piles:
    """The answers of one part after the other: those to bands in files, the rest in memory."""

    folder: Path
    number: int
    files: ExitStack
    width: int = 0
    small: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in SMALL})
    open: dict[str, IO[bytes]] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, dtype in LARGE.items():
            if name not in self.open:
                part = self.files.enter_context(writing(self._path(name)))
                self.open[name] = self.files.enter_context(part.open("wb"))
            self.open[name].write(tensors[name].to(dtype).numpy().tobytes())
        for name, found in self.small.items():
            found.append(tensors[name])
        self.width = tensors["named"].shape[1]

    def answers(self, plan: Plan, *, held_out: bool = False) -> Predictions:
        """All of them as one, once the files are closed."""
        small = {name: torch.cat(found) for name, found in self.small.items()}
        shape = len(small["targets"]), self.width
        large = {name: _mapped(self._path(name), shape, kind) for name, kind in LARGE.items()}
        bands = plan.msi_asks if held_out else plan.asks
        return Predictions(bands=bands, weighed=plan.weighs, **large, **small)

    def _path(self, name: str) -> Path:
        return self.folder / f"joined-{self.number}-{name}.bin"


def _mapped(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A file of numbers as a tensor that is read where it is looked at, and never written back."""
    count = shape[0] * shape[1]
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype).view(shape)
