"""Files that a pattern names: web/{000..012}.tar, data/train-*.parquet."""

import math
import re
from collections.abc import Sequence
from glob import glob
from os.path import commonpath
from pathlib import Path, PurePosixPath

from sufficit.data.image_files import ahead
from sufficit.errors import UserError
from sufficit.files import is_remote, place

_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
MOST_FILES = 100_000  # that a pattern names


def files_named(data: Path, suffix: str) -> list[Path]:
    """The files with this suffix that a path or a pattern names; none if it names another thing."""
    if data.suffix != suffix:
        return []
    paths = [path for name in expand(str(data)) for path in _matching(name)]
    for path, there in zip(paths, ahead(lambda path: path.is_file(), paths), strict=True):
        if not there and path == data and path.is_dir():
            return []
        if not there:
            raise UserError(f"no file at {path}: check the path or the range in the pattern")
    return paths


def names_in_common(paths: Sequence[Path]) -> list[str]:
    """Each path relative to the folder that all of them are in.

    >>> names_in_common([Path("in/a/1.tar"), Path("in/b/1.tar")])
    ['a/1.tar', 'b/1.tar']
    """
    whole = [PurePosixPath(p.path) if is_remote(p) else p.resolve() for p in paths]
    root = commonpath([path.parent for path in whole]) if whole else ""
    return [path.relative_to(root).as_posix() for path in whole]


def expand(pattern: str) -> list[str]:
    """Every path of a pattern with {first..last}.

    >>> expand("train-{08..11}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'train-11.tar']
    """
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    counts = [int(high) - int(low) + 1 for low, high in _RANGE.findall(pattern)]
    if math.prod(max(0, count) for count in counts) > MOST_FILES:
        raise UserError(f"{pattern} names more than {MOST_FILES} files: give a smaller range")
    low, high = found.groups()
    head, tails = pattern[: found.start()], expand(pattern[found.end() :])
    numbers = (f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1))
    return [head + number + tail for number in numbers for tail in tails]


def _matching(name: str) -> list[Path]:
    """The path of this name, or those that match it if it has a * or **."""
    if "*" not in name or (not is_remote(name) and Path(name).exists()):
        return [place(name)]
    if is_remote(name):
        folder, _, _ = name.partition("*")[0].rpartition("/")
        found = sorted(place(folder).glob(name[len(folder) + 1 :]), key=str)
    else:
        found = [Path(path) for path in sorted(glob(name, recursive=True))]  # noqa: PTH207  # may be absolute
    if not found:
        raise UserError(f"no file matches {name}: check the path or the pattern")
    return found
