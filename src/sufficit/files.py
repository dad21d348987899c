"""Paths that users give, files that are written whole or not at all, JSON read with limits."""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir, mkdtemp
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast, overload

from sufficit.errors import GoneError, UserError, without_secrets

if TYPE_CHECKING:
    from sufficit.storage import RemotePath

    class Remote(Path, RemotePath):  # type: ignore[misc]  # what `is_remote` makes of a Path
        """A path on object storage, which is used as a Path, and its own methods."""


CHECKPOINT = "checkpoint.pt"  # from which a training run resumes
LONGEST = 255  # bytes in a file's name, on most systems
MOST_JSON = 2**24  # bytes
_NODE = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
_PART = re.compile(r"\..*\.part-([0-9a-f]{8})-(\d+)(\.\w+)?", re.DOTALL)
_REMOTE = re.compile(r"(?!file:|local:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # scheme -> extra of the package
T = TypeVar("T")
_swept: set[Path] = set()
_sweeping = Lock()


def place(word: str | Path) -> Path:
    """Return the path that a user gave: local, or on object storage as in s3://bucket/folder.

    >>> place("photos/cats")
    PosixPath('photos/cats')
    """
    if isinstance(word, Path):
        return word
    text = str(word)  # of a UPath too, which is no Path
    if not is_remote(text):
        return Path(re.sub(r"^(file|local)://", "", text))
    refuse_secrets(text)
    if text.endswith("://"):
        raise UserError(f"{text} names no folder: write {text}BUCKET/FOLDER")
    try:
        from sufficit.storage import RemotePath

        if isinstance(word, RemotePath):
            return word
        # Without the cache, because other processes write to the same folder.
        remote = RemotePath(word, use_listings_cache=False)
        remote.fs  # noqa: B018  # connects, so that a missing library is an error here
    except ImportError as error:
        extra = EXTRAS.get(text.partition(":")[0], "storage")
        raise UserError(f"can't open {text} ({error}): pip install '.[{extra}]'") from error
    except Exception as error:
        reason = without_secrets(str(error))
        raise UserError(f"{text} is no path ({reason}): write s3://BUCKET/FOLDER") from error
    return cast(Path, remote)


def refuse_secrets(word: str) -> None:
    """Raise for a URL with credentials, which results, logs and errors would repeat."""
    shown = without_secrets(word)
    if shown != word:
        raise UserError(
            f"{shown} holds credentials, which would be written to the results: set them in the"
            " environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE,"
            " GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN) and give the path alone"
        )


@overload
def is_remote(path: Path) -> "TypeGuard[Remote]": ...
@overload
def is_remote(path: str) -> bool: ...
def is_remote(path: str | Path) -> bool:
    """Return whether a path, or the word for one, is on object storage.

    >>> is_remote("s3://bucket/photos"), is_remote("photos"), is_remote(Path("s3:/photos"))
    (True, False, False)
    """
    return _REMOTE.match(str(path)) is not None


@contextmanager
def local_file(path: Path) -> Iterator[Path]:
    """Return the file itself, or a temporary copy of one on object storage."""
    if is_remote(path):
        with TemporaryDirectory(prefix="sufficit-") as folder:
            copy = Path(folder) / f"copy{path.suffix}"
            path.download(copy)
            yield copy
    else:
        yield path


def version_of(path: Path) -> str:
    """Return a word that changes when a file is written again: its time, or the object's tag."""
    if is_remote(path):
        return path.version()
    try:
        return str(path.stat().st_mtime_ns)
    except OSError:
        return ""


def names_in(folder: Path) -> list[str]:
    """Return the names of all that is in a folder, if it exists."""
    try:
        if is_remote(folder):
            return [name for name, *_ in folder.entries()]
        return os.listdir(folder)  # noqa: PTH208  # a Path for each of many names takes long
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_folder(folder: Path) -> None:
    """Delete a folder with all that is in it, if it exists."""
    shutil.rmtree(folder, ignore_errors=True)


def check_local(path: Path) -> None:
    """Raise for a path on object storage, where results cannot be written."""
    if is_remote(path):
        raise UserError(
            f"cannot write to {path}: give a local folder as --out, and copy it to object storage"
            " when the results are complete"
        )


def check_output(
    folder: Path, sources: Sequence[Path] = (), *, overwrite: bool = True, command: str = ""
) -> None:
    """Raise, before any work is done, if results cannot be written or would do harm."""
    check_local(folder)
    if (folder / "run.json").exists():
        other = _command_of(folder / "run.json")
        if command and other and other != command:  # half of its files would stay
            raise UserError(f"{folder} holds a run of sufficit {other}: choose another --out")
        if not overwrite:
            raise UserError(f"{folder} holds a finished run: choose another --out, or --overwrite")
    for source in sources:
        local = not is_remote(source) and source.is_dir()
        if local and folder.resolve().is_relative_to(source.resolve()):
            harm = f"--out {folder} is inside {source}, so results would be read as images"
            raise UserError(f"{harm}: choose another --out")
    # Rights say less than a try: the disk may be read-only, or a parent no folder.
    try:
        made = [part for part in (folder, *folder.parents) if not part.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for part in made:
            with suppress(OSError):  # another run may be there already
                part.rmdir()
        if not os.access(folder if folder.exists() else made[-1].parent, os.W_OK):
            raise PermissionError(13, "no right to write there")
    except OSError as error:
        reason = f"{folder} can't be a folder of results: {error.strerror}"
        raise UserError(f"{reason}. Choose another --out") from error


def _command_of(record: Path) -> str | None:
    """Return the sufficit command that wrote a run.json, if it says so."""
    try:
        words = str(read_json(record).get("command"))
    except (UserError, AttributeError):
        return None
    commands = "compare|demo|evaluate|explain|sanity|train-lax|train-twin"  # that write a run.json
    call = re.match(rf"(?:sufficit|__main__\.py)\s+({commands})(?!\S)", words)  # also python -m
    return call and call[1]


def make_folder(folder: Path) -> Path:
    """Create the folder if it does not exist, and return it."""
    check_local(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} could not be made: {error.strerror}") from error
    return folder


def safe_name(name: str) -> str:
    """Return the name, if it may be that of a file or folder; raise if it leads to another place.

    >>> safe_name("011.Rusty_Blackbird")
    '011.Rusty_Blackbird'
    """
    if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        raise UserError(f"{name!r} can't be the name of a file or folder: rename it")
    return name


def short_name(name: str) -> str:
    """Return a name of at most 255 bytes: the middle of a longer one becomes a digest.

    >>> short_name("cat.png"), len(short_name(300 * "x" + ".png"))
    ('cat.png', 215)
    """
    raw = os.fsencode(name)
    if len(raw) <= LONGEST:
        return name
    digest = hashlib.sha256(raw).hexdigest()[:14]
    return f"{raw[:100].decode(errors='ignore')}~{digest}{raw[-100:].decode(errors='ignore')}"


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Give a temporary path in the same folder, which becomes `path` if the block ends well."""
    check_local(path)
    _sweep(path.parent)
    # Machine and process, so that another process can tell whether the writer is still alive.
    end = f".part-{_NODE}-{os.getpid()}{path.suffix}"
    name = f".{path.stem}{end}"
    if len(os.fsencode(name)) > LONGEST:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}{end}"
    part = path.with_name(name)
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def is_unfinished(name: str) -> bool:
    """Return whether a file of this name is what `writing` leaves when the process is killed."""
    return _PART.fullmatch(name) is not None


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Return the content of a JSON file; raise for one of more than `most` bytes, or no JSON."""
    return read_limited(path, most, json.loads)


def read_limited(path: Path, most: int, parse: Callable[[bytes], T]) -> T:
    """Return what `parse` makes of a file; raise if it is none, too large, or of another kind."""
    try:
        if not path.is_file():
            raise FileNotFoundError("there is no such file")
        if path.stat().st_size > most:
            raise ValueError(f"it has {path.stat().st_size} bytes, the limit is {most}")
        return parse(path.read_bytes())
    except GoneError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} could not be read: {error}") from error


def _sweep(folder: Path) -> None:
    """Remove, once per folder, what killed processes of this machine left half written."""
    # Several threads write; `iterdir` of a large folder takes long, so it is done once.
    with _sweeping, suppress(OSError):
        if folder in _swept:
            return
        _swept.add(folder)
        for path in folder.iterdir():
            unfinished = _PART.fullmatch(path.name)
            # A process of another machine may still be writing: nobody here can tell.
            if unfinished and unfinished[1] == _NODE and has_ended(int(unfinished[2])):
                path.unlink(missing_ok=True)


def temporary_folder() -> Path:
    """Make a temporary folder; delete those that killed processes of this machine have left."""
    mine = f"sufficit-{_NODE}-{os.getpid()}-"
    for path in Path(gettempdir()).glob(f"sufficit-{_NODE}-*-*"):
        process = path.name.split("-")[2]
        if not path.name.startswith(mine) and process.isdecimal() and has_ended(int(process)):
            shutil.rmtree(path, ignore_errors=True)
    return Path(mkdtemp(prefix=mine))


def has_ended(process: int) -> bool:
    """Return whether no other process of this number is running on this machine."""
    try:
        if process != os.getpid():  # a file with our own number is of an earlier process
            os.kill(process, 0)
            return False
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return True
