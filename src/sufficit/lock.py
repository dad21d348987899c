"""One run at a time owns a folder of results, from its first moment to its last.

On a disk the system holds the lock, and releases it when the process ends, however it ends. Object
storage has no locks: there an object names the owner, who renews it while it runs. If it is not
renewed for a minute, its owner has crashed.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock, Thread, get_ident
from typing import Any
from uuid import uuid4

from sufficit.errors import GoneError, UserError, warn_user
from sufficit.files import has_ended, is_remote, make_folder

LOCK = ".lock"
RENEW, LOOK, LOST = 15.0, 1.0, 60.0
"""Seconds between two renewals, between two looks at another's, and without one of a live owner."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system
_held: dict[str, int] = {}  # folder -> the thread that owns it
_lost: set[str] = set()
_guard = Lock()


@contextmanager
def owning(folder: Path) -> Iterator[None]:
    """Own the folder inside; raise if another run does. The same thread may own it again."""
    name = _name(folder)
    with _guard:
        inside = _held.get(name) == get_ident()
        if not inside and name in _held:
            raise _taken(folder, _owner())
        _held.setdefault(name, get_ident())
    if inside:
        yield
        return
    try:
        with _renewed(folder / LOCK) if is_remote(folder) else _on_disk(folder):
            yield
    finally:
        with _guard:
            del _held[name]
            _lost.discard(name)


def check_owned(folder: Path) -> None:
    """Raise if another run took over a folder that this process owned."""
    if _name(folder) in _lost:
        raise UserError(
            f"another run took over {folder}, because this one was not heard of for"
            f" {LOST:.0f} s: its units are kept apart. Choose another --out for one of them"
        )


def _name(folder: Path) -> str:
    return str(folder if is_remote(folder) else folder.resolve())


def _owner() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    found = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
    return found | {"machine": _machine(), "token": uuid4().hex}


def _machine() -> str:
    """What process numbers count within: this boot of this machine, or of a container."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(str(Path("/proc/self/ns/pid").readlink()))
    return sha256(repr(known).encode()).hexdigest()[:16]


def _taken(folder: Path, owner: dict[str, Any]) -> UserError:
    who = f"process {owner.get('process')} on {owner.get('host')}, since {owner.get('since')}"
    return UserError(f"{folder} belongs to a run ({who}): wait for it, or choose another --out")


@contextmanager
def _on_disk(folder: Path) -> Iterator[None]:
    new = [part for part in (folder, *folder.parents) if not part.exists()]
    path = folder / LOCK
    try:
        file = _locked(folder)
        if file is None:
            with _renewed(path):
                yield
            return
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # before it is released: whoever waits makes another
            os.close(file)
    finally:
        for part in new:  # a run that failed before its first file leaves nothing
            with suppress(OSError):
                part.rmdir()


def _locked(folder: Path) -> int | None:
    """The locked file of a folder, to be closed; None where the file system has no locks."""
    import fcntl

    path = folder / LOCK
    while True:
        make_folder(folder)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # another run that ended took the folder away
        except OSError as error:
            raise UserError(
                f"{folder} can't be a folder of results: {error.strerror}. Choose another --out"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file).st_ino:
                os.truncate(file, 0)
                os.write(file, json.dumps(_owner()).encode())
                return file
        except BlockingIOError as error:
            os.close(file)
            raise _taken(folder, _read(path) or {}) from error
        except FileNotFoundError:
            pass  # it was that of a run that has just ended
        except OSError as error:
            os.close(file)
            with suppress(OSError):
                if not path.stat().st_size:
                    path.unlink(missing_ok=True)
            if error.errno in NO_LOCKS:
                return None
            raise UserError(f"{path} could not be written: {error.strerror or error}") from error
        os.close(file)


@contextmanager
def _renewed(path: Path) -> Iterator[None]:
    """Own a folder by a file that is renewed."""
    mine, stop = _owner(), Event()
    while not _create(path, mine):
        _await_end(path)
        path.unlink(missing_ok=True)

    def renew() -> None:
        while not stop.wait(RENEW):
            with suppress(OSError, UserError):  # it may be back at the next time
                found = _read(path)
                if found is not None and found["token"] != mine["token"]:
                    _lost.add(_name(path.parent))
                    return
                _write(path, mine | {"renewed": time.time()})

    thread = Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with suppress(OSError, UserError):  # without it, the next owner waits for a minute
            if (_read(path) or {}).get("token") == mine["token"]:
                path.unlink(missing_ok=True)


def _await_end(path: Path) -> None:
    """Return when the owner has crashed or ended; raise when it renews what is its own."""
    known, end, warned = _read(path), time.monotonic() + LOST, False
    if known is None:
        return
    here = known.get("machine") == _machine()
    while time.monotonic() < end and not (here and has_ended(known.get("process", 0))):
        if not warned:
            warned = True
            who = f"process {known.get('process')} on {known.get('host')}"
            warn_user(
                f"{path.parent} belongs to a run ({who}): waiting up to {LOST:.0f} s for a sign"
                " of it"
            )
        time.sleep(LOOK)
        found = _read(path)
        if found is None:
            return
        if found != known:
            raise _taken(path.parent, found)


def _create(path: Path, owner: dict[str, Any]) -> bool:
    """Whether a file that was not there is this owner's now."""
    if _read(path) is not None:
        return False
    content = json.dumps(owner).encode()
    if is_remote(path):
        path.create(content)
    else:
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(content)
    return bool((_read(path) or {}).get("token") == owner["token"])


def _write(path: Path, owner: dict[str, Any]) -> None:
    content = json.dumps(owner).encode()
    if is_remote(path):
        path.put(content)
    else:
        path.write_bytes(content)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except GoneError:
        raise
    except (OSError, ValueError):  # its owner is writing it, or another program did
        return {"token": ""}
    return found if isinstance(found, dict) else {"token": ""}
