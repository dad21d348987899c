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
    """Return a short digest of the user's code that defines functions and classes.

    It covers their files and the files in the same folders that they import, also inside of
    functions. Where the files are does not count. Of installed packages the versions count. It is
    "" where no code of the user's defines anything.
    """
    files = set[Path]()
    rest = set[str]()
    definitions = {id(definition): definition for definition in map(_defined, made)}
    for definition in definitions.values():
        try:
            path = Path(inspect.getfile(definition)).resolve()  # type: ignore[arg-type]  # caught
            if path.is_file():
                files.add(path)
            else:  # of a notebook
                rest.add(inspect.getsource(definition))  # type: ignore[arg-type]
        except (OSError, TypeError):  # of a library in C, or typed into a terminal
            rest.add(getattr(definition, "__qualname__", ""))
    files = {path for path in files if not is_installed(path)}
    digests = {sha256(path.read_bytes()).hexdigest() for path in _with_imports(files)}
    digests |= {sha256(text.encode()).hexdigest() for text in rest if text}
    # Sorted, so that neither the order nor the place of the files counts.
    return sha256("".join(sorted(digests)).encode()).hexdigest()[:16] if digests else ""


def identity_of(made: object) -> str:
    """Return a digest that tells a function or object of the user's from others of the same file.

    Its code, its name and line, and the numbers and words that it holds.
    """
    defined = _defined(made)
    line = getattr(getattr(defined, "__code__", None), "co_firstlineno", "")
    parts = [code_digest(made), f"{getattr(defined, '__qualname__', '')}:{line}"]
    inner = made
    while isinstance(inner, partial):
        parts += [_plain(inner.args), _plain(inner.keywords)]
        inner = inner.func
    # A model is recognised by its weights, elsewhere; any other object by what it holds.
    if not (inspect.isroutine(inner) or inspect.isclass(inner) or isinstance(inner, nn.Module)):
        parts.append(_plain(getattr(inner, "__dict__", {})))
    return "/".join(filter(None, parts))


def _plain(value: object) -> str:
    """Return the numbers and words in a value, as text that is the same in every process.

    Other objects count for nothing: their text may hold an address.
    """
    if isinstance(value, str | bytes | int | float | bool):
        return repr(value)
    if isinstance(value, Mapping):
        texts = {str(key): _plain(item) for key, item in value.items()}
        return ",".join(f"{key}={text}" for key, text in sorted(texts.items()) if text)
    if isinstance(value, set | frozenset):
        return ",".join(sorted(filter(None, map(_plain, value))))
    if isinstance(value, tuple | list):
        return ",".join(filter(None, map(_plain, value)))
    return ""


def code_of(model: nn.Module) -> str:
    """Return the digest of the user's code that defines a model's classes."""
    return code_digest(*{type(module) for module in model.modules()})


def versions_of(model: nn.Module) -> dict[str, str]:
    """Return the versions of the packages that define a model's classes."""
    versions = dict[str, str]()
    for name in sorted({type(m).__module__.partition(".")[0] for m in model.modules()}):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def is_installed(path: Path) -> bool:
    """Return whether a file is of Python, of an installed package or of this one."""
    path = path.resolve()
    packages = {"site-packages", "dist-packages"}
    homes = (Path(os.__file__).resolve().parent, OURS.resolve())
    return not packages.isdisjoint(path.parts) or any(path.is_relative_to(h) for h in homes)


def _defined(made: object) -> object:
    """Return the function or class that says what an object does."""
    while isinstance(made, partial):
        made = made.func
    if callable(made):
        made = inspect.unwrap(made)
    return made if inspect.isroutine(made) or inspect.isclass(made) else type(made)


def _with_imports(files: Iterable[Path]) -> set[Path]:
    """Return the files, and the user's files that they import."""
    every = set(files)
    own = [path for path in map(Path, sys.path) if not is_installed(path)]
    invalidate_caches()  # a file may have been written a moment ago
    for file in files:
        # Imports of a package's module are relative to the folder above the package.
        root = file.parent
        name = file.stem
        while (root / "__init__.py").exists():
            name = f"{root.name}.{name}"
            root = root.parent
        finder = ModuleFinder([str(root), *map(str, own)], excludes=["sufficit"])
        with suppress(SyntaxError, ValueError, OSError, ImportError):  # said when it is imported
            finder.import_hook(name)
        named = (getattr(module, "__file__", None) for module in finder.modules.values())
        every |= {Path(path).resolve() for path in named if path and Path(path).is_file()}
    return every


def python_function(name: str) -> Callable[..., Any]:
    """Return the user's function FILE.py:FUNCTION or MODULE:FUNCTION. Its file is run."""
    place, _, function = name.rpartition(":")
    if not place:
        raise UserError(f"python:{name} names no function: write python:FILE.py:FUNCTION")
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(f"no Python file at {place}")
    module = run_user_code(place, lambda: _python_module(place))
    made = getattr(module, function, None)
    if made is None:
        raise UserError(f"{place} has no function {function!r}")
    if not callable(made):
        raise UserError(f"{function!r} in {place} must be a function, got {type(made).__name__}")
    return made  # type: ignore[no-any-return]  # getattr has no type


def _python_module(place: str) -> ModuleType:
    """Return the user's module, which may import its neighbours."""
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
    """Return what the user's code returns; what it raises becomes one line that says where."""
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
