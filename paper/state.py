"""Pack what a run has done into few files of limited size, and unpack it: python paper/state.py.

    python paper/state.py pack runs/cifar10 STATE     # STATE/state-0.part, ...
    python paper/state.py unpack STATE runs/cifar10

So a run resumes on another machine, where only a few files can be exchanged. Locks and unfinished
files are left out.
"""

import io
import sys
import tarfile
from pathlib import Path

from sufficit import UserError

PART = 15 * 2**20  # bytes per file
MOST = 8  # files
LEFT_OUT = (".lock", ".part", ".tmp")


def pack(out: Path, state: Path, part: int = PART, most: int = MOST) -> list[Path]:
    """Write the files of a run as a tar that is cut into parts; return the parts."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for path in sorted(one for one in out.rglob("*") if one.is_file()):
            if not path.name.endswith(LEFT_OUT):
                tar.add(path, arcname=str(path.relative_to(out)))
    content = packed.getvalue()
    count = -(-len(content) // part)
    if count > most:
        raise UserError(
            f"{out} is {len(content) / 2**20:.0f} MiB packed, more than {most} files of"
            f" {part / 2**20:.0f} MiB: delete what is not needed any more"
        )
    state.mkdir(parents=True, exist_ok=True)
    for old in state.glob("state-*.part"):
        old.unlink()
    made = []
    for number in range(count):
        path = state / f"state-{number}.part"
        path.write_bytes(content[number * part : (number + 1) * part])
        made.append(path)
    return made


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
