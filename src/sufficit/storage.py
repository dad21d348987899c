"""Paths on object storage, for reading: as pathlib's, but a server that fails raises GoneError."""

import errno
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any, cast

from upath.extensions import ProxyUPath

from sufficit.errors import GoneError, UserError, changed, without_secrets

REMEDY = "check network, endpoint and credentials, then give the same command to resume"
for _library in ("aiobotocore", "fsspec", "gcsfs", "s3fs"):
    # What they log where nobody asked for logs, tracebacks too, would go to the terminal.
    logging.getLogger(_library).addHandler(logging.NullHandler())
S3 = ("s3", "s3a")
BUCKETS = ("s3", "s3a", "gs", "gcs")  # schemes that name a bucket first
VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "created")
"""What the libraries say of an object that changes with it, the best first."""
BUFFER = 2**20  # bytes that an open file reads at once


class RemotePath(ProxyUPath):
    """A path on object storage, by universal_pathlib; pickled, it connects again elsewhere.

    The libraries below answer False for `is_file` and `is_dir` when a server does not respond,
    which would make a lost server look like missing files.
    """

    __slots__ = ()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is an object of this name, or one below it."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether there are objects below this name."""
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        """Return file or directory; None if there is nothing of this name."""
        with suppress(FileNotFoundError), _reaching(self):
            return str(self.fs.info(self.path)["type"])
        return None

    def lacks_bucket(self) -> bool:
        """Return whether the server says that there is no such bucket."""
        with suppress(GoneError), _reaching(self):
            return self.protocol in BUCKETS and not self.fs.exists(self.path.partition("/")[0])
        return False

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        """Return size and time of an object."""
        with _reaching(self):
            return super().stat()

    def iterdir(self) -> Iterator["RemotePath"]:
        """Return what is in this folder; it is listed at once."""
        return iter([self / name for name, *_ in self.entries()])

    def entries(self) -> Iterator[tuple[str, str, int, str]]:
        """Name, kind (file or directory), bytes (-1: unknown) and version of all in this folder."""
        with _reaching(self):
            self.fs.invalidate_cache(self.path)  # hf:// keeps one
            listed = self.fs.ls(self.path, detail=True)
        for facts in listed:
            path = str(facts["name"]).rstrip("/")
            size = facts.get("size")
            if path != self.path.rstrip("/"):  # the folder itself, or one without a name
                name = path.rpartition("/")[2]
                kind = str(facts["type"])
                yield name, kind, -1 if size is None else int(size), _version(facts)

    def version(self) -> str:
        """Return what changes when the object is written again; "" if that is unknown."""
        with suppress(FileNotFoundError), _reaching(self):
            return _version(self.fs.info(self.path))
        return ""

    def glob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:
        """Return what matches in this folder; it is listed at once."""
        # A folder's own name may hold signs of a pattern, such as [1].
        top = self.path.rstrip("/") + "/"
        with _reaching(self):
            paths = self.fs.glob(escape(top) + pattern)
        return iter([self / str(path).removeprefix(top) for path in paths])

    def rglob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:
        """Return what matches anywhere below this folder; it is listed at once."""
        return self.glob(f"**/{pattern}")

    def open(self, mode: str = "r", buffering: int = BUFFER, **_: Any) -> IO[Any]:  # type: ignore[override]  # for reading only
        """Return the object as a file of bytes, read by ranges."""
        if mode != "rb":
            raise ValueError(f"objects are opened with mode 'rb', got {mode!r}")
        return io.BufferedReader(_Ranges(self, self.stat().st_size), buffering)

    def read_bytes(self) -> bytes:
        """Return the whole object, in one request."""
        return self.read_object()

    def read_object(self, version: str = "") -> bytes:
        """Return the whole object, in one request; raise if it has another version by now."""
        if version and self.protocol in S3:
            return self._read_s3(IfMatch=version)
        once = {"max_concurrency": 1} if self.protocol.startswith("s3") else {}  # else HEAD first
        with _reaching(self):
            return cast(bytes, self.fs.cat_file(self.path, **once))

    def read_range(self, start: int, end: int, version: str = "") -> bytes:
        """Return some bytes of the object, in one request; raise if it has changed by now."""
        if version and self.protocol in S3:
            return self._read_s3(IfMatch=version, Range=f"bytes={start}-{end - 1}")
        exactly = {"cache_type": "none"} if self.protocol == "hf" else {}  # else 5 MB more
        with _reaching(self):
            return cast(bytes, self.fs.cat_file(self.path, start=start, end=end, **exactly))

    def _read_s3(self, **conditions: str) -> bytes:
        """Return the bytes that S3 returns under these conditions, which s3fs does not pass on."""
        from botocore.exceptions import ClientError
        from fsspec.asyn import sync

        bucket, key, _ = self.fs.split_path(self.path)

        async def get() -> bytes:
            answer = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, **conditions)
            async with answer["Body"] as body:
                return cast(bytes, await body.read())

        with _reaching(self):
            try:
                return cast(bytes, sync(self.fs.loop, get))
            except OSError as error:
                cause = error.__cause__
                code = cause.response["Error"]["Code"] if isinstance(cause, ClientError) else ""
                if code in ("412", "PreconditionFailed"):
                    raise changed(self) from error
                raise

    def download(self, file: Path) -> None:
        """Write the object to a local file."""
        with _reaching(self):
            self.fs.get_file(self.path, str(file))


def _version(facts: Mapping[str, Any]) -> str:
    """Return what a listing says of an object that changes when it is written again."""
    return next((str(facts[name]) for name in VERSIONS if facts.get(name)), "")


class _Ranges(io.RawIOBase):
    """An object as a file: each read is a request for a range."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self.path = path
        self.size = size
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size)[whence])
        return self.at

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self.at + len(buffer))
        if self.at >= end:
            return 0
        content = self.path.read_range(self.at, end)
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


@contextmanager
def _reaching(path: RemotePath) -> Iterator[None]:
    """Raise FileNotFoundError for a missing object, GoneError for all else that fails inside."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from error
    except UserError:
        raise
    except Exception as error:  # every library below has errors of its own
        lines = without_secrets(str(error)).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
        raise GoneError(f"{path} can't be reached ({reason}): {REMEDY}") from error
