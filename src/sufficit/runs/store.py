"""The units of a run on disk: a file per unit and stage, whole or absent; the rule for resuming."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from sufficit.data.loader import Entry
from sufficit.errors import UserError, cannot_resume
from sufficit.files import is_unfinished, make_folder, read_json, writing
from sufficit.provenance import plain, save_json

UNITS = "units"
SCORES, HEATMAPS, PIXELS, LEAK, DONORS = "scores", "heatmaps", "pixels", "leak", "donors"  # stages
KEY, MANIFEST, UNIT_SIZE = "key.json", "manifest.json", "images per unit"
ROW_FILES = ("scores.parquet", "curves.parquet", "heatmaps.npz")  # of each source
FILES = (
    *ROW_FILES,
    *("summary.json", "curves.json", "pairs.csv", "skipped.csv", "shown.safetensors"),
    *("run.json", "RUN.toml"),
    *("report.html", "sheet.png", "curves.png"),
)
MOST_MANIFEST = 2**32  # bytes
FORMAT = 3  # of the files below units/; a run of another format is not resumed
MACHINE = ("device", "torch")  # may differ when every unit is there: the rest is merging


StageFile = tuple[str, Mapping[str, Tensor], Mapping[str, Any]]
"""What a unit leaves of a stage: its name, tensors and facts."""


@dataclass(frozen=True)
class UnitFile:
    """Tensors by name, and the facts of a unit as JSON."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Store:
    """The folder of a run: `units/` while it runs, `heatmaps/` for good."""

    folder: Path

    def path(self, stage: str, unit: int) -> Path:
        """The file of a unit; heatmaps stay when the run is done."""
        place = HEATMAPS if stage == HEATMAPS else UNITS
        return self.folder / place / f"{stage}-{unit:06d}.safetensors"

    def has(self, stage: str, unit: int) -> bool:
        """Whether a unit is done."""
        return self.path(stage, unit).exists()

    def done(self, stage: str) -> set[int]:
        """The numbers of the units that are done."""
        found = self.path(stage, 0).parent.glob(f"{stage}-*.safetensors")
        return {int(path.stem.rpartition("-")[2]) for path in found}

    def write(
        self, stage: str, unit: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Write a unit's file."""
        from safetensors.torch import save

        # Copies, because safetensors refuses tensors that share memory.
        whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        path = self.path(stage, unit)
        make_folder(path.parent)
        with writing(path) as part:
            # Not save_file: it does not report a full disk as an OSError.
            part.write_bytes(save(whole, metadata={"facts": json.dumps(plain(facts))}))

    def write_unit(self, unit: int, files: Sequence[StageFile]) -> None:
        """Write the files of a unit in order; the last one makes it done."""
        for stage, tensors, facts in files:
            self.write(stage, unit, tensors, facts)

    def read(self, stage: str, unit: int, *, names: Sequence[str] | None = None) -> UnitFile:
        """A unit's file, or some of its tensors."""
        from safetensors import safe_open

        path = self.path(stage, unit)
        try:
            with safe_open(path, framework="pt") as opened:
                facts = json.loads(opened.metadata()["facts"])
                wanted = list(opened.keys()) if names is None else names
                return UnitFile({name: opened.get_tensor(name) for name in wanted}, facts)
        except Exception as error:
            raise UserError(
                f"cannot read {path} ({error}): delete it and run the same command again"
            ) from error

    def facts(self, stage: str, unit: int) -> dict[str, Any]:
        """What a unit's file says beside its tensors."""
        return self.read(stage, unit, names=[]).facts

    @property
    def is_empty(self) -> bool:
        """Whether no unit is done."""
        files = (path for place in (UNITS, HEATMAPS) for path in (self.folder / place).glob("*.*"))
        units = (path.name for path in files if path.suffix == ".safetensors")
        return all(map(is_unfinished, units))

    def remove_units(self) -> None:
        """Delete what only a resume needs, and what killed processes left half written."""
        shutil.rmtree(self.folder / UNITS, ignore_errors=True)
        for path in self.folder.rglob(".*.part-*"):
            if is_unfinished(path.name):
                path.unlink(missing_ok=True)

    def clear_units(self) -> None:
        """Delete the units and the stored heatmaps."""
        self.remove_units()
        shutil.rmtree(self.folder / HEATMAPS, ignore_errors=True)

    def clear(self) -> None:
        """Delete what an earlier run left, finished or not, and nothing else."""
        self.clear_units()
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)
        rows = [*self.folder.glob("*/scores.parquet"), *self.folder.glob("*/curves.parquet")]
        for folder in {path.parent for path in rows}:
            for name in ROW_FILES:
                (folder / name).unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()

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
            images = int(read_json(self.folder / "run.json").get("n", 0))
            return RunState({}, 0, images, images, [], is_finished=True)
        if not path.exists():
            raise UserError(f"{self.folder} holds no run: give the --out of one")
        key, manifest = read_json(path), read_json(path.with_name(MANIFEST), MOST_MANIFEST)
        images, size = len(manifest["image"]), key[UNIT_SIZE]
        done = {stage: self.done(stage) for stage in key["stages"]}
        first = done[key["stages"][0]]
        done_images = sum(min(size, images - unit * size) for unit in first)
        failed = [read_json(one) for one in sorted(path.parent.glob("failed-*.json"))]
        failed = [one for one in failed if one["unit"] not in done.get(one["stage"], ())]
        counts = {stage: len(found) for stage, found in done.items()}
        return RunState(counts, -(-images // size), done_images, images, failed)

    def start(
        self,
        key: Mapping[str, Any],
        entries: Sequence[Entry],
        units: int,
        stages: Sequence[str] = (SCORES,),
    ) -> None:
        """Start the run in this folder, or resume it if key and images are the same."""
        key = plain(key) | {"format": FORMAT, "stages": list(stages)}
        path = self.folder / UNITS / KEY
        if path.exists() and not self.is_empty:
            complete = all(len(self.done(stage)) == units for stage in stages)
            _check_same(self.folder, read_json(path), key, complete)
            _check_images(self.folder, self.folder / UNITS / MANIFEST, entries)
            return
        self.clear_units()
        make_folder(path.parent)
        write_manifest(self.folder / UNITS / MANIFEST, entries)
        save_json(path, key)


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    done: dict[str, int]  # stage -> units
    units: int
    done_images: int  # of the first stage
    images: int
    failed: list[dict[str, Any]]  # unit, stage, images and reason
    is_finished: bool = False


@contextmanager
def store_in(out: Path | None) -> Iterator[Store]:
    """The store of a folder, or of a temporary one; an error before the first unit leaves none."""
    if out is None:
        with TemporaryDirectory(prefix="sufficit-") as place:
            yield Store(Path(place))
        return
    new, store = not out.exists(), Store(out)
    try:
        yield store
    except UserError:
        if store.is_empty:
            store.remove_units()
            if new and out.exists() and not any(out.iterdir()):
                out.rmdir()
        raise


def write_manifest(path: Path, entries: Sequence[Entry]) -> None:
    """Write the images of a run in order: name, size of the file, label."""
    # JSON and not parquet, because scoring must work where pyarrow is not installed.
    columns = {
        "image": [entry.image.name for entry in entries],
        "bytes": [_bytes(entry) for entry in entries],
        "label": [entry.label for entry in entries],
    }
    save_json(path, columns)


def _check_same(
    out: Path, before: Mapping[str, Any], now: Mapping[str, Any], complete: bool
) -> None:
    """Raise where the settings that decide a number are others; on_error may become skip."""
    if before.get("format") != FORMAT:
        raise UserError(
            f"Cannot resume {out}: another version of Sufficit started it. Use another --out, or"
            " --overwrite."
        )
    for name in {**before, **now}:
        was, is_now = before.get(name), now.get(name)
        free = (complete and name in MACHINE) or (name, was) == ("on_error", "stop")
        if was != is_now and not free:
            raise cannot_resume(out, name, was, is_now)


def _check_images(out: Path, path: Path, entries: Sequence[Entry]) -> None:
    """Raise where images were added, removed or changed since the run started."""
    known = read_json(path, MOST_MANIFEST)
    for i, entry in enumerate(entries):
        if i >= len(known["image"]) or entry.image.name != known["image"][i]:
            was = known["image"][i] if i < len(known["image"]) else None
            raise cannot_resume(out, f"image {i}", was, entry.image.name)
        if (size := _bytes(entry)) != known["bytes"][i]:
            change = f"{known['bytes'][i]} bytes", f"{size} bytes"
            raise cannot_resume(out, entry.image.name, *change)
        if entry.label != known["label"][i]:
            name = f"label of {entry.image.name}"
            raise cannot_resume(out, name, known["label"][i], entry.label)
    if len(known["image"]) > len(entries):
        raise cannot_resume(out, "number of images", len(known["image"]), len(entries))


def _bytes(entry: Entry) -> int:
    try:
        return entry.image.bytes()
    except OSError:
        return -1
