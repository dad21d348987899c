"""The user's code behind models, methods and scores: imported, checked, run, and as a digest."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib import import_module, invalidate_caches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from sufficit.errors import NotFiniteError, SkipError, UserError

OURS = Path(__file__).parents[1]
Result = TypeVar("Result")


def code_digest(*made: object) -> str:
    """A short digest of the user's code that defines functions and classes; "" where none does.

    It covers their files and the files in the same folders that they import, also inside of
    functions.
    Where the files are does not count. Of installed packages the versions count.
    """
    files = set[Path]()
    rest = set[str]()
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


def identity_of(made: object) -> str:
    """Return a digest that tells a function or object of the user's from others of the same file.

    Its code, its name and line, and the numbers and words that it holds.
    """
    defined = _defined(made)
    line = getattr(getattr(defined, "__code__", None), "co_firstlineno", "")
    found = [code_digest(made), f"{getattr(defined, '__qualname__', '')}:{line}"]
    one = made
    while isinstance(one, partial):
        found += filter(None, (_plain(value) for value in (one.args, one.keywords)))
        one = one.func
    if not (inspect.isroutine(one) or inspect.isclass(one) or isinstance(one, nn.Module)):
        found += filter(None, [_plain(getattr(one, "__dict__", {}))])
    return "/".join(filter(None, found))


def _plain(value: object) -> str:
    """The numbers and words in a value, as text that is the same in every process; "" for none."""
    if isinstance(value, str | bytes | int | float | bool):
        return repr(value)
    if isinstance(value, Mapping):
        known = {str(key): _plain(one) for key, one in value.items()}
        return ",".join(f"{key}={one}" for key, one in sorted(known.items()) if one)
    if isinstance(value, set | frozenset):
        return ",".join(sorted(filter(None, map(_plain, value))))
    if isinstance(value, tuple | list):
        return ",".join(filter(None, map(_plain, value)))
    return ""


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
    path = path.resolve()
    packages = {"site-packages", "dist-packages"}
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
    found = set(files)
    own = [p for p in map(Path, sys.path) if not is_installed(p)]
    invalidate_caches()  # a file may have been written a moment ago
    for file in files:
        root = file.parent
        name = file.stem
        while (root / "__init__.py").exists():
            name = f"{root.name}.{name}"
            root = root.parent
        finder = ModuleFinder([str(root), *map(str, own)], excludes=["sufficit"])
        with suppress(SyntaxError, ValueError, OSError, ImportError):  # said when it is imported
            finder.import_hook(name)
        named = (getattr(module, "__file__", None) for module in finder.modules.values())
        found |= {Path(path).resolve() for path in named if path and Path(path).is_file()}
    return found


def python_function(name: str) -> Callable[..., Any]:
    """The user's function FILE.py:FUNCTION or MODULE:FUNCTION. Its file is run."""
    place, _, function = name.rpartition(":")
    if not place:
        raise UserError(f"python:{name} names no function: write python:FILE.py:FUNCTION")
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(f"no Python file at {place}")
    found = getattr(run_user_code(place, lambda: _python_module(place)), function, None)
    if found is None:
        raise UserError(f"{place} has no function {function!r}")
    if not callable(found):
        raise UserError(f"{function!r} in {place} must be a function, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]  # getattr has no type


def _python_module(place: str) -> ModuleType:
    """The user's module, which may import its neighbours."""
    path = Path(place)
    spec = spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None:
        return import_module(place)
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def run_user_code(name: str, run: Callable[[], Result]) -> Result:
    """What the user's code returns; what it raises becomes one line that says where."""
    try:
        return run()
    except (torch.OutOfMemoryError, NotFiniteError, SkipError):
        raise  # the caller may retry with a smaller batch, or without some images
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}, line {last.lineno}"
        raise UserError(f"{name} raised {type(error).__name__}: {error} ({place})") from error


def check_arguments(function: Callable[..., Any], what: str, *wanted: str) -> None:
    """Raise for a function that cannot be called with so many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a few built-in functions have none
    try:
        signature.bind(*wanted)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        name = getattr(function, "__name__", type(function).__name__)
        raise UserError(
            f"a {what} takes ({', '.join(wanted)}), {name} takes {signature}{where}: change its"
            " arguments"
        ) from error
