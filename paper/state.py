"""Pack what a run has done into few files of limited size, and unpack it: python paper/state.py.

    python paper/state.py pack runs/cifar10 STATE     # STATE/state-0.part, ...
    python paper/state.py unpack STATE runs/cifar10

So a run resumes on another machine, where only a few files can be exchanged. Locks and unfinished
files are left out, and where the room does not suffice, the largest files: a step NAME whose
NAME.safetensors is left out counts as not done, unless the whole run is.
"""

import io
import sys
import tarfile
from pathlib import Path

PART = 15 * 2**20  # bytes per file
MOST = 4  # files
LEFT_OUT = (".lock", ".part", ".tmp")


def pack(out: Path, state: Path, part: int = PART, most: int = MOST) -> list[Path]:
    """Write the files of a run as a tar that is cut into parts; return the parts."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for path in fitting(out, part * most):
            tar.add(path, arcname=str(path.relative_to(out)))
    content = packed.getvalue()
    count = -(-len(content) // part)
    state.mkdir(parents=True, exist_ok=True)
    for old in state.glob("state-*.part"):
        old.unlink()
    made = []
    for number in range(count):
        path = state / f"state-{number}.part"
        path.write_bytes(content[number * part : (number + 1) * part])
        made.append(path)
    return made


def fitting(out: Path, room: int) -> list[Path]:
    """Return the files of a run that fit, the smallest first, and without the marks of others."""
    files = [one for one in out.rglob("*") if one.is_file() and not one.name.endswith(LEFT_OUT)]
    files.sort(key=lambda path: (path.stat().st_size, str(path)))
    found: list[Path] = []
    used = 0
    lost: list[Path] = []
    for path in files:
        # A header, and the end of the last block; what is packed is smaller as a rule.
        used += path.stat().st_size + 1024
        (found if used <= room else lost).append(path)
    if lost:
        print("no room for", ", ".join(str(path.relative_to(out)) for path in lost))
    if not (out / "results" / "run.json").exists():
        marks = [out / "done" / f"{path.stem}.json" for path in lost if path.parent == out]
        found = [path for path in found if path not in marks]
    return found


def unpack(state: Path, out: Path) -> bool:
    """Restore a run from its parts; whether there were any."""
    parts = sorted(state.glob("state-*.part"), key=lambda path: int(path.stem.split("-")[1]))
    if not parts:
        return False
    content = b"".join(path.read_bytes() for path in parts)
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        tar.extractall(out, filter="data")
    return True


def main(words: list[str]) -> None:
    """Run the command line."""
    if len(words) != 3 or words[0] not in ("pack", "unpack"):
        sys.exit(__doc__)
    kind, source, target = words[0], Path(words[1]), Path(words[2])
    if kind == "pack":
        print(", ".join(f"{path} {path.stat().st_size:,}" for path in pack(source, target)))
    elif not unpack(source, target):
        sys.exit(f"Error: {source} holds no state-*.part: pack a run into it first")


if __name__ == "__main__":
    main(sys.argv[1:])
