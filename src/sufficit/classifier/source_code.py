"""The user's code behind models and methods, as a digest: changed code is another run."""

import inspect
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, version
from modulefinder import ModuleFinder
from pathlib import Path

from torch import nn

OURS = Path(__file__).parents[1]


def code_digest(*made: object) -> str:
    """A short digest of the user's code that defines functions and classes; "" where none does.

    It covers their files and the files beside these that they import, also inside of functions.
    Where the files are does not count. Of installed packages the versions count.
    """
    files, rest = set[Path](), set[str]()
    for one in {id(one): one for one in map(_defined, made)}.values():
        try:
            path = Path(inspect.getfile(one)).resolve()  # type: ignore[arg-type]  # refused below
            if path.is_file():
                files.add(path)
            else:  # of a notebook
                rest.add(inspect.getsource(one))  # type: ignore[arg-type]
        except (OSError, TypeError):  # of a library in C, or typed into a terminal
            rest.add(getattr(one, "__qualname__", ""))
    files = {path for path in files if not is_installed(path)}
    known = {sha256(path.read_bytes()).hexdigest() for path in _with_imports(files)}
    texts = sorted(known | {sha256(text.encode()).hexdigest() for text in rest if text})
    return sha256("".join(texts).encode()).hexdigest()[:16] if texts else ""


def code_of(model: nn.Module) -> str:
    """The digest of the user's code that defines a model's classes."""
    return code_digest(*{type(module) for module in model.modules()})


def versions_of(model: nn.Module) -> dict[str, str]:
    """The versions of the packages that define a model's classes."""
    found = dict[str, str]()
    for name in sorted({type(m).__module__.partition(".")[0] for m in model.modules()}):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def is_installed(path: Path) -> bool:
    """Whether a file is of Python, of an installed package or of this one."""
    path, packages = path.resolve(), {"site-packages", "dist-packages"}
    homes = (Path(os.__file__).resolve().parent, OURS.resolve())
    return not packages.isdisjoint(path.parts) or any(path.is_relative_to(h) for h in homes)


def _defined(one: object) -> object:
    """The function or class that says what an object does."""
    while isinstance(one, partial):
        one = one.func
    one = inspect.unwrap(one) if callable(one) else one
    known = inspect.isroutine(one) or inspect.isclass(one)
    return one if known else type(one)


def _with_imports(files: Iterable[Path]) -> set[Path]:
    """The files, and the user's files that they import."""
    found, own = set(files), [p for p in map(Path, sys.path) if not is_installed(p)]
    invalidate_caches()  # a file may have been written a moment ago
    for file in files:
        root, name = file.parent, file.stem
        while (root / "__init__.py").exists():
            root, name = root.parent, f"{root.name}.{name}"
        finder = ModuleFinder([str(root), *map(str, own)], excludes=["sufficit"])
        with suppress(SyntaxError, ValueError, OSError, ImportError):  # said when it is imported
            finder.import_hook(name)
        named = (getattr(module, "__file__", None) for module in finder.modules.values())
        found |= {Path(path).resolve() for path in named if path and Path(path).is_file()}
    return found
