"""A run: its plan, its folder, where data and device are; what is dear is made once."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sufficit.classifier.architectures import MODELS
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest
from sufficit.comparing.settings import Settings
from sufficit.crews import Crew
from sufficit.data.splits import Sets, Split, held_out
from sufficit.errors import UserError
from sufficit.files import read_json
from sufficit.parsing import DTYPES
from sufficit.progress import Progress
from sufficit.reproduce.clock import Clock
from sufficit.reproduce.datasets import DataOptions, load_sets
from sufficit.reproduce.kept import Kept
from sufficit.reproduce.plans import DATA, NUMBERS, Plan
from sufficit.reproduce.tables import Table, table_of
from sufficit.results import provenance, save_json
from sufficit.training.classifier_training import Augmented
from sufficit.training.loaders import Shuffled, loader_for
from sufficit.training.processes import fabric_for

if TYPE_CHECKING:
    from lightning.fabric import Fabric

VALIDATION, SHARE = 256, 16  # held out to choose adapters by: one in so many, at most
SOME = 64  # pictures of each part that tell data from other data
TRAINED = "trained.json"  # the last file of a training


@dataclass(frozen=True)
class Work:
    """A run: its plan, its folder, where data and device are; what is dear is made once."""

    plan: Plan
    out: Path
    root: Path | None
    device: torch.device
    clock: Clock
    progress: bool | Progress | None = None
    crew: Crew = field(default_factory=Crew)  # the processes that share the run

    @property
    def table(self) -> Table:
        """The table it is for."""
        return table_of(self.plan.table)

    @cached_property
    def fabric(self) -> "Fabric":
        """The device and precision of training, which each process does for itself."""
        return fabric_for(self.device, 1, self.plan.precision)

    @cached_property
    def sets(self) -> Sets:
        """The data, read when a stage needs it."""
        plan = self.plan
        options = DataOptions(
            side=plan.side,
            seed=plan.seed,
            train_images=plan.train_images,
            test_images=plan.test_images,
            classes=plan.classes,
            device=self.device,
        )
        with self.clock("data"):
            found = load_sets(self.table.data, self.root, options)
            _check_same(self.out, _identity(found), keep=self.crew.first)
        counts = f"{len(found.train)} images to train on, {len(found.test)} to test on"
        self.clock.say(f"  {found.source}: {counts}")
        return found

    @cached_property
    def parts(self) -> tuple[Split, Split]:
        """Pictures to train on, and some held out to choose adapters by."""
        train = self.sets.train
        return held_out(train, min(VALIDATION, max(2, len(train) // SHARE)), self.plan.seed)

    @cached_property
    def classifier(self) -> Classifier:
        """The trained classifier on its device, in its precision."""
        layout = torch.channels_last if self.device.type == "cuda" else None
        found = Classifier.load(self.out / "classifier")
        return found.to(self.device, DTYPES[self.plan.precision], layout)

    @cached_property
    def loader(self) -> Shuffled:
        """What adapters train on."""
        size = min(self.plan.lax_batch, len(self.parts[0]))
        adapter = self.table.adapter
        if adapter.augment:
            return Augmented(self.parts[0], size, adapter.images)
        return loader_for(self.classifier, self.parts[0], size, adapter.images)

    @property
    def settings(self) -> Settings:
        """How the methods are compared."""
        plan = self.plan
        return Settings(
            model=str(self.out / "classifier"),
            data=str(self.out / "test"),
            methods=self.table.methods if MODELS[plan.model].attention else _plain(self.table),
            lax=tuple(str(self.out / "adapters" / name) for name in plan.adapters),
            targets="label",
            alpha_min=self.table.alpha_min,
            value_step=plan.step,
            percent_step=2 * plan.step,
            precision=plan.precision,  # type: ignore[arg-type]  # checked by the plan
            batch_size=plan.batch_size,
            on_error="stop",
            seed=plan.seed,
        )

    def kept(self, name: str) -> Kept:
        """Where a stage's numbers lie: all that a table and a report are made of."""
        return Kept(self.out / NUMBERS / f"{name}.safetensors")

    def record(self) -> dict[str, Any]:
        """What the numbers of a stage need to be believed and repeated."""
        return provenance(asdict(self.plan), self.device, DTYPES[self.plan.precision])


def _identity(sets: Sets) -> dict[str, Any]:
    """What tells data from other data: all labels, and some of the pictures, to the bit."""
    parts = (sets.train, sets.test)
    some = [part.images[:: max(1, len(part) // SOME)] for part in parts]
    return {
        "source": sets.source,
        "classes": list(sets.classes),
        "images": [len(part) for part in parts],
        "digest": digest(*some, *(part.labels for part in parts)),
    }


def _check_same(out: Path, now: dict[str, Any], *, keep: bool) -> None:
    """Raise where a run would go on with other data than it was begun with."""
    note = out / DATA
    if note.exists():
        begun = read_json(note)
        if begun != now:
            before, came = (str(told.get("source")) for told in (begun, now))
            raise UserError(
                f"{out} was begun with {before}, and is given {_other(before, came)} now: give the"
                " --data it was begun with, or choose another --out"
            )
    elif keep:
        save_json(note, now)


def _other(before: str, came: str) -> str:
    return f"other images of {came}" if before == came else came


def _plain(table: Table) -> tuple[str, ...]:
    return tuple(method for method in table.methods if method != "rollout")
