"""Whether the place that images come from is still there, when something in it can't be read."""

import errno
import os
from pathlib import Path

from sufficit.errors import GoneError

BROKEN = frozenset(
    {
        errno.EHOSTDOWN,
        errno.EIO,
        errno.ENODEV,
        errno.ENOTCONN,
        errno.ENXIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)  # of a disk or mount that no longer answers


def check_there(root: Path, error: BaseException) -> None:
    """Raise where an error comes of a folder or shard that is gone, and not of one bad file."""
    cause = error if isinstance(error, OSError) else error.__cause__
    told = cause if isinstance(cause, OSError) else None
    if (told is None or told.errno not in BROKEN) and is_there(root):
        return
    reason = (told and told.strerror) or "it is not there"
    raise GoneError(
        f"{root} can't be read any more ({reason}): bring it back and give the same command, what"
        " is done is kept"
    ) from error


def is_there(root: Path) -> bool:
    """Whether there is a file, or a folder with anything in it: where a mount was is an empty one.

    >>> is_there(Path("no such folder"))
    False
    """
    try:
        if root.is_file():
            return True
        with os.scandir(root) as entries:
            return next(entries, None) is not None
    except PermissionError:
        return True
    except OSError:
        return False
