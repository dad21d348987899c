"""Print how hard the package is to live in: what one image passes, packs, parameters, lines.

python tools/yardsticks.py [ROOT] [--json | --walk]

ROOT is another checkout, to be compared with this one. No number is a limit. --walk lists the
functions that one image passes, by package and file.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).parents[1]
PACKAGE = Path("src/sufficit")
MOST_PARAMETERS = 6
WALK = "walk"
FLAG = re.compile(r"^\W*(--[a-z][\w-]*)", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def yardsticks(root: Path) -> dict[str, Any]:
    """Every yardstick of a checkout."""
    trees = {path: ast.parse(path.read_text()) for path in modules(root / PACKAGE)}
    public = exported(trees)
    long = [
        is_public(path, owner, function, public)
        for path, tree in trees.items()
        for owner, function in functions(tree)
        if parameters(function) > MOST_PARAMETERS
    ]
    texts = [path.read_text().splitlines() for path in trees]
    lines = sum(map(len, texts))
    comments = sum(line.lstrip().startswith("#") for text in texts for line in text)
    commented = sum(map(lines_with_comment, trees))
    return {
        **measured(root),
        "dataclasses and NamedTuples": sum(map(records, trees.values())),
        f"public functions with more than {MOST_PARAMETERS} parameters": sum(long),
        f"inner functions with more than {MOST_PARAMETERS} parameters": len(long) - sum(long),
        "packs of arguments, as in how: Any = {...} and f(**how)": sum(map(packs, trees.values())),
        "comment lines, in percent": round(100 * comments / lines, 1) if lines else 0.0,
        "lines with a comment, in percent": round(100 * commented / lines, 1) if lines else 0.0,
        "lines of src": lines,
        "lines of src by package": by_package(root / PACKAGE),
        "lines of tests": sum(map(length, modules(root / "tests"))),
    }


# What can be read


def modules(folder: Path) -> list[Path]:
    """The Python files of a folder, of subfolders too."""
    return sorted(folder.rglob("*.py"))


def length(path: Path) -> int:
    """The lines of a file."""
    return len(path.read_text().splitlines())


def lines_with_comment(path: Path) -> int:
    """The lines of a file that are a comment or end with one."""
    with path.open("rb") as file:
        return sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))


def by_package(folder: Path) -> dict[str, int]:
    """The lines of each package, and of the modules beside them under a dot."""
    found = Counter[str]()
    for path in modules(folder):
        found[package_of(path, folder)] += length(path)
    return dict(sorted(found.items()))


def package_of(path: Path, folder: Path) -> str:
    """The package below a folder that a module is in; a dot for one beside the packages."""
    package = path.relative_to(folder).parts[0]
    return "." if package == path.name else package


def records(tree: ast.AST) -> int:
    """The dataclasses and NamedTuples of a module."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            marks = [_name(one) for one in (*node.decorator_list, *node.bases)]
            found += "dataclass" in marks or "NamedTuple" in marks
    return found


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, Function]]:
    """Every function of a module, with the class or function it is defined in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield owner, node
        inside_of = node.name if isinstance(node, ast.ClassDef | Function) else owner
        yield from functions(node, inside_of)


def parameters(function: Function) -> int:
    """The parameters that a caller may give: without self, cls, *args and **options."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def exported(trees: dict[Path, ast.Module]) -> set[str]:
    """The names that packages export."""
    found: set[str] = set()
    for path, tree in trees.items():
        if path.name == "__init__.py":
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
                elif isinstance(node, ast.ImportFrom):
                    found |= {one.asname or one.name for one in node.names}
    return found


def is_public(path: Path, owner: str, function: Function, public: set[str]) -> bool:
    """Whether users call a function: it is exported, or makes what is, or is a command."""
    if "command" in [_name(one) for one in function.decorator_list] and "cli" in path.parts:
        return True
    return (owner or function.name) in public and not function.name.strip("_").startswith("_")


def packs(tree: ast.AST) -> int:
    """The names that functions give to a dict or tuple only to unpack it into calls.

    A name counts once per function, however often it is assigned; one that is also used otherwise
    is a value, not a pack.
    """
    found = 0
    for _, function in functions(tree):
        every = [*ast.walk(function)]
        unpacked = {
            id(node)
            for call in every
            if isinstance(call, ast.Call)
            for node in _splatted(call)
            if isinstance(node, ast.Name)
        }
        uses: dict[str, list[bool]] = {}  # is each use of a name an unpacking?
        for node in every:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                uses.setdefault(node.id, []).append(id(node) in unpacked)
        packed = {name for node in _own(function) for name in _packed(node)}
        found += sum(name in uses and all(uses[name]) for name in packed)
    return found


def _packed(node: ast.AST) -> list[str]:
    """The names that a statement gives to a dict or tuple made of parts."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    value = node.value
    is_dict = isinstance(value, ast.Call) and _name(value.func) == "dict" and value.keywords
    if not is_dict and not isinstance(value, ast.Dict | ast.Tuple):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _own(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function):
            waiting += ast.iter_child_nodes(node)


def _splatted(call: ast.Call) -> list[ast.expr]:
    """What a call unpacks."""
    stars = [one.value for one in call.args if isinstance(one, ast.Starred)]
    return [*stars, *(one.value for one in call.keywords if one.arg is None)]


def _name(node: ast.expr) -> str:
    """The last name of a decorator or base: dataclass of @dataclasses.dataclass(frozen=True)."""
    target = node.func if isinstance(node, ast.Call) else node
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else ""


# What must be run


def measured(root: Path) -> dict[str, Any]:
    """What one image passes, and the options of compare, from a process of that checkout."""
    found = told_inside(root)
    del found[WALK]  # --walk prints it
    return found


def told_inside(root: Path) -> dict[str, Any]:
    """What a process of a checkout measures of itself."""
    paths = {"PYTHONPATH": str(root / "src"), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as place:
        words = [sys.executable, str(Path(__file__).resolve()), str(root), "--inside", place]
        env = {**os.environ, **paths}
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"cannot measure {root}:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads((Path(place) / "found.json").read_text())
    return found


def inside(root: Path, place: Path) -> None:
    """Measure the package that this process imports."""
    from sufficit.runs.config import RunConfig

    source = (root / PACKAGE).resolve()
    passed, of_unit = walked(lambda: one_image(place), source, within="score_unit")
    shown, every = flags("--help"), flags("--help-all")
    every = max(shown, every, key=len)
    names = {f"--{one.name.replace('_', '-')}" for one in fields(RunConfig)}
    found = {
        "functions that one image passes": len(passed),
        "files that one image passes": len({code.co_filename for code in passed}),
        "functions that one image passes by package": counted(passed, source),
        "functions while it is read, explained and scored": len(of_unit),
        "files while it is read, explained and scored": len({one.co_filename for one in of_unit}),
        WALK: listed(passed, source),
        "options of compare in its help": len(shown),
        "options of compare with a flag": len(every),
        "options of compare in a RUN.toml alone": len(names - every),
    }
    (place / "found.json").write_text(json.dumps(found))


def walked(
    run: Callable[[], object], source: Path, within: str = ""
) -> tuple[set[CodeType], set[CodeType]]:
    """The functions below a folder that are called while `run` runs, in any thread.

    Of these, the second set has those that are called while a function named `within` runs.
    """
    found: set[CodeType] = set()
    inside_of: set[CodeType] = set()
    depth = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        if frame.f_code.co_name == within:
            depth += {"call": 1, "return": -1}.get(event, 0)
        if event == "call":
            found.add(frame.f_code)
            if depth:
                inside_of.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    own = {code for code in found if is_function_of(code, source)}
    return own, own & inside_of


def is_function_of(code: CodeType, source: Path) -> bool:
    """Whether a code object is a function of a file below a folder."""
    path = Path(code.co_filename).resolve().as_posix()
    is_function = code.co_flags & CO_OPTIMIZED  # bodies of classes are not
    is_named = not code.co_name.startswith("<")  # modules, lambdas, comprehensions
    return path.startswith(f"{source}{os.sep}") and bool(is_function) and is_named


def counted(passed: Iterable[CodeType], source: Path) -> dict[str, int]:
    """How many functions of each package were called."""
    found = Counter(package_of(Path(code.co_filename).resolve(), source) for code in passed)
    return dict(sorted(found.items()))


def listed(passed: Iterable[CodeType], source: Path) -> dict[str, dict[str, list[str]]]:
    """The functions that were called, in the order of their files: package -> file -> names."""
    found: dict[str, dict[str, list[str]]] = {}
    for code in sorted(passed, key=lambda one: (one.co_filename, one.co_firstlineno)):
        path = Path(code.co_filename).resolve()
        files = found.setdefault(package_of(path, source), {})
        files.setdefault(str(path.relative_to(source)), []).append(code.co_qualname)
    return found


def walk_table(walk: dict[str, dict[str, list[str]]]) -> str:
    """The functions that one image passes, as text: a heading per package, a line per file."""
    lines = []
    for package, files in walk.items():
        count = sum(map(len, files.values()))
        lines += ["", f"{package}: {count} functions in {len(files)} files"]
        for path, names in files.items():
            lines.append(f"  {path} ({len(names)}): {', '.join(names)}")
    return "\n".join(lines).strip()


def one_image(place: Path) -> None:
    """Compare Grad-CAM on one image by the command line, without controls."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    (place / "images" / "3").mkdir(parents=True)
    Image.fromarray(pixels).save(place / "images" / "3" / "a.png")
    words = ["compare", "--model", "sufficit:digits", "--data", str(place / "images")]
    words += ["--methods", "gradcam", "--device", "cpu", "--out", str(place / "out")]
    if command(*words, *without_controls()):
        raise SystemExit("compare failed: see above")


def without_controls() -> list[str]:
    """How this checkout's compare leaves out the controls, and nothing else."""
    from sufficit.runs import config

    usual = getattr(config, "DEFAULT_CHECKS", None)
    if usual is None:
        return ["--no-controls"]
    return ["--checks", ",".join(one for one in usual if one != "controls")]


def flags(word: str) -> set[str]:
    """The options that a help of compare lists."""
    from io import StringIO

    text = StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(StringIO()):
        command("compare", word)
    return {*FLAG.findall(text.getvalue())} - {"--help", "--help-all"}


def command(*words: str) -> int:
    """Run a command of sufficit in this process, and return its exit code."""
    from sufficit.cli import main

    sys.argv = ["sufficit", *words]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def table(found: dict[str, Any]) -> str:
    """The yardsticks as lines of a table."""
    lines = [f"| {name} | {in_words(value)} |" for name, value in found.items()]
    return "\n".join(["| yardstick | |", "|---|---|", *lines])


def in_words(value: Any) -> str:
    """A number, or several by name."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(one)}" for name, one in value.items())
    return f"{value:,}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=HERE)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--walk", action="store_true", help="list what one image passes")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.root, given.inside)
    elif given.walk:
        print(walk_table(told_inside(given.root)[WALK]))
    else:
        found = yardsticks(given.root)
        print(json.dumps(found, indent=1) if given.json else table(found))
