"""The units of a run on disk: a file of rows per unit, whole or absent; the rule for resuming."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor

from sufficit.data.manifest import MANIFEST, Manifest
from sufficit.errors import UserError, cannot_resume
from sufficit.files import is_unfinished, make_folder, names_in, read_json, remove_folder, writing
from sufficit.lock import locked
from sufficit.provenance import plain, save_json
from sufficit.runs.unit_rows import Rows, StoredUnit
from sufficit.sources import CONTROLS, Asked, Maps

UNITS, MAPS = "units", "drawn"  # folders: one while a run lasts, one for good
UNIT, HELD = "unit", "held"  # kinds of files
KEY, UNIT_SIZE, RUN = "key.json", "images per unit", "run"
ROW_FILES = ("scores.parquet", "curves.parquet", "heatmaps.npz")  # of each source
FILES = (
    *("run.json", "summary.json", "curves.json", "pairs.csv", "skipped.csv", "shown.safetensors"),
    *("RUN.toml", "report.html", "sheet.png", "curves.png"),
)
MOST_RECORD = 2**28  # bytes of a run.json
FORMAT = 10  # of the files below units/; a run of another format is not resumed
RECENT = 100  # units that the pace of a run is read from
MACHINE = ("device", "torch", "versions", "compiled")  # may differ when every unit is there


Values = TypeVar("Values")


@dataclass(frozen=True)
class UnitFile:
    """Tensors by name, and facts as JSON."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


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
        """The file of a unit."""
        return self.folder / place / f"{kind}-{unit:06d}.safetensors"

    @property
    def manifest(self) -> Path:
        """The list of the run's images."""
        return self.folder / UNITS / MANIFEST

    def done(self, kind: str = UNIT, place: str = UNITS) -> set[int]:
        """The numbers of the units that have a file."""
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
        """A function that writes rows while the next ones are computed."""
        waiting: list[Future[None]] = []
        with ThreadPoolExecutor(1) as pool:

            def write(rows: Rows) -> None:
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
        columns, points = {}, {}
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
        """A unit's rows, with the model's answers only if they are wanted; without maps."""
        file = self._load(self.path(unit, kind), lambda name: answers or "answers/" not in name)
        rows = Rows(unit, **_row_facts(file.facts), targets=file.tensors["targets"])
        for source, names in file.facts["columns"].items():
            values = file.tensors[f"values/{source}"].unbind(1)
            rows.values[source] = dict(zip(names, values, strict=True))
        for source, points in file.facts["points"].items():
            parts = file.tensors[f"curves/{source}"].split([*points.values()], dim=1)
            rows.curves[source] = dict(zip(points, parts, strict=True))
        rows.answers = _by_source(file.tensors, "answers/")
        return rows

    def read_arrays(self, unit: int, *, answers: bool = False) -> StoredUnit:
        """A unit's rows as arrays: a fifth of the time of `read`."""
        arrays, facts = self._checked(self.path(unit), read_arrays)
        parts = {n: torch.from_numpy(a.copy()) for n, a in arrays.items() if answers}
        return StoredUnit(
            unit,
            **_row_facts(facts),
            targets=arrays["targets"],
            columns=facts["columns"],
            values={source: arrays[f"values/{source}"] for source in facts["columns"]},
            points=facts["points"],
            curves={source: arrays[f"curves/{source}"] for source in facts["points"]},
            answers=_by_source(parts, "answers/"),
        )

    # Maps

    def write_maps(self, rows: Rows, kind: str = UNIT) -> None:
        """Write the maps at the size they were drawn. Controls are drawn again when needed."""
        drawn = {name: one for name, one in rows.maps.items() if name not in CONTROLS}
        facts = {
            "names": rows.names,
            "numbers": rows.numbers,
            "shape": rows.shape,
            "final": {name: one.final for name, one in drawn.items()},
            "fills": {n: one.asked.fills for n, one in drawn.items() if one.asked},
            "unseen": {n: one.asked.unseen for n, one in drawn.items() if one.asked},
        }
        tensors = {f"maps/{name}": one.maps for name, one in drawn.items()}
        for name, one in drawn.items():
            tensors |= {f"columns/{name}/{column}": v for column, v in one.columns.items()}
            if one.shares is not None:
                tensors[f"shares/{name}"] = one.shares
            if one.asked is not None:
                tensors[f"asked/{name}/named"] = one.asked.named
                tensors[f"asked/{name}/confidences"] = one.asked.confidences
            tensors |= {f"notes/{name}/{kind}": marks for kind, marks in one.notes.items()}
        self._save(
            self.path(rows.unit, kind, MAPS if kind == UNIT else UNITS + "/maps"), tensors, facts
        )

    def read_maps(self, unit: int, kind: str = UNIT) -> "StoredMaps":
        """The maps of a unit."""
        place = MAPS if kind == UNIT else UNITS + "/maps"
        file = self._load(self.path(unit, kind, place))
        maps = {}
        for name, final in file.facts["final"].items():
            columns, notes = (
                _below(f"{kind}/{name}/", file.tensors) for kind in ("columns", "notes")
            )
            maps[name] = Maps(
                maps=file.tensors[f"maps/{name}"],
                final=final,
                columns=columns,
                notes=notes,
                shares=file.tensors.get(f"shares/{name}"),
                asked=_asked_in(file, name),
            )
        return StoredMaps(
            tuple(file.facts["names"]), tuple(file.facts["numbers"]), maps, file.facts["shape"]
        )

    # Files

    def _save(self, path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        make_folder(path.parent)
        save_tensors(path, tensors, {RUN: self.run, **plain(facts)})

    def _load(self, path: Path, wanted: Callable[[str], bool] = lambda _: True) -> UnitFile:
        def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
            found = read_tensors(path, wanted)
            return found.tensors, found.facts

        return UnitFile(*self._checked(path, read))

    def _checked(
        self, path: Path, read: Callable[[Path], tuple[dict[str, Values], dict[str, Any]]]
    ) -> tuple[dict[str, Values], dict[str, Any]]:
        """Values and facts of a file; raise where it is broken, or of another run."""
        try:
            values, facts = read(path)
            if facts.pop(RUN, "") != self.run and self.run:
                raise ValueError("a run with other settings or images wrote it")
        except Exception as error:  # safetensors has errors of its own
            raise UserError(
                f"cannot read {path} ({error}): delete it and run the same command again"
            ) from error
        return values, facts

    def remove_units(self) -> None:
        """Delete what only a resume needs, and what killed processes left half written."""
        remove_folder(self.folder / UNITS)
        for path in self.folder.rglob(".*.part-*"):
            if is_unfinished(path.name):
                path.unlink(missing_ok=True)

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

    def clear_failures(self) -> None:
        """Forget the failures: the units are tried again."""
        for path in (self.folder / UNITS).glob("failed-*.json"):
            path.unlink(missing_ok=True)

    def state(self) -> "RunState":
        """How far the run is, from its files alone."""
        path = self.folder / UNITS / KEY
        if (self.folder / "run.json").exists() and not path.exists():
            images = read_json(self.folder / "run.json", MOST_RECORD).get("n")
            if not isinstance(images, int):  # a training, which has no units
                raise UserError(
                    f"{self.folder} holds a run of another kind: give the --out of compare,"
                    " evaluate, explain or a training"
                )
            return RunState(0, 0, images, images, [], is_finished=True)
        if not path.exists():
            raise UserError(f"{self.folder} holds no run: give the --out of one")
        images, size = len(Manifest(path.with_name(MANIFEST))), read_json(path)[UNIT_SIZE]
        done = self.done()
        done_images = sum(min(size, images - unit * size) for unit in done)
        failed = [read_json(one) for one in sorted(path.parent.glob("failed-*.json"))]
        failed = [one for one in failed if one["unit"] not in done]
        return RunState(len(done), -(-images // size), done_images, images, failed)

    def pace(self) -> tuple[float, float] | None:
        """Units per second lately, seconds since the last; None with fewer than two."""
        try:
            recent = sorted(self.done())[-RECENT:]
            times = sorted(self.path(unit).stat().st_mtime for unit in recent)
        except OSError:  # the run has just ended
            return None
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        return (len(times) - 1) / (times[-1] - times[0]), max(0.0, time.time() - times[-1])

    # Starting and resuming

    def start(self, key: Mapping[str, Any], entries: Manifest) -> "Store":
        """Start the run in this folder, or resume it if key and images are the same.

        Return the store of this run.
        """
        whole, path = _whole_key(key), self.folder / UNITS / KEY
        if not path.exists() or self.is_empty:
            self.clear_units()
            make_folder(path.parent)
            entries.save(self.manifest)
            store = replace(self, run=_digest(whole, entries))
            save_json(path, {**whole, RUN: store.run})
            return store
        known, units = read_json(path), -(-len(entries) // entries.unit)
        if known.get("format") != FORMAT:
            raise UserError(
                f"Cannot resume {self.folder}: another version of Sufficit started it. Use"
                " another --out, or --overwrite."
            )
        store = replace(self, run=str(known.pop(RUN, "")))
        _check_images(self.folder, Manifest(self.manifest), entries)
        complete = len(self.done()) == units
        for name in {**known, **whole}:
            was, is_now = known.get(name), whole.get(name)
            # With all units there, the machine decides no number; on_error may become skip.
            free = (complete and name in MACHINE) or (name, was) == ("on_error", "stop")
            if was != is_now and not free:
                raise cannot_resume(self.folder, name, was, is_now)
        entries.save(self.manifest)  # the images may have been moved
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
        """The record of this very run, if it is finished: same settings, same images."""
        try:
            record = read_json(self.folder / "run.json", MOST_RECORD)
        except UserError:  # there is none, or none that can be read
            return None
        run = record.get(RUN) if isinstance(record, dict) else None
        path = self.folder / UNITS / KEY
        if path.exists() and not self.is_empty and read_json(path).get(RUN) != run:
            return None  # another run has started here since: its units are not ours to delete
        return record if run == _digest(_whole_key(key), entries) else None


@dataclass(frozen=True)
class StoredMaps:
    """The maps of some images, as their sources drew them."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    maps: Mapping[str, Maps]
    shape: Sequence[int]  # of the images: C, H, W


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
    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    with writing(path) as part:
        # Not save_file: it does not report a full disk as an OSError.
        # One entry: safetensors writes several in any order, so that bytes would differ.
        part.write_bytes(save(whole, metadata={"facts": json.dumps(facts)}))


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda _: True) -> UnitFile:
    """What `save_tensors` wrote, or some of its tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118  # it is no dict
        return UnitFile(tensors, json.loads(opened.metadata()["facts"]))


def _below(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names have this start, which they lose."""
    return {n.removeprefix(start): one for n, one in tensors.items() if n.startswith(start)}


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `save_tensors` wrote, as arrays, by one read of the file."""
    from safetensors.numpy import load

    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")  # of the header, which `load` does not return
    arrays = load(content)
    return arrays, json.loads(json.loads(content[8:end])["__metadata__"]["facts"])


def _asked_in(file: UnitFile, name: str) -> Asked | None:
    """What the model said while a source's maps were cut, if they were."""
    if name not in file.facts["fills"]:
        return None
    return Asked(
        fills=tuple(file.facts["fills"][name]),
        named=file.tensors[f"asked/{name}/named"],
        confidences=file.tensors[f"asked/{name}/confidences"],
        unseen=file.facts["unseen"][name],
    )


def _by_source(tensors: Mapping[str, Tensor], start: str) -> dict[str, dict[str, Tensor]]:
    """Tensors whose names are start, source/part: by source and part."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(start):
            source, _, part = name.removeprefix(start).rpartition("/")
            found.setdefault(source, {})[part] = tensor
    return found


def _row_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the facts of a unit say of its images, as Rows has it."""
    return {
        "names": tuple(facts["names"]),
        "numbers": tuple(facts["numbers"]),
        "shape": tuple(facts["shape"]),
        "notes": facts["notes"],
        "remark": facts["remark"],
    }


def _whole_key(key: Mapping[str, Any]) -> dict[str, Any]:
    return {**plain(key), "format": FORMAT}


def _digest(key: Mapping[str, Any], entries: Manifest) -> str:
    """What tells a run from others: its settings and its images."""
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
                change = f"written at {was['version'][k]}", f"written at {is_now['version'][k]}"
                raise cannot_resume(out, old, *change)
    if len(known) != len(now):
        raise cannot_resume(out, "number of images", len(known), len(now))
