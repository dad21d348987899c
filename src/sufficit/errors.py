"""Errors and warnings that users read, and the nearest known name for a mistyped one."""

import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType

# User and password before a host, where a secret may hold slashes, and the keys of signed links.
_LOGIN = re.compile(r"(?<=://)(?!arn:)(?:[^\s/@]*|[^\s/@:]+:(?!\d+/)\S*)@", re.ASCII)
_SIGNED = re.compile(
    r"(?<=[?&])([\w-]*(?:signature|sig|token|credential|accesskeyid|accessid|password|secret)=)"
    r"[^&\s]*",
    re.IGNORECASE,
)
_PACKAGE = str(Path(__file__).parent) + os.sep


class UserError(ValueError):
    """An error that the caller can fix: what was expected, what came, what to do."""


class NotFiniteError(UserError):
    """The model returned NaN or infinite values for some images; `images` holds their numbers."""

    def __init__(self, message: str, images: Sequence[int]) -> None:
        super().__init__(message)
        self.images = tuple(images)


class SkipError(UserError):
    """Some images cannot be used; `reasons` says why, by their numbers in the batch."""

    def __init__(self, message: str, reasons: Mapping[int, str]) -> None:
        super().__init__(message)
        self.reasons = dict(reasons)


class GoneError(UserError):
    """A folder, disk or server no longer responds; the run can resume when it is back."""


class EmptyHeatmapWarning(UserWarning):
    """Some heatmaps have no positive part: the method found no evidence for the class."""


def warn_user(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the package, however deep inside this is called."""
    frame: FrameType | None = sys._getframe()
    depth, level = 1, 2
    while frame is not None:
        file = frame.f_code.co_filename
        depth += not ("importlib" in file and "_bootstrap" in file)  # `warnings` skips these
        if file.startswith(_PACKAGE):
            level = depth  # the caller of the outermost frame of the package, so far
        frame = frame.f_back
    warnings.warn(text, kind, stacklevel=level)


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return an error that suggests the nearest known name.

    >>> str(unknown("fill", "blak", ["black", "blur"]))
    "Unknown fill 'blak'. Did you mean 'black'? Known: black, blur"
    """
    names = list(known)
    lower = {other.lower(): other for other in reversed(names)}
    close = get_close_matches(name[:100].lower(), lower, n=1, cutoff=0.5)
    hint = f" Did you mean {lower[close[0]]!r}?" if close else ""
    quoted = repr(name) if len(name) <= 100 else f"{name[:100]!r}..."
    shown = ", ".join(names[:20]) + (f", and {len(names) - 20} more" if len(names) > 20 else "")
    return UserError(f"Unknown {kind} {quoted}.{hint} Known: {shown}")


def setting(name: str, value: str | Sequence[str]) -> str:
    """Return how to set an option that has no flag in `compare` and `evaluate`.

    >>> setting("output", "logits")
    'set output = "logits" in a RUN.toml and pass --config (other commands: --output logits)'
    """
    line = f"{name} = {json.dumps(value if isinstance(value, str) else [*value])}"
    words = shlex.quote(value if isinstance(value, str) else ",".join(value))
    flag = f"--{name.replace('_', '-')} {words}"
    return f"set {line} in a RUN.toml and pass --config (other commands: {flag})"


def cannot_resume(out: Path, name: str, before: object, now: object) -> UserError:
    """Return the error for a folder whose run was started with another value of a setting."""
    return UserError(
        f"Cannot resume {out}: `{name}` was {before!r:.200}, now {now!r:.200}. Use another --out"
        " for a new run, --overwrite to delete this one, or the original settings to resume it."
    )


def changed(path: object) -> UserError:
    """Return the error for a file that was replaced while a run used it."""
    return UserError(
        f"{path} was changed after it was listed: restore it, or use another --out to score the"
        " files as they are now"
    )


def without_secrets(text: str) -> str:
    """The text with *** for credentials in URLs.

    >>> without_secrets("s3://KEY:SECRET@bucket/photos")
    's3://***@bucket/photos'
    """
    return _SIGNED.sub(r"\1***", _LOGIN.sub("***@", text))
