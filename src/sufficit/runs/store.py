"""The units of a run on disk: a file of rows per unit, whole or absent; the rule for resuming."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from sufficit.data.manifest import MANIFEST, Manifest
from sufficit.errors import UserError, cannot_resume
from sufficit.files import is_unfinished, make_folder, names_in, read_json, remove_folder, writing
from sufficit.lock import locked
from sufficit.provenance import plain, save_json
from sufficit.runs.unit_rows import Rows
from sufficit.sources import CONTROLS, Asked, Maps

UNITS = "units"  # the folder of what only a resume needs; it goes at the end of a run
MAPS = "drawn"  # the folder of heatmaps as they were drawn; it stays
UNIT = "unit"  # a file of the images that are scored
HELD = "held"  # a file of the images that a probe needs before all others
# The folder of each kind's maps. Those of held images are needed until the run ends, no longer.
MAPS_OF = {UNIT: MAPS, HELD: f"{UNITS}/maps"}
KEY = "key.json"  # the file of the settings of a run
UNIT_SIZE = "images per unit"  # a key of that file
RUN = "run"  # the digest of settings and images, in that file and in every other one
ROW_FILES = ("scores.parquet", "curves.parquet", "heatmaps.npz")  # of each source
FILES = (
    *("run.json", "summary.json", "curves.json", "pairs.csv", "skipped.csv", "shown.safetensors"),
    *("RUN.toml", "report.html", "sheet.png", "curves.png"),
)
MOST_RECORD = 2**28  # bytes of a run.json
FORMAT = 10  # of the files below units/; a run of another format is not resumed
RECENT = 100  # units that the pace of a run is read from
MACHINE = ("device", "torch", "versions", "compiled")  # may differ when every unit is there


@dataclass(frozen=True)
class Store:
    """The folder of a run. Every file carries the digest of its run, and a run reads no other."""

    folder: Path
    run: str = ""  # the digest of settings and images; "" before the run has started, and for any

    @staticmethod
    @contextmanager
    def locked(out: Path | None, *, overwrite: bool = False) -> "Iterator[Store]":
        """Lock the folder of a run inside the block; without one, a temporary folder.

        With `overwrite`, delete what an earlier run left in it first. An error before the first
        unit leaves no units.
        """
        if out is None:
            with TemporaryDirectory(prefix="sufficit-") as place:
                yield Store(Path(place))
            return
        store = Store(out)
        with locked(out):
            if overwrite:
                store.clear_units()
                store.clear_results()
            try:
                yield store
            except Exception:  # a user's model may raise any
                if store.is_empty:
                    store.remove_units()
                raise

    def path(self, unit: int, kind: str = UNIT, place: str = UNITS) -> Path:
        """Return the file of a unit."""
        return self.folder / place / f"{kind}-{unit:06d}.safetensors"

    @property
    def manifest(self) -> Path:
        """The list of the run's images."""
        return self.folder / UNITS / MANIFEST

    def done(self, kind: str = UNIT, place: str = UNITS) -> set[int]:
        """Return the numbers of the units that have a file."""
        # A file that is being written has another name: whatever matches is whole.
        names = re.compile(rf"{kind}-(\d+)\.safetensors")
        found = map(names.fullmatch, names_in(self.folder / place))
        return {int(one[1]) for one in found if one}

    @property
    def is_empty(self) -> bool:
        """Whether no unit is done."""
        places = (self.folder / UNITS, self.folder / MAPS)
        return not any(path for place in places for path in place.rglob("[!.]*.safetensors"))

    # Rows

    @contextmanager
    def writer(self) -> Iterator[Callable[[Rows], None]]:
        """Provide a function that writes rows while the next ones are computed."""
        # Writing may take as long as scoring a small model: do both at once.
        waiting: list[Future[None]] = []
        with ThreadPoolExecutor(1) as pool:

            def write(rows: Rows) -> None:
                # One unit at a time is behind, so that an error of the disk ends the run soon.
                while waiting:
                    waiting.pop().result()
                waiting.append(pool.submit(self.write, rows))

            yield write
            while waiting:
                waiting.pop().result()

    def write(self, rows: Rows, kind: str = UNIT) -> None:
        """Write a unit's maps, then its rows, which make it done: whole or not at all."""
        self.write_maps(rows, kind)
        tensors = {"targets": rows.targets}
        columns = {}  # the names of each source's columns, in the order of the tensor
        points = {}  # the number of points of each curve
        for source, values in rows.values.items():
            columns[source] = [*values]
            tensors[f"values/{source}"] = torch.stack([*values.values()], dim=1)
        # One tensor for all curves: a run has thousands of files, read twice at its end.
        for source, curves in rows.curves.items():
            points[source] = {name: curve.shape[1] for name, curve in curves.items()}
            tensors[f"curves/{source}"] = torch.cat([*curves.values()], dim=1)
        for source, parts in rows.answers.items():
            tensors |= {f"answers/{source}/{name}": part for name, part in parts.items()}
        facts = {
            "names": rows.names,
            "numbers": rows.numbers,
            "shape": rows.shape,
            "notes": rows.notes,
            "remark": rows.remark,
            "columns": columns,
            "points": points,
        }
        self._save(self.path(rows.unit, kind), tensors, facts)

    def read(self, unit: int, kind: str = UNIT, *, answers: bool = False) -> Rows:
        """Return a unit's rows, with the model's answers only if they are wanted; without maps."""
        tensors, facts = self._load(self.path(unit, kind))
        rows = Rows(
            unit,
            names=tuple(facts["names"]),
            numbers=tuple(facts["numbers"]),
            targets=tensors["targets"],
            shape=tuple(facts["shape"]),
            notes=facts["notes"],
            remark=facts["remark"],
        )
        for source, names in facts["columns"].items():
            values = tensors[f"values/{source}"].unbind(1)
            rows.values[source] = dict(zip(names, values, strict=True))
        for source, points in facts["points"].items():
            curves = tensors[f"curves/{source}"].split([*points.values()], dim=1)
            rows.curves[source] = dict(zip(points, curves, strict=True))
        if answers:
            for name, part in _below("answers/", tensors).items():
                # The name of a source may hold a slash, that of a part does not.
                source, _, kind_of_answer = name.rpartition("/")
                rows.answers.setdefault(source, {})[kind_of_answer] = part
        return rows

    # Maps

    def write_maps(self, rows: Rows, kind: str = UNIT) -> None:
        """Write the maps at the size they were drawn. Controls are drawn again when needed."""
        # They are drawn in no time, and would double the size of a small run.
        drawn = {name: one for name, one in rows.maps.items() if name not in CONTROLS}
        tensors = {}
        for name, one in drawn.items():
            tensors[f"maps/{name}"] = one.maps
            if one.shares is not None:
                tensors[f"shares/{name}"] = one.shares
            if one.asked is not None:
                tensors[f"asked/{name}/named"] = one.asked.named
                tensors[f"asked/{name}/confidences"] = one.asked.confidences
            for column, values in one.columns.items():
                tensors[f"columns/{name}/{column}"] = values
            for note, marks in one.notes.items():
                tensors[f"notes/{name}/{note}"] = marks
        facts = {
            "names": rows.names,
            "numbers": rows.numbers,
            "shape": rows.shape,
            "final": {name: one.final for name, one in drawn.items()},
            "fills": {name: one.asked.fills for name, one in drawn.items() if one.asked},
            "unseen": {name: one.asked.unseen for name, one in drawn.items() if one.asked},
        }
        self._save(self.path(rows.unit, kind, MAPS_OF[kind]), tensors, facts)

    def read_maps(self, unit: int, kind: str = UNIT) -> Rows:
        """Return a unit's maps, names and numbers, without what probes found."""
        tensors, facts = self._load(self.path(unit, kind, MAPS_OF[kind]))
        maps = {}
        for name, final in facts["final"].items():
            asked = None
            if name in facts["fills"]:  # the source cut its map by asking the model
                asked = Asked(
                    fills=tuple(facts["fills"][name]),
                    named=tensors[f"asked/{name}/named"],
                    confidences=tensors[f"asked/{name}/confidences"],
                    unseen=facts["unseen"][name],
                )
            maps[name] = Maps(
                maps=tensors[f"maps/{name}"],
                final=final,
                columns=_below(f"columns/{name}/", tensors),
                notes=_below(f"notes/{name}/", tensors),
                shares=tensors.get(f"shares/{name}"),
                asked=asked,
            )
        return Rows(
            unit,
            names=tuple(facts["names"]),
            numbers=tuple(facts["numbers"]),
            shape=tuple(facts["shape"]),
            maps=maps,
        )

    # Files

    def _save(self, path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a file with the digest of the run."""
        make_folder(path.parent)
        save_tensors(path, tensors, {RUN: self.run, **plain(facts)})

    def _load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and facts of a file; raise where it is broken, or of another run."""
        try:
            tensors, facts = read_tensors(path)
            if self.run and facts.get(RUN) != self.run:
                raise ValueError("a run with other settings or images wrote it")
        except Exception as error:  # safetensors has errors of its own
            raise UserError(
                f"cannot read {path} ({error}): delete it and run the same command again"
            ) from error
        return tensors, facts

    # Deleting

    def remove_units(self) -> None:
        """Delete what only a resume needs, and what killed processes left half written."""
        remove_folder(self.folder / UNITS)
        for path in self.folder.rglob(".*.part-*"):
            if is_unfinished(path.name):
                path.unlink(missing_ok=True)

    def remove_after(self, units: int) -> None:
        """Delete what was computed of the units after the first ones, which are enough."""
        for place in (UNITS, MAPS):
            for unit in self.done(place=place) - {*range(units)}:
                self.path(unit, place=place).unlink()

    def clear_units(self) -> None:
        """Delete the units and the stored heatmaps."""
        self.remove_units()
        remove_folder(self.folder / MAPS)

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
            if not any(folder.iterdir()):
                folder.rmdir()

    def clear_earlier(self) -> None:
        """Delete what an earlier, finished run wrote and this one may not write again.

        run.json goes first: without it, nobody takes the files of two runs for those of one. The
        others may be the user's, as a heatmaps.npz that is scored.
        """
        if (self.folder / "run.json").exists():
            for name in ("run.json", "shown.safetensors", "pairs.csv", "skipped.csv"):
                (self.folder / name).unlink(missing_ok=True)

    # Failures, and how far a run is

    def write_failure(self, unit: int, images: Sequence[str], reason: str) -> None:
        """Note that a unit failed, for whoever looks at the run."""
        found = {"unit": unit, "images": list(images), "reason": reason}
        save_json(self.folder / UNITS / f"failed-{unit:06d}.json", found)

    def state(self) -> "RunState":
        """Return how far the run is, from its files alone."""
        path = self.folder / UNITS / KEY
        if (self.folder / "run.json").exists() and not path.exists():
            # The units of a finished run are deleted: its record has the number of images.
            images = read_json(self.folder / "run.json", MOST_RECORD).get("n")
            if not isinstance(images, int):  # a training, which has no units
                raise UserError(
                    f"{self.folder} holds a run of another kind: give the --out of compare,"
                    " evaluate, explain or a training"
                )
            return RunState(
                done=0, units=0, done_images=images, images=images, failed=[], is_finished=True
            )
        if not path.exists():
            raise UserError(f"{self.folder} holds no run: give the --out of one")
        images = len(Manifest(self.manifest))
        size = read_json(path)[UNIT_SIZE]
        done = self.done()
        failures = [read_json(one) for one in sorted(path.parent.glob("failed-*.json"))]
        return RunState(
            done=len(done),
            units=math.ceil(images / size),
            done_images=sum(min(size, images - unit * size) for unit in done),  # the last is short
            images=images,
            failed=[one for one in failures if one["unit"] not in done],
        )

    def pace(self) -> tuple[float, float] | None:
        """Return units per second lately, seconds since the last; None with fewer than two."""
        try:
            recent = sorted(self.done())[-RECENT:]
            times = sorted(self.path(unit).stat().st_mtime for unit in recent)
        except OSError:  # the run has just ended
            return None
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        speed = (len(times) - 1) / (times[-1] - times[0])
        idle = max(0.0, time.time() - times[-1])
        return speed, idle

    # Starting and resuming

    def start(self, key: Mapping[str, Any], entries: Manifest) -> "Store":
        """Start the run in this folder, or resume it if key and images are the same.

        Return the store of this run.
        """
        whole = _whole_key(key)
        path = self.folder / UNITS / KEY
        if not path.exists() or self.is_empty:
            self.clear_units()
            make_folder(path.parent)
            entries.save(self.manifest)
            store = replace(self, run=_digest(whole, entries))
            save_json(path, {**whole, RUN: store.run})
            return store
        # There are units: resume only what would compute the same numbers.
        known = read_json(path)
        if known.get("format") != FORMAT:
            raise UserError(
                f"Cannot resume {self.folder}: another version of Sufficit started it. Use"
                " another --out, or --overwrite."
            )
        store = replace(self, run=str(known.pop(RUN, "")))
        _check_images(self.folder, Manifest(self.manifest), entries)
        units = math.ceil(len(entries) / entries.unit)
        is_complete = len(self.done()) == units
        for name in {**known, **whole}:
            was = known.get(name)
            is_now = whole.get(name)
            if was == is_now:
                continue
            if is_complete and name in MACHINE:
                continue  # every unit is there: the machine decides no number any more
            if name == "on_error" and was == "stop":
                continue  # no image was skipped so far
            raise cannot_resume(self.folder, name, was, is_now)
        entries.save(self.manifest)  # the images may have been moved
        for failure in (self.folder / UNITS).glob("failed-*.json"):  # these units are tried again
            failure.unlink(missing_ok=True)
        return store

    def check_free(self) -> None:
        """Raise if the folder holds a finished run, whose files this run would replace."""
        # Maps outlast their run. Units that a kill left are resumed, or refused by `start`.
        resumed = any((self.folder / UNITS).rglob("[!.]*.safetensors"))
        if (self.folder / "run.json").exists() and not resumed:
            raise UserError(
                f"{self.folder} holds a finished run of other settings or images: choose another"
                " --out, or --overwrite"
            )

    def finished(self, key: Mapping[str, Any], entries: Manifest) -> dict[str, Any] | None:
        """Return the record of this very run, if it is finished: same settings, same images."""
        try:
            record = read_json(self.folder / "run.json", MOST_RECORD)
        except UserError:  # there is none, or none that can be read
            return None
        # A record of other settings has another digest.
        run = record.get(RUN) if isinstance(record, dict) else None
        path = self.folder / UNITS / KEY
        if path.exists() and not self.is_empty and read_json(path).get(RUN) != run:
            return None  # another run has started here since: its units are not ours to delete
        return record if run == _digest(_whole_key(key), entries) else None


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    done: int  # units
    units: int
    done_images: int
    images: int
    failed: list[dict[str, Any]]  # unit, images and reason
    is_finished: bool = False


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, and facts as JSON, to a file."""
    from safetensors.torch import save

    # Copies, because safetensors refuses tensors that share memory.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with writing(path) as part:
        # Not save_file: it does not report a full disk as an OSError.
        # One entry: safetensors writes several in any order, so that bytes would differ.
        part.write_bytes(save(whole, metadata={"facts": json.dumps(facts)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts that `save_tensors` wrote."""
    from safetensors.torch import load

    # One read: a run has thousands of files, and safe_open takes twice as long for each.
    content = path.read_bytes()
    tensors = load(content)
    # `load` does not return the header: its length as 8 bytes, then JSON.
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    facts = json.loads(header)["__metadata__"]["facts"]
    return tensors, json.loads(facts)


def _below(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names have this start, which they lose."""
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start)
    }


def _whole_key(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key as JSON holds it, with the format of the files."""
    return {**plain(key), "format": FORMAT}


def _digest(key: Mapping[str, Any], entries: Manifest) -> str:
    """Return the digest of settings and images, which tells a run from others."""
    found = sha256(json.dumps(key, sort_keys=True).encode())
    for one in entries.digests():
        found.update(one.encode())
    return found.hexdigest()[:32]


def _check_images(out: Path, known: Manifest, now: Manifest) -> None:
    """Raise where images were added, removed, relabelled or written again since the run started."""
    if known.unit != now.unit:
        raise cannot_resume(out, UNIT_SIZE, known.unit, now.unit)
    for number, (before, after) in enumerate(zip(known.digests(), now.digests(), strict=False)):
        if before == after:
            continue
        was = known.row(number)
        is_now = now.row(number)
        for k, (old, new) in enumerate(zip(was["name"], is_now["name"], strict=False)):
            if old != new:
                raise cannot_resume(out, f"image {number * now.unit + k}", old, new)
            if was["size"][k] != is_now["size"][k]:
                size_before = f"{was['size'][k]} bytes"
                size_now = f"{is_now['size'][k]} bytes"
                raise cannot_resume(out, old, size_before, size_now)
            if was["folder"][k] != is_now["folder"][k]:
                raise cannot_resume(out, f"label of {old}", was["folder"][k], is_now["folder"][k])
            if was["version"][k] != is_now["version"][k]:
                written_before = f"written at {was['version'][k]}"
                written_now = f"written at {is_now['version'][k]}"
                raise cannot_resume(out, old, written_before, written_now)
    if len(known) != len(now):
        raise cannot_resume(out, "number of images", len(known), len(now))
