"""The units of a run on disk: a file per unit and stage, whole or absent; the rule for resuming."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from sufficit.data.manifest import MANIFEST, Manifest
from sufficit.errors import GoneError, UserError, cannot_resume
from sufficit.files import (
    is_remote,
    is_unfinished,
    local_file,
    make_folder,
    names_in,
    read_json,
    remove_folder,
    writing,
)
from sufficit.lock import owning
from sufficit.provenance import plain, save_json

UNITS = "units"
SCORES, HEATMAPS, PIXELS, LEAK, DONORS = "scores", "heatmaps", "pixels", "leak", "donors"  # stages
KEY, UNIT_SIZE, RUN = "key.json", "images per unit", "run"
ROW_FILES = ("scores.parquet", "curves.parquet", "heatmaps.npz")  # of each source
FILES = (
    *("run.json", *ROW_FILES),
    *("summary.json", "curves.json", "pairs.csv", "skipped.csv", "shown.safetensors"),
    *("RUN.toml", "report.html", "sheet.png", "curves.png"),
)
MOST_HEADER = 2**27  # bytes of the facts of a unit
MOST_RECORD = 2**28  # bytes of a run.json
FORMAT = 7  # of the files below units/; a run of another format is not resumed
RECENT = 100  # units that the pace of a run is read from
MACHINE = ("device", "torch", "versions", "compiled")  # may differ when every unit is there


StageFile = tuple[str, Mapping[str, Tensor], Mapping[str, Any]]
"""What a unit leaves of a stage: its name, tensors and facts."""


@dataclass(frozen=True)
class UnitFile:
    """Tensors by name, and the facts of a unit as JSON."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Store:
    """The folder of a run: `units/` while it runs, `heatmaps/` for good.

    Every file carries the digest of its run's settings and images, and a run reads no other.
    """

    folder: Path
    run: str = ""  # the digest; "" before the run has started, and for any

    def path(self, stage: str, unit: int) -> Path:
        """The file of a unit; heatmaps stay when the run is done."""
        place = HEATMAPS if stage == HEATMAPS else UNITS
        return self.folder / place / f"{stage}-{unit:06d}.safetensors"

    @property
    def manifest(self) -> Path:
        """The list of the run's images."""
        return self.folder / UNITS / MANIFEST

    def has(self, stage: str, unit: int) -> bool:
        """Whether a unit is done."""
        return self.path(stage, unit).exists()

    def done(self, stage: str) -> set[int]:
        """The numbers of the units that are done."""
        names = re.compile(rf"{stage}-(\d+)\.safetensors")
        found = map(names.fullmatch, names_in(self.path(stage, 0).parent))
        return {int(one[1]) for one in found if one}

    def write(
        self, stage: str, unit: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Write a unit's file."""
        path = self.path(stage, unit)
        make_folder(path.parent)
        save_tensors(path, tensors, {RUN: self.run, **plain(facts)})

    def write_unit(self, unit: int, files: Sequence[StageFile]) -> None:
        """Write the files of a unit in order; the last one makes it done."""
        for stage, tensors, facts in files:
            self.write(stage, unit, tensors, facts)

    def read(self, stage: str, unit: int, *, names: Sequence[str] | None = None) -> UnitFile:
        """A unit's file, or some of its tensors."""
        path = self.path(stage, unit)
        with _readable(path):
            found = read_tensors(path, names)
            return replace(found, facts=self._own(found.facts))

    def facts(self, stage: str, unit: int) -> dict[str, Any]:
        """What a unit's file says beside its tensors: of the file, the header alone is read."""
        path = self.path(stage, unit)
        with _readable(path), path.open("rb") as file:
            header = json.loads(file.read(min(MOST_HEADER, int.from_bytes(file.read(8), "little"))))
            return self._own(json.loads(header["__metadata__"]["facts"]))

    def _own(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The facts of a file without the run's digest; raise if another run wrote it."""
        if facts.pop(RUN, "") != self.run and self.run:
            raise ValueError("a run with other settings or images wrote it")
        return facts

    @property
    def is_empty(self) -> bool:
        """Whether no unit is done."""
        names = (name for place in (UNITS, HEATMAPS) for name in names_in(self.folder / place))
        return all(is_unfinished(name) for name in names if name.endswith(".safetensors"))

    def remove_units(self) -> None:
        """Delete what only a resume needs, and what killed processes left half written."""
        remove_folder(self.folder / UNITS)
        if is_remote(self.folder):
            return
        for path in self.folder.rglob(".*.part-*"):
            if is_unfinished(path.name):
                path.unlink(missing_ok=True)

    def clear_units(self) -> None:
        """Delete the units and the stored heatmaps."""
        self.remove_units()
        remove_folder(self.folder / HEATMAPS)

    def clear_results(self) -> None:
        """Delete what an earlier run wrote at its end, and nothing else."""
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)
        rows = [*self.folder.glob("*/scores.parquet"), *self.folder.glob("*/curves.parquet")]
        for folder in {path.parent for path in rows}:
            if (folder / "run.json").exists():  # another run, not a source of this one
                continue
            for name in ROW_FILES:
                (folder / name).unlink(missing_ok=True)
            if not is_remote(folder) and not any(folder.iterdir()):
                folder.rmdir()

    def clear_earlier(self) -> None:
        """Delete what an earlier, finished run wrote and this one may not write again.

        run.json goes first: without it, nobody takes the files of two runs for those of one. The
        others may be the user's, as a heatmaps.npz that is scored.
        """
        if (self.folder / "run.json").exists():
            for name in ("run.json", "shown.safetensors", "pairs.csv", "skipped.csv"):
                (self.folder / name).unlink(missing_ok=True)

    def write_failure(self, stage: str, unit: int, images: Sequence[str], reason: str) -> None:
        """Note that a unit failed, for whoever looks at the run."""
        found = {"stage": stage, "unit": unit, "images": list(images), "reason": reason}
        save_json(self.folder / UNITS / f"failed-{unit + 1:06d}.json", found)

    def clear_failures(self) -> None:
        """Forget the failures: the units are tried again."""
        for path in (self.folder / UNITS).glob("failed-*.json"):
            path.unlink(missing_ok=True)

    def state(self) -> "RunState":
        """How far the run is, from its files alone."""
        path = self.folder / UNITS / KEY
        if (self.folder / "run.json").exists() and not path.exists():
            images = read_json(self.folder / "run.json").get("n")
            if not isinstance(images, int):  # a training, which has no units
                raise UserError(
                    f"{self.folder} holds a run of another kind: give the --out of compare,"
                    " evaluate, explain or a training"
                )
            return RunState({}, 0, images, images, [], is_finished=True)
        if not path.exists():
            raise UserError(f"{self.folder} holds no run: give the --out of one")
        key, images = read_json(path), len(Manifest(path.with_name(MANIFEST)))
        size = key[UNIT_SIZE]
        done = {stage: self.done(stage) for stage in key["stages"]}
        first = done[key["stages"][0]]
        done_images = sum(min(size, images - unit * size) for unit in first)
        failed = [read_json(one) for one in sorted(path.parent.glob("failed-*.json"))]
        failed = [one for one in failed if one["unit"] not in done.get(one["stage"], ())]
        counts = {stage: len(found) for stage, found in done.items()}
        return RunState(counts, -(-images // size), done_images, images, failed)

    def pace(self, stage: str) -> tuple[float, float] | None:
        """Units of a stage per second lately, seconds since the last; None with fewer than two."""
        try:
            recent = sorted(self.done(stage))[-RECENT:]
            times = sorted(self.path(stage, unit).stat().st_mtime for unit in recent)
        except OSError:  # the run has just ended
            return None
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        return (len(times) - 1) / (times[-1] - times[0]), max(0.0, time.time() - times[-1])

    def start(
        self,
        key: Mapping[str, Any],
        entries: Manifest,
        stages: Sequence[str] = (SCORES,),
        check: Callable[["Store", frozenset[int]], None] = lambda *_: None,
    ) -> "Store":
        """Start the run in this folder, or resume it if key and images are the same.

        Return the store of this run. `check` raises where images that were written again, which
        it gets by number, have other contents.
        """
        key, path = _whole_key(key, stages), self.folder / UNITS / KEY
        if not path.exists() or self.is_empty:
            self.clear_units()
            make_folder(path.parent)
            entries.save(self.manifest)
            store = replace(self, run=_digest(key, entries))
            save_json(path, {**key, RUN: store.run})
            return store
        known, units = read_json(path), -(-len(entries) // entries.unit)
        if known.get("format") != FORMAT:
            raise UserError(
                f"Cannot resume {self.folder}: another version of Sufficit started it. Use"
                " another --out, or --overwrite."
            )
        store = replace(self, run=str(known.pop(RUN, "")))
        changed = _check_images(self.folder, Manifest(self.manifest), entries)
        complete = all(len(self.done(stage)) == units for stage in stages)
        for name in {**known, **key}:
            was, is_now = known.get(name), key.get(name)
            # With all units there, the machine decides no number; on_error may become skip.
            free = (complete and name in MACHINE) or (name, was) == ("on_error", "stop")
            if was != is_now and not free:
                raise cannot_resume(self.folder, name, was, is_now)
        check(store, changed)
        entries.save(self.manifest)  # the images may have been moved
        return store

    def finished(
        self, key: Mapping[str, Any], entries: Manifest, stages: Sequence[str]
    ) -> dict[str, Any] | None:
        """The record of this very run, if it is finished: same settings, same images."""
        try:
            record = read_json(self.folder / "run.json", MOST_RECORD)
        except GoneError:
            raise
        except UserError:  # there is none, or none that can be read
            return None
        run = record.get(RUN) if isinstance(record, dict) else None
        path = self.folder / UNITS / KEY
        if path.exists() and not self.is_empty and read_json(path).get(RUN) != run:
            return None  # another run has started here since: its units are not ours to delete
        return record if run == _digest(_whole_key(key, stages), entries) else None


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    done: dict[str, int]  # stage -> units
    units: int
    done_images: int  # of the first stage
    images: int
    failed: list[dict[str, Any]]  # unit, stage, images and reason
    is_finished: bool = False


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, and facts as JSON, to a file."""
    from safetensors.torch import save

    # Copies, because safetensors refuses tensors that share memory.
    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    with writing(path) as part:
        # Not save_file: it does not report a full disk as an OSError.
        # One entry: safetensors writes several in any order, so that bytes would differ.
        part.write_bytes(save(whole, metadata={"facts": json.dumps(facts)}))


def read_tensors(path: Path, names: Sequence[str] | None = None) -> UnitFile:
    """What `save_tensors` wrote, or some of its tensors."""
    from safetensors import safe_open

    with local_file(path) as file, safe_open(file, framework="pt") as opened:
        wanted = list(opened.keys()) if names is None else names
        tensors = {name: opened.get_tensor(name) for name in wanted}
        return UnitFile(tensors, json.loads(opened.metadata()["facts"]))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say what to do about a unit's file that cannot be read inside."""
    try:
        yield
    except GoneError:
        raise
    except Exception as error:
        raise UserError(
            f"cannot read {path} ({error}): delete it and run the same command again"
        ) from error


@contextmanager
def store_in(out: Path | None) -> Iterator[Store]:
    """The store of a folder that is owned inside, or of a temporary one.

    An error before the first unit leaves none.
    """
    if out is None:
        with TemporaryDirectory(prefix="sufficit-") as place:
            yield Store(Path(place))
        return
    store = Store(out)
    with owning(out):
        try:
            yield store
        except Exception:  # a user's model may raise any
            if store.is_empty:
                store.remove_units()
            raise


def _whole_key(key: Mapping[str, Any], stages: Sequence[str]) -> dict[str, Any]:
    return {**plain(key), "format": FORMAT, "stages": list(stages)}


def _digest(key: Mapping[str, Any], entries: Manifest) -> str:
    """What tells a run from others: its settings and its images."""
    found = sha256(json.dumps(key, sort_keys=True).encode())
    for one in entries.digests():
        found.update(one.encode())
    return found.hexdigest()[:32]


def _check_images(out: Path, known: Manifest, now: Manifest) -> frozenset[int]:
    """The numbers of images that were written again since the run started.

    Raise where images were added or removed, or have another size or label.
    """
    changed = set[int]()
    if known.unit != now.unit:
        raise cannot_resume(out, UNIT_SIZE, known.unit, now.unit)
    for number, (before, after) in enumerate(zip(known.digests(), now.digests(), strict=False)):
        if before == after:
            continue
        was, is_now = known.row(number), now.row(number)
        for k, (old, new) in enumerate(zip(was["name"], is_now["name"], strict=False)):
            if old != new:
                raise cannot_resume(out, f"image {number * now.unit + k}", old, new)
            if was["size"][k] != is_now["size"][k]:
                change = f"{was['size'][k]} bytes", f"{is_now['size'][k]} bytes"
                raise cannot_resume(out, old, *change)
            if was["folder"][k] != is_now["folder"][k]:
                raise cannot_resume(out, f"label of {old}", was["folder"][k], is_now["folder"][k])
            if was["version"][k] != is_now["version"][k]:
                changed.add(number * now.unit + k)
    if len(known) != len(now):
        raise cannot_resume(out, "number of images", len(known), len(now))
    return frozenset(changed)
