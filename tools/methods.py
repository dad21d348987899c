"""Write the table of methods in docs/methods.md from the registry.

python tools/methods.py
"""

from pathlib import Path

from sufficit.explainers.registry import EXPLAINERS

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
START, END = "<!-- methods -->\n", "<!-- end of methods -->"
HEADS = ("method", "what it draws", "for", "cost", "nets", "class", "options")


def rows() -> list[tuple[str, ...]]:
    """One row per method."""
    found = []
    for name, one in EXPLAINERS.items():
        paper = f" ({one.reference})" if one.reference else ""
        needs = f"; extra `{one.extra}`" if one.extra else ""
        given = ", ".join(f"`{option}={value.default}`" for option, value in one.takes.items())
        about = (f"`{name}`", f"{one.description}{paper}{needs}", one.what_for, str(one.passes))
        found.append((*about, one.nets, "no" if one.class_agnostic else "yes", given))
    return found


def page(text: str) -> str:
    """The page with the table of today's registry."""
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    lines = [HEADS, ("---",) * len(HEADS), *rows()]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{head}{START}{table}{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
