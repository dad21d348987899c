"""One run at a time owns a folder of results, from its first moment to its last.

A file names the owner, who renews it while it runs. If it is not renewed for a minute, or the
owner's process on this machine has ended, its owner has crashed and another run takes over.
"""

import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock, Thread, get_ident
from typing import Any
from uuid import uuid4

from sufficit.errors import GoneError, UserError
from sufficit.files import has_ended, is_remote, make_folder

LOCK = ".lock"
RENEW, LOOK, LOST = 15.0, 1.0, 60.0
"""Seconds between two renewals, between two looks at another's, and without one of a live owner."""
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
    new = [part for part in (folder, *folder.parents) if not is_remote(part) and not part.exists()]
    try:
        with _renewed(folder / LOCK):
            yield
    finally:
        for part in new:  # a run that failed before its first file leaves nothing
            with suppress(OSError):
                part.rmdir()
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
    return found | {"machine": _machine(), "start": _start(os.getpid()), "token": uuid4().hex}


def _machine() -> str:
    """What process numbers count within: this boot of this machine, or of a container."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(str(Path("/proc/self/ns/pid").readlink()))
    return sha256(repr(known).encode()).hexdigest()[:16]


def _start(process: int) -> str:
    """When a process of this machine was started; "" where that is hidden, or not on Linux."""
    with suppress(OSError):
        state, *facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "ended" if state in "ZX" else facts[18]  # its parent has not read how it ended
    return ""


def _is_live(owner: dict[str, Any]) -> bool | None:
    """Whether the owner's process runs; None where only its renewals can tell."""
    process, start = owner.get("process", 0), owner.get("start")
    if owner.get("machine") != _machine():
        return None
    if has_ended(process):  # also our own: `_held` knows what this process owns
        return False
    now = _start(process)
    return now == start if now and start else None


def _taken(folder: Path, owner: dict[str, Any]) -> UserError:
    who = f"process {owner.get('process')} on {owner.get('host')}, since {owner.get('since')}"
    return UserError(f"{folder} belongs to a run ({who}): wait for it, or choose another --out")


@contextmanager
def _renewed(path: Path) -> Iterator[None]:
    """Own a folder by a file that is renewed."""
    mine, stop = _owner(), Event()
    while not _create(path, mine):
        if (dead := _await_end(path)) is not None:
            _remove(path, dead["token"])

    def renew() -> None:
        while not stop.wait(RENEW):
            with suppress(OSError, UserError):  # it may be back at the next time
                found = _read(path)
                if found is not None and found["token"] != mine["token"]:
                    _lost.add(_name(path.parent))
                    return
                if is_remote(path):
                    path.put(json.dumps(mine | {"renewed": time.time()}).encode())
                else:
                    os.utime(path)  # also where the disk is full

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


def _await_end(path: Path) -> dict[str, Any] | None:
    """The owner once it has crashed, None once it has ended; raise when it renews its own."""
    known, end, warned = _read(path), time.monotonic() + LOST, False
    if known is None:
        return None
    if _is_live(known):
        raise _taken(path.parent, known)
    while time.monotonic() < end and _is_live(known) is not False:
        if not warned:
            warned = True
            who = f"process {known.get('process')} on {known.get('host')}"
            warnings.warn(
                f"{path.parent} belongs to a run ({who}): waiting up to {LOST:.0f} s for a sign"
                " of it",
                stacklevel=2,
            )
        time.sleep(LOOK)
        found = _read(path)
        if found is None:
            return None
        if found != known:
            raise _taken(path.parent, found)
    return known


def _remove(path: Path, token: str) -> None:
    """Delete a dead owner's file, and not that of a run which has just taken over from it."""
    if is_remote(path):
        path.unlink(missing_ok=True)
        return
    aside = path.with_name(f"{LOCK}-{uuid4().hex}")
    try:
        with suppress(FileNotFoundError):  # another run was faster
            path.rename(aside)
            if (_read(aside) or {}).get("token") == token:
                aside.unlink()
            else:
                aside.rename(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _create(path: Path, owner: dict[str, Any]) -> bool:
    """Whether a file that was not there is this owner's now."""
    content = json.dumps(owner).encode()
    if is_remote(path):
        if _read(path) is None:
            path.create(content)
        return bool((_read(path) or {}).get("token") == owner["token"])
    make_folder(path.parent)
    made = False
    try:
        # Another run may have it now, or one that ended has taken the folder away.
        with suppress(FileExistsError, FileNotFoundError), path.open("xb") as file:
            made = True
            file.write(content)
    except OSError as error:
        if not made:
            raise _unusable(path, error) from error
        path.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written: {error.strerror or error}") from error
    return made


def _unusable(path: Path, error: OSError) -> UserError:
    reason = error.strerror or error
    return UserError(f"{path.parent} can't be a folder of results: {reason}. Choose another --out")


def _read(path: Path) -> dict[str, Any] | None:
    """Who owns a folder, and when it was renewed; None where nobody does."""
    try:
        found = json.loads(path.read_bytes())
        renewed = {} if is_remote(path) else {"renewed": path.stat().st_mtime_ns}
        return {"token": "", **found, **renewed}
    except FileNotFoundError:
        return None
    except GoneError:
        raise
    except (ValueError, TypeError):  # its owner is writing it, or another program did
        return {"token": ""}
    except OSError as error:
        if is_remote(path):
            return {"token": ""}
        raise _unusable(path, error) from error
