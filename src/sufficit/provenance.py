"""Where a number comes from: config, command, versions, commit, device; and JSON on disk."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from sufficit.errors import without_secrets
from sufficit.files import writing

if TYPE_CHECKING:
    import torch

PACKAGES = (
    *("sufficit", "torch", "torchvision", "torchmetrics", "lightning", "numpy", "timm"),
    *("transformers", "ray", "captum", "zennit"),
)


def provenance(
    config: Mapping[str, Any], device: "torch.device", dtype: "torch.dtype"
) -> dict[str, Any]:
    """Config, command, time, commit, versions and device, as run.json holds them."""
    return {"config": dict(config), "command": command_line()} | surroundings(device, dtype)


def command_line() -> str:
    """The command of this process, without secrets."""
    return shlex.join(map(without_secrets, [Path(sys.argv[0]).name, *sys.argv[1:]]))


def resume_command() -> str | None:
    """The line that resumes what this process does; None if it is no command of ours.

    With --overwrite it would start from the beginning.
    """
    words = [word for word in shlex.split(command_line()) if word != "--overwrite"]
    if words[0] != "sufficit":
        return None
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"


def surroundings(device: "torch.device", dtype: "torch.dtype") -> dict[str, Any]:
    """When, on which device and with which versions something was computed."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "versions": dict(_versions()),
        "device": {"type": device.type, "name": name or platform.machine(), "dtype": str(dtype)},
    }


@cache
def _versions() -> dict[str, str]:
    """The versions of the packages that decide numbers; reading them takes 60 ms."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a final newline; NaN becomes null."""
    with writing(path) as part:
        text = json.dumps(plain(content), indent=2, ensure_ascii=False) + "\n"
        # A file name may hold bytes that are not UTF-8: they become JSON escapes.
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def plain(value: Any) -> Any:
    """Values that JSON can hold: NaN and infinity become None, paths and keys text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    is_path = isinstance(value, Path) or hasattr(value, "__vfspath__")  # also a remote one
    return str(value) if is_path else value


def typed(kind: Any, value: Any) -> Any:
    """What `plain` made JSON of, as its type says: dataclasses, tuples, dicts; null is NaN.

    What a dataclass does not know, as earlier versions wrote it, is left out.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        known = dict(value)
        return kind(**{name: typed(hints[name], known[name]) for name in hints if name in known})
    origin = get_origin(kind)
    kinds = get_args(kind)
    if origin in (Union, UnionType):
        own = next(one for one in kinds if one is not type(None))  # every union is `X | None`
        return None if value is None else typed(own, value)
    if origin is tuple:
        return tuple(typed(kinds[0], one) for one in value)
    if origin is list:
        return [typed(kinds[0], one) for one in value]
    if origin in (dict, Mapping):
        return {name: typed(kinds[1], one) for name, one in dict(value).items()}
    return math.nan if kind is float and value is None else value


@cache
def _commit() -> str | None:
    """The commit of the source tree this package runs from, or that SUFFICIT_COMMIT names.

    The variable is for copies without history, as on a cluster or in a container.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SUFFICIT_COMMIT")
