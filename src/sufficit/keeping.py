"""What is done of a run, group by group on disk, so that it can be stopped and go on."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from sufficit.classifier.fingerprint import read, same
from sufficit.errors import UserError
from sufficit.files import is_unfinished, make_folder, read_json, writing
from sufficit.metrics.leakage import TENSORS, Leak
from sufficit.perturbation.predictions import Predictions
from sufficit.results import plain, save_json

FOLDER = "parts"
BEGUN, COMPLETE = "begun.json", "complete"
PATHS = ("model", "data", "lax")
OF_THE_MACHINE = ("device", "torch", *PATHS)
MODEL = "model's fingerprint"
LARGE = {"named": torch.int32, "confidences": torch.float32}  # of a part's answers
SMALL = ("shares", "targets", "calls")
FORM = "form of the parts", 2  # so that parts of an earlier version are not read


@dataclass(frozen=True)
class Part:
    """Tensors by name, and what else there is to know of a group."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """A folder with a file a group and stage; each appears whole or not at all."""

    folder: Path

    def path(self, stage: str, group: int) -> Path:
        """Where a group's part lies."""
        return self.folder / f"{stage}-{group:06d}.safetensors"

    def has(self, stage: str, group: int) -> bool:
        """Whether a group is done."""
        return self.path(stage, group).exists()

    def done(self, stage: str) -> list[int]:
        """The groups that are done."""
        found = self.folder.glob(f"{stage}-*.safetensors")
        return sorted(int(path.stem.rpartition("-")[2]) for path in found)

    def write(
        self, stage: str, group: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Keep what was found of a group."""
        from safetensors.torch import save

        # Copies: tensors that share memory can't be stored apart.
        whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        with writing(self.path(stage, group)) as path:
            # save_file does not tell a full disk as an OSError.
            path.write_bytes(save(whole, metadata={"facts": json.dumps(facts)}))

    def facts(self, stage: str, group: int) -> dict[str, Any]:
        """What there is to know of a group beside its tensors."""
        return self.read(stage, group, tensors=False).facts

    def read(self, stage: str, group: int, *, tensors: bool = True) -> Part:
        """What was found of a group."""
        from safetensors import safe_open

        path = self.path(stage, group)
        try:
            with safe_open(path, framework="pt") as opened:
                facts = json.loads(opened.metadata()["facts"])
                names = list(opened.keys()) if tensors else []
                return Part({name: opened.get_tensor(name) for name in names}, facts)
        except Exception as error:
            raise UserError(
                f"{path} can't be read ({error}): delete it, and the run makes it anew"
            ) from error

    @property
    def is_empty(self) -> bool:
        """Whether no group is done."""
        return all(is_unfinished(path.name) for path in self.folder.glob("*.safetensors"))

    def complete(self) -> None:
        """Take note that nothing is left to ask the model."""
        with writing(self.folder / COMPLETE) as path:
            path.touch()

    @property
    def is_complete(self) -> bool:
        """Whether all was asked: what is left can be done on any machine."""
        return (self.folder / COMPLETE).exists()

    def remove(self) -> None:
        """Forget all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def place_for(out: Path | None, *, alone: bool) -> Iterator[Path]:
    """Where parts are kept: below the folder of results, or, without one, where nobody looks.

    A run that fails before anything is done leaves no trace, if no other process works there.
    """
    if out is None:
        with TemporaryDirectory(prefix="sufficit-") as place:
            yield Path(place)
        return
    made, parts = not out.exists(), Parts(out / FOLDER)
    try:
        yield out
    except UserError:
        if alone and parts.is_empty:
            parts.remove()
            if made and out.exists() and not any(out.iterdir()):
                out.rmdir()
        raise


def clear(out: Path, files: Iterable[str]) -> None:
    """Remove what an earlier run left, finished or not, so that nothing old stands beside new."""
    Parts(out / FOLDER).remove()
    for name in files:
        (out / name).unlink(missing_ok=True)


def begin(out: Path, identity: Mapping[str, Any]) -> Parts:
    """The parts of a run: those of an earlier start, if it was the very same run."""
    parts = Parts(out / FOLDER)
    note, wanted = parts.folder / BEGUN, plain(identity) | dict([FORM])
    if note.exists() and (parts.is_complete or not parts.is_empty):
        _check_same(out, read_json(note), wanted, parts.is_complete)
        return parts
    parts.remove()
    make_folder(parts.folder)
    save_json(note, wanted)
    return parts


def _check_same(
    out: Path, begun: Mapping[str, Any], wanted: Mapping[str, Any], complete: bool
) -> None:
    """Raise where a run would go on with other settings than it was begun with.

    What is complete may be written out on another machine, to which the folder was moved. Paths may
    be spelled otherwise, or have moved: what lies there is compared by itself. What a bad file has
    stopped may go on without such files, as the error says.
    """
    for name in {**begun, **wanted}:
        before, now = begun.get(name), wanted.get(name)
        free = complete and (
            name in OF_THE_MACHINE or (name == MODEL and same(read(before), read(now)))
        )
        free = free or (name in PATHS and _one_place(before, now))
        if before != now and not free and (name, before) != ("on_error", "stop"):
            raise UserError(
                f"{out} holds part of another run: {name} was {before!r} and is now {now!r}. Go on"
                " with the settings it was begun with, choose another --out, or --overwrite it"
            )


def _one_place(before: Any, now: Any) -> bool:
    """Whether paths lead to the same, or to where that was moved from a place it has left."""
    old, new = (value if isinstance(value, list) else [value] for value in (before, now))
    pairs = [(Path(str(one)), Path(str(other))) for one, other in zip(old, new, strict=False)]
    return len(old) == len(new) and all(
        there.exists() and (not here.exists() or here.samefile(there)) for here, there in pairs
    )


def predictions_as_tensors(method: str, answers: Predictions) -> dict[str, Tensor]:
    """A method's answers by names of their own."""
    return {f"{method}/{name}": getattr(answers, name) for name in (*LARGE, *SMALL)}


def leak_as_tensors(method: str, leaked: Leak) -> dict[str, Tensor]:
    """A method's leak by names of its own."""
    return {f"{method}/{name}": getattr(leaked, name) for name in TENSORS}


def leak_from(part: Part, method: str) -> Leak:
    """A method's leak."""
    found = {name: part.tensors[f"{method}/{name}"] for name in TENSORS}
    return Leak(**found, alpha_min=part.facts["alpha_min"])
