"""Write tests/messages.txt: every error message of the package, with {} for what is filled in.

    python tools/messages.py

A test compares the file with the source, so that each change of a message is read as a sentence.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "sufficit", ROOT / "tests" / "messages.txt"
ERRORS = ("UserError", "GoneError", "SkipError", "NotFiniteError", "BadImageError")


def texts(node: ast.expr, scope: ast.AST) -> Iterator[str]:
    """The texts that an expression may be; {} stands for what is filled in.

    A name stands for all that the same function assigns to it.
    """
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "{}"  # type: ignore[misc]
                for part in parts
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            for first in texts(left, scope):
                for second in texts(right, scope):
                    yield first + second
        case ast.IfExp(body=one, orelse=other):
            yield from texts(one, scope)
            yield from texts(other, scope)
        case ast.Name(id=name):
            found = [text for value in _assigned(name, scope) for text in texts(value, scope)]
            yield from found or ["{}"]
        case _:
            yield "{}"


def _assigned(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value


def messages(path: Path) -> list[str]:
    """The messages of the errors that a module raises, in the order of its lines."""
    tree = ast.parse(path.read_text())
    found: list[str] = []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in ERRORS and node.args:
                around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
                scope = max(around, key=lambda one: one.lineno, default=tree)
                found += texts(node.args[0], scope)
    # A text without words is made elsewhere, mostly of another error.
    return sorted({" ".join(text.split()) for text in found if text.strip("{} .:")})


def page() -> str:
    """Every message below the name of its module."""
    found = {path: messages(path) for path in sorted(SOURCE.rglob("*.py"))}
    parts = [
        "\n  ".join([path.relative_to(SOURCE).as_posix(), *lines])
        for path, lines in found.items()
        if lines
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
