"""Write docs/messages.md: every error message of the package with its remedy, from the source.

python tools/messages.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "messages.md"
SOURCE = ROOT / "src" / "sufficit"
IMAGE_ERRORS = ("BadImageError", "LargeImageError", "NotAnImageError")
ERRORS = ("UserError", "HeatmapError", *IMAGE_ERRORS)
AREAS = {
    "cli": "Command line",
    "runs": "Runs: compare, evaluate, explain",
    "classifier": "Models",
    "data": "Images and heatmap files",
    "explainers": "Methods and adapters",
    "metrics": "Scores and leakage",
    "perturbation": "Masks and fills",
    "training": "Training",
    "sanity": "Sanity checks",
    "reproduce": "The paper's tables",
    "report": "Reports",
    "plots": "Figures",
    "web": "The page",
}
SKIPPED = "The image is skipped and listed in run.json. Fix or remove the file."
HEAD = """# Error messages

Every error that Sufficit raises on purpose (`UserError`), with its remedy. `{...}` is filled in
when the error occurs. On the command line an error is one line on standard error and the exit code
is 2; `SUFFICIT_TRACEBACK=1` shows the traceback of an unexpected one.

This page is written by `tools/messages.py` from the source; a test keeps it current.
"""


def messages() -> dict[str, list[tuple[str, str]]]:
    """Every message by area, as (what failed, remedy), in alphabetical order."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).parts[0]
        area = AREAS.get(place, "Elsewhere")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if path.name != "errors.py" and name in ERRORS and (text := _text(node.args[0])):
                problem, remedy = split(text)
                if name in IMAGE_ERRORS:
                    remedy = remedy or SKIPPED
                found.setdefault(area, set()).add((problem, remedy))
            elif name == "unknown" and (kind := _text(node.args[0])):
                problem = f"Unknown {kind} {{value}}. Did you mean {{nearest}}?"
                found.setdefault(area, set()).add((problem, "Use one of the known values listed."))
    order = [*AREAS.values(), "Elsewhere"]
    return {area: sorted(found[area]) for area in order if area in found}


def split(text: str) -> tuple[str, str]:
    """A message as what failed, and what to do: after the last colon, or the last sentence."""
    text = text.strip()
    verbs = "be |lie in |name |have |hold |give |return "
    wanted = re.fullmatch(rf".+? (?:must|needs|is) (?:{verbs})?(.+?),? (?:but )?got .+", text)
    for mark in (": ", ". ", "; "):
        problem, found, remedy = text.rstrip(".").rpartition(mark)
        if found and len(remedy) > 5 and not remedy.startswith("{"):
            return problem, remedy[0].upper() + remedy[1:].rstrip(".") + "."
    if wanted:
        return text, f"Give {wanted[1]}."
    if re.search(r"\{(remedy|advice|enough|limit|hint)\}", text):
        return text, "The end of the message says what to do."
    if re.search(r"\{(error|strerror|reason|wrong|\.\.\.)\}", text):
        return (
            text,
            "The message gives the reason: fix the file or its permissions, or give another.",
        )
    return text, ""


def render() -> str:
    """The page."""
    parts = [HEAD]
    for area, listed in messages().items():
        parts.append(f"\n## {area}\n\n| message | remedy |\n|---|---|\n")
        parts += [f"| {_cell(problem)} | {_cell(remedy)} |\n" for problem, remedy in listed]
    return "".join(parts)


def _text(node: ast.expr) -> str:
    """The text of a string or f-string, expressions as {name}; empty where it is neither."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
            else f"{{{_name(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    return ""


def _name(node: ast.expr) -> str:
    """A short name for an expression in a message."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return _name(node.args[0]) if node.args else _name(node.func)
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return "..."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
