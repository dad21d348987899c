"""One run at a time owns a folder of results. The system releases the lock of a killed process."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sufficit.errors import UserError
from sufficit.files import check_local, make_folder

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder inside the block; raise if another run has it.

    The same thread may lock it again, as a command does around the run that it starts.
    """
    check_local(folder)
    new = [part for part in (folder, *folder.parents) if not part.exists()]
    make_folder(folder)
    path = folder.resolve() / LOCK
    lock = FileLock(path, timeout=0, is_singleton=True)
    try:
        _acquire(lock, folder)
        try:
            yield
        finally:
            # While it is locked, so that whoever has opened it notices and makes another.
            if lock.lock_counter == 1:
                path.unlink(missing_ok=True)
            lock.release()
    finally:
        for part in new:  # a run that failed before its first file leaves nothing
            with suppress(OSError):
                part.rmdir()


def _acquire(lock: FileLock, folder: Path) -> None:
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"another run is writing to {folder}: wait until it ends, or choose another --out"
        ) from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot lock {folder} ({reason}): choose another --out") from error
